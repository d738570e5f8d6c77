//! The calls of System V IPC.

use crate::{huge, maps};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::ptr::{null, null_mut};

/// msgrcv(2): a copy of a message, which stays.
const MSG_COPY: i32 = 0o40_000;

fn result(value: i32) -> io::Result<i32> {
    if value < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

/// What all of their structures begin with.
pub(super) struct Access {
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl Access {
    fn put(&self, into: &mut libc::ipc_perm) {
        (into.uid, into.gid, into.mode) = (self.uid, self.gid, self.mode as _);
    }
}

/// Makes a new one, never an old one.
fn creation(mode: u32) -> i32 {
    libc::IPC_CREAT | libc::IPC_EXCL | (mode & 0o777) as i32
}

pub(super) fn make_segment(key: i32, bytes: u64, mode: u32) -> io::Result<i32> {
    make_segment_of(key, bytes, (mode & 0o777) as i32)
}

/// The same with flags of shmget(2) beside the permissions.
pub(super) fn make_segment_of(key: i32, bytes: u64, mode: i32) -> io::Result<i32> {
    // SAFETY: a call of plain numbers.
    result(unsafe { libc::shmget(key, bytes as usize, creation(0) | mode) })
}

pub(super) fn own_segment(id: i32, access: &Access) -> io::Result<()> {
    // SAFETY: zeros are a valid structure of numbers, which the kernel fills and reads.
    unsafe {
        let mut status: libc::shmid_ds = std::mem::zeroed();
        result(libc::shmctl(id, libc::IPC_STAT, &raw mut status))?;
        access.put(&mut status.shm_perm);
        result(libc::shmctl(id, libc::IPC_SET, &raw mut status)).map(drop)
    }
}

/// Its length in bytes.
pub(crate) fn segment_bytes(id: i32) -> io::Result<u64> {
    // SAFETY: as above.
    unsafe {
        let mut status: libc::shmid_ds = std::mem::zeroed();
        result(libc::shmctl(id, libc::IPC_STAT, &raw mut status))?;
        Ok(status.shm_segsz as u64)
    }
}

/// Removes it when nobody has it attached any more.
pub(super) fn remove_segment(id: i32) -> io::Result<()> {
    // SAFETY: this command takes no structure.
    result(unsafe { libc::shmctl(id, libc::IPC_RMID, null_mut()) }).map(drop)
}

/// A segment, attached to this process until it is dropped.
pub(super) struct Attached {
    start: *mut libc::c_void,
    bytes: usize,
    writable: bool,
}

impl Attached {
    pub(super) fn to(id: i32, writable: bool) -> io::Result<Attached> {
        let bytes = segment_bytes(id)? as usize;
        let flags = if writable { 0 } else { libc::SHM_RDONLY };
        // SAFETY: the kernel chooses the address.
        let start = unsafe { libc::shmat(id, null(), flags) };
        if start as isize == -1 {
            return Err(io::Error::last_os_error());
        }
        Ok(Attached { start, bytes, writable })
    }

    /// Copies what lies at `offset`.
    pub(super) fn read(&self, offset: usize, into: &mut [u8]) -> io::Result<()> {
        let from = self.place(offset, into.len())?;
        // SAFETY: `place` has checked the range, which is mapped. Others may write it meanwhile:
        // these are bytes without meaning here, and the copy is made by the byte.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    pub(super) fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        let to = self.place(offset, bytes.len())?;
        if !self.writable {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        // SAFETY: as above, and it is attached for writing.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Returns the bytes of its huge pages; `None` of ordinary ones.
    ///
    /// # Errors
    /// That cannot be told now: it must not be read as ordinary memory.
    pub(super) fn pages(&self) -> io::Result<Option<u64>> {
        let (pid, start) = (std::process::id() as i32, self.start.addr() as u64);
        let own = maps::of(pid).map_err(io::Error::other)?;
        let its = own.into_iter().find(|mapping| mapping.start == start);
        let its = its.ok_or(io::ErrorKind::NotFound)?;
        let pages = huge::pages_of(&its);
        if pages.is_none() && huge::unknown(pid, &[its]).map_err(io::Error::other)?.is_some() {
            let what = "it has huge pages, whose size the kernel does not tell now: try again";
            return Err(io::Error::other(what));
        }
        Ok(pages)
    }

    /// Returns its `length` bytes of huge pages as a file, whose holes are read as zeros and stay
    /// holes; `None` where this process may not have it, for which it needs CAP_CHECKPOINT_RESTORE.
    pub(super) fn file(&self, length: u64) -> io::Result<Option<File>> {
        let start = self.start.addr() as u64;
        let path = format!("/proc/self/map_files/{start:x}-{:x}", start + length);
        match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
            file => file.map(Some),
        }
    }

    /// Copies what lies at `offset` of huge pages, as far as the last of them; a page that there is
    /// none for is zeros, unless there is one for `all` of it. A hole takes a page by being read,
    /// which [`Attached::file`] does without.
    pub(super) fn read_pages(&self, offset: u64, into: &mut [u8], all: bool) -> io::Result<()> {
        let memory = File::open("/proc/self/mem")?;
        match memory.read_exact_at(into, self.start.addr() as u64 + offset) {
            Err(error) if error.raw_os_error() == Some(libc::EIO) && !all => {
                into.fill(0);
                Ok(())
            }
            other => other,
        }
    }

    /// Writes at `offset` of huge pages, as far as the last of them.
    pub(super) fn write_pages(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let memory = File::options().write(true).open("/proc/self/mem")?;
        memory.write_all_at(bytes, self.start.addr() as u64 + offset)
    }

    fn place(&self, offset: usize, length: usize) -> io::Result<*mut u8> {
        match offset.checked_add(length) {
            // SAFETY: the offset lies inside of the mapping.
            Some(end) if end <= self.bytes => Ok(unsafe { self.start.cast::<u8>().add(offset) }),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Whether each page has memory, so that no other one is given some by being read.
    pub(super) fn resident(&self, page: usize) -> io::Result<Vec<u8>> {
        let mut pages = vec![0; self.bytes.div_ceil(page)];
        // SAFETY: the range is mapped, and there is one byte for each of its pages.
        result(unsafe { libc::mincore(self.start, self.bytes, pages.as_mut_ptr()) })?;
        Ok(pages)
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // SAFETY: it was attached there; nothing refers to it any more.
        unsafe { libc::shmdt(self.start) };
    }
}

/// What semop(2) takes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operation {
    pub(crate) number: u16,
    pub(crate) by: i16,
    pub(crate) flags: i32,
}

/// The array that the kernel reads.
pub(crate) fn bytes_of(operations: &[Operation]) -> Vec<u8> {
    let one = |op: &Operation| {
        let [a, b] = op.number.to_ne_bytes();
        let [c, d] = op.by.to_ne_bytes();
        let [e, f] = (op.flags as i16).to_ne_bytes();
        [a, b, c, d, e, f]
    };
    operations.iter().flat_map(one).collect()
}

pub(super) fn operate(id: i32, operations: &[Operation]) -> io::Result<()> {
    let mut all: Vec<libc::sembuf> = operations
        .iter()
        .map(|op| libc::sembuf { sem_num: op.number, sem_op: op.by, sem_flg: op.flags as i16 })
        .collect();
    // SAFETY: the array has so many entries.
    result(unsafe { libc::semop(id, all.as_mut_ptr(), all.len()) }).map(drop)
}

pub(super) fn make_set(key: i32, count: usize, mode: u32) -> io::Result<i32> {
    // SAFETY: a call of plain numbers.
    result(unsafe { libc::semget(key, count as i32, creation(mode)) })
}

pub(super) fn own_set(id: i32, access: &Access) -> io::Result<()> {
    // SAFETY: zeros are a valid structure of numbers, which the kernel fills and reads.
    unsafe {
        let mut status: libc::semid_ds = std::mem::zeroed();
        result(libc::semctl(id, 0, libc::IPC_STAT, &raw mut status))?;
        access.put(&mut status.sem_perm);
        result(libc::semctl(id, 0, libc::IPC_SET, &raw mut status)).map(drop)
    }
}

/// The values of a set of `count`.
pub(super) fn values(id: i32, count: usize) -> io::Result<Vec<u16>> {
    let mut values = vec![0u16; count];
    // SAFETY: the kernel stores as many as the set has, which never changes.
    result(unsafe { libc::semctl(id, 0, libc::GETALL, values.as_mut_ptr()) })?;
    Ok(values)
}

pub(super) fn set_values(id: i32, values: &[u16]) -> io::Result<()> {
    // SAFETY: the set was made with so many.
    result(unsafe { libc::semctl(id, 0, libc::SETALL, values.as_ptr()) }).map(drop)
}

pub(super) fn value(id: i32, number: u16) -> io::Result<i32> {
    // SAFETY: this command takes no more.
    result(unsafe { libc::semctl(id, i32::from(number), libc::GETVAL) })
}

/// Who operated on it last; 0: nobody.
pub(super) fn last(id: i32, number: usize) -> io::Result<i32> {
    // SAFETY: this command takes no more.
    result(unsafe { libc::semctl(id, number as i32, libc::GETPID) })
}

pub(super) fn make_queue(key: i32, mode: u32) -> io::Result<i32> {
    // SAFETY: a call of plain numbers.
    result(unsafe { libc::msgget(key, creation(mode)) })
}

/// The most bytes that it takes.
pub(super) fn queue_limit(id: i32) -> io::Result<u64> {
    // SAFETY: zeros are a valid structure of numbers, which the kernel fills.
    unsafe {
        let mut status: libc::msqid_ds = std::mem::zeroed();
        result(libc::msgctl(id, libc::IPC_STAT, &raw mut status))?;
        Ok(status.msg_qbytes)
    }
}

pub(super) fn own_queue(id: i32, access: &Access, limit: u64) -> io::Result<()> {
    // SAFETY: as above, and the kernel reads it.
    unsafe {
        let mut status: libc::msqid_ds = std::mem::zeroed();
        result(libc::msgctl(id, libc::IPC_STAT, &raw mut status))?;
        access.put(&mut status.msg_perm);
        status.msg_qbytes = limit;
        result(libc::msgctl(id, libc::IPC_SET, &raw mut status)).map(drop)
    }
}

/// A message: its type, then its bytes.
const TYPE: usize = size_of::<libc::c_long>();

/// A copy of the message at `index`, of at most `limit` bytes; `None` if there are fewer.
pub(super) fn copy_message(
    id: i32,
    index: usize,
    limit: usize,
) -> io::Result<Option<(i64, Vec<u8>)>> {
    let mut buffer = vec![0u64; (TYPE + limit).div_ceil(8)];
    let flags = MSG_COPY | libc::IPC_NOWAIT;
    // SAFETY: the buffer is aligned for the type, and has room for it and `limit` bytes.
    let length = unsafe {
        libc::msgrcv(id, buffer.as_mut_ptr().cast(), limit, index as libc::c_long, flags)
    };
    if length < 0 {
        let error = io::Error::last_os_error();
        return if error.raw_os_error() == Some(libc::ENOMSG) { Ok(None) } else { Err(error) };
    }
    let bytes = buffer.iter().flat_map(|word| word.to_ne_bytes()).skip(TYPE);
    Ok(Some((buffer[0] as i64, bytes.take(length as usize).collect())))
}

pub(super) fn send(id: i32, kind: i64, bytes: &[u8]) -> io::Result<()> {
    let mut buffer = vec![kind as u64];
    let padded = bytes.iter().copied().chain(std::iter::repeat_n(0, 7)).collect::<Vec<u8>>();
    buffer.extend(padded.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word)));
    // SAFETY: the buffer holds the type and so many bytes.
    result(unsafe { libc::msgsnd(id, buffer.as_ptr().cast(), bytes.len(), libc::IPC_NOWAIT) })
        .map(drop)
}
