//! One call of a program, which its thread waits for.

use super::Table;
use crate::proc::Status;
use crate::sys;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{SendFlags, bind, connect, getpeername, getsockname, sendto, sockopt};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

/// ioctls of linux/seccomp.h.
const RECEIVE: libc::c_ulong = 0xc050_2100;
const SEND: libc::c_ulong = 0xc018_2101;
const CONTINUE: u32 = 1;
/// Longest datagram, in bytes.
const MAX_DATAGRAM_LEN: usize = 64 << 10;
/// Of struct sockaddr_in and struct sockaddr_in6.
const FOUR: usize = 16;
const SIX: usize = 28;

/// struct seccomp_notif
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Call {
    id: u64,
    tid: u32,
    flags: u32,
    number: i32,
    arch: u32,
    instruction: u64,
    arguments: [u64; 6],
}

/// struct seccomp_notif_resp
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Answer {
    id: u64,
    value: i64,
    error: i32,
    flags: u32,
}

/// What becomes of a call.
type Done = Result<i64, Errno>;

/// Hears one call, and answers it now or, where that may take long, later.
pub(super) fn answer(listener: &OwnedFd, table: &'static Table) {
    let mut call = Call::default();
    // SAFETY: `listener` is open, and the kernel stores one structure of this form, 80 bytes as the
    // number says; it wants it zeroed.
    let heard = unsafe { libc::ioctl(listener.as_raw_fd(), RECEIVE, &raw mut call) };
    // Whoever called has ended, or was interrupted.
    if heard != 0 {
        return;
    }
    let sends = [libc::SYS_connect, libc::SYS_sendto].contains(&i64::from(call.number));
    let Ok(own) = listener.try_clone() else { return reply(listener, &call, None) };
    if !sends {
        return reply(listener, &call, perform(&call, table));
    }
    let thread = std::thread::Builder::new().name("address".into());
    let later = thread.spawn(move || reply(&own, &call, perform(&call, table)));
    if later.is_err() {
        reply(listener, &call, Some(Err(Errno::AGAIN)));
    }
}

/// `None`: the kernel goes on with the call as it is.
fn reply(listener: &OwnedFd, call: &Call, done: Option<Done>) {
    let mut answer = Answer { id: call.id, ..Answer::default() };
    match done {
        None => answer.flags = CONTINUE,
        Some(Ok(value)) => answer.value = value,
        Some(Err(error)) => answer.error = -error.raw_os_error(),
    }
    // SAFETY: `listener` is open, and the kernel reads one structure of this form, 24 bytes as the
    // number says. Whoever does not wait any more hears nothing.
    unsafe { libc::ioctl(listener.as_raw_fd(), SEND, &raw mut answer) };
}

fn perform(call: &Call, table: &Table) -> Option<Done> {
    let [_, second, third, fourth, fifth, sixth] = call.arguments;
    let socket = socket(call)?;
    let tcp = sockopt::socket_type(&socket).ok()? == rustix::net::SocketType::STREAM;
    let to = |at, length| address(call, at, length).and_then(|to| translated(table, tcp, to));
    match i64::from(call.number) {
        libc::SYS_connect => {
            let to = to(second, third)?;
            Some(connect(&socket, &to).map(|()| 0))
        }
        libc::SYS_bind => {
            let to = to(second, third)?;
            Some(bind(&socket, &to).map(|()| 0))
        }
        libc::SYS_sendto if !tcp => {
            let to = to(fifth, sixth)?;
            let length =
                usize::try_from(third).ok().filter(|length| *length <= MAX_DATAGRAM_LEN)?;
            let mut data = vec![0; length];
            if sys::read(call.tid as i32, second, &mut data).ok()? != length {
                return None;
            }
            let flags = SendFlags::from_bits_retain(fourth as u32);
            Some(sendto(&socket, &data, flags, &to).map(|sent| sent as i64))
        }
        libc::SYS_getsockname => {
            let found = SocketAddr::try_from(getsockname(&socket).ok()?).ok()?;
            tell(call, second, third, back(table, found)?)
        }
        libc::SYS_getpeername => {
            let found = SocketAddr::try_from(getpeername(&socket).ok()??).ok()?;
            tell(call, second, third, back(table, found)?)
        }
        _ => None,
    }
}

/// A descriptor of our own for the socket that the call names.
fn socket(call: &Call) -> Option<OwnedFd> {
    let process = Status::of(call.tid as i32).ok()?.decimal("Tgid");
    let pid = Pid::from_raw(i32::try_from(process).ok()?)?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    pidfd_getfd(&pidfd, call.arguments[0] as i32, PidfdGetfdFlags::empty()).ok()
}

fn translated(table: &Table, tcp: bool, to: SocketAddr) -> Option<SocketAddr> {
    let plain = SocketAddr::new(to.ip().to_canonical(), to.port());
    Some(as_family(table.now(tcp, plain)?, to))
}

fn back(table: &Table, found: SocketAddr) -> Option<SocketAddr> {
    let plain = SocketAddr::new(found.ip().to_canonical(), found.port());
    Some(as_family(table.before(plain)?, found))
}

/// The same address in the form that `like` has.
fn as_family(address: SocketAddr, like: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(four) if like.is_ipv6() => {
            SocketAddr::new(four.to_ipv6_mapped().into(), address.port())
        }
        _ => address,
    }
}

/// The address that the program has at `at`, if it is one of IP.
fn address(call: &Call, at: u64, length: u64) -> Option<SocketAddr> {
    let mut bytes = [0; SIX];
    let length = usize::try_from(length).ok()?.min(SIX);
    if length < FOUR || sys::read(call.tid as i32, at, &mut bytes[..length]).ok()? != length {
        return None;
    }
    parse(&bytes[..length])
}

fn parse(bytes: &[u8]) -> Option<SocketAddr> {
    let port = u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?);
    match i32::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?)) {
        libc::AF_INET => {
            let four: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
            Some(SocketAddr::from((four, port)))
        }
        libc::AF_INET6 => {
            let six: [u8; 16] = bytes.get(8..24)?.try_into().ok()?;
            let scope = bytes.get(24..28).and_then(|scope| scope.try_into().ok());
            let scope = scope.map_or(0, u32::from_ne_bytes);
            Some(SocketAddrV6::new(six.into(), port, 0, scope).into())
        }
        _ => None,
    }
}

/// struct sockaddr_in or struct sockaddr_in6.
fn bytes(address: SocketAddr) -> Vec<u8> {
    let family = if address.is_ipv6() { libc::AF_INET6 } else { libc::AF_INET };
    let mut bytes = (family as u16).to_ne_bytes().to_vec();
    bytes.extend(address.port().to_be_bytes());
    match address {
        SocketAddr::V4(four) => {
            bytes.extend(four.ip().octets());
            bytes.extend([0; 8]);
        }
        SocketAddr::V6(six) => {
            bytes.extend(six.flowinfo().to_be_bytes());
            bytes.extend(six.ip().octets());
            bytes.extend(six.scope_id().to_ne_bytes());
        }
    }
    bytes
}

/// Stores `address` where a question for a name wants it, cut to the room that is there.
fn tell(call: &Call, at: u64, length_at: u64, address: SocketAddr) -> Option<Done> {
    let (tid, bytes) = (call.tid as i32, bytes(address));
    let mut room = [0; 4];
    if sys::read(tid, length_at, &mut room).ok()? != room.len() {
        return None;
    }
    let room = usize::try_from(i32::from_ne_bytes(room)).ok()?.min(bytes.len());
    let stored = sys::write(tid, at, &bytes[..room])
        .and_then(|()| sys::write(tid, length_at, &(bytes.len() as u32).to_ne_bytes()));
    Some(stored.map(|()| 0).map_err(|_| Errno::FAULT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_are_as_long_as_the_kernels_and_addresses_come_back() {
        assert_eq!((size_of::<Call>(), size_of::<Answer>()), (80, 24));
        for text in ["10.1.2.3:80", "[fd79:1::2]:7", "[::ffff:10.1.2.3]:65535"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(parse(&bytes(address)), Some(address));
        }
        assert_eq!(parse(&[1, 0, 0]), None);
        assert_eq!(parse(&[0; SIX]), None);
        let mut table = Table::default();
        table.host("10.1.0.1".parse().unwrap(), "10.2.0.1".parse().unwrap());
        let mapped = translated(&table, true, "[::ffff:10.1.0.1]:9".parse().unwrap());
        assert_eq!(mapped, Some("[::ffff:10.2.0.1]:9".parse().unwrap()));
    }
}
