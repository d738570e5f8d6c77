//! A capture's file as it crosses from the far end to the near one.

use crate::connect::ConnectError;
use crate::frame::{FrameError, Frames, Sending};
use crate::messages::{CHUNK, Drained, LINE};
use kedge_image::Sink;
use kedge_wire::{Bytes, Text};
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};
use thiserror::Error;

/// Fewest bytes that a piece counts for, so that pieces of nothing come to an end as well.
const MIN_COST: u64 = 64;

/// Why the bytes of an image did not cross.
#[derive(Debug, Error)]
pub enum ImageLineError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the connection for an image's bytes: {0}")]
    Line(#[from] FrameError),
    #[error("{0}")]
    Far(String),
    #[error("a file of {0} bytes is more than was captured")]
    TooLong(u64),
    #[error("it does not end: more has come than the {0} bytes that a file may have")]
    Endless(u64),
    #[error("cannot store its bytes: {0}")]
    Store(io::Error),
}

/// What a file that has crossed is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrived {
    pub bytes: u64,
    pub checksum: u64,
    /// Whether it refers to the file before it.
    pub builds: bool,
    /// What left the devices for it, and within how many microseconds.
    pub drained: u64,
    pub drained_us: u64,
}

/// The far end's side: a file that is written at the near end.
pub struct DrainSink<S>(Arc<Mutex<Sending<S>>>);

impl<S> fmt::Debug for DrainSink<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DrainSink")
    }
}

impl<S> Clone for DrainSink<S> {
    fn clone(&self) -> DrainSink<S> {
        DrainSink(self.0.clone())
    }
}

impl<S: Write> DrainSink<S> {
    pub fn new(stream: S) -> DrainSink<S> {
        DrainSink(Arc::new(Mutex::new(Sending::new(stream))))
    }

    /// Says the last word, whatever it is.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn end(&self, last: &Drained) -> io::Result<()> {
        let mut sending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sending.add(last)?;
        sending.flush()
    }

    /// Says as the last word that there is no file.
    ///
    /// # Errors
    /// As [`DrainSink::end`].
    pub fn fail(&self, why: String) -> io::Result<()> {
        self.end(&Drained::Failed { why: Text::<LINE>::truncated(why) })
    }
}

impl<S: Write + Send> Sink for DrainSink<S> {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut at = offset;
        bytes.chunks(CHUNK).try_for_each(|part| {
            let bytes = Bytes::new(part.to_vec()).unwrap_or_default();
            let mut sending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            sending.add(&Drained::Piece { offset: at, bytes })?;
            at += part.len() as u64;
            Ok(())
        })
    }

    /// Ends it; the last word tells the length.
    fn finish(&self, _: u64) -> io::Result<()> {
        Ok(())
    }
}

/// Stores what comes in the new `file`, up to the last word, and makes it durable. It may have
/// `most` bytes, and all that comes no more than that: each byte is sent once, but for headers.
///
/// # Errors
/// The far end fails, the connection or the file does, or more comes than may.
pub fn receive_file(stream: impl Read, file: &File, most: u64) -> Result<Arrived, ImageLineError> {
    let mut frames = Frames::new(stream);
    let mut left = most;
    loop {
        match frames.receive::<Drained>()? {
            Drained::Piece { offset, bytes } => {
                let counts = (bytes.len() as u64).max(MIN_COST);
                left = left.checked_sub(counts).ok_or(ImageLineError::Endless(most))?;
                let end = offset.saturating_add(bytes.len() as u64);
                if end > most {
                    return Err(ImageLineError::TooLong(end));
                }
                file.write_all_at(&bytes, offset).map_err(ImageLineError::Store)?;
            }
            Drained::Done { bytes, checksum, builds, drained, drained_us } => {
                if bytes > most {
                    return Err(ImageLineError::TooLong(bytes));
                }
                let whole = file.set_len(bytes).and_then(|()| file.sync_all());
                whole.map_err(ImageLineError::Store)?;
                return Ok(Arrived { bytes, checksum, builds, drained, drained_us });
            }
            Drained::Failed { why } => return Err(ImageLineError::Far(why.into_inner())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_image::{Choice, ImageFile, ImageWriter, PAGE, encode};
    use std::fs::OpenOptions;
    use std::os::unix::net::UnixStream;
    use std::path::PathBuf;

    const DONE: Drained =
        Drained::Done { bytes: 99, checksum: 0, builds: false, drained: 0, drained_us: 0 };

    fn scratch(name: &str) -> (PathBuf, File) {
        let path = std::env::temp_dir().join(format!("kdrain-{name}-{}", std::process::id()));
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(&path);
        (path, file.unwrap())
    }

    /// Receives what `send` says.
    fn received(
        name: &str,
        most: u64,
        send: impl FnOnce(DrainSink<UnixStream>) + Send,
    ) -> (PathBuf, Result<Arrived, ImageLineError>) {
        let (near, far) = UnixStream::pair().unwrap();
        let (path, file) = scratch(name);
        let arrived = std::thread::scope(|scope| {
            scope.spawn(|| send(DrainSink::new(far)));
            receive_file(near, &file, most)
        });
        (path, arrived)
    }

    #[test]
    fn an_image_crosses_as_it_is_written_by_several_threads() {
        let page = |at: u64| vec![at as u8 + 1; PAGE as usize];
        let long: Vec<u8> = (0..3 * CHUNK + 5000).map(|at| ((at * 7919) >> 5) as u8).collect();
        let send = |sink: DrainSink<UnixStream>| {
            let writer = ImageWriter::elsewhere("g.kimg", Box::new(sink.clone())).unwrap();
            std::thread::scope(|scope| {
                for at in 0..20 {
                    let (writer, bytes) = (&writer, page(at));
                    scope.spawn(move || {
                        let encoded = encode(&bytes, Choice::Raw);
                        writer.memory(at, 0, PAGE, &encoded).unwrap();
                    });
                }
            });
            let mut whole = long.clone();
            whole.resize(long.len().next_multiple_of(PAGE as usize), 0);
            writer.memory(99, 0, whole.len() as u64, &encode(&whole, Choice::Raw)).unwrap();
            let entry = writer.finish().unwrap();
            let (bytes, checksum) = (entry.bytes, entry.checksum);
            let done = Drained::Done { bytes, checksum, builds: true, drained: 5, drained_us: 6 };
            sink.end(&done).unwrap();
        };
        let (path, arrived) = received("whole", 1 << 30, send);
        let Arrived { bytes, checksum, builds, drained, drained_us } = arrived.unwrap();
        assert_eq!((builds, drained, drained_us), (true, 5, 6));
        let file = ImageFile::open(&path, None).unwrap();
        let entry = file.entry().unwrap();
        assert_eq!((entry.bytes, entry.checksum), (bytes, checksum));
        assert_eq!(file.memory().count(), 21);
        for extent in file.memory() {
            let mut bytes = vec![0; extent.decoded as usize];
            file.read(extent, &mut Vec::new(), &mut bytes).unwrap();
            if extent.object == 99 {
                assert!(bytes[..long.len()] == long);
            } else {
                assert_eq!(bytes, page(extent.object));
            }
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_drain_that_fails_says_why() {
        let (path, failed) = received("fails", 100, |sink| sink.fail("no memory".into()).unwrap());
        assert!(matches!(failed, Err(ImageLineError::Far(why)) if why == "no memory"));
        let (_, cut) = received("fails", 100, |sink| sink.write_all_at(&[1], 0).unwrap());
        assert!(matches!(cut, Err(ImageLineError::Line(FrameError::Closed))), "{cut:?}");
        std::fs::remove_file(&path).unwrap();
    }

    /// A far end that sends the same bytes again and again keeps no checkpoint for ever.
    #[test]
    fn a_drain_without_end_is_ended() {
        for (name, len) in [("again", 100), ("nothing", 0)] {
            let sent = std::sync::atomic::AtomicU64::new(0);
            let (path, arrived) = received(name, 10_000, |DrainSink(sending)| {
                let mut sending = sending.lock().unwrap();
                let mut again = || {
                    let bytes = Bytes::new(vec![1; len]).unwrap();
                    sending.add(&Drained::Piece { offset: 0, bytes })?;
                    sending.flush()
                };
                // Without the bound it would be taken to the last piece.
                while sent.fetch_add(1, std::sync::atomic::Ordering::SeqCst) < 100_000
                    && again().is_ok()
                {}
            });
            assert!(matches!(arrived, Err(ImageLineError::Endless(10_000))), "{name}: {arrived:?}");
            std::fs::remove_file(&path).unwrap();
        }
    }

    #[test]
    fn no_more_is_stored_than_was_captured() {
        for (name, most, offset) in [("far", 100, 93), ("huge", 100, u64::MAX), ("done", 64, 0)] {
            let (path, arrived) = received(name, most, |sink| {
                let _ = sink.write_all_at(&[1; 8], offset).and_then(|()| sink.end(&DONE));
            });
            assert!(matches!(arrived, Err(ImageLineError::TooLong(_))), "{name}: {arrived:?}");
            assert!(std::fs::metadata(&path).unwrap().len() <= 8, "{name}");
            std::fs::remove_file(&path).unwrap();
        }
    }
}
