//! The mappings of a process, as /proc tells them.

use crate::EngineError;
use crate::proc;
use libc::pid_t;
use std::collections::BTreeMap;
use std::os::unix::fs::DirEntryExt;

/// Most mappings of a process: the kernel's own default limit is a thirtieth of it.
pub(crate) const MAX_MAPPINGS: usize = 2 << 20;
/// The first address that is not a program's.
pub(crate) const TOP: u64 = (1 << 47) - 0x1000;

/// A line of /proc/PID/maps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// PROT_READ, PROT_WRITE and PROT_EXEC.
    pub(crate) protection: i32,
    pub(crate) shared: bool,
    pub(crate) offset: u64,
    pub(crate) device: String,
    pub(crate) inode: u64,
    /// A path, a name in brackets, or nothing.
    pub(crate) name: String,
    /// The two-letter flags of smaps, if that was what was read.
    pub(crate) flags: Vec<String>,
    /// Its file comes back, though no name leads to it.
    pub(crate) comes_back: bool,
    /// It comes back without contents: what is in it is not the process's own.
    pub(crate) emptied: bool,
}

impl Mapping {
    pub(crate) fn len(&self) -> u64 {
        self.end - self.start
    }

    /// The path of its file, if it has one that is still there by name.
    pub(crate) fn path(&self) -> Option<&str> {
        (self.name.starts_with('/') && !self.deleted()).then_some(self.name.as_str())
    }

    /// What the program has called its memory.
    pub(crate) fn given_name(&self) -> Option<&str> {
        self.name.strip_prefix("[anon:")?.strip_suffix(']')
    }

    /// Whether it has a file that no name leads to any more.
    pub(crate) fn deleted(&self) -> bool {
        self.inode != 0 && self.name.ends_with(DELETED)
    }

    pub(crate) fn parse(line: &str) -> Option<Mapping> {
        let mut rest = line;
        let mut word = || {
            let (word, tail) = rest.split_once(' ').unwrap_or((rest, ""));
            rest = tail;
            word
        };
        let (bounds, modes, offset, device, inode) = (word(), word(), word(), word(), word());
        let (start, end) = bounds.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        let bit = |mode, value| if modes.contains(mode) { value } else { 0 };
        let (start, end) = (number(start)?, number(end)?);
        Some(Mapping {
            start,
            end: (end > start).then_some(end)?,
            protection: bit('r', libc::PROT_READ)
                | bit('w', libc::PROT_WRITE)
                | bit('x', libc::PROT_EXEC),
            shared: modes.contains('s'),
            offset: number(offset)?,
            device: device.into(),
            inode: inode.parse().ok()?,
            name: unescaped(rest.trim_start()),
            flags: Vec::new(),
            comes_back: false,
            emptied: false,
        })
    }
}

impl Mapping {
    /// A page of leases as what it is to a restarted process: memory of its own, in which no lease
    /// stands anywhere. What is in the page is a cache's, and must not come back.
    fn without_leases(self) -> Mapping {
        if !self.shared || !kedge_cache_lease::is_page(self.name.as_bytes()) {
            return self;
        }
        let (device, name) = ("00:00".to_owned(), String::new());
        Mapping { shared: false, offset: 0, device, inode: 0, name, emptied: true, ..self }
    }
}

/// A newline in a path is written as an octal escape, and nothing else is.
fn unescaped(name: &str) -> String {
    name.replace("\\012", "\n")
}

/// The mappings of `pid`, without flags: cheap.
pub(crate) fn of(pid: pid_t) -> Result<Vec<Mapping>, EngineError> {
    read(pid, "maps")
}

/// The mappings of `pid` with their flags, for which the kernel walks all page tables.
pub(crate) fn with_flags(pid: pid_t) -> Result<Vec<Mapping>, EngineError> {
    read(pid, "smaps")
}

fn read(pid: pid_t, file: &'static str) -> Result<Vec<Mapping>, EngineError> {
    let strange = |what| EngineError::Proc { pid, file, what };
    let text = proc::text(pid, file)?;
    let mut mappings = Vec::<Mapping>::new();
    for line in text.lines() {
        // smaps has lines such as `Rss: 4 kB` after each mapping's.
        let first = line.split(' ').next().unwrap_or("");
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let last = mappings.last_mut().ok_or_else(|| strange("flags of no mapping"))?;
            last.flags = flags.split_whitespace().map(str::to_owned).collect();
        } else if !first.ends_with(':') {
            let mapping = Mapping::parse(line).ok_or_else(|| strange("a mapping"))?;
            mappings.push(mapping.without_leases());
        }
    }
    if mappings.len() > MAX_MAPPINGS { Err(strange("too many mappings")) } else { Ok(mappings) }
}

/// Where shared memory has names.
const SHARED: &str = "/dev/shm";
const DELETED: &str = " (deleted)";
/// Most names that are looked at.
const MAX_NAMES: usize = 50_000;

/// The mappings of `pid` as [`of`] finds them, and as [`find_names`] names them.
pub(crate) fn named(pid: pid_t) -> Result<Vec<Mapping>, EngineError> {
    let mut mappings = of(pid)?;
    find_names(&mut mappings);
    Ok(mappings)
}

/// Gives shared memory its name where it was mapped under one that is gone: sem_open(3) links what
/// it makes to its name afterwards.
pub(crate) fn find_names(mappings: &mut [Mapping]) {
    let gone =
        |mapping: &Mapping| mapping.shared && mapping.deleted() && mapping.name.starts_with(SHARED);
    if !mappings.iter().any(gone) {
        return;
    }
    let entries = std::fs::read_dir(SHARED).into_iter().flatten().flatten().take(MAX_NAMES);
    let name = |entry: std::fs::DirEntry| Some((entry.ino(), entry.path().to_str()?.to_owned()));
    let names: BTreeMap<u64, String> = entries.filter_map(name).collect();
    for mapping in mappings.iter_mut().filter(|mapping| gone(mapping)) {
        if let Some(name) = names.get(&mapping.inode) {
            mapping.name.clone_from(name);
        }
    }
}

/// An address where `length` bytes are free in all of `taken`, well away from everything, because
/// stacks grow.
pub(crate) fn hole(taken: impl Iterator<Item = (u64, u64)>, length: u64) -> Option<u64> {
    const MARGIN: u64 = 256 << 20;
    let mut taken: Vec<(u64, u64)> = taken.filter(|(start, _)| *start < TOP).collect();
    taken.sort_unstable();
    // Above 4 GiB: below lie programs at fixed addresses and what they map with MAP_32BIT.
    let mut free = 1 << 32;
    for (start, end) in taken.into_iter().chain([(TOP, TOP)]) {
        if start.saturating_sub(free) >= length + 2 * MARGIN {
            return Some(free + MARGIN);
        }
        free = free.max(end);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_whatever_the_path() {
        let line = "7f5d6f7a1000-7f5d6f7ab000 r-xp 00027000 fe:00 325835      /usr/lib/a b(deleted";
        let mapping = Mapping::parse(line).unwrap();
        assert_eq!((mapping.start, mapping.len()), (0x7f5d_6f7a_1000, 0xa000));
        assert_eq!(mapping.protection, libc::PROT_READ | libc::PROT_EXEC);
        assert_eq!(mapping.path(), Some("/usr/lib/a b(deleted"));
        assert!(Mapping::parse("5000-4000 r-xp 0 0:0 0").is_none());
        assert!(Mapping::parse("what is this").is_none());
        let anonymous = Mapping::parse("4000-5000 rw-s 00000000 00:01 9 /dev/zero (deleted)");
        assert!(anonymous.is_some_and(|m| m.shared && m.deleted() && m.path().is_none()));
    }

    #[test]
    fn a_page_of_leases_is_memory_of_its_own() {
        let page = "1000-11000 rw-s 00000000 00:16 9 /dev/shm/kedge-cache-0/scratch-1/tier/leases";
        let read = |line: &str| Mapping::parse(line).unwrap().without_leases();
        for line in [page, &format!("{page} (deleted)")] {
            let Mapping { shared, inode, name, start, emptied, .. } = read(line);
            assert_eq!((shared, inode, name.as_str(), start), (false, 0, "", 0x1000));
            assert!(emptied && !crate::track::watchable(&read(line)));
        }
        assert!(!read(&page.replace("-s ", "-p ")).name.is_empty());
        assert!(read(&page.replace("tier/leases", "leases")).shared);
    }

    #[test]
    fn a_hole_is_free() {
        let own = of(std::process::id() as pid_t).unwrap();
        let hole = hole(own.iter().map(|m| (m.start, m.end)), 1 << 30).unwrap();
        assert!(own.iter().all(|m| m.end <= hole || m.start >= hole + (1 << 30)));
        assert_eq!(super::hole([(0, TOP)].into_iter(), 4096), None);
    }
}
