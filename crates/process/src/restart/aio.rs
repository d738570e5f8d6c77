//! Kernel AIO contexts, made again: the kernel's own counters follow from what was submitted, so as
//! much is submitted and reaped as brings them to where they were. Then the ring moves to its
//! place.

use crate::aio::{self, Context, EVENT, HEAD, HEADER, Header};
use crate::inject::Parasite;
use crate::state::ProcessState;
use crate::sys;
use crate::{EngineError, Thread, inject};
use kedge_image::PAGE;

/// Requests that are submitted by one call.
const TOGETHER: u32 = 1024;
/// Bytes of `struct iocb`.
const REQUEST: usize = 64;
/// Offset of `iocb.aio_fildes`. Its operation is 0, a read, of nothing.
const FILE: usize = 20;

/// Makes the contexts that the process had, when all else is mapped.
pub(super) fn make(
    state: &ProcessState,
    thread: &mut Thread,
    parasite: Parasite,
) -> Result<(), EngineError> {
    if state.aio.is_empty() {
        return Ok(());
    }
    let arguments = [parasite.data(), libc::MFD_CLOEXEC.into()];
    let what = "make an empty file";
    let file = parasite.call_with(thread, what, libc::SYS_memfd_create, &arguments, b"kedge\0")?;
    for context in &state.aio {
        Making { context, thread, parasite, file: file as u32 }.make()?;
    }
    parasite.call(thread, "close it", libc::SYS_close, &[file as u64]).map(drop)
}

struct Making<'a> {
    context: &'a Context,
    thread: &'a mut Thread,
    parasite: Parasite,
    /// An empty file's descriptor in the process.
    file: u32,
}

impl Making<'_> {
    fn make(mut self) -> Result<(), EngineError> {
        let (pid, bytes) = (self.thread.pid(), self.context.ring_bytes);
        let ring = self.set_up()?;
        let Some(Header { events, head: 0, tail: 0 }) = Header::read(pid, ring, bytes)? else {
            let what = "this machine makes a ring of io_setup of another size than the one that it \
                        had: more processors may be possible here";
            return Err(EngineError::unsupported(pid, what));
        };
        let Context { ring_head, ring_tail, completions, .. } = self.context;
        let mut head = 0;
        while head < *ring_head {
            head += self.submit(ring, (*ring_head - head).min(events - 1))?;
            sys::write(pid, ring + HEAD, &head.to_le_bytes())?;
        }
        let mut waiting = aio::pending(*ring_head, *ring_tail, events);
        while waiting > 0 {
            waiting -= self.submit(ring, waiting)?;
        }
        for (index, event) in completions.0.chunks(EVENT as usize).enumerate() {
            let at = (u64::from(*ring_head) + index as u64) % u64::from(events);
            sys::write(pid, ring + HEADER + at * EVENT, event)?;
        }
        self.put_in_place(ring)?;
        let (head, tail) = (*ring_head, *ring_tail);
        match Header::read(pid, self.context.ring, bytes)? == Some(Header { events, head, tail }) {
            true => Ok(()),
            false => {
                Err(EngineError::unsupported(pid, "cannot turn a ring of io_setup to where it was"))
            }
        }
    }

    /// Makes a context whose ring is as long; where that is.
    fn set_up(&mut self) -> Result<u64, EngineError> {
        let what = "make an AIO context again (sysctl fs.aio-max-nr bounds them)";
        let arguments = [requests(self.context.ring_bytes), self.parasite.data()];
        self.parasite.call_with(self.thread, what, libc::SYS_io_setup, &arguments, &[0; 8])?;
        let mut ring = [0; 8];
        inject::read_exact(self.thread.pid(), self.parasite.data(), &mut ring)?;
        Ok(u64::from_le_bytes(ring))
    }

    /// Submits so many reads of nothing, which end at once, or fewer; how many.
    fn submit(&mut self, ring: u64, count: u32) -> Result<u32, EngineError> {
        let count = count.min(TOGETHER);
        let mut data = vec![0; REQUEST];
        data[FILE..FILE + 4].copy_from_slice(&self.file.to_le_bytes());
        let request = self.parasite.data().to_le_bytes();
        (0..count).for_each(|_| data.extend(request));
        let arguments = [ring, count.into(), self.parasite.data() + REQUEST as u64];
        let (what, call) = ("submit to an AIO context", libc::SYS_io_submit);
        let done = self.parasite.call_with(self.thread, what, call, &arguments, &data)?;
        match u32::try_from(done) {
            Ok(done) if (1..=count).contains(&done) => Ok(done),
            _ => {
                Err(EngineError::unsupported(self.thread.pid(), "cannot submit to an AIO context"))
            }
        }
    }

    fn put_in_place(&mut self, ring: u64) -> Result<(), EngineError> {
        let Context { ring: place, ring_bytes: bytes, .. } = *self.context;
        let moves = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
        let arguments = [ring, bytes, bytes, moves, place];
        let what = "move a ring of io_setup to its place";
        self.parasite.call(self.thread, what, libc::SYS_mremap, &arguments).map(drop)
    }
}

/// The fewest requests for which the kernel makes a ring of so many bytes: it makes one for twice
/// as many and two more (fs/aio.c, ioctx_alloc, aio_setup_ring).
fn requests(bytes: u64) -> u64 {
    let smaller = bytes.saturating_sub(PAGE) / EVENT;
    (smaller.saturating_sub(3) / 2 + 1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_requests_are_asked_for_as_make_the_ring_that_long() {
        let made = |requests: u64| (HEADER + (requests * 2 + 2) * EVENT).next_multiple_of(PAGE);
        for pages in 1..600 {
            let asked = requests(pages * PAGE);
            assert_eq!(made(asked), pages * PAGE);
            assert!(asked == 1 || made(asked - 1) < pages * PAGE, "{pages}");
        }
    }
}
