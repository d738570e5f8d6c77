//! How the proxy of a session is started: with its line, its server's channel and a way to say
//! something, and with nothing else of the server's.

use crate::ServeSpec;
use crate::homes::Owner;
use crate::sessions::Kind;
use kedge_control::gpu::GpuSpec;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::ffi::OsStr;
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};

/// Most lines of a proxy that the server's log takes.
const MAX_LINES: usize = 100;
/// Longest such line, in bytes.
const MAX_LINE_LEN: usize = 400;

/// A proxy that runs.
pub(crate) struct Started {
    pub(crate) proxy: Child,
    /// What signals it.
    pub(crate) process: OwnedFd,
    /// What it says on standard error.
    pub(crate) words: UnixStream,
}

/// Starts a proxy with its line and its end of a channel.
///
/// # Errors
/// The system refuses.
pub(crate) fn proxy(
    spec: &ServeSpec,
    (kind, owner): (Kind, Option<&Owner>),
    gpu: &GpuSpec,
    line: OwnedFd,
    far: OwnedFd,
) -> io::Result<Started> {
    let mut command = Command::new(&spec.proxy);
    command.args(["--far", "--gpu", &gpu.to_string()]);
    if kind == Kind::Management {
        command.arg("--management");
    }
    if let Some(bytes) = spec.soft_memory {
        command.args(["--soft-memory", &bytes.to_string()]);
    }
    // The terminal, the environment and the descriptors are the server's. The proxy begins a
    // session of its own and closes what else it has, before it hears anybody.
    let (words, says) = UnixStream::pair()?;
    // A server that stands still holds no proxy up.
    says.set_nonblocking(true)?;
    command.stdin(line).stdout(Stdio::from(far)).stderr(OwnedFd::from(says)).env_clear();
    command.envs(std::env::vars_os().filter(|(name, _)| is_passed_on(name, owner.is_some())));
    if let Some(Owner { id, home }) = owner {
        // Without groups. What the server's user has in his folders is none of its business.
        command.uid(*id).gid(*id).current_dir("/").env("HOME", home);
    }
    let mut proxy = command.spawn()?;
    match pidfd_open(Pid::from_child(&proxy), PidfdFlags::empty()) {
        Ok(process) => Ok(Started { proxy, process, words }),
        Err(error) => {
            // What could not be ended later is not begun. It is a child that nobody waits for yet.
            let _ = proxy.kill().and_then(|()| proxy.wait());
            Err(error.into())
        }
    }
}

/// Returns whether a variable of the server's environment is one that proxies need: where the
/// driver is, how it works, and where they keep what they cache. `another`: it runs as another
/// user, who owns none of the server's folders.
fn is_passed_on(name: &OsStr, another: bool) -> bool {
    let Some(name) = name.to_str() else { return false };
    match name {
        // Near ends choose among the server's devices.
        "CUDA_VISIBLE_DEVICES" | "KEDGE_SOCKET" => false,
        "HOME" | "XDG_CACHE_HOME" | "CUDA_CACHE_PATH" | "TMPDIR" => !another,
        "PATH" | "LD_LIBRARY_PATH" | "LANG" | "TZ" | "RUST_BACKTRACE" => true,
        _ => ["CUDA_", "NVIDIA_", "KEDGE_", "LC_"].iter().any(|of| name.starts_with(of)),
    }
}

/// What a proxy says, which is heard until it has ended.
pub(crate) struct Words {
    stream: UnixStream,
    hears: JoinHandle<()>,
}

impl Words {
    /// Hears it on a thread of its own.
    ///
    /// # Errors
    /// There is no thread or descriptor left.
    pub(crate) fn hear(
        words: UnixStream,
        say: impl Fn(String) + Send + 'static,
    ) -> io::Result<Words> {
        let stream = words.try_clone()?;
        let hear = move || lines(words, say);
        let hears = thread::Builder::new().name("words".into()).stack_size(64 << 10);
        Ok(Words { stream, hears: hears.spawn(hear)? })
    }

    /// Hears what is left of a proxy's that has ended. Processes that it has left are not waited
    /// for.
    pub(crate) fn end(self) {
        let _ = self.stream.shutdown(Shutdown::Read);
        let _ = self.hears.join();
    }
}

/// Says each line, up to a number and a length. What is beyond is read all the same.
fn lines(mut from: impl Read, say: impl Fn(String)) {
    let (mut line, mut said, mut some) = (Vec::new(), 0, [0; 1024]);
    let mut over = |line: &mut Vec<u8>| {
        let text = plain(&std::mem::take(line));
        match said {
            _ if text.is_empty() => return,
            MAX_LINES => say("it says more, which is left out".into()),
            _ if said < MAX_LINES => say(text),
            _ => {}
        }
        said += 1;
    };
    while let Ok(count @ 1..) = from.read(&mut some) {
        for byte in &some[..count] {
            match byte {
                b'\n' => over(&mut line),
                byte if line.len() < MAX_LINE_LEN => line.push(*byte),
                _ => {}
            }
        }
    }
    over(&mut line);
}

/// Returns a text of which a terminal does nothing but show it.
fn plain(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().filter(|it| !it.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;
    use std::io::Write;
    use std::sync::mpsc;

    #[test]
    fn what_proxies_need_is_passed_on_and_nothing_else() {
        let passed = |name: &str, another| is_passed_on(&OsString::from(name), another);
        for name in ["PATH", "LD_LIBRARY_PATH", "KEDGE_DRIVER", "CUDA_MPS_PIPE_DIRECTORY"] {
            assert!(passed(name, false) && passed(name, true), "{name}");
        }
        for name in ["HOME", "XDG_CACHE_HOME", "CUDA_CACHE_PATH"] {
            assert!(passed(name, false) && !passed(name, true), "{name}");
        }
        for name in ["SSH_AUTH_SOCK", "AWS_SECRET_ACCESS_KEY", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD"]
        {
            assert!(!passed(name, false), "{name}");
        }
    }

    #[test]
    fn what_a_proxy_says_is_bounded() {
        let heard = |said: &[u8]| {
            let (tells, told) = mpsc::channel();
            lines(said, |text| tells.send(text).unwrap());
            drop(tells);
            told.into_iter().collect::<Vec<String>>()
        };
        assert_eq!(heard(b"one\x1b[2J\n\ntwo"), ["one[2J", "two"]);
        let many = heard("x\n".repeat(1000).as_bytes());
        assert_eq!((many.len(), many.last().map(String::len)), (MAX_LINES + 1, Some(31)));
        assert_eq!(heard(&vec![b'y'; 100_000])[0].len(), MAX_LINE_LEN);
    }

    /// A process that a proxy has left has its standard error, and says nothing.
    #[test]
    fn who_is_left_behind_is_not_waited_for() {
        let (words, mut says) = UnixStream::pair().unwrap();
        let (tells, told) = mpsc::channel();
        let heard = Words::hear(words, move |text| tells.send(text).unwrap()).unwrap();
        says.write_all(b"last words").unwrap();
        heard.end();
        assert_eq!(told.recv().unwrap(), "last words");
        assert!(says.write_all(b"more").is_err());
    }
}
