//! Physical memory that can be mapped at several addresses (`cuMemCreate`, `cuMemMap`).
//!
//! One sparse memfd holds every handle's bytes. A handle is a range of it that is never used again,
//! and gives its pages back when it ends: offsets are 63 bits, so they do not run out. A shareable
//! handle, or another process's, has a memfd of its own. A mapping
//! replaces pages of a device arena by pages of the memfd, so two mappings of one handle are the
//! same memory, and a handle keeps its content from one mapping to the next.

use super::arena::check_client_range;
use super::shareable::{self, replace_pages};
use super::tasks::lock;
use crate::memory::Spans;
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::Windows;
use kedge_device::Ranges;
use kedge_protocol::MemHandleId;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

/// What handles, mappings and offsets are multiples of.
const GRANULARITY: u64 = 2 << 20;

/// All handles and mappings of one client.
pub(super) struct Vmm {
    spans: Arc<Spans>,
    windows: Windows,
    memory: Arc<File>,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    handles: HashMap<MemHandleId, Handle>,
    /// Start → size, and what is mapped there.
    mappings: BTreeMap<u64, (u64, MemHandleId)>,
    /// Length of the memfd: where the next handle goes.
    end: u64,
}

#[derive(Clone)]
struct Handle {
    /// Whose memory has paid for it; `None` for another process's.
    device: Option<u32>,
    /// Its own memfd, if it has one; else it lies in the common one.
    own: Option<Arc<File>>,
    /// In the memfd.
    offset: u64,
    size: u64,
    mappings: u64,
}

/// Where data or a hole begins from `from` on; `None` where there is no such place.
fn seek(file: &File, from: u64, what: i32) -> io::Result<Option<u64>> {
    // SAFETY: only moves the file's offset, which nothing else uses.
    let found = unsafe { libc::lseek(file.as_raw_fd(), from as libc::off_t, what) };
    match u64::try_from(found) {
        Ok(found) => Ok(Some(found)),
        Err(_) => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            error => Err(error),
        },
    }
}

impl Vmm {
    pub(super) fn new(spans: Arc<Spans>, windows: Windows) -> io::Result<Self> {
        // SAFETY: the name is a NUL-terminated string.
        let fd = unsafe { libc::memfd_create(c"kedge-vmm".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: memfd_create has just made this descriptor, and nobody else owns it.
        let memory = Arc::new(unsafe { File::from_raw_fd(fd) });
        Ok(Self { spans, windows, memory, table: Mutex::default() })
    }

    /// `size` zeroed bytes, which the caller has charged to `device`. `number`: they can be
    /// exported, as memory of the device of that number.
    pub(super) fn create(
        &self,
        id: MemHandleId,
        device: u32,
        size: u64,
        number: Option<u32>,
    ) -> Result<(), CuError> {
        let mut table = lock(&self.table);
        if size == 0 || !size.is_multiple_of(GRANULARITY) || table.handles.contains_key(&id) {
            return Err(CuError::INVALID_VALUE);
        }
        let device = Some(device);
        let handle = if let Some(number) = number {
            let own = shareable::create(number, size).map_err(|_| CuError::OUT_OF_MEMORY)?;
            Handle { device, own: Some(Arc::new(own)), offset: 0, size, mappings: 0 }
        } else {
            let offset = table.end;
            let end = offset.checked_add(size).ok_or(CuError::INVALID_VALUE)?;
            self.memory.set_len(end).map_err(|_| CuError::OUT_OF_MEMORY)?;
            table.end = end;
            Handle { device, own: None, offset, size, mappings: 0 }
        };
        table.handles.insert(id, handle);
        Ok(())
    }

    /// A descriptor of a handle's memory; NOT_SUPPORTED where it was not made to be exported.
    pub(super) fn export(&self, id: MemHandleId) -> Result<OwnedFd, CuError> {
        let table = lock(&self.table);
        let handle = table.handles.get(&id).ok_or(CuError::INVALID_HANDLE)?;
        let own = handle.own.as_ref().ok_or(CuError::NOT_SUPPORTED)?;
        Ok(own.try_clone().map_err(|_| CuError::OPERATING_SYSTEM)?.into())
    }

    /// Another process's memory: its size, and the number of its device.
    pub(super) fn import(
        &self,
        id: MemHandleId,
        fd: OwnedFd,
    ) -> Result<(u64, Option<u32>), CuError> {
        let (size, number) = shareable::inspect(fd.as_fd())?;
        let mut table = lock(&self.table);
        if table.handles.contains_key(&id) {
            return Err(CuError::INVALID_VALUE);
        }
        let own = Some(Arc::new(fd.into()));
        table.handles.insert(id, Handle { device: None, own, offset: 0, size, mappings: 0 });
        Ok((size, number))
    }

    /// Another process's memory of `size` bytes, which the caller has charged to `device`, is now
    /// this one's.
    pub(super) fn adopt(&self, id: MemHandleId, device: u32, size: u64) -> Result<(), CuError> {
        let mut table = lock(&self.table);
        let handle = table.handles.get_mut(&id).ok_or(CuError::INVALID_HANDLE)?;
        if handle.device.is_some() || handle.size != size {
            return Err(CuError::INVALID_VALUE);
        }
        handle.device = Some(device);
        Ok(())
    }

    /// Gives the handle's pages back. The device and the bytes that it had been charged.
    ///
    /// # Errors
    /// INVALID_VALUE: it is mapped, where its memory would go on to be.
    pub(super) fn destroy(&self, id: MemHandleId) -> Result<Option<(u32, u64)>, CuError> {
        let mut table = lock(&self.table);
        if table.handles.get(&id).is_some_and(|handle| handle.mappings > 0) {
            return Err(CuError::INVALID_VALUE);
        }
        let handle = table.handles.remove(&id).ok_or(CuError::INVALID_HANDLE)?;
        drop(table);
        let charged = handle.device.map(|device| (device, handle.size));
        if handle.own.is_none() {
            self.empty(&handle, 0, handle.size)?;
        }
        Ok(charged)
    }

    /// Gives the pages of [start, end) of a handle, which has that many bytes, back to the system:
    /// it reads as zero.
    fn empty(&self, handle: &Handle, start: u64, end: u64) -> Result<(), CuError> {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (offset, size) = ((handle.offset + start) as libc::off_t, (end - start) as libc::off_t);
        let file = handle.own.as_ref().unwrap_or(&self.memory);
        // SAFETY: a hole in a memfd, in a range that is only this handle's.
        let rc = unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, size) };
        if rc == 0 { Ok(()) } else { Err(CuError::OPERATING_SYSTEM) }
    }

    /// Has all bytes of the handles that are not other processes' read as zero, but for those that
    /// `keep` says of each.
    pub(super) fn empty_but<'a>(
        &self,
        keep: impl Fn(MemHandleId) -> Option<&'a Ranges>,
    ) -> Result<(), CuError> {
        let (table, none) = (lock(&self.table), Ranges::default());
        for (id, handle) in table.handles.iter().filter(|(_, handle)| handle.device.is_some()) {
            for (start, end) in keep(*id).unwrap_or(&none).between(0, handle.size) {
                self.empty(handle, start, end)?;
            }
        }
        Ok(())
    }

    /// Gives the pages of all handles but other processes' back to the system: how many bytes they
    /// could hold. None is shared with another process.
    pub(super) fn vacate(&self) -> Result<u64, CuError> {
        let table = lock(&self.table);
        let own = table.handles.values().filter(|handle| handle.device.is_some());
        own.map(|handle| self.empty(handle, 0, handle.size).map(|()| handle.size)).sum()
    }

    /// Shows the handle's bytes from `offset` on at [addr, addr+size), without access as yet.
    pub(super) fn map(
        &self,
        id: MemHandleId,
        addr: u64,
        size: u64,
        offset: u64,
    ) -> Result<(), CuError> {
        check_client_range(addr, size, self.windows)?;
        let mut table = lock(&self.table);
        let handle = table.handles.get(&id).cloned().ok_or(CuError::INVALID_HANDLE)?;
        let inside = offset.checked_add(size).is_some_and(|end| end <= handle.size);
        let aligned = (addr | size | offset).is_multiple_of(GRANULARITY);
        if size == 0 || !inside || !aligned || table.overlaps(addr, size) {
            return Err(CuError::INVALID_VALUE);
        }
        let memory = handle.own.as_ref().unwrap_or(&self.memory);
        let file = (memory.as_raw_fd(), handle.offset + offset);
        replace_pages(addr, size, Some(file))?;
        table.mappings.insert(addr, (size, id));
        if let Some(handle) = table.handles.get_mut(&id) {
            handle.mappings += 1;
        }
        Ok(())
    }

    /// Whether something is mapped in a range.
    pub(super) fn overlaps(&self, addr: u64, size: u64) -> bool {
        lock(&self.table).overlaps(addr, size)
    }

    /// Ends the mappings in [addr, addr+size), which holds each of them whole or not at all.
    pub(super) fn unmap(&self, addr: u64, size: u64) -> Result<(), CuError> {
        let mut table = lock(&self.table);
        table.whole(addr, size)?;
        self.spans.remove(addr, size);
        replace_pages(addr, size, None)?;
        let ended: Vec<u64> = table.mappings.range(addr..addr + size).map(|(at, _)| *at).collect();
        for at in ended {
            let shown = table.mappings.remove(&at);
            if let Some(handle) = shown.and_then(|(_, id)| table.handles.get_mut(&id)) {
                handle.mappings -= 1;
            }
        }
        Ok(())
    }

    /// The runs that hold all bytes that are not zero, as (handle, start in it, length), in order;
    /// holes of no more than `small` bytes are part of them.
    pub(super) fn written(&self, small: u64) -> io::Result<Vec<(MemHandleId, u64, u64)>> {
        let table = lock(&self.table);
        // Another process's memory is its own to save.
        let own = table.handles.iter().filter(|(_, handle)| handle.device.is_some());
        let mut handles: Vec<_> = own.map(|(id, handle)| (*id, handle.clone())).collect();
        handles.sort_unstable_by_key(|(id, _)| *id);
        let mut written: Vec<(MemHandleId, u64, u64)> = Vec::new();
        for (id, handle) in handles {
            let end = handle.offset + handle.size;
            let mut at = handle.offset;
            let file = handle.own.as_ref().unwrap_or(&self.memory);
            while let Some(start) = seek(file, at, libc::SEEK_DATA)?.filter(|start| *start < end) {
                at = seek(file, start, libc::SEEK_HOLE)?.unwrap_or(end).min(end);
                let (start, end) = (start - handle.offset, at - handle.offset);
                match written.last_mut() {
                    Some((last, from, len)) if *last == id && start - (*from + *len) <= small => {
                        *len = end - *from;
                    }
                    _ => written.push((id, start, end - start)),
                }
            }
        }
        Ok(written)
    }

    /// Reads a handle's bytes from `start` on.
    pub(super) fn read(&self, id: MemHandleId, start: u64, out: &mut [u8]) -> Result<(), CuError> {
        let (file, at) = self.locate(id, start, out.len() as u64)?;
        file.read_exact_at(out, at).map_err(|_| CuError::OPERATING_SYSTEM)
    }

    /// Writes a handle's bytes from `start` on.
    pub(super) fn write(&self, id: MemHandleId, start: u64, bytes: &[u8]) -> Result<(), CuError> {
        let (file, at) = self.locate(id, start, bytes.len() as u64)?;
        file.write_all_at(bytes, at).map_err(|_| CuError::OUT_OF_MEMORY)
    }

    /// The file that holds a handle's bytes from `start` on, and where.
    fn locate(&self, id: MemHandleId, start: u64, len: u64) -> Result<(Arc<File>, u64), CuError> {
        let table = lock(&self.table);
        let handle = table.handles.get(&id).ok_or(CuError::INVALID_HANDLE)?;
        let inside = start.checked_add(len).is_some_and(|end| end <= handle.size);
        let file = Arc::clone(handle.own.as_ref().unwrap_or(&self.memory));
        if inside { Ok((file, handle.offset + start)) } else { Err(CuError::INVALID_VALUE) }
    }

    /// What kernels may do with mapped memory: `CUmemAccess_flags`. Read-only memory can be
    /// written.
    pub(super) fn set_access(&self, addr: u64, size: u64, access: u32) -> Result<(), CuError> {
        let table = lock(&self.table);
        if size == 0 || !table.covers(addr, size) {
            return Err(CuError::INVALID_VALUE);
        }
        match access {
            0 => self.spans.remove(addr, size),
            _ => self.spans.insert(addr, size),
        }
        Ok(())
    }
}

impl Table {
    /// Mappings that share a byte with [addr, addr+size), from the last to the first.
    fn overlapping(&self, addr: u64, size: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let end = addr.saturating_add(size);
        let ordered = self.mappings.range(..end).rev().map(|(&start, &(len, _))| (start, len));
        ordered.take_while(move |&(start, len)| start + len > addr)
    }

    fn overlaps(&self, addr: u64, size: u64) -> bool {
        self.overlapping(addr, size).next().is_some()
    }

    /// Whether every byte of the range is mapped.
    fn covers(&self, addr: u64, size: u64) -> bool {
        let Some(mut end) = addr.checked_add(size) else { return false };
        for (start, len) in self.overlapping(addr, size) {
            if start + len < end {
                return false;
            }
            end = start;
        }
        end <= addr
    }

    /// Refuses a range that is not covered, or that cuts a mapping.
    fn whole(&self, addr: u64, size: u64) -> Result<(), CuError> {
        let end = addr.checked_add(size).ok_or(CuError::INVALID_VALUE)?;
        let cut = |(start, len): (u64, u64)| start < addr || start + len > end;
        if size == 0 || !self.covers(addr, size) || self.overlapping(addr, size).any(cut) {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_cuda_types::arena::{DEVICE_CLIENT_LEN, MAX_DEVICES, device_base};

    const STEP: u64 = GRANULARITY;

    /// Addresses that no other test of this crate maps.
    fn arena(index: u64) -> u64 {
        device_base(MAX_DEVICES - 1) + DEVICE_CLIENT_LEN - (index + 1) * 64 * STEP
    }

    fn vmm() -> Vmm {
        Vmm::new(Arc::default(), Windows::first(MAX_DEVICES)).unwrap()
    }

    fn word(addr: u64) -> *mut u64 {
        addr as usize as *mut u64
    }

    #[test]
    fn two_mappings_of_one_handle_are_the_same_memory() {
        let (vmm, base, id) = (vmm(), arena(0), MemHandleId(1));
        vmm.create(id, 0, 2 * STEP, None).unwrap();
        vmm.map(id, base, 2 * STEP, 0).unwrap();
        vmm.map(id, base + 8 * STEP, STEP, STEP).unwrap();
        // SAFETY: both addresses were mapped just now, readable and writable.
        unsafe {
            word(base + STEP).write_volatile(42);
            assert_eq!(word(base + 8 * STEP).read_volatile(), 42);
            assert_eq!(word(base).read_volatile(), 0);
        }
        vmm.unmap(base, 2 * STEP).unwrap();
        vmm.map(id, base + 16 * STEP, 2 * STEP, 0).unwrap();
        // SAFETY: the handle was mapped again just now; the range that was unmapped is anonymous
        // memory.
        unsafe {
            assert_eq!(word(base + 17 * STEP).read_volatile(), 42, "content outlives a mapping");
            assert_eq!(word(base + STEP).read_volatile(), 0, "nothing stays where it was");
        }
    }

    #[test]
    fn only_what_was_written_is_told_and_can_be_put_back() {
        let (vmm, other, base) = (vmm(), super::tests::vmm(), arena(3));
        let [first, second] = [MemHandleId(1), MemHandleId(2)];
        assert_eq!(vmm.written(0).unwrap(), []);
        for vmm in [&vmm, &other] {
            vmm.create(second, 0, STEP, None).unwrap();
            vmm.create(first, 0, 2 * STEP, None).unwrap();
        }
        vmm.map(first, base, 2 * STEP, 0).unwrap();
        // SAFETY: mapped just now.
        unsafe { word(base + 4096).write_volatile(41) };
        let written = vmm.written(0).unwrap();
        assert!(written.len() == 1 && written[0].1 <= 4096, "{written:?}");
        // SAFETY: the second step is of the same mapping.
        unsafe { word(base + STEP + 4096).write_volatile(42) };
        let written = vmm.written(2 * STEP).unwrap();
        let [(id, start, len)] = written[..] else { panic!("{written:?}") };
        assert!(id == first && start <= 4096 && start + len >= STEP + 8192, "{written:?}");
        let mut bytes = vec![0; len as usize];
        vmm.read(first, start, &mut bytes).unwrap();
        other.write(first, start, &bytes).unwrap();
        let mut back = [0; 8];
        other.read(first, STEP + 4096, &mut back).unwrap();
        assert_eq!(u64::from_le_bytes(back), 42);
        assert_eq!(other.write(first, 2 * STEP - 4, &back), Err(CuError::INVALID_VALUE));
        assert_eq!(other.write(second, u64::MAX, &back), Err(CuError::INVALID_VALUE));
        assert_eq!(other.read(MemHandleId(3), 0, &mut back), Err(CuError::INVALID_HANDLE));
        vmm.unmap(base, 2 * STEP).unwrap();
    }

    #[test]
    fn access_follows_set_access_and_unmap() {
        let (vmm, base, id) = (vmm(), arena(1), MemHandleId(1));
        vmm.create(id, 0, STEP, None).unwrap();
        assert_eq!(vmm.set_access(base, STEP, 3), Err(CuError::INVALID_VALUE));
        vmm.map(id, base, STEP, 0).unwrap();
        vmm.map(id, base + STEP, STEP, 0).unwrap();
        assert!(!vmm.spans.covers(base, 1));
        vmm.set_access(base, 2 * STEP, 3).unwrap();
        assert!(vmm.spans.covers(base, 2 * STEP));
        vmm.unmap(base, STEP).unwrap();
        assert!(!vmm.spans.covers(base, 1) && vmm.spans.covers(base + STEP, STEP));
        vmm.set_access(base + STEP, STEP, 0).unwrap();
        assert!(!vmm.spans.covers(base + STEP, 1));
    }

    #[test]
    fn nonsense_is_refused() {
        let (vmm, base, id) = (vmm(), arena(2), MemHandleId(1));
        assert_eq!(vmm.map(id, base, STEP, 0), Err(CuError::INVALID_HANDLE));
        assert_eq!(vmm.destroy(id), Err(CuError::INVALID_HANDLE));
        assert_eq!(vmm.create(id, 0, STEP + 1, None), Err(CuError::INVALID_VALUE));
        vmm.create(id, 3, 2 * STEP, None).unwrap();
        assert_eq!(vmm.create(id, 0, STEP, None), Err(CuError::INVALID_VALUE));
        for (addr, size, offset) in [
            (base, 4 * STEP, 0),
            (base, 2 * STEP, STEP),
            (base, STEP, u64::MAX - STEP + 1),
            (base + 512, STEP, 0),
            (u64::MAX - STEP + 1, 2 * STEP, 0),
            (0x1000 * STEP, STEP, 0),
        ] {
            assert_eq!(vmm.map(id, addr, size, offset), Err(CuError::INVALID_VALUE));
        }
        vmm.map(id, base, 2 * STEP, 0).unwrap();
        assert_eq!(vmm.map(id, base + STEP, STEP, 0), Err(CuError::INVALID_VALUE));
        assert_eq!(vmm.unmap(base, STEP), Err(CuError::INVALID_VALUE), "half a mapping");
        assert_eq!(vmm.unmap(base, 4 * STEP), Err(CuError::INVALID_VALUE));
        assert_eq!(vmm.unmap(base, u64::MAX), Err(CuError::INVALID_VALUE));
        assert_eq!(vmm.destroy(id), Err(CuError::INVALID_VALUE), "it is mapped");
        vmm.unmap(base, 2 * STEP).unwrap();
        assert_eq!(vmm.destroy(id), Ok(Some((3, 2 * STEP))));
    }

    #[test]
    fn exported_memory_is_the_same_in_another_process() {
        let (here, there, base, id) = (vmm(), vmm(), arena(3), MemHandleId(1));
        here.create(id, 0, STEP, None).unwrap();
        assert_eq!(here.export(id).err(), Some(CuError::NOT_SUPPORTED));
        here.destroy(id).unwrap();
        here.create(id, 0, STEP, Some(5)).unwrap();
        here.map(id, base, STEP, 0).unwrap();
        assert_eq!(there.import(id, here.export(id).unwrap()), Ok((STEP, Some(5))));
        there.map(id, base + 8 * STEP, STEP, 0).unwrap();
        // SAFETY: both addresses were mapped just now, readable and writable.
        unsafe {
            word(base).write_volatile(42);
            assert_eq!(word(base + 8 * STEP).read_volatile(), 42);
        }
        here.unmap(base, STEP).unwrap();
        assert_eq!(here.destroy(id), Ok(Some((0, STEP))));
        // SAFETY: the second address is still mapped.
        unsafe { assert_eq!(word(base + 8 * STEP).read_volatile(), 42, "the other's is its own") };
        there.unmap(base + 8 * STEP, STEP).unwrap();
        assert_eq!(there.destroy(id), Ok(None));
    }
}
