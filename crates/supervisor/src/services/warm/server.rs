//! The process that keeps warm proxies and gives them away.

use super::kind::Kind;
use super::pool::{Pool, Say, Waiting};
use crate::job::jobs::{JobError, JobName, Jobs, private_dir, try_lock};
use kedge_control::service::{Asker, Limits, Service};
use kedge_control::warm::{Ask, PoolStatus, REQUEST_TIMEOUT, Reply, ask};
use kedge_socket::SocketError;
use kedge_wire::Text;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use thiserror::Error;

/// One question a connection.
const LIMITS: Limits =
    Limits { connections: 256, request: REQUEST_TIMEOUT, reply: REQUEST_TIMEOUT };
/// Longest time that a job may wait for a proxy that is being made ready.
const MAX_WAIT: Duration = Duration::from_secs(10);

#[derive(Debug, Error)]
pub enum WarmError {
    #[error(transparent)]
    Folder(#[from] JobError),
    #[error(
        "proxies are kept ready on this node already: `kedge warm status` tells which, `kedge warm stop` ends it"
    )]
    Running,
    #[error(
        "no proxies are kept ready: `kedge warm start` keeps some on this node, `kedge run --warm` for a job"
    )]
    None,
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error("who keeps proxies ready does not answer: {0}")]
    Silent(#[from] SocketError),
    #[error("who keeps proxies ready answers nonsense")]
    Nonsense,
    #[error("descriptors {0} and the next are not what a job's supervisor hands over")]
    NotHanded(RawFd),
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> WarmError {
    move |source| WarmError::System { what, source }
}

/// Where warm proxies of this node and user are given away.
pub fn node_socket() -> Result<PathBuf, WarmError> {
    Ok(node_folder()?.join("socket"))
}

fn node_folder() -> Result<PathBuf, WarmError> {
    let folder = Jobs::open()?.dir().with_file_name("warm");
    private_dir(&folder, rustix::process::geteuid().as_raw())?;
    Ok(folder)
}

/// Until when they are kept.
#[derive(Debug)]
pub enum Keeping {
    /// Until it is told to stop: for all jobs on this node.
    Node,
    /// Until the job's supervisor ends, which has handed over the end of a connection as this
    /// descriptor, and the socket to listen on as the next.
    Job(RawFd),
}

/// Keeps `count` proxies of each kind ready, until it is told to stop. Takes this process over.
pub fn keep(
    kinds: Vec<Kind>,
    count: usize,
    keeping: &Keeping,
    say: impl Fn(&str) + Send + Sync + 'static,
) -> Result<(), WarmError> {
    let say: Say = Arc::new(say);
    let (listener, owner, _lock) = match keeping {
        Keeping::Node => {
            let (listener, lock) = listen_for_node()?;
            (listener, None, Some(lock))
        }
        Keeping::Job(first) => {
            let [owner, listener] = handed(*first).ok_or(WarmError::NotHanded(*first))?;
            // Keeps no directory busy.
            let _ = std::env::set_current_dir("/");
            (UnixListener::from(listener), Some(owner), None)
        }
    };
    let pools = kinds.into_iter().map(|kind| Pool::keep(kind, count, say.clone()));
    let pools = pools.collect::<io::Result<Vec<_>>>().map_err(system("start a thread"))?;
    let server = Server { pools: pools.into() };
    let pools = server.pools.clone();
    // Until it is told to stop.
    let accept = move || {
        Service::new("answer", LIMITS).serve(&listener, move |asker| {
            // An asker that has gone needs no answer.
            let _ = server.answer(asker);
        })
    };
    let accepting = thread::Builder::new().name("accept".into()).spawn(accept);
    let accepting = accepting.map_err(system("start a thread"))?;
    match owner {
        Some(owner) => until_closed(&owner),
        None => drop(accepting.join()),
    }
    pools.iter().for_each(|pool| pool.end());
    Ok(())
}

fn listen_for_node() -> Result<(UnixListener, File), WarmError> {
    let folder = node_folder()?;
    let lock = File::options().write(true).create(true).truncate(false).open(folder.join("lock"));
    let lock = lock.map_err(system("make a lock"))?;
    if !try_lock(&lock) {
        return Err(WarmError::Running);
    }
    let socket = folder.join("socket");
    // What one that was killed has left.
    let _ = fs::remove_file(&socket);
    let listener = kedge_socket::address::listen(&socket).map_err(system("listen"))?;
    fs::set_permissions(&socket, PermissionsExt::from_mode(0o600)).map_err(system("listen"))?;
    Ok((listener, lock))
}

/// The descriptors that this process was started with under these numbers.
fn handed(first: RawFd) -> Option<[OwnedFd; 2]> {
    let is_socket = |fd: RawFd| {
        fs::read_link(format!("/proc/self/fd/{fd}"))
            .is_ok_and(|link| link.to_string_lossy().starts_with("socket:"))
    };
    let next = first.checked_add(1)?;
    if first < 3 || !is_socket(first) || !is_socket(next) {
        return None;
    }
    // SAFETY: both are open, above the standard ones and handed to this process, which has made no
    // sockets.
    let both = unsafe { [OwnedFd::from_raw_fd(first), OwnedFd::from_raw_fd(next)] };
    // What the user's shell left open is not held here: a pipe would keep its reader waiting.
    // SAFETY: a plain call; nothing of this process is open beyond both.
    unsafe { libc::syscall(libc::SYS_close_range, next + 1, libc::c_uint::MAX, 0) };
    both.iter()
        .try_for_each(|fd| rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::CLOEXEC))
        .ok()?;
    Some(both)
}

/// Returns when the other end is gone.
fn until_closed(owner: &OwnedFd) {
    let events = libc::POLLRDHUP;
    let mut fd = libc::pollfd { fd: owner.as_raw_fd(), events, revents: 0 };
    // SAFETY: one pollfd, alive for the call.
    while unsafe { libc::poll(&raw mut fd, 1, -1) } <= 0 {}
}

#[derive(Clone)]
struct Server {
    pools: Arc<[Arc<Pool>]>,
}

impl Server {
    fn answer(&self, asker: &Asker) -> Result<(), SocketError> {
        let (order, _) = asker.request::<Ask>()?;
        match order {
            Ask::Take { kind, wait_ms } => {
                let limit = Duration::from_millis(wait_ms.into()).min(MAX_WAIT);
                match self.find(&kind, limit) {
                    // One that does not arrive ends: nobody else has its socket.
                    Ok(Waiting { pid, control, process }) => {
                        let fds = [control.socket(), process.as_fd()];
                        asker.reply(&Reply::Ready { pid }, &fds)
                    }
                    Err(why) => asker.reply(&Reply::No { why: Text::truncated(why) }, &[]),
                }
            }
            Ask::Status {} => {
                let all: Vec<PoolStatus> = self.pools.iter().map(|pool| pool.status()).collect();
                let text = serde_json::to_string(&all).unwrap_or_default();
                asker.reply(&Reply::Status { pools: Text::truncated(text) }, &[])
            }
            Ask::Stop {} => {
                self.pools.iter().for_each(|pool| pool.end());
                let _ = asker.reply(&Reply::Yes {}, &[]);
                std::process::exit(0)
            }
        }
    }

    /// A proxy for a job that wants this kind, or why there is none.
    fn find(&self, kind: &str, limit: Duration) -> Result<Waiting, String> {
        let wanted: Kind = serde_json::from_str(kind)
            .map_err(|_| "the job is of another version of kedge".to_owned())?;
        let mut why = "none are kept".to_owned();
        for pool in self.pools.iter() {
            match pool.kind.unfit_for(&wanted) {
                Some(reason) => why = reason,
                None => {
                    // One may have ended a moment ago.
                    let found = std::iter::from_fn(|| pool.take(limit)).find(Waiting::lives);
                    return found.ok_or_else(|| match pool.status().failure {
                        Some(failure) => format!("none is ready: {failure}"),
                        None => "none is ready as yet".to_owned(),
                    });
                }
            }
        }
        Err(why)
    }
}

/// What is kept on this node, or for the job `name` alone.
pub fn status(name: Option<&JobName>) -> Result<Vec<PoolStatus>, WarmError> {
    let reply = match name {
        None => ask_node(&Ask::Status {}),
        Some(name) => ask_at(&Jobs::open()?.warm_path(name), &Ask::Status {}),
    };
    match reply? {
        Reply::Status { pools } => serde_json::from_str(&pools).map_err(|_| WarmError::Nonsense),
        _ => Err(WarmError::Nonsense),
    }
}

/// Ends what keeps proxies ready on this node, and those that are.
pub fn stop() -> Result<(), WarmError> {
    match ask_node(&Ask::Stop {})? {
        Reply::Yes {} => Ok(()),
        _ => Err(WarmError::Nonsense),
    }
}

fn ask_node(question: &Ask) -> Result<Reply, WarmError> {
    ask_at(&node_socket()?, question)
}

fn ask_at(socket: &Path, question: &Ask) -> Result<Reply, WarmError> {
    let nobody = |error: &io::Error| {
        matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
    };
    match ask(socket, question, REQUEST_TIMEOUT) {
        Err(SocketError::System(error)) if nobody(&error) => Err(WarmError::None),
        answer => Ok(answer?.0),
    }
}
