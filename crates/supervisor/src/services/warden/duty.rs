//! The warden itself: a process beside a part's supervisor.

use super::noting::{Noting, noted};
use super::plan::{FENCE, Image, Next, Plan, Seen, Stage, Told, View, number_of, taker};
use super::reading::{self, Reading};
use super::touch::{Known, Touch, after_standstill, unheard};
use super::{Charge, Return, Together, WORD, life, since_boot};
use crate::base::ends::LAST;
use crate::base::told::tell;
use crate::job::jobs::{JobName, Jobs, Meta, State};
use crate::job::joint::{Joint, far, part_name};
use crate::job::left::Kin;
use crate::job::spec::RunError;
use kedge_control::gpu::GpuSpec;
use kedge_control::joblog::JobLog;
use kedge_control::{error, warn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Where the supervisor's line is handed over.
const LINE: RawFd = 3;
/// From one look to the next.
const TICK: Duration = Duration::from_millis(100);
/// How long a supervisor may take to end its part before the warden does that.
const OBEYS: Duration = Duration::from_secs(5);
/// How long one may be told of its part's end by others' lack of need for it.
const LINGERS: Duration = Duration::from_secs(3);
/// How long whoever has published a plan waits for the others to take it.
const TAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a part that has stopped waits for the coordinator.
const COORDINATOR_TIMEOUT: Duration = Duration::from_secs(60);
/// How long it waits for a plan.
const PLAN_TIMEOUT: Duration = Duration::from_secs(3600);

/// A part's warden. Returns what its process ends with.
///
/// # Errors
/// It cannot begin; then the supervisor does not either.
pub fn watch_over(charge: &str) -> Result<u8, RunError> {
    let failed = |source| RunError::System { what: "watch over a part of a job", source };
    close_rest();
    let charge: Charge = serde_json::from_str(charge).map_err(|error| failed(error.into()))?;
    let mut duty = Duty::begin(charge)?;
    loop {
        if let Some(status) = duty.tick() {
            return Ok(status);
        }
    }
}

struct Duty {
    charge: Charge,
    number: u32,
    joint: Joint,
    folder: PathBuf,
    log: JobLog,
    /// The supervisor, for as long as it lives.
    supervisor: Option<OwnedFd>,
    line: BufReader<UnixStream>,
    piece: String,
    touch: Touch,
    /// What the part's folder said last: it may be removed.
    meta: Arc<Mutex<Option<Meta>>>,
    /// The supervisor's children.
    kin: Kin,
    /// Set once nothing of the part runs any more.
    stopped: Arc<AtomicBool>,
    /// Set once the supervisor says so.
    obeyed: Arc<AtomicBool>,
    reading: Option<Reading>,
    /// Of other parts, in the place of others.
    read: BTreeSet<(PathBuf, String)>,
    /// Since when it is in its stage.
    since: Duration,
    /// When it looked last whether the part may run, and told the supervisor so.
    looked: Duration,
    said: Duration,
    /// The plan is this one's own.
    conducts: bool,
    /// The part has ended for the job's want of a way back, and no other one needs it.
    given_up: bool,
}

impl Duty {
    fn begin(charge: Charge) -> Result<Duty, RunError> {
        let failed = |what| move |source: io::Error| RunError::System { what, source };
        let jobs = Jobs::open()?;
        let (job, part): (JobName, JobName) = (charge.job.parse()?, charge.part.parse()?);
        let number = charge.part.rsplit_once('.').and_then(|(_, number)| number.parse().ok());
        let at = charge.at.as_ref().map(|at| far(at, None)).transpose();
        let bad = |error| failed("reach the job's parts")(io::Error::other(error));
        let joint = Joint::of(&jobs, &job, part.clone(), at.map_err(bad)?)?;
        let supervisor = hold(charge.supervisor, charge.since);
        let supervisor = supervisor.map_err(failed("find the supervisor"))?;
        let line = take_line().map_err(failed("take the line to the supervisor"))?;
        let folder = charge.folder.clone();
        let log = JobLog::open(&folder.join("log"), format!("warden[{}]", std::process::id()));
        let own = Told {
            times: charge.times,
            life: life(),
            beat: 0,
            stage: Stage::Runs,
            why: String::new(),
            images: Vec::new(),
            good: Vec::new(),
            bad: Vec::new(),
        };
        let now = since_boot();
        let number = number.unwrap_or_default();
        // Whom a user restarts by hand may come whenever he likes.
        let expected = if charge.times > 0 { charge.parts.unwrap_or_default() } else { 0 };
        let parts = unheard(0..expected);
        let (limit, times) = (charge.limit, charge.times);
        let view = View { own: number, now, since: now, limit, times, parts };
        let (proposal, plan, replaced) = (None, None, false);
        let (error, is_new) = (String::new(), charge.parts.is_none());
        let known = Known { own, view, reached: now, proposal, plan, replaced, error, is_new };
        let touch = Touch::new(known);
        touch.keep(joint.clone()).map_err(failed("start a thread"))?;
        let meta = Arc::default();
        let (noting, image) =
            (Noting { folder: folder.clone(), touch: touch.clone() }, charge.image.clone());
        noting.keep(Arc::clone(&meta), image).map_err(failed("start a thread"))?;
        let _ = writeln!(line.get_ref(), "pid {}", std::process::id());
        Ok(Duty {
            charge,
            number,
            joint,
            folder,
            log: log.unwrap_or_else(|_| JobLog::none()),
            supervisor: Some(supervisor),
            line,
            piece: String::new(),
            touch,
            meta,
            kin: Kin::default(),
            stopped: Arc::default(),
            obeyed: Arc::default(),
            reading: None,
            read: BTreeSet::new(),
            since: now,
            looked: now,
            said: now,
            conducts: false,
            given_up: false,
        })
    }

    fn stage(&self) -> Stage {
        self.touch.known().own.stage.clone()
    }

    fn enter(&mut self, stage: Stage, why: &str) {
        let mut known = self.touch.known();
        known.own.stage = stage;
        why.clone_into(&mut known.own.why);
        self.since = since_boot();
    }

    /// One look at everything: what the process ends with, if it does.
    fn tick(&mut self) -> Option<u8> {
        self.wait();
        let lives = self.supervisor_lives();
        for line in self.lines() {
            self.heard(&line);
        }
        match self.stage() {
            Stage::Runs => {
                self.run(lives);
                None
            }
            Stage::Stops => {
                if self.stopped.load(Ordering::SeqCst) {
                    self.rest();
                }
                None
            }
            Stage::Stopped => self.agree(),
            Stage::Goes => self.go(),
            Stage::Ended => self.leave(),
        }
    }

    /// Until something is to be heard, or for a moment.
    fn wait(&self) {
        let moment = Timespec::try_from(TICK).ok();
        let mut fds = Vec::new();
        // Either is ready for ever once it is gone.
        if let Some(supervisor) = &self.supervisor {
            fds.push(PollFd::new(supervisor, PollFlags::IN));
            fds.push(PollFd::new(self.line.get_ref(), PollFlags::IN));
        }
        let _ = poll(&mut fds, moment.as_ref());
        if self.stage() != Stage::Runs {
            thread::sleep(TICK / 10);
        }
    }

    fn supervisor_lives(&mut self) -> bool {
        let Some(supervisor) = &self.supervisor else { return false };
        let mut fds = [PollFd::new(supervisor, PollFlags::IN)];
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut fds, Some(&none)).is_ok_and(|ready| ready > 0) {
            self.supervisor = None;
        }
        self.supervisor.is_some()
    }

    /// What the supervisor has said since.
    fn lines(&mut self) -> Vec<String> {
        let mut all = Vec::new();
        while let Ok(1..) = self.line.read_line(&mut self.piece) {
            if self.piece.ends_with('\n') {
                all.push(std::mem::take(&mut self.piece).trim_end().to_owned());
            }
        }
        all
    }

    fn heard(&mut self, line: &str) {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match (word, self.stage()) {
            // Also while it follows a plan: its user may end it then.
            ("ended", _) => {
                self.touch.known().own.images = self.images();
                // It is ending, too.
                self.obeyed.store(true, Ordering::SeqCst);
                self.enter(Stage::Ended, rest);
                let_go_of_streams();
            }
            ("lost", Stage::Runs) => self.stop(rest),
            ("stopped", _) => self.obeyed.store(true, Ordering::SeqCst),
            _ => {}
        }
    }

    fn say(&self, what: &str) {
        // All at once: a supervisor that does not listen gets no half of a word.
        let line = format!("{}\n", what.replace('\n', " "));
        let _ = self.line.get_ref().write_all(line.as_bytes());
    }

    fn run(&mut self, lives: bool) {
        if lives {
            self.kin.note(self.charge.supervisor);
        }
        let now = since_boot();
        let mut known = self.touch.known();
        if self.charge.at.is_none() {
            known.reached = after_standstill(known.reached, self.looked, now);
        }
        self.looked = now;
        let silent = now.saturating_sub(known.reached);
        let (replaced, alarm) = (known.replaced, known.view.alarm());
        let error = known.error.clone();
        drop(known);
        let job = &self.joint.job;
        if !lives {
            self.stop("its supervisor was killed");
        } else if replaced {
            self.stop("another warden has taken the part over");
        } else if silent > FENCE {
            let silent = silent.as_secs();
            let why = format!("it has had no word from the coordinator for {silent} s");
            self.stop(&format!("{why} ({error})"));
        } else if let Some((number, why)) = alarm {
            self.stop(&format!("{job}.{number} is lost: {why}"));
        } else if now.saturating_sub(self.said) >= WORD {
            self.said = now;
            self.say("runs");
        }
    }

    /// Has the part's processes ended, by the supervisor if it does that, by force if not.
    fn stop(&mut self, why: &str) {
        self.enter(Stage::Stops, why);
        self.say("stop");
        let supervisor = self.supervisor.as_ref().and_then(|held| held.try_clone().ok());
        let meta = self.meta.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let folder = self.folder.clone();
        let (kin, obeyed, stopped) = (self.kin.clone(), self.obeyed.clone(), self.stopped.clone());
        let (pid, since) = (self.charge.supervisor, self.charge.since);
        let end = move || {
            let begin = since_boot();
            let mut kin = kin;
            while let Some(supervisor) = &supervisor
                && !obeyed.load(Ordering::SeqCst)
                && kedge_process::running_since(pid) == Some(since)
            {
                kin.note(pid);
                let waited = since_boot().saturating_sub(begin);
                if waited > OBEYS {
                    // It may be stopped itself, or have much to write.
                    kin.end();
                    meta.iter().for_each(|meta| meta.left(&folder).signal(libc::SIGKILL));
                }
                if waited > LAST + OBEYS {
                    let _ = pidfd_send_signal(supervisor, Signal::KILL);
                }
                thread::sleep(TICK / 10);
            }
            if !obeyed.load(Ordering::SeqCst) {
                // However long it takes: what may run is not told to have stopped.
                while !kin.end() {}
                while !meta.as_ref().is_none_or(|meta| meta.left(&folder).end(Duration::ZERO)) {}
            }
            stopped.store(true, Ordering::SeqCst);
        };
        if thread::Builder::new().name("end".into()).spawn(end).is_err() {
            // The supervisor does it when this process has ended.
            std::process::exit(1);
        }
        // Last: the folder's file system may be what is cut off.
        warn!(self.log, "the part is stopped: {why}");
    }

    /// Nothing of the part runs any more.
    fn rest(&mut self) {
        self.touch.known().own.images = self.images();
        let why = self.touch.known().own.why.clone();
        self.enter(Stage::Stopped, &why);
    }

    /// The images that the part can come back from, as far as it has noted them.
    fn images(&self) -> Vec<Image> {
        let mut parts = noted(&self.folder);
        parts.extend(self.charge.image.clone());
        reading::known(&parts)
    }

    /// Agrees with the others on what becomes of the job.
    fn agree(&mut self) -> Option<u8> {
        self.read_on();
        let now = since_boot();
        if self.reading.is_some() {
            // However long that takes.
            self.since = now;
        }
        let known = self.touch.known();
        if let Some(later) = known.view.later() {
            drop(known);
            self.catch_up(later);
            return None;
        }
        let (silent, waited) = (now.saturating_sub(known.reached), now.saturating_sub(self.since));
        if known.replaced {
            drop(known);
            return self.give_up("it has come back elsewhere");
        }
        if let Some(plan) = known.plan.clone() {
            drop(known);
            return self.follow(plan);
        }
        if silent > COORDINATOR_TIMEOUT {
            drop(known);
            return self.give_up("the coordinator of its parts cannot be reached");
        }
        if waited > PLAN_TIMEOUT {
            drop(known);
            return self.give_up("its parts have not agreed on an image");
        }
        // Of the moment at which the others were last heard.
        let view = known.view.clone();
        drop(known);
        self.propose(&view);
        None
    }

    /// Reads what all are to read.
    fn read_on(&mut self) {
        let done = self.reading.as_ref().and_then(Reading::result);
        if let Some(result) = done
            && let Some(reading) = self.reading.take()
        {
            self.has_read(reading, result);
        }
        let known = self.touch.known();
        let Some(target) = known.view.target() else { return };
        let own = &known.own;
        let is_read = own.good.iter().any(|image| image.folder == target.folder)
            || own.bad.iter().any(|(folder, _)| *folder == target.folder);
        if self.reading.is_some() || is_read {
            return;
        }
        let noted = own.images.iter().find(|image| image.folder == target.folder).cloned();
        drop(known);
        let part = noted
            .map_or_else(|| reading::own_part(&target.folder, self.number), |image| image.part);
        self.reading = Some(Reading::begin(Image { part, ..target }));
    }

    fn has_read(&mut self, reading: Reading, result: Result<(), String>) {
        let Image { folder, .. } = reading.image.clone();
        let mut known = self.touch.known();
        match result {
            Err(why) => {
                let line = format!("{} is of no use: {why}", folder.display());
                known.own.good.retain(|image| image.folder != folder);
                known.own.bad.push((folder, why));
                drop(known);
                warn!(self.log, "{line}");
            }
            Ok(()) if reading.others.is_empty() => known.own.good.push(reading.image),
            Ok(()) => {
                let read = reading.others.into_iter().map(|part| (folder.clone(), part));
                self.read.extend(read);
            }
        }
    }

    /// Others have come back without this part, and have stopped again: it is one of them once
    /// more.
    fn catch_up(&mut self, times: u32) {
        let mut known = self.touch.known();
        known.own.times = times;
        known.view.times = times;
        (known.plan, known.proposal) = (None, None);
        let now = since_boot();
        let earlier = |told: &Told| told.times < times;
        for seen in known.view.parts.values_mut() {
            if seen.told.as_ref().is_some_and(earlier) {
                *seen = Seen { told: None, heard: now, joined: false };
            }
        }
    }

    fn propose(&mut self, view: &View) {
        match view.next(reading::parts, &self.read) {
            Next::Wait => {}
            Next::Verify { folder, parts } => {
                if self.reading.is_none() {
                    self.reading = Some(Reading::for_others(folder, parts));
                }
            }
            Next::Publish(plan) => {
                self.conducts = true;
                self.touch.known().proposal = Some(plan);
            }
        }
    }

    /// Does what all do.
    fn follow(&mut self, plan: Plan) -> Option<u8> {
        let (folder, by, lost) = match plan {
            Plan::GivenUp { why } => return self.give_up(&why),
            Plan::Go { folder, by, lost } => (folder, by, lost),
        };
        let is_good = self.touch.known().own.good.iter().any(|image| image.folder == folder);
        if !is_good {
            return self.give_up("the others go back to an image that it has not read");
        }
        let names = reading::parts(&folder);
        if !names.iter().any(|name| taker(&by, name) == Some(self.number)) {
            return self.give_up(&format!("it is in no part of {}", folder.display()));
        }
        let why = match lost.is_empty() {
            true => self.touch.known().own.why.clone(),
            false => format!("lost were {}", lost.join(", ")),
        };
        self.enter(Stage::Goes, &why);
        None
    }

    /// Brings back what the plan says, once the others know of it.
    fn go(&mut self) -> Option<u8> {
        let known = self.touch.known();
        let waits = |(number, seen): (&u32, &Seen)| {
            let told = seen.told.as_ref();
            *number != self.number && told.is_some_and(|told| told.stage == Stage::Stopped)
        };
        let published = known.view.parts.get(&self.number).and_then(|seen| seen.told.as_ref());
        let is_told = published.is_some_and(|told| told.stage == Stage::Goes);
        let all_know = is_told && (!self.conducts || !known.view.parts.iter().any(waits));
        let Some(Plan::Go { folder, by, lost }) = known.plan.clone() else { return Some(1) };
        let (times, why) = (known.own.times.saturating_add(1), known.own.why.clone());
        drop(known);
        if !all_know && since_boot().saturating_sub(self.since) < TAKE_TIMEOUT {
            return None;
        }
        let names = reading::parts(&folder);
        let is_mine = |name: &String| taker(&by, name) == Some(self.number);
        let mine = names.iter().enumerate().filter(|(_, name)| is_mine(name));
        let parts: Vec<u32> = mine.filter_map(|(index, _)| u32::try_from(index).ok()).collect();
        // None would mean all.
        if parts.is_empty() {
            return self.give_up(&format!("{} is gone", folder.display()));
        }
        self.clear(&lost);
        let on = self.devices().zip(self.place_in(&folder, &names));
        let on = on.map(|(gpu, number)| (number, gpu)).filter(|(number, _)| parts.contains(number));
        let Charge { job, at, dir, limit, again, .. } = &self.charge;
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let why = format!("{why}: back to {name}, for time {times} of {limit} at most");
        warn!(self.log, "{why}");
        let series = format!("way back {times} to {name}");
        let (job, at, dir, again) = (job.clone(), at.clone(), dir.clone(), again.clone());
        let note = Return { job, at, series, parts, times, dir, why, again, on };
        let together = Together { image: folder, note };
        if self.supervisor_lives() {
            self.say(&format!("back {}", serde_json::to_string(&together).unwrap_or_default()));
            return Some(0);
        }
        // In the place of the supervisor.
        let mut command = together.command();
        command.args(self.charge.quiet.then_some("--quiet"));
        let error = command.exec();
        tell(&format!("{}: cannot start kedge again: {error}", self.charge.part));
        Some(1)
    }

    /// The devices that the part was on last, if any.
    fn devices(&self) -> Option<String> {
        let meta = self.meta.lock().unwrap_or_else(PoisonError::into_inner);
        let gpu = meta.as_ref().map(|meta| meta.gpu.clone());
        gpu.filter(|gpu| gpu.parse::<GpuSpec>().is_ok())
    }

    /// The number in the image of this warden's own part; `names` are those of the image's parts.
    fn place_in(&self, folder: &Path, names: &[String]) -> Option<u32> {
        let known = self.touch.known();
        let own = known.own.good.iter().find(|image| image.folder == folder)?;
        let index = names.iter().position(|name| *name == own.part)?;
        u32::try_from(index).ok()
    }

    /// Ends what runs on this host of parts that are lost with their wardens.
    fn clear(&self, lost: &[String]) {
        let Ok(jobs) = Jobs::open() else { return };
        for number in lost.iter().filter_map(|part| number_of(part)) {
            let Ok(name) = part_name(&self.joint.job, number) else { continue };
            if let Some(meta) = jobs.find(&name)
                && meta.state == State::Unsupervised
                && meta.joint.as_deref() == Some(&*self.charge.job)
                && !meta.left(&jobs.folder(&name)).end(Duration::ZERO)
            {
                error!(self.log, "processes of {name} do not end");
            }
        }
    }

    fn give_up(&mut self, why: &str) -> Option<u8> {
        let (job, part) = (&self.charge.job, &self.charge.part);
        let why = format!("{part} does not come back: {why}");
        warn!(self.log, "{why}");
        self.say(&format!("end {why}"));
        if self.supervisor.is_none() {
            tell(&format!("{job}: {why}"));
        }
        self.given_up = true;
        self.enter(Stage::Ended, &why);
        let_go_of_streams();
        None
    }

    /// Leaves once no other part needs what it knows.
    fn leave(&mut self) -> Option<u8> {
        let known = self.touch.known();
        let view = View { now: since_boot(), ..known.view.clone() };
        drop(known);
        if !self.given_up && !view.is_over() {
            self.since = since_boot();
        }
        (since_boot().saturating_sub(self.since) > LINGERS).then_some(0)
    }
}

/// A descriptor of the process with that id and start.
fn hold(pid: i32, since: u64) -> io::Result<OwnedFd> {
    let id = Pid::from_raw(pid).ok_or(ErrorKind::NotFound)?;
    let held = pidfd_open(id, PidfdFlags::empty())?;
    match kedge_process::running_since(pid) == Some(since) {
        true => Ok(held),
        false => Err(ErrorKind::NotFound.into()),
    }
}

/// Closes what a user has had the supervisor inherit: its readers are to find its end.
fn close_rest() {
    // SAFETY: a plain call in a process that has opened nothing as yet: nobody has those
    // descriptors.
    unsafe { libc::close_range(LINE as u32 + 1, u32::MAX, 0) };
}

fn take_line() -> io::Result<BufReader<UnixStream>> {
    let link = fs::read_link(format!("/proc/self/fd/{LINE}"))?;
    if !link.to_string_lossy().starts_with("socket:") {
        return Err(ErrorKind::InvalidInput.into());
    }
    // SAFETY: it is open, above the standard ones, and handed to this process under that number,
    // before anything here was opened.
    let line = unsafe { OwnedFd::from_raw_fd(LINE) };
    rustix::io::fcntl_setfd(&line, rustix::io::FdFlags::CLOEXEC)?;
    let line = UnixStream::from(line);
    line.set_nonblocking(true)?;
    Ok(BufReader::new(line))
}

/// Whoever reads what the program writes is to find its end.
fn let_go_of_streams() {
    let Ok(null) = File::options().read(true).write(true).open("/dev/null") else { return };
    let _ = rustix::stdio::dup2_stdin(null.as_fd());
    let _ = rustix::stdio::dup2_stdout(null.as_fd());
    let _ = rustix::stdio::dup2_stderr(null.as_fd());
}
