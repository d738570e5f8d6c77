//! A job with devices that goes back to an image, or is brought back, in a place of its own: for
//! the tests of lost proxies.

use crate::job::{User, children, family, is_proxy, kedge_as, limit_of, name, send};
use crate::world::{World, is_root, stderr};
use crate::{copy_program, host};
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output};
use std::time::{Duration, Instant};

/// Of the program that the tests run.
pub const STEPS: u64 = 600;
pub const BETWEEN: &str = "10";

#[derive(Debug)]
pub struct Place {
    pub world: World,
    pub user: User,
    pub program: PathBuf,
    /// Steps that its jobs make: [`STEPS`], unless a test wants fewer.
    pub steps: u64,
}

impl Place {
    pub fn new(name: &str, user: User) -> Option<Place> {
        Place::of("gpu_steps", name, user)
    }

    /// With another program of `tests/hosts` that prints as gpu_steps does.
    pub fn of(program: &str, name: &str, user: User) -> Option<Place> {
        let world = World::new(name);
        if user == User::Nobody {
            if !is_root() {
                println!("not root: every other test is this one");
                return None;
            }
            world.give_home_away();
        }
        world.parts();
        let built = host(&format!("{program}.cu"), program, &[]);
        let program = world.0.join("bin").join(program);
        copy_program(&built, &program);
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("mine");
        Some(Place { world, user, program, steps: STEPS })
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

    pub fn start(&self, options: &[&str]) -> Job {
        Job::start(self.run(options))
    }

    pub fn run(&self, options: &[&str]) -> Command {
        let program = self.program.display().to_string();
        let steps = self.steps.to_string();
        // A process may have one slab of its own, one of another that has ended, and memory by
        // descriptor.
        let run = [&["run", "--gpu", "soft", "--soft-memory", "128M", "--job", "j"], options];
        self.kedge(&[&run.concat()[..], &["--", &program, &steps, BETWEEN]].concat())
    }

    pub fn restart(&self, image: &Path, options: &[&str]) -> Command {
        let image = image.display().to_string();
        self.kedge(&[&["restart", &image], options].concat())
    }

    pub fn checkpoint(&self) -> PathBuf {
        let output = self.output(&["checkpoint", "j"]);
        assert!(output.status.success(), "{}; {}", stderr(&output), self.log());
        PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())
    }

    pub fn log(&self) -> String {
        String::from_utf8_lossy(&self.output(&["logs", "j"]).stdout).into_owned()
    }

    /// The image is whole, and nothing of a job runs.
    pub fn is_good(&self, image: &Path) {
        let output = self.output(&["verify", &image.display().to_string()]);
        assert!(output.status.success(), "{output:?}");
    }

    /// Restarts the image and reads it to its end.
    pub fn goes_on(&self, image: &Path, nonce: &str) {
        let mut job = Job::spawn(self.restart(image, &[]), nonce);
        job.read_to(self.steps);
        assert_eq!(job.end().code(), Some(7), "{}", self.log());
    }

    /// Kills a job and brings it back, for each of `rounds`, from the image of the round before:
    /// made after so many steps, and killed after so many more. Then it is read to the last of
    /// `steps`.
    pub fn comes_back_each_time(
        &self,
        mut job: Job,
        rounds: impl IntoIterator<Item = [u64; 2]>,
        options: &[&str],
        steps: u64,
    ) {
        let nonce = job.nonce.clone();
        for (round, [until, more]) in rounds.into_iter().enumerate() {
            job.read_to(job.step + until);
            let before = job.step;
            let image = self.checkpoint();
            job.read_to(job.step + more);
            job.kill();
            let printed = job.step;
            self.is_good(&image);
            job = Job::spawn(self.restart(&image, options), &nonce);
            job.read_to(1);
            assert!((before + 1..=printed + 1).contains(&job.step), "round {round}: {}", job.step);
        }
        job.read_to(steps);
        assert_eq!(job.end().code(), Some(7), "{}", self.log());
        self.nothing_runs();
    }

    /// Reads a job to its end; then nothing runs, and its newest image is good.
    pub fn ends_well(&self, mut job: Job) {
        job.read_to(self.steps);
        let nonce = job.nonce.clone();
        assert_eq!(job.end().code(), Some(7), "{}", self.log());
        self.nothing_runs();
        let images = self.world.home().join("kedge/images");
        self.is_good(&images);
        self.goes_on(&images, &nonce);
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

    /// The program's processes of `job`.
    pub fn clients(&self, job: &Job) -> Vec<u32> {
        let program = self.program.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        family(job.supervisor()).into_iter().filter(|pid| name(*pid) == program).collect()
    }

    /// All proxies, but those that are `spare`, and their clients die at once. The proxies are the
    /// first, for one whose client has ended ends by itself.
    pub fn kill_proxies_and_clients(&self, job: &Job, spare: &BTreeSet<u32>) {
        let proxies = self.proxies().into_iter().filter(|pid| !spare.contains(pid));
        send("KILL", &proxies.chain(self.clients(job)).collect::<Vec<_>>());
    }

    /// After `kill` the job goes back, and on for a while. It has taken steps by then that its
    /// image has not: else nothing would show that it has gone back.
    pub fn goes_back(&self, job: &mut Job, kill: impl FnOnce(&mut Job)) {
        job.catch_up();
        job.read_to(job.step + 2);
        self.goes_back_from_here(job, kill);
    }

    /// As [`Place::goes_back`], without a look at where the job is: `kill` comes at a time of its
    /// own.
    pub fn goes_back_from_here(&self, job: &mut Job, kill: impl FnOnce(&mut Job)) {
        let times = job.back.len() + 1;
        kill(job);
        while job.back.len() < times {
            job.read_to(job.step + 1);
            assert!(job.step < self.steps - 50, "it does not go back; {}", self.log());
        }
        job.read_to(job.step + 3);
    }
}

/// Looks again and again until `reached`; fails with `what` after 20 seconds.
pub fn wait_for(what: &str, mut reached: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !reached() {
        assert!(begin.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A job whose steps may begin again where an image was taken.
#[derive(Debug)]
pub struct Job {
    pub child: Child,
    pub lines: BufReader<ChildStdout>,
    pub nonce: String,
    pub step: u64,
    /// Steps that were printed after later ones: where the job went back to.
    pub back: Vec<u64>,
    /// What is neither the nonce nor a step.
    pub others: Vec<String>,
}

impl Job {
    pub fn start(command: Command) -> Job {
        let mut job = Job::spawn(command, "");
        let first = job.line().unwrap_or_else(|| job.fail("no first line"));
        match first.strip_prefix("nonce ") {
            Some(nonce) => job.nonce = nonce.to_owned(),
            None => job.fail(&format!("first line {first:?}")),
        }
        job
    }

    pub fn spawn(mut command: Command, nonce: &str) -> Job {
        let mut child = command.spawn().expect("timeout, from coreutils");
        let lines = BufReader::new(child.stdout.take().expect("a pipe"));
        let nonce = nonce.to_owned();
        Job { child, lines, nonce, step: 0, back: Vec::new(), others: Vec::new() }
    }

    pub fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let length = self.lines.read_line(&mut line).expect("a line of text");
        (length > 0).then(|| line.trim_end().to_owned())
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

    /// Reads until `until` has been printed: each step follows the one before, but where the job
    /// goes back.
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

    fn take(&mut self, line: &str) {
        let rest = line.strip_prefix(&self.nonce);
        let Some(step) = rest.and_then(|rest| rest.trim().parse().ok()) else {
            self.others.push(line.to_owned());
            return;
        };
        match step {
            _ if step == self.step + 1 => {}
            // The first one after a restart is that after the image's.
            _ if self.step == 0 || step <= self.step => self.back.push(step),
            _ => self.fail(&format!("step {step} follows {}", self.step)),
        }
        self.step = step;
    }

    /// Reads its last word: how it ended.
    pub fn end(mut self) -> ExitStatus {
        let last = self.line().unwrap_or_default();
        if last != format!("{} well", self.nonce) {
            self.fail(&format!("its last word is {last:?}"));
        }
        self.child.wait().expect("ended")
    }

    /// Reads whatever comes until its end.
    pub fn drain(&mut self) -> ExitStatus {
        while let Some(line) = self.line() {
            self.take(&line);
        }
        self.child.wait().expect("ended")
    }

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

    pub fn kill(&mut self) {
        send("KILL", &family(self.supervisor()));
        self.drain();
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            send("KILL", &family(self.child.id()));
            let _ = self.child.wait();
        }
    }
}

impl Place {
    /// An argument by which processes are known to be of this place.
    pub fn mark(&self) -> &str {
        self.world.0.to_str().unwrap_or_default()
    }
}
