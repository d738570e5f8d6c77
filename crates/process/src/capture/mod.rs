//! Capturing a job: all of it is stopped, what only the kernel knows is read, each process is cloned,
//! and all goes on; the clones' memory is written to the image afterwards.

mod memory;
mod objects;
mod process;
mod queries;

pub(crate) use process::vdso_checksum;

use crate::freeze::FrozenClone;
use crate::machine::Machine;
use crate::proc::{Field, Stat};
use crate::state::{self, Ids, JobState, ProcessState, Zombie};
use crate::stop::{self, Roots, StoppedJob};
use crate::{EngineError, maps};
use kedge_image::{Choice, FileEntry, ImageWriter, Manifest};
use std::collections::BTreeSet;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The file of what the processes share.
pub(crate) const JOB_FILE: &str = "job.kimg";

/// The file of a process.
pub(crate) fn process_file(pid: i32) -> String {
    format!("{pid}.kimg")
}

#[derive(Debug, Clone)]
pub struct Options {
    /// An empty folder, which becomes the image.
    pub folder: PathBuf,
    pub codec: Choice,
    /// How long the threads may take to stop.
    pub patience: Duration,
}

/// A job that has been captured and runs again. Its memory is held by clones until
/// [`Captured::finish`]; they end with this, and with the thread that made it, so it stays there.
#[derive(Debug)]
pub struct Captured {
    options: Options,
    job: JobState,
    objects: FileEntry,
    held: Vec<Held>,
    /// How long the job stood still.
    pub stall: Duration,
    tracer: PhantomData<*const ()>,
}

/// A process's state and the clone that holds its memory.
#[derive(Debug)]
struct Held {
    state: ProcessState,
    clone: FrozenClone,
    mappings: Vec<maps::Mapping>,
    /// Its file, which already has what a clone does not inherit.
    writer: ImageWriter,
    written: Vec<u64>,
}

/// Captures the processes of `roots`. They run again when this returns, whatever it returns. A job
/// that cannot be captured is not harmed. To be called on a thread that may wait: it traces.
pub fn checkpoint(roots: &Roots, options: Options) -> Result<Captured, EngineError> {
    let machine = Machine::this()?;
    let objects_file = ImageWriter::create(&options.folder.join(JOB_FILE))?;
    let begin = Instant::now();
    let mut stopped = stop::stop(roots, options.patience)?;
    let (zombies, ids) = identify(&stopped)?;
    let mut objects = objects::Objects::default();
    let mut held = Vec::new();
    for (process, ids) in stopped.processes.iter_mut().zip(&ids) {
        held.push(process::hold(process, *ids, &options, &mut objects)?);
    }
    objects.copy(&objects_file, options.codec)?;
    drop(stopped);
    let stall = begin.elapsed();
    let processes = ids.iter().map(|ids| ids.pid).collect();
    let job = JobState { machine, objects: objects.described(), processes, zombies };
    objects_file.section(state::JOB_SECTION, &state::format(&job)?)?;
    let objects = objects_file.finish()?;
    Ok(Captured { options, job, objects, held, stall, tracer: PhantomData })
}

/// The ids of everybody, as the job sees them: what is outside of it is 0.
fn identify(stopped: &StoppedJob) -> Result<(Vec<Zombie>, Vec<Ids>), EngineError> {
    let alive = stopped.processes.iter().map(|process| process.pid);
    let members: BTreeSet<i32> = alive.clone().chain(stopped.zombies.iter().copied()).collect();
    // SAFETY: plain calls.
    let (own_group, own_session) = unsafe { (libc::getpgid(0), libc::getsid(0)) };
    let inside = |pid, id: i64, own: i32, what: &str| match id as i32 {
        id if members.contains(&id) => Ok(id),
        id if id == own || id == 0 => Ok(0),
        id => Err(EngineError::unsupported(
            pid,
            format!("its {what} {id} is led by no process of the job, which kedge cannot save yet"),
        )),
    };
    let ids = |pid| -> Result<(Ids, Stat), EngineError> {
        let stat = Stat::of(pid)?;
        let parent = stat.get(Field::Ppid) as i32;
        let parent = if members.contains(&parent) { parent } else { 0 };
        let group = inside(pid, stat.get(Field::Pgrp), own_group, "process group")?;
        let session = inside(pid, stat.get(Field::Session), own_session, "session")?;
        Ok((Ids { pid, parent, group, session }, stat))
    };
    let zombie = |pid: &i32| {
        let (ids, stat) = ids(*pid)?;
        Ok(Zombie { ids, status: stat.get(Field::ExitCode) as i32 })
    };
    let zombies: Result<Vec<Zombie>, EngineError> = stopped.zombies.iter().map(zombie).collect();
    // A zombie whose parent is outside is somebody else's to wait for.
    let zombies = zombies?.into_iter().filter(|zombie| zombie.ids.parent != 0).collect();
    let ids: Result<Vec<Ids>, EngineError> = alive.map(|pid| Ok(ids(pid)?.0)).collect();
    Ok((zombies, ids?))
}

impl Captured {
    /// The processes, parents before their children.
    pub fn processes(&self) -> &[i32] {
        &self.job.processes
    }

    /// Writes the memory and makes `manifest` durable: the folder is an image when this returns.
    /// The processes and files of `manifest` are filled in.
    pub fn finish(self, mut manifest: Manifest) -> Result<Manifest, EngineError> {
        manifest.processes = self.job.processes;
        manifest.files = vec![self.objects];
        for held in self.held {
            manifest.files.push(held.finish(self.options.codec)?);
        }
        manifest.write(&self.options.folder)?;
        Ok(manifest)
    }
}

impl Held {
    fn finish(mut self, codec: Choice) -> Result<FileEntry, EngineError> {
        queries::ask_clone(&self.clone, &self.mappings, &mut self.state)?;
        process::add_flags(self.clone.pid(), &mut self.state)?;
        let chunks = memory::chunks(&self.clone, &self.mappings, &self.written)?;
        memory::write(&self.clone, &chunks, &self.writer, codec)?;
        self.state.check()?;
        self.writer.section(state::PROCESS_SECTION, &state::format(&self.state)?)?;
        Ok(self.writer.finish()?)
    }
}
