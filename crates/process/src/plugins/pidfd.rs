//! pidfd: of a process of the job, opened again by its holders once that process is there; or of
//! one that has ended.

use crate::plugins::error::{Context, PluginError};
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::world::{Argument, World};
use crate::plugins::{Claim, Plugin, procfs, sys};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;

#[derive(Debug)]
pub(crate) struct Pidfd;

#[derive(Serialize, Deserialize)]
struct Saved {
    description: u32,
    /// As the job knows it; `None`: it has ended.
    target: Option<i32>,
    /// The number of the file, by which those of one ended process are known.
    #[serde(default)]
    file: u64,
}

pub(crate) fn is_one(file: &Found) -> bool {
    // Since Linux 6.9 they are files of a file system of their own.
    file.anonymous() == Some("pidfd") || file.link.as_bytes().starts_with(b"pidfd:[")
}

/// The process here; `None`: it has ended.
fn told(file: &Found) -> Option<i32> {
    file.info.value("Pid")?.parse().ok().filter(|pid| *pid > 0)
}

impl Plugin for Pidfd {
    fn name(&self) -> &'static str {
        "pidfd"
    }

    fn claim(&self, file: &Found, _job: &Job) -> Claim {
        Claim::when(is_one(file))
    }

    fn saves_under_way(&self, file: &Found) -> bool {
        // A process that lives is opened again by those who hold its pidfd.
        told(file).is_none()
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        let saved = |index: &usize| {
            let file = capture.file(*index).stat.inode;
            Ok(Saved { description: *index as u32, target: target(capture, *index), file })
        };
        state(mine.iter().map(saved))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        let mut files: BTreeMap<u64, Vec<Saved>> = BTreeMap::new();
        for saved in world.parse::<Vec<Saved>>(state)? {
            files.entry(saved.file).or_default().push(saved);
        }
        for of_one in files.into_values() {
            let fds = sys::ended_process(of_one.len()).to(|| "make a pidfd")?;
            for (saved, fd) in of_one.into_iter().zip(fds) {
                world.made(saved.description, fd)?;
                if let Some(target) = saved.target {
                    world.personal(saved.description);
                    open_late(saved.description, target, world)?;
                }
            }
        }
        Ok(())
    }
}

fn target(capture: &mut Capture, index: usize) -> Option<i32> {
    let file = capture.file(index);
    let pid = told(file)?;
    let inner = capture.job.inner(pid).or_else(|| {
        // A thread of one of its processes.
        let thread = capture.job.processes.iter().any(|process| {
            std::fs::exists(format!("/proc/{}/task/{pid}", process.pid)).unwrap_or(false)
        });
        thread.then(|| procfs::inner_pid(pid).ok()).flatten()
    });
    if inner.is_none() {
        let what = capture.job.describe(file);
        let note = format!("{what} is process {pid}, out of the job: after a restart it has ended");
        capture.warnings.push(note);
    }
    inner
}

/// Each holder opens its own in place of the first one.
fn open_late(description: u32, target: i32, world: &mut World) -> Result<(), PluginError> {
    /// `PIDFD_THREAD` and `PIDFD_NONBLOCK`.
    const FLAGS: u32 = (libc::O_EXCL | libc::O_NONBLOCK) as u32;
    let flags = world.flags(description)? & FLAGS;
    let arguments = vec![Argument::Number(target as u64), Argument::Number(flags.into())];
    let what = format!("open the pidfd of process {target}");
    world.reopen(description, (libc::SYS_pidfd_open, arguments), 0, &what);
    Ok(())
}
