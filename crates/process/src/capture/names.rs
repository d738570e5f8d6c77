//! Which temporary files are the job's: those whose paths its processes have in memory. They are
//! sought in what is written to the image, behind the pause; where there are no candidates, nothing
//! is.

use super::memory::{self, Chunk, Reader};
use crate::EngineError;
use crate::plugins::{Passing, PluginError, Saved};
use crate::track::Run;
use kedge_image::PageBuffer;
use libc::pid_t;
use memchr::memmem::Finder;
use std::collections::{BTreeMap, HashMap};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Longest path below a temporary folder that is sought, in bytes: less than a page.
const MAX_PATH_LEN: usize = 1024;
/// Slashes in a path that mean no more than one.
const SLASHES: usize = 8;
/// Threads that read memory which is not written anyway.
const SWEEPERS: usize = 4;

/// What was found out of each candidate by the image before: its inode, and whether it is the
/// job's.
pub(crate) type Settled = BTreeMap<PathBuf, (u64, bool)>;

/// The candidates, and which of them were found.
#[derive(Debug)]
pub(super) struct Names {
    folders: Vec<Folder>,
    found: Vec<AtomicBool>,
    /// Not found so far.
    left: AtomicUsize,
    /// Some were unknown to the image before: what has not changed since is to be looked through as
    /// well.
    anew: bool,
    /// Bytes that a path may take, with what lies around it.
    reach: usize,
}

/// A temporary folder, and candidates by their paths below it.
#[derive(Debug)]
struct Folder {
    /// Its own name between slashes, with which paths into it go on however it is reached.
    finder: Finder<'static>,
    below: HashMap<Vec<u8>, Vec<usize>>,
    longest: usize,
}

impl Names {
    pub(super) fn of(passing: &Passing, settled: &Settled) -> Names {
        let (mut folders, mut reach) = (BTreeMap::<Vec<u8>, Folder>::new(), 0);
        let mut found = Vec::new();
        let mut anew = false;
        for (index, candidate) in passing.0.iter().enumerate() {
            let known = settled.get(&candidate.path);
            found.push(AtomicBool::new(known.is_some_and(|(_, ours)| *ours)));
            anew |= known.is_none_or(|(inode, ours)| !ours && *inode != candidate.stat.inode);
            let below = candidate.path.strip_prefix(&candidate.folder).unwrap_or(Path::new(""));
            let (below, Some(name)) = (below.as_os_str().as_bytes(), candidate.folder.file_name())
            else {
                continue;
            };
            if below.is_empty() || below.len() > MAX_PATH_LEN {
                continue;
            }
            let needle = [b"/", name.as_bytes(), b"/"].concat();
            reach = reach.max(needle.len() + SLASHES + below.len() + 1);
            let folder = folders.entry(needle.clone()).or_insert_with(|| Folder {
                finder: Finder::new(&needle).into_owned(),
                below: HashMap::new(),
                longest: 0,
            });
            folder.longest = folder.longest.max(below.len());
            folder.below.entry(below.to_owned()).or_default().push(index);
        }
        let left = found.iter().filter(|found| !found.load(Ordering::Relaxed)).count();
        let (folders, left) = (folders.into_values().collect(), AtomicUsize::new(left));
        Names { folders, found, left, anew, reach }
    }

    fn is_over(&self) -> bool {
        self.left.load(Ordering::Relaxed) == 0
    }

    fn look(&self, bytes: &[u8]) {
        for folder in &self.folders {
            for at in folder.finder.find_iter(bytes) {
                let rest = &bytes[at + folder.finder.needle().len()..];
                folder.follow(rest, |index| self.find(index));
            }
        }
    }

    fn find(&self, index: usize) {
        if !self.found[index].swap(true, Ordering::Relaxed) {
            self.left.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn is_found(&self, index: usize) -> bool {
        self.found[index].load(Ordering::Relaxed)
    }

    /// Adds to what is saved those of the candidates that are the job's: found, or in a private
    /// folder that is. What the user should know, and what is settled.
    pub(super) fn settle(
        &self,
        passing: &Passing,
        image: &Path,
        saved: &mut Saved,
    ) -> Result<(Option<String>, Settled), PluginError> {
        let private = passing.0.iter().enumerate();
        let private =
            private.filter(|(index, one)| one.is_private_folder() && self.is_found(*index));
        let private: Vec<&Path> = private.map(|(_, folder)| folder.path.as_path()).collect();
        let is_in_one = |path: &Path| private.iter().any(|folder| path.starts_with(folder));
        let ours = |index: usize| self.is_found(index) || is_in_one(&passing.0[index].path);
        let warning = passing.save(ours, image, saved)?;
        let settled = passing.0.iter().enumerate().map(|(index, candidate)| {
            (candidate.path.clone(), (candidate.stat.inode, ours(index)))
        });
        Ok((warning, settled.collect()))
    }
}

impl Folder {
    /// Tells `found` the candidates that the path which begins with `rest` names or goes through. A
    /// path ends with what is rare in names: where that is in a name all the same, the longer one
    /// is found, too.
    fn follow(&self, rest: &[u8], found: impl Fn(usize)) {
        let mut path = Vec::with_capacity(self.longest);
        for byte in rest.iter().take(self.longest + SLASHES + 1) {
            let goes_on = byte.is_ascii_alphanumeric() || b"._-".contains(byte) || !byte.is_ascii();
            if *byte == b'/' && (path.is_empty() || path.last() == Some(&b'/')) {
                continue;
            }
            if !goes_on && let Some(those) = self.below.get(&path) {
                those.iter().for_each(|index| found(*index));
            }
            if *byte == 0 || path.len() > self.longest {
                return;
            }
            path.push(*byte);
        }
    }
}

/// The search through the memory of one process, by several threads.
#[derive(Debug)]
pub(super) struct Search<'a> {
    names: &'a Names,
    edges: Mutex<Vec<Edges>>,
}

/// The ends of some memory that was looked at: a path may go on in what lies beside it.
#[derive(Debug)]
struct Edges {
    start: u64,
    end: u64,
    first: Vec<u8>,
    last: Vec<u8>,
}

impl<'a> Search<'a> {
    pub(super) fn new(names: &'a Names) -> Search<'a> {
        Search { names, edges: Mutex::default() }
    }

    /// Looks at the memory that lies at `start`.
    pub(super) fn look(&self, start: u64, bytes: &[u8]) {
        if self.names.is_over() {
            return;
        }
        self.names.look(bytes);
        let reach = self.names.reach.min(bytes.len());
        let (first, last) = (bytes[..reach].to_vec(), bytes[bytes.len() - reach..].to_vec());
        let edges = Edges { start, end: start + bytes.len() as u64, first, last };
        self.edges.lock().unwrap_or_else(PoisonError::into_inner).push(edges);
    }

    /// Looks at what goes on from one piece of memory into the next.
    pub(super) fn end(&self) {
        let mut edges = self.edges.lock().unwrap_or_else(PoisonError::into_inner);
        edges.sort_unstable_by_key(|one| one.start);
        for pair in edges.windows(2).filter(|pair| pair[0].end == pair[1].start) {
            self.names.look(&[&pair[0].last[..], &pair[1].first[..]].concat());
        }
        edges.clear();
    }

    /// Whether what has not changed since the image before is to be looked through.
    pub(super) fn is_anew(&self) -> bool {
        self.names.anew && !self.names.is_over()
    }

    /// Looks at `runs` of the memory of `pid`, as far as they can be read.
    pub(super) fn sweep(&self, pid: pid_t, runs: &[Run]) -> Result<(), EngineError> {
        let reader = Reader::of(pid)?;
        let mut chunks = Vec::new();
        memory::split_runs(false, runs, &mut chunks);
        let next = AtomicUsize::new(0);
        let work = || {
            let mut buffer = PageBuffer::default();
            let next = || chunks.get(next.fetch_add(1, Ordering::Relaxed));
            while let Some(chunk) = next().filter(|_| !self.names.is_over()) {
                let bytes = buffer.bytes(Chunk::length(chunk) as usize);
                // It may run, and what there was be gone.
                if reader.read(chunk, bytes).is_ok() {
                    self.look(chunk.address(), bytes);
                }
            }
        };
        thread::scope(|scope| {
            for _ in 1..SWEEPERS.min(chunks.len()) {
                scope.spawn(work);
            }
            work();
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of these paths below /scratch/tmp, the image before having settled those.
    fn names(paths: &[&str], settled: &Settled) -> Names {
        let folder = Path::new("/scratch/tmp");
        Names::of(&Passing::of(folder, paths), settled)
    }

    fn found(paths: &[&str], bytes: &[u8]) -> Vec<usize> {
        let names = names(paths, &Settled::new());
        names.look(bytes);
        (0..paths.len()).filter(|index| names.is_found(*index)).collect()
    }

    #[test]
    fn whole_paths_are_found_and_nothing_else() {
        let paths = ["a", "a.ptx", "d", "d/in", "two words", "gr\u{fc}n"];
        let cases: [(&[u8], &[usize]); 13] = [
            (b"/tmp/a\0", &[0]),
            (b"ptxas -o x /scratch/tmp/a.ptx --verbose", &[1]),
            (b"\"/tmp//a\"", &[0]),
            (b"/tmp/a.ptx.old\0", &[]),
            (b"/tmp/ab\0/tmp/-a\0", &[]),
            // Not below that folder, or only the end of what may be anywhere.
            (b"/mytmp/a\0tmp/a\0/home/a\0a\0", &[]),
            (b"/tmp/d\0", &[2]),
            (b"/tmp/d//in\0", &[2, 3]),
            (b"/tmp/d/other\0", &[2]),
            (b"/tmp/two words\0", &[4]),
            ("/tmp/gr\u{fc}n\0".as_bytes(), &[5]),
            // Its end is elsewhere.
            (b"/tmp/a", &[]),
            (b"/tmp/", &[]),
        ];
        for (bytes, expected) in cases {
            assert_eq!(found(&paths, bytes), expected, "{}", String::from_utf8_lossy(bytes));
        }
    }

    #[test]
    fn a_path_may_go_on_in_what_lies_beside_it() {
        let memory = [&[1; 4090][..], b"/tmp/name-1234\0", &[1; 4087]].concat();
        for border in [4091, 4096, 4103, 4104] {
            for gap in [0, 4096] {
                let names = names(&["name-1234"], &Settled::new());
                let search = Search::new(&names);
                search.look(0x10000 + border as u64 + gap, &memory[border..]);
                search.look(0x10000, &memory[..border]);
                search.end();
                assert_eq!(names.is_found(0), gap == 0, "{border}");
            }
        }
    }

    #[test]
    fn what_the_image_before_knew_stays_known() {
        let inode = Passing::of(Path::new("/t"), &["x"]).0[0].stat.inode;
        let settle = |name: &str, inode, ours| {
            Settled::from([(Path::new("/scratch/tmp").join(name), (inode, ours))])
        };
        let known = names(&["x"], &settle("x", inode + 1, true));
        assert!(known.is_found(0) && known.is_over() && !Search::new(&known).is_anew());
        // Another's: it is the job's as soon as a process has its name anew.
        let known = names(&["x"], &settle("x", inode, false));
        assert!(!known.is_over() && !Search::new(&known).is_anew());
        known.look(b"/tmp/x\0");
        assert!(known.is_found(0));
        for settled in [settle("x", inode + 1, false), settle("y", inode, false), Settled::new()] {
            assert!(Search::new(&names(&["x"], &settled)).is_anew());
        }
        let none = names(&[], &Settled::new());
        assert!(none.is_over() && !Search::new(&none).is_anew());
    }

    #[test]
    fn memory_that_is_not_written_is_looked_through() {
        let mut memory = vec![1u8; 3 << 20];
        let start = memory.as_ptr() as u64;
        let at = ((1 << 20) - 7) as usize;
        memory[at..at + 15].copy_from_slice(b"/tmp/swept-1234");
        memory[at + 15] = 0;
        let names = names(&["swept-1234"], &Settled::new());
        let search = Search::new(&names);
        let pid = std::process::id() as pid_t;
        search.sweep(pid, &[(8, 16), (start, start + memory.len() as u64)]).unwrap();
        search.end();
        assert!(names.is_found(0));
    }
}
