//! Message queues of whose next message a process is to be told: it asks again.

use crate::inject::Parasite;
use crate::state::{COOKIE, Means, ProcessState};
use crate::{EngineError, Thread};

/// Bytes of `struct sigevent`.
const EVENT: usize = 64;

/// Has a process that is made anew ask for what `state` tells of.
pub(super) fn ask(
    state: &ProcessState,
    thread: &mut Thread,
    parasite: &Parasite,
) -> Result<(), EngineError> {
    for notice in &state.notices {
        let at = parasite.data();
        let (what, arguments) = ("ask to be told of a message again", [notice.queue as u64, at]);
        let request = request(&notice.by, at);
        parasite.call_with(thread, what, libc::SYS_mq_notify, &arguments, &request)?;
    }
    Ok(())
}

/// The bytes of a request that lies at the address `at`: a `struct sigevent`, and behind it what
/// that points to.
pub(crate) fn request(by: &Means, at: u64) -> Vec<u8> {
    let (value, signal, means, cookie): (u64, i32, i32, &[u8]) = match by {
        Means::Nothing => (0, 0, libc::SIGEV_NONE, &[]),
        Means::Signal(signal) => (0, *signal, libc::SIGEV_SIGNAL, &[]),
        Means::Thread { socket, cookie } => {
            (at + EVENT as u64, *socket, libc::SIGEV_THREAD, &cookie.0)
        }
    };
    let mut request = Vec::with_capacity(EVENT + COOKIE);
    request.extend(value.to_ne_bytes());
    request.extend(signal.to_ne_bytes());
    request.extend(means.to_ne_bytes());
    request.resize(EVENT, 0);
    request.extend(cookie);
    request
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::Hex;

    #[test]
    fn a_request_is_laid_out_as_the_kernel_has_it() {
        // SAFETY: zeros are a valid structure.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        (event.sigev_signo, event.sigev_notify) = (10, libc::SIGEV_SIGNAL);
        // SAFETY: the structure is that long, and all of it was set.
        let bytes: [u8; EVENT] = unsafe { std::mem::transmute(event) };
        assert_eq!(request(&Means::Signal(10), 0x1000), bytes);
        let cookie = Hex(vec![7; COOKIE]);
        let told = request(&Means::Thread { socket: 5, cookie }, 0x1000);
        assert_eq!(told[..8], 0x1040u64.to_ne_bytes());
        assert_eq!((&told[8..12], &told[12..16]), (&5i32.to_ne_bytes()[..], &[2, 0, 0, 0][..]));
        assert_eq!(told[EVENT..], [7; COOKIE]);
    }
}
