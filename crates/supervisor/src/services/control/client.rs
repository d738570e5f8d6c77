//! The asking side.

use crate::base::sending::Sending;
use crate::job::jobs::{JobError, JobName, Jobs, Meta, State};
use crate::job::mover::Supervisor;
use kedge_control::job::{
    Ask, FailureKind, Kill, Migrate, Moved, Moving, Order, Progress, Reply, Request, VERSION,
    Verdict, receive, send,
};
use rustix::process::{Pid, Signal, kill_process};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long a job may need from its start until it answers.
const BEGINNING: Duration = Duration::from_secs(2);
/// What a supervisor whose job has ended still does.
const ENDING: Duration = Duration::from_secs(5);

/// How far a checkpoint is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    Captured,
    Durable,
}

#[derive(Debug, Error)]
pub enum AskError {
    #[error(transparent)]
    Job(#[from] JobError),
    #[error("there is no job named {0}: `kedge ps` lists those that run")]
    Unknown(JobName),
    #[error("the job {0} has ended: `kedge ps` lists those that run")]
    Ended(JobName),
    #[error(
        "the supervisor of the job {0} was killed: `kedge kill {0}` ends what is left of it, and `kedge restart` brings \
         it back from an image"
    )]
    Unsupervised(JobName),
    #[error("the job {job} does not answer ({source}): `kedge logs {job}` may say why")]
    Silent { job: JobName, source: io::Error },
    /// In the job's own words.
    #[error("{0}")]
    Failed(String),
    /// The same, and to ask again brings nothing better.
    #[error("{0}")]
    Refused(String),
}

/// Checkpoints the running job `name`, and tells how far that is; `sending` has it too.
pub fn checkpoint(
    jobs: &Jobs,
    name: &JobName,
    order: &Order,
    until: Until,
    sending: &Sending,
    tell: impl FnMut(&Progress),
) -> Result<(), AskError> {
    let taken = take_of(jobs, name, order, until, sending, tell);
    sending.over();
    taken
}

fn take_of(
    jobs: &Jobs,
    name: &JobName,
    order: &Order,
    until: Until,
    sending: &Sending,
    tell: impl FnMut(&Progress),
) -> Result<(), AskError> {
    let parts = jobs.running_parts(name);
    // Any part conducts for all, unless a job of just that name runs.
    let name = parts.first().filter(|_| !runs(jobs, name)).unwrap_or(name);
    let control = reach(jobs, name)?;
    take(&control, order, until, sending, tell).map_err(|error| match error {
        TakeError::Silent(source) => AskError::Silent { job: name.clone(), source },
        TakeError::Failed { message, .. } => AskError::Failed(message),
    })
}

/// Ends the job `name`, or sends its processes a signal. Returns, if they are to end, when they
/// have.
pub fn kill(jobs: &Jobs, name: &JobName, kill: Kill) -> Result<(), AskError> {
    let parts = jobs.living_parts(name);
    if !runs(jobs, name) && !parts.is_empty() {
        // One that cannot be ended keeps no other from it.
        let ended: Vec<_> = parts.iter().map(|part| kill_one(jobs, part, kill)).collect();
        return ended.into_iter().collect();
    }
    kill_one(jobs, name, kill)
}

fn kill_one(jobs: &Jobs, name: &JobName, kill: Kill) -> Result<(), AskError> {
    let control = match reach(jobs, name) {
        Err(AskError::Unsupervised(name)) => return kill_left(jobs, &name, kill),
        other => other?,
    };
    let asked = ask(&control, Ask::Kill(kill)).and_then(|stream| receive(&stream));
    if asked.is_err() && matches!(kill, Kill::End { .. }) {
        end_supervisor(jobs, name, &control);
    }
    let begin = Instant::now();
    let runs = || runs(jobs, name);
    match asked {
        Ok(Reply::Failed { message, .. }) => return Err(AskError::Failed(message)),
        Ok(_) if matches!(kill, Kill::Signal(_)) => return Ok(()),
        // A supervisor that has nothing left to supervise may end before it has answered.
        _ => {
            while runs() && begin.elapsed() < ENDING {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
    match asked {
        Err(source) if runs() => Err(AskError::Silent { job: name.clone(), source }),
        _ => Ok(()),
    }
}

/// Ends the restart that is to become the job `name`, which answers nobody as yet and leaves
/// nothing; or the supervisor of a part that waits for its way back, of which nothing answers any
/// more.
fn end_supervisor(jobs: &Jobs, name: &JobName, control: &Path) {
    let is_mute = || kedge_socket::address::connect(control).is_err();
    let ends = |meta: &Meta| meta.state == State::Running && (meta.pid.is_none() || is_mute());
    let Some(meta) = jobs.find(name).filter(ends) else { return };
    if let Some(pid) = Pid::from_raw(meta.supervisor.cast_signed()) {
        let _ = kill_process(pid, Signal::TERM);
    }
}

/// The same of a job without a supervisor, and without anybody else who answers for it.
fn kill_left(jobs: &Jobs, name: &JobName, kill: Kill) -> Result<(), AskError> {
    let meta = jobs.find(name).ok_or_else(|| AskError::Unknown(name.clone()))?;
    let folder = jobs.folder(name);
    match kill {
        Kill::Signal(signal) => meta.left(&folder).signal(signal),
        Kill::End { grace_ms } => {
            if !meta.left(&folder).end(Duration::from_millis(grace_ms)) {
                let message = "some of its processes do not end, or are not yours to end";
                return Err(AskError::Failed(message.to_owned()));
            }
        }
    }
    Ok(())
}

/// Takes the memory of the job `name` off its devices, or brings it back: how many bytes are off
/// them now. `sending` has how far the order is.
pub fn swap(jobs: &Jobs, name: &JobName, out: bool, sending: &Sending) -> Result<u64, AskError> {
    let swapped = swap_of(jobs, name, out, sending);
    sending.over();
    swapped
}

fn swap_of(jobs: &Jobs, name: &JobName, out: bool, sending: &Sending) -> Result<u64, AskError> {
    let control = reach(jobs, name)?;
    match order(&control, Ask::Swap { out }, sending).and_then(|stream| receive(&stream)) {
        Ok(Reply::Swapped { bytes }) => Ok(bytes),
        Ok(Reply::Failed { message, .. }) => Err(AskError::Failed(message)),
        Ok(_) => {
            let source = io::Error::from(io::ErrorKind::InvalidData);
            Err(AskError::Silent { job: name.clone(), source })
        }
        Err(source) => Err(AskError::Silent { job: name.clone(), source }),
    }
}

/// Has what the devices of the job `name` hold captured, read, encoded by `codec` and summed, and
/// no image made of it: how many bytes that were, and how many seconds it took.
pub fn measure(jobs: &Jobs, name: &JobName, codec: &str) -> Result<(u64, f64), AskError> {
    let control = reach(jobs, name)?;
    let asked = ask(&control, Ask::Measure { codec: codec.to_owned() });
    match asked.and_then(|stream| receive(&stream)) {
        Ok(Reply::Measured { bytes, seconds }) => Ok((bytes, seconds)),
        Ok(Reply::Failed { message, .. }) => Err(AskError::Failed(message)),
        Ok(_) => {
            let source = io::Error::from(io::ErrorKind::InvalidData);
            Err(AskError::Silent { job: name.clone(), source })
        }
        Err(source) => Err(AskError::Silent { job: name.clone(), source }),
    }
}

/// Moves the devices of the job `name` while it runs, and tells how far that is. With `of`, only
/// those of the job that this has supervised until now, and none of a later job of its name.
pub fn migrate(
    jobs: &Jobs,
    name: &JobName,
    of: Option<Supervisor>,
    order: &Migrate,
    mut tell: impl FnMut(&Moving),
) -> Result<(), AskError> {
    let control = reach(jobs, name)?;
    let silent = |source| AskError::Silent { job: name.clone(), source };
    let stream = kedge_socket::address::connect(&control).map_err(silent)?;
    // Who answers is known from here on, and has the job's name for as long as it lives.
    if of.is_some() && Supervisor::of(jobs, name) != of {
        return Err(AskError::Ended(name.clone()));
    }
    put(&stream, Ask::Migrate(order.clone())).map_err(silent)?;
    loop {
        match receive(&stream).map_err(silent)? {
            Reply::Moving(moving) => {
                tell(&moving);
                if matches!(moving, Moving::Done { .. }) {
                    return Ok(());
                }
            }
            Reply::Failed { kind, message } => return Err(refused(kind, message)),
            _ => return Err(silent(io::Error::from(io::ErrorKind::InvalidData))),
        }
    }
}

/// Why a move has not been.
fn refused(kind: FailureKind, message: String) -> AskError {
    match kind {
        FailureKind::Busy | FailureKind::Failed => AskError::Failed(message),
        FailureKind::Refused | FailureKind::Lost | FailureKind::Version => {
            AskError::Refused(message)
        }
    }
}

/// Why a job has not left for another host, or is not known to have.
#[derive(Debug, Error)]
pub enum DepartAskError {
    /// It goes on here.
    #[error(transparent)]
    Stays(#[from] AskError),
    /// What was to arrive has not; the job goes on here.
    #[error("{0}")]
    NotArrived(String),
    /// Nobody answers since it was said that all has arrived.
    #[error(
        "whoever ends the job {job} here is gone ({source}): `kedge ps -a` tells whether it runs, \
         and `kedge restart` brings it back"
    )]
    Undecided { job: JobName, source: io::Error },
}

/// Takes the last image of the job `name`, for which it stands still until `arrives` has brought it
/// to another host and tells where. Returns when nothing of the job runs here any more.
///
/// # Errors
/// As [`DepartAskError`] says.
pub fn depart(
    jobs: &Jobs,
    name: &JobName,
    order: &Order,
    mut tell: impl FnMut(&Progress),
    arrives: impl FnOnce(&Path) -> Result<Moved, String>,
) -> Result<(), DepartAskError> {
    let control = reach(jobs, name)?;
    let silent = |source| AskError::Silent { job: name.clone(), source };
    let stream = ask(&control, Ask::Depart(order.clone())).map_err(silent)?;
    let mut arrives = Some(arrives);
    let mut why = None;
    loop {
        let undecided = arrives.is_none() && why.is_none();
        let lost = |source| match undecided {
            true => DepartAskError::Undecided { job: name.clone(), source },
            false => silent(source).into(),
        };
        match receive(&stream).map_err(lost)? {
            Reply::Progress(progress) => tell(&progress),
            Reply::Standing { image } => {
                let Some(arrives) = arrives.take() else {
                    return Err(lost(io::Error::from(io::ErrorKind::InvalidData)));
                };
                let verdict = match arrives(&image) {
                    Ok(moved) => Verdict::Leave(moved),
                    Err(error) => {
                        why = Some(error);
                        Verdict::Stay
                    }
                };
                let told = send(&stream, &verdict);
                told.map_err(|source| match why {
                    Some(_) => silent(source).into(),
                    None => DepartAskError::Undecided { job: name.clone(), source },
                })?;
            }
            Reply::Departed => return Ok(()),
            Reply::Failed { kind, message } => {
                return Err(match why {
                    Some(why) => DepartAskError::NotArrived(why),
                    None => refused(kind, message).into(),
                });
            }
            _ => return Err(lost(io::Error::from(io::ErrorKind::InvalidData))),
        }
    }
}

/// Asks the job `name` whether it answers, without waiting for that: whatever comes on the stream,
/// its end too, is an answer.
///
/// # Errors
/// Nobody listens there.
pub fn hail(jobs: &Jobs, name: &JobName) -> io::Result<UnixStream> {
    ask(&jobs.control_path(name), Ask::Life)
}

fn runs(jobs: &Jobs, name: &JobName) -> bool {
    let goes_on = [State::Running, State::Unsupervised];
    jobs.find(name).is_some_and(|meta| goes_on.contains(&meta.state))
}

/// Where the running job `name` answers.
fn reach(jobs: &Jobs, name: &JobName) -> Result<PathBuf, AskError> {
    match find(jobs, name) {
        None => return Err(AskError::Unknown(name.clone())),
        Some(meta) if meta.state == State::Unsupervised => {
            // A restarted job's init answers without it.
            let control = jobs.control_path(name);
            let answers = kedge_socket::address::connect(&control).is_ok();
            return answers.then_some(control).ok_or_else(|| AskError::Unsupervised(name.clone()));
        }
        Some(meta) if meta.state != State::Running => return Err(AskError::Ended(name.clone())),
        Some(_) => {}
    }
    let control = jobs.control_path(name);
    wait_for(&control);
    Ok(control)
}

/// The job `name`. One that is being started has its name before it says anything of itself.
fn find(jobs: &Jobs, name: &JobName) -> Option<Meta> {
    let begin = Instant::now();
    loop {
        match jobs.find(name) {
            None if jobs.begins(name) && begin.elapsed() < BEGINNING => {
                std::thread::sleep(Duration::from_millis(10));
            }
            found => return found,
        }
    }
}

/// A job that has just been started or restarted answers in a moment: a socket that is there may
/// be another's before it, or not be listened on as yet.
fn wait_for(control: &Path) {
    let begin = Instant::now();
    let not_yet = |error: io::Error| {
        matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
    };
    while kedge_socket::address::connect(control).is_err_and(not_yet) && begin.elapsed() < BEGINNING
    {
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[derive(Debug, Error)]
pub(crate) enum TakeError {
    #[error("it does not answer: {0}")]
    Silent(#[from] io::Error),
    /// In the job's own words.
    #[error("{message}")]
    Failed { busy: bool, message: String },
}

/// Asks on the socket `control` for a checkpoint.
pub(crate) fn take(
    control: &Path,
    wanted: &Order,
    until: Until,
    sending: &Sending,
    mut tell: impl FnMut(&Progress),
) -> Result<(), TakeError> {
    let stream = order(control, Ask::Checkpoint(wanted.clone()), sending)?;
    loop {
        match receive(&stream)? {
            Reply::Progress(progress) => {
                tell(&progress);
                let captured = matches!(progress, Progress::Captured { .. });
                let durable = matches!(progress, Progress::Durable { .. });
                if durable || captured && until == Until::Captured {
                    return Ok(());
                }
            }
            Reply::Failed { kind, message } => {
                return Err(TakeError::Failed { busy: kind == FailureKind::Busy, message });
            }
            Reply::Settled
            | Reply::Swapped { .. }
            | Reply::Measured { .. }
            | Reply::Moving(_)
            | Reply::Standing { .. }
            | Reply::Departed
            | Reply::Life(_)
            | Reply::Launch(_) => {
                return Err(io::Error::from(io::ErrorKind::InvalidData).into());
            }
        }
    }
}

/// Returns when no checkpoint of the job is under way, nobody answers any more, or at `deadline`.
pub(crate) fn settle(control: &Path, deadline: Option<Instant>) {
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    if left.is_some_and(|left| left.is_zero()) {
        return;
    }
    if let Ok(stream) = ask(control, Ask::Settle)
        && stream.set_read_timeout(left).is_ok()
    {
        let _ = receive::<Reply>(&stream);
    }
}

fn ask(control: &Path, ask: Ask) -> io::Result<UnixStream> {
    let stream = kedge_socket::address::connect(control)?;
    put(&stream, ask)?;
    Ok(stream)
}

/// As [`ask`], and has `sending` tell that it was sent.
fn order(control: &Path, ask: Ask, sending: &Sending) -> io::Result<UnixStream> {
    let stream = kedge_socket::address::connect(control)?;
    sending.send(|| put(&stream, ask))?;
    Ok(stream)
}

fn put(stream: &UnixStream, ask: Ask) -> io::Result<()> {
    send(stream, &Request { version: VERSION, ask })
}
