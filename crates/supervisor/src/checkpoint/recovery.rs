//! Whether a job that has lost a proxy, and with it what its devices held, or whose program was
//! killed, goes back to its newest good image.

use crate::checkpoint::error::DepartError;
use crate::devices::proxies::ProxyId;
use crate::job::images::Images;
use crate::job::jobs::JobDir;
use crate::job::outcome::Outcome;
use crate::job::policy::Policy;
use crate::services::warden;
use kedge_control::joblog::JobLog;
use kedge_control::proxy::{EXIT_BUG, EXIT_LOST};
use kedge_control::session::FarSession;
use kedge_control::{error, fault, warn};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// For a server to end a session.
const SERVER: Duration = Duration::from_secs(3);

/// Whether a job goes back, and where to.
#[derive(Debug)]
pub(crate) struct Recovery {
    /// At most; `None`: never.
    pub(crate) limit: Option<u32>,
    /// How often it has.
    pub(crate) used: u32,
    pub(crate) images: Images,
    /// The job's.
    folder: PathBuf,
    pub(crate) log: Arc<JobLog>,
    pub(crate) fate: Mutex<Fate>,
    /// The job is one of several parts, whose wardens say whether, and where to.
    of_part: AtomicBool,
}

/// What has become of a job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Fate {
    #[default]
    Whole,
    /// Nobody has looked yet whether the job can go back.
    Lost(Loss),
    /// And the job goes back.
    GoingBack,
    /// And the job goes on without, or its end was asked for.
    GivenUp,
}

/// What a job has lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loss {
    /// Devices, with this proxy.
    Devices { proxy: ProxyId, how: Outcome },
    /// The program's first process, by SIGKILL: nothing that a program does ends it so, but the
    /// kernel where memory runs out.
    Program,
    /// Its init, and with it all processes.
    Init,
    /// The restart by which it was to go back.
    Restart,
    /// Another part of the job, or the way to it.
    Others,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Loss::Devices { proxy, how } => {
                write!(f, "the devices of proxy {proxy} are lost ({how})")
            }
            Loss::Program => f.write_str("the program was killed (SIGKILL)"),
            Loss::Init => f.write_str("the restarted job was killed as a whole (SIGKILL)"),
            Loss::Restart => f.write_str("the job has not come back"),
            Loss::Others => f.write_str("its warden has the part stopped"),
        }
    }
}

impl Recovery {
    pub(crate) fn new(policy: &Policy, used: u32, dir: &JobDir, log: &Arc<JobLog>) -> Recovery {
        let limit = policy.recover.map(u32::from);
        let images = Images::of(dir);
        let (folder, log) = (dir.path().to_owned(), log.clone());
        let (fate, of_part) = (Mutex::default(), AtomicBool::new(false));
        Recovery { limit, used, images, folder, log, fate, of_part }
    }

    /// Says that the job is a part, which ends where it has lost something: its warden knows what
    /// follows.
    pub(crate) fn is_of_part(&self) {
        self.of_part.store(true, Ordering::SeqCst);
    }

    /// Whether it may come to that.
    pub(crate) fn is_wanted(&self) -> bool {
        self.limit.is_some() && *self.fate() != Fate::GivenUp
    }

    /// A proxy has ended.
    pub(crate) fn proxy_ended(&self, proxy: ProxyId, how: Outcome) {
        self.end_session(proxy, how);
        if how == Outcome::Exited(0) {
            return;
        }
        if is_loss(how) {
            let what = format!("proxy {proxy} was lost ({how}), and what its devices held");
            fault!(self.log, "{what}");
            self.lose(Loss::Devices { proxy, how });
        } else {
            warn!(self.log, "proxy {proxy} has ended: {how}");
        }
    }

    /// Has the server end the session of a proxy that could not, so that its devices' memory is
    /// free: before the job goes back to an image, which may want it.
    fn end_session(&self, (ProxyId::Child(pid) | ProxyId::Warm(pid)): ProxyId, how: Outcome) {
        let sessions = FarSession::take(&self.folder, pid);
        // It has said goodbye, or found that the server cannot be reached or has no such session.
        // Of several, it may have come to one alone.
        match matches!(how, Outcome::Exited(status) if [0, EXIT_LOST].contains(&status.into())) {
            true if sessions.len() <= 1 => {}
            true => end_sessions(sessions, |_| ()),
            false => end_sessions(sessions, |error| self.cannot_end(pid, error)),
        }
    }

    /// Has the servers end the sessions of a proxy that has ended, or is about to, if it has any.
    pub(crate) fn end_session_of(&self, pid: u32) {
        end_sessions(FarSession::take(&self.folder, pid), |error| self.cannot_end(pid, error));
    }

    fn cannot_end(&self, pid: u32, error: &dyn fmt::Display) {
        let why = "so its devices' memory is free only once the server gives the session up";
        warn!(self.log, "the session of proxy {pid} cannot be ended ({error}), {why}");
    }

    /// The program's first process has ended.
    pub(crate) fn program_ended(&self, how: Outcome) {
        if how == Outcome::Killed(libc::SIGKILL) {
            self.lose(Loss::Program);
        }
    }

    pub(crate) fn lose(&self, loss: Loss) {
        let mut fate = self.fate();
        if *fate == Fate::Whole {
            *fate = Fate::Lost(loss);
        }
    }

    /// Whether the job is to go back now. The log tells, also why not.
    pub(crate) fn is_due(&self) -> bool {
        let mut fate = self.fate();
        let Fate::Lost(lost) = *fate else { return *fate == Fate::GoingBack };
        if self.of_part.load(Ordering::SeqCst) {
            *fate = Fate::GoingBack;
            warn!(self.log, "{lost}: the part ends, and comes back with the others");
            if let (Some(warden), true) = (warden::own(), lost != Loss::Others) {
                warden.say(&format!("lost {lost}"));
            }
            return true;
        }
        *fate = match (self.limit, self.images.newest()) {
            (None, _) => Fate::GivenUp,
            (Some(limit), _) if self.used >= limit => {
                let times = self.used;
                error!(self.log, "{lost}: the job has gone back {times} times, not again");
                Fate::GivenUp
            }
            (Some(_), None) => {
                error!(self.log, "{lost}: there is no image yet to go back to");
                Fate::GivenUp
            }
            (Some(limit), Some((image, _))) => {
                let (time, image) = (self.used + 1, image.display());
                warn!(
                    self.log,
                    "{lost}: the job goes back to {image}, for time {time} of {limit} at most"
                );
                Fate::GoingBack
            }
        };
        *fate == Fate::GoingBack
    }

    /// The job's end was asked for: whatever its proxies do, it does not go back.
    pub(crate) fn give_up(&self) {
        *self.fate() = Fate::GivenUp;
        if self.of_part.load(Ordering::SeqCst) {
            warden::is_to_end();
        }
    }

    /// Has `decide` decide that the job leaves for another host, after which it does not go back
    /// here. While that is under way nobody begins to end it.
    ///
    /// # Errors
    /// It is being ended here, has lost something that it goes back for, or `decide` fails.
    pub(crate) fn leave(
        &self,
        decide: impl FnOnce() -> Result<(), DepartError>,
    ) -> Result<(), DepartError> {
        let mut fate = self.fate();
        if *fate != Fate::Whole {
            return Err(DepartError::Ends);
        }
        decide()?;
        *fate = Fate::GivenUp;
        Ok(())
    }

    fn fate(&self) -> MutexGuard<'_, Fate> {
        self.fate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Has the servers end all sessions of a job whose restart has failed: its proxies were killed with
/// its init, and may not have said goodbye.
pub(crate) fn end_sessions_of(folder: &Path, log: &JobLog) {
    end_sessions(FarSession::take_all(folder), |error| {
        warn!(log, "a session of the job cannot be ended ({error}): its server gives it up");
    });
}

/// Has the servers end `sessions`; `failed` hears why one cannot be ended.
fn end_sessions(sessions: Vec<FarSession>, failed: impl Fn(&dyn fmt::Display)) {
    for FarSession { server, key } in sessions {
        if let Err(error) = kedge_remote::end_session(&server, key, SERVER) {
            failed(&error);
        }
    }
}

/// Returns whether devices are gone with a proxy that ended so. One that ends with another status
/// has a client that broke the rules, or has never had devices.
fn is_loss(how: Outcome) -> bool {
    match how {
        Outcome::Killed(_) => true,
        Outcome::Exited(status) => [EXIT_BUG, EXIT_LOST].contains(&i32::from(status)),
    }
}
