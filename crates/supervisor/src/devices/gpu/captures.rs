//! What proxies have captured, and the files of an image that they write it to.

use super::checkpoint::GpuCheckpoint;
use super::{Client, LIMIT};
use crate::base::phases;
use crate::devices::quiesce::Resting;
use crate::services::keeper::At;
use kedge_control::joblog::JobLog;
use kedge_control::proxy::{Answer, Control, ControlError, Order, WrittenFile};
use kedge_control::warn;
use kedge_cuda_types::arena::MAX_DEVICES;
use kedge_gpu_image::place_file;
use kedge_image::{Choice, Claim, FileEntry, ImageError, Manifest};
use kedge_process::plugins::{Plugin, PluginError};
use kedge_process::{Captured, EngineError};
use kedge_socket::frame::MAX_FDS;
use kedge_wire::Text;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

/// What the devices of a job held, until it is written or this is dropped.
#[derive(Debug)]
pub(crate) struct Captures {
    /// What has them captured.
    gpu: Arc<GpuCheckpoint>,
    /// With the names of their files.
    clients: Vec<(String, Resting)>,
}

impl Captures {
    /// Returns what the clients of `gpu` will have captured.
    pub(crate) fn of(gpu: GpuCheckpoint) -> Captures {
        let named = |client: &Client| (client.file(), client.resting.clone());
        let clients = gpu.clients.iter().map(named).collect();
        Captures { gpu: Arc::new(gpu), clients }
    }

    /// Returns the plugin by which a checkpoint captures them.
    pub(crate) fn plugin(&self) -> Arc<dyn Plugin> {
        self.gpu.clone()
    }

    /// Waits for all proxies that have been asked to capture: one that fails has told why.
    pub(crate) fn settle(&self) {
        let _ = self.gpu.settle();
    }

    /// Writes everything, the processes' memory side by side with the devices': the image that
    /// `claim` is for. With a `holder`, whose troubles the log tells, has it held in memory as
    /// well; of how many clients it is, if of all.
    pub(crate) fn write(
        mut self,
        captured: Captured,
        manifest: Manifest,
        claim: &Claim,
        codec: Choice,
        holder: Option<(&At, &JobLog)>,
    ) -> Result<(Manifest, Option<u32>), EngineError> {
        let clients = std::mem::take(&mut self.clients);
        let all = clients.len() as u32;
        let held = &AtomicU32::new(0);
        let save = |name: String, client: &Resting| {
            if holder.is_some_and(|holder| hold(client, claim.folder(), &name, holder)) {
                held.fetch_add(1, Ordering::SeqCst);
            }
            let written = write(client, claim, name, codec);
            if written.is_err() {
                // It may not have heard that it is to write, and hold what was captured.
                let _ = client.proxy.control.does(&Order::Forget {}, LIMIT);
            }
            written
        };
        let save = &save;
        let manifest = thread::scope(|scope| {
            let written: Vec<_> = clients
                .into_iter()
                .map(|(name, client)| scope.spawn(move || save(name, &client)))
                .collect();
            captured.finish_with(manifest, || {
                let nonsense = || Err(PluginError::Refused("a thread has failed".into()));
                let (mut files, mut build) = (Vec::new(), false);
                for one in written {
                    let (written, builds) = one.join().unwrap_or_else(|_| nonsense())?;
                    files.extend(written);
                    build |= builds;
                }
                phases::checkpointed("written");
                Ok((files, build))
            })
        })?;
        let held = held.load(Ordering::SeqCst);
        Ok((manifest, Some(held).filter(|held| *held == all && all > 0)))
    }
}

impl Drop for Captures {
    fn drop(&mut self) {
        // A checkpoint may have failed while they captured.
        self.settle();
        for (_, client) in &self.clients {
            // One that does not hear it has ended, and what it held with it.
            let _ = client.proxy.control.does(&Order::Forget {}, LIMIT);
        }
    }
}

/// Has what one client's devices held be held in memory. Where it cannot be, the log tells why.
fn hold(client: &Resting, folder: &Path, name: &str, (keeper, log): (&At, &JobLog)) -> bool {
    let held = keeper.connection(folder, name).map_err(|error| error.to_string());
    let held = held.and_then(|keeper| {
        yes(&client.proxy.control, &Order::Hold {}, &[keeper.as_fd()])
            .map_err(|error| error.to_string())
    });
    if let Err(error) = &held {
        warn!(log, "process {}: nothing is held in memory: {error}", client.pid);
    }
    held.is_ok()
}

/// Gives an order that is answered with yes.
fn yes(control: &Control, order: &Order, fds: &[BorrowedFd<'_>]) -> Result<(), ControlError> {
    match control.ask(order, fds, LIMIT)? {
        Answer::Yes {} => Ok(()),
        _ => Err(ControlError::Nonsense),
    }
}

/// Makes the files that one client's devices need, and has them written by their descriptors: its
/// proxy needs no way to the folder, and no right to it. Returns the files, and whether any builds
/// on another.
fn write(
    client: &Resting,
    claim: &Claim,
    name: String,
    codec: Choice,
) -> Result<(Vec<FileEntry>, bool), PluginError> {
    let control = &client.proxy.control;
    // The proxy knows the file's name alone.
    let refused = |pid, error: &ControlError| {
        let folder = claim.folder().display();
        PluginError::Refused(format!("the devices of process {pid}, for {folder}: {error}"))
    };
    let places = match control.ask(&Order::Places {}, &[], LIMIT) {
        Ok(Answer::Places { count }) if count <= MAX_DEVICES => count as usize,
        Ok(_) => return Err(refused(client.pid, &ControlError::Nonsense)),
        Err(error) => return Err(refused(client.pid, &error)),
    };
    let beside = (0..places).map(|place| claim.create(&place_file(&name, place)));
    let beside = beside.collect::<Result<Vec<File>, ImageError>>()?;
    for some in beside.chunks(MAX_FDS) {
        let fds: Vec<BorrowedFd<'_>> = some.iter().map(AsFd::as_fd).collect();
        yes(control, &Order::Beside {}, &fds).map_err(|error| refused(client.pid, &error))?;
    }
    let own = claim.create(&name)?;
    let codec = Text::truncated(codec.to_string());
    let order = Order::Write { name: Text::truncated(name.clone()), codec };
    match control.ask(&order, &[own.as_fd()], LIMIT) {
        Ok(Answer::Written { bytes, checksum, builds }) if beside.is_empty() => {
            Ok((vec![FileEntry { name, bytes, checksum }], builds))
        }
        Ok(Answer::WrittenAll { files, builds }) => {
            let is_its = |(at, file): (usize, &WrittenFile)| {
                let place = at.checked_sub(1).map(|place| place_file(&name, place));
                *file.name == *place.as_ref().unwrap_or(&name)
            };
            if files.len() != 1 + beside.len() || !files.iter().enumerate().all(is_its) {
                return Err(refused(client.pid, &ControlError::Nonsense));
            }
            let entry = |file: WrittenFile| {
                let WrittenFile { name, bytes, checksum } = file;
                FileEntry { name: name.into_inner(), bytes, checksum }
            };
            Ok((files.into_inner().into_iter().map(entry).collect(), builds))
        }
        Ok(_) => Err(refused(client.pid, &ControlError::Nonsense)),
        Err(error) => Err(refused(client.pid, &error)),
    }
}
