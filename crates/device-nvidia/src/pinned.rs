//! Host memory that the device reaches directly, at full speed: what a snapshot is kept in where
//! the device has no room, and the small buffers through which bytes travel.
//!
//! It is mapped here and registered, not taken from the driver: pages are made by several threads,
//! and where the driver places its own things does not depend on it.

use crate::context::Context;
use crate::driver::{Driver, check};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUevent, CUstream};
use kedge_cuda_types::memory::CU_MEMHOSTREGISTER_PORTABLE;
use kedge_protocol::CtxId;
use std::collections::VecDeque;
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING: who waits sleeps, and leaves the driver's
/// locks to the program.
const EVENT_FLAGS: u32 = 1 | 2;
/// Pages are made in parts of this size, by one thread each.
const PART: usize = 32 << 20;

/// Memory that is mapped here.
struct Mapping {
    at: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory; who may use which part is decided by the owner.
unsafe impl Send for Mapping {}
// SAFETY: a shared reference gives a pointer and a length alone, which do not change.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Without pages yet.
    fn new(bytes: usize) -> Result<Mapping, CuError> {
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
        );
        // SAFETY: a new mapping wherever there is room.
        let at = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(CuError::OUT_OF_MEMORY);
        }
        // SAFETY: the mapping that was just made.
        unsafe { libc::madvise(at, bytes, libc::MADV_HUGEPAGE) };
        Ok(Mapping { at: at.cast(), bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping; its owner uses it no more.
        unsafe { libc::munmap(self.at.cast(), self.bytes) };
    }
}

/// Has memory of a mapping of ours, with pages made by `threads` threads, reached by the devices.
/// Some context is current.
fn register(driver: &Driver, at: *mut u8, bytes: usize, threads: usize) -> Result<(), CuError> {
    populate(at, bytes, threads)?;
    // SAFETY: memory that is mapped, says the caller.
    check(unsafe { (driver.cuMemHostRegister_v2)(at.cast(), bytes, CU_MEMHOSTREGISTER_PORTABLE) })
}

/// A registered mapping.
pub(crate) struct Pinned {
    driver: Arc<Driver>,
    mapping: Mapping,
}

impl Pinned {
    /// Maps and registers memory, with pages made by `threads` threads. Some context is current.
    pub(crate) fn new(
        driver: &Arc<Driver>,
        bytes: usize,
        threads: usize,
    ) -> Result<Pinned, CuError> {
        let mapping = Mapping::new(bytes)?;
        register(driver, mapping.at, bytes, threads.max(1))?;
        Ok(Pinned { driver: Arc::clone(driver), mapping })
    }

    pub(crate) fn addr(&self) -> *mut u8 {
        self.mapping.at
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.mapping.bytes as u64
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: registered by `new`; whoever used it has waited for the device. If the context
        // that it was registered in is gone, so is the registration, and the driver says so.
        unsafe { (self.driver.cuMemHostUnregister)(self.mapping.at.cast()) };
    }
}

/// Makes the pages of a mapping. Fails, instead of killing the process later, where memory is
/// short.
fn populate(at: *mut u8, bytes: usize, threads: usize) -> Result<(), CuError> {
    let parts: Vec<_> = (0..bytes.div_ceil(PART)).map(|part| part * PART).collect();
    let next = Mutex::new(parts.into_iter());
    let base = at as usize;
    let work = || loop {
        let Some(from) = next.lock().unwrap_or_else(PoisonError::into_inner).next() else {
            return true;
        };
        let len = PART.min(bytes - from);
        // SAFETY: a part of our own mapping, which nobody else uses yet.
        let made =
            unsafe { libc::madvise((base + from) as *mut _, len, libc::MADV_POPULATE_WRITE) };
        // A kernel before 5.14 makes the pages when they are registered.
        let old = || std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL);
        if made != 0 && !old() {
            return false;
        }
    };
    let made = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let first = work();
        others.into_iter().all(|thread| thread.join().unwrap_or(false)) && first
    });
    if made { Ok(()) } else { Err(CuError::OUT_OF_MEMORY) }
}

/// Bytes of a [`Slot`].
pub(crate) const SLOT: usize = 4 << 20;
/// Slots that there are.
const SLOTS: usize = 32;

/// Pinned buffers of [`SLOT`] bytes, each made when first needed and kept: pinning all of them
/// takes longer than to fill and send one, and a restart's first bytes travel while the others are
/// pinned.
pub(crate) struct Slots {
    driver: Arc<Driver>,
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Default)]
struct State {
    memory: Option<Mapping>,
    /// The one that was returned first is taken first: its transfer is the oldest.
    free: VecDeque<Slot>,
}

/// A pinned buffer.
pub(crate) struct Slot {
    at: *mut u8,
    /// Whether devices reach it.
    pinned: bool,
    /// One of each context that it was used in.
    events: Vec<(CtxId, CUevent)>,
    /// The event behind the transfer that uses the buffer.
    travelling: Option<CUevent>,
}

// SAFETY: plain memory that one owner at a time uses.
unsafe impl Send for Slot {}

impl Slots {
    pub(crate) fn new(driver: &Arc<Driver>) -> Slots {
        let (state, returned) = Default::default();
        Slots { driver: Arc::clone(driver), state, returned }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pins all buffers that no transfer uses. Some context is current.
    pub(crate) fn ready(&self) -> Result<(), CuError> {
        self.mapped()?;
        let mut state = self.lock();
        let State { memory, free } = &mut *state;
        if let (Some(memory), Some(_)) = (memory, free.iter().find(|slot| !slot.pinned)) {
            populate(memory.at, memory.bytes, 4)?;
        }
        free.iter_mut().try_for_each(|slot| slot.pin(&self.driver))
    }

    /// Maps the buffers, if that has not been done.
    fn mapped(&self) -> Result<(), CuError> {
        let mut state = self.lock();
        if state.memory.is_none() {
            let memory = Mapping::new(SLOTS * SLOT)?;
            let slot = |n: usize| {
                // SAFETY: a part of the mapping, which lives as long as the slots do.
                let at = unsafe { memory.at.add(n * SLOT) };
                Slot { at, pinned: false, events: Vec::new(), travelling: None }
            };
            state.free.extend((0..SLOTS).map(slot));
            state.memory = Some(memory);
        }
        Ok(())
    }

    /// A buffer that no transfer uses; waits for one. `ctx` is current and held.
    pub(crate) fn take(&self, ctx: &Context) -> Result<Slot, CuError> {
        self.mapped()?;
        let mut state = self.lock();
        loop {
            match state.free.pop_front() {
                Some(slot) => {
                    drop(state);
                    return self.made_ready(slot, ctx);
                }
                None => state = self.returned.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// A buffer, if one is free.
    pub(crate) fn try_take(&self, ctx: &Context) -> Result<Option<Slot>, CuError> {
        self.mapped()?;
        let free = self.lock().free.pop_front();
        free.map(|slot| self.made_ready(slot, ctx)).transpose()
    }

    fn made_ready(&self, mut slot: Slot, ctx: &Context) -> Result<Slot, CuError> {
        let pinned = slot.pin(&self.driver).and_then(|()| slot.wait(&self.driver));
        match pinned.and_then(|()| slot.event(&self.driver, ctx.id)) {
            Ok(_) => Ok(slot),
            Err(error) => {
                self.put(slot);
                Err(error)
            }
        }
    }

    pub(crate) fn put(&self, slot: Slot) {
        self.lock().free.push_back(slot);
        self.returned.notify_one();
    }

    /// Waits for the transfers of all slots that were returned.
    pub(crate) fn settle(&self) -> Result<(), CuError> {
        self.lock().free.iter_mut().try_for_each(|slot| slot.wait(&self.driver))
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        for slot in self.lock().free.iter().filter(|slot| slot.pinned) {
            // SAFETY: registered by `pin`; as for `Pinned`.
            unsafe { (self.driver.cuMemHostUnregister)(slot.at.cast()) };
        }
    }
}

impl Slot {
    /// Has the devices reach it. Some context is current.
    fn pin(&mut self, driver: &Driver) -> Result<(), CuError> {
        if !self.pinned {
            register(driver, self.at, SLOT, 1)?;
            self.pinned = true;
        }
        Ok(())
    }

    /// The buffer.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        debug_assert!(self.travelling.is_none());
        // SAFETY: a part of the slots' mapping, which this value owns; no transfer uses it.
        unsafe { std::slice::from_raw_parts_mut(self.at, SLOT) }
    }

    /// The transfer that was just put into `stream`, of the current context, uses the buffer.
    pub(crate) fn sent(
        &mut self,
        driver: &Driver,
        ctx: &Context,
        stream: CUstream,
    ) -> Result<(), CuError> {
        let event = self.event(driver, ctx.id)?;
        // SAFETY: this slot's event, of the stream's context.
        check(unsafe { (driver.cuEventRecord)(event, stream) })?;
        self.travelling = Some(event);
        Ok(())
    }

    /// Waits until no transfer uses the buffer.
    pub(crate) fn wait(&mut self, driver: &Driver) -> Result<(), CuError> {
        if let Some(event) = self.travelling.take() {
            // SAFETY: recorded by `sent`. Its context lives: a snapshot holds it while bytes
            // travel, and there is no client that could destroy it before a restore has ended.
            check(unsafe { (driver.cuEventSynchronize)(event) })?;
        }
        Ok(())
    }

    /// As [`Slot::wait`], asking now and then: the driver's threads have no part in it.
    pub(crate) fn ask(&mut self, driver: &Driver) -> Result<(), CuError> {
        const PAUSE: std::time::Duration = std::time::Duration::from_micros(100);
        while let Some(event) = self.travelling {
            std::thread::sleep(PAUSE);
            // SAFETY: recorded by `sent`; its context lives as `wait` says.
            match check(unsafe { (driver.cuEventQuery)(event) }) {
                Err(CuError::NOT_READY) => {}
                over => {
                    self.travelling = None;
                    return over;
                }
            }
        }
        Ok(())
    }

    /// The slot's event of the current context, `ctx`.
    fn event(&mut self, driver: &Driver, ctx: CtxId) -> Result<CUevent, CuError> {
        if let Some((_, event)) = self.events.iter().find(|(of, _)| *of == ctx) {
            return Ok(*event);
        }
        let mut event = CUevent::NULL;
        // SAFETY: a live out pointer.
        check(unsafe { (driver.cuEventCreate)(&mut event, EVENT_FLAGS) })?;
        self.events.push((ctx, event));
        Ok(event)
    }
}
