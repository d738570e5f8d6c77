//! Capturing a job: all of it is stopped, what only the kernel knows is read, each process is
//! cloned, and all goes on; the clones' memory is written to the image afterwards.

mod ahead;
mod aio;
mod begun;
mod changes;
mod early;
mod elsewhere;
mod flags;
mod guards;
mod hold;
mod inherited;
mod lookup;
mod mapped;
mod memory;
mod names;
mod notices;
mod objects;
mod once;
mod process;
mod queries;
mod refuse;
mod rings;
mod together;
mod told;
mod undo;
mod write;

pub(crate) use ahead::{Ahead, Gaps};
pub use begun::{Begun, Stopped};
pub(crate) use early::Early;
pub(crate) use memory::Unmapped;
pub(crate) use names::Settled;
pub(crate) use objects::{copy as copy_object, shown};
pub(crate) use once::Once;
pub use together::Together;

use crate::freeze::FrozenClone;
use crate::lineage::{self, Misplaced};

use crate::plugins::{
    FileContents, Passing, Plugin, PluginError, Plugins, Refusal, RestoredFiles, Saved, Survey,
    SurveyOptions,
};
use crate::proc::{self, Field, Stat};
use crate::state::{self, Ids, JobState, ProcessState, Zombie};
use crate::stop::{self, Patience, Roots, Standing, StoppedJob};
use crate::track::{Session, Tracker};
use crate::{EngineError, maps, several};
use changes::Changes;
use flags::Flags;
pub(crate) use kedge_image::process_file;
use kedge_image::{Choice, FileEntry, ImageWriter, Manifest, Meter};
use lookup::Lookup;
use names::{Names, Search};
use objects::HeldObject;
use refuse::Here;
use std::collections::BTreeSet;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use told::By;

/// The file of what the processes share.
pub(crate) const JOB_FILE: &str = "job.kimg";

#[derive(Debug, Clone)]
pub struct Options {
    /// An empty folder, which becomes the image.
    pub folder: PathBuf,
    pub codec: Choice,
    /// How long the threads may take to stop.
    pub patience: Duration,
    /// Threads of this name serve the faults of their process's others, and stop after them.
    pub servants: Option<&'static str>,
    /// What becomes of the contents of files that are open for writing.
    pub contents: FileContents,
    /// The most that the contents of one file may take, in bytes.
    pub file_limit: u64,
    /// The processes stay stopped when they are captured: see [`Captured::stand`].
    pub hold: bool,
    /// Plugins of others, asked before kedge's own. Those that can be made only when what they save
    /// is at rest are given to [`Begun::stop`] and [`Begun::capture`].
    pub plugins: Plugins,
    /// What follows the job's memory from checkpoint to checkpoint, if its images are to build on
    /// each other.
    pub tracker: Option<Tracker>,
    /// What follows it for other images, where this one's is none that they build on. The kernel
    /// tells of each write once: where this one has to ask, too, the next of them builds on none.
    pub other: Option<Tracker>,
    /// This one builds on none.
    pub full: bool,
    /// Where the image that this one builds on lies: in that folder, which is an image of several
    /// parts beside the one that this is a part of. `None`: beside this one.
    pub whole: Option<PathBuf>,
    /// Processes with at least so many bytes of memory are written while they run, and stand still
    /// for what they have changed meanwhile and not for a clone. The moment that is captured comes
    /// when most is written. Where the kernel cannot tell what they change, or they change it too
    /// fast, they are cloned.
    pub ahead: Option<u64>,
    /// Others that are captured at the same moment.
    pub together: Option<Arc<dyn Together>>,
    /// Folders of whoever captures: what lies in there is no file of the job's. The image's is
    /// among them anyway.
    pub except: Vec<PathBuf>,
    /// The job's files that a restart has brought back ([`Rebuilt::restored`](crate::Rebuilt)).
    pub restored: RestoredFiles,
    /// Counts the memory that is stored.
    pub meter: Arc<Meter>,
}

impl Options {
    /// The usual ones.
    pub fn new(folder: PathBuf) -> Options {
        let SurveyOptions { contents, limit, .. } = SurveyOptions::default();
        let (codec, patience) = (Choice::Auto, Duration::from_secs(10));
        let (hold, plugins, tracker, other, full) = (false, Plugins::new(), None, None, false);
        let (whole, ahead, together, servants) = (None, None, None, None);
        Options {
            folder,
            codec,
            patience,
            servants,
            contents,
            file_limit: limit,
            hold,
            plugins,
            tracker,
            other,
            full,
            whole,
            ahead,
            together,
            except: Vec::new(),
            restored: RestoredFiles::default(),
            meter: Arc::default(),
        }
    }

    /// Makes a file of the image.
    pub(crate) fn create(&self, name: &str) -> Result<ImageWriter, EngineError> {
        Ok(ImageWriter::create(&self.folder.join(name))?.metered(&self.meter))
    }
}

/// A job that has been captured and runs again. Its memory is held by clones until
/// [`Captured::finish`]; they end with this, and with the thread that made it, so it stays there.
#[derive(Debug)]
pub struct Captured {
    options: Options,
    job: JobState,
    /// Not durable as yet: whoever was brought to rest beside the processes does not wait for a
    /// disk.
    objects_file: ImageWriter,
    descriptors: Saved,
    /// Temporary files that may be the job's.
    passing: Passing,
    /// What the names of mapped files led to.
    lookup: Lookup,
    held: Vec<Held>,
    shared: Vec<HeldObject>,
    standing: Option<Standing>,
    session: Session,
    /// Ends the watch over memory that no other image needs.
    unwatching: Option<JoinHandle<()>>,
    /// How long the job stood still.
    pub stall: Duration,
    /// What the user should know.
    pub warnings: Vec<String>,
    /// What is known only when the memory is written.
    pub late_warnings: Arc<Mutex<Vec<String>>>,
    tracer: PhantomData<*const ()>,
}

/// A process's state and the clone that holds its memory.
#[derive(Debug)]
struct Held {
    state: ProcessState,
    memory: Memory,
    mappings: Vec<maps::Mapping>,
    /// What of its memory was written while it ran.
    ahead: Option<Ahead>,
    /// Its file, if it already has what a clone does not inherit.
    writer: Option<ImageWriter>,
    /// The mappings that it has.
    written: Vec<u64>,
}

/// What holds a process's memory until it is written.
#[derive(Debug)]
enum Memory {
    /// A clone has all of it; what of it has changed, if that is known.
    Clone(FrozenClone, Option<Changes>),
    /// A copy of what has changed, and the flags of the mappings as they are being read.
    Copied { changes: Changes, flags: Flags },
}

/// Captures the processes of `roots`, in the steps of [`Begun`] one after the other.
pub fn checkpoint(roots: &Roots, options: Options) -> Result<Captured, EngineError> {
    let time = options.patience;
    let mut begun = Begun::new(options)?;
    begun.survey(roots, &[])?;
    begun.watch(roots)?;
    begun.write_ahead(roots)?;
    begun.catch_up();
    let stopped = begun.stop(roots, &[], Patience::new(time))?;
    begun.capture(stopped, &[])
}

/// What the processes hold open, and who is to save it; `still`: they are stopped.
fn survey(
    pids: &[i32],
    options: &Options,
    late: &[Arc<dyn Plugin>],
    still: bool,
) -> Result<Survey<'static>, EngineError> {
    // SAFETY: the standard streams are never closed. One that is not open is no stream.
    let stream =
        |fd| unsafe { (libc::fcntl(fd, libc::F_GETFD) >= 0).then(|| BorrowedFd::borrow_raw(fd)) };
    let streams = [stream(0), stream(1), stream(2)];
    let (contents, limit) = (options.contents, options.file_limit);
    let more = late.iter().chain(&options.plugins).cloned().collect();
    let survey = Survey::of(pids, &SurveyOptions { streams, contents, limit, still, more });
    Ok(survey.map_err(PluginError::Survey)?)
}

/// Tells what cannot be saved while the job still runs. What changes meanwhile does not count: the
/// stopped job is looked at again.
fn survey_ahead(
    roots: &Roots,
    options: &Options,
    late: &[Arc<dyn Plugin>],
) -> Result<(), EngineError> {
    for _ in 0..refuse::LOOKS {
        // Where those that were in its way have ended, it may not have come to the others.
        if let Some(survey) = again(|| look_ahead(roots, options, late))? {
            return refuse::mapped_ahead(roots, |device, inode| survey.has_open(device, inode));
        }
    }
    Ok(())
}

/// Looks again at what may be otherwise in a moment: a process that is becoming another program has
/// for that long a first thread that has ended, and children may be about to lead sessions.
fn again<T>(look: impl Fn() -> Result<T, EngineError>) -> Result<T, EngineError> {
    for _ in 1..refuse::LOOKS {
        match look() {
            Err(EngineError::Descriptors(PluginError::Survey(refusals)))
                if refusals.iter().any(|refusal| refusal.fd.is_none()) => {}
            Err(error) if refuse::passes(&error) => std::thread::sleep(refuse::PAUSE),
            other => return other,
        }
    }
    look()
}

/// The survey of what the processes hold open; `None` where those that are in its way have ended.
fn look_ahead(
    roots: &Roots,
    options: &Options,
    late: &[Arc<dyn Plugin>],
) -> Result<Option<Survey<'static>>, EngineError> {
    refuse::ahead(roots)?;
    let survey = match survey(&stop::alive(roots), options, late, false) {
        Err(EngineError::Descriptors(PluginError::Survey(refusals))) => {
            let refusals = of_those_that_remain(refusals, &stop::alive(roots));
            return if refusals.is_empty() {
                Ok(None)
            } else {
                Err(PluginError::Survey(refusals).into())
            };
        }
        other => other?,
    };
    place_ahead(roots)?;
    Ok(Some(survey))
}

/// Those of `refusals` that are of processes which `remain`, and of what these have open still.
fn of_those_that_remain(refusals: Vec<Refusal>, remain: &[i32]) -> Vec<Refusal> {
    let holds = |refusal: &Refusal| {
        let at = proc::reach(refusal.pid);
        let descriptor = |fd| format!("/proc/{at}/fd/{fd}");
        let there = |fd| std::fs::symlink_metadata(descriptor(fd)).is_ok();
        // One that is ending shows none of them; what else cannot be listed cannot be stopped.
        let shows = || std::fs::read_dir(format!("/proc/{at}/fd")).is_ok();
        remain.contains(&refusal.pid) && refusal.fd.map_or_else(shows, there)
    };
    refusals.into_iter().filter(holds).collect()
}

/// Tells whether the processes of `roots` could get their places among sessions and groups again.
fn place_ahead(roots: &Roots) -> Result<(), EngineError> {
    let (zombies, alive): (Vec<i32>, Vec<i32>) =
        stop::all(roots).into_iter().partition(|pid| proc::has_ended(*pid));
    match Identified::of(&alive, &zombies) {
        Err(EngineError::Ended { .. }) => Ok(()),
        other => other.map(drop),
    }
}

/// The ids of everybody, as the job sees them: what is outside of it is 0.
struct Identified {
    zombies: Vec<Zombie>,
    ids: Vec<Ids>,
    /// The signals that tell the parents of the ends of those with `ids`.
    exit_signals: Vec<i32>,
}

impl Identified {
    fn of(alive: &[i32], zombies: &[i32]) -> Result<Identified, EngineError> {
        let members: BTreeSet<i32> = alive.iter().chain(zombies).copied().collect();
        // SAFETY: the calls take numbers and only return some.
        let (own_group, own_session) = unsafe { (libc::getpgid(0), libc::getsid(0)) };
        // One whose leader lives outside of the job is from outside; one whose leader lives no more
        // is the job's own, unless it is this process's as well.
        let inside = |id: i64, own: i32| match id as i32 {
            id if members.contains(&id) => id,
            id if id == own || id == 0 || Stat::of(id).is_ok() => 0,
            id => id,
        };
        let ids = |pid: i32| -> Result<(Ids, Stat), EngineError> {
            let stat = Stat::of(pid)?;
            let parent = stat.get(Field::Ppid) as i32;
            let parent = if members.contains(&parent) { parent } else { 0 };
            let group = inside(stat.get(Field::Pgrp), own_group);
            let session = inside(stat.get(Field::Session), own_session);
            Ok((Ids { pid, parent, group, session }, stat))
        };
        let zombie = |pid: &i32| {
            let (ids, stat) = ids(*pid)?;
            Ok(Zombie { ids, status: stat.get(Field::ExitCode) as i32 })
        };
        // One that this process has collected meanwhile is gone.
        let collected = |zombie: &Result<_, _>| matches!(zombie, Err(EngineError::Ended { .. }));
        let zombies = zombies.iter().map(zombie).filter(|zombie| !collected(zombie));
        let zombies: Result<Vec<Zombie>, EngineError> = zombies.collect();
        // A zombie whose parent is outside is somebody else's to wait for.
        let zombies = zombies?.into_iter().filter(|zombie| zombie.ids.parent != 0);
        let zombies: Vec<Zombie> = zombies.collect();
        let told = several::try_each(alive, |pid| ids(*pid))?.into_iter();
        let exit_signal = |(ids, stat): (Ids, Stat)| (ids, stat.get(Field::ExitSignal) as i32);
        let (ids, exit_signals): (Vec<Ids>, Vec<i32>) = told.map(exit_signal).unzip();
        let members: Vec<Ids> = ids.iter().copied().chain(zombies.iter().map(|z| z.ids)).collect();
        lineage::steps(&members, []).map_err(|Misplaced(pid)| {
            let what = "its place among the job's sessions and process groups cannot be had again";
            EngineError::unsupported(pid, what)
        })?;
        Ok(Identified { zombies, ids, exit_signals })
    }
}

/// The end of a first thread is the death of a parent to the children that it has made itself
/// (PR_SET_PDEATHSIG), and a restart has it make all of them.
fn refuse_deadly_parents(stopped: &StoppedJob, held: &[Held]) -> Result<(), EngineError> {
    let lost = |pid| stopped.processes.iter().any(|p| p.pid == pid && p.first_ended.is_some());
    let hit = |held: &&Held| held.state.parent_death_signal != 0 && lost(held.state.ids.parent);
    let Some(Held { state, .. }) = held.iter().find(hit) else { return Ok(()) };
    let parent = state.ids.parent;
    let what = format!(
        "it asked for a signal at its parent's death (PR_SET_PDEATHSIG), and the first thread of its parent {parent} has \
         ended, which kedge cannot save yet: do without the one or the other"
    );
    Err(EngineError::unsupported(state.ids.pid, what))
}

impl Captured {
    /// The processes, parents before their children.
    pub fn processes(&self) -> &[i32] {
        &self.job.processes
    }

    /// The job that is to stand still until it is let go or killed; `None` if [`Options::hold`] did
    /// not ask for it. If nobody takes it, the job goes on when its image is written.
    pub fn stand(&mut self) -> Option<Standing> {
        self.standing.take()
    }

    /// Writes the memory and makes `manifest` durable: the folder is an image when this returns.
    /// The processes and files of `manifest` are filled in.
    pub fn finish(self, manifest: Manifest) -> Result<Manifest, EngineError> {
        self.finish_with(manifest, || Ok((Vec::new(), false)))
    }

    /// As [`Captured::finish`]; `others` tells of files that plugins have written into the folder
    /// meanwhile, and whether one builds on the image that was offered; it is asked when all memory
    /// is written.
    pub fn finish_with(
        mut self,
        mut manifest: Manifest,
        others: impl FnOnce() -> Result<(Vec<FileEntry>, bool), PluginError>,
    ) -> Result<Manifest, EngineError> {
        let builds = self.held.iter().any(Held::builds_on_another)
            || self.shared.iter().any(HeldObject::builds_on_another);
        let filtered = self.held.iter().any(|held| !held.state.filters.is_empty());
        let (files, settled, forked) = self.write_memory()?;
        manifest.forked = forked;
        manifest.filtered = filtered;
        for object in std::mem::take(&mut self.shared) {
            object.finish(&self.objects_file, self.options.codec)?;
        }
        let objects_ahead = self.session.shared.ahead().map(|ahead| ahead.finish(&[]));
        for object in &self.job.objects {
            self.objects_file.check_within(object.number, &[(0, object.bytes)])?;
        }
        self.objects_file.section(state::JOB_SECTION, &state::format(&self.job)?)?;
        self.objects_file.section(state::DESCRIPTORS_SECTION, &self.descriptors.to_bytes()?)?;
        manifest.files = vec![self.objects_file.finish()?];
        manifest.processes = self.job.processes;
        for name in self.descriptors.files() {
            manifest.files.push(FileEntry::plain(&self.options.folder, name)?);
        }
        manifest.files.extend(files);
        manifest.files.extend(objects_ahead.transpose()?.flatten());
        let (files, others_build) = others()?;
        manifest.files.extend(files);
        manifest.parent = self.session.parent().filter(|_| builds || others_build).cloned();
        // The next checkpoint may want to watch it again.
        self.unwatching.map(JoinHandle::join);
        manifest.write(&self.options.folder)?;
        if let Some(tracker) = &self.options.tracker {
            tracker.succeed(&self.session, &self.options.folder, &manifest, settled);
        }
        Ok(manifest)
    }

    /// Writes the files of the processes, and adds the temporary files to the descriptors whose
    /// names they have in memory. Also whether files refer to each other.
    fn write_memory(&mut self) -> Result<(Vec<FileEntry>, Settled, bool), EngineError> {
        // Before the first is written, which may take long: names that clones are read for may be
        // others then, and what is to be refused need not be written.
        let here = Here::now()?;
        let by = By { lookup: &self.lookup, descriptors: &self.descriptors, here: &here };
        several::try_each_mut(&mut self.held, |held| held.describe(by))?;
        let names = Names::of(&self.passing, self.session.settled());
        let held = std::mem::take(&mut self.held);
        let held: Vec<_> = held.into_iter().map(|held| (held, Search::new(&names))).collect();
        held.iter().for_each(|(held, search)| held.sweep(search));
        let once = Once::of(held.iter().map(|(held, _)| &held.mappings[..]));
        let mut files = Vec::new();
        for (held, search) in held {
            let once = (&once, &self.session.once);
            files.extend(held.finish(&self.options, &search, once)?);
        }
        files.extend(self.session.finish_referred()?);
        let forked = once.is_of_use() || self.session.once.is_of_use();
        let folder = &self.options.folder;
        let (warning, settled) = names.settle(&self.passing, folder, &mut self.descriptors)?;
        let mut late = self.late_warnings.lock().unwrap_or_else(PoisonError::into_inner);
        late.extend(warning);
        drop(late);
        Ok((files, settled, forked))
    }
}

/// Whether the mapping's pages are the process's own, once written.
pub(crate) fn is_own(mapping: &maps::Mapping) -> bool {
    memory::own(mapping)
}
