//! Images at the far end: captures that are kept until they are drained, and the files that a
//! client is restored from.

use crate::executor::{Build, Captured, Identity, NearEnd, Room, Stored};
use crate::local::{Local, Taken};
use kedge_control::joblog::JobLog;
use kedge_device::Drained as FromDevices;
use kedge_image::{Choice, ImageError, ImageWriter, Layers};
use kedge_remote::{
    Answer, Capture, DrainSink, Drained, FrameError, ImageAsk, StoredFile, far_layers, read_one,
};
use kedge_wire::Text;
use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// For the near end to say what a connection is for, and to read or send the next bytes.
const SILENCE: Duration = Duration::from_secs(120);
/// Longest first word: the names of all files.
const MAX_ASK: usize = 2 << 20;
/// Connections at a time.
const MAX_CONNECTIONS: usize = 4;
/// The file's name here, for errors.
const NAME: &str = "the image at the near end";

#[derive(Default)]
pub(crate) struct Images {
    kept: Mutex<Kept>,
    restore_came: Condvar,
    connections: AtomicUsize,
}

#[derive(Default)]
struct Kept {
    /// The newest capture's number.
    last: u64,
    capture: Option<Taken>,
    room: Option<Arc<dyn Room>>,
    /// What a client is to be restored from.
    restore: Option<(TcpStream, Vec<StoredFile>)>,
}

impl Images {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There is somebody who makes room for captures.
    pub(crate) fn set_room(&self, room: Arc<dyn Room>) {
        self.kept().room = Some(room);
    }

    /// Captures what the devices hold, and keeps that instead of what was captured before.
    pub(crate) fn capture(
        &self,
        executor: &mut Local,
        of: Capture,
        gpu: &str,
        shared: BorrowedFd<'_>,
    ) -> Answer {
        let Capture { hello, client_memory, devices, position, track, parent } = of;
        let (gpu, devices) = (gpu.to_owned(), devices.into_inner());
        let identity = Identity { gpu, hello, client_memory, devices };
        let near = NearEnd { identity: &identity, shared, position };
        // There is memory for one.
        self.kept().capture = None;
        match executor.take(&near, Build { track, parent }) {
            Ok(taken) => {
                let bytes = taken.bytes();
                let kept = &mut *self.kept();
                kept.last += 1;
                kept.capture = Some(taken);
                Answer::Captured { number: kept.last, bytes }
            }
            Err(error) => Answer::Failed { why: Text::truncated(error.to_string()) },
        }
    }

    /// Nobody wants a capture any more.
    pub(crate) fn forget(&self, number: u64) {
        drop(self.take(number));
    }

    fn take(&self, number: u64) -> Option<Taken> {
        let mut kept = self.kept();
        if kept.last == number { kept.capture.take() } else { None }
    }

    /// Serves a connection on a thread of its own.
    pub(crate) fn connected(self: &Arc<Images>, stream: TcpStream, log: Arc<JobLog>) {
        if self.connections.fetch_add(1, Ordering::SeqCst) >= MAX_CONNECTIONS {
            self.connections.fetch_sub(1, Ordering::SeqCst);
            return;
        }
        let images = self.clone();
        let serve = move || {
            if let Err(error) = images.serve(stream) {
                log.line(&format!("the connection for an image's bytes: {error}"));
            }
            images.connections.fetch_sub(1, Ordering::SeqCst);
        };
        if std::thread::Builder::new().name("image".into()).spawn(serve).is_err() {
            self.connections.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn serve(&self, mut stream: TcpStream) -> Result<(), FrameError> {
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        match read_one(&mut stream, MAX_ASK)? {
            ImageAsk::Drain { number, codec } => self.drain(number, &codec, stream)?,
            ImageAsk::Prepare { track, full } => {
                let room = self.kept().room.clone();
                let prepared = room.map_or(Ok(()), |room| room.prepare(track, full));
                let sink = DrainSink::new(stream);
                match prepared {
                    Ok(()) => sink.end(&done(0, 0, false, FromDevices::default()))?,
                    Err(error) => sink.fail(error.to_string())?,
                }
            }
            ImageAsk::Restore { files } => {
                self.kept().restore = Some((stream, files.into_inner()));
                self.restore_came.notify_all();
            }
        }
        Ok(())
    }

    /// Writes a capture at the near end.
    fn drain(&self, number: u64, codec: &str, stream: TcpStream) -> std::io::Result<()> {
        let sink = DrainSink::new(stream);
        let Some(taken) = self.take(number) else {
            return sink.fail("it has no such capture any more".into());
        };
        let Ok(codec) = codec.parse::<Choice>() else {
            return sink.fail(format!("no such codec: {codec}"));
        };
        let writer = ImageWriter::elsewhere(NAME, Box::new(sink.clone()));
        let written = writer.map_err(Into::into).and_then(|writer| taken.write_by(writer, codec));
        match written {
            Ok(Stored { entry, builds, drained }) => {
                sink.end(&done(entry.bytes, entry.checksum, builds, drained))
            }
            Err(error) => sink.fail(error.to_string()),
        }
    }

    /// Waits until the near end offers what a client is to be restored from; `None` where it does
    /// not, for `limit`.
    pub(crate) fn offered(&self, limit: Duration) -> Option<Result<Layers, ImageError>> {
        let none_yet = |kept: &mut Kept| kept.restore.is_none();
        let waited = self.restore_came.wait_timeout_while(self.kept(), limit, none_yet);
        let (mut kept, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let (stream, files) = kept.restore.take()?;
        let again = stream.try_clone();
        let failed = |source| ImageError::Io { path: NAME.into(), source };
        Some(again.map_err(failed).and_then(|reading| far_layers(reading, stream, &files)))
    }
}

fn done(bytes: u64, checksum: u64, builds: bool, left: FromDevices) -> Drained {
    let drained_us = u64::try_from(left.time.as_micros()).unwrap_or(u64::MAX);
    Drained::Done { bytes, checksum, builds, drained: left.bytes, drained_us }
}
