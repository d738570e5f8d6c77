//! Images at the far end: captures that are kept until they are drained, or have crossed to another
//! proxy, and what a client is restored from.

use super::handed::{Handed, NewLink};
use super::moving::replies;
use crate::error::CaptureError;
use crate::error::LineError;
use crate::executor::{Build, Captured, Executor, Identity, NearEnd, Room, Stored};
use crate::local::{Local, Taken};
use crate::moving::{Crossed, Follows, Shown, Way};
use kedge_control::joblog::JobLog;
use kedge_control::warn;
use kedge_device::Drained as FromDevices;
use kedge_image::{Choice, ImageError, ImageWriter, Layers};
use kedge_remote::{
    Answer, Capture, DrainSink, Drained, FrameError, ImageAsk, Links, Receiver, Sender, StoredFile,
    Which, far_layers, read_one,
};
use kedge_wire::Text;
use std::collections::HashMap;
use std::io::{self, Read};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// For the near end to say what a link is for, and to send the next bytes.
const SILENCE: Duration = Duration::from_secs(120);
/// Longest first word: the names of all files.
const MAX_ASK: usize = 2 << 20;
/// The file's name here, for errors.
const NAME: &str = "the image at the near end";

#[derive(Default)]
pub(crate) struct Images {
    kept: Mutex<Kept>,
    came: Condvar,
}

/// What a client is to go on from.
pub(super) enum Offered {
    /// An image's files, at the near end.
    Files(Box<Layers>),
    /// Another proxy, which this leads to.
    Proxy(FilesLine, Sender),
}

#[derive(Default)]
struct Kept {
    /// The newest capture's number.
    last: u64,
    capture: Option<Taken>,
    room: Option<Arc<dyn Room>>,
    /// What is to cross to another proxy, by its number, and what that one has already.
    shown: Option<(u64, Box<dyn Shown>)>,
    follows: Follows,
    /// What a client is to go on from; of an image, its files.
    offered: Option<(FilesLine, Option<Vec<StoredFile>>)>,
    /// Links that the near end has not said to be over, by number.
    links: HashMap<u32, Arc<Links>>,
}

/// The reading end of a link that the files of an image cross by; ends it with its value.
pub(super) struct FilesLine {
    links: Arc<Links>,
    reading: Receiver<Handed>,
}

impl Read for FilesLine {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.reading.read(into)
    }
}

impl Drop for FilesLine {
    fn drop(&mut self) {
        self.links.end();
    }
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
        let Capture { track, parent, position, .. } = of;
        let identity = identity(of, gpu);
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
            Err(error) => failed(error),
        }
    }

    /// Takes what the devices hold for a round of a move, and keeps that instead of what was taken
    /// before; `first`: nothing has crossed to where it goes.
    pub(crate) fn show(
        &self,
        executor: &mut Local,
        of: Capture,
        first: bool,
        gpu: &str,
        shared: BorrowedFd<'_>,
    ) -> Answer {
        let follows = std::mem::take(&mut self.kept().follows);
        let follows = match (first, follows) {
            (true, _) => Follows::Nothing,
            (false, follows @ Follows::Here(_)) => follows,
            // The near end has taken for crossed what has not.
            (false, _) => return failed("what has crossed is not known"),
        };
        let position = of.position;
        let identity = identity(of, gpu);
        let near = NearEnd { identity: &identity, shared, position };
        self.kept().shown = None;
        match executor.show(&near, follows) {
            Ok(shown) => {
                let bytes = shown.bytes();
                let kept = &mut *self.kept();
                kept.last += 1;
                kept.shown = Some((kept.last, shown));
                Answer::Captured { number: kept.last, bytes }
            }
            Err(error) => failed(error),
        }
    }

    /// Nobody wants a capture any more.
    pub(crate) fn forget(&self, number: u64) {
        drop(self.take(number));
        drop(self.take_shown(number));
    }

    fn take_shown(&self, number: u64) -> Option<Box<dyn Shown>> {
        let shown = &mut self.kept().shown;
        shown.take_if(|(of, _)| *of == number).map(|(_, shown)| shown)
    }

    fn take(&self, number: u64) -> Option<Taken> {
        let mut kept = self.kept();
        if kept.last == number { kept.capture.take() } else { None }
    }

    /// Serves a link on a thread of its own.
    pub(super) fn begun(self: &Arc<Images>, link: NewLink, log: Arc<JobLog>) {
        let NewLink { number, links, reading } = link;
        self.kept().links.insert(number, links.clone());
        let (images, serves) = (self.clone(), links.clone());
        let serve = move || {
            if let Err(error) = images.serve(FilesLine { links: serves, reading }) {
                warn!(log, "the connection for an image's bytes: {error}");
            }
        };
        if std::thread::Builder::new().name("image".into()).spawn(serve).is_err() {
            links.end();
        }
    }

    /// The near end has no more use for a link.
    pub(super) fn over(&self, number: u32) {
        if let Some(links) = self.kept().links.remove(&number) {
            links.end();
        }
    }

    fn serve(&self, mut line: FilesLine) -> Result<(), FrameError> {
        line.reading.set_patience(Some(SILENCE));
        let asked = read_one(&mut line, MAX_ASK)?;
        line.reading.set_patience(None);
        let asked = match asked {
            ImageAsk::Restore { files } => {
                return self.offer(line, Some(files.into_inner()));
            }
            ImageAsk::Arrive {} => return self.offer(line, None),
            ImageAsk::Cross { number, last } => return self.cross(line, number, last),
            ImageAsk::Drain { .. } | ImageAsk::Prepare { .. } => asked,
        };
        let links = line.links.clone();
        let sink = DrainSink::new(Sender::waiting(links.clone(), Which::Line));
        std::thread::scope(|scope| {
            // Whoever reads hears what has arrived, and so makes room: until the near end says that
            // it has the last word, or has been away for too long.
            scope.spawn(|| line.read(&mut [0]));
            self.answer(asked, &sink).inspect_err(|_| links.end())
        })?;
        Ok(())
    }

    fn offer(&self, line: FilesLine, files: Option<Vec<StoredFile>>) -> Result<(), FrameError> {
        self.kept().offered = Some((line, files));
        self.came.notify_all();
        Ok(())
    }

    /// Has what was shown cross to another proxy.
    fn cross(&self, mut line: FilesLine, number: u64, last: bool) -> Result<(), FrameError> {
        let links = line.links.clone();
        let mut to = Sender::waiting(links.clone(), Which::Line);
        let sink = DrainSink::new(Sender::waiting(links.clone(), Which::Line));
        std::thread::scope(|scope| {
            let mut reply = replies(scope, &mut line);
            let crossed = self.cross_by(
                number,
                last,
                &mut Way { to: &mut to, reply: &mut reply, socket: None },
            );
            let told = match crossed {
                Ok(bytes) => sink.end(&done(bytes, 0, false, FromDevices::default())),
                Err(error) => sink.fail(error.to_string()),
            };
            told.inspect_err(|_| links.end())
        })?;
        Ok(())
    }

    fn cross_by(&self, number: u64, last: bool, way: &mut Way<'_>) -> Result<u64, CaptureError> {
        let mut shown = self.take_shown(number).ok_or(LineError::Order)?;
        let Some(Crossed { bytes, follows }) = shown.cross(last, way)? else { return Ok(0) };
        let mut kept = self.kept();
        kept.follows = follows;
        if last {
            // To let go of it takes time that the client would wait for.
            kept.shown = Some((number, shown));
        }
        Ok(bytes)
    }

    fn answer(&self, asked: ImageAsk, sink: &DrainSink<Sender>) -> io::Result<()> {
        match asked {
            ImageAsk::Drain { number, codec } => self.drain(number, &codec, sink),
            ImageAsk::Prepare { track, full } => {
                let room = self.kept().room.clone();
                match room.map_or(Ok(()), |room| room.prepare(track, full)) {
                    Ok(()) => sink.end(&done(0, 0, false, FromDevices::default())),
                    Err(error) => sink.fail(error.to_string()),
                }
            }
            ImageAsk::Restore { .. } | ImageAsk::Arrive {} | ImageAsk::Cross { .. } => {
                sink.fail("it is asked of another".into())
            }
        }
    }

    /// Writes a capture at the near end.
    fn drain(&self, number: u64, codec: &str, sink: &DrainSink<Sender>) -> io::Result<()> {
        let Some(taken) = self.take(number) else {
            return sink.fail("it has no such capture any more".into());
        };
        let Ok(codec) = codec.parse::<Choice>() else {
            return sink.fail(format!("no such codec: {codec}"));
        };
        let writer = ImageWriter::elsewhere(NAME, Box::new(sink.clone()));
        let written = writer.map_err(Into::into).and_then(|writer| taken.write_by(writer, codec));
        match written {
            Ok(Stored { entry, builds, drained, .. }) => {
                sink.end(&done(entry.bytes, entry.checksum, builds, drained))
            }
            Err(error) => sink.fail(error.to_string()),
        }
    }

    /// Waits until the near end offers what a client is to go on from; `None` where it does not,
    /// for `limit`.
    pub(super) fn offered(&self, limit: Duration) -> Option<Result<Offered, ImageError>> {
        let none_yet = |kept: &mut Kept| kept.offered.is_none();
        let waited = self.came.wait_timeout_while(self.kept(), limit, none_yet);
        let (mut kept, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let (line, files) = kept.offered.take()?;
        let sender = Sender::waiting(line.links.clone(), Which::Line);
        let Some(files) = files else {
            // The other may be silent for as long as its client runs.
            return Some(Ok(Offered::Proxy(line, sender)));
        };
        line.reading.set_patience(Some(SILENCE));
        Some(far_layers(line, sender, &files).map(|layers| Offered::Files(Box::new(layers))))
    }
}

/// Whose devices are captured, as the near end says.
fn identity(of: Capture, gpu: &str) -> Identity {
    let Capture { hello, client_memory, devices, .. } = of;
    Identity { gpu: gpu.to_owned(), hello, client_memory, devices: devices.into_inner() }
}

fn failed(why: impl ToString) -> Answer {
    Answer::Failed { why: Text::truncated(why.to_string()) }
}

fn done(bytes: u64, checksum: u64, builds: bool, left: FromDevices) -> Drained {
    let drained_us = u64::try_from(left.time.as_micros()).unwrap_or(u64::MAX);
    Drained::Done { bytes, checksum, builds, drained: left.bytes, drained_us }
}
