//! Bringing a job of several parts back (docs/design/0066-recovery-of-parts.md): beside each part's
//! supervisor there is a warden, a process of its own, which is in touch with the coordinator. It
//! stops the part where it has lost that touch or another part is lost, and agrees with the other
//! wardens on the image that all come back from.
//!
//! ```text
//! supervisor → warden   lost WHY | stopped | ended WHY
//! warden → supervisor   pid NUMBER | runs | stop | back NOTE | end WHY
//! ```

mod duty;
mod noting;
mod plan;
mod reading;
mod touch;

pub use duty::watch_over as ward;

use crate::base::again::kedge_again;
use crate::base::apart::leave;
use crate::base::signals;
use crate::base::sockets::hand_over;
use crate::job::joint::{Joint, KEY};
use crate::job::outcome::Outcome;
use crate::job::policy::Policy;
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
/// From one word to the next of a warden whose part may run.
const WORD: Duration = Duration::from_secs(1);
/// After how many looks, each as long as that, in which it has said nothing it counts as gone: all
/// are over before the others take the part for gone. A supervisor that stood still itself has had
/// one such look more.
const MAX_SILENT_LOOKS: u32 = 17;
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
    #[serde(default)]
    again: As,
    /// Of the job's user, for whom kedge says nothing.
    quiet: bool,
}

/// What a restart was told of the job's files and devices: a return is told the same.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub struct As {
    pub(crate) paths: Vec<(PathBuf, PathBuf)>,
    pub(crate) gpu: Option<String>,
    pub(crate) soft_memory: Option<u64>,
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
    #[serde(default)]
    pub again: As,
    /// The warden's own part, and the devices that it was on last: `kedge migrate` may have moved
    /// it since its image.
    #[serde(default)]
    pub on: Option<(u32, String)>,
}

impl Return {
    /// Sees that the image is one that nobody but the user can have written.
    pub(crate) fn check(&self, image: &Path) -> Result<(), String> {
        reading::check_owners(image, &self.parts)
    }

    /// Returns the devices of the part `number`, if they are others than its image's.
    pub(crate) fn gpu_of(&self, number: u32) -> Option<&str> {
        let moved = self.on.as_ref().filter(|(part, _)| *part == number);
        moved.map(|(_, gpu)| &**gpu).or(self.again.gpu.as_deref())
    }
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
    Back(Box<Together>),
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
    /// How many words those were.
    words: u64,
    stops: bool,
    verdict: Option<Verdict>,
}

static WARDEN: OnceLock<Warden> = OnceLock::new();

/// What the parts of the job have in common, for whoever brings them back.
static KEYS: OnceLock<Vec<u8>> = OnceLock::new();

/// Set in a copy of the process that has the line.
static ELSEWHERE: AtomicBool = AtomicBool::new(false);

/// Says that this process is a copy of the one that has the line to the warden, of which it has
/// nothing: the descriptor's number may be another file's.
pub(crate) fn is_a_copy() {
    ELSEWHERE.store(true, Ordering::SeqCst);
}

/// This process's.
pub(crate) fn own() -> Option<&'static Warden> {
    WARDEN.get().filter(|_| !ELSEWHERE.load(Ordering::SeqCst))
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
    pub(crate) again: As,
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
        again: before.again,
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
    reader.read_line(&mut first).map_err(|error| match error.kind() {
        // The errno of a time limit is that of a limit on processes.
        io::ErrorKind::WouldBlock => io::Error::new(
            io::ErrorKind::TimedOut,
            format!("nothing was heard of it for {BEGIN:?}"),
        ),
        _ => error,
    })?;
    let pid = first.strip_prefix("pid ").and_then(|pid| pid.trim().parse().ok());
    let pid = pid.ok_or_else(|| io::Error::other("the job's warden has not begun"))?;
    // Where this process is the one that orphans are given to, it is none of the job's all the
    // same.
    kedge_process::leave_alone(pid);
    line.set_nonblocking(true)?;
    let heard = Heard { reader, piece: String::new(), words: 0, stops: false, verdict: None };
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

    /// Has `stop` be called once the warden says that the part is to stop, is gone, or stands
    /// still.
    pub(crate) fn on_stop(&'static self, stop: impl Fn() + Send + 'static) -> io::Result<()> {
        let listen = move || {
            let mut silence = Silence::default();
            loop {
                let begin = Instant::now();
                let mut heard = self.heard(WORD);
                if silence.is_over(heard.words, begin.elapsed() >= WORD) {
                    heard.gone("its warden has stood still");
                }
                if heard.stops {
                    break;
                }
            }
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
                Ok(0) => return self.gone("its warden was killed"),
                Ok(_) if self.piece.ends_with('\n') => {
                    let line = std::mem::take(&mut self.piece);
                    self.take(line.trim_end());
                }
                Ok(_) => return self.gone("its warden was killed"),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => return self.gone("its warden was killed"),
            }
        }
    }

    fn take(&mut self, line: &str) {
        self.words += 1;
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
    fn gone(&mut self, why: &str) {
        self.stops = true;
        self.verdict.get_or_insert_with(|| Verdict::End(why.to_owned()));
    }
}

/// How long a warden has said nothing: in looks, not in time, so that a machine that stands still
/// as a whole counts once.
#[derive(Debug, Default)]
struct Silence {
    words: u64,
    looks: u32,
}

impl Silence {
    /// Returns whether it has lasted too long; `words` is how many have come by the end of a look,
    /// which was cut short unless it was `whole`.
    fn is_over(&mut self, words: u64, whole: bool) -> bool {
        self.looks = if self.words == words { self.looks + u32::from(whole) } else { 0 };
        self.words = words;
        self.looks > MAX_SILENT_LOOKS
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::restart::spec::RestartSpec;
    use std::fs;
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};

    #[test]
    fn a_warden_that_stands_still_is_gone_before_others_take_its_part_for_gone() {
        let mut silence = Silence::default();
        assert!(!(1..100).any(|words| silence.is_over(words, true)));
        assert!(!(0..100).any(|_| silence.is_over(99, false)));
        let looks = (0..100).take_while(|_| !silence.is_over(99, true)).count();
        assert_eq!(looks as u32, MAX_SILENT_LOOKS);
        // What had come before it stood still, and a moment for the end of what runs.
        assert!(WORD * (MAX_SILENT_LOOKS + 2) + NEWS < plan::GONE);
    }

    #[test]
    fn a_return_is_told_what_the_restart_was_told() {
        let image = std::env::temp_dir().join(format!("kedge-return-{}", std::process::id()));
        fs::DirBuilder::new().mode(0o700).create(&image).unwrap();
        let paths = vec![("/old".into(), "/new".into())];
        let again = As { paths, gpu: Some("soft:2".to_owned()), soft_memory: Some(1 << 30) };
        let (job, series, why) = ("j".to_owned(), "s".to_owned(), "why".to_owned());
        let (at, dir, parts, times) = (None, None, vec![0, 1], 1);
        let on = Some((1, "soft:3".to_owned()));
        let note = Return { job, at, series, parts, times, dir, why, again: again.clone(), on };
        let text = serde_json::to_string(&note).unwrap();
        let spec = RestartSpec::of_return(image.clone(), &text).unwrap();
        assert_eq!(spec.paths, again.paths);
        assert_eq!(spec.gpu.unwrap().to_string(), "soft:2");
        assert_eq!(spec.soft_memory, again.soft_memory);
        // One part has moved since.
        assert_eq!([0, 1].map(|part| note.gpu_of(part)), [Some("soft:2"), Some("soft:3")]);
        // Others could have put another image there.
        fs::set_permissions(&image, fs::Permissions::from_mode(0o770)).unwrap();
        assert!(RestartSpec::of_return(image.clone(), &text).is_err());
        fs::remove_dir_all(&image).unwrap();
    }
}
