//! The client's side of replies: taking a slot, waiting on it, copying the reply out.

use crate::futex;
use crate::layout::{INLINE_WORDS, MAX_REPLY, SLOTS, SPILL_OFFSET, Slot, slot_state};
use crate::memory::Segment;
use crate::spin::Spin;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long a sleeping caller waits before it asks again whether the proxy lives.
pub(crate) const LIVENESS_SLICE: Duration = Duration::from_millis(100);
/// How long a caller spins for its reply, unless it is told otherwise.
pub(crate) const REPLY_SPIN: Duration = Duration::from_micros(40);

/// Which reply slots are taken by threads of this process.
#[derive(Debug, Default)]
pub(crate) struct SlotMap {
    taken: [AtomicU64; SLOTS / 64],
}

impl SlotMap {
    /// Takes a free slot; `None` while all are taken.
    pub(crate) fn take(&self) -> Option<u32> {
        for (index, taken) in self.taken.iter().enumerate() {
            let mut now = taken.load(Ordering::Relaxed);
            while now != u64::MAX {
                let bit = now.trailing_ones();
                match taken.compare_exchange_weak(
                    now,
                    now | 1 << bit,
                    Ordering::Acquire,
                    Ordering::Relaxed,
                ) {
                    Ok(_) => return Some(index as u32 * 64 + bit),
                    Err(other) => now = other,
                }
            }
        }
        None
    }

    pub(crate) fn give_back(&self, slot: u32) {
        let (index, bit) = (slot as usize / 64, slot % 64);
        self.taken[index].fetch_and(!(1 << bit), Ordering::Release);
    }
}

/// Waits until the proxy has answered in `slot`, spinning for `patience` at first; false when it
/// died.
pub(crate) fn wait_ready(slot: &Slot, patience: Duration, alive: impl Fn() -> bool) -> bool {
    let ready = || slot.state.load(Ordering::Acquire) == slot_state::READY;
    let mut spin = Spin::new(patience);
    while !ready() {
        if spin.again() {
            continue;
        }
        let _ = slot.state.compare_exchange(
            slot_state::PENDING,
            slot_state::SLEEPING,
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        while !ready() {
            futex::wait(&slot.state, slot_state::SLEEPING, Some(LIVENESS_SLICE));
            // It may have answered and then died: the answer counts.
            if !ready() && !alive() && !ready() {
                return false;
            }
        }
    }
    true
}

/// Copies the reply in slot number `index` out; `None` where its length is nonsense.
pub(crate) fn copy_reply(segment: &Segment, index: u32, out: &mut Vec<u8>) -> Option<()> {
    let slot = &segment.header().slots[index as usize];
    let len = slot.len.load(Ordering::Relaxed) as usize;
    out.clear();
    if len > MAX_REPLY {
        return None;
    }
    if len > INLINE_WORDS * 8 {
        return read_spill(segment, index, len, out);
    }
    for word in &slot.words[..len.div_ceil(8)] {
        out.extend_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
    }
    out.truncate(len);
    Some(())
}

fn read_spill(segment: &Segment, index: u32, len: usize, out: &mut Vec<u8>) -> Option<()> {
    let fd = segment.fd().as_raw_fd();
    let start = (SPILL_OFFSET + u64::from(index) * MAX_REPLY as u64) as libc::off_t;
    out.resize(len, 0);
    let mut done = 0;
    while done < len {
        let rest = &mut out[done..];
        // SAFETY: pread writes at most `rest.len()` bytes into a live slice.
        let n = unsafe {
            libc::pread(fd, rest.as_mut_ptr().cast(), rest.len(), start + done as libc::off_t)
        };
        match n {
            1.. => done += n as usize,
            _ if n < 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EINTR) => {}
            _ => return None,
        }
    }
    let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: gives the pages back; a failure only keeps them.
    unsafe { libc::fallocate(fd, hole, start, len as libc::off_t) };
    Some(())
}
