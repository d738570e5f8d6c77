//! Running a compiled program and judging it.

use crate::job::family;
use crate::{Program, kedge};
use rustix::process::{Pid, Signal};
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Where a program runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// On this machine's own driver and GPU.
    Native,
    /// Under `kedge run --gpu SPEC`; `soft` gets as many devices as the program needs.
    Kedge(String),
    /// Under `kedge run --gpu ADDRESS/…`, on as many devices as the program needs that are served
    /// there.
    Far(String),
    /// Under `kedge check --races --init`, on as many devices as the program needs.
    Checked,
}

impl Target {
    /// Returns what `kedge run --gpu` gets for a program; nothing without kedge.
    pub(crate) fn gpu(&self, program: &Program) -> String {
        match self {
            Self::Native => String::new(),
            Self::Checked => format!("soft:{}", program.devices),
            Self::Kedge(gpu) if gpu == "soft" && program.devices > 1 => {
                format!("soft:{}", program.devices)
            }
            Self::Kedge(gpu) => gpu.clone(),
            // As many as software devices are near.
            Self::Far(gpu) => {
                let all: Vec<String> = (0..program.devices).map(|n| n.to_string()).collect();
                format!("{gpu}/{}", all.join(","))
            }
        }
    }

    fn command(&self, binary: &Path, program: &Program) -> Command {
        let mut command = match self {
            Self::Native => Command::new(binary),
            Self::Kedge(_) | Self::Far(_) | Self::Checked => {
                let mut command = Command::new(kedge());
                let checks = ["check", "--races", "--init"];
                let words: &[&str] = if *self == Self::Checked { &checks } else { &["run"] };
                command.args(words).args(["--gpu", &self.gpu(program), "--"]).arg(binary);
                if !matches!(self, Self::Far(_)) {
                    // No folder: what an earlier run has left in a cache would hide what this one
                    // lacks.
                    command.env("XDG_CACHE_HOME", "/dev/null");
                }
                command
            }
        };
        command.args(&program.args);
        command
    }
}

/// How a run ended.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// `None`: it passed; otherwise what was wrong.
    pub failure: Option<String>,
    /// Why what was to be shown of it was refused: it went on as if nobody had asked.
    pub refused: Option<String>,
    /// The status that it exited with, if it did.
    pub status: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    pub seconds: f64,
}

impl Outcome {
    /// The end of what was printed, in `most` bytes; standard error comes last.
    pub fn said(&self, most: usize) -> String {
        let both = format!("{}{}", self.stdout, self.stderr);
        let mut from = both.len().saturating_sub(most);
        while !both.is_char_boundary(from) {
            from += 1;
        }
        both[from..].to_owned()
    }
}

/// Runs `binary` and checks its exit status, its last line and its standard error.
pub fn run(binary: &Path, program: &Program, target: &Target) -> Outcome {
    let limit = Duration::from_secs(program.seconds);
    let mut outcome = run_command(target.command(binary, program), limit);
    if let (Target::Far(_), Some(text)) = (target, &program.far_refused) {
        outcome.failure = match (&outcome.failure, outcome.said(usize::MAX).contains(text)) {
            (Some(_), true) => None,
            (None, _) => Some(format!("it passed, though it says that {text:?} is refused far")),
            (Some(failure), false) => Some(format!("{failure}, not by {text:?}")),
        };
        return outcome;
    }
    if let (Target::Checked, Some(text)) = (target, &program.check_finds) {
        let found = outcome.status == Some(FOUND) && outcome.stderr.contains(text);
        outcome.failure = (!found).then(|| format!("kedge check does not find {text:?}"));
    }
    if outcome.failure.is_none() {
        outcome.failure = judge(program, &outcome);
    }
    outcome
}

/// What `kedge check` ends with where it has found something.
const FOUND: i32 = 86;

pub(crate) fn judge(program: &Program, outcome: &Outcome) -> Option<String> {
    let last = outcome.stdout.lines().last().unwrap_or("");
    if !last.starts_with("ok") {
        return Some(format!("last line is {last:?}, not \"ok …\""));
    }
    match &program.stderr {
        Some(text) if !outcome.stderr.contains(text) => {
            Some(format!("standard error lacks {text:?}"))
        }
        _ => None,
    }
}

/// How long a program that is asked to end has for that, and its pipes to close behind it.
const GRACE: Duration = Duration::from_secs(3);

/// What a program has said so far.
pub(crate) type Said = Arc<Mutex<Vec<u8>>>;

/// Runs `command` to its end, or ends it at `limit`.
pub fn run_command(command: Command, limit: Duration) -> Outcome {
    run_heard(command, limit, &Said::default())
}

/// As [`run_command`]; what it says on standard error is in `said` as soon as it is said.
pub(crate) fn run_heard(mut command: Command, limit: Duration, said: &Said) -> Outcome {
    let start = Instant::now();
    let failed = |what: String| Outcome {
        failure: Some(what),
        refused: None,
        status: None,
        stdout: String::new(),
        stderr: String::new(),
        seconds: start.elapsed().as_secs_f64(),
    };
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return failed(format!("{:?}: {error}", command.get_program())),
    };
    let stdout = drain(child.stdout.take(), &Said::default());
    let stderr = drain(child.stderr.take(), said);
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Ok(status),
            Ok(None) if start.elapsed() > limit => {
                let what = waits(child.id());
                end(&mut child);
                break Err(format!("still running after {} s: {what}", limit.as_secs()));
            }
            Ok(None) => std::thread::sleep(Duration::from_millis(2)),
            Err(error) => break Err(error.to_string()),
        }
    };
    let seconds = start.elapsed().as_secs_f64();
    Outcome {
        status: status.as_ref().ok().and_then(ExitStatus::code),
        failure: match status {
            Ok(status) => describe(status),
            Err(what) => Some(what),
        },
        refused: None,
        // What the command has left behind may keep them open.
        stdout: stdout.recv_timeout(GRACE).unwrap_or_default(),
        stderr: stderr.recv_timeout(GRACE).unwrap_or_default(),
        seconds,
    }
}

/// Each process below `pid` and what its threads do: a name, and where the kernel has it wait.
pub(crate) fn waits(pid: u32) -> String {
    let read = |path: String| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let threads = |pid: u32| {
        let all = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let ids = all.filter_map(|entry| entry.file_name().into_string().ok());
        ids.map(|id| read(format!("/proc/{pid}/task/{id}/wchan"))).collect::<Vec<_>>().join(" ")
    };
    let one = |pid: u32| format!("{} ({})", read(format!("/proc/{pid}/comm")), threads(pid));
    family(pid).into_iter().map(one).collect::<Vec<_>>().join(", ")
}

/// Ends a command with its job: one that is killed outright leaves the job's processes behind.
fn end(child: &mut Child) {
    let _ = rustix::process::kill_process(Pid::from_child(child), Signal::TERM);
    let asked = Instant::now();
    while asked.elapsed() < GRACE && matches!(child.try_wait(), Ok(None)) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = child.kill();
    let _ = child.wait();
}

fn describe(status: ExitStatus) -> Option<String> {
    (!status.success()).then(|| status.to_string())
}

fn drain<R: Read + Send + 'static>(pipe: Option<R>, into: &Said) -> Receiver<String> {
    let (read, all) = channel();
    let into = Arc::clone(into);
    std::thread::spawn(move || {
        let mut bytes = vec![0; 64 << 10];
        let mut pipe = pipe;
        let heard = || into.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(length @ 1..) = pipe.as_mut().and_then(|pipe| pipe.read(&mut bytes).ok()) {
            heard().extend_from_slice(&bytes[..length]);
        }
        let _ = read.send(String::from_utf8_lossy(&heard()).into_owned());
    });
    all
}
