//! Which memory of a job has changed since its last image.
//!
//! A userfaultfd watches the private anonymous mappings of each process: the kernel marks a page as
//! written at the first write after it was protected, and nobody is asked. A mapping that is not
//! watched, because it is new, was moved, or belongs to a new program, counts as changed as a
//! whole. So does everything if anything is in doubt: a checkpoint that failed, an image that is
//! gone.

mod direct;
mod heard;
mod scan;
mod shared;
mod uffd;

use crate::capture::{Ahead, Early, Gaps, Once, Settled};
use crate::maps::{self, Mapping};
pub(crate) use crate::pagemap::Run;
use crate::plugins::sys;
use crate::proc;
use crate::proc::resident;
use crate::stop::{self, Patience, Roots, StoppedProcess};
use crate::{EngineError, capture};
use heard::{Heard, Listener};
use kedge_image::{FileEntry, Manifest, Parent, Pin};
use libc::pid_t;
pub(crate) use scan::{Pages, common, without};
pub(crate) use shared::{Key, Shared, View, cover, device_name, kernel_memory};
use std::cmp::Ordering;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use uffd::Watch;
pub(crate) use uffd::taken;

/// Most bytes of one job that are copied while it stands still: what has changed is elsewhere than
/// in the program's memory until it is written.
const MAX_COPIED: u64 = 1 << 30;
/// Bytes that a process may always have copied, however little memory it has.
const MIN_COPY_LIMIT: u64 = 16 << 20;
/// The part of a process's memory that is copied at most. A quarter of that may be copied in the
/// pause, which takes less than a clone's page tables.
const PART: u64 = 8;

/// Follows the memory of one job from checkpoint to checkpoint.
#[derive(Debug, Clone, Default)]
pub struct Tracker(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    processes: BTreeMap<pid_t, Watched>,
    /// Of what they do to shared memory; there is one when there is something to hear.
    listener: Option<Listener>,
    base: Option<Base>,
    /// Shared objects that the last image has.
    shared: shared::Known,
}

#[derive(Debug)]
struct Watched {
    watch: Watch,
    /// It is in the image that the next one may build on, and what it has changed since is known.
    known: bool,
    /// What the kernel told it has changed, to a checkpoint that came to nothing.
    told: Vec<Run>,
}

/// The last image, on which the next can build.
#[derive(Debug, Clone)]
struct Base {
    folder: PathBuf,
    parent: Parent,
    /// Images in its chain.
    length: u32,
    /// Which temporary files are the job's.
    settled: Settled,
}

/// What a checkpoint is to know before it stops the job.
#[derive(Debug, Default)]
pub(crate) struct Session {
    /// Knows again what this was told, if it ends before it is spent.
    tracker: Option<Tracker>,
    base: Option<(Base, Pin, Manifest)>,
    /// What was written while the processes ran, where the image builds on none.
    ahead: BTreeMap<pid_t, Ahead>,
    /// Such memory of which nobody knows what has changed since.
    stale: BTreeMap<pid_t, Ahead>,
    /// Memory that processes have in common, in what was written while they ran.
    pub(crate) once: Once,
    /// What counts as changed, beside what the kernel will tell.
    gaps: BTreeMap<pid_t, Gaps>,
    /// What has changed before the pause.
    early: BTreeMap<pid_t, Early>,
    known: BTreeSet<pid_t>,
    pub(crate) shared: Shared,
    /// How long the job stood still for it.
    pub(crate) stall: Duration,
    pub(crate) notes: Vec<String>,
}

impl Tracker {
    /// Images in the chain that the next one would lengthen.
    pub fn length(&self) -> u32 {
        self.state().base.as_ref().map_or(0, |base| base.length)
    }

    /// The image on which the next one can build.
    pub fn base(&self) -> Option<PathBuf> {
        self.state().base.as_ref().map(|base| base.folder.clone())
    }

    /// The next image builds on none.
    pub fn forget(&self) {
        self.state().base = None;
    }

    /// One for a single checkpoint, if a process is to be written while it runs.
    pub(crate) fn once(roots: &Roots, options: &capture::Options) -> Option<Tracker> {
        let least = options.ahead?;
        let alive = stop::alive(roots);
        let large = alive.iter().any(|pid| resident(*pid) >= least);
        (large || !shared::who_share(&alive, least).is_empty()).then(Tracker::default)
    }

    /// Nothing is watched any more, without standing in anybody's way.
    pub(crate) fn end(&self) {
        self.state().processes.iter().for_each(|(pid, watched)| watched.end(*pid));
    }

    /// What the processes of the stopped job have done to shared memory since this was asked last.
    pub(crate) fn heard(&self) -> BTreeMap<pid_t, Heard> {
        self.state().listener.as_ref().map(Listener::take).unwrap_or_default()
    }

    /// Has a mapping of the stopped process `pid` watched from here on; `false` if it is not.
    pub(crate) fn watch(&self, pid: pid_t, mapping: &Mapping) -> bool {
        self.state().processes.get(&pid).is_some_and(|watched| watched.watch.add(mapping))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prepares a checkpoint into `folder`, one that builds on the last if it may and can. From
    /// here on the last one is built on by nobody else, whatever becomes of this.
    pub(crate) fn begin(
        &self,
        roots: &Roots,
        options: &capture::Options,
    ) -> Result<Session, EngineError> {
        let mut state = self.state();
        let mut session = Session::default();
        if let Some(mut base) = state.base.take().filter(|_| !options.full) {
            let whole = options.whole.as_deref().and_then(Path::file_name);
            base.parent.whole = whole.and_then(|name| name.to_str()).map(str::to_owned);
            match base.pinned(options) {
                Ok((pin, manifest)) => session.base = Some((base, pin, manifest)),
                Err(why) => session.notes.push(format!("the image is a full one: {why}")),
            }
        }
        if session.base.is_none() {
            state.processes.values_mut().for_each(|watched| watched.known = false);
        }
        // After a checkpoint that fails nobody knows what has changed of them.
        let shared = std::mem::take(&mut state.shared);
        let known = session.base.is_some().then_some(shared);
        session.shared = Shared::begin(roots, options.tracker.is_some(), known);
        state.watch(roots, options, &mut session)?;
        for (pid, watched) in &mut state.processes {
            let told = std::mem::take(&mut watched.told);
            if watched.known {
                session.known.insert(*pid);
                session.gaps.insert(*pid, told);
            }
        }
        session.tracker = Some(self.clone());
        Ok(session)
    }

    /// Writes the memory of large processes while they run, where nothing else holds it. What else
    /// is watched from here on is protected.
    pub(crate) fn write_ahead(
        &self,
        session: &mut Session,
        options: &capture::Options,
    ) -> Result<(), EngineError> {
        if options.ahead.is_some() && session.base.is_none() {
            session.shared.write_ahead(options)?;
        }
        let state = self.state();
        let unknown = || state.processes.iter().filter(|(_, watched)| !watched.known);
        if session.base.is_none() {
            session.once = in_common(unknown().map(|(pid, _)| *pid), options);
        }
        for (pid, watched) in unknown() {
            if session.write_ahead(*pid, options)? {
                // Its pages are protected by that.
            } else if options.tracker.is_some() {
                protect(*pid);
            } else if !session.shared.is_of(*pid) {
                watched.end(*pid);
            }
        }
        Ok(())
    }

    /// A checkpoint ends before it has looked into the stopped job: the next one builds on what it
    /// would have.
    fn take_back(&self, session: &mut Session) {
        let mut state = self.state();
        for (pid, watched) in &mut state.processes {
            watched.known = session.known.contains(pid);
            watched.told = session.gaps.remove(pid).unwrap_or_default();
            watched.told.extend(session.early.remove(pid).map(Early::told).unwrap_or_default());
        }
        state.base = session.base.take().map(|(base, ..)| base);
    }

    /// `folder`, whose manifest that is, can be built on.
    pub(crate) fn succeed(
        &self,
        session: &Session,
        folder: &Path,
        manifest: &Manifest,
        settled: Settled,
    ) {
        let mut state = self.state();
        for (pid, watched) in &mut state.processes {
            watched.known = manifest.processes.contains(pid);
        }
        let length = match (&manifest.parent, &session.base) {
            (Some(_), Some((base, ..))) => base.length.saturating_add(1),
            _ => 1,
        };
        state.shared = session.shared.captured();
        let parent = manifest.as_parent(folder);
        state.base =
            parent.map(|parent| Base { folder: folder.to_owned(), parent, length, settled });
    }
}

impl Base {
    /// Whether an image can build on this one: then it stays for as long as the pin.
    fn pinned(&self, options: &capture::Options) -> Result<(Pin, Manifest), String> {
        if self.folder.parent() != options.whole.as_deref().or(options.folder.parent()) {
            return Err(format!("the last one, {}, is in another folder", self.folder.display()));
        }
        let pin = Pin::new(&self.folder).map_err(|error| error.to_string())?;
        let manifest = Manifest::read(&self.folder).map_err(|error| error.to_string())?;
        if manifest.identity() != self.parent.checksum {
            return Err(format!("{} is another one than it was", self.folder.display()));
        }
        Ok((pin, manifest))
    }
}

impl Session {
    /// The image that is built on.
    pub(crate) fn parent(&self) -> Option<&Parent> {
        self.base.as_ref().map(|(base, ..)| &base.parent)
    }

    /// What it tells of temporary files.
    pub(crate) fn settled(&self) -> &Settled {
        static NONE: Settled = Settled::new();
        self.base.as_ref().map_or(&NONE, |(base, ..)| &base.settled)
    }

    /// Its manifest.
    pub(crate) fn base(&self) -> Option<&Manifest> {
        self.base.as_ref().map(|(.., manifest)| manifest)
    }

    pub(crate) fn is_known(&self, pid: pid_t) -> bool {
        self.ahead.contains_key(&pid) || self.base.is_some() && self.known.contains(&pid)
    }

    /// What of the process was written while it ran, for who holds it.
    pub(crate) fn ahead(&mut self, pid: pid_t) -> Option<Ahead> {
        self.ahead.remove(&pid)
    }

    /// Sees that what was written while processes ran is on the disk where other files of the
    /// image refer to it, though the processes themselves have ended or are stored as a whole.
    pub(crate) fn finish_referred(&mut self) -> Result<Vec<FileEntry>, EngineError> {
        let mut left = std::mem::take(&mut self.ahead);
        left.append(&mut self.stale);
        let referred = left.into_iter().filter(|(pid, _)| self.once.is_referred(*pid));
        let files: Result<Vec<Option<FileEntry>>, EngineError> =
            referred.map(|(_, ahead)| ahead.finish(&[])).collect();
        Ok(files?.into_iter().flatten().collect())
    }

    /// What it was told is asked for again from here on, and no more to be taken back.
    pub(crate) fn spend(&mut self) {
        self.tracker = None;
    }

    /// What the process has changed before the pause, whoever copies it.
    pub(crate) fn early(&mut self, pid: pid_t) -> Early {
        self.early.remove(&pid).unwrap_or_default()
    }

    /// Writes the memory of a large process while it runs, if nothing else holds it; whether it is
    /// written.
    fn write_ahead(&mut self, pid: pid_t, options: &capture::Options) -> Result<bool, EngineError> {
        let large = options.ahead.is_some_and(|least| resident(pid) >= least);
        if !large || self.base.is_some() || direct::is_written(pid) {
            return Ok(false);
        }
        match Ahead::of(pid, options, &self.once) {
            Ok(Some(_)) if direct::is_written(pid) => return Ok(false),
            Ok(Some((ahead, gaps))) => {
                self.ahead.insert(pid, ahead);
                self.gaps.insert(pid, gaps);
            }
            Ok(None) => return Ok(false),
            // A disk that is full is full for the rest, too.
            Err(error @ EngineError::Image(_)) => return Err(error),
            // It has ended, or is another program by now.
            Err(_) => return Ok(false),
        }
        Ok(true)
    }

    /// Has what has changed so far copied while the job runs.
    pub(crate) fn look_ahead(&mut self) {
        let known = self.known.iter().copied().filter(|_| self.base.is_some());
        let known: Vec<pid_t> = known.chain(self.ahead.keys().copied()).collect();
        let mut left = MAX_COPIED;
        for pid in known {
            let direct = direct::is_written(pid);
            let most = if direct { 0 } else { MIN_COPY_LIMIT.max(resident(pid) / PART).min(left) };
            match Early::of(pid, most) {
                Ok(mut early) => {
                    if direct::is_written(pid) {
                        early.drop_copies();
                    }
                    early.add(&self.gaps.remove(&pid).unwrap_or_default());
                    left = left.saturating_sub(early.room());
                    self.early.insert(pid, early);
                }
                // What it has changed was told, and is lost.
                Err(error) => {
                    if proc::lives(proc::reach(pid)) {
                        self.notes.push(format!("process {pid} is written as a whole: {error}"));
                    }
                    self.known.remove(&pid);
                    self.stale.extend(self.ahead.remove(&pid).map(|ahead| (pid, ahead)));
                }
            }
        }
        self.shared.look_ahead(&mut left);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(tracker) = self.tracker.take() {
            tracker.take_back(self);
        }
    }
}

impl State {
    /// Has every process watched, and all mappings that it has now.
    fn watch(
        &mut self,
        roots: &Roots,
        options: &capture::Options,
        session: &mut Session,
    ) -> Result<(), EngineError> {
        if let Err(error) =
            Pages::of(std::process::id() as pid_t).and_then(|mut p| p.absent((0, 4096)))
        {
            let why =
                "this kernel does not tell which pages were written (PAGEMAP_SCAN, Linux 6.7)";
            session.notes.push(format!("the image is a full one: {why}: {error}"));
            self.processes.clear();
            return Ok(());
        }
        let mut alive = stop::alive(roots);
        alone_with_their_memory(&mut alive);
        // For this image alone no others are watched.
        let least = options.ahead.filter(|_| options.tracker.is_none());
        let sharing = least.map(|least| shared::who_share(&alive, least)).unwrap_or_default();
        let large = |pid: pid_t| least.is_none_or(|least| resident(pid) >= least);
        alive.retain(|pid| large(*pid) || sharing.contains(pid));
        // A program that executed another has new memory, of which nothing is watched.
        let unwatched: BTreeMap<pid_t, Unwatched> =
            alive.iter().map(|pid| (*pid, Unwatched::of(*pid))).collect();
        let is_own = |pid: &pid_t| unwatched.get(pid).is_some_and(|of| *of != Unwatched::All);
        self.processes.retain(|pid, _| is_own(pid));
        let least = |pid: &pid_t| match self.processes.contains_key(pid) {
            true => Unwatched::Much,
            false => Unwatched::Little,
        };
        let late: BTreeSet<pid_t> =
            unwatched.iter().filter(|(pid, of)| **of >= least(pid)).map(|(pid, _)| *pid).collect();
        if late.is_empty() {
            return Ok(());
        }
        let mut stopped =
            stop::stop(roots, Patience::new(options.patience).servants(options.servants))?;
        let since = stopped.since;
        for process in stopped.processes.iter_mut().filter(|process| late.contains(&process.pid)) {
            if let Err(error) = self.watch_stopped(process, &mut session.shared) {
                session.notes.push(format!("written as a whole: {error}"));
            }
        }
        drop(stopped);
        session.stall = since.elapsed();
        Ok(())
    }

    /// Has all memory of a stopped process watched. One that runs could map something else
    /// meanwhile, of which a part would be watched: two mappings, where its mremap(2) needs one.
    fn watch_stopped(
        &mut self,
        process: &mut StoppedProcess,
        shared: &mut Shared,
    ) -> Result<(), EngineError> {
        let State { processes, listener, .. } = self;
        let (pid, at) = (process.pid, process.main.pid());
        let watched = match processes.entry(pid) {
            Entry::Occupied(watched) => watched.into_mut(),
            Entry::Vacant(none) => {
                let watch = Watch::of(&mut process.main)?;
                none.insert(Watched { watch, known: false, told: Vec::new() })
            }
        };
        let mappings = maps::of(at)?;
        if mappings.iter().any(|mapping| shared::key_of(mapping).is_some()) {
            watched.watch.hear(pid, &mut process.main, started(pid, listener)?)?;
        }
        let failed = |source| EngineError::System { pid, what: "see what is watched", source };
        let mut pages = Pages::of(at).map_err(failed)?;
        let mut any = false;
        for mapping in mappings.iter().filter(|mapping| is_watched(mapping)) {
            let before = pages.is_watched((mapping.start, mapping.start + kedge_image::PAGE));
            let added = watched.watch.add(mapping);
            any |= added;
            if before || !added {
                continue;
            }
            // What was done to it so far was told by nobody.
            match shared::key_of(mapping) {
                Some(key) => shared.forget(&key),
                None => watched.told.push((mapping.start, mapping.end)),
            }
        }
        // Another process has the same memory, and is watched.
        if !any {
            processes.remove(&pid);
        }
        Ok(())
    }
}

/// The listener, which begins to listen if there was none.
fn started(pid: pid_t, listener: &mut Option<Listener>) -> Result<&Listener, EngineError> {
    let what = "listen to what it does to shared memory";
    let failed = |source| EngineError::System { pid, what, source };
    Ok(match listener {
        Some(listener) => listener,
        none => none.insert(Listener::new().map_err(failed)?),
    })
}

impl Watched {
    fn end(&self, pid: pid_t) {
        let mappings = maps::of(proc::reach(pid)).unwrap_or_default();
        mappings.iter().filter(|m| is_watched(m)).for_each(|m| self.watch.remove(m));
    }
}

/// How much memory of a process nobody watches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Unwatched {
    /// So little that it may be copied in the pause.
    Little,
    Much,
    All,
}

impl Unwatched {
    /// Bytes of private memory that are much: stopping the job for them takes less than copying
    /// them.
    const MUCH: u64 = 4 << 20;

    fn of(pid: pid_t) -> Unwatched {
        let pid = proc::reach(pid);
        let (Ok(mappings), Ok(mut pages)) = (maps::of(pid), Pages::of(pid)) else {
            return Unwatched::All;
        };
        let (mut some, mut bytes) = (false, 0u64);
        for mapping in mappings.iter().filter(|mapping| is_watched(mapping)) {
            if pages.is_watched((mapping.start, mapping.start + kedge_image::PAGE)) {
                some = true;
            } else if mapping.shared {
                bytes = u64::MAX;
            } else {
                let there = pages.there((mapping.start, mapping.end)).unwrap_or_default();
                let there = there.iter().map(|(start, end)| end - start).sum();
                bytes = bytes.saturating_add(there);
            }
        }
        match some {
            false => Unwatched::All,
            true if bytes >= Unwatched::MUCH => Unwatched::Much,
            true => Unwatched::Little,
        }
    }
}

/// Whether the mapping's pages can be watched: those of files have marks that look like pages.
pub(crate) fn watchable(mapping: &Mapping) -> bool {
    mapping.inode == 0 && mapping.start < maps::TOP && capture::is_own(mapping)
}

/// Whether the mapping is to be watched: it is private, or shows a shared object.
fn is_watched(mapping: &Mapping) -> bool {
    watchable(mapping) || shared::key_of(mapping).is_some()
}

/// Protects all watched pages of a running process: what it writes from here on is known.
fn protect(pid: pid_t) {
    let pid = proc::reach(pid);
    let (Ok(mappings), Ok(mut pages)) = (maps::of(pid), Pages::of(pid)) else { return };
    for mapping in mappings.iter().filter(|mapping| watchable(mapping)) {
        // What is not protected counts as changed.
        let _ = pages.since((mapping.start, mapping.end), true);
    }
}

/// What those of `pids` have in common whose memory is written while they run.
fn in_common(pids: impl Iterator<Item = pid_t>, options: &capture::Options) -> Once {
    let large = pids.filter(|pid| options.ahead.is_some_and(|least| resident(*pid) >= least));
    let mappings: Vec<Vec<Mapping>> =
        large.filter_map(|pid| maps::of(proc::reach(pid)).ok()).collect();
    Once::of(mappings.iter().map(|mappings| &mappings[..]))
}

/// Leaves out those that share their memory with another: what one has changed would be told once,
/// and the other would seem unchanged. Those that have ended are left out as well.
fn alone_with_their_memory(pids: &mut Vec<pid_t>) {
    let mut ordered = Vec::<pid_t>::with_capacity(pids.len());
    let mut left_out = BTreeSet::new();
    for pid in pids.iter().copied() {
        let (mut from, mut to) = (0, ordered.len());
        while from < to {
            let middle = usize::midpoint(from, to);
            let other = ordered[middle];
            match compare_memory(pid, other) {
                Some(Ordering::Less) => to = middle,
                Some(Ordering::Greater) => from = middle + 1,
                Some(Ordering::Equal) => {
                    left_out.extend([pid, other]);
                    break;
                }
                None if !proc::lives(proc::reach(other)) => {
                    left_out.insert(ordered.remove(middle));
                    (from, to) = (0, ordered.len());
                }
                None => {
                    left_out.insert(pid);
                    break;
                }
            }
        }
        if !left_out.contains(&pid) {
            ordered.insert(from, pid);
        }
    }
    pids.retain(|pid| !left_out.contains(pid));
}

/// The kernel's order of their memory; `None` where they cannot be compared.
fn compare_memory(a: pid_t, b: pid_t) -> Option<Ordering> {
    sys::compare_memory(proc::reach(a), proc::reach(b)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Between being listed and being compared: the others are as they were.
    #[test]
    fn one_that_has_ended_is_left_out_and_nobody_else() {
        let mut others: Vec<_> =
            (0..8).map(|_| Command::new("sleep").arg("60").spawn().unwrap()).collect();
        let pids: Vec<pid_t> = others.iter().map(|child| child.id() as pid_t).collect();
        let own = std::process::id() as pid_t;
        for (ended, child) in others.iter_mut().enumerate() {
            child.kill().unwrap();
            child.wait().unwrap();
            let mut alone = [&[own][..], &pids].concat();
            alone_with_their_memory(&mut alone);
            assert_eq!(alone, [&[own][..], &pids[ended + 1..]].concat());
        }
        let mut same = vec![own, own];
        alone_with_their_memory(&mut same);
        assert!(same.is_empty(), "one memory, twice");
    }
}
