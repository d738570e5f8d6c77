//! The other host: what sshd starts, the part's supervisor, and the end that holds the streams.

use super::frame::{Frame, Stream};
use super::relay::Relay;
use super::{FAILED, Request, Streams, TOLD, halves};
use crate::Failure;
use crate::run::Manner;
use kedge_control::job::Launch;
use kedge_image::DeviceLimits;
use kedge_keys::PskEnd;
use kedge_supervisor::policy::{JobGpu, Policy};
use kedge_supervisor::{JobSpec, KEY, kedge_again};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, kill_process_group, set_child_subreaper, setsid, wait,
};
use serde::{Deserialize, Serialize};
use signal_hook::consts::SIGCHLD;
use signal_hook::low_level;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The end that holds the streams says so when it is connected.
const READY: &[u8] = b"kedge: the remote shell is there\n";
/// Longest request, in bytes: a command may have 128 KiB, and JSON takes more for some of them.
const MAX_REQUEST_LEN: u64 = 1 << 20;
/// How long the near end is tried to be reached.
const REACHES: Duration = Duration::from_secs(10);
/// What the near end may send the command. Numbers are those of all Linux machines.
const CARRIED: [(u8, Signal); 4] =
    [(1, Signal::HUP), (2, Signal::INT), (3, Signal::QUIT), (15, Signal::TERM)];

/// What the supervisor and its program are told; the key is beside it.
#[derive(Serialize, Deserialize)]
struct Told {
    launch: Launch,
    streams: Streams,
}

impl Told {
    fn here() -> Result<Told, Failure> {
        let text = std::env::var(TOLD).unwrap_or_default();
        let told = serde_json::from_str(&text);
        told.map_err(|_| Failure::new("`kedge remote-shell` is for ssh in a job alone"))
    }
}

/// Started by sshd: has the part be started, and returns when that is there, or has failed.
pub(super) fn begin() -> Result<ExitCode, Failure> {
    let mut text = Vec::new();
    io::stdin().take(MAX_REQUEST_LEN).read_to_end(&mut text)?;
    let Request { launch, streams, command } = serde_json::from_slice(&text)
        .map_err(|_| Failure::new("the host that has started this has another version of kedge"))?;
    let key = launch.key.clone();
    let told = Told { launch: Launch { key: String::new(), ..launch }, streams };
    // sshd waits for all who have its pipes: the part has others.
    let (reader, writer) = io::pipe()?;
    let mut supervisor = kedge_again();
    supervisor.args(["remote-shell", "--supervise", "--", &command]);
    supervisor.env(TOLD, serde_json::to_string(&told)?).env(KEY, key);
    supervisor.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let mut child = supervisor.spawn()?;
    drop(supervisor);
    let mut lines = BufReader::new(reader);
    let mut line = Vec::new();
    while lines.read_until(b'\n', &mut line)? > 0 {
        if line == READY {
            return Ok(ExitCode::SUCCESS);
        }
        io::stderr().write_all(&line)?;
        line.clear();
    }
    Ok(ExitCode::from(code_of(child.wait()?)))
}

/// Supervises the part, outside of sshd's session.
pub(super) fn supervise(command: &str) -> Result<ExitCode, Failure> {
    let Told { launch, .. } = Told::here()?;
    // Not where somebody else has made it a session's first process.
    let _ = setsid();
    let limits: DeviceLimits = serde_json::from_value(launch.limits).unwrap_or_default();
    let policy: Policy = serde_json::from_value(launch.policy).unwrap_or_default();
    let gpu: JobGpu = launch.gpu.parse()?;
    let spec = JobSpec {
        gpu,
        gpu_default: None,
        limits,
        name: None,
        join: Some(launch.job.parse()?),
        far: Some(kedge_supervisor::far(&launch.at, None)?),
        program: kedge_again().get_program().to_owned(),
        arguments: ["remote-shell", "--end", "--", command].map(OsString::from).to_vec(),
        shells: true,
        policy,
        stats: false,
        check: None,
        trace: None,
        move_to: None,
        preload: None,
        quiet: true,
    };
    Manner { quiet: true, ..Manner::default() }.conclude(kedge_supervisor::run(&spec))
}

/// Runs the command, and holds its streams: the part's first process.
pub(super) fn end(command: &str) -> Result<ExitCode, Failure> {
    let Told { streams, .. } = Told::here()?;
    let link = reach(&streams)?;
    io::stdout().write_all(READY)?;
    io::stdout().flush()?;
    // What the command leaves behind is the part's as long as it lives.
    set_child_subreaper(Some(getpid()))?;
    let reaper = Reaper::new()?;
    let mut child = start(command)?;
    let mut relay = Relay::new(link, streams.secret, PskEnd::Second)?;
    if let Some(stdin) = child.stdin.take() {
        relay.write_to(Stream::In, OwnedFd::from(stdin));
    }
    let out = child.stdout.take().map(|out| (Stream::Out, OwnedFd::from(out)));
    let err = child.stderr.take().map(|err| (Stream::Err, OwnedFd::from(err)));
    out.into_iter().chain(err).for_each(|(stream, fd)| relay.read_from(stream, fd));
    let status = carry(&mut relay, &child, &reaper)?;
    let code = code_of(status);
    tell(&mut relay, code)?;
    drop(relay);
    // Until there is none.
    while matches!(wait(WaitOptions::empty()), Ok(_) | Err(Errno::INTR)) {}
    Ok(ExitCode::from(code))
}

/// As ssh tells how a command has ended.
fn code_of(status: ExitStatus) -> u8 {
    status.code().map_or(FAILED, |code| code as u8)
}

/// Connects to the near end, and shows it the token.
fn reach(streams: &Streams) -> Result<TcpStream, Failure> {
    let begin = Instant::now();
    loop {
        match TcpStream::connect_timeout(&streams.address, REACHES) {
            Ok(link) => return greet(link, streams),
            Err(error) if begin.elapsed() > REACHES => {
                let at = streams.address;
                return Err(Failure::new(format!(
                    "the host that has started this cannot be reached at {at} from here, where \
                     the streams of the remote shell go: {error}"
                )));
            }
            Err(_) => thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// Shows the near end half of the token, and is shown the other half: only who has started this
/// knows it.
fn greet(mut link: TcpStream, streams: &Streams) -> Result<TcpStream, Failure> {
    let (shown, asked) = halves(&streams.token);
    let mut answer = vec![0; asked.len()];
    link.set_read_timeout(Some(REACHES))?;
    link.write_all(shown)?;
    if link.read_exact(&mut answer).is_err() || answer != asked {
        let at = streams.address;
        return Err(Failure::new(format!(
            "what answers at {at} is not the host that has started this: nothing was started here"
        )));
    }
    link.set_read_timeout(None)?;
    Ok(link)
}

/// Starts the command by the user's shell, as sshd does.
fn start(command: &str) -> io::Result<Child> {
    let shell = std::env::var_os("SHELL").filter(|shell| !shell.is_empty());
    let shell = shell.unwrap_or_else(|| "/bin/sh".into());
    let name = Path::new(&shell).file_name().unwrap_or(&shell).to_owned();
    let mut started = Command::new(&shell);
    started.arg0(name).arg("-c").arg(command).env_remove(TOLD).process_group(0);
    started.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    started.spawn()
}

/// Carries streams and signals until the command has ended, and what it has said is sent; or, where
/// the near end is gone, until it has ended.
fn carry(relay: &mut Relay, child: &Child, reaper: &Reaper) -> io::Result<ExitStatus> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(io::ErrorKind::InvalidData)?;
    let mut status = None;
    let mut is_alone = false;
    loop {
        relay.turn(Some(reaper.wake.as_fd()), None)?;
        status = status.or(reaper.collect(pid));
        // Its group is its own as long as it was not waited for.
        let group = status.is_none().then_some(pid);
        for told in relay.told() {
            if let (Frame::Signal(number), Some(group)) = (told, group)
                && let Some((_, signal)) = CARRIED.iter().find(|(known, _)| *known == number)
            {
                let _ = kill_process_group(group, *signal);
            }
        }
        if relay.is_closed() && !is_alone {
            is_alone = true;
            relay.drop_streams();
            group.map(|group| kill_process_group(group, Signal::HUP));
        }
        match status {
            Some(status) if is_alone || !relay.has_sources() => return Ok(status),
            _ => {}
        }
    }
}

/// Collects those who have ended: this process inherits what the command leaves behind.
struct Reaper {
    wake: UnixStream,
}

impl Reaper {
    fn new() -> io::Result<Reaper> {
        let (wake, waker) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        low_level::pipe::register(SIGCHLD, waker)?;
        Ok(Reaper { wake })
    }

    /// Collects all that have ended: how `pid` has, if it is one of them.
    fn collect(&self, pid: Pid) -> Option<ExitStatus> {
        let _ = (&self.wake).read(&mut [0; 64]);
        let mut found = None;
        while let Ok(Some((gone, status))) = wait(WaitOptions::NOHANG) {
            found = found.or((gone == pid).then(|| ExitStatus::from_raw(status.as_raw())));
        }
        found
    }
}

/// Tells the near end how the command has ended, and returns when it has closed the connection:
/// whoever reads what the command has said may take his time.
fn tell(relay: &mut Relay, code: u8) -> io::Result<()> {
    relay.say(&Frame::Exit(code));
    let mut is_shut = false;
    while !relay.is_closed() {
        if relay.has_sent() && !is_shut {
            is_shut = true;
            relay.shut();
        }
        relay.turn(None, None)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_ends_as_ssh_tells_it() {
        assert_eq!(code_of(ExitStatus::from_raw(7 << 8)), 7);
        assert_eq!(code_of(ExitStatus::from_raw(15)), FAILED);
    }
}
