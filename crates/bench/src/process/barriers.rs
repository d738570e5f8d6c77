//! How long a barrier of many processes takes.

use super::peers::DMTCP;
use super::{Scratch, Sink};
use kedge_coordinator::{Client, Leader, Member, Series as Barriers, connect, reach};
use kedge_probe::{Reference, Series};
use kedge_supervisor::kedge_again;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const PROCESSES: u32 = 256;
const ROUNDS: u32 = 200;
const JOB: &str = "bench";
/// Nothing takes longer than this unless a machine has stopped.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The first step: everybody has been started.
const ASSEMBLED: u32 = 1;

/// In a folder of its own.
pub(crate) fn run(dir: Option<&Path>, sink: &mut Sink<'_>) -> Result<(), String> {
    measure(&Scratch::new(dir)?.0, sink)
}

pub(super) fn measure(folder: &Path, sink: &mut Sink<'_>) -> Result<(), String> {
    let said = |error: std::io::Error| format!("barriers: {error}");
    let (_stream, leader) = reach(folder, JOB).map_err(said)?;
    let _server = match leader {
        Leader::This(server) => server,
        Leader::Other => return Err("barriers: somebody else coordinates".into()),
    };
    let mut members = Members(Vec::new());
    for index in 0..PROCESSES {
        let mut command = kedge_again();
        command.args(["probe", "member"]).arg(folder).arg(index.to_string());
        let first = index == 0;
        let stdout = if first { Stdio::piped() } else { Stdio::null() };
        members.0.push(command.stdin(Stdio::null()).stdout(stdout).spawn().map_err(said)?);
    }
    let first = members.0.remove(0).wait_with_output().map_err(said)?;
    let text = String::from_utf8_lossy(&first.stdout);
    let samples: Vec<f64> = serde_json::from_str(text.trim())
        .map_err(|_| format!("barriers: {}", String::from_utf8_lossy(&first.stderr).trim()))?;
    let dmtcp = Reference::new(1.0, "DMTCP, less than", DMTCP);
    sink(Series::lower("barrier of 256 processes", "ms", samples).target(1.0).reference(dmtcp));
    Ok(())
}

/// Processes that end with this.
struct Members(Vec<Child>);

impl Drop for Members {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// One of the processes: the times, in milliseconds, from one barrier to the next.
///
/// # Errors
/// A barrier was not passed, and why.
pub fn member(folder: &Path, index: u32) -> Result<Vec<f64>, String> {
    let name = index.to_string();
    let member = Member { job: JOB.into(), name, node: "bench".into(), part: true };
    let folder = PathBuf::from(folder);
    let find = Box::new(move || connect(&folder));
    let mut client = Client::join(&member, find).map_err(|error| error.to_string())?;
    let series = Barriers::of_node("rounds");
    let mut arrive =
        |step| client.meet(&series, step, PROCESSES, TIMEOUT).map_err(|error| error.to_string());
    arrive(ASSEMBLED)?;
    let mut samples = Vec::new();
    let mut begin = Instant::now();
    for step in ASSEMBLED + 1..=ASSEMBLED + ROUNDS {
        arrive(step)?;
        samples.push(begin.elapsed().as_secs_f64() * 1e3);
        begin = Instant::now();
    }
    Ok(samples)
}
