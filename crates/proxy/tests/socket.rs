//! The proxy's executable against a socket that speaks nonsense, and against a client that goes.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

fn log_path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()))
}

fn start(log: &PathBuf) -> (Child, UnixStream) {
    let (near, far) = UnixStream::pair().unwrap();
    let fd = far.as_raw_fd();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kedge-proxy"));
    command.args(["--fd", "3", "--gpu", "soft", "--soft-memory", "268435456", "--log"]).arg(log);
    // SAFETY: one system call between fork and exec; where the number is 3 already, close-on-exec
    // must go.
    unsafe {
        command.pre_exec(move || {
            let status = if fd == 3 { libc::fcntl(3, libc::F_SETFD, 0) } else { libc::dup2(fd, 3) };
            if status < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
        });
    }
    (command.spawn().unwrap(), near)
}

fn wait(mut child: Child, limit: Duration) -> ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if start.elapsed() > limit {
            let _ = child.kill();
            panic!("still running after {limit:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_failure_that_nobody_hears_is_told_by_the_status() {
    let (near, far) = UnixStream::pair().unwrap();
    drop(near);
    let mut command = Command::new(env!("CARGO_BIN_EXE_kedge-proxy"));
    command.arg("--nonsense").stderr(OwnedFd::from(far));
    let status = wait(command.spawn().unwrap(), Duration::from_secs(30));
    assert_eq!(status.code(), Some(2), "{status}");
}

#[test]
fn nonsense_ends_the_proxy_with_a_line() {
    let mut state = 0x1234_5678_u64;
    for round in 0..12 {
        let log = log_path(&format!("nonsense-{round}"));
        let (child, mut socket) = start(&log);
        let mut bytes: Vec<u8> = (0..round * 37)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        // A length that fits, so that the frame itself is read and found wanting.
        if round % 2 == 0 && bytes.len() > 4 {
            let len = bytes.len() as u32 - 4;
            bytes[..4].copy_from_slice(&len.to_le_bytes());
        }
        // It may have given up already.
        let _ = socket.write_all(&bytes);
        let _ = socket.shutdown(std::net::Shutdown::Write);
        let status = wait(child, Duration::from_secs(5));
        assert_eq!(status.code(), Some(1), "round {round}: {status}");
        let text = std::fs::read_to_string(&log).unwrap();
        std::fs::remove_file(&log).unwrap();
        assert!(text.contains("refused a client"), "round {round}: {text}");
    }
}

#[test]
fn it_greets_first_and_ends_when_the_client_goes() {
    let log = log_path("goes");
    let (child, mut socket) = start(&log);
    let mut greeting = [0; 20];
    socket.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[4..12], b"kedge-px");
    drop(socket);
    assert_eq!(wait(child, Duration::from_secs(1)).code(), Some(1));
    std::fs::remove_file(&log).unwrap();
}

#[test]
fn wrong_options_are_told() {
    let output = Command::new(env!("CARGO_BIN_EXE_kedge-proxy")).arg("--help").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("kedge run"));
}
