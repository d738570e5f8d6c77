//! Restarting a job: its image is read and checked, an init in new namespaces makes the processes
//! anew, and all of them go on at once. If anything fails, the namespace ends and nothing is left.

mod aio;
mod files;
mod filters;
mod forked;
mod identity;
mod ids;
mod init;
mod kernel;
mod lazy;
mod memory;
mod namespaces;
pub(crate) mod notices;
mod places;
mod process;
mod rings;
mod segments;
mod standby;
mod threads;
mod tree;
mod undo;

use crate::capture::{JOB_FILE, process_file};
use crate::machine::Machine;
use crate::plugins::{self, Moment, PathMap, Plugins, Rendezvous, RestoredFiles, Saved};
use crate::state::{self, JobState, ProcessState};
use crate::{EngineError, Roots};
use kedge_image::{Folder, ImageFile, Layers, Manifest, Opened, Source};
use libc::pid_t;
use std::collections::BTreeSet;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

pub use identity::{Identity, Owner};
use init::Outcome;
pub use init::Rebuilt;
pub(crate) use lazy::settle;
pub use standby::{Arrivals, Next};

#[derive(Debug)]
pub struct RestartOptions {
    /// The image.
    pub folder: PathBuf,
    /// Standard input, output and error of the job; the caller's own where there is none.
    pub streams: [Option<OwnedFd>; 3],
    /// Where files are that were elsewhere.
    pub paths: PathMap,
    /// Plugins of others.
    pub plugins: Plugins,
    /// Memory comes when it is first used, or a little later.
    pub lazy: bool,
    /// Descriptors of the caller's that plugins have in the job's init too.
    pub inherits: Vec<RawFd>,
    /// Asked again and again until the job runs: whether it is to be given up.
    pub give_up: fn() -> bool,
    /// Told at once what takes long, and what was undone of a restart that failed.
    pub tell: fn(&str),
    /// Where it is written what is changed of the user's files, until the job runs; `None`: where
    /// [`settle_all`](crate::plugins::settle_all) finds it.
    pub journal: Option<PathBuf>,
    /// Told of each moment of the changes of files: for tests, which end it there.
    pub at: Option<fn(Moment)>,
    /// The other parts of the job, which are restarted at the same time.
    pub others: Option<Arc<dyn Rendezvous>>,
    /// Who brings images that build on this one: the job is that of the last one. `None`: this one.
    pub arrivals: Option<Arc<dyn Arrivals>>,
    /// A signal that was pending for the job and was meant for its former life: it does not come
    /// back.
    pub forgets: Option<libc::c_int>,
}

/// So often, in milliseconds.
const ASKED: libc::c_int = 50;

impl RestartOptions {
    /// The usual ones.
    pub fn new(folder: PathBuf) -> RestartOptions {
        let (streams, paths) = ([None, None, None], PathMap::default());
        let (plugins, inherits) = (Plugins::new(), Vec::new());
        let (lazy, give_up, tell) = (false, || false, |_: &str| {});
        let (journal, at, others, arrivals, forgets) = (None, None, None, None, None);
        RestartOptions {
            folder,
            streams,
            paths,
            plugins,
            lazy,
            inherits,
            give_up,
            tell,
            journal,
            at,
            others,
            arrivals,
            forgets,
        }
    }
}

/// What is to be brought back, checked.
#[derive(Debug)]
struct Plan {
    folder: PathBuf,
    manifest: Manifest,
    /// The image and those that it builds on.
    chain: Vec<(Folder, Manifest)>,
    /// Files of these.
    opened: Opened,
    paths: PathMap,
    plugins: Plugins,
    lazy: bool,
    inherits: Vec<RawFd>,
    tell: fn(&str),
    /// Where it is to be written what is changed of the user's files.
    journal: PathBuf,
    at: Option<fn(Moment)>,
    others: Option<Arc<dyn Rendezvous>>,
    arrivals: Option<Arc<dyn Arrivals>>,
    forgets: Option<libc::c_int>,
    job: JobState,
    descriptors: Saved,
    processes: Vec<ProcessState>,
}

impl Plan {
    fn read(options: &RestartOptions) -> Result<Plan, EngineError> {
        let folder = options.folder.clone();
        let chain = kedge_image::chain(&folder)?;
        let (opened, manifest) = chain[0].clone();
        if let Err(refused) = opened.is_believed() {
            // What it claims beyond its owner's rights says more.
            Identity::of(&opened, &manifest)?;
            return Err(refused.into());
        }
        let file = open(&opened, &manifest, JOB_FILE)?;
        let job: JobState = state::parse(&file.section(state::JOB_SECTION)?)?;
        job.machine.runs_on(&Machine::this()?)?;
        let descriptors = Saved::from_bytes(&file.section(state::DESCRIPTORS_SECTION)?)?;
        for file in descriptors.files() {
            let entry = manifest.file(file).ok_or(EngineError::Nonsense("a file that it lacks"))?;
            entry.verify_plain(&opened)?;
        }
        let (paths, plugins) = (options.paths.clone(), options.plugins.clone());
        let (lazy, inherits) = (options.lazy, options.inherits.clone());
        let mut plan = Plan {
            folder,
            manifest,
            chain,
            opened: Opened::default(),
            paths,
            plugins,
            lazy,
            inherits,
            tell: options.tell,
            journal: options.journal.clone().map_or_else(plugins::new_path, Ok)?,
            at: options.at,
            others: options.others.clone(),
            arrivals: options.arrivals.clone(),
            forgets: options.forgets,
            job,
            descriptors,
            processes: Vec::new(),
        };
        plan.processes = processes(&opened, &plan.manifest, &plan.job)?;
        if let Some(signal) = options.forgets {
            plan.processes.iter_mut().for_each(|process| process.forget(signal));
        }
        plan.check()?;
        Ok(plan)
    }

    /// The job as it is in another image, in all else as this plan says.
    fn next(
        &self,
        folder: PathBuf,
        arrivals: Option<Arc<dyn Arrivals>>,
    ) -> Result<Plan, EngineError> {
        let next = RestartOptions {
            paths: self.paths.clone(),
            plugins: self.plugins.clone(),
            inherits: self.inherits.clone(),
            tell: self.tell,
            journal: Some(self.journal.clone()),
            at: self.at,
            others: self.others.clone(),
            arrivals,
            forgets: self.forgets,
            ..RestartOptions::new(folder)
        };
        Plan::read(&next)
    }

    /// What the processes must agree on.
    fn check(&self) -> Result<(), EngineError> {
        let nonsense = |what| Err(EngineError::Nonsense(what));
        self.job.zombies.iter().try_for_each(|zombie| zombie.ids.check())?;
        if self.processes.is_empty() {
            return nonsense("no process");
        }
        let mut ids = BTreeSet::new();
        for (pid, process) in self.job.processes.iter().zip(&self.processes) {
            if process.ids.pid != *pid || !process.threads.iter().all(|t| ids.insert(t.tid)) {
                return nonsense("two processes or threads with one id");
            }
        }
        if !self.job.zombies.iter().all(|zombie| ids.insert(zombie.ids.pid)) {
            return nonsense("a process that lives and has ended");
        }
        namespaces::ids_of(&self.processes).map(drop)
    }

    /// What the processes share, wherever in the chain it is.
    fn shared(&self) -> Result<Layers, EngineError> {
        Ok(Layers::open_among(&self.chain, JOB_FILE, &self.opened)?)
    }

    /// The memory of a process, wherever in the chain it is.
    fn layers(&self, process: &ProcessState) -> Result<Layers, EngineError> {
        let name = process_file(process.ids.pid);
        Ok(Layers::open_among(&self.chain, &name, &self.opened)?)
    }

    /// Whether other images come after this one: only what does not need the last one is made.
    fn is_early(&self) -> bool {
        self.arrivals.is_some()
    }

    /// The memory of a process, and what of it is to be written.
    fn memory(&self, process: &ProcessState) -> Result<(Layers, Vec<Source>), EngineError> {
        let layers = self.layers(process)?;
        let sources = match self.is_early() {
            false => memory::sources(process, &layers)?,
            true => memory::early_sources(process, &layers),
        };
        Ok((layers, sources))
    }
}

fn open(folder: &Folder, manifest: &Manifest, name: &str) -> Result<ImageFile, EngineError> {
    let entry = manifest.file(name).ok_or(EngineError::Nonsense("a process without its file"))?;
    Ok(ImageFile::of(folder, entry)?)
}

/// The processes of `job`, each checked by itself.
fn processes(
    folder: &Folder,
    manifest: &Manifest,
    job: &JobState,
) -> Result<Vec<ProcessState>, EngineError> {
    let read = |pid: &pid_t| {
        let file = open(folder, manifest, &process_file(*pid))?;
        let process: ProcessState = state::parse(&file.section(state::PROCESS_SECTION)?)?;
        process.check()?;
        Ok(process)
    };
    job.processes.iter().map(read).collect()
}

/// Reads the image in `folder` as a restart on this machine would: its tables and states, not its
/// memory.
pub fn check(folder: &std::path::Path) -> Result<(), EngineError> {
    let plan = Plan::read(&RestartOptions::new(folder.to_owned()))?;
    for process in &plan.processes {
        memory::sources(process, &plan.layers(process)?)?;
    }
    memory::check_objects(&plan.shared()?, &plan.job.objects)
}

/// Looks at the files that the job in the image has, as a restart on this machine would find them
/// below `paths`: a sentence for each that is not there or is another. Changes nothing.
///
/// # Errors
/// The image cannot be read, or is of another kind of machine.
pub fn lacking(folder: &std::path::Path, paths: PathMap) -> Result<Vec<String>, EngineError> {
    let options = RestartOptions { paths, ..RestartOptions::new(folder.to_owned()) };
    Ok(files::lacking(&Plan::read(&options)?)?.into_iter().collect())
}

/// Whether the image in `folder` holds what the plugin of that name has saved of descriptors.
pub fn holds(folder: &std::path::Path, plugin: &str) -> Result<bool, EngineError> {
    let (opened, manifest) = &kedge_image::chain(folder)?[0];
    let file = open(opened, manifest, JOB_FILE)?;
    let saved = Saved::from_bytes(&file.section(state::DESCRIPTORS_SECTION)?)?;
    Ok(saved.states.iter().any(|state| state.plugin == plugin))
}

/// A restarted job, as the one sees it who restarted it.
#[derive(Debug)]
pub struct Restarted {
    /// The process that waits for the job's init; it ends with the job.
    keeper: pid_t,
    /// The program's first process.
    root: OwnedFd,
    report: UnixStream,
    /// What the user should know.
    pub notes: Vec<String>,
    /// The image that it is from.
    pub image: PathBuf,
}

/// Restarts the job in the image. It runs when this returns: its standard streams are the caller's.
/// The caller should have one thread only. `serve` runs in the job's init, which is the parent of
/// the job's orphans and so the place to checkpoint it from; the job is killed when it returns.
pub fn restart(
    options: &RestartOptions,
    serve: impl FnOnce(&mut Rebuilt),
) -> Result<Restarted, EngineError> {
    crate::kernel::require(crate::kernel::Stops::Restarts)?;
    let plan = Plan::read(options)?;
    let failed = |what| move |source| EngineError::System { pid: 0, what, source };
    let (mut report, inner) = UnixStream::pair().map_err(failed("make a socket"))?;
    let keeper = namespaces::enter(&plan, &options.streams, inner, serve)?;
    if !said(&report, options.give_up) {
        // The init and all that it has made end with it.
        // SAFETY: a plain call; it is a child of this process that nobody has waited for.
        unsafe { libc::kill(keeper, libc::SIGKILL) };
        wait(keeper, 0);
        undo(&plan);
        return Err(EngineError::GivenUp);
    }
    match init::outcome(&mut report) {
        Ok(Outcome { root, notes, image }) => {
            // They are told: nobody else has to.
            let _ = std::fs::remove_file(&plan.journal);
            Ok(Restarted { keeper, root, report, notes, image })
        }
        Err(error) => {
            wait(keeper, 0);
            undo(&plan);
            Err(error)
        }
    }
}

/// Undoes what the init, which has ended, has changed of the user's files, and says so.
fn undo(plan: &Plan) {
    match plugins::settle(&plan.journal) {
        Ok(settled) => settled.said.iter().for_each(|said| (plan.tell)(said)),
        Err(why) => (plan.tell)(&format!(
            "what the restart has changed of your files is not undone ({why}): `kedge doctor` does it"
        )),
    }
}

/// Waits until the init has said how it went, or is gone; `false` if it is given up first.
fn said(report: &UnixStream, give_up: fn() -> bool) -> bool {
    let mut waited = libc::pollfd { fd: report.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    loop {
        // SAFETY: one structure, which lives as long as the call.
        match unsafe { libc::poll(&raw mut waited, 1, ASKED) } {
            0 if give_up() => return false,
            0 => {}
            // What is wrong with it is found out where it is read.
            _ => return true,
        }
    }
}

impl Restarted {
    /// The process that ends when all of the job has ended, or if its init is killed.
    pub fn keeper(&self) -> pid_t {
        self.keeper
    }

    /// The program's first process, by the id that the caller's namespace has for it; `None` once
    /// it has ended.
    pub fn root(&self) -> Option<u32> {
        let fdinfo = format!("/proc/self/fdinfo/{}", self.root.as_raw_fd());
        let text = std::fs::read_to_string(fdinfo).ok()?;
        text.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse().ok())
    }

    /// Waits until the program's first process has ended: its status as wait() tells it.
    pub fn wait(&self) -> Result<i32, EngineError> {
        let mut status = [0; 4];
        (&self.report)
            .read_exact(&mut status)
            .map_err(|_| EngineError::Init("the job was killed".into()))?;
        Ok(i32::from_le_bytes(status))
    }

    /// Sends a signal to the program's first process.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        let none = std::ptr::null::<libc::siginfo_t>();
        // SAFETY: the descriptor is open; no siginfo is given.
        let result = unsafe {
            libc::syscall(libc::SYS_pidfd_send_signal, self.root.as_raw_fd(), signal, none, 0)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Drop for Restarted {
    fn drop(&mut self) {
        wait(self.keeper, libc::WNOHANG);
    }
}

fn wait(pid: pid_t, flags: i32) {
    let mut status = 0;
    // SAFETY: waitpid stores the status.
    unsafe { libc::waitpid(pid, &mut status, flags) };
}

impl Rebuilt {
    /// Why the job was ended, if it was for memory that could not be had.
    pub fn failure(&self) -> Option<String> {
        lazy::failure()
    }

    /// Returns the job's files that have been brought back, which its checkpoints are to know
    /// ([`Options::restored`](crate::Options)).
    pub fn restored(&self) -> RestoredFiles {
        self.restored.clone()
    }

    /// Whom to checkpoint: all that descends from the init.
    pub fn roots(&self) -> Roots {
        Roots::ChildrenOf { parent: 1, except: Vec::new() }
    }
}
