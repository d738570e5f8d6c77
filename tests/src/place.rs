//! Jobs that are checkpointed and restarted through the `kedge` command.

use crate::job::{Job, User, build, is_proxy, kedge_as, name};
use crate::world::{World, is_root, stderr};
use crate::{copy_program, host};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// A folder for one test, and who runs kedge in it.
#[derive(Debug)]
pub struct Place {
    pub world: World,
    pub user: User,
}

impl Place {
    /// A new one; `None` where this user cannot become `user`.
    pub fn new(name: &str, user: User) -> Option<Place> {
        let world = World::new(name);
        if user == User::Nobody {
            if !is_root() {
                println!("not root: every other test is this one");
                return None;
            }
            world.give_home_away();
        }
        Some(Place { world, user })
    }

    pub fn mine(name: &str) -> Place {
        Place::new(name, User::Same).expect("the test's own user")
    }

    pub fn kedge(&self, arguments: &[&str]) -> Command {
        kedge_as(&self.world, self.user, arguments)
    }

    pub fn output(&self, arguments: &[&str]) -> Output {
        self.kedge(arguments).output().expect("kedge")
    }

    pub fn json(&self, arguments: &[&str]) -> Value {
        let output = self.output(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// kedge's failure in one line.
    pub fn failure(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        assert_eq!(output.status.code(), Some(125), "{arguments:?}: {output:?}");
        stderr(&output)
    }

    /// Runs `program` as the job `j`.
    pub fn run(&self, options: &[&str], program: &[&str]) -> Job {
        let run = [&["run", "--gpu", "none", "--job", "j"], options, &["--"], program].concat();
        Job::start(self.kedge(&run))
    }

    /// The program of the tests: steps, milliseconds between two, threads, megabytes.
    pub fn steps(&self, numbers: [u64; 4]) -> Job {
        self.steps_with(&[], numbers)
    }

    pub fn steps_with(&self, options: &[&str], numbers: [u64; 4]) -> Job {
        let program = build(&self.world, "steps", &[]).display().to_string();
        let numbers = numbers.map(|number| number.to_string());
        let words: Vec<&str> = numbers.iter().map(String::as_str).collect();
        self.run(options, &[&[program.as_str()], &words[..]].concat())
    }

    /// Runs a program of `tests/hosts` as the job `j` with a software device.
    pub fn with_device(&self, program: &str, options: &[&str], arguments: &[&str]) -> Job {
        self.on("soft", program, options, arguments)
    }

    /// The same with the devices that `gpu` names.
    pub fn on(&self, gpu: &str, program: &str, options: &[&str], arguments: &[&str]) -> Job {
        let built = host(&format!("{program}.cu"), program, &["-O1", "-arch=sm_80"]);
        // Where every user may read it.
        let copy = self.world.home().join(program);
        copy_program(&built, &copy);
        let copy = copy.display().to_string();
        let run = [&["run", "--gpu", gpu, "--job", "j"], options, &["--", &copy], arguments];
        Job::start_paced(self.kedge(&run.concat()))
    }

    pub fn restart(&self, image: &Path, nonce: &str) -> Job {
        self.restart_with(image, &[], nonce)
    }

    pub fn restart_with(&self, image: &Path, options: &[&str], nonce: &str) -> Job {
        let image = image.display().to_string();
        let arguments = [&["restart", &image], options].concat();
        Job::restart(self.kedge(&arguments), nonce)
    }

    pub fn images(&self) -> PathBuf {
        self.world.home().join("kedge/images")
    }

    /// Names and states, sorted.
    pub fn states(&self) -> Vec<(String, String)> {
        let rows = self.json(&["images", "--json"]);
        let text = |row: &Value, field: &str| row[field].as_str().expect("text").to_owned();
        let all = rows.as_array().expect("a list").iter();
        let name_of = |row| text(row, "image").rsplit('/').next().expect("a name").to_owned();
        let mut all: Vec<_> = all.map(|row| (name_of(row), text(row, "state"))).collect();
        all.sort();
        all
    }

    pub fn names(&self) -> Vec<String> {
        self.states().into_iter().map(|(name, _)| name).collect()
    }

    /// Waits until no image is being written.
    pub fn settle(&self) {
        let begin = Instant::now();
        while self.states().iter().any(|(_, state)| state == "writing") {
            assert!(begin.elapsed() < Duration::from_secs(20), "{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn log(&self) -> String {
        String::from_utf8_lossy(&self.output(&["logs", "j"]).stdout).into_owned()
    }

    /// Checkpoints the job `j`: the image.
    pub fn checkpoint(&self, options: &[&str]) -> PathBuf {
        let output = self.output(&[&["checkpoint", "j", "--json"], options].concat());
        assert!(output.status.success(), "{}; {}", stderr(&output), self.log());
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        PathBuf::from(report["image"].as_str().expect("a path"))
    }

    /// `job` is captured while it runs, killed, and goes on from the image to its end.
    pub fn survives(&self, mut job: Job, steps: u64) {
        job.read_to(steps / 5);
        let before = job.step;
        let image = self.checkpoint(&[]);
        job.read_to(job.step + 5);
        let nonce = job.nonce.clone();
        job.kill();
        let printed = job.step;
        drop(job);

        let job = self.restart(&image, &nonce);
        assert!((before + 1..=printed + 1).contains(&job.step), "went on at step {}", job.step);
        let status = job.finish(steps);
        assert_eq!(status.code(), Some(7), "it exits as the program does");
        assert!(self.json(&["ps", "--json"]).as_array().is_some_and(Vec::is_empty));
        self.is_good(&image);
    }

    /// The image is whole.
    pub fn is_good(&self, image: &Path) {
        let output = self.output(&["verify", &image.display().to_string()]);
        assert!(output.status.success(), "{output:?}");
    }

    pub fn nothing_runs(&self) {
        let begin = Instant::now();
        loop {
            let left = self.world.processes();
            if left.is_empty() {
                return;
            }
            assert!(begin.elapsed() < Duration::from_secs(5), "left behind: {left:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// How often the job's log says `what`.
    pub fn count(&self, what: &str) -> usize {
        self.log().matches(what).count()
    }

    /// Processes that run an executable of this place's: its proxies are among them, whoever has
    /// started them.
    pub fn running(&self) -> Vec<u32> {
        let all = fs::read_dir("/proc").expect("/proc").flatten();
        let all = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let ours = |pid: &u32| {
            fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe.starts_with(self.mark()))
        };
        all.filter(ours).collect()
    }

    /// Those of them with this name.
    pub fn running_as(&self, wanted: &str) -> Vec<u32> {
        self.running().into_iter().filter(|pid| name(*pid) == wanted).collect()
    }

    /// Those of them that have devices.
    pub fn proxies(&self) -> Vec<u32> {
        self.running().into_iter().filter(|pid| is_proxy(*pid)).collect()
    }

    /// An argument by which processes are known to be of this place.
    pub fn mark(&self) -> &str {
        self.world.0.to_str().unwrap_or_default()
    }
}
