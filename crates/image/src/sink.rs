//! The destinations of a file's bytes.

use std::fmt::Debug;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// The destination of a file's bytes.
pub trait Sink: Debug + Send + Sync {
    /// Stores `bytes` at `offset`. Threads call this in any order, and store each byte once.
    ///
    /// # Errors
    /// The bytes cannot be stored; the file is useless then.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Ends the file at `length` bytes; bytes that were not stored are zero.
    ///
    /// # Errors
    /// As [`Sink::write_all_at`].
    fn finish(&self, length: u64) -> io::Result<()>;

    /// Hears that about so many bytes are to come. By default that changes nothing.
    fn expect(&self, _bytes: u64) {}

    /// Reads back what was stored at `offset`. By default nothing can be read back.
    ///
    /// # Errors
    /// The bytes cannot be read back.
    fn read_exact_at(&self, _into: &mut [u8], _offset: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Counts the bytes of a file, which its writer has summed as for any other, and keeps none of
/// them: for measurements of all but the disk. Nobody can read such a file back.
#[derive(Debug, Default)]
pub struct SumSink(AtomicU64);

impl SumSink {
    /// Returns how many bytes have been stored.
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Sink for SumSink {
    fn write_all_at(&self, bytes: &[u8], _offset: u64) -> io::Result<()> {
        self.0.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn finish(&self, _length: u64) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Choice, ImageWriter, PAGE, encode};
    use std::fs::File;
    use std::os::fd::OwnedFd;

    fn write(writer: ImageWriter) -> crate::FileEntry {
        writer.section(16, b"notes").unwrap();
        for at in 0..5_u64 {
            let bytes: Vec<u8> = (0..PAGE).map(|n| ((n * (at + 3)) >> 2) as u8).collect();
            writer.memory(7, at * PAGE, PAGE, &encode(&bytes, Choice::Raw)).unwrap();
        }
        writer.finish().unwrap()
    }

    #[test]
    fn what_is_only_summed_sums_to_what_a_file_would() {
        let (writer, file) = ImageWriter::in_memory("x.kimg").unwrap();
        let expected = write(writer);
        assert_eq!(file.metadata().unwrap().len(), expected.bytes);
        let summed = write(ImageWriter::elsewhere("x.kimg", Box::<SumSink>::default()).unwrap());
        assert_eq!(summed, expected);
        let sink = SumSink::default();
        sink.write_all_at(&[1; 100], 5000).unwrap();
        sink.write_all_at(&[2; 7], 0).unwrap();
        assert_eq!(sink.bytes(), 107);
        assert!(sink.read_exact_at(&mut [0; 7], 0).is_err(), "nothing is kept");
    }

    #[test]
    fn only_a_new_regular_file_is_written() {
        let refused = |file: OwnedFd| {
            let error = ImageWriter::to_file(file.into(), "x.kimg").unwrap_err().to_string();
            assert!(error.starts_with("x.kimg: "), "{error}");
            error
        };
        let (reading, writing) = io::pipe().unwrap();
        for other in [OwnedFd::from(writing), reading.into()] {
            assert!(refused(other).contains("no regular file"));
        }
        let folder = File::open(std::env::temp_dir()).unwrap();
        assert!(refused(folder.into()).contains("no regular file"));
        let zero = File::options().write(true).open("/dev/null").unwrap();
        assert!(refused(zero.into()).contains("no regular file"));
        let memory = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let again = memory.try_clone().unwrap();
        write(ImageWriter::to_file(memory.into(), "x.kimg").unwrap());
        assert!(refused(again).contains("not empty"));
    }
}
