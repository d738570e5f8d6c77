//! The client's private memory, and our own view of the shared arena.

use kedge_cuda_types::{CuError, arena};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicI32, Ordering};

/// Most parts of one call (UIO_MAXIOV).
const MAX_PARTS: usize = 1024;

/// The client's address space.
#[derive(Debug)]
pub(crate) struct ClientMemory {
    pid: AtomicI32,
}

impl ClientMemory {
    pub(crate) fn new(pid: u32) -> ClientMemory {
        ClientMemory { pid: AtomicI32::new(pid as libc::pid_t) }
    }

    /// The client is this process from now on.
    pub(crate) fn belongs_to(&self, pid: u32) {
        self.pid.store(pid as libc::pid_t, Ordering::Relaxed);
    }

    fn pid(&self) -> libc::pid_t {
        self.pid.load(Ordering::Relaxed)
    }

    /// Fills `out` from the client's memory at `addr`.
    pub(crate) fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), CuError> {
        let (base, len) = (out.as_mut_ptr(), out.len());
        transfer(addr, len, |done| {
            let local =
                libc::iovec { iov_base: base.wrapping_add(done).cast(), iov_len: len - done };
            let remote = remote(addr, done, len);
            // SAFETY: the kernel writes within `out`, of which `done < len` bytes are filled, and
            // checks the remote range against the client's mappings.
            unsafe { libc::process_vm_readv(self.pid(), &local, 1, &remote, 1, 0) }
        })
    }

    /// Fills each part from the client's memory at its address, many by one call.
    pub(crate) fn read_parts(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), CuError> {
        for parts in parts.chunks_mut(MAX_PARTS) {
            let local = |(_, out): &mut (u64, &mut [u8])| libc::iovec {
                iov_base: out.as_mut_ptr().cast(),
                iov_len: out.len(),
            };
            let local: Vec<libc::iovec> = parts.iter_mut().map(local).collect();
            let remote = |(addr, out): &(u64, &mut [u8])| remote(*addr, 0, out.len());
            let remote: Vec<libc::iovec> = parts.iter().map(remote).collect();
            let count = parts.len() as libc::c_ulong;
            // SAFETY: the kernel writes within the parts, which are borrowed and apart, and checks
            // the remote ranges against the client's mappings.
            let read = unsafe {
                libc::process_vm_readv(self.pid(), local.as_ptr(), count, remote.as_ptr(), count, 0)
            };
            let wanted: usize = parts.iter().map(|(_, out)| out.len()).sum();
            // What has stopped the call is found, and told, by what reads one part at a time.
            if usize::try_from(read) != Ok(wanted) {
                parts.iter_mut().try_for_each(|(addr, out)| self.read(*addr, out))?;
            }
        }
        Ok(())
    }

    /// Stores `bytes` in the client's memory at `addr`.
    pub(crate) fn write(&self, addr: u64, bytes: &[u8]) -> Result<(), CuError> {
        let (base, len) = (bytes.as_ptr(), bytes.len());
        transfer(addr, len, |done| {
            let local = libc::iovec {
                iov_base: base.wrapping_add(done).cast_mut().cast(),
                iov_len: len - done,
            };
            let remote = remote(addr, done, len);
            // SAFETY: the kernel reads within `bytes` and checks the remote range, protection
            // included, against the client's mappings.
            unsafe { libc::process_vm_writev(self.pid(), &local, 1, &remote, 1, 0) }
        })
    }

    /// Whether the client's memory can be reached here: `addr` must hold `value`.
    pub(crate) fn probe(&self, addr: u64, value: u64) -> bool {
        let mut word = [0; 8];
        self.read(addr, &mut word).is_ok() && u64::from_le_bytes(word) == value
    }
}

fn remote(addr: u64, done: usize, len: usize) -> libc::iovec {
    libc::iovec { iov_base: addr.wrapping_add(done as u64) as *mut _, iov_len: len - done }
}

/// Repeats `step`, which is told how many bytes are done, until all `len` are.
fn transfer(addr: u64, len: usize, step: impl Fn(usize) -> isize) -> Result<(), CuError> {
    if addr.checked_add(len as u64).is_none() {
        return Err(CuError::INVALID_VALUE);
    }
    let mut done = 0;
    while done < len {
        match step(done) {
            n @ 1.. => done += n as usize,
            0 => return Err(CuError::INVALID_VALUE),
            _ => match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EPERM) => return Err(CuError::NOT_PERMITTED),
                _ => return Err(CuError::INVALID_VALUE),
            },
        }
    }
    Ok(())
}

/// Whether [addr, addr+len) lies in the shared arena, which this process maps as well.
pub(crate) fn in_shared_arena(addr: u64, len: u64) -> bool {
    addr.checked_add(len).is_some_and(|end| {
        addr >= arena::SHARED_BASE && end <= arena::SHARED_BASE + arena::SHARED_LEN
    })
}

/// Copies out of the shared arena, which must be mapped; the range has been checked.
pub(crate) fn read_shared(addr: u64, out: &mut [u8]) -> Result<(), CuError> {
    if !in_shared_arena(addr, out.len() as u64) {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: the whole arena is mapped readable before the first message is dispatched, and its
    // memfd is sealed against shrinking; a file that the client has put in its place
    // (`Call::Adopt`) is not, and ends this process, which is the client's own, if it shrinks. The
    // client may write it meanwhile; the copy then holds some mix of bytes, which the caller treats
    // as untrusted anyway.
    unsafe {
        std::ptr::copy_nonoverlapping(addr as *const u8, out.as_mut_ptr(), out.len());
    }
    Ok(())
}

/// Copies into the shared arena, which must be mapped.
pub(crate) fn write_shared(addr: u64, bytes: &[u8]) -> Result<(), CuError> {
    if !in_shared_arena(addr, bytes.len() as u64) {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: the whole arena is mapped writable, and as above; a client
    // that writes there too meanwhile harms its own data only.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), addr as *mut u8, bytes.len());
    }
    Ok(())
}

/// Copies some bytes of a page into the shared arena, which must be mapped: those that have a bit
/// in `which`, the lowest first. Nothing is written to the others, which somebody may change
/// meanwhile.
pub(crate) fn write_shared_some(
    addr: u64,
    page: &[u8; 4096],
    which: &[u64; 64],
) -> Result<(), CuError> {
    if !in_shared_arena(addr, page.len() as u64) || !addr.is_multiple_of(8) {
        return Err(CuError::INVALID_VALUE);
    }
    let bits = which.iter().flat_map(|word| word.to_le_bytes());
    for (index, (word, bits)) in page.as_chunks::<8>().0.iter().zip(bits).enumerate() {
        let to = (addr as usize + 8 * index) as *mut u8;
        if bits == u8::MAX {
            // SAFETY: as in write_shared(): eight bytes of the page, which lies in the arena as was
            // checked, aligned.
            unsafe { to.cast::<u64>().write(u64::from_ne_bytes(*word)) };
            continue;
        }
        for place in (0..8).filter(|place| bits >> place & 1 != 0) {
            // SAFETY: as above, one byte.
            unsafe { to.add(place).write(word[place]) };
        }
    }
    Ok(())
}

/// The parts of a shared arena that hold anything, by offset.
pub(crate) fn extents(shared: BorrowedFd<'_>) -> io::Result<Vec<Range<u64>>> {
    extents_within(shared, 0..arena::SHARED_LEN)
}

/// The same of what lies in a part of it.
pub(crate) fn extents_within(
    shared: BorrowedFd<'_>,
    part: Range<u64>,
) -> io::Result<Vec<Range<u64>>> {
    let mut found = Vec::new();
    let mut at = part.start;
    while at < part.end
        && let Some(start) = seek(shared, at, libc::SEEK_DATA)?
        && start < part.end
    {
        let end = seek(shared, start, libc::SEEK_HOLE)?.unwrap_or(arena::SHARED_LEN);
        found.push(start..end.min(part.end));
        at = end;
    }
    Ok(found)
}

/// `None` where there is nothing behind `at`.
fn seek(file: BorrowedFd<'_>, at: u64, whence: libc::c_int) -> io::Result<Option<u64>> {
    // SAFETY: a plain call. The offset that it moves is used by nobody: the arena is only mapped.
    let found = unsafe { libc::lseek(file.as_raw_fd(), at as libc::off_t, whence) };
    match u64::try_from(found) {
        Ok(found) => Ok(Some(found)),
        Err(_) => match io::Error::last_os_error() {
            e if e.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            e => Err(e),
        },
    }
}

/// The shared arena of the tests of this process, which can map one only: each test uses a part of
/// its own.
#[cfg(test)]
pub(crate) fn arena_of_tests() -> &'static std::os::fd::OwnedFd {
    use std::os::fd::AsFd;
    use std::sync::LazyLock;
    static ARENA: LazyLock<std::os::fd::OwnedFd> = LazyLock::new(|| {
        let arena = kedge_transport::create_shared_arena().unwrap();
        kedge_transport::map_shared_arena(arena.as_fd()).unwrap();
        arena
    });
    &ARENA
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_memory_reads_and_writes() {
        let memory = ClientMemory::new(std::process::id());
        let word = 0x1234_5678_9abc_def0_u64;
        assert!(memory.probe(&raw const word as u64, word));
        assert!(!memory.probe(&raw const word as u64, word + 1));
        let source: Vec<u8> = (0..100_000).map(|i| i as u8).collect();
        let mut target = vec![0; source.len()];
        memory.write(target.as_mut_ptr() as u64, &source).unwrap();
        assert_eq!(target, source);
    }

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        let memory = ClientMemory::new(std::process::id());
        let mut out = [0; 16];
        // Between the arenas: beside them lies what other tests of this process map.
        for addr in [0, 0x1000, u64::MAX - 4, arena::DEVICE_BASE - 0x10_0000] {
            assert!(memory.read(addr, &mut out).is_err(), "{addr:#x}");
            assert!(memory.write(addr, &out).is_err(), "{addr:#x}");
        }
        assert!(!in_shared_arena(arena::SHARED_BASE + arena::SHARED_LEN - 8, 9));
        assert!(read_shared(arena::SHARED_BASE - 1, &mut out).is_err());
    }
}
