//! Bringing a job of several parts back (docs/design/0066-recovery-of-parts.md): beside each part's
//! supervisor there is a warden, a process of its own, which is in touch with the coordinator. It
//! stops the part where it has lost that touch or another part is lost, and agrees with the other
//! wardens on the image that all come back from.
//!
//! ```text
//! supervisor → warden   lost WHY | stopped | ended WHY
//! warden → supervisor   pid NUMBER | stop | back NOTE | end WHY
//! ```

mod duty;
mod noting;
mod plan;
mod reading;
mod touch;

pub use duty::watch_over as ward;

use crate::Outcome;
use crate::again::kedge_again;
use crate::joint::{Joint, KEY};
use crate::policy::Policy;
use crate::proxies::hand_over;
use crate::signals;
use crate::warm::leave;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long a supervisor looks at its warden's words at a time.
const LOOK: Duration = Duration::from_millis(100);
/// How long it may be until a warden has heard that another part is lost.
const NEWS: Duration = Duration::from_secs(3);
/// How long a warden may take to begin.
const BEGIN: Duration = Duration::from_secs(10);

/// What a warden is to know.
#[derive(Debug, Serialize, Deserialize)]
struct Charge {
    job: String,
    part: String,
    /// The part's folder.
    folder: PathBuf,
    /// Where the coordinator is, if the parts are on several hosts; the key is in the environment.
    at: Option<String>,
    /// The supervisor, and when it began.
    supervisor: i32,
    since: u64,
    /// How often the job may go back, and has.
    limit: u32,
    times: u32,
    /// How many parts there are, if all are brought back.
    parts: Option<u32>,
    /// The image of the part that it is brought back from.
    image: Option<PathBuf>,
    /// Where images go.
    dir: Option<PathBuf>,
    /// Of the job's user, for whom kedge says nothing.
    quiet: bool,
}

/// What the process that brings parts back is to know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Return {
    pub job: String,
    pub at: Option<String>,
    /// No other return has it.
    pub series: String,
    /// The numbers of the parts, in the image.
    pub parts: Vec<u32>,
    /// How often the job has gone back, with this time.
    pub times: u32,
    pub dir: Option<PathBuf>,
    pub why: String,
}

/// That this process becomes one that brings parts of its job back, with those of others that are
/// lost.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Together {
    pub image: PathBuf,
    note: Return,
}

impl Together {
    /// A command that brings the parts back.
    #[must_use]
    pub fn command(&self) -> Command {
        let note = serde_json::to_string(&self.note).unwrap_or_default();
        let mut command = kedge_again();
        command.arg0("kedge").arg("restart").arg(&self.image).arg("--together").arg(note);
        if let Some(key) = KEYS.get() {
            command.env(KEY, OsStr::from_bytes(key));
        }
        command
    }
}

/// What a supervisor is told once its part has stopped.
#[derive(Debug, Clone)]
pub(crate) enum Verdict {
    Back(Together),
    /// The job does not come back, or not here.
    End(String),
}

/// A supervisor's end of the line to its warden. A supervisor has one at most.
#[derive(Debug)]
pub(crate) struct Warden {
    line: UnixStream,
    heard: Mutex<Heard>,
}

#[derive(Debug)]
struct Heard {
    reader: BufReader<UnixStream>,
    /// What has come of a line.
    piece: String,
    stops: bool,
    verdict: Option<Verdict>,
}

static WARDEN: OnceLock<Warden> = OnceLock::new();

/// What the parts of the job have in common, for whoever brings them back.
static KEYS: OnceLock<Vec<u8>> = OnceLock::new();

/// This process's.
pub(crate) fn own() -> Option<&'static Warden> {
    WARDEN.get()
}

/// Whether it has told this process to stop its part.
pub(crate) fn has_stopped_it() -> bool {
    own().is_some_and(|warden| warden.heard(Duration::ZERO).stops)
}

/// Whether the warden has the part stopped whose program has ended so, as it may be about to: that
/// may have failed for want of another part that was lost just before.
pub(crate) fn is_about_to_stop(outcome: Outcome) -> bool {
    let (Some(_), begin) = (own(), Instant::now()) else { return false };
    // One that was killed is lost itself, or its user has ended it.
    if [Outcome::Exited(0), Outcome::Killed(libc::SIGKILL)].contains(&outcome) {
        return false;
    }
    while !has_stopped_it() {
        if begin.elapsed() > NEWS {
            return false;
        }
        thread::sleep(LOOK / 10);
    }
    true
}

/// What a part is to be brought back with, if it has been.
#[derive(Debug, Default, Clone)]
pub(crate) struct Before {
    pub(crate) times: u32,
    pub(crate) parts: Option<u32>,
    pub(crate) image: Option<PathBuf>,
}

/// Set once the end of this process's part was asked for.
static ENDS: AtomicBool = AtomicBool::new(false);

/// Says that the part does not come back, also if it is about to.
pub(crate) fn is_to_end() {
    ENDS.store(true, Ordering::SeqCst);
}

/// Starts the warden of `joint`, if the job is to go back by itself. To be called while this
/// process has one thread, and before it adopts what others leave, where that can be.
pub(crate) fn start(
    joint: &Joint,
    folder: &Path,
    policy: &Policy,
    before: Before,
    quiet: bool,
) -> io::Result<()> {
    let Some(limit) = policy.recover else { return Ok(()) };
    let supervisor = std::process::id() as i32;
    let charge = Charge {
        job: joint.job.to_string(),
        part: joint.part.to_string(),
        folder: folder.to_owned(),
        at: joint.place.far.as_ref().map(|far| far.address().to_string()),
        supervisor,
        since: kedge_process::running_since(supervisor).unwrap_or_default(),
        limit: limit.get(),
        times: before.times,
        parts: before.parts,
        image: before.image,
        dir: policy.dir.clone(),
        quiet,
    };
    let (line, far) = UnixStream::pair()?;
    let mut command = kedge_again();
    command.arg0("kedge").arg("warden").arg(serde_json::to_string(&charge)?);
    // Who asks for the job's processes by it takes the warden for none.
    command.env_remove("KEDGE_CONTROL").stdin(Stdio::inherit());
    if let Some(far) = &joint.place.far {
        let _ = KEYS.set(far.key().text().to_vec());
        command.env(KEY, OsStr::from_bytes(far.key().text()));
    }
    let fds = [far.as_raw_fd()];
    // SAFETY: the closure runs in the child between fork and exec and only makes system calls; the
    // descriptor outlives the spawn.
    unsafe {
        command.pre_exec(move || {
            leave()?;
            hand_over(fds)
        });
    }
    // What was spawned ends at once: what it has forked goes on, as nobody's child. A supervisor
    // whose job runs may have collected it.
    let _ = command.spawn()?.wait();
    drop(far);
    line.set_read_timeout(Some(BEGIN))?;
    let mut reader = BufReader::new(line.try_clone()?);
    let mut first = String::new();
    reader.read_line(&mut first)?;
    let pid = first.strip_prefix("pid ").and_then(|pid| pid.trim().parse().ok());
    let pid = pid.ok_or_else(|| io::Error::other("the job's warden has not begun"))?;
    // Where this process is the one that orphans are given to, it is none of the job's all the
    // same.
    kedge_process::leave_alone(pid);
    line.set_nonblocking(true)?;
    let heard = Heard { reader, piece: String::new(), stops: false, verdict: None };
    let _ = WARDEN.set(Warden { line, heard: Mutex::new(heard) });
    Ok(())
}

impl Warden {
    /// Tells it something; what one cannot be told that is gone, its end tells.
    pub(crate) fn say(&self, what: &str) {
        let line = format!("{}\n", what.replace('\n', " "));
        let _ = (&self.line).write_all(line.as_bytes());
    }

    /// What it has said until now; waits for as long for something new.
    fn heard(&self, wait: Duration) -> MutexGuard<'_, Heard> {
        let mut fds = [PollFd::new(&self.line, PollFlags::IN)];
        let wait = Timespec::try_from(wait).ok();
        let _ = poll(&mut fds, wait.as_ref());
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        heard.take_in();
        heard
    }

    /// Has `stop` be called once the warden says that the part is to stop, or is gone.
    pub(crate) fn on_stop(&'static self, stop: impl Fn() + Send + 'static) -> io::Result<()> {
        let listen = move || {
            while !self.heard(Duration::from_secs(60)).stops {}
            stop();
        };
        thread::Builder::new().name("warden".into()).spawn(listen).map(drop)
    }

    /// That nothing of the part runs any more: what becomes of it, if nobody asks for its end.
    pub(crate) fn verdict(&self) -> Verdict {
        self.say("stopped");
        loop {
            if let Some(verdict) = self.heard(LOOK).verdict.clone() {
                return verdict;
            }
            if ENDS.load(Ordering::SeqCst) || signals::sent_to_end().is_some() {
                self.say("ended by its user");
                return Verdict::End("it was ended while it was about to go back".to_owned());
            }
        }
    }
}

impl Heard {
    fn take_in(&mut self) {
        loop {
            match self.reader.read_line(&mut self.piece) {
                Ok(0) => return self.gone(),
                Ok(_) if self.piece.ends_with('\n') => {
                    let line = std::mem::take(&mut self.piece);
                    self.take(line.trim_end());
                }
                Ok(_) => return self.gone(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => return self.gone(),
            }
        }
    }

    fn take(&mut self, line: &str) {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "stop" => self.stops = true,
            "back" => {
                let bad = |error| Verdict::End(format!("its warden says what none says: {error}"));
                let verdict = serde_json::from_str(rest).map_or_else(bad, Verdict::Back);
                self.verdict = Some(verdict);
            }
            "end" => self.verdict = Some(Verdict::End(rest.to_owned())),
            _ => {}
        }
    }

    /// Nobody would stop the part where it has to be.
    fn gone(&mut self) {
        self.stops = true;
        let gone = || Verdict::End("its warden was killed".to_owned());
        self.verdict.get_or_insert_with(gone);
    }
}

/// The time since the machine's boot, with that for which it stood still.
fn since_boot() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

/// Of two wardens of one part, that of the later one is greater.
fn life() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}
