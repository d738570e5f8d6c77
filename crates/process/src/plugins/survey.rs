//! The survey: which open file descriptions a job has, and which plugin takes each.

use crate::EngineError;
use crate::maps::{self, Mapping};
use crate::plugins::contents::DataWriter;
use crate::plugins::error::{PluginError, Refusal};
use crate::plugins::job::{Capture, Found, Holder, Job, Process};
use crate::plugins::procfs::{self, Seen};
use crate::plugins::saved::{self, Saved};
use crate::plugins::{Claim, Plugin, Plugins, Rendezvous, all, carried, sockets, streams, sys};
use crate::{proc, several};
use kedge_image::Manifest;
use rustix::fd::BorrowedFd;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Of pidfd_open: a thread that is not its process's first (Linux 6.9).
const PIDFD_THREAD: u32 = libc::O_EXCL as u32;

/// How often a job that changes while it is looked at is looked at again.
const TRIES: usize = 5;

/// How often processes that run are looked at again, because something was closed meanwhile.
const LOOKS: usize = 100;

/// How long a program that runs may take to accept the connections that wait at one socket.
const ACCEPT_TIMEOUT: Duration = Duration::from_millis(200);

/// How long claims that end in refusals may take together: each may wait for what a process is to
/// do. After that nobody else is asked, and what was refused until then is told.
const REFUSALS_TIMEOUT: Duration = Duration::from_secs(1);

/// What becomes of the contents of files that are open for writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FileContents {
    /// They go with the image.
    #[default]
    Save,
    /// They stay where they are; a restart takes what it finds there.
    Keep,
}

#[derive(Debug, Clone)]
pub struct SurveyOptions<'a> {
    /// The standard streams that the job was started with: descriptors of this process.
    pub streams: [Option<BorrowedFd<'a>>; 3],
    pub contents: FileContents,
    /// The most that the contents of one file may take, in bytes; a larger one is refused.
    pub limit: u64,
    /// The processes stand still, so that waiting for something that they may do is in vain.
    pub still: bool,
    /// Plugins that are not kedge's own. They are asked first.
    pub more: Plugins,
}

impl Default for SurveyOptions<'_> {
    fn default() -> Self {
        let (contents, limit) = (FileContents::Save, 4 << 30);
        SurveyOptions { streams: [None; 3], contents, limit, still: false, more: Plugins::new() }
    }
}

#[derive(Debug)]
pub struct Survey<'a> {
    pids: Vec<i32>,
    options: SurveyOptions<'a>,
    job: Job,
    /// In the order of claiming.
    plugins: Plugins,
    /// For each file of the job the index of its plugin.
    claims: Vec<usize>,
}

impl<'a> Survey<'a> {
    /// Looks at the processes `pids`, running or stopped. The refusals name all that cannot be
    /// saved, or as much of it as is found in [`REFUSALS_TIMEOUT`].
    pub fn of(pids: &[i32], options: &SurveyOptions<'a>) -> Result<Survey<'a>, Vec<Refusal>> {
        // What has been closed while it was looked at cannot be known for what it was.
        let mut looked = Survey::looked(pids, options);
        for _ in 0..LOOKS {
            let gone = |refusals: &Vec<Refusal>| refusals.iter().any(Refusal::is_past);
            if options.still || !looked.as_ref().is_err_and(gone) {
                break;
            }
            looked = Survey::looked(pids, options);
        }
        looked
    }

    fn looked(pids: &[i32], options: &SurveyOptions<'a>) -> Result<Survey<'a>, Vec<Refusal>> {
        let mut job = look(pids, options.still)?;
        (job.contents, job.limit) = (options.contents, options.limit);
        job.patience = if options.still { Duration::ZERO } else { ACCEPT_TIMEOUT };
        sockets::recognise(&mut job);
        carried::find(&mut job, options.still).map_err(|refusal| vec![refusal])?;
        streams::recognise(&mut job, options);
        let plugins = all(&options.more);
        let mut claims = Vec::with_capacity(job.files.len());
        let (mut refusals, mut waited) = (Vec::new(), Duration::ZERO);
        for file in &job.files {
            let begin = Instant::now();
            match claimed(file, &job, &plugins) {
                Ok(plugin) => claims.push(plugin),
                Err(refusal) => {
                    refusals.push(refusal);
                    waited += begin.elapsed();
                }
            }
            if waited >= REFUSALS_TIMEOUT {
                break;
            }
        }
        if !refusals.is_empty() {
            return Err(refusals);
        }
        Ok(Survey { pids: pids.to_vec(), options: options.clone(), job, plugins, claims })
    }

    /// The name of the plugin that takes each file.
    pub fn claims(&self) -> impl Iterator<Item = (&Found, &'static str)> {
        self.job.files.iter().zip(self.claims.iter().map(|claim| self.plugins[*claim].name()))
    }

    /// Whether a process has the file of this device and inode open, for more than its path.
    pub(crate) fn has_open(&self, device: u64, inode: u64) -> bool {
        self.job.of_inode(device, inode).any(|file| !file.is_path_only())
    }

    /// Saves everything, files into the image's `folder`, which exists. Every process is stopped,
    /// and stays so until this returns; on an error they can go on as if nothing had happened.
    pub fn save(&self, folder: &Path) -> Result<Saved, PluginError> {
        // They may have opened and closed since.
        let options = SurveyOptions { still: true, ..self.options.clone() };
        let now = Survey::of(&self.pids, &options).map_err(PluginError::Survey)?;
        now.save_on(folder, None, &mappings(&now.job)?, None)
    }

    /// The same, of processes that stood still already when they were looked at, and map `mappings`
    /// each, for an image that may build on `base`. `others`: the job's other parts, which stand
    /// still as well.
    pub(crate) fn save_on(
        &self,
        folder: &Path,
        base: Option<&Manifest>,
        mappings: &[Vec<Mapping>],
        others: Option<&dyn Rendezvous>,
    ) -> Result<Saved, PluginError> {
        let data = DataWriter::create(folder)?;
        let (files, warnings) = (Vec::new(), Vec::new());
        let (job, buffer) = (&self.job, Vec::new());
        let mut capture =
            Capture { job, folder, base, mappings, data, files, warnings, buffer, others };
        let states = self.checkpoint(&mut capture);
        // Whatever happened: all plugins give back, and the first error counts.
        let mut resumed = Ok(());
        for plugin in &self.plugins {
            resumed = resumed.and(plugin.resume(&mut capture));
        }
        let states = states.and_then(|states| resumed.map(|()| states))?;
        saved::saved(capture, states)
    }

    /// Returns when all that the plugins have begun is over ([`Plugin::captured`]).
    pub(crate) fn captured(&self) -> Result<(), PluginError> {
        self.plugins.iter().try_for_each(|plugin| plugin.captured())
    }

    fn checkpoint(&self, capture: &mut Capture) -> Result<Vec<saved::State>, PluginError> {
        let mut states = Vec::new();
        for (index, plugin) in self.plugins.iter().enumerate() {
            let mine = (0..self.claims.len()).filter(|file| self.claims[*file] == index);
            let mine: Vec<usize> = mine.collect();
            if let Some(state) = plugin.checkpoint(capture, &mine)? {
                let (plugin, version) = (plugin.name().to_owned(), plugin.version());
                states.push(saved::State { plugin, version, state });
            }
        }
        Ok(states)
    }
}

/// What each process maps; nothing of one that has ended.
fn mappings(job: &Job) -> Result<Vec<Vec<Mapping>>, PluginError> {
    let of = |process: &Process| match maps::named(process.at) {
        Err(EngineError::Ended { .. }) => Ok(Vec::new()),
        other => other.map_err(|error| PluginError::Refused(error.to_string())),
    };
    job.processes.iter().map(of).collect()
}

fn claimed(file: &Found, job: &Job, plugins: &[Arc<dyn Plugin>]) -> Result<usize, Refusal> {
    let refusal = |why: String| carried::refusal(job, file, &why);
    for (index, plugin) in plugins.iter().enumerate() {
        match plugin.claim(file, job) {
            Claim::Yes if file.is_under_way() => {
                return carried::hindrance(file, job, &**plugin)
                    .map_or(Ok(index), |why| Err(refusal(why)));
            }
            Claim::Yes => return Ok(index),
            Claim::Refused(why) => return Err(refusal(why)),
            Claim::No => {}
        }
    }
    Err(refusal(format!("a plugin for {} would be needed", kind(file))))
}

/// The kind of something that no plugin takes.
fn kind(file: &Found) -> String {
    let of = |name: &str| match file.stat.special {
        0 => name.to_owned(),
        special => format!("{name} {}:{}", libc::major(special), libc::minor(special)),
    };
    if let Some(kind) = file.socket {
        return kind.name();
    }
    match (file.anonymous(), file.stat.kind()) {
        (Some(name), _) => name.to_owned(),
        (None, libc::S_IFCHR) => of("the character device"),
        (None, libc::S_IFBLK) => of("the block device"),
        (None, libc::S_IFSOCK) => "this kind of socket".to_owned(),
        (None, libc::S_IFIFO) => "pipes".to_owned(),
        (None, _) => "this kind of file".to_owned(),
    }
}

fn look(pids: &[i32], still: bool) -> Result<Job, Vec<Refusal>> {
    let whole = |pid| {
        move |error: &dyn std::fmt::Display| {
            let (what, remedy) = ("the process".to_owned(), error.to_string());
            vec![Refusal { pid, fd: None, what, remedy }]
        }
    };
    let processes =
        several::try_each(pids, |pid| process(*pid).map_err(|error| whole(*pid)(&error)))?;
    own_tables(&processes)?;
    for _ in 0..TRIES {
        let seen = seen(&processes, still).map_err(|(pid, e)| whole(pid)(&e))?;
        if let Ok(files) = grouped(&processes, seen) {
            return Ok(Job::new(processes, files));
        }
    }
    let pid = pids.first().copied().unwrap_or(0);
    Err(whole(pid)(&"it cannot be compared (kcmp), or changes too fast while it is looked at"))
}

/// The process `pid`, by another thread where its first has ended.
pub(crate) fn process(pid: i32) -> std::io::Result<Process> {
    let id = Pid::from_raw(pid).ok_or_else(|| std::io::Error::other("no process has this id"))?;
    let (at, inner) = (proc::reach(pid), procfs::inner_pid(pid)?);
    if at == pid {
        return Ok(Process { pid, at, inner, pidfd: pidfd_open(id, PidfdFlags::empty())? });
    }
    let thread = Pid::from_raw(at).unwrap_or(id);
    let pidfd = pidfd_open(thread, PidfdFlags::from_bits_retain(PIDFD_THREAD)).map_err(|error| {
        let what = "its first thread has ended, and its descriptors cannot be had by another (Linux 6.9)";
        std::io::Error::new(error.kind(), format!("{what}: {error}"))
    })?;
    Ok(Process { pid, at, inner, pidfd })
}

/// Refuses processes that share a table of descriptors (CLONE_FILES).
fn own_tables(processes: &[Process]) -> Result<(), Vec<Refusal>> {
    let mut ordered: Vec<&Process> = Vec::new();
    for process in processes {
        let compare =
            |other: &&Process| sys::compare_tables(other.at, process.at).unwrap_or(Ordering::Less);
        match ordered.binary_search_by(compare) {
            Err(at) => ordered.insert(at, process),
            Ok(at) => {
                let what = format!("the descriptor table shared with process {}", ordered[at].pid);
                let remedy = "let each process have its own (clone without CLONE_FILES; a vfork \
                              ends at exec)";
                let (pid, remedy) = (process.pid, remedy.to_owned());
                return Err(vec![Refusal { pid, fd: None, what, remedy }]);
            }
        }
    }
    Ok(())
}

type AllSeen = Vec<(Holder, Seen)>;

/// The descriptors of all `processes`. Where they stand still, what the first one has is known of
/// the others that have inherited it.
fn seen(processes: &[Process], still: bool) -> Result<AllSeen, (i32, PluginError)> {
    let Some((first, others)) = processes.split_first() else { return Ok(Vec::new()) };
    let failed = |of: &Process| {
        let pid = of.pid;
        move |error| (pid, error)
    };
    let mut all = seen_of(0, first, None).map_err(failed(first))?;
    let others: Vec<(usize, &Process)> = (1..).zip(others).collect();
    let known = still.then(|| Known {
        at: first.at,
        descriptors: all.iter().map(|(holder, seen)| (holder.fd, seen)).collect(),
    });
    let seen = several::try_each(&others, |(index, process)| {
        seen_of(*index, process, known.as_ref()).map_err(failed(process))
    })?;
    drop(known);
    all.extend(seen.into_iter().flatten());
    Ok(all)
}

/// What a process has open, by its numbers.
struct Known<'a> {
    at: i32,
    descriptors: BTreeMap<i32, &'a Seen>,
}

impl Known<'_> {
    /// What descriptor `fd` of the process at `at` is, if it stands for the same description here.
    fn inherited(&self, at: i32, fd: i32) -> Option<&Seen> {
        let same = || sys::compare_files((self.at, fd), (at, fd));
        self.descriptors.get(&fd).copied().filter(|_| matches!(same(), Ok(Ordering::Equal)))
    }
}

/// The descriptors of the process of index `process`.
fn seen_of(
    process: usize,
    of: &Process,
    known: Option<&Known<'_>>,
) -> Result<AllSeen, PluginError> {
    let mut all = Vec::new();
    for fd in procfs::descriptors(of.at)? {
        let seen = match known.and_then(|known| known.inherited(of.at, fd)) {
            Some(seen) => procfs::same_description(of.at, fd, seen)?,
            None => procfs::descriptor(of.at, fd)?,
        };
        let Some(seen) = seen else { continue };
        let close_on_exec = seen.info.flags & libc::O_CLOEXEC as u32 != 0;
        all.push((Holder { process, fd, close_on_exec }, seen));
    }
    Ok(all)
}

/// Groups descriptors by open file description, in the order of their first holders. An error
/// means that something was closed meanwhile.
fn grouped(processes: &[Process], seen: AllSeen) -> std::io::Result<Vec<Found>> {
    let mut files: Vec<Found> = Vec::new();
    // Only descriptions of one inode can be the same; kept in kcmp's order.
    let mut by_inode: BTreeMap<(u64, u64), Vec<usize>> = BTreeMap::new();
    for (holder, seen) in seen {
        let same = by_inode.entry((seen.stat.device, seen.stat.inode)).or_default();
        let place = |holder: Holder| (processes[holder.process].at, holder.fd);
        let (mut low, mut high) = (0, same.len());
        let mut known = None;
        while low < high && known.is_none() {
            let middle = (low + high) / 2;
            let other = files[same[middle]].holders[0];
            match sys::compare_files(place(other), place(holder))? {
                Ordering::Equal => known = Some(same[middle]),
                Ordering::Less => low = middle + 1,
                Ordering::Greater => high = middle,
            }
        }
        let locks = seen.info.values("lock").map(|line| (holder.process, line.to_owned()));
        let locks: Vec<_> = locks.collect();
        match known {
            Some(index) => {
                files[index].holders.push(holder);
                files[index].locks.extend(locks);
            }
            None => {
                same.insert(low, files.len());
                files.push(Found::new(vec![holder], seen, locks));
            }
        }
    }
    Ok(files)
}
