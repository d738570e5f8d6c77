//! A job that prints a nonce and its steps: started, checkpointed, killed and restarted by the
//! tests.

use crate::run::waits;
use crate::world::World;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Seconds after which what has hung is ended: 60, or what KEDGE_PATIENCE says, for long runs.
pub(crate) fn patience() -> u64 {
    std::env::var("KEDGE_PATIENCE").ok().and_then(|said| said.parse().ok()).unwrap_or(60)
}

/// Closes what the tests themselves were started with, then runs its arguments.
const CLOSED: &str = r#"
for fd in /proc/$$/fd/*; do
    fd=${fd##*/}
    case $fd in 0|1|2|255) ;; *) eval "exec $fd>&-" ;; esac
done
exec "$@""#;

/// Who runs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum User {
    Same,
    /// One without any rights: only root can become it.
    Nobody,
    /// A second one.
    Other,
}

impl User {
    pub fn id(self) -> u32 {
        match self {
            User::Same => rustix::process::geteuid().as_raw(),
            User::Nobody => 65534,
            User::Other => 65533,
        }
    }
}

/// Tells whether the time limit of [`kedge_as`] has ended a job, which says nothing of it itself.
pub(crate) fn limit_of(child: &mut Child) -> String {
    /// What `timeout` exits with then, a moment after the job's output has ended.
    const OVER: i32 = 124;
    let begin = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(None) if begin.elapsed() < Duration::from_secs(1) => {
                std::thread::sleep(Duration::from_millis(10));
            }
            waited => break waited.ok().flatten(),
        }
    };
    match status.and_then(|status| status.code()) {
        Some(OVER) => format!(": its time limit of {} s (KEDGE_PATIENCE) was over", patience()),
        _ => String::new(),
    }
}

/// kedge, run by `user` with nothing open but the standard streams.
pub fn kedge_as(world: &World, user: User, arguments: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    let patience = patience().to_string();
    // In the foreground: its own process group would be another than the terminal's.
    command.args([
        "--foreground",
        "--kill-after=5",
        &*patience,
        "env",
        "--default-signal=HUP,INT,QUIT",
    ]);
    if user != User::Same {
        let id = user.id().to_string();
        command.args(["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups"]);
    }
    command.args(["bash", "-c", CLOSED, "bash"]).arg(world.parts()).args(arguments);
    command.env("XDG_RUNTIME_DIR", world.home()).env("XDG_STATE_HOME", world.home());
    command.env("HOME", world.home()).env("KEDGE_CONFIG", "").current_dir(world.home());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// No job of lines of a nonce and a step gets so many steps further than it was read.
pub const AHEAD: u64 = 400;

/// Has `command` write into a pipe that takes some lines (16, as a rule) and then waits for its
/// reader: on a loaded machine, too, a job is not much further than its test.
pub fn paced(command: &mut Command) -> ChildStdout {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    // In packets: each line takes a place of its own, however short it is.
    let flags = rustix::fs::fcntl_getfl(&writer).expect("its flags");
    rustix::fs::fcntl_setfl(&writer, flags | rustix::fs::OFlags::DIRECT).expect("packets");
    command.stdout(writer);
    ChildStdout::from(OwnedFd::from(reader))
}

/// Has a pipe take one page: however long a test takes, the program waits for it.
fn small(output: &ChildStdout) {
    rustix::pipe::fcntl_setpipe_size(output, 4096).expect("a small pipe");
}

/// A job that prints a nonce and its steps, read line by line.
#[derive(Debug)]
pub struct Job {
    pub child: Child,
    lines: BufReader<ChildStdout>,
    pub nonce: String,
    /// The last step that was printed.
    pub step: u64,
    /// Whether its steps may begin again where an image was taken; else that fails the test.
    goes_back: bool,
    /// Steps that were printed after later ones: where the job went back to.
    pub back: Vec<u64>,
    /// What is neither the nonce nor a step, of one that may go back.
    pub others: Vec<String>,
}

impl Job {
    /// Starts `command`, whose first line tells the nonce.
    pub fn start(mut command: Command) -> Job {
        let (child, output) = started(&mut command);
        small(&output);
        Job::of(child, BufReader::with_capacity(128, output)).begun()
    }

    /// As [`Job::start`]; it waits for its reader, see [`paced`].
    pub fn start_paced(command: Command) -> Job {
        Job::spawn_paced(command, |_| {}).begun()
    }

    /// As [`Job::start`], of a job whose steps may begin again where an image was taken, and which
    /// waits for its reader as any program does.
    pub fn start_recovering(command: Command) -> Job {
        Job::spawn_recovering(command, "").begun()
    }

    /// Starts one that goes on, as one that had drawn `nonce`, or draws it yet: nothing is read.
    pub fn spawn_recovering(mut command: Command, nonce: &str) -> Job {
        let (child, output) = started(&mut command);
        let mut job = Job::of(child, BufReader::new(output));
        (job.goes_back, job.nonce) = (true, nonce.to_owned());
        job
    }

    /// Restarts a job that had drawn `nonce`, and reads its first step. It waits for its reader, as
    /// far as it did before: the pipe's flags come back as well.
    pub fn restart(command: Command, nonce: &str) -> Job {
        let mut job = Job::spawn_paced(command, small);
        nonce.clone_into(&mut job.nonce);
        let first = job.line().unwrap_or_else(|| job.fail("no first line"));
        job.step = job.number(&first).unwrap_or_else(|| job.fail_of(&first));
        job
    }

    fn of(child: Child, lines: BufReader<ChildStdout>) -> Job {
        let (nonce, back, others) = (String::new(), Vec::new(), Vec::new());
        Job { child, lines, nonce, step: 0, goes_back: false, back, others }
    }

    fn spawn_paced(mut command: Command, sized: impl Fn(&ChildStdout)) -> Job {
        let output = paced(&mut command);
        sized(&output);
        let child = command.spawn().expect("timeout, from coreutils");
        // The pipe ends with the job.
        drop(command);
        // A line at once, or its rest is lost; and little of what is no packet.
        Job::of(child, BufReader::with_capacity(512, output))
    }

    fn begun(mut self) -> Job {
        let first = self.line().unwrap_or_else(|| self.fail("no first line"));
        match first.strip_prefix("nonce ") {
            Some(nonce) => self.nonce = nonce.to_owned(),
            None => self.fail(&format!("first line {first:?}")),
        }
        self
    }

    pub fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let length = self.lines.read_line(&mut line).expect("a line of text");
        (length > 0).then(|| line.trim_end().to_owned())
    }

    fn number(&self, line: &str) -> Option<u64> {
        line.strip_prefix(&self.nonce).and_then(|rest| rest.trim().parse().ok())
    }

    fn take(&mut self, line: &str) {
        let Some(step) = self.number(line) else {
            return match self.goes_back {
                true => self.others.push(line.to_owned()),
                false => self.fail_of(line),
            };
        };
        match step {
            _ if step == self.step + 1 => {}
            // The first one after a restart is that after the image's.
            _ if self.goes_back && (self.step == 0 || step <= self.step) => self.back.push(step),
            _ => self.fail(&format!("step {step} follows {}", self.step)),
        }
        self.step = step;
    }

    fn fail_of(&mut self, line: &str) -> ! {
        self.fail(&format!("{line:?} is no step of {}", self.nonce))
    }

    pub fn fail(&mut self, what: &str) -> ! {
        let limit = limit_of(&mut self.child);
        send("KILL", &family(self.child.id()));
        let mut said = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = stderr.read_to_string(&mut said);
        }
        let Job { step, back, others, .. } = self;
        panic!("{what}{limit}; at step {step}, back {back:?}, {others:?}; {said}");
    }

    /// Reads until step `until` has been printed; each follows the one before, but where a job that
    /// may go back does so.
    pub fn read_to(&mut self, until: u64) {
        while self.step < until {
            let line = self.line().unwrap_or_else(|| self.fail("it ended early"));
            self.take(&line);
        }
    }

    /// Reads what it has printed until now.
    pub fn catch_up(&mut self) {
        let left = |lines: &BufReader<ChildStdout>| {
            let in_pipe = rustix::io::ioctl_fionread(lines.get_ref()).expect("a pipe");
            !lines.buffer().is_empty() || in_pipe > 0
        };
        while left(&self.lines) {
            match self.line() {
                Some(line) => self.take(&line),
                None => return,
            }
        }
    }

    /// Reads whatever comes until its end: how it ended. The last line of one that was killed may
    /// be a part of one.
    pub fn drain(&mut self) -> ExitStatus {
        while let Some(line) = self.line() {
            match self.goes_back {
                true => self.take(&line),
                false => {
                    let step = line.rsplit(' ').next().and_then(|step| step.parse().ok());
                    self.step = step.unwrap_or(self.step);
                }
            }
        }
        self.wait()
    }

    /// Reads to its end, `steps`, and its last word: how it ended.
    pub fn finish(mut self, steps: u64) -> ExitStatus {
        self.read_to(steps);
        self.end()
    }

    /// Reads its last word: how it ended.
    pub fn end(mut self) -> ExitStatus {
        let last = self.line().unwrap_or_default();
        if last != format!("{} well", self.nonce) {
            self.fail(&format!("its last word is {last:?}"));
        }
        self.wait()
    }

    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().expect("ended")
    }

    /// The job's supervisor: the only child of `timeout`.
    pub fn supervisor(&self) -> u32 {
        children(self.child.id()).first().copied().unwrap_or(self.child.id())
    }

    pub fn proxies(&self) -> Vec<u32> {
        family(self.child.id()).into_iter().filter(|pid| is_proxy(*pid)).collect()
    }

    pub fn kill_the_proxy(&mut self) {
        let proxies = self.proxies();
        if proxies.len() != 1 {
            self.fail(&format!("{} proxies", proxies.len()));
        }
        send("KILL", &proxies);
    }

    /// Sends a signal to the supervisor.
    pub fn signal(&self, signal: &str) {
        send(signal, &[self.supervisor()]);
    }

    /// Sends a signal to the process group that it leads, as a terminal's keys do.
    pub fn signal_group(&self, signal: &str) {
        let group = format!("-{}", self.child.id());
        let _ = Command::new("kill").args(["-s", signal, "--", &group]).status();
    }

    /// kedge and every process of the job, killed at once and seen dead. One that goes back may be
    /// down to its supervisor.
    pub fn kill(&mut self) {
        let one = self.goes_back || family(self.supervisor()).len() > 1;
        assert!(one, "no job to kill");
        self.stop();
    }

    /// As [`Job::kill`], of one that may have come to its end by itself.
    pub fn stop(&mut self) {
        let all = family(self.supervisor());
        send("KILL", &all);
        let _ = self.child.wait();
        if let Some(pid) = alive_after_all(&all) {
            panic!("process {pid} lives 10 s after it was killed: {}", waits(pid));
        }
        self.drain();
    }
}

/// Starts a command, and takes its output.
fn started(command: &mut Command) -> (Child, ChildStdout) {
    let mut child = command.spawn().expect("timeout, from coreutils");
    let output = child.stdout.take().expect("a pipe");
    (child, output)
}

/// One of those that have been killed and live nevertheless.
fn alive_after_all(killed: &[u32]) -> Option<u32> {
    let begin = Instant::now();
    loop {
        let lives = killed.iter().copied().find(|pid| is_alive(*pid));
        if lives.is_none() || begin.elapsed() > Duration::from_secs(10) {
            return lives;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            let all = family(self.child.id());
            send("KILL", &all);
            let _ = self.child.wait();
            // What follows may be a job of the same name.
            alive_after_all(&all);
        }
    }
}

/// How long a process that is killed or stopped may take to end or to stand still.
const REACHES: Duration = Duration::from_secs(2);

/// Sends a signal to processes of the test's own; those that are killed have ended afterwards, and
/// those that are stopped stand still.
pub fn send(signal: &str, pids: &[u32]) {
    let signal: Signal = format!("SIG{signal}").parse().expect("a signal");
    for pid in pids {
        // It may have ended.
        let _ = kill(Pid::from_raw(*pid as i32), signal);
    }
    // One that is dying still has its connections for a moment, and one that stops still runs.
    let reached = |pid: &u32| match signal {
        Signal::SIGKILL => !is_alive(*pid),
        Signal::SIGSTOP => state(*pid).is_none_or(|state| matches!(state, 'T' | 't' | 'Z' | 'X')),
        _ => true,
    };
    let begin = Instant::now();
    while begin.elapsed() < REACHES && !pids.iter().all(reached) {
        std::thread::sleep(Duration::from_micros(200));
    }
}

pub fn children(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let all: Vec<String> = lists.collect();
    all.iter().flat_map(|list| list.split_whitespace()).filter_map(|id| id.parse().ok()).collect()
}

/// The lines of the file `out.PART` in `home`, into which that part of a job writes its steps.
pub fn steps_in(home: &Path, part: usize) -> Vec<String> {
    let text = fs::read_to_string(home.join(format!("out.{part}")));
    text.unwrap_or_default().lines().map(str::to_owned).collect()
}

/// Until that part has written so many lines.
pub fn wait_for_steps(home: &Path, part: usize, lines: usize) {
    const TIMEOUT: Duration = Duration::from_secs(40);
    let begin = Instant::now();
    while steps_in(home, part).len() < lines {
        assert!(begin.elapsed() < TIMEOUT, "part {part}: {:?}", steps_in(home, part).last());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What a part has written is what an undisturbed run of so many steps writes.
pub fn is_right(home: &Path, part: usize, steps: u64) {
    let lines = steps_in(home, part);
    let nonce = lines[0].strip_prefix("nonce ").expect("a nonce").to_owned();
    let numbers = (1..=steps).map(|step| format!("{nonce} {step}"));
    let all = std::iter::once(lines[0].clone()).chain(numbers).chain([format!("{nonce} well")]);
    assert_eq!(lines, all.collect::<Vec<_>>(), "part {part}");
}

/// Programs whose limit is the file `go` in `home` may do so many steps.
pub fn allow(home: &Path, steps: u64) {
    let file = fs::OpenOptions::new().create(true).append(true).open(home.join("go"));
    file.and_then(|file| file.set_len(steps)).expect("a file of that length");
}

/// Those that have `file` for their standard output.
pub fn writers_of(file: &Path) -> Vec<u32> {
    let writes = |pid: &u32| fs::read_link(format!("/proc/{pid}/fd/1")).is_ok_and(|to| to == file);
    processes().filter(writes).collect()
}

/// Kills every process whose working folder is `home` or in it: what has lost its supervisor, too.
pub fn kill_all_in(home: &Path) {
    let cwd = |pid: &u32| fs::read_link(format!("/proc/{pid}/cwd"));
    let here = |pid: &u32| cwd(pid).is_ok_and(|cwd| cwd.starts_with(home));
    let pids: Vec<u32> = processes().filter(here).collect();
    if !pids.is_empty() {
        send("KILL", &pids);
    }
}

fn processes() -> impl Iterator<Item = u32> {
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
}

/// A process's name, as `ps` shows it.
pub fn name(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim().to_owned()
}

/// Whether it is a proxy that has devices: what answers for NVIDIA's management library, and what
/// describes the machine, is the same program, and is named as a proxy until it has begun.
pub fn is_proxy(pid: u32) -> bool {
    if name(pid) != "kedge-proxy" {
        return false;
    }
    // One that has ended has no words.
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut words = line.split(|byte| *byte == 0);
    !line.is_empty() && !words.any(|word| [&b"--management"[..], b"--describe"].contains(&word))
}

/// `pid` and all that descend from it.
pub fn family(pid: u32) -> Vec<u32> {
    let mut all = BTreeSet::new();
    let mut next = vec![pid];
    while let Some(pid) = next.pop() {
        if all.insert(pid) {
            next.extend(children(pid));
        }
    }
    all.into_iter().collect()
}

/// Whether it runs: one that has ended may be still to be collected.
pub fn is_alive(pid: u32) -> bool {
    state(pid).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Whether a signal has stopped it.
pub fn is_stopped(pid: u32) -> bool {
    state(pid) == Some('T')
}

/// Its state, as /proc tells it: R, S, T, Z.
pub(crate) fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(')').next()?.trim().chars().next()
}

/// Builds `tests/hosts/NAME.c` for this world.
pub fn build(world: &World, name: &str, flags: &[&str]) -> PathBuf {
    let program = world.home().join(name);
    let source = crate::root().join("tests/hosts").join(name).with_extension("c");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-pthread", "-D_GNU_SOURCE"]).args(flags);
    let built = compiler.arg("-o").arg(&program).arg(source).status();
    assert!(built.expect("cc").success());
    program
}
