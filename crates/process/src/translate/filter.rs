//! The filter that hands calls with addresses to the job's init.

use crate::filters::program::{ARCHITECTURE, Filter};
use crate::inject::Parasite;
use crate::{EngineError, Thread};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// Of struct seccomp_data: nr, arch, and the halves of the fifth argument.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const FIFTH: u32 = 16 + 4 * 8;

/// Calls that are handed over whatever their arguments are.
const CALLS: [i64; 4] =
    [libc::SYS_connect, libc::SYS_bind, libc::SYS_getsockname, libc::SYS_getpeername];

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// One instruction: what to do, how many to pass over if it holds or not, and a number.
type Instruction = (u16, u8, u8, u32);

fn program() -> Vec<Instruction> {
    let mut program = vec![(LOAD, 0, 0, ARCH), (IF_EQUAL, 1, 0, ARCHITECTURE)];
    program.push((RETURN, 0, 0, libc::SECCOMP_RET_ALLOW));
    program.push((LOAD, 0, 0, NUMBER));
    // The last two return; five questions come before them, of which sendto() is the last.
    for (at, call) in CALLS.iter().enumerate() {
        program.push((IF_EQUAL, (CALLS.len() - at + 5) as u8, 0, *call as u32));
    }
    program.push((IF_EQUAL, 0, 4, libc::SYS_sendto as u32));
    // Without an address it is send().
    program.push((LOAD, 0, 0, FIFTH));
    program.push((IF_EQUAL, 0, 3, 0));
    program.push((LOAD, 0, 0, FIFTH + 4));
    program.push((IF_EQUAL, 0, 1, 0));
    program.push((RETURN, 0, 0, libc::SECCOMP_RET_ALLOW));
    program.push((RETURN, 0, 0, libc::SECCOMP_RET_USER_NOTIF));
    program
}

/// Bytes of struct sock_fprog.
const HEAD: u64 = 16;

/// struct sock_fprog, and the instructions behind it, for a process that has them at `at`.
fn bytes(program: &[Instruction], at: u64) -> Vec<u8> {
    let mut bytes = (program.len() as u64).to_ne_bytes().to_vec();
    bytes.extend((at + HEAD).to_ne_bytes());
    for (code, yes, no, value) in program {
        bytes.extend(code.to_ne_bytes());
        bytes.extend([*yes, *no]);
        bytes.extend(value.to_ne_bytes());
    }
    bytes
}

/// Returns whether a filter is the one that [`install`] gives processes.
pub(crate) fn is_filter(filter: &Filter) -> bool {
    bytes(&program(), 0)[HEAD as usize..] == filter.program.0
}

/// Gives a process that is being rebuilt the filter; returns where its calls are heard. It has the
/// init's capabilities as yet, so that it needs no `PR_SET_NO_NEW_PRIVS`.
pub(crate) fn install(thread: &mut Thread, parasite: Parasite) -> Result<OwnedFd, EngineError> {
    const SET_MODE_FILTER: u64 = 1;
    let what = "have its calls with addresses translated";
    let data = bytes(&program(), parasite.data());
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    let arguments = [SET_MODE_FILTER, flags, parasite.data()];
    let number = parasite.call_with(thread, what, libc::SYS_seccomp, &arguments, &data)?;
    let pid = thread.pid();
    let failed = |error: rustix::io::Errno| EngineError::System { pid, what, source: error.into() };
    let id = Pid::from_raw(pid).ok_or(EngineError::Nonsense("a process without an id"))?;
    let pidfd = pidfd_open(id, PidfdFlags::empty()).map_err(failed)?;
    let listener = pidfd_getfd(&pidfd, number as i32, PidfdGetfdFlags::empty()).map_err(failed)?;
    parasite.call_with(thread, what, libc::SYS_close, &[number as u64], &[])?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::Hex;

    /// What the kernel would do.
    fn run(number: i64, arch: u32, fifth: u64) -> u32 {
        let program = Hex(bytes(&program(), 0)[HEAD as usize..].to_vec());
        let filter = Filter { program, log: false };
        filter.action(number, arch, [0, 0, 0, 0, fifth, 0], 0).expect("a program")
    }

    #[test]
    fn only_calls_with_addresses_are_handed_over() {
        let handed =
            |number, fifth| run(number, ARCHITECTURE, fifth) == libc::SECCOMP_RET_USER_NOTIF;
        for call in CALLS {
            assert!(handed(call, 0), "{call}");
            assert_eq!(run(call, 0x4000_0003, 0), libc::SECCOMP_RET_ALLOW);
        }
        assert!(!handed(libc::SYS_sendto, 0));
        assert!(handed(libc::SYS_sendto, 1) && handed(libc::SYS_sendto, 1 << 40));
        for call in [libc::SYS_read, libc::SYS_sendmsg, libc::SYS_accept4, libc::SYS_socket] {
            assert!(!handed(call, 1), "{call}");
        }
        assert_eq!(bytes(&program(), 0x1000)[8..16], 0x1010u64.to_ne_bytes());
    }
}
