//! A job that holds memory, as the figures need it: told what to do by its standard input,
//! checkpointed, killed and restarted by the command that people use.

use kedge_control::gpu::GpuSpec;
use kedge_probe::Held;
use kedge_supervisor::control::{self, Moving};
use kedge_supervisor::jobs::{JobName, Jobs};
use kedge_supervisor::{kedge_again, warm};
use serde::Deserialize;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// A driver may have to start.
const READY: Duration = Duration::from_secs(30);

/// What `kedge checkpoint --json` tells.
#[derive(Debug, Deserialize)]
pub struct Taken {
    pub image: PathBuf,
    pub stall_seconds: f64,
    pub(crate) seconds: Option<f64>,
}

/// A job of the `kedge` command, ended with this.
#[derive(Debug)]
pub struct Job {
    child: Child,
    /// `None` once its end has been told.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    name: String,
}

impl Job {
    /// One that holds `size` bytes and whose images go to `dir`.
    pub(crate) fn start(size: u64, dir: &Path, options: &[&str]) -> Result<Job, String> {
        let name = format!("kedge-bench-{}", std::process::id());
        let mut command = kedge_again();
        command.args(["run", "--gpu", "none", "--job", &name, "--ckpt-dir"]).arg(dir);
        command.args(options).arg("--").arg(kedge_again().get_program());
        command.args(["probe", "memory", &size.to_string()]);
        let mut job = Job::spawn(command, name)?;
        if job.line()? == "ready" { Ok(job) } else { Err("its job did not start".into()) }
    }

    /// One of so many processes, with so many threads and bytes each, whose images go to `dir`.
    pub(crate) fn many(numbers: &[u64; 3], dir: &Path) -> Result<Job, String> {
        let name = format!("kedge-bench-{}", std::process::id());
        let mut command = kedge_again();
        command.args(["run", "--gpu", "none", "--job", &name, "--ckpt-dir"]).arg(dir);
        command.arg("--").arg(kedge_again().get_program()).args(["probe", "many"]);
        command.args(numbers.map(|number| number.to_string()));
        Job::ready(command, name)
    }

    /// One that holds device memory, launches and synchronises; `tag` tells it from others.
    pub(crate) fn beating(
        gpu: &GpuSpec,
        held: &Held,
        dir: &Path,
        tag: &str,
        options: &[&str],
    ) -> Result<Job, String> {
        let name = format!("kedge-bench-{}-{tag}", std::process::id());
        let mut command = kedge_again();
        command.args(["run", "--gpu", &gpu.to_string(), "--job", &name, "--ckpt-dir"]).arg(dir);
        command.args(options).arg("--").arg(kedge_again().get_program());
        Job::beat(command, held, name)
    }

    /// One that does what `bench far` orders.
    pub(crate) fn far(gpu: &GpuSpec, tag: &str) -> Result<Job, String> {
        Job::far_with(gpu, tag, &[])
    }

    /// The same, with more options.
    pub(crate) fn far_with(gpu: &GpuSpec, tag: &str, options: &[&str]) -> Result<Job, String> {
        Job::obeying(gpu, "far", tag, options)
    }

    /// One that runs a probe which does what it is ordered; `tag` tells it from others.
    pub(crate) fn obeying(
        gpu: &GpuSpec,
        probe: &str,
        tag: &str,
        options: &[&str],
    ) -> Result<Job, String> {
        let name = format!("kedge-bench-{}-{tag}", std::process::id());
        let mut command = kedge_again();
        command.args(["run", "--quiet", "--gpu", &gpu.to_string(), "--job", &name]).args(options);
        command.arg("--").arg(kedge_again().get_program()).args(["probe", probe]);
        Job::ready(command, name)
    }

    /// The same program by itself, on this machine's own driver.
    pub(crate) fn obeying_natively(probe: &str) -> Result<Job, String> {
        let mut command = kedge_again();
        command.args(["probe", probe]);
        Job::ready(command, "without kedge".into())
    }

    /// One that says "ready" first.
    pub(crate) fn ready(command: Command, name: String) -> Result<Job, String> {
        let mut job = Job::spawn(command, name)?;
        if job.line()? == "ready" { Ok(job) } else { Err("its job did not start".into()) }
    }

    /// The same program by itself, on this machine's own driver.
    pub(crate) fn native(held: &Held) -> Result<Job, String> {
        Job::beat(kedge_again(), held, "without kedge".into())
    }

    /// One that runs a probe and holds what that makes.
    ///
    /// # Errors
    /// It did not start, and why.
    pub fn holding(gpu: &GpuSpec, probe: &[&str], dir: &Path) -> Result<Job, String> {
        let name = format!("kedge-bench-{}", std::process::id());
        let mut command = kedge_again();
        command.args(["run", "--gpu", &gpu.to_string(), "--job", &name, "--ckpt-dir"]).arg(dir);
        command.arg("--").arg(kedge_again().get_program()).arg("probe").args(probe);
        let mut job = Job::spawn(command, name)?;
        if job.line()? == "ready" { Ok(job) } else { Err("its job did not start".into()) }
    }

    fn beat(mut command: Command, held: &Held, name: String) -> Result<Job, String> {
        command.args(["probe", "beat", &held.device.to_string()]);
        command.args(["--host", &held.host.to_string()]);
        command.args((!held.noise).then_some("--plain"));
        command.args(["--part", &held.part.to_string()]);
        let mut job = Job::spawn(command, name)?;
        if job.line()? == "ready" { Ok(job) } else { Err("its job did not start".into()) }
    }

    /// The process that was started: the program's, if it is native.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Milliseconds that its devices took to come to rest, at each checkpoint so far.
    pub(crate) fn rests(&self) -> Result<Vec<f64>, String> {
        let time =
            |line: &str| line.split_once("came to rest within ")?.1.split(' ').next()?.parse().ok();
        Ok(self.log()?.lines().filter_map(time).collect())
    }

    /// Returns the GiB a second in which what was in the devices' memory at the end of each pause
    /// has left it.
    pub(crate) fn drains(&self) -> Result<Vec<f64>, String> {
        let rate = |line: &str| {
            let (mib, rest) = line.split_once(" drained ")?.1.split_once(" MiB of the devices'")?;
            let ms = rest.split_once("within ")?.1.split(' ').next()?;
            Some(mib.parse::<f64>().ok()? / 1024.0 / (ms.parse::<f64>().ok()? / 1e3))
        };
        Ok(self.log()?.lines().filter_map(rate).collect())
    }

    /// Has what its devices hold read, encoded and summed, and no image made of it: seconds.
    pub(crate) fn measure(&self, codec: &str) -> Result<f64, String> {
        let jobs = Jobs::open().map_err(|error| error.to_string())?;
        let name: JobName = self.name.parse().map_err(|_| "its name is none of a job")?;
        let measured = control::measure(&jobs, &name, codec);
        measured.map(|(_, seconds)| seconds).map_err(|error| error.to_string())
    }

    fn log(&self) -> Result<String, String> {
        let output =
            kedge_again().args(["logs", &self.name]).output().map_err(|e| e.to_string())?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Moves it, as users do: seconds.
    pub(crate) fn migrate(&self, to: &str) -> Result<f64, String> {
        Job::migrate_named(&self.name, to, &[])
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The same of the job `name`.
    pub(crate) fn migrate_named(name: &str, to: &str, options: &[&str]) -> Result<f64, String> {
        let begin = Instant::now();
        Job::moved(name, to, options).map(|_| begin.elapsed().as_secs_f64())
    }

    /// Moves the job `name`: what that tells.
    pub(crate) fn moved(name: &str, to: &str, options: &[&str]) -> Result<Vec<Moving>, String> {
        let mut command = kedge_again();
        command.args(["migrate", name, "--json", "--to", to]).args(options);
        let output = command.stderr(Stdio::piped()).output().map_err(|error| error.to_string())?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
        }
        let told = String::from_utf8_lossy(&output.stdout);
        Ok(told.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
    }

    /// Checkpoints it as users do, while it beats until a second after the pause: the longest gap
    /// between two beats.
    pub(crate) fn gap_beside(&mut self, codec: &str) -> Result<f64, String> {
        let (name, before) = (self.name.clone(), self.rests()?.len());
        std::thread::scope(|scope| {
            let taken = scope.spawn(|| Job::checkpoint_of(&name, codec, &[]));
            while !taken.is_finished() && self.rests()?.len() == before {
                std::thread::sleep(Duration::from_millis(50));
            }
            self.ask("rate 1")?;
            let gap = self.ask("gap")?;
            // What is left of a drain goes on much faster beside a program that waits.
            self.ask("rest")?;
            taken.join().map_err(|_| "a panic")??;
            Ok(gap)
        })
    }

    fn spawn(mut command: Command, name: String) -> Result<Job, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("cannot start kedge: {error}"))?;
        let input = child.stdin.take();
        let output = child.stdout.take().ok_or("no output")?;
        Ok(Job { child, input, output: BufReader::new(output), name })
    }

    /// Restarts `image`: the job, and seconds until it has answered.
    ///
    /// # Errors
    /// It did not come back, and why.
    pub fn restart(image: &Path, options: &[&str]) -> Result<(Job, f64), String> {
        let begin = Instant::now();
        let name = format!("kedge-bench-{}", std::process::id());
        let mut command = kedge_again();
        command.arg("restart").arg(image).args(["--job", &name]).args(options);
        let mut job = Job::spawn(command, name)?;
        job.tell("ping")?;
        job.line()?;
        Ok((job, begin.elapsed().as_secs_f64()))
    }

    fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(|error| error.to_string())?;
        if line.is_empty() {
            return Err(format!("the job {} ended early: `kedge logs {0}`", self.name));
        }
        Ok(line.trim_end().to_owned())
    }

    pub(crate) fn tell(&mut self, order: &str) -> Result<(), String> {
        let input = self.input.as_mut().ok_or("no input")?;
        writeln!(input, "{order}").and_then(|()| input.flush()).map_err(|error| error.to_string())
    }

    /// The seconds that it answers.
    pub(crate) fn answer(&mut self) -> Result<f64, String> {
        let line = self.line()?;
        line.parse().map_err(|_| format!("the job said `{line}`"))
    }

    pub(crate) fn ask(&mut self, order: &str) -> Result<f64, String> {
        self.tell(order)?;
        self.answer()
    }

    /// Checkpoints it as users do.
    ///
    /// # Errors
    /// What `kedge checkpoint` says.
    pub fn checkpoint(&self, options: &[&str]) -> Result<Taken, String> {
        self.checkpoint_by("raw", options)
    }

    pub(crate) fn checkpoint_by(&self, codec: &str, options: &[&str]) -> Result<Taken, String> {
        Job::checkpoint_of(&self.name, codec, options)
    }

    /// The same, of the job `name`.
    fn checkpoint_of(name: &str, codec: &str, options: &[&str]) -> Result<Taken, String> {
        let mut command = kedge_again();
        command.args(["checkpoint", name, "--json", "--codec", codec]).args(options);
        let output = command.stderr(Stdio::piped()).output().map_err(|error| error.to_string())?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
        }
        serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())
    }

    /// Ends it.
    pub fn end(mut self) {
        self.finish();
    }

    fn finish(&mut self) {
        // The end of its input ends it.
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

/// How kedge is asked to keep a proxy ready, but for the device.
pub const KEEP_READY: [&str; 3] = ["warm", "start", "--gpu"];

/// What keeps a proxy ready for jobs, until this is dropped.
pub(crate) struct Warm(Child);

impl Warm {
    /// Returns when one is ready.
    pub(crate) fn start(gpu: &GpuSpec) -> Result<Warm, String> {
        let mut command = kedge_again();
        command.args(KEEP_READY).arg(gpu.to_string());
        let child = command.stderr(Stdio::null()).spawn().map_err(|error| error.to_string())?;
        let mut warm = Warm(child);
        let begin = Instant::now();
        while warm::status(None).map_or(true, |pools| pools.iter().all(|p| p.ready.is_empty())) {
            if begin.elapsed() > READY || warm.0.try_wait().is_ok_and(|ended| ended.is_some()) {
                return Err("no proxy becomes ready: `kedge warm start` tells why".into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(warm)
    }
}

impl Drop for Warm {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.finish();
    }
}
