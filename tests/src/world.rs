//! What the tests of the `kedge` command share: a world of its own for each.

use crate::{copy_program, job, kedge};
use serde_json::Value;
use std::collections::BTreeSet;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// A private folder for jobs, gone at the end.
#[derive(Debug)]
pub struct World(pub PathBuf, #[expect(dead_code, reason = "it ends with the folder")] Limit);

/// Kills what works in a test's folder, if the test takes far too long: processes that have lost
/// their kedge hold the pipes that it reads, and it would wait for them as long as they live.
#[derive(Debug)]
pub struct Limit {
    /// Its end is the watch's.
    _ended: mpsc::Sender<()>,
}

impl Limit {
    fn new(dir: PathBuf, limit: Duration) -> Limit {
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            while receiver.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{}: over {limit:?}: what works there is killed", dir.display());
                job::kill_all_in(&dir);
            }
        });
        Limit { _ended: sender }
    }
}

/// Where the jobs of this host lie if the state folder is this one.
pub fn jobs_in(state: &Path) -> PathBuf {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    state.join("kedge/hosts").join(host).join("jobs")
}

impl World {
    /// Makes a world; of several that have one name at a time, each has a folder of its own.
    pub fn new(name: &str) -> World {
        // Short, because socket paths are.
        let first = format!("/tmp/kcli-{name}-{}", std::process::id());
        let others = (2..).map(|number| format!("{first}-{number}"));
        let mut all = std::iter::once(first.clone()).chain(others).map(PathBuf::from);
        let dir = all.find(|dir| in_use().insert(dir.clone())).expect("one is free");
        // An earlier process of this number may have left one.
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(dir.join("run")).expect("a folder under /tmp");
        // A test runs kedge some times.
        let limit = Duration::from_secs(10 * job::patience());
        World(dir.clone(), Limit::new(dir, limit))
    }

    pub fn runtime(&self) -> PathBuf {
        self.0.join("run")
    }

    pub fn caches(&self) -> PathBuf {
        self.0.join("caches")
    }

    pub fn job(&self, name: &str) -> PathBuf {
        jobs_in(&self.runtime()).join(name)
    }

    pub fn kedge(&self, arguments: &[&str]) -> Command {
        // A runner in the background or under nohup ignores signals, and children inherit that.
        let mut command = Command::new("env");
        command.arg("--default-signal=HUP,INT,QUIT").arg(kedge());
        command.args(arguments).env_remove("NO_COLOR");
        command.env("XDG_RUNTIME_DIR", self.runtime()).env("XDG_STATE_HOME", self.runtime());
        command.env("XDG_CACHE_HOME", self.caches());
        // What the user has set is none of a test's.
        command.env("KEDGE_CONFIG", "");
        command
    }

    pub fn output(&self, arguments: &[&str]) -> Output {
        self.kedge(arguments).output().expect("kedge: build it first (cargo build --release)")
    }

    /// What kedge printed, where it is done without a complaint.
    pub fn text(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    pub fn json(&self, arguments: &[&str]) -> Vec<Value> {
        match serde_json::from_str(&self.text(arguments)) {
            Ok(Value::Array(list)) => list,
            other => panic!("{arguments:?}: not a JSON list: {other:?}"),
        }
    }

    /// Processes that work for this world's jobs.
    pub fn processes(&self) -> Vec<String> {
        let mark = self.0.display().to_string();
        let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
        let lines = entries.filter_map(|e| std::fs::read(e.path().join("cmdline")).ok());
        lines
            .map(|l| String::from_utf8_lossy(&l).into_owned())
            .filter(|l| l.contains(&mark))
            .collect()
    }

    /// Copies of kedge's parts that any user can run: its command.
    pub fn parts(&self) -> PathBuf {
        let bin = self.0.join("bin");
        if !bin.join("kedge").exists() {
            std::fs::create_dir_all(&bin).expect("a folder");
            for part in ["kedge-proxy", "libkedge_cuda.so", "libkedge_nvml.so", "kedge"] {
                let (from, to) = (kedge().with_file_name(part), bin.join(part));
                if std::fs::hard_link(&from, &to).is_err() {
                    copy_program(&from, &to);
                }
            }
        }
        bin.join("kedge")
    }

    /// A private folder for the user who runs the jobs.
    pub fn home(&self) -> PathBuf {
        let home = self.0.join("home");
        if !home.exists() {
            std::fs::create_dir_all(&home).expect("a folder");
            let private = std::fs::Permissions::from_mode(0o700);
            std::fs::set_permissions(&home, private).expect("mine");
        }
        home
    }

    /// Gives it, empty as it is, to the user without rights; root can still use it.
    pub fn give_home_away(&self) {
        std::os::unix::fs::chown(self.home(), Some(65534), Some(65534)).expect("root");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
        in_use().remove(&self.0);
    }
}

/// The folders of this process's worlds.
fn in_use() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    static IN_USE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    IN_USE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// kedge's own failure: 125 and one line, which is given back.
pub fn failure(output: &Output) -> String {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(125), "{said}");
    assert!(said.starts_with("kedge: ") && said.lines().count() == 1, "{said}");
    said
}

pub fn has_fields(objects: &[Value], fields: &[&str]) {
    assert!(!objects.is_empty());
    for object in objects {
        for field in fields {
            assert!(object.get(field).is_some(), "no {field} in {object}");
        }
    }
}

pub fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0)
}

/// Looks again and again until `reached`; fails with `what` after 20 seconds.
pub fn wait_for(what: &str, mut reached: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !reached() {
        assert!(begin.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_works_in_a_world_for_too_long_is_killed() {
        let world = World::new("limit");
        let mut sleep = Command::new("sleep");
        sleep.arg("1000").current_dir(world.home());
        let _limit = Limit::new(world.0.clone(), Duration::from_millis(50));
        assert!(!sleep.output().expect("sleep").status.success());
    }
}
