//! Host memory that kernels use directly: pages of the shared arena, and of aliases of it,
//! registered with the driver.

use crate::driver::{Driver, check};
use kedge_cuda_types::CuError;
use std::collections::BTreeMap;
use std::ptr;
use std::sync::Arc;

const PAGE: u64 = 4096;

/// CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP.
const FLAGS: u32 = 1 | 2;

/// What is registered. Small allocations share pages, and the driver registers a page once, so a
/// page that several allocations lie in has a count.
pub(crate) struct HostMemory {
    driver: Arc<Driver>,
    /// First page → (end, allocations in it).
    registered: BTreeMap<u64, (u64, u32)>,
}

fn pages(addr: u64, size: u64) -> Result<(u64, u64), CuError> {
    let end = addr.checked_add(size.max(1)).ok_or(CuError::INVALID_VALUE)?;
    let end = end.checked_next_multiple_of(PAGE).ok_or(CuError::INVALID_VALUE)?;
    Ok((addr / PAGE * PAGE, end))
}

impl HostMemory {
    pub(crate) fn new(driver: &Arc<Driver>) -> HostMemory {
        HostMemory { driver: Arc::clone(driver), registered: BTreeMap::new() }
    }

    /// Makes [addr, addr+size) usable by kernels, in every context.
    pub(crate) fn share(&mut self, addr: u64, size: u64) -> Result<(), CuError> {
        let (from, to) = pages(addr, size)?;
        if let Some((end, count)) = self.registered.get_mut(&from)
            && *end == to
        {
            *count += 1;
            return Ok(());
        }
        let start = ptr::with_exposed_provenance_mut(from as usize);
        // SAFETY: pages of the shared arena or of an alias: the host keeps them mapped while shared.
        check(unsafe { (self.driver.cuMemHostRegister_v2)(start, (to - from) as usize, FLAGS) })?;
        let mut device = 0;
        // SAFETY: a live out pointer, and the range that was just registered.
        let asked =
            check(unsafe { (self.driver.cuMemHostGetDevicePointer_v2)(&mut device, start, 0) });
        if asked.is_err() || device != from {
            // SAFETY: as registered above.
            unsafe { (self.driver.cuMemHostUnregister)(start) };
            return Err(asked.err().unwrap_or(CuError::NOT_SUPPORTED));
        }
        self.registered.insert(from, (to, 1));
        Ok(())
    }

    pub(crate) fn unshare(&mut self, addr: u64, size: u64) -> Result<(), CuError> {
        let (from, to) = pages(addr, size)?;
        let found = self.registered.get_mut(&from).filter(|(end, _)| *end == to);
        let (_, count) = found.ok_or(CuError::INVALID_VALUE)?;
        *count -= 1;
        if *count > 0 {
            return Ok(());
        }
        self.registered.remove(&from);
        let start = ptr::with_exposed_provenance_mut(from as usize);
        // SAFETY: registered by `share`, and used by no work any longer.
        check(unsafe { (self.driver.cuMemHostUnregister)(start) })
    }
}
