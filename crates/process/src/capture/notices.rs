//! Who is to be told of a message queue's next message (mq_notify(3)): what the kernel shows to
//! nobody is asked of the process itself.
//!
//! What glibc's thread is to call lies in the kernel with the queue, and comes out only when the
//! process takes its request back: then the thread's socket has it, marked as taken back. It is
//! read there before the thread runs again, and the request is made anew. What a signal is to bring
//! along (`sigev_value`) cannot be had at all, so a process that could read it is refused.

use crate::home::Ways;
use crate::inject::{checked, read_exact};
use crate::plugins::mqueue::Wanted;
use crate::plugins::survey;
use crate::restart::notices::request;
use crate::state::{COOKIE, Hex, Means, Notice};
use crate::stop::StoppedProcess;
use crate::sys;
use crate::{EngineError, Thread};
use libc::pid_t;
use rustix::fd::OwnedFd;
use rustix::net::{RecvFlags, recv};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use std::io;

/// Bytes for a request and what it points to.
const ROOM: u64 = 4096;
/// The last byte of a cookie that the kernel has sent because the request was taken back
/// (NOTIFY_REMOVED, ipc/mqueue.c).
const REMOVED: u8 = 2;

/// What `process` is to be told of, among what everybody is.
pub(super) fn ask(
    process: &mut StoppedProcess,
    ways: &Ways,
    wanted: &[Wanted],
) -> Result<Vec<Notice>, EngineError> {
    let mine: Vec<&Wanted> = wanted.iter().filter(|one| one.process == process.pid).collect();
    if mine.is_empty() {
        return Ok(Vec::new());
    }
    // Who waits for a signal blocks it everywhere; glibc's thread blocks all of them.
    let blocked = process.others.iter().fold(process.main.mask(), |all, one| all & one.mask());
    let leader = &mut process.main;
    ways.lead(leader)?;
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let arguments = [0, ROOM, protection, flags, u64::MAX, 0];
    let at = leader.call(ways.home(), libc::SYS_mmap, &arguments)?;
    let at = checked(leader.pid(), "find room in it", at)? as u64;
    let mut asked = Asked { leader, entry: ways.home(), at };
    let found: Result<Vec<Notice>, EngineError> =
        mine.into_iter().map(|one| asked.one(one, blocked)).collect();
    let unmapped = asked.leader.call(ways.home(), libc::SYS_munmap, &[at, ROOM]);
    asked.leader.go_home()?;
    unmapped?;
    found
}

struct Asked<'a> {
    leader: &'a mut Thread,
    entry: u64,
    at: u64,
}

impl Asked<'_> {
    fn one(&mut self, wanted: &Wanted, blocked: u64) -> Result<Notice, EngineError> {
        let by = match wanted.means {
            libc::SIGEV_SIGNAL if wanted.signal != 0 => self.signal(wanted.signal, blocked)?,
            libc::SIGEV_SIGNAL => Means::Signal(0),
            libc::SIGEV_THREAD => return self.thread(wanted),
            _ => Means::Nothing,
        };
        Ok(Notice { queue: wanted.queue, by })
    }

    fn call(&mut self, what: &'static str, number: i64, args: &[u64]) -> Result<i64, EngineError> {
        let result = self.leader.call(self.entry, number, args)?;
        checked(self.leader.pid(), what, result)
    }

    /// A signal whose value the process has no way to read: its handler, if it has one, is given
    /// the number alone, and nobody waits for it.
    fn signal(&mut self, signal: i32, blocked: u64) -> Result<Means, EngineError> {
        let pid = self.leader.pid();
        let arguments = [signal as u64, 0, self.at, 8];
        self.call("read its signal actions", libc::SYS_rt_sigaction, &arguments)?;
        let mut action = [0; 16];
        read_exact(pid, self.at, &mut action)?;
        let [handler, flags] = [&action[..8], &action[8..]].map(|bytes| {
            let mut word = [0; 8];
            word.copy_from_slice(bytes);
            u64::from_ne_bytes(word)
        });
        let caught = ![libc::SIG_DFL as u64, libc::SIG_IGN as u64].contains(&handler);
        let reads = caught && flags & libc::SA_SIGINFO as u64 != 0;
        if reads || blocked & 1 << (signal - 1) != 0 {
            let what = format!(
                "it asked to be told of a message queue's next message (mq_notify) by signal {signal}, whose value \
                 (sigev_value) it may read and the kernel shows to nobody: a handler without SA_SIGINFO, \
                 SIGEV_THREAD or poll can be saved"
            );
            return Err(EngineError::unsupported(pid, what));
        }
        Ok(Means::Signal(signal))
    }

    /// Takes the request back, so that it is told what was asked for, and makes it anew.
    fn thread(&mut self, wanted: &Wanted) -> Result<Notice, EngineError> {
        let pid = self.leader.pid();
        let sockets = open(wanted.process, &wanted.sockets)?;
        let queue = wanted.queue as u64;
        self.call("take back what it asked of a message queue", libc::SYS_mq_notify, &[queue, 0])?;
        let cookie = sockets.iter().find_map(|(socket, fd)| taken(fd).map(|it| (*socket, it)));
        let by = match cookie {
            Some((socket, cookie)) => Means::Thread { socket, cookie: Hex(cookie.to_vec()) },
            // It has closed the socket: nobody would be told, and nobody else may ask.
            None => Means::Nothing,
        };
        let notice = Notice { queue: wanted.queue, by };
        sys::write(pid, self.at, &request(&notice.by, self.at))?;
        self.call("ask a message queue again", libc::SYS_mq_notify, &[queue, self.at])?;
        Ok(notice)
    }
}

/// Descriptors of this process's own for sockets of `pid`, also where its first thread has ended.
fn open(pid: pid_t, sockets: &[i32]) -> Result<Vec<(i32, OwnedFd)>, EngineError> {
    let failed = |source: io::Error| {
        let what = "duplicate its netlink sockets";
        EngineError::System { pid, what, source }
    };
    let process = survey::process(pid).map_err(failed)?;
    let open = |fd: &i32| {
        let opened = pidfd_getfd(&process.pidfd, *fd, PidfdGetfdFlags::empty());
        Ok((*fd, opened.map_err(|error| failed(error.into()))?))
    };
    sockets.iter().map(open).collect()
}

/// Takes out of a socket what was asked for and has been taken back.
fn taken(socket: &OwnedFd) -> Option<[u8; COOKIE]> {
    let mut cookie = [0; COOKIE];
    let mut look = |flags: RecvFlags| {
        let length = recv(socket, &mut cookie[..], flags | RecvFlags::DONTWAIT).ok()?.1;
        (length == COOKIE && cookie[COOKIE - 1] == REMOVED).then_some(())
    };
    look(RecvFlags::PEEK | RecvFlags::TRUNC)?;
    look(RecvFlags::empty())?;
    // The kernel's own, and 0 where glibc has it from.
    cookie[COOKIE - 1] = 0;
    Some(cookie)
}
