//! Room in a connection for what its sender still holds.

use crate::plugins::sockets::options::SO_BUF_LOCK;
use crate::plugins::sys;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::net::{RecvFlags, recv};
use std::io;
use std::time::{Duration, Instant};

/// How long nothing may arrive before it is given up: the kernel may hold a part of a segment for
/// 200 ms.
const STILL: Duration = Duration::from_secs(1);
/// The same where the sender will only then ask again whether there is room.
const MAX_STILL: Duration = Duration::from_secs(4);
/// Between two looks.
const TICK: Duration = Duration::from_micros(50);
/// The bit of `SO_BUF_LOCK` for the receiving buffer.
const RECEIVING: i32 = 2;

/// A receiver whose buffer is larger until this is dropped.
///
/// Neither making nor dropping it allocates.
#[derive(Debug)]
pub(super) struct Room<'a> {
    receiver: BorrowedFd<'a>,
    size: i32,
    /// Which sizes the program has chosen; `None`: the kernel (before 5.14) does not tell.
    lock: Option<i32>,
    clamp: Option<i32>,
}

impl Room<'_> {
    /// Makes room for `bytes` in all, as far as the kernel allows it.
    pub(super) fn for_all(receiver: BorrowedFd<'_>, bytes: usize) -> Room<'_> {
        let socket = |name| sys::socket_number(receiver, libc::SOL_SOCKET, name).unwrap_or(0);
        let size = socket(libc::SO_RCVBUF);
        let lock = sys::socket_number(receiver, libc::SOL_SOCKET, SO_BUF_LOCK).ok();
        let clamp = sys::socket_number(receiver, libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP).ok();
        let room = Room { receiver, size, lock, clamp };
        // The kernel doubles it once more, for what a buffer takes beside the bytes themselves.
        let wanted = i32::try_from(bytes.saturating_mul(2)).unwrap_or(i32::MAX / 2);
        if room.set(libc::SO_RCVBUFFORCE, wanted).is_err() {
            let _ = room.set(libc::SO_RCVBUF, wanted);
            if socket(libc::SO_RCVBUF) < wanted {
                room.grow_by_low_water_mark(bytes);
            }
        }
        let _ = room.set_tcp(libc::TCP_WINDOW_CLAMP, wanted);
        room
    }

    /// Leaves a fresh connection the room, which the kernel may change from then on.
    pub(super) fn leave(self) {
        let _ = self.set(SO_BUF_LOCK, self.lock.unwrap_or(0));
        std::mem::forget(self);
    }

    /// Has an ordinary user's buffer grow past `net.core.rmem_max`: a reader who asks to be woken
    /// at so many bytes gets room for them.
    fn grow_by_low_water_mark(&self, bytes: usize) {
        let before = sys::socket_number(self.receiver, libc::SOL_SOCKET, libc::SO_RCVLOWAT);
        let _ = self.set(SO_BUF_LOCK, self.lock.unwrap_or(0) & !RECEIVING);
        let _ = self.set(libc::SO_RCVLOWAT, i32::try_from(bytes).unwrap_or(i32::MAX));
        let _ = self.set(libc::SO_RCVLOWAT, before.unwrap_or(1));
    }

    fn set(&self, name: i32, value: i32) -> io::Result<()> {
        sys::set_socket_option(self.receiver, libc::SOL_SOCKET, name, &value.to_ne_bytes())
    }

    fn set_tcp(&self, name: i32, value: i32) -> io::Result<()> {
        sys::set_socket_option(self.receiver, libc::IPPROTO_TCP, name, &value.to_ne_bytes())
    }

    /// Has the kernel tell the sender of the room: it does so when somebody reads, and looking is
    /// enough.
    pub(super) fn announce(&self) {
        let _ = self.set_tcp(libc::TCP_QUICKACK, 1);
        let _ = recv(self.receiver, &mut [0u8; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        // Sizes are read doubled (socket(7)). One that the kernel chooses itself goes back as well:
        // it raises the clamp only when the buffer grows. An ordinary user may get a smaller one,
        // which grows again. Where the kernel cannot unlock it, the buffer stays as large as it is.
        if let Some(lock) = self.lock {
            let size = self.size / 2;
            let _ =
                self.set(libc::SO_RCVBUFFORCE, size).or_else(|_| self.set(libc::SO_RCVBUF, size));
            let _ = self.set(SO_BUF_LOCK, lock);
        }
        if let Some(clamp) = self.clamp {
            let _ = self.set_tcp(libc::TCP_WINDOW_CLAMP, clamp);
        }
    }
}

/// Lets what a sender holds arrive at its receiver, where nobody reads; tells how much has not.
///
/// `probe` is how long that may wait until it asks for room: too little of it to be worth an answer
/// of the receiver's is found out only so. `held` tells what the sender holds. Allocates nothing.
pub(super) fn let_through(
    receiver: impl AsFd,
    bytes: usize,
    probe: Duration,
    held: impl Fn() -> io::Result<usize>,
) -> io::Result<usize> {
    let room = Room::for_all(receiver.as_fd(), bytes);
    let still = match probe + STILL / 4 {
        asked if asked < MAX_STILL => asked.max(STILL),
        _ => STILL,
    };
    let (mut left, mut last) = (held()?, Instant::now());
    while left > 0 && last.elapsed() < still {
        room.announce();
        std::thread::sleep(TICK);
        let now = held()?;
        if now < left {
            (left, last) = (now, Instant::now());
        }
    }
    Ok(left)
}
