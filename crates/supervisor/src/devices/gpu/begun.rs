//! New proxies that bring devices back.

use super::ring::fill_ring;
use super::{LIMIT, Restart, Saved, failed, refused};
use crate::devices::proxies::{Proxy, ProxyId};
use kedge_control::proxy::{Answer, Control, ControlError, Order};
use kedge_image::FileEntry;
use kedge_process::plugins::{PluginError, World};
use kedge_wire::Text;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Between a proxy's last word and its end.
const ENDING: Duration = Duration::from_secs(2);

/// A proxy that brings a client's devices back.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) client: u32,
    pub(super) proxy: Arc<Proxy>,
}

/// Makes a client's connection and starts the proxy that brings its devices back.
pub(super) fn begin(
    saved: &Saved,
    world: &mut World,
    restart: &mut Restart,
) -> Result<Begun, PluginError> {
    let (near, far) = UnixStream::pair().map_err(failed("make a connection"))?;
    let ring = kedge_transport::create_ring().map_err(failed("make a ring"))?;
    let arena = kedge_transport::create_shared_arena().map_err(failed("make a shared arena"))?;
    fill_ring(&ring, saved, world)?;
    let again = |fd: &dyn AsFd| fd.as_fd().try_clone_to_owned().map_err(failed("duplicate it"));
    let sockets = saved.sockets.iter().map(|d| (*d, near.as_fd()));
    let rings = saved.rings.iter().map(|d| (*d, ring.as_fd()));
    let arenas = saved.arenas.iter().map(|d| (*d, arena.as_fd()));
    for (description, fd) in sockets.chain(rings).chain(arenas) {
        world.made(description, again(&fd)?)?;
    }
    if let Some(pages) = &saved.pages {
        super::pages::restore(pages, saved.pid, world)?;
    }
    let entry = restart.files.iter().find(|file| file.name == saved.file);
    let entry = entry.ok_or_else(|| PluginError::Damaged(format!("it lacks {}", saved.file)))?;
    let path = restart.folder.join(&entry.name);
    let started = restart.launch.provide(restart.warm.pop(), far.as_fd(), &["--restore"]);
    let proxy = started.map_err(failed("start a proxy"))?;
    let control = &proxy.control;
    let pid = saved.pid as u32;
    let held = restart.held.as_ref().and_then(|held| held.client(&saved.file));
    let given = match held {
        None => control.give(&restore_order(&path, entry), &[ring.as_fd(), arena.as_fd()]),
        Some(held) => control.give_parts(&held.parts).and_then(|()| {
            let fds = [ring.as_fd(), arena.as_fd(), held.memory.as_fd()];
            control.give(&restore_order(&path, &held.file), &fds)
        }),
    };
    given.map_err(|error| refused(pid, &error))?;
    Ok(Begun { client: pid, proxy })
}

impl Begun {
    /// Whether its proxy, a child of this process, has ended. /proc may not be this namespace's as
    /// yet.
    pub(super) fn has_ended(&self) -> bool {
        let ProxyId::Child(pid) = self.proxy.id else { return false };
        // SAFETY: plain data, for which zero is a value; the call fills it and leaves the child as
        // it is.
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            libc::waitid(libc::P_PID, pid, &raw mut info, flags) == 0 && info.si_pid() != 0
        }
    }
}

/// What a proxy that has ended says of it; else `other`. Its connections close a little before it
/// has ended.
pub(super) fn why_not(begun: &[Begun], other: PluginError) -> PluginError {
    let find = || begun.iter().find(|begun| begun.has_ended());
    let begin = Instant::now();
    let mut ended = find();
    while ended.is_none() && begin.elapsed() < ENDING {
        thread::sleep(Duration::from_millis(5));
        ended = find();
    }
    ended.map_or(other, |begun| refused(begun.client, &last_words(&begun.proxy.control)))
}

/// Why a proxy that has ended does not go on. It may have said before that all is well.
fn last_words(control: &Control) -> ControlError {
    loop {
        if let Err(error) = control.answer(LIMIT) {
            return error;
        }
    }
}

/// The client's process is there: its proxy serves it from now on.
pub(super) fn go_on(proxy: &Proxy, client: u32) -> Result<(), PluginError> {
    let order = Order::Begin { pid: client };
    let done = match (proxy.id, rustix::process::Pid::from_raw(client as i32)) {
        // It has another id in the proxy's namespace.
        (ProxyId::Warm(_), Some(pid)) => {
            let flags = rustix::process::PidfdFlags::empty();
            let process = rustix::process::pidfd_open(pid, flags).map_err(io::Error::from);
            let process = process.map_err(failed("open a process descriptor"))?;
            proxy.control.ask(&order, &[process.as_fd()], LIMIT)
        }
        _ => proxy.control.ask(&order, &[], LIMIT),
    };
    match done {
        Ok(Answer::Yes {}) => Ok(()),
        Ok(_) => Err(refused(client, &ControlError::Nonsense)),
        Err(error) => Err(refused(client, &error)),
    }
}

fn restore_order(path: &Path, entry: &FileEntry) -> Order {
    let path = Text::truncated(path.to_string_lossy().into_owned());
    Order::Restore { path, bytes: entry.bytes, checksum: entry.checksum }
}
