//! A job that holds memory, as the figures need it: told what to do by its standard input, checkpointed,
//! killed and restarted by the command that people use.

use serde::Deserialize;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

/// What `kedge checkpoint --json` tells.
#[derive(Debug, Deserialize)]
pub(super) struct Taken {
    pub(super) image: PathBuf,
    pub(super) stall_seconds: f64,
    pub(super) seconds: Option<f64>,
}

pub(super) struct Job {
    child: Child,
    /// `None` once its end has been told.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    name: String,
}

fn kedge() -> Result<Command, String> {
    let kedge = std::env::current_exe().map_err(|error| format!("cannot find kedge: {error}"))?;
    Ok(Command::new(kedge))
}

impl Job {
    /// One that holds `size` bytes and whose images go to `dir`.
    pub(super) fn start(size: u64, dir: &Path, options: &[&str]) -> Result<Job, String> {
        let name = format!("kedge-bench-{}", std::process::id());
        let mut command = kedge()?;
        command.args(["run", "--gpu", "none", "--job", &name, "--ckpt-dir"]).arg(dir);
        command.args(options).arg("--").arg(kedge()?.get_program());
        command.args(["probe", "memory", &size.to_string()]);
        let mut job = Job::spawn(command, name)?;
        if job.line()? == "ready" { Ok(job) } else { Err("its job did not start".into()) }
    }

    fn spawn(mut command: Command, name: String) -> Result<Job, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("cannot start kedge: {error}"))?;
        let input = child.stdin.take();
        let output = child.stdout.take().ok_or("no output")?;
        Ok(Job { child, input, output: BufReader::new(output), name })
    }

    /// Restarts `image`: the job, and seconds until it has answered.
    pub(super) fn restart(image: &Path, options: &[&str]) -> Result<(Job, f64), String> {
        let begin = Instant::now();
        let name = format!("kedge-bench-{}", std::process::id());
        let mut command = kedge()?;
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

    pub(super) fn tell(&mut self, order: &str) -> Result<(), String> {
        let input = self.input.as_mut().ok_or("no input")?;
        writeln!(input, "{order}").and_then(|()| input.flush()).map_err(|error| error.to_string())
    }

    /// The seconds that it answers.
    pub(super) fn answer(&mut self) -> Result<f64, String> {
        let line = self.line()?;
        line.parse().map_err(|_| format!("the job said `{line}`"))
    }

    pub(super) fn ask(&mut self, order: &str) -> Result<f64, String> {
        self.tell(order)?;
        self.answer()
    }

    pub(super) fn checkpoint(&self, options: &[&str]) -> Result<Taken, String> {
        let mut command = kedge()?;
        command.args(["checkpoint", &self.name, "--json", "--codec", "raw"]).args(options);
        let output = command.stderr(Stdio::piped()).output().map_err(|error| error.to_string())?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
        }
        serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())
    }

    /// Ends it.
    pub(super) fn end(mut self) {
        self.finish();
    }

    fn finish(&mut self) {
        // The end of its input ends it.
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.finish();
    }
}
