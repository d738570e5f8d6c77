//! Files that mean the process which opens them: its terminal by the name /dev/tty, where that is a
//! pseudo-terminal of the job, and its own files in /proc. Each holder opens them again itself.

use crate::plugins::error::{Context, PluginError};
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::path::ResolvedPath;
use crate::plugins::world::{Argument, World};
use crate::plugins::{Claim, Plugin, procfs, pty};
use rustix::fs::{Mode, OFlags, open};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

#[derive(Debug)]
pub(crate) struct Own;

#[derive(Serialize, Deserialize)]
struct Saved {
    description: u32,
    path: ResolvedPath,
    offset: u64,
}

/// The terminal of the process that holds it first is one of the job's.
pub(crate) fn terminal(file: &Found, job: &Job) -> bool {
    /// /dev/tty (devices.txt).
    const TTY: (u32, u32) = (5, 0);
    let special = file.stat.special;
    let named = file.stat.kind() == libc::S_IFCHR
        && (libc::major(special), libc::minor(special)) == TTY
        && !file.is_path_only();
    named && procfs::terminal(job.holder(file).0).is_some_and(|device| pty::has(device, job))
}

/// The process whose file this is, and the rest of its path.
fn in_proc(file: &Found) -> Option<(i32, PathBuf)> {
    let path = Path::new(&file.link);
    let mut parts = path.strip_prefix("/proc").ok()?.components();
    let Some(Component::Normal(pid)) = parts.next() else { return None };
    Some((pid.to_str()?.parse().ok()?, parts.as_path().to_owned()))
}

/// As the job will know it.
fn path(file: &Found, job: &Job) -> Option<PathBuf> {
    if terminal(file, job) {
        return Some(PathBuf::from("/dev/tty"));
    }
    let (pid, rest) = in_proc(file)?;
    Some(Path::new("/proc").join(job.inner(pid)?.to_string()).join(rest))
}

impl Plugin for Own {
    fn name(&self) -> &'static str {
        "own"
    }

    fn requires(&self) -> &'static [&'static str] {
        // Its terminal must be that of its session by then.
        &["pty"]
    }

    fn claim(&self, file: &Found, job: &Job) -> Claim {
        match (path(file, job), in_proc(file)) {
            (Some(_), _) => Claim::Yes,
            (None, Some((pid, _))) => Claim::Refused(format!(
                "it is about process {pid}, which is not of the job or has ended: close it"
            )),
            (None, None) => Claim::No,
        }
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        let saved = |index: &usize| {
            let file = capture.file(*index);
            let path = ResolvedPath(path(file, capture.job)?);
            Some(Ok(Saved { description: *index as u32, path, offset: file.info.position }))
        };
        state(mine.iter().filter_map(saved))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        for saved in world.parse::<Vec<Saved>>(state)? {
            let access = world.flags(saved.description)?;
            let place = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
            world.made(saved.description, place.to(|| "open /dev/null")?)?;
            world.personal(saved.description);
            let mut name = OsStr::as_bytes(saved.path.0.as_os_str()).to_vec();
            name.push(0);
            // Flags beyond these were for making a file.
            let flags = access | (libc::O_NOCTTY | libc::O_CLOEXEC) as u32;
            let arguments = vec![Argument::Bytes(name), Argument::Number(flags.into())];
            let what = format!("open {}", saved.path.0.display());
            world.reopen(saved.description, (libc::SYS_open, arguments), saved.offset, &what);
        }
        Ok(())
    }
}
