//! The init of a restarted job, which takes its checkpoints.

use crate::base::ends::{FAREWELL, LAST};
use crate::base::signals::{Signals, look_at_children};
use crate::checkpoint::checkpointer::{Checkpointer, Without, new_life};
use crate::checkpoint::recovery::Recovery;
use crate::checkpoint::server;
use crate::devices::proxies::Proxies;
use crate::job::jobs::{JobDir, JobName};
use crate::job::joint::Joint;
use crate::job::outcome::Outcome;
use crate::job::policy::Policy;
use crate::job::tally::Tally;
use crate::job::turn::Turn;
use crate::restart::plugins::RestartPlugins;
use crate::restart::spec::RestartSpec;
use crate::services::keeper::At;
use crate::services::warden;
use kedge_control::joblog::JobLog;
use kedge_control::{error, warn};
use kedge_image::{Devices, Manifest};
use kedge_process::{Rebuilt, Tracker};
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

/// What the restarted job's init needs to take checkpoints.
pub(crate) struct Checkpointing<'a> {
    pub(crate) spec: &'a RestartSpec,
    pub(crate) name: &'a JobName,
    pub(crate) joint: Option<&'a Joint>,
    pub(crate) dir: &'a JobDir,
    /// The folder that the job's processes know.
    pub(crate) home: PathBuf,
    pub(crate) manifest: &'a Manifest,
    pub(crate) devices: Option<Devices>,
    pub(crate) proxies: Proxies,
    /// Its copies of those that the job was restarted by.
    pub(crate) plugins: &'a RestartPlugins,
}

impl Checkpointing<'_> {
    /// Runs in the init, until nothing of the job is left.
    pub(crate) fn serve(&self, job: &mut Rebuilt) {
        // The init has closed what it inherited.
        warden::is_a_copy();
        let log =
            JobLog::open(&self.dir.log(), "init".to_owned()).unwrap_or_else(|_| JobLog::none());
        let log = Arc::new(log);
        let policy = self.spec.policy.or(Policy::of_image(self.manifest));
        let recovery = Arc::new(Recovery::new(&policy, self.spec.used(), self.dir, &log));
        if self.joint.is_some() && policy.recover.is_some() {
            recovery.is_of_part();
        }
        let rank = self.plugins.rank.serve(log.clone()).unwrap_or_else(|error| {
            warn!(log, "{error}");
            None
        });
        let checkpointer = Arc::new(Checkpointer {
            name: self.name.clone(),
            command: self.manifest.command.clone(),
            devices: Mutex::new(self.devices.clone()),
            socket: self.dir.socket(),
            proxies: self.proxies.clone(),
            policy,
            roots: job.roots(),
            first: job.root().into(),
            without: Without::Ends,
            log: log.clone(),
            last: self.dir.last_image(),
            tally: Tally::new(self.dir.checkpoints()),
            turn: Turn::default(),
            ending: Mutex::default(),
            recovery,
            keeper: At::of(self.dir),
            tracker: Tracker::default(),
            followed: Mutex::default(),
            restored: job.restored(),
            home: self.home.clone(),
            life: new_life(),
            joint: self.joint.cloned().map(OnceLock::from).unwrap_or_default(),
            rank,
            launches: Arc::default(),
            over: AtomicBool::new(false),
        });
        if let Some(gpu) = &self.plugins.gpu
            && let Err(error) = gpu.serve(log.clone())
        {
            error!(log, "cannot start a thread: {error}: no devices for other processes");
        }
        if let Err(error) = server::serve(&self.dir.control(), checkpointer.clone()) {
            error!(log, "{}: {error}: no checkpoints", self.dir.control().display());
        }
        checkpointer.take_part();
        // SIGCHLD is blocked here as in the process that this is a copy of.
        let signals = Signals::block();
        let mut init = Init { job: &checkpointer, dir: self.dir, root: job.root(), ended: false };
        while job.collect(|ended| init.look(ended, &signals)) {
            signals.child();
        }
        if let Some(failure) = job.failure() {
            error!(log, "the job was ended: {failure}");
        }
        checkpointer.ended();
        checkpointer.settle(None);
    }
}

/// A restarted job's init, which alone can see its proxies end.
struct Init<'a> {
    job: &'a Checkpointer,
    dir: &'a JobDir,
    /// The program's first process, and whether it has ended.
    root: i32,
    ended: bool,
}

impl Init<'_> {
    /// Looks at children that have ended: whether their end is all, and not the job's way back. For
    /// that, nothing of the job runs any more, and the supervisor has been told.
    fn look(&mut self, ended: &[(i32, i32)], signals: &Signals) -> bool {
        let recovery = &self.job.recovery;
        self.proxies(ended);
        let root = ended.iter().find(|(pid, _)| *pid == self.root);
        let outcome = root.map(|(_, status)| Outcome::of(*status));
        if outcome.is_some_and(|outcome| outcome != Outcome::Exited(0)) && recovery.is_wanted() {
            // It may have failed because its proxy was lost just before.
            self.see_proxies_off(signals);
        }
        if self.ended || outcome == Some(Outcome::Exited(0)) || !self.dir.is_supervised() {
            // Nobody is left to restart it.
            recovery.give_up();
        }
        self.ended |= outcome.is_some();
        outcome.into_iter().for_each(|outcome| recovery.program_ended(outcome));
        if !recovery.is_due() {
            return true;
        }
        if let Err(error) = fs::write(self.dir.lost(), "") {
            warn!(recovery.log, "{}: {error}", self.dir.lost().display());
        }
        self.job.end_by(libc::SIGKILL, LAST);
        false
    }

    fn proxies(&self, ended: &[(i32, i32)]) {
        for (pid, status) in ended {
            if let Some(proxy) = self.job.proxies.ended(*pid as u32) {
                self.job.recovery.proxy_ended(proxy, Outcome::of(*status));
            }
        }
        for (proxy, how) in self.job.proxies.take_left() {
            self.job.recovery.proxy_ended(proxy, how);
        }
    }

    fn see_proxies_off(&self, signals: &Signals) {
        let begin = Instant::now();
        while let Some(left) = FAREWELL.checked_sub(begin.elapsed()) {
            self.proxies(&kedge_process::reap(&[]).ended);
            if self.job.proxies.none() {
                break;
            }
            signals.child_within(left);
        }
        // Whoever waits for children does not know of those.
        look_at_children();
    }
}
