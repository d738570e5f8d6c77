//! The files of a log: one that grows, and beside it the one before, which it has taken the place
//! of when it was full.
//!
//! Several processes append, each by itself. Whoever finds the file full renames it and begins
//! another; for the others it is full as well, and they go on in the one that has its name.

use crate::told;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Bytes of a file after which another begins. Where none can be begun, as much is written once
/// more and then nothing, so that a program that fails in a loop cannot fill the disk.
pub const FULL: u64 = 16 << 20;

/// Returns where what was in the log before is.
pub fn older(log: &Path) -> PathBuf {
    let mut name = log.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// What a log's lines go to. It has no lock: a process that is forked off may go on with it.
#[derive(Debug)]
pub(crate) struct Appended {
    path: PathBuf,
    /// The file of that name when this process began. While it is not full, it needs no other, nor
    /// the descriptor for one.
    first: File,
    full: u64,
}

impl Appended {
    /// Opens a log's file to append to it; makes it where there is none.
    ///
    /// # Errors
    /// As of files.
    pub(crate) fn open(path: &Path) -> io::Result<Appended> {
        let first = OpenOptions::new().append(true).create(true).open(path)?;
        Ok(Appended { path: path.to_owned(), first, full: FULL })
    }

    /// Appends a line in one write.
    ///
    /// # Errors
    /// As of files; it is full, and no other could be begun.
    pub(crate) fn write(&self, line: &[u8]) -> io::Result<()> {
        let so_far = self.first.metadata()?.len();
        if so_far < self.full {
            return (&self.first).write_all(line);
        }
        match self.newest() {
            Ok(mut newest) => newest.write_all(line),
            Err(_) if so_far < self.full.saturating_mul(2) => (&self.first).write_all(line),
            Err(error) => Err(error),
        }
    }

    /// Opens the file that has the log's name, and another one in its place if it is full.
    fn newest(&self) -> io::Result<File> {
        let newest = self.named()?;
        if newest.metadata()?.len() < self.full {
            return Ok(newest);
        }
        // Of several processes that find it full, the first renames it. What it does with its lock
        // takes no time; it goes with the descriptor.
        newest.lock()?;
        if identity(&fs::symlink_metadata(&self.path)?) == identity(&newest.metadata()?) {
            fs::rename(&self.path, older(&self.path))?;
        }
        self.named()
    }

    fn named(&self) -> io::Result<File> {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let mut options = OpenOptions::new();
        options.append(true).create(true).mode(0o600).custom_flags(flags).open(&self.path)
    }
}

/// Returns which file it is.
fn identity(of: &fs::Metadata) -> (u64, u64) {
    (of.dev(), of.ino())
}

/// A place in a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mark {
    file: (u64, u64),
    at: u64,
}

impl Mark {
    /// Returns where a log ends now; where there is none, its beginning.
    pub fn end(log: &Path) -> Mark {
        let found = fs::symlink_metadata(log);
        found.map_or(Mark::default(), |found| Mark { file: identity(&found), at: found.len() })
    }
}

/// Reads a log from what there is of it first, or from a mark, to its end, and on when there is
/// more of it.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    file: BufReader<File>,
}

impl Log {
    /// Reads all that there is.
    ///
    /// # Errors
    /// There is no log, or it cannot be read.
    pub fn open(path: &Path) -> io::Result<Log> {
        let newest = told::open(path)?;
        // What has become older meanwhile is read once more rather than missed.
        let file = told::open(&older(path)).unwrap_or(newest);
        Ok(Log { path: path.to_owned(), file: BufReader::new(file) })
    }

    /// Reads what is behind a mark.
    ///
    /// # Errors
    /// As of [`Log::open`].
    pub fn open_at(path: &Path, mark: Mark) -> io::Result<Log> {
        for name in [path.to_owned(), older(path)] {
            let Ok(mut file) = told::open(&name) else { continue };
            if identity(&file.metadata()?) == mark.file {
                file.seek(SeekFrom::Start(mark.at))?;
                return Ok(Log { path: path.to_owned(), file: BufReader::new(file) });
            }
        }
        Log::open(path)
    }

    /// Appends the next line to `line`, with its end, and returns its bytes: 0 where there is no
    /// more now.
    ///
    /// # Errors
    /// As of files.
    pub fn read_line(&mut self, line: &mut Vec<u8>) -> io::Result<usize> {
        loop {
            let read = self.file.read_until(b'\n', line)?;
            if read > 0 || !self.go_on()? {
                return Ok(read);
            }
        }
    }

    /// Goes on in the file that has the log's name, if that is another one.
    fn go_on(&mut self) -> io::Result<bool> {
        let Ok(newest) = told::open(&self.path) else { return Ok(false) };
        if identity(&newest.metadata()?) == identity(&self.file.get_ref().metadata()?) {
            return Ok(false);
        }
        // Whoever began it may just have written its last line into this one.
        if !self.file.fill_buf()?.is_empty() {
            return Ok(true);
        }
        self.file = BufReader::new(newest);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path =
                std::env::temp_dir().join(format!("kedge-log-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Folder(path)
        }

        fn log(&self) -> PathBuf {
            self.0.join("log")
        }

        fn writer(&self) -> Appended {
            Appended { full: 100, ..Appended::open(&self.log()).unwrap() }
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn lines(log: &mut Log) -> Vec<String> {
        let (mut all, mut line) = (Vec::new(), Vec::new());
        while log.read_line(&mut line).unwrap() > 0 {
            all.push(String::from_utf8(std::mem::take(&mut line)).unwrap().trim_end().to_owned());
        }
        all
    }

    #[test]
    fn a_full_log_makes_room_for_another_and_all_go_on_there() {
        let folder = Folder::new("turn");
        let (first, second) = (folder.writer(), folder.writer());
        for turn in 0..12 {
            first.write(format!("first {turn:04}\n").as_bytes()).unwrap();
            second.write(format!("second {turn:03}\n").as_bytes()).unwrap();
        }
        // Of 24 lines, 8 fill a file: two files are whole, and the last one is empty or begun.
        assert!(fs::metadata(folder.log()).unwrap().len() <= 100 + 11);
        let told = lines(&mut Log::open(&folder.log()).unwrap());
        assert_eq!(told.last().map(String::as_str), Some("second 011"));
        let ours = |who: &str| told.iter().filter(|line| line.starts_with(who)).count();
        assert!(ours("first") >= 4 && ours("second") >= 4, "{told:?}");
    }

    #[test]
    fn a_reader_misses_no_line() {
        let folder = Folder::new("read");
        let writer = folder.writer();
        writer.write(b"of a former life\n").unwrap();
        let mark = Mark::end(&folder.log());
        let mut all = Log::open(&folder.log()).unwrap();
        let mut told = lines(&mut all);
        for turn in 0..40 {
            writer.write(format!("line {turn}\n").as_bytes()).unwrap();
            if turn == 10 {
                let since = lines(&mut Log::open_at(&folder.log(), mark).unwrap());
                assert_eq!((since.len(), since[0].as_str()), (11, "line 0"));
            }
            told.extend(lines(&mut all));
        }
        assert_eq!(told.len(), 41);
        let since = lines(&mut Log::open_at(&folder.log(), mark).unwrap());
        assert_eq!(since.last().map(String::as_str), Some("line 39"), "what there still is");
    }

    #[test]
    fn where_no_other_can_be_begun_it_ends_at_twice_its_length() {
        let folder = Folder::new("stuck");
        let writer = folder.writer();
        fs::create_dir(older(&folder.log())).unwrap();
        let written = (0..40).filter(|_| writer.write(b"ten bytes\n").is_ok()).count();
        assert_eq!((written, fs::metadata(folder.log()).unwrap().len()), (20, 200));
    }
}
