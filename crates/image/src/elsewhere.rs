//! Image files that this process cannot open itself, as they lie on another machine.

use std::fmt::Debug;
use std::io;

/// The source of a file's bytes.
pub trait ReadAt: Debug + Send + Sync {
    /// Returns the file's length in bytes.
    ///
    /// # Errors
    /// The other machine does not tell it.
    fn length(&self) -> io::Result<u64>;

    /// Fills `into` with the bytes from `offset` on. Any thread may call this.
    ///
    /// # Errors
    /// The file ends before that, or the other machine does not send the bytes.
    fn read_exact_at(&self, into: &mut [u8], offset: u64) -> io::Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Choice, Encoded, ImageFile, ImageWriter, Layers, PAGE, Sink, encode};
    use std::sync::{Arc, Mutex};

    /// A file on the other machine.
    #[derive(Debug, Default, Clone)]
    struct Other(Arc<Mutex<Vec<u8>>>);

    impl Sink for Other {
        fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
            let mut file = self.0.lock().unwrap();
            let end = offset as usize + bytes.len();
            let length = file.len().max(end);
            file.resize(length, 0);
            file[offset as usize..end].copy_from_slice(bytes);
            Ok(())
        }

        fn finish(&self, length: u64) -> io::Result<()> {
            assert_eq!(self.0.lock().unwrap().len() as u64, length);
            Ok(())
        }
    }

    impl ReadAt for Other {
        fn length(&self) -> io::Result<u64> {
            Ok(self.0.lock().unwrap().len() as u64)
        }

        fn read_exact_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
            let (from, file) = (offset as usize, self.0.lock().unwrap());
            let found = file.get(from..from + into.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
            into.copy_from_slice(found);
            Ok(())
        }
    }

    fn page(fill: u8) -> Vec<u8> {
        (0..PAGE).map(|at| fill.wrapping_mul((at >> 3) as u8)).collect()
    }

    fn older(writer: &ImageWriter) {
        writer.section(16, b"notes").unwrap();
        for (at, choice) in [(0, Choice::Raw), (1, Choice::Auto), (2, Choice::Lz4)] {
            let bytes = page(at as u8 + 1);
            writer.memory(7, at * PAGE, PAGE, &encode(&bytes, choice)).unwrap();
        }
    }

    #[test]
    fn a_file_is_the_same_wherever_it_lies() {
        let path = std::env::temp_dir().join(format!("kelse-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let here = ImageWriter::create(&path).unwrap();
        older(&here);
        let expected = here.finish().unwrap();
        let other = Other::default();
        let there = ImageWriter::elsewhere(&expected.name, Box::new(other.clone())).unwrap();
        older(&there);
        assert_eq!(there.finish().unwrap(), expected);
        let bytes = std::fs::read(&path).unwrap();
        let file = ImageFile::open(&path, None).unwrap();
        assert_eq!(file.entry().unwrap(), expected);
        std::fs::remove_file(&path).unwrap();
        assert!(*other.0.lock().unwrap() == bytes);
        let read = ImageFile::elsewhere(Box::new(other), &expected).unwrap();
        assert_eq!(read.section(16).unwrap(), b"notes");
    }

    #[test]
    fn files_elsewhere_build_on_each_other() {
        let (first, second) = (Other::default(), Other::default());
        let writer = |other: &Other| ImageWriter::elsewhere("g.kimg", Box::new(other.clone()));
        let below = writer(&first).unwrap();
        older(&below);
        let below = below.finish().unwrap();
        let above = writer(&second).unwrap();
        above.memory(7, 0, PAGE, &Encoded::parent()).unwrap();
        above.memory(7, PAGE, PAGE, &encode(&page(9), Choice::Auto)).unwrap();
        let above = above.finish().unwrap();
        let open = |other: &Other, entry| ImageFile::elsewhere(Box::new(other.clone()), entry);
        let files = vec![open(&second, &above).unwrap(), open(&first, &below).unwrap()];
        let layers = Layers::of_opened(files).unwrap();
        let mut found = Vec::new();
        for source in layers.sources(7) {
            let mut bytes = vec![0; PAGE as usize];
            layers.file(source.layer).read(&source.extent, &mut Vec::new(), &mut bytes).unwrap();
            found.push((source.extent.address / PAGE, bytes));
        }
        found.sort();
        assert_eq!(found, [(0, page(1)), (1, page(9))]);
        // A file whose parent is missing, a file that is not the entry's, and no file at all.
        assert!(Layers::of_opened(vec![open(&second, &above).unwrap()]).is_err());
        assert!(open(&first, &above).is_err());
        assert!(Layers::of_opened(Vec::new()).is_err());
    }
}
