//! Memory that processes share (shmem: MAP_SHARED without a file, memfd, System V segments): which
//! objects there are, who maps them, and what has been written through any of these mappings.

use super::direct;
use super::heard::Heard;
use crate::EngineError;
use crate::capture::{Ahead, Early, Gaps, Options, Unmapped, copy_object, shown};
use crate::maps::{self, Mapping};
use crate::pagemap::{Run, Scanner, Wanted};
use crate::proc::{self, Field, Stat};
use crate::stop::{self, Roots};
use libc::pid_t;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

/// Longest mapping that is watched, in bytes: protecting makes page tables for all of one.
const MAX_MAPPING_LEN: u64 = 64 << 30;

/// Fewest mapped bytes of an object that is written ahead: others are copied in the pause.
const MIN_OBJECT_LEN: u64 = 1 << 20;

/// Device, as /proc/PID/maps names it, and inode of an object.
pub(crate) type Key = (String, u64);

/// A mapping of an object.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub(crate) pid: pid_t,
    pub(crate) mapping: Mapping,
}

impl View {
    /// What it shows of the object.
    pub(crate) fn range(&self) -> Run {
        (self.mapping.offset, self.mapping.offset.saturating_add(self.mapping.len()))
    }

    /// What the addresses `run` show of it.
    fn shown(&self, (start, end): Run) -> Run {
        let place = |at: u64| self.mapping.offset + (at - self.mapping.start);
        (place(start), place(end))
    }

    /// Where the object's byte `at`, which it shows, is mapped.
    pub(crate) fn address(&self, at: u64) -> u64 {
        self.mapping.start + (at - self.mapping.offset)
    }
}

/// The key of the object that the mapping shows, if it is one whose pages can be watched: it is the
/// kernel's own shared memory, and no file's name leads to it.
pub(crate) fn key_of(mapping: &Mapping) -> Option<Key> {
    let watchable = mapping.shared
        && mapping.deleted()
        && mapping.start < maps::TOP
        && mapping.len() <= MAX_MAPPING_LEN
        && Some(&mapping.device) == kernel_memory().as_ref();
    watchable.then(|| (mapping.device.clone(), mapping.inode))
}

/// The device of the kernel's own tmpfs, which has no place among files.
pub(crate) fn kernel_memory() -> &'static Option<String> {
    static DEVICE: std::sync::LazyLock<Option<String>> = std::sync::LazyLock::new(|| {
        // SAFETY: the name is a string; what the call returns is a new descriptor, which is nobody
        // else's.
        let file = unsafe {
            let fd = libc::memfd_create(c"kedge".as_ptr(), libc::MFD_CLOEXEC);
            (fd >= 0).then(|| OwnedFd::from_raw_fd(fd))?
        };
        let device = fs::metadata(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?.dev();
        Some(device_name(device))
    });
    &DEVICE
}

/// The objects that the processes `pids` map, and where.
pub(crate) fn objects(pids: &[pid_t]) -> BTreeMap<Key, Vec<View>> {
    let mut objects: BTreeMap<Key, Vec<View>> = BTreeMap::new();
    for pid in pids {
        // One that has ended maps nothing.
        for mapping in maps::of(proc::reach(*pid)).unwrap_or_default() {
            if let Some(key) = key_of(&mapping) {
                objects.entry(key).or_default().push(View { pid: *pid, mapping });
            }
        }
    }
    objects
}

/// Those of `pids` that map an object of which somebody maps `least` bytes together.
pub(super) fn who_share(pids: &[pid_t], least: u64) -> BTreeSet<pid_t> {
    let large = |views: &&Vec<View>| views.iter().any(|view| view.mapping.len() >= least);
    let objects = objects(pids);
    objects.values().filter(large).flatten().map(|view| view.pid).collect()
}

/// The files that processes hold open, as far as they can be looked at.
fn open_files() -> BTreeSet<Key> {
    let folder = |path: String| fs::read_dir(path).into_iter().flatten().flatten();
    let processes = folder("/proc".to_owned())
        .filter(|entry| entry.file_name().to_str().is_some_and(|name| name.parse::<u32>().is_ok()));
    let descriptors = processes.flat_map(|entry| folder(format!("{}/fd", entry.path().display())));
    let key = |entry: fs::DirEntry| {
        let found = fs::metadata(entry.path()).ok()?;
        Some((device_name(found.dev()), found.ino()))
    };
    descriptors.filter_map(key).collect()
}

/// Returns those who map one of the objects and into whose memory devices may write.
fn written_by_devices(objects: &BTreeMap<Key, Vec<View>>) -> BTreeSet<pid_t> {
    let pids: BTreeSet<pid_t> = objects.values().flatten().map(|view| view.pid).collect();
    pids.into_iter().filter(|pid| direct::is_written(*pid)).collect()
}

/// Whether one of `pids` has one of the views.
fn shown_to(pids: &BTreeSet<pid_t>, views: &[View]) -> bool {
    views.iter().any(|view| pids.contains(&view.pid))
}

/// A device as /proc/PID/maps names it.
pub(crate) fn device_name(device: u64) -> String {
    format!("{:02x}:{:02x}", libc::major(device), libc::minor(device))
}

/// Takes out what a process outside of `pids` maps too: what that writes nobody tells. Processes of
/// other users cannot be looked at by an ordinary user.
pub(crate) fn without_strangers<T>(objects: &mut BTreeMap<Key, T>, pids: &[pid_t]) {
    let ours: BTreeSet<pid_t> =
        pids.iter().map(|pid| proc::reach(*pid)).chain(pids.iter().copied()).collect();
    let names = fs::read_dir("/proc").into_iter().flatten().flatten();
    let all = names.filter_map(|entry| entry.file_name().to_str()?.parse::<pid_t>().ok());
    for stranger in all.filter(|pid| !ours.contains(pid)) {
        if objects.is_empty() {
            return;
        }
        for mapping in maps::of(stranger).unwrap_or_default() {
            if mapping.shared {
                objects.remove(&(mapping.device.clone(), mapping.inode));
            }
        }
    }
}

/// What mappings show of an object, each part by one of them: in order, disjoint. The same for the
/// same views.
pub(crate) fn cover(views: &[View]) -> Vec<(Run, &View)> {
    let mut views: Vec<&View> = views.iter().collect();
    views.sort_by_key(|view| {
        let (start, end) = view.range();
        (start, Reverse(end), view.pid, view.mapping.start)
    });
    let (mut cover, mut done) = (Vec::new(), 0);
    for view in views {
        let (start, end) = view.range();
        if end > done {
            cover.push(((done.max(start), end), view));
            done = end;
        }
    }
    cover
}

/// What of an object may have changed since `views` were protected, in order, joined; they are
/// protected again if `protect`. `None` if one of them is not watched.
pub(crate) fn changed(views: &[View], protect: bool) -> io::Result<Option<Vec<Run>>> {
    let mut asked = Asked::default();
    let mut runs = Vec::new();
    for view in views {
        match asked
            .of(view)?
            .runs((view.mapping.start, view.mapping.end), &Wanted::written(protect))
        {
            Err(e) if e.raw_os_error() == Some(libc::EPERM) => return Ok(None),
            told => runs.extend(told?.into_iter().map(|run| view.shown(run))),
        }
    }
    Ok(Some(joined(runs)))
}

/// The page tables of the process that was asked about last.
#[derive(Default)]
struct Asked(Option<(pid_t, Scanner)>);

impl Asked {
    fn of(&mut self, view: &View) -> io::Result<&mut Scanner> {
        let pid = proc::reach(view.pid);
        if self.0.as_ref().is_none_or(|(same, _)| *same != pid) {
            self.0 = None;
        }
        match &mut self.0 {
            Some((_, scanner)) => Ok(scanner),
            none => Ok(&mut none.insert((pid, Scanner::of(pid)?)).1),
        }
    }
}

/// The union of `runs`, in order.
pub(crate) fn joined(mut runs: Vec<Run>) -> Vec<Run> {
    runs.sort_unstable();
    runs.dedup_by(|next, last| {
        let reaches = next.0 <= last.1;
        last.1 = if reaches { last.1.max(next.1) } else { last.1 };
        reaches
    });
    runs
}

/// Shared objects that the last image has, for the next one.
#[derive(Debug, Default)]
pub(super) struct Known {
    numbers: BTreeMap<Key, u64>,
    seen: Seen,
}

/// The job when its mappings were protected. What is written through a mapping that has gone since,
/// with its process or without, is told by nobody: so those that there were must still be there,
/// and no process may have come and gone.
#[derive(Debug, Clone, Default)]
struct Seen {
    everybody: BTreeSet<pid_t>,
    /// Of those that map an object.
    lives: BTreeMap<pid_t, Life>,
    views: BTreeMap<Key, Vec<View>>,
}

/// When a process began, and what its children have done that it has waited for.
type Life = [i64; 3];

impl Seen {
    fn of(everybody: BTreeSet<pid_t>, views: BTreeMap<Key, Vec<View>>) -> Seen {
        let pids: BTreeSet<pid_t> = views.values().flatten().map(|view| view.pid).collect();
        let lives = pids.into_iter().filter_map(|pid| Some((pid, life_of(pid)?))).collect();
        Seen { everybody, lives, views }
    }

    /// Whether `everybody` was there before, and nobody who maps an object has had other children
    /// since.
    fn is_all_of(&self, everybody: &BTreeSet<pid_t>) -> bool {
        let same = |(pid, life): (&pid_t, &Life)| life_of(*pid) == Some(*life);
        everybody.is_subset(&self.everybody) && self.lives.iter().all(same)
    }

    /// What processes have taken out of the object; `None` if it is, or was, mapped where it was
    /// not.
    fn removed(&self, key: &Key, heard: &BTreeMap<pid_t, Heard>) -> Option<Vec<Run>> {
        let views = self.views.get(key).map_or(&[][..], Vec::as_slice);
        let mut removed = Vec::new();
        for (view, heard) in views.iter().filter_map(|view| Some((view, heard.get(&view.pid)?))) {
            if heard.remapped {
                return None;
            }
            let of = (view.mapping.start, view.mapping.end);
            let clipped =
                heard.removed.iter().map(|(start, end)| (of.0.max(*start), of.1.min(*end)));
            removed.extend(clipped.filter(|(start, end)| start < end).map(|run| view.shown(run)));
        }
        Some(removed)
    }

    /// Whether `views` show all that was shown of the object.
    fn shows(&self, key: &Key, views: &[View]) -> bool {
        let Some(before) = self.views.get(key) else { return false };
        before.iter().all(|old| {
            // The same bytes at the same addresses, which may be several mappings by now.
            let same = |view: &&View| {
                let shift = |view: &View| view.mapping.start.wrapping_sub(view.mapping.offset);
                view.pid == old.pid && shift(view) == shift(old)
            };
            let mut now: Vec<Run> = views.iter().filter(same).map(View::range).collect();
            now = joined(now);
            let (start, end) = old.range();
            now.iter().any(|(first, last)| *first <= start && end <= *last)
        })
    }
}

fn life_of(pid: pid_t) -> Option<Life> {
    let stat = Stat::of(pid).ok()?;
    let fields = [Field::StartTime, Field::ChildrenMinorFaults, Field::ChildrenMajorFaults];
    Some(fields.map(|field| stat.get(field)))
}

/// What a checkpoint knows of shared objects before it stops the job.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// The processes of the job when it began, without those that have ended.
    members: Vec<pid_t>,
    /// When what is known was protected.
    seen: Seen,
    /// The next image may build on this one.
    persists: bool,
    /// What the image has of them already, or the one that it builds on.
    known: BTreeMap<Key, Tracked>,
    /// Their numbers in the image.
    numbers: BTreeMap<Key, u64>,
    /// What was written while the processes ran, and who maps it.
    ahead: Option<Ahead>,
    written: BTreeSet<pid_t>,
    /// Those all of whose mappings were protected in the pause.
    captured: BTreeMap<Key, Vec<View>>,
    /// The job in the pause.
    still: BTreeSet<pid_t>,
}

/// An object that is written, or in the last image.
#[derive(Debug, Default)]
struct Tracked {
    /// Counts as changed.
    gaps: Gaps,
    early: Early,
    /// Of this pages were taken out.
    removed: Vec<Run>,
}

impl Shared {
    /// `known` is in the image that is built on, if there is one.
    pub(super) fn begin(roots: &Roots, persists: bool, known: Option<Known>) -> Shared {
        let everybody = stop::all(roots).into_iter().collect();
        let members = stop::alive(roots);
        let none = || Known { seen: Seen { everybody, ..Seen::default() }, ..Known::default() };
        let Known { numbers, seen } = known.unwrap_or_else(none);
        let known = numbers.keys().map(|key| (key.clone(), Tracked::default())).collect();
        Shared { members, persists, known, numbers, seen, ..Shared::default() }
    }

    /// Writes large objects while the processes run.
    pub(super) fn write_ahead(&mut self, options: &Options) -> Result<(), EngineError> {
        let mut objects = objects(&self.members);
        let bytes =
            |views: &[View]| shown(views).iter().map(|(start, end)| end - start).sum::<u64>();
        objects.retain(|_, views| bytes(views) >= MIN_OBJECT_LEN);
        without_strangers(&mut objects, &self.members);
        self.seen = Seen::of(std::mem::take(&mut self.seen.everybody), objects.clone());
        let direct = written_by_devices(&objects);
        objects.retain(|_, views| !shown_to(&direct, views));
        // From here on it is told what is written through any of them.
        objects.retain(|_, views| changed(views, true).is_ok_and(|told| told.is_some()));
        let direct = written_by_devices(&objects);
        objects.retain(|_, views| !shown_to(&direct, views));
        // Who has a descriptor can write without a mapping, or by one that comes and goes. Those
        // that are closed by now cannot be had again.
        if !objects.is_empty() {
            let open = open_files();
            objects.retain(|key, _| !open.contains(key));
        }
        let numbered: Vec<(u64, Vec<View>)> =
            objects.iter().map(|(key, views)| (self.number(key), views.clone())).collect();
        if numbered.is_empty() {
            return Ok(());
        }
        let (ahead, mut gaps) = Ahead::of_objects(&numbered, options)?;
        self.ahead = Some(ahead);
        self.written = objects.values().flatten().map(|view| view.pid).collect();
        for (key, (number, _)) in objects.into_keys().zip(&numbered) {
            let gaps = gaps.remove(number).unwrap_or_default();
            self.known.insert(key, Tracked { gaps, ..Tracked::default() });
        }
        Ok(())
    }

    /// Of a mapping of the object nobody knows what was written through it.
    pub(super) fn forget(&mut self, key: &Key) {
        self.known.remove(key);
    }

    /// Whether the process maps what was written while it ran.
    pub(super) fn is_of(&self, pid: pid_t) -> bool {
        self.written.contains(&pid)
    }

    /// Copies what has changed so far while the processes run, `left` bytes at most.
    pub(super) fn look_ahead(&mut self, left: &mut u64) {
        if self.known.is_empty() {
            return;
        }
        let mut objects = objects(&self.members);
        without_strangers(&mut objects, &self.members);
        let open = open_files();
        let mut direct = written_by_devices(&objects);
        // What nobody maps any more is in no image.
        self.known.retain(|key, tracked| {
            let Some(views) = objects.get(key).filter(|_| !open.contains(key)) else {
                return false;
            };
            let Ok(Some(told)) = changed(views, true) else { return false };
            tracked.gaps = joined([told, std::mem::take(&mut tracked.gaps)].concat());
            true
        });
        direct.append(&mut written_by_devices(&objects));
        for (key, tracked) in &mut self.known {
            let views = objects.get(key).map_or(&[][..], Vec::as_slice);
            let most = if shown_to(&direct, views) { 0 } else { *left };
            let told = std::mem::take(&mut tracked.gaps);
            tracked.early = Early::of_object(told, most, |chunks, room| {
                copy_object(views, chunks, room, Unmapped::Fails)
            });
            *left = left.saturating_sub(tracked.early.room());
        }
    }

    /// The job stands still: these are its processes, zombies included, and that was heard of
    /// them. What nobody can vouch for is not known any more.
    pub(crate) fn stand_still(
        &mut self,
        everybody: impl IntoIterator<Item = pid_t>,
        heard: &BTreeMap<pid_t, Heard>,
    ) {
        self.still = everybody.into_iter().collect();
        if !self.known.is_empty() && !self.seen.is_all_of(&self.still) {
            self.known.clear();
        }
        let Shared { seen, known, .. } = self;
        known.retain(|key, tracked| match seen.removed(key, heard) {
            Some(removed) => {
                tracked.removed = removed;
                true
            }
            None => false,
        });
    }

    /// Whether the process maps an object that is known, or to be known.
    pub(crate) fn asks_of(&self, mappings: &[Mapping]) -> bool {
        (self.persists || !self.known.is_empty()) && mappings.iter().any(|m| key_of(m).is_some())
    }

    /// A process's children end without its being told: nobody knows what they have written.
    pub(crate) fn distrust(&mut self) {
        (self.persists, self.known) = (false, BTreeMap::new());
    }

    /// What has changed of the stopped object since it was last looked at, and before; `None` if
    /// nobody knows, and all of it is to be stored.
    pub(crate) fn changes(
        &mut self,
        key: &Key,
        views: &[View],
    ) -> Result<Option<(Vec<Run>, Early)>, EngineError> {
        let known = self.known.remove(key).filter(|_| self.seen.shows(key, views));
        if known.is_none() && !self.persists {
            return Ok(None);
        }
        let failed = |source| {
            let pid = views.first().map_or(0, |view| view.pid);
            EngineError::System { pid, what: "see what has changed of its shared memory", source }
        };
        let Some(told) = changed(views, self.persists).map_err(failed)? else { return Ok(None) };
        if self.persists {
            self.captured.insert(key.clone(), views.to_vec());
        }
        Ok(known.map(|Tracked { removed, early, .. }| (joined([told, removed].concat()), early)))
    }

    /// The number of an object in the image.
    pub(crate) fn number(&mut self, key: &Key) -> u64 {
        let next = self.numbers.values().max().map_or(1, |last| last + 1);
        *self.numbers.entry(key.clone()).or_insert(next)
    }

    /// What was written while the processes ran.
    pub(crate) fn ahead(&mut self) -> Option<Ahead> {
        self.ahead.take()
    }

    /// All that is to be seen of the stopped job is seen: what its processes write from here on is
    /// told to the next one.
    pub(crate) fn goes_on(&mut self) {
        let captured = std::mem::take(&mut self.captured);
        self.seen = Seen::of(std::mem::take(&mut self.still), captured);
    }

    /// What the next image can build on.
    pub(super) fn captured(&self) -> Known {
        let mut numbers = self.numbers.clone();
        numbers.retain(|key, _| self.seen.views.contains_key(key));
        Known { numbers, seen: self.seen.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(pid: pid_t, start: u64, offset: u64, length: u64) -> View {
        let (device, name) = ("00:01".to_owned(), "/dev/zero (deleted)".to_owned());
        let (inode, protection, flags) = (7, libc::PROT_READ, Vec::new());
        let end = start + length;
        let (shared, comes_back) = (true, false);
        let mapping = Mapping {
            start,
            end,
            protection,
            shared,
            offset,
            device,
            inode,
            name,
            flags,
            comes_back,
            emptied: false,
        };
        View { pid, mapping }
    }

    #[test]
    fn every_part_is_covered_once() {
        let views =
            [view(3, 900, 0, 10), view(1, 500, 0, 10), view(2, 700, 4, 20), view(2, 100, 40, 5)];
        let found: Vec<(Run, pid_t)> = cover(&views).iter().map(|(run, v)| (*run, v.pid)).collect();
        assert_eq!(found, [((0, 10), 1), ((10, 24), 2), ((40, 45), 2)]);
        assert_eq!((views[2].address(10), views[2].shown((706, 720))), (706, (10, 24)));
    }

    #[test]
    fn only_the_kernels_own_shared_memory_is_watched() {
        let mut mapping = view(1, 4096, 0, 4096).mapping;
        mapping.device = kernel_memory().clone().unwrap();
        assert!(key_of(&mapping).is_some());
        let named = Mapping { name: "/dev/shm/x".to_owned(), ..mapping.clone() };
        let private = Mapping { shared: false, ..mapping.clone() };
        let large = Mapping { end: mapping.start + MAX_MAPPING_LEN + 1, ..mapping.clone() };
        let disk = Mapping { device: "fe:00".to_owned(), ..mapping };
        assert!([named, private, large, disk].iter().all(|mapping| key_of(mapping).is_none()));
    }

    #[test]
    fn a_mapping_that_has_gone_is_missed() {
        let (own, key) = (std::process::id() as pid_t, ("00:01".to_owned(), 7));
        let old = [view(own, 0x10000, 0, 0x4000), view(own, 0x80000, 0, 0x4000)];
        let seen = Seen::of([own, 1].into(), [(key.clone(), old.to_vec())].into());
        assert!(seen.shows(&key, &old));
        // In parts, and with another one beside.
        let parts = [
            view(own, 0x80000, 0, 0x5000),
            view(own, 0x10000, 0, 0x1000),
            view(own, 0x11000, 0x1000, 0x3000),
        ];
        assert!(seen.shows(&key, &parts));
        assert!(!seen.shows(&key, &parts[1..]) && !seen.shows(&key, &parts[..2]));
        let moved = [old[0].clone(), view(own, 0x90000, 0, 0x4000)];
        assert!(!seen.shows(&key, &moved) && !seen.shows(&("00:01".to_owned(), 8), &old));
    }

    #[test]
    fn what_was_heard_counts_for_what_it_is_about() {
        let (key, other) = (("00:01".to_owned(), 7), ("00:01".to_owned(), 8));
        let views = [view(1, 0x10000, 0x2000, 0x4000), view(2, 0x80000, 0, 0x4000)];
        let beside = [view(1, 0x90000, 0, 0x4000)];
        let all = [(key.clone(), views.to_vec()), (other.clone(), beside.to_vec())];
        let seen = Seen { views: all.into(), ..Seen::default() };
        let removed = |pid: pid_t, run: Run| {
            let heard = Heard { remapped: false, removed: vec![run] };
            seen.removed(&key, &[(pid, heard)].into())
        };
        assert_eq!(removed(1, (0xf000, 0x11000)), Some(vec![(0x2000, 0x3000)]));
        assert_eq!(removed(1, (0x13000, 0x90000)), Some(vec![(0x5000, 0x6000)]));
        assert_eq!(removed(2, (0x10000, 0x11000)), Some(vec![]));
        assert_eq!(removed(3, (0x80000, 0x81000)), Some(vec![]));
        let remapped = [(2, Heard { remapped: true, removed: Vec::new() })].into();
        assert_eq!(seen.removed(&key, &remapped), None);
        assert_eq!(seen.removed(&other, &remapped), Some(vec![]));
    }

    #[test]
    fn a_process_that_has_come_and_gone_is_noticed() {
        let own = std::process::id() as pid_t;
        let key = ("00:01".to_owned(), 7);
        let seen =
            || Seen::of([own].into(), [(key.clone(), vec![view(own, 4096, 0, 4096)])].into());
        let before = seen();
        assert!(before.is_all_of(&[own].into()) && !before.is_all_of(&[own, 1].into()));
        assert!(std::process::Command::new("true").status().unwrap().success());
        assert!(!before.is_all_of(&[own].into()), "a child was waited for");
        assert!(seen().is_all_of(&[own].into()));
    }
}
