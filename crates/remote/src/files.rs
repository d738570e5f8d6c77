//! The files of an image that the far end of a session reads at the near end, for a restart.

use crate::frame::{FrameError, read_one, write_one};
use crate::messages::{CHUNK, FILES, FileBytes, LINE, ReadFile, StoredFile};
use kedge_image::{FileEntry, ImageError, ImageFile, Layers, ReadAt};
use kedge_wire::{Bytes, List, Text};
use std::fmt;
use std::io::{self, Read, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Longest question, and longest answer.
const MAX_ASK: usize = 64;
const MAX_ANSWER: usize = CHUNK + LINE + 64;

/// Names the files of `layers`, for a far end that is to read them.
///
/// # Errors
/// One cannot be read, or there are too many.
pub fn named(layers: &Layers) -> Result<List<StoredFile, FILES>, ImageError> {
    let mut named = Vec::new();
    for file in layers.own() {
        let FileEntry { name, bytes, checksum } = file.entry()?;
        named.push(StoredFile { name: Text::truncated(name), bytes, checksum });
    }
    let path = layers.own().first().map(|file| file.path().to_owned()).unwrap_or_default();
    let many = |_| io::Error::other(format!("it builds on more than {FILES} images"));
    List::new(named).map_err(many).map_err(|source| ImageError::Io { path, source })
}

/// Answers the far end's questions until it asks no more.
///
/// # Errors
/// The connection is broken, or it asks for what there is not.
pub fn serve_files(
    mut reading: impl Read,
    mut writing: impl Write,
    layers: &Layers,
) -> Result<(), FrameError> {
    loop {
        let asked: ReadFile = match read_one(&mut reading, MAX_ASK) {
            Err(FrameError::Closed) => return Ok(()),
            other => other?,
        };
        write_one(&mut writing, &bytes(layers, asked))?;
    }
}

fn bytes(layers: &Layers, ReadFile { file, offset, len }: ReadFile) -> FileBytes {
    let refused = |why: String| Err(Text::truncated(why));
    let Some(file) = layers.own().get(file as usize) else {
        return refused("there is no such file".into());
    };
    let mut bytes = vec![0; (len as usize).min(CHUNK)];
    match file.read_raw(&mut bytes, offset) {
        Ok(()) => Ok(Bytes::new(bytes).unwrap_or_default()),
        Err(error) => refused(error.to_string()),
    }
}

/// Opens the files that the near end has `named`, each of which builds on the next.
///
/// # Errors
/// They cannot be read there, or are not what they are called.
pub fn far_layers(
    reading: impl Read + Send + 'static,
    writing: impl Write + Send + 'static,
    named: &[StoredFile],
) -> Result<Layers, ImageError> {
    let line = Arc::new(FileLine {
        asking: Mutex::new((writing, 0)),
        answers: Mutex::new(Answers { stream: reading, turn: 0 }),
        next: Condvar::new(),
    });
    let open = |(number, StoredFile { name, bytes, checksum }): (usize, &StoredFile)| {
        let (line, number, bytes) = (line.clone(), number as u32, *bytes);
        let entry = FileEntry { name: (**name).to_owned(), bytes, checksum: *checksum };
        ImageFile::elsewhere(Box::new(FarFile { line, number, bytes }), &entry)
    };
    Layers::of_opened(named.iter().enumerate().map(open).collect::<Result<_, _>>()?)
}

/// A connection on which several threads ask, and are answered in the order in which they have.
struct FileLine<R, W> {
    /// With the number of questions that were asked.
    asking: Mutex<(W, u64)>,
    answers: Mutex<Answers<R>>,
    next: Condvar,
}

struct Answers<R> {
    stream: R,
    /// Whose answer is the next.
    turn: u64,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<R: Read, W: Write> FileLine<R, W> {
    fn read(&self, ask: ReadFile) -> io::Result<Vec<u8>> {
        let own = {
            let (stream, asked) = &mut *locked(&self.asking);
            // Where this fails no other answer comes either.
            write_one(stream, &ask)?;
            *asked += 1;
            *asked - 1
        };
        let waited = self.next.wait_while(locked(&self.answers), |answers| answers.turn != own);
        let mut answers = waited.unwrap_or_else(PoisonError::into_inner);
        let answer = read_one::<FileBytes>(&mut answers.stream, MAX_ANSWER);
        answers.turn += 1;
        self.next.notify_all();
        drop(answers);
        match answer.map_err(io::Error::other)? {
            Ok(bytes) => Ok(bytes.into_inner()),
            Err(why) => Err(io::Error::other(why.into_inner())),
        }
    }
}

/// A file at the near end.
struct FarFile<R, W> {
    line: Arc<FileLine<R, W>>,
    number: u32,
    bytes: u64,
}

impl<R, W> fmt::Debug for FarFile<R, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FarFile({})", self.number)
    }
}

impl<R: Read + Send, W: Write + Send> ReadAt for FarFile<R, W> {
    fn length(&self) -> io::Result<u64> {
        Ok(self.bytes)
    }

    fn read_exact_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(into.len() as u64);
        if end.is_none_or(|end| end > self.bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut at = offset;
        for part in into.chunks_mut(CHUNK) {
            let ask = ReadFile { file: self.number, offset: at, len: part.len() as u32 };
            let bytes = self.line.read(ask)?;
            if bytes.len() != part.len() {
                return Err(io::ErrorKind::InvalidData.into());
            }
            part.copy_from_slice(&bytes);
            at += part.len() as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_image::{Choice, Extent, ImageWriter, PAGE, encode};
    use std::os::unix::net::UnixStream;
    use std::path::{Path, PathBuf};

    const OBJECTS: u64 = 24;

    fn content(object: u64) -> Vec<u8> {
        let pages = if object == 3 { 2 * CHUNK as u64 / PAGE + 3 } else { 1 + object % 3 };
        (0..pages * PAGE).map(|at| (at.wrapping_mul(object + 7) >> 4) as u8).collect()
    }

    fn scratch(name: &str) -> (PathBuf, FileEntry) {
        let path = std::env::temp_dir().join(format!("kfiles-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let writer = ImageWriter::create(&path).unwrap();
        for object in 0..OBJECTS {
            let bytes = content(object);
            let choice = if object % 2 == 0 { Choice::Raw } else { Choice::Lz4 };
            writer.memory(object, 0, bytes.len() as u64, &encode(&bytes, choice)).unwrap();
        }
        writer.section(16, &[5; 100_000]).unwrap();
        let entry = writer.finish().unwrap();
        (path, entry)
    }

    /// Returns what `look` finds in the file at `path`, read from the other end of a connection.
    fn far<T: Send>(path: &Path, entry: &FileEntry, look: impl Fn(Layers) -> T + Sync) -> T {
        let here = Layers::of_opened(vec![ImageFile::open(path, Some(entry)).unwrap()]).unwrap();
        let names = named(&here).unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let looked = scope.spawn(|| {
                let layers = far_layers(far.try_clone().unwrap(), far, &names).unwrap();
                look(layers)
            });
            serve_files(near.try_clone().unwrap(), near, &here).unwrap();
            looked.join().unwrap()
        })
    }

    #[test]
    fn many_threads_read_what_lies_at_the_near_end() {
        let (path, entry) = scratch("many");
        far(&path, &entry, |layers| {
            assert_eq!(layers.file(0).section(16).unwrap(), [5; 100_000]);
            std::thread::scope(|scope| {
                for object in 0..OBJECTS {
                    let layers = &layers;
                    scope.spawn(move || {
                        let extent: Extent = layers.file(0).memory_of(object)[0];
                        let mut bytes = vec![0; extent.decoded as usize];
                        let file = layers.file(0);
                        file.read(&extent, &mut Vec::new(), &mut bytes).unwrap();
                        assert!(bytes == content(object), "{object}");
                    });
                }
            });
        });
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn what_is_not_there_is_refused_and_nothing_else() {
        let (path, entry) = scratch("none");
        let here = Layers::of_opened(vec![ImageFile::open(&path, Some(&entry)).unwrap()]).unwrap();
        let ask = |file, offset, len| bytes(&here, ReadFile { file, offset, len });
        assert!(ask(1, 0, 8).is_err() && ask(0, entry.bytes, 1).is_err());
        assert!(ask(0, u64::MAX, 8).is_err());
        assert_eq!(ask(0, 0, u32::MAX).map(|bytes| bytes.len()).unwrap_or(CHUNK), CHUNK);
        assert_eq!(ask(0, entry.bytes - 8, 8).unwrap().len(), 8);
        std::fs::remove_file(path).unwrap();
    }

    /// The near end goes away: every thread hears of it.
    #[test]
    fn a_broken_connection_is_an_error_for_all_that_wait() {
        let (path, entry) = scratch("cut");
        let here = Layers::of_opened(vec![ImageFile::open(&path, Some(&entry)).unwrap()]).unwrap();
        let names = named(&here).unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        let served = near.try_clone().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let layers = far_layers(far.try_clone().unwrap(), far, &names).unwrap();
                near.shutdown(std::net::Shutdown::Both).unwrap();
                std::thread::scope(|scope| {
                    for object in 0..OBJECTS {
                        let layers = &layers;
                        scope.spawn(move || {
                            let extent = layers.file(0).memory_of(object)[0];
                            let mut bytes = vec![0; extent.decoded as usize];
                            let read = layers.file(0).read(&extent, &mut Vec::new(), &mut bytes);
                            assert!(read.is_err(), "{object}");
                        });
                    }
                });
            });
            let _ = serve_files(served.try_clone().unwrap(), served, &here);
        });
        std::fs::remove_file(path).unwrap();
    }
}
