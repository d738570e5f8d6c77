//! A cached folder of a test's own, and its daemon.

use crate::world::{World, is_root, stderr};
use kedge_left_out::left_out;
use rustix::fs::{Mode, OFlags};
use serde_json::Value;
use std::cell::Cell;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder that a daemon caches until the end.
#[derive(Debug)]
pub struct Cached {
    pub world: World,
    /// The folder, as programs have it.
    pub under: PathBuf,
    below: OwnedFd,
    options: Vec<String>,
    /// What a daemon is to fail at: `KEDGE_CACHE_FAULT`.
    pub fault: Option<String>,
    /// A folder that tells of the memory of software devices which processes share.
    pub ledger: Option<PathBuf>,
    /// Whose network the daemon has, and the folder of its keys.
    pub network: Option<(u32, PathBuf)>,
    mounted: bool,
    /// The daemon: a held one may not answer.
    pid: Cell<u64>,
}

impl Cached {
    /// Makes the folder; nothing runs yet. `None` where this machine has no mounts for tests.
    pub fn new(name: &str, options: &[&str]) -> Option<Cached> {
        Cached::on(name, None, options)
    }

    /// The same, with a file system of `size` below, such as `16M`.
    pub fn on(name: &str, size: Option<&str>, options: &[&str]) -> Option<Cached> {
        if !is_root() || !Path::new("/dev/fuse").exists() {
            left_out("a cached folder", "it takes root and /dev/fuse");
            return None;
        }
        let world = World::new(name);
        let under = world.0.join("scratch");
        fs::create_dir(&under).expect("a folder");
        if let Some(size) = size {
            let mut mount = Command::new("mount");
            mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "below"]).arg(&under);
            assert!(mount.status().expect("mount").success());
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let below = rustix::fs::open(&under, flags, Mode::empty()).expect("the folder");
        let options = options.iter().map(|&option| option.to_owned()).collect();
        let mounted = size.is_some();
        let (fault, ledger, network, pid) = (None, None, None, Cell::new(0));
        Some(Cached { world, under, below, options, fault, ledger, network, mounted, pid })
    }

    /// Notes that another file system was mounted over the folder, before a daemon runs: it is the
    /// one below from now on.
    pub fn mounted_below(&mut self) {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        self.below = rustix::fs::open(&self.under, flags, Mode::empty()).expect("the folder");
        self.mounted = true;
    }

    /// Makes the folder, and has a daemon cache it.
    pub fn start(name: &str, options: &[&str]) -> Option<Cached> {
        let cached = Cached::new(name, options)?;
        cached.begin();
        Some(cached)
    }

    fn command(&self, what: &str) -> Command {
        let mut command = self.world.kedge(&["cache", what, "--under"]);
        command.arg(&self.under).current_dir(&self.world.0);
        command
    }

    /// Has a daemon cache the folder.
    pub fn begin(&self) {
        let output = self.try_begin();
        assert!(output.status.success(), "{}", stderr(&output));
        self.pid.set(self.count("pid"));
    }

    /// The same, and what it said. Unless a test asks for it, close does not drain, so that the
    /// cache holds something.
    pub fn try_begin(&self) -> Output {
        let mut command = self.command("start");
        if let Some((process, keys)) = &self.network {
            command = inside(*process, &command);
            command.env("XDG_CONFIG_HOME", keys);
        }
        command.args(&self.options);
        if !self.options.iter().any(|option| option == "--close") {
            command.args(["--close", "memory"]);
        }
        if let Some(fault) = &self.fault {
            command.env("KEDGE_CACHE_FAULT", fault);
        }
        if let Some(ledger) = &self.ledger {
            command.env("KEDGE_SOFT_LEDGER", ledger);
        }
        command.output().expect("kedge")
    }

    pub fn output(&self, what: &str) -> Output {
        self.command(what).arg("--json").output().expect("kedge")
    }

    fn json(&self, what: &str) -> Value {
        let output = self.output(what);
        assert!(output.status.success(), "{what}: {}", stderr(&output));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    pub fn status(&self) -> Value {
        self.json("status")
    }

    /// A number of the status.
    pub fn count(&self, name: &str) -> u64 {
        self.status()[name].as_u64().expect("a number")
    }

    pub fn drain(&self) {
        self.json("drain");
    }

    pub fn stop(&self) {
        self.json("stop");
    }

    pub fn recover(&self) -> Value {
        self.json("recover")
    }

    /// Kills the daemon, as a crash would.
    pub fn kill(&self) {
        let pid = rustix::process::Pid::from_raw(self.pid.get() as i32);
        self.signal_kill();
        // It answers nobody at once, and has its locks until a sync that it is in has ended.
        crate::world::wait_for("the daemon is still there", || {
            pid.is_none_or(|pid| rustix::process::test_kill_process(pid).is_err())
        });
    }

    /// Tells the daemon to end, and waits until it has.
    pub fn terminate(&self) {
        let Some(pid) = rustix::process::Pid::from_raw(self.pid.replace(0) as i32) else { return };
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it runs");
        crate::world::wait_for("the daemon is still there", || {
            rustix::process::test_kill_process(pid).is_err()
        });
    }

    fn signal_kill(&self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.pid.replace(0) as i32) {
            // It may have ended.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }

    /// The folder below, whatever is mounted over it.
    pub fn below(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.below.as_raw_fd()))
    }

    /// Runs a shell's command in the folder, which must succeed.
    pub fn sh(&self, command: &str) -> String {
        let mut shell = Command::new("sh");
        let output = shell.args(["-euc", command]).current_dir(&self.under).output().expect("sh");
        assert!(output.status.success(), "{command}: {}", stderr(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

/// Returns a command in the network of a process.
fn inside(process: u32, command: &Command) -> Command {
    let mut inner = Command::new("nsenter");
    inner.args(["-n", "-t", &process.to_string(), "--"]);
    inner.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => inner.env(name, value),
            None => inner.env_remove(name),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        inner.current_dir(folder);
    }
    inner
}

impl Drop for Cached {
    fn drop(&mut self) {
        // A test that fails may leave a daemon that is held, and files that are open.
        let well = !std::thread::panicking() && self.output("stop").status.success();
        if !well {
            self.signal_kill();
            std::thread::sleep(std::time::Duration::from_millis(200));
            self.output("recover");
        }
        if self.mounted {
            let _ = Command::new("umount").arg("-l").arg(&self.under).status();
        }
    }
}
