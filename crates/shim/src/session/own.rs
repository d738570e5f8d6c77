//! A proxy of this process's own, where no supervisor is there to start one: in a container that
//! was given devices (`kedge_cuda_types::granted`), and whose program was not started by
//! `kedge run`.

use kedge_cuda_types::granted;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use thiserror::Error;

/// Variables of the program's that mean nothing good to its proxy.
const NOT_THE_PROXY_S: [&str; 3] = ["CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "LD_AUDIT"];

#[derive(Debug, Error)]
pub(super) enum OwnError {
    #[error("KEDGE_SOCKET is not set; start the program with `kedge run`")]
    NotGranted,
    #[error("KEDGE_LIB_DIR is not set: the container was given devices and no kedge-proxy")]
    NoFolder,
    #[error("a program with more rights than its user gets no devices from its environment")]
    Privileged,
    #[error("cannot start {program}: {source}", program = .program.display())]
    Start { program: PathBuf, source: io::Error },
    #[error("{program} did not start ({status}): install parts that match", program = .program.display())]
    Ended { program: PathBuf, status: std::process::ExitStatus },
}

/// Starts a proxy with as many software devices as this process's environment grants, and returns
/// the socket that leads to it. It ends when this process has ended.
///
/// # Errors
/// No devices were granted; this process has more rights than its user, who could name any program
/// as the proxy; the proxy cannot be started.
pub(super) fn start() -> Result<OwnedFd, OwnError> {
    // A job that was to have no devices has none of its container's.
    if std::env::var_os("KEDGE_JOB").is_some() {
        return Err(OwnError::NotGranted);
    }
    let devices = granted::count(std::env::vars_os());
    if devices == 0 {
        return Err(OwnError::NotGranted);
    }
    // SAFETY: getauxval reads what the kernel has told this process; no memory of ours is passed.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
        return Err(OwnError::Privileged);
    }
    let folder = std::env::var_os("KEDGE_LIB_DIR").ok_or(OwnError::NoFolder)?;
    spawn(&Path::new(&folder).join("kedge-proxy"), devices)
}

fn spawn(program: &Path, devices: u32) -> Result<OwnedFd, OwnError> {
    let failed = |source| OwnError::Start { program: program.to_owned(), source };
    let (near, far) = UnixStream::pair().map_err(failed)?;
    let mut command = Command::new(program);
    command.args(["--detach", "--gpu", &format!("soft:{devices}")]);
    // The proxy is in another folder when it opens it.
    let log = std::env::var_os("KEDGE_LOG").and_then(|log| std::path::absolute(log).ok());
    if let Some(log) = log {
        command.arg("--log").arg(log);
    }
    for variable in NOT_THE_PROXY_S {
        command.env_remove(variable);
    }
    // Nothing runs between fork and exec, so that the system need not copy this process's tables.
    command.stdin(OwnedFd::from(far)).stdout(Stdio::null()).stderr(Stdio::null());
    match command.status() {
        // What was started has left a process that is no child of this one, which wait() would
        // tell the program of.
        Ok(status) if status.success() => Ok(near.into()),
        Ok(status) => Err(OwnError::Ended { program: program.to_owned(), status }),
        // The program collects all children, by SIGCHLD ignored or a handler: ours has been, too.
        // Had it failed, the handshake does.
        Err(source) if source.raw_os_error() == Some(libc::ECHILD) => Ok(near.into()),
        Err(source) => Err(failed(source)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_that_cannot_start_is_told() {
        let missing = spawn(Path::new("/nonexistent/kedge-proxy"), 1).unwrap_err();
        assert!(matches!(missing, OwnError::Start { .. }), "{missing}");
        let ended = spawn(Path::new("/bin/false"), 1).unwrap_err();
        assert!(matches!(ended, OwnError::Ended { .. }), "{ended}");
    }
}
