//! A checkpoint from its beginning, while the job runs, to the moment at which the job is captured.

use super::{
    Captured, Identified, JOB_FILE, Options, Together, aio, elsewhere, hold, objects, process,
    refuse, refuse_deadly_parents, rings, survey, survey_ahead,
    told::{Told, ToldThread},
};
use crate::clocks::Clocks;
use crate::kernel::{self, Stops};
use crate::machine::Machine;
use crate::maps::{self, Mapping};
use crate::plugins::{self, FileContents, Ipc, Passing, Places, Plugin};
use crate::state::JobState;
use crate::stop::{self, Patience, Roots, Standing, StoppedJob};
use crate::track::{Session, Tracker};
use crate::{EngineError, filters, several};
use kedge_image::ImageWriter;
use libc::pid_t;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Instant;

/// A checkpoint of a job that still runs, in the steps that it takes: whoever has more to bring to
/// rest than processes does that when all is done that takes long, which is just before
/// [`Begun::catch_up`].
#[derive(Debug)]
pub struct Begun {
    options: Options,
    machine: Machine,
    objects_file: ImageWriter,
    /// Follows the memory for this checkpoint alone.
    once: Option<Tracker>,
    session: Session,
    surveyed: bool,
    /// Where temporary files may be.
    places: Places,
}

/// A job that stands still to be captured. It goes on when this is dropped.
#[derive(Debug)]
pub struct Stopped {
    job: StoppedJob,
    since: Instant,
}

impl Begun {
    pub fn new(options: Options) -> Result<Begun, EngineError> {
        kernel::require(Stops::Checkpoints)?;
        let machine = Machine::this()?;
        crate::restart::settle();
        let objects_file = options.create(JOB_FILE)?;
        let (once, session, surveyed) = (None, Session::default(), false);
        let places = Places::default();
        Ok(Begun { options, machine, objects_file, once, session, surveyed, places })
    }

    /// Tells what of the processes of `roots` cannot be saved, before anything is stopped. `late`:
    /// plugins that are asked before those of the options.
    pub fn survey(&mut self, roots: &Roots, late: &[Arc<dyn Plugin>]) -> Result<(), EngineError> {
        self.surveyed = true;
        survey_ahead(roots, &self.options, late)?;
        if self.options.together.is_some() { elsewhere::refuse(roots) } else { Ok(()) }
    }

    /// Has it known what the processes change from here on, where that is of use; they may be
    /// stopped for a moment.
    pub fn watch(&mut self, roots: &Roots) -> Result<(), EngineError> {
        filters::refuse(stop::alive(roots))?;
        if self.options.tracker.is_none() {
            self.once = Tracker::once(roots, &self.options);
            if let (Some(_), Some(other)) = (&self.once, &self.options.other) {
                other.forget();
            }
        }
        if let Some(tracker) = self.tracker() {
            self.session = tracker.begin(roots, &self.options)?;
        }
        Ok(())
    }

    /// Writes the memory of large processes while they run, where the image is to hold all of it.
    /// Temporary files are looked at then, too.
    pub fn write_ahead(&mut self, roots: &Roots) -> Result<(), EngineError> {
        if let Some(tracker) = self.tracker().cloned() {
            tracker.write_ahead(&mut self.session, &self.options)?;
        }
        if self.options.contents == FileContents::Save {
            let own = self.options.folder.clone();
            let except = self.options.except.iter().cloned().chain([own]).collect();
            let restored = self.options.restored.clone();
            self.places = Places::of(&stop::alive(roots), except, restored);
        }
        Ok(())
    }

    /// Copies what they have changed so far; what they change from here on is copied while they
    /// stand still. Once, just before [`Begun::stop`].
    pub fn catch_up(&mut self) {
        self.session.look_ahead();
    }

    fn tracker(&self) -> Option<&Tracker> {
        self.options.tracker.as_ref().or(self.once.as_ref())
    }

    /// Stops the processes of `roots` within `patience`, or none. To be called on a thread of its
    /// own: it traces, and its end lets go of whatever was stuck in the kernel.
    ///
    /// `late`: plugins of what had to be brought to rest before they could be made. They are asked
    /// before those of the options, where nobody has looked at the job so far.
    ///
    /// # Errors
    /// [`EngineError::WouldNotStop`]: a thread waits in the kernel for something that stands still
    /// itself. All of them go on, and it may be tried again.
    pub fn stop(
        &mut self,
        roots: &Roots,
        late: &[Arc<dyn Plugin>],
        patience: Patience<'_>,
    ) -> Result<Stopped, EngineError> {
        if !self.surveyed {
            self.survey(roots, late)?;
        }
        let together = self.options.together.as_deref();
        together.map(Together::prepared).transpose().map_err(EngineError::Together)?;
        let begin = Instant::now();
        let stopped = stop::stop(roots, patience.servants(self.options.servants));
        let job = stopped.inspect_err(|_| self.session.stall += begin.elapsed())?;
        Ok(Stopped { since: job.since, job })
    }

    /// Lets a job go on that is not captured: it is to be stopped again.
    pub fn goes_on(&mut self, stopped: Stopped) {
        self.session.stall += stopped.since.elapsed();
        drop(stopped);
    }

    /// Captures a job. It runs again when this returns, whatever it returns, unless it is to be
    /// held. A job that cannot be captured is not harmed. To be called on the thread that has
    /// stopped it. The job's standard streams must be the caller's. `late`: as of [`Begun::stop`],
    /// of what rests now. A plugin that is left out takes nothing, and what it would have taken is
    /// saved as any other descriptor, or refused.
    pub fn capture(
        self,
        stopped: Stopped,
        late: &[Arc<dyn Plugin>],
    ) -> Result<Captured, EngineError> {
        let Stopped { job: mut stopped, since: begin } = stopped;
        let Begun { options, machine, objects_file, once, mut session, mut places, .. } = self;
        let together = options.together.as_deref();
        together.map(Together::stopped).transpose().map_err(EngineError::Together)?;
        let alive: Vec<i32> = stopped.processes.iter().map(|process| process.pid).collect();
        let identified = Identified::of(&alive, &stopped.zombies)?;
        let Identified { zombies, ids, exit_signals } = identified;
        let pids: Vec<i32> = ids.iter().map(|ids| ids.pid).collect();
        let mappings = mappings(&stopped)?;
        aio::settle(&stopped, &mappings)?;
        rings::settle(&mut stopped, &mappings)?;
        let survey = survey(&pids, &options, late, true)?;
        let descriptors = {
            let others = together.and_then(Together::others);
            survey.save_on(&options.folder, session.base(), &mappings, others)?
        };
        // What is known of thousands of names is let go of when the job runs again.
        let passing = Passing::look(&mut places, &pids, &descriptors);
        let mut objects = objects::Objects::new(Ipc::of(&descriptors)?);
        session.spend();
        let heard = options.tracker.as_ref().or(once.as_ref()).map(Tracker::heard);
        let everybody = pids.iter().chain(&stopped.zombies).copied();
        session.shared.stand_still(everybody, &heard.unwrap_or_default());
        let notices = plugins::mqueue::wanted(&descriptors)?;
        let common = process::Common {
            options: &options,
            descriptors: &descriptors,
            notices: &notices,
            lookup: process::Lookup::default(),
            ids: &ids,
            exit_signals: &exit_signals,
        };
        let told = told(&stopped, &mappings, &common, &objects)?;
        let (told, mut resigned) = (told.into_iter().zip(mappings).collect(), Vec::new());
        let (processes, seen) = (&mut stopped.processes, &mut session);
        let looked = process::look(processes, told, &common, &mut objects, seen)?;
        let held = hold::hold(&mut stopped.processes, looked, &common, &mut resigned)?;
        hold::reinstate(&mut stopped.processes, resigned)?;
        refuse_deadly_parents(&stopped, &held)?;
        let (lookup, clocks) = (common.lookup, Clocks::now());
        let shared = objects.hold(&mut session.shared, &objects_file, options.codec)?;
        session.shared.goes_on();
        survey.captured()?;
        let captured = together.map(|others| others.captured(pids.len()));
        captured.transpose().map_err(EngineError::Together)?;
        let standing = if options.hold {
            Some(Standing::new(stopped))
        } else {
            drop(stopped);
            None
        };
        let stall = begin.elapsed() + session.stall;
        let unwatching = once.map(|tracker| std::thread::spawn(move || tracker.end()));
        let (vdsos, processes) = (objects.vdsos(), pids);
        let job =
            JobState { machine, clocks, objects: objects.described(), vdsos, processes, zombies };
        let mut warnings = descriptors.warnings().to_vec();
        warnings.append(&mut session.notes);
        let tracer = PhantomData;
        Ok(Captured {
            options,
            job,
            objects_file,
            descriptors,
            passing,
            lookup,
            held,
            shared,
            standing,
            session,
            unwatching,
            stall,
            warnings,
            late_warnings: Arc::default(),
            tracer,
        })
    }
}

/// What each process maps.
fn mappings(stopped: &StoppedJob) -> Result<Vec<Vec<Mapping>>, EngineError> {
    several::try_each(&answering(stopped), |pid| {
        let mappings = maps::named(*pid)?;
        // Some may be newer than the survey.
        refuse::huge_pages(*pid, &mappings)?;
        Ok(mappings)
    })
}

/// What /proc tells of each process, which maps `mappings` each.
fn told(
    stopped: &StoppedJob,
    mappings: &[Vec<Mapping>],
    common: &process::Common<'_>,
    objects: &objects::Objects,
) -> Result<Vec<Told>, EngineError> {
    let each = answering(stopped).into_iter().zip(common.ids.iter().zip(common.exit_signals));
    let each: Vec<_> = each.zip(mappings).collect();
    let mut told = several::try_each(&each, |((pid, (ids, exit_signal)), mappings)| {
        Told::of(*pid, (**ids, **exit_signal), mappings, (common, objects))
    })?;
    ToldThread::add(stopped, &mut told)?;
    Ok(told)
}

/// The thread that answers for each process.
fn answering(stopped: &StoppedJob) -> Vec<pid_t> {
    stopped.processes.iter().map(|process| process.main.pid()).collect()
}
