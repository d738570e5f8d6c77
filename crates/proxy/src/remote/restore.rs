//! Bringing a client back whose devices are on another machine: its near end has the image, whose
//! files the far end reads to build the devices from.

use super::image_way::ImageStream;
use super::open::{Client, open_session};
use super::session::Session;
use super::shared_in;
use crate::error::RestoreError;
use crate::host::ProxyHost;
use kedge_control::gpu::Server;
use kedge_gpu_image::{SavedObject, SavedProxy};
use kedge_image::Layers;
use kedge_protocol::{DeviceChoice, Welcome};
use kedge_remote::{Answer, ImageAsk, named, serve_files};
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// For the far end to build everything.
const LIMIT: Duration = Duration::from_secs(3600);

/// A client that is to be brought back.
pub(crate) struct Gone<'a> {
    pub(crate) layers: &'a Layers,
    pub(crate) saved: &'a SavedProxy,
    /// Which of the session's devices it sees, and as which of its own it counts them: all where
    /// that is empty.
    pub(crate) choice: &'a DeviceChoice,
    pub(crate) windows: &'a [u32],
    pub(crate) host: &'a Arc<ProxyHost>,
    pub(crate) shared: &'a OwnedFd,
    /// The client's, for descriptors.
    pub(crate) socket: BorrowedFd<'a>,
    /// How long to try to go on after a cut.
    pub(crate) reconnect: Duration,
}

/// Opens a session whose far end has the client's devices as they were. The arena has what the
/// image has of it.
pub(crate) fn restore(
    server: &Server,
    devices: &[u32],
    gone: &Gone<'_>,
) -> Result<(Session, Welcome), RestoreError> {
    let Gone { layers, saved, choice, windows, host, shared, socket, reconnect } = *gone;
    let (hello, restore) = (&saved.hello, Some(saved.position));
    let client = Client { hello, choice, windows, host, shared, socket, reconnect, restore };
    let (session, welcome) = open_session(server, devices, &client)?;
    session.agree(arenas(saved), shared_in(saved));
    session.remember(&saved.steps);
    let stream = session.way().open(&ImageAsk::Restore { files: named(layers)? })?;
    let ImageStream { reading, writing, end } = stream;
    // It may be busy with what it has read for as long as it needs.
    reading.set_patience(None);
    let answer = std::thread::scope(|scope| {
        // Whoever asks hears of what goes wrong.
        scope.spawn(|| serve_files(reading, writing, layers));
        let answer = session.answer(LIMIT);
        drop(end);
        answer
    });
    match answer {
        Some(Answer::Yes {}) => Ok((session, welcome)),
        Some(Answer::Failed { why }) => Err(RestoreError::Far(why.into_inner())),
        _ => Err(RestoreError::Far("it does not answer".into())),
    }
}

/// The parts of the shared arena that an image has.
pub(crate) fn arenas(saved: &SavedProxy) -> impl Iterator<Item = Range<u64>> {
    saved.objects.iter().filter_map(|(_, object)| match object {
        SavedObject::Arena { start, bytes } => Some(*start..start.saturating_add(*bytes)),
        _ => None,
    })
}
