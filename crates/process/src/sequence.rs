//! Restartable sequences (rseq(2)).

use crate::inject::read_exact;
use crate::sys;
use libc::pid_t;

/// Offset of `rseq_cs` in struct rseq.
const SEQUENCE: u64 = 8;

/// Where a stopped thread at `rip` goes on that is inside of a restartable sequence: by its abort
/// handler, as after any interruption. The kernel forgets the sequence at the first call that the thread
/// is made to do elsewhere, so this is asked before. `None` outside of any.
pub(crate) fn abort_of(pid: pid_t, rip: u64) -> Option<u64> {
    let rseq = sys::rseq(pid).ok().filter(|rseq| rseq.address != 0)?;
    let mut at = [0; 8];
    read_exact(pid, rseq.address.checked_add(SEQUENCE)?, &mut at).ok()?;
    let at = u64::from_le_bytes(at);
    if at == 0 {
        return None;
    }
    // struct rseq_cs: version and flags, start, length, abort handler.
    let mut bytes = [0; 32];
    read_exact(pid, at, &mut bytes).ok()?;
    let words = bytes.as_chunks::<8>().0;
    let [start, length, abort] = [1, 2, 3].map(|index| u64::from_le_bytes(words[index]));
    (rip.wrapping_sub(start) < length).then_some(abort)
}
