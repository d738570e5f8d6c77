//! Runs a C program twice around a save: `PROGRAM make SCENARIO FOLDER` makes descriptors and says
//! "ready"; it is stopped, saved and killed. `PROGRAM check SCENARIO FOLDER ROLE` gets what was
//! saved under the old numbers, once for each process, and says "well" if that is as it should be.
#![allow(dead_code, reason = "each test file uses a part of it")]

use kedge_process::plugins::{
    Argument, InjectedCall, PathMap, RecreateOptions, Recreated, Saved, Survey, SurveyOptions,
    release_ports,
};
use rustix::fd::{AsFd, OwnedFd};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(20);

/// A folder of this test's own, removed with everything in it.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new() -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("kedge-plugins-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The scenarios of one test at a time: the ports of one that was killed are anybody's until it has
/// them again, and what is being saved is open in a program that another test starts, for a moment.
type Alone = Rc<MutexGuard<'static, ()>>;

fn alone() -> Alone {
    static ALONE: Mutex<()> = Mutex::new(());
    thread_local! {
        static MINE: RefCell<Weak<MutexGuard<'static, ()>>> = const { RefCell::new(Weak::new()) };
    }
    MINE.with_borrow_mut(|mine| {
        mine.upgrade().unwrap_or_else(|| {
            let taken = Rc::new(ALONE.lock().unwrap_or_else(PoisonError::into_inner));
            *mine = Rc::downgrade(&taken);
            taken
        })
    })
}

/// A scenario, from its start to what it finds again.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) folder: Folder,
    program: PathBuf,
    /// The job's processes, the first one first.
    pub(crate) pids: Vec<i32>,
    child: Option<Child>,
    /// The job's standard output, as the supervisor has it.
    stdout: Option<OwnedFd>,
    output: BufReader<File>,
    /// Until the others have gone.
    _alone: Alone,
}

impl Scenario {
    /// Starts `source`'s scenario `name`, and waits until it is ready. It says the ids of its other
    /// processes.
    pub(crate) fn start(source: &str, name: &'static str) -> Scenario {
        Scenario::start_under(&[], source, name)
    }

    /// The same under another program, which starts it and waits for it.
    pub(crate) fn start_under(wrapper: &[&str], source: &str, name: &'static str) -> Scenario {
        let _alone = alone();
        let folder = Folder::new();
        let program = build(source, &folder);
        fs::create_dir(folder.0.join("work")).unwrap();
        fs::create_dir(folder.0.join("image")).unwrap();
        let (output, stdout) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let mut words = wrapper.iter().map(PathBuf::from).chain([program.clone()]);
        let mut command = Command::new(words.next().unwrap());
        command.args(words).args(["make", name]).arg(folder.0.join("work")).stdin(Stdio::null());
        let child = command.stdout(stdout.try_clone().unwrap()).spawn().unwrap();
        let mut line = String::new();
        let mut output = BufReader::new(File::from(output));
        output.read_line(&mut line).unwrap();
        let others = line.trim().strip_prefix("ready").expect(&line).split_whitespace();
        let mut pids = vec![child.id() as i32];
        pids.extend(others.map(|pid| pid.parse::<i32>().unwrap()));
        let (child, stdout) = (Some(child), Some(stdout));
        Scenario { name, folder, program, pids, child, stdout, output, _alone }
    }

    pub(crate) fn options(&self) -> SurveyOptions<'_> {
        let streams = [None, self.stdout.as_ref().map(AsFd::as_fd), Some(rustix::stdio::stderr())];
        SurveyOptions { streams, ..SurveyOptions::default() }
    }

    pub(crate) fn work(&self) -> PathBuf {
        self.folder.0.join("work")
    }

    pub(crate) fn image(&self) -> PathBuf {
        self.folder.0.join("image")
    }

    /// Surveys it while it runs, stops it, saves it, and reads back what was saved.
    pub(crate) fn save(&self) -> Saved {
        let survey = Survey::of(&self.pids, &self.options()).unwrap();
        self.stop();
        let saved = survey.save(&self.image()).unwrap();
        let bytes = saved.to_bytes().unwrap();
        let read = Saved::from_bytes(&bytes).unwrap();
        assert_eq!(read, saved);
        read
    }

    /// Why it cannot be saved.
    pub(crate) fn refused(&self) -> String {
        let survey = Survey::of(&self.pids, &self.options()).unwrap();
        self.stop();
        survey.save(&self.image()).unwrap_err().to_string()
    }

    pub(crate) fn stop(&self) {
        self.signal(libc::SIGSTOP);
        self.pids.iter().for_each(|pid| wait_for_state(*pid, 'T'));
    }

    pub(crate) fn signal(&self, signal: i32) {
        for pid in &self.pids {
            // SAFETY: kill takes no pointers; the processes are those that this test has started.
            unsafe { libc::kill(*pid, signal) };
        }
    }

    /// Ends it as a job is ended that has been saved.
    pub(crate) fn kill(&mut self) {
        self.pids.iter().for_each(|pid| release_ports(*pid));
        self.signal(libc::SIGKILL);
        if let Some(mut child) = self.child.take() {
            child.wait().unwrap();
        }
        // Grandchildren are reaped by whoever reaps orphans.
        let begin = Instant::now();
        while self.pids.iter().any(|pid| is_alive(*pid)) {
            assert!(begin.elapsed() < TIMEOUT, "they do not end");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Makes the descriptors again, and lets the program check them.
    pub(crate) fn check(&self, saved: &Saved, paths: PathMap) -> Recreated {
        let (output, stdout) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let streams = [None, Some(stdout.as_fd()), Some(rustix::stdio::stderr())];
        let folder = self.image();
        let options = RecreateOptions { folder, paths, streams, ..RecreateOptions::default() };
        let mut made = saved.recreate(&options).unwrap();
        made.settle().unwrap();
        made.change_files().unwrap();
        // The first process comes last: it may know the others, whose ids are new here.
        let mut ids = BTreeMap::new();
        let mut children = Vec::new();
        for role in (0..self.pids.len()).rev() {
            let child = self.again(role, &made, &ids);
            ids.insert(self.pids[role], child.id() as i32);
            children.push(child);
        }
        drop(stdout);
        // They hold copies of what is bound to the standard output.
        made.descriptors.clear();
        let said = read_all(output);
        for mut child in children {
            assert!(child.wait().unwrap().success(), "{}: {said}", self.name);
        }
        assert_eq!(said, "well\n".repeat(self.pids.len()), "{}", self.name);
        made
    }

    fn again(&self, role: usize, made: &Recreated, ids: &BTreeMap<i32, i32>) -> Child {
        let pid = self.pids[role];
        let mut calls = made.place(pid);
        calls.extend(made.calls.iter().filter(|call| call.pid == pid).cloned());
        // The engine gives them their old ids.
        for call in calls.iter_mut().filter(|call| call.number == libc::SYS_pidfd_open) {
            if let Argument::Number(target) = &mut call.arguments[0] {
                *target = ids[&(*target as i32)] as u64;
            }
        }
        let own = format!("/proc/{pid}/").into_bytes();
        for argument in calls.iter_mut().flat_map(|call| &mut call.arguments) {
            if let Argument::Bytes(path) = argument
                && let Some(rest) = path.strip_prefix(&own[..])
            {
                *path = [b"/proc/self/", rest].concat();
            }
        }
        let mut command = Command::new(&self.program);
        command.args(["check", self.name]).arg(self.work()).arg(role.to_string());
        // SAFETY: the closure makes system calls and allocates, which glibc allows after fork().
        unsafe { command.pre_exec(move || perform(&calls, pid)) };
        command.spawn().unwrap()
    }

    /// Lets what was saved go on, and check for itself that nothing has happened to it.
    pub(crate) fn goes_on(mut self) {
        self.stdout = None;
        self.signal(libc::SIGCONT);
        self.signal(libc::SIGUSR1);
        let mut said = String::new();
        self.output.read_to_string(&mut said).unwrap();
        assert_eq!(said, "well\n");
        assert!(self.child.take().unwrap().wait().unwrap().success());
    }

    /// A connection that nobody has accepted yet is refused by name, and goes on undisturbed.
    pub(crate) fn refused_unaccepted(source: &str, name: &'static str) {
        let scenario = Scenario::start(source, name);
        let refusals = Survey::of(&scenario.pids, &scenario.options()).unwrap_err();
        assert!(refusals[0].to_string().contains("descriptor 10:"), "{}", refusals[0]);
        assert!(refusals[0].remedy.contains("not accepted yet"), "{}", refusals[0]);
        scenario.goes_on();
    }

    /// The same while the job stands still, where nobody accepts it and nobody may wait for that.
    pub(crate) fn refused_at_once(source: &str, name: &'static str) {
        let scenario = Scenario::start(source, name);
        scenario.stop();
        let options = SurveyOptions { still: true, ..scenario.options() };
        // A busy machine may take its time once.
        let times = (0..5).map(|_| {
            let begin = Instant::now();
            let refusals = Survey::of(&scenario.pids, &options).unwrap_err();
            assert!(refusals[0].remedy.contains("not accepted yet"), "{}", refusals[0]);
            begin.elapsed()
        });
        let fastest = times.min().unwrap();
        assert!(fastest < Duration::from_millis(150), "{fastest:?}");
        scenario.goes_on();
    }

    /// The whole way.
    pub(crate) fn round_trip(source: &str, name: &'static str) {
        let mut scenario = Scenario::start(source, name);
        let saved = scenario.save();
        scenario.kill();
        scenario.check(&saved, PathMap::default());
    }
}

impl Drop for Scenario {
    fn drop(&mut self) {
        if self.child.is_some() {
            self.signal(libc::SIGKILL);
            let _ = self.child.take().map(|mut child| child.wait());
        }
    }
}

fn is_alive(pid: i32) -> bool {
    state(pid).is_some_and(|state| state != 'Z')
}

fn state(pid: i32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

pub(crate) fn wait_for_state(pid: i32, wanted: char) {
    let begin = Instant::now();
    while state(pid) != Some(wanted) {
        assert!(begin.elapsed() < TIMEOUT, "process {pid} is {:?}", state(pid));
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn read_all(output: OwnedFd) -> String {
    let mut said = String::new();
    File::from(output).read_to_string(&mut said).unwrap();
    said
}

fn build(source: &str, folder: &Folder) -> PathBuf {
    let program = folder.0.join("program");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source);
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-pthread", "-D_GNU_SOURCE", "-Wall", "-o"]).arg(&program).arg(source);
    assert!(cc.status().expect("cc").success());
    program
}

/// What the engine does in a stopped process: the calls, in order. The engine gives it its old id,
/// `old`, too.
fn perform(calls: &[InjectedCall], old: i32) -> std::io::Result<()> {
    const F_SETOWN_EX: u64 = 15;
    let own = i32::try_from(std::process::id()).unwrap();
    // And its session.
    let _ = rustix::process::setsid();
    let mut results: Vec<i64> = Vec::new();
    for call in calls {
        let mut arguments = [0u64; 6];
        for (argument, value) in arguments.iter_mut().zip(&call.arguments) {
            *argument = match value {
                Argument::Number(number) => *number,
                Argument::Bytes(bytes) => bytes.as_ptr() as u64,
                Argument::Earlier(back) => results[results.len() - back] as u64,
            };
        }
        let names_itself = matches!(
            (call.number, arguments[1]),
            (libc::SYS_fcntl, F_SETOWN_EX) | (libc::SYS_ioctl, libc::TIOCSPGRP)
        );
        let mut owner;
        if let (true, Some(Argument::Bytes(bytes))) = (names_itself, call.arguments.get(2)) {
            owner = bytes.clone();
            let id = owner.len() - 4;
            if owner[id..] == old.to_ne_bytes() {
                owner[id..].copy_from_slice(&own.to_ne_bytes());
            }
            arguments[2] = owner.as_ptr() as u64;
        }
        let [a, b, c, d, e, f] = arguments;
        // SAFETY: the plugins' own calls, on this fresh process.
        let result = unsafe { libc::syscall(call.number, a, b, c, d, e, f) };
        if result == -1 {
            let error = std::io::Error::last_os_error();
            eprintln!("cannot {}: {error}", call.what);
            return Err(error);
        }
        results.push(result);
    }
    Ok(())
}

/// Runs this file's other tests again as an ordinary user, if this one is root.
pub(crate) fn as_an_ordinary_user() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let folder = Folder::new();
    fs::set_permissions(&folder.0, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    // The build's folder may be private to root.
    let copy = folder.0.join("tests");
    let _alone = alone();
    fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]).arg(&copy);
    command.env("TMPDIR", &folder.0).env("XDG_STATE_HOME", folder.0.join("state"));
    command.env(kedge_left_out::BY_ROOT_TOO, "1");
    let status = command.current_dir(&folder.0).status().unwrap();
    assert!(status.success(), "as an ordinary user");
}
