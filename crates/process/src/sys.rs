//! ptrace and its companions, typed.

use crate::EngineError;
use libc::{c_long, c_void, pid_t};
use std::io;

pub(crate) type Registers = libc::user_regs_struct;

/// Requests that the libc crate does not name on every target.
const GETSIGMASK: u32 = 0x420a;
const SETSIGMASK: u32 = 0x420b;

/// What a traced thread has stopped for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// At a system call's entry or exit.
    Syscall,
    /// An event such as a clone; or, with `PTRACE_EVENT_STOP`, nothing but being stopped.
    Event(i32),
    /// About to take this signal.
    Signal(i32),
}

fn checked(pid: pid_t, what: &'static str, result: c_long) -> Result<(), EngineError> {
    if result >= 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        e if e.raw_os_error() == Some(libc::ESRCH) => Err(EngineError::Ended { pid }),
        source => Err(EngineError::System { pid, what, source }),
    }
}

/// A request without memory of ours.
pub(crate) fn request(
    request: u32,
    pid: pid_t,
    data: usize,
    what: &'static str,
) -> Result<(), EngineError> {
    // SAFETY: callers pass requests whose address is unused and whose data is a number.
    checked(pid, what, unsafe { libc::ptrace(request, pid, 0usize, data) })
}

pub(crate) fn registers(pid: pid_t) -> Result<Registers, EngineError> {
    let mut registers = std::mem::MaybeUninit::<Registers>::zeroed();
    // SAFETY: the kernel fills the structure, which is plain data anyway.
    unsafe {
        let result = libc::ptrace(libc::PTRACE_GETREGS, pid, 0usize, registers.as_mut_ptr());
        checked(pid, "read its registers", result)?;
        Ok(registers.assume_init())
    }
}

pub(crate) fn set_registers(pid: pid_t, registers: &Registers) -> Result<(), EngineError> {
    // SAFETY: the kernel reads the structure.
    let result = unsafe { libc::ptrace(libc::PTRACE_SETREGS, pid, 0usize, &raw const *registers) };
    checked(pid, "set its registers", result)
}

pub(crate) fn signal_mask(pid: pid_t) -> Result<u64, EngineError> {
    let mut mask = 0u64;
    // SAFETY: the kernel stores 8 bytes, as the address argument says.
    let result = unsafe { libc::ptrace(GETSIGMASK, pid, 8usize, &raw mut mask) };
    checked(pid, "read its signal mask", result).map(|()| mask)
}

pub(crate) fn set_signal_mask(pid: pid_t, mask: u64) -> Result<(), EngineError> {
    // SAFETY: the kernel reads 8 bytes, as the address argument says.
    let result = unsafe { libc::ptrace(SETSIGMASK, pid, 8usize, &raw const mask) };
    checked(pid, "set its signal mask", result)
}

/// The number that belongs to the event that `pid` has stopped for.
pub(crate) fn event_message(pid: pid_t) -> Result<pid_t, EngineError> {
    let mut message = 0u64;
    // SAFETY: the kernel stores one word.
    let result = unsafe { libc::ptrace(libc::PTRACE_GETEVENTMSG, pid, 0usize, &raw mut message) };
    checked(pid, "read its event", result).map(|()| message as pid_t)
}

/// Waits until `pid` stops; an error if it ends instead.
pub(crate) fn wait(pid: pid_t) -> Result<Stop, EngineError> {
    let mut status = 0;
    loop {
        // SAFETY: waitpid stores the status.
        let result = unsafe { libc::waitpid(pid, &mut status, libc::__WALL) };
        if result == pid {
            break;
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return Err(EngineError::Ended { pid });
        }
    }
    if !libc::WIFSTOPPED(status) {
        return Err(EngineError::Ended { pid });
    }
    Ok(match (libc::WSTOPSIG(status), status >> 16) {
        (signal, 0) if signal == libc::SIGTRAP | 0x80 => Stop::Syscall,
        (signal, 0) => Stop::Signal(signal),
        (_, event) => Stop::Event(event),
    })
}

/// Reads the memory of `pid` at `address`; how many bytes there were.
pub(crate) fn read(pid: pid_t, address: u64, into: &mut [u8]) -> Result<usize, EngineError> {
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast::<c_void>(), iov_len: into.len() };
    let remote = libc::iovec { iov_base: address as *mut c_void, iov_len: into.len() };
    // SAFETY: the local vector is `into`; the remote one is the kernel's to check.
    let count = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    checked(pid, "read its memory", count as c_long)?;
    Ok(count as usize)
}
