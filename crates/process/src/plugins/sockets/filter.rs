//! Filters of sockets (`SO_ATTACH_FILTER`): classic BPF programs, which the kernel tells back.

use crate::plugins::job::{Found, Job};
use crate::plugins::sys;
use rustix::fd::{AsFd, AsRawFd};
use rustix::io::Errno;
use std::io;

/// Most instructions of a program (`BPF_MAXINSNS`), of 8 bytes each.
const MAX_INSTRUCTIONS: usize = 4096;
const INSTRUCTION: usize = 8;

/// Returns the instructions of the socket's filter; `None` if it has none.
///
/// # Errors
///
/// `PermissionDenied`: it is no classic program, and cannot be read.
pub(crate) fn read(fd: impl AsFd) -> io::Result<Option<Vec<u8>>> {
    // Asked with no room, the kernel tells how many instructions there are; lengths are counted so.
    let count = match length_in_instructions(&fd, &mut []) {
        Ok(count) => count,
        Err(error) if error.raw_os_error() == Some(Errno::NOPROTOOPT.raw_os_error()) => 0,
        Err(error) => return Err(error),
    };
    if count == 0 {
        return Ok(None);
    }
    let mut program = vec![0; count.min(MAX_INSTRUCTIONS) * INSTRUCTION];
    length_in_instructions(&fd, &mut program)?;
    Ok(Some(program))
}

/// Why the filter of the socket `file` cannot be saved, asked before the job is stopped: who saves
/// it finds out then.
pub(crate) fn refusal(file: &Found, job: &Job) -> Option<String> {
    if job.patience.is_zero() {
        return None;
    }
    let fd = job.duplicate(file).ok()?;
    let refused = read(fd).err().filter(|e| e.kind() == io::ErrorKind::PermissionDenied);
    refused.map(|_| "it has an eBPF program as its filter (SO_ATTACH_BPF)".to_owned())
}

fn length_in_instructions(fd: impl AsFd, program: &mut [u8]) -> io::Result<usize> {
    let mut count = (program.len() / INSTRUCTION) as libc::socklen_t;
    let (fd, level) = (fd.as_fd().as_raw_fd(), libc::SOL_SOCKET);
    // SAFETY: the kernel stores at most `count` instructions, for which there is room; none if it
    // is 0.
    let result = unsafe {
        libc::getsockopt(fd, level, libc::SO_GET_FILTER, program.as_mut_ptr().cast(), &mut count)
    };
    match result {
        0 => Ok(count as usize),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives the socket this filter.
pub(crate) fn attach(fd: impl AsFd, program: &[u8]) -> io::Result<()> {
    let count = program.len() / INSTRUCTION;
    if count > MAX_INSTRUCTIONS || !program.len().is_multiple_of(INSTRUCTION) {
        return Err(Errno::INVAL.into());
    }
    let mut instructions: Vec<libc::sock_filter> = program
        .chunks_exact(INSTRUCTION)
        .map(|one| libc::sock_filter {
            code: u16::from_ne_bytes([one[0], one[1]]),
            jt: one[2],
            jf: one[3],
            k: u32::from_ne_bytes([one[4], one[5], one[6], one[7]]),
        })
        .collect();
    let filter = libc::sock_fprog { len: count as u16, filter: instructions.as_mut_ptr() };
    // SAFETY: the structure's bytes are read, and the instructions that it points to, which live
    // on.
    let bytes = unsafe {
        let length = size_of::<libc::sock_fprog>();
        std::slice::from_raw_parts((&raw const filter).cast::<u8>(), length)
    };
    sys::set_socket_option(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn a_filter_is_read_and_attached() {
        let (one, other) = (UdpSocket::bind("127.0.0.1:0"), UdpSocket::bind("127.0.0.1:0"));
        let (one, other) = (one.unwrap(), other.unwrap());
        assert_eq!(read(&one).unwrap(), None);
        // Two times "return 65535".
        let program = [6, 0, 0, 0, 0xff, 0xff, 0, 0].repeat(2);
        attach(&one, &program).unwrap();
        let found = read(&one).unwrap().unwrap();
        assert_eq!(found, program);
        attach(&other, &found).unwrap();
        assert_eq!(read(&other).unwrap().unwrap(), program);
        assert!(attach(&other, &program[1..]).is_err());
    }
}
