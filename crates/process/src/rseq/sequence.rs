//! Where a thread goes on that was stopped inside of a restartable sequence.

use super::{AREA, Registration, SIGNATURE, places, told};
use crate::inject::read_exact;
use crate::maps;
use crate::sys::{self, Registers};
use libc::pid_t;
use std::ops::Range;

/// Offset of `rseq_cs` in struct rseq, which points to the sequence that the thread is in.
const SEQUENCE: usize = 8;
/// Offset of its flags.
const FLAGS: usize = 16;
/// Flags that there are.
const KNOWN_FLAGS: u32 = 7;
/// Most processors that a kernel can have.
const MAX_PROCESSORS: u32 = 8192;

/// Returns what the kernel tells of a stopped thread's area, and where it goes on if it is inside
/// of a restartable sequence: by its abort handler, as after any interruption. The kernel forgets
/// the sequence at the first call that the thread is made to do elsewhere, so this is asked before.
///
/// `registers` are those with which it has stopped.
pub(crate) fn look(pid: pid_t, registers: &Registers) -> (Option<Registration>, Option<u64>) {
    match told(pid) {
        Ok(Some(registration)) => (Some(registration), abort_of(pid, registration, registers)),
        Ok(None) => (None, untold(pid, registers)),
        Err(_) => (None, None),
    }
}

fn abort_of(pid: pid_t, area: Registration, registers: &Registers) -> Option<u64> {
    // A sequence makes no calls.
    if area.address == 0 || registers.orig_rax as i64 >= 0 {
        return None;
    }
    let mut at = [0; 8];
    read_exact(pid, area.address.checked_add(SEQUENCE as u64)?, &mut at).ok()?;
    Sequence::at(pid, u64::from_le_bytes(at))?.abort_from(registers.rip)
}

/// The same where the kernel does not tell the area: it is where a pointer to a sequence lies that
/// the thread is in, which begins with the signature's place before its abort handler.
pub(super) fn untold(pid: pid_t, registers: &Registers) -> Option<u64> {
    // A sequence makes no calls.
    if registers.orig_rax as i64 >= 0 {
        return None;
    }
    let mappings = maps::of(pid).ok()?;
    let around = places::around(&mappings, registers.fs_base);
    around.into_iter().chain(places::data(&mappings)).find_map(|Range { start, end }| {
        let mut bytes = vec![0; (end - start) as usize];
        let there = sys::read(pid, start, &mut bytes).ok()?;
        let areas = bytes[..there].chunks_exact(AREA as usize);
        areas.filter_map(sequence_in).find_map(|at| {
            let sequence = Sequence::at(pid, at)?;
            let abort = sequence.abort_from(registers.rip)?;
            sequence.is_signed(pid).then_some(abort)
        })
    })
}

/// The address of the sequence that an area points to, if these are the bytes of one.
fn sequence_in(area: &[u8]) -> Option<u64> {
    let number = |at: usize| Some(u32::from_le_bytes(*area.get(at..)?.first_chunk()?));
    let (start, processor, flags) = (number(0)?, number(4)?, number(FLAGS)?);
    let shaped = start == processor && processor < MAX_PROCESSORS && flags & !KNOWN_FLAGS == 0;
    let at = u64::from_le_bytes(*area.get(SEQUENCE..)?.first_chunk()?);
    (shaped && at != 0 && at < maps::TOP).then_some(at)
}

/// struct rseq_cs.
struct Sequence {
    start: u64,
    length: u64,
    abort: u64,
}

impl Sequence {
    /// The one at `at`; `None` for none.
    fn at(pid: pid_t, at: u64) -> Option<Sequence> {
        if at == 0 {
            return None;
        }
        // Version and flags, start, length, abort handler.
        let mut bytes = [0; 32];
        read_exact(pid, at, &mut bytes).ok()?;
        let words = bytes.as_chunks::<8>().0;
        let [start, length, abort] = [1, 2, 3].map(|index| u64::from_le_bytes(words[index]));
        Some(Sequence { start, length, abort })
    }

    /// Its abort handler, if `rip` is inside of it.
    fn abort_from(&self, rip: u64) -> Option<u64> {
        (rip.wrapping_sub(self.start) < self.length).then_some(self.abort)
    }

    /// Whether the signature lies where the kernel looks for it: before the abort handler.
    fn is_signed(&self, pid: pid_t) -> bool {
        let mut signature = [0; 4];
        let read = read_exact(pid, self.abort.wrapping_sub(4), &mut signature);
        read.is_ok() && u32::from_le_bytes(signature) == SIGNATURE
    }
}
