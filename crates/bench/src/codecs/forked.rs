//! CRUM's forked checkpoint, which is kedge's own: a job that holds the data is checkpointed, and
//! what counts is how long it stands still.

use super::data::{Data, Set};
use crate::said;
use kedge_supervisor::control::{self, Order, Progress, Sending, Until};
use kedge_supervisor::jobs::{JobName, Jobs};
use kedge_supervisor::kedge_again;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Stdio};

/// `kedge probe hold`: makes the data, says so, and holds them until its input ends.
///
/// # Errors
/// There is no such data, or nobody reads what it says.
pub fn hold(name: &str, size: usize) -> Result<(), String> {
    let set = Set::by_name(name).ok_or_else(|| format!("no data named {name}"))?;
    let data = Data::new(set, size);
    said::tell("ready\n")?;
    let ended = std::io::stdin().read_to_end(&mut Vec::new());
    std::hint::black_box(&data.bytes);
    ended.map(drop).map_err(|error| error.to_string())
}

/// A job that holds data, ended when this is dropped.
pub(super) struct Holder {
    child: Child,
    jobs: Jobs,
    name: JobName,
}

impl Holder {
    pub(super) fn start(data: &Data, size: usize) -> Result<Holder, String> {
        let job = format!("kedge-bench-{}", std::process::id());
        let mut command = kedge_again();
        let kedge = command.get_program().to_owned();
        command.args(["run", "--gpu", "none", "--job", &job, "--"]).arg(&kedge);
        command.args(["probe", "hold", data.set.name(), &size.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = command.spawn().map_err(|error| format!("cannot start kedge: {error}"))?;
        let jobs = Jobs::open().map_err(|error| error.to_string())?;
        let name = job.parse().map_err(|error| format!("{error}"))?;
        let mut holder = Holder { child, jobs, name };
        let mut line = String::new();
        if let Some(stdout) = holder.child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line).map_err(|error| error.to_string())?;
        }
        if line == "ready\n" { Ok(holder) } else { Err("its job did not start".into()) }
    }

    /// Checkpoints the job into `dir`: seconds that it stood still, and bytes of the image.
    pub(super) fn checkpoint(&self, dir: &Path) -> Result<(f64, u64), String> {
        let order = Order {
            dir: Some(std::path::absolute(dir).map_err(|error| error.to_string())?),
            codec: Some("raw".into()),
            ..Order::default()
        };
        let (mut stall, mut stored, mut made) = (0.0, 0, None);
        let tell = |progress: &Progress| match progress {
            Progress::Captured { stall_seconds, .. } => stall = *stall_seconds,
            Progress::Durable { image, bytes, .. } => {
                (stored, made) = (*bytes, Some(image.clone()));
            }
            Progress::Writing { .. } | Progress::Verifying { .. } => {}
        };
        let sending = Sending::default();
        let asked =
            control::checkpoint(&self.jobs, &self.name, &order, Until::Durable, &sending, tell);
        asked.map_err(|error| error.to_string())?;
        if let Some(image) = made {
            let _ = fs::remove_dir_all(image);
        }
        Ok((stall, stored))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // The end of its input ends it.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
        self.jobs.remove(&self.name);
    }
}
