//! Host memory that kernels use directly: pages of the shared arena, and of aliases of it,
//! registered with the driver.

use crate::driver::{Driver, check};
use crate::seams::{self, Seams};
use kedge_cuda_types::CuError;
use kedge_protocol::Copy3d;
use std::collections::BTreeMap;
use std::ptr;
use std::sync::Arc;

const PAGE: u64 = 4096;

/// CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP.
const FLAGS: u32 = 1 | 2;

/// What is registered. Allocations share pages, and the driver registers a page once, so each run
/// of pages that was registered together counts the allocations that lie in it.
pub(crate) struct HostMemory {
    driver: Arc<Driver>,
    registered: Runs,
}

/// First page → (end, allocations in it).
type Runs = BTreeMap<u64, (u64, u32)>;

/// The runs that a range touches.
fn touched(runs: &mut Runs, from: u64, to: u64) -> impl Iterator<Item = (u64, &mut (u64, u32))> {
    let before = runs.range(..from).next_back().filter(|(_, (end, _))| *end > from);
    let first = before.map_or(from, |(start, _)| *start);
    runs.range_mut(first..to).map(|(start, run)| (*start, run))
}

/// The parts of a range that lie in no run.
fn gaps(runs: &mut Runs, from: u64, to: u64) -> Vec<(u64, u64)> {
    let (mut gaps, mut at) = (Vec::new(), from);
    for (start, (end, _)) in touched(runs, from, to) {
        if start > at {
            gaps.push((at, start));
        }
        at = *end;
    }
    if at < to {
        gaps.push((at, to));
    }
    gaps
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
        for (start, end) in gaps(&mut self.registered, from, to) {
            if let Err(error) = self.register(start, end) {
                let _ = self.drop_unused(from, to);
                return Err(error);
            }
            self.registered.insert(start, (end, 0));
        }
        touched(&mut self.registered, from, to).for_each(|(_, (_, count))| *count += 1);
        Ok(())
    }

    pub(crate) fn unshare(&mut self, addr: u64, size: u64) -> Result<(), CuError> {
        let (from, to) = pages(addr, size)?;
        if !gaps(&mut self.registered, from, to).is_empty() {
            return Err(CuError::INVALID_VALUE);
        }
        touched(&mut self.registered, from, to).for_each(|(_, (_, count))| *count -= 1);
        self.drop_unused(from, to)
    }

    /// Where in [from, to) one registration ends or another begins.
    fn seams_within(&self, (from, to): (u64, u64)) -> impl Iterator<Item = u64> {
        let before = self.registered.range(..from).next_back();
        let inside = self.registered.range(from..to.max(from));
        let edges = before.into_iter().chain(inside).flat_map(|(start, (end, _))| [*start, *end]);
        edges.filter(move |edge| from < *edge && *edge < to)
    }

    /// The seams of what a copy touches.
    pub(crate) fn seams(&self, copy: &Copy3d) -> Seams {
        let extents = [copy.src, copy.dst].map(|place| seams::extent(place, copy.shape()));
        Seams::new(extents.into_iter().flatten().flat_map(|extent| self.seams_within(extent)))
    }

    fn register(&self, from: u64, to: u64) -> Result<(), CuError> {
        let start = ptr::with_exposed_provenance_mut(from as usize);
        // SAFETY: pages of the shared arena or of an alias: the host keeps them mapped while
        // shared.
        check(unsafe { (self.driver.cuMemHostRegister_v2)(start, (to - from) as usize, FLAGS) })?;
        let mut device = 0;
        // SAFETY: a live out pointer, and the range that was just registered.
        let asked =
            check(unsafe { (self.driver.cuMemHostGetDevicePointer_v2)(&mut device, start, 0) });
        if asked.is_err() || device != from {
            // SAFETY: `start` was registered by the call before.
            unsafe { (self.driver.cuMemHostUnregister)(start) };
            return Err(asked.err().unwrap_or(CuError::NOT_SUPPORTED));
        }
        Ok(())
    }

    /// Unregisters the runs of a range in which no allocation lies any longer.
    fn drop_unused(&mut self, from: u64, to: u64) -> Result<(), CuError> {
        let unused = touched(&mut self.registered, from, to).filter(|(_, (_, count))| *count == 0);
        let unused: Vec<u64> = unused.map(|(start, _)| start).collect();
        let mut outcome = Ok(());
        for start in unused {
            self.registered.remove(&start);
            let start = ptr::with_exposed_provenance_mut(start as usize);
            // SAFETY: registered by `share`, and used by no work any longer.
            let ended = check(unsafe { (self.driver.cuMemHostUnregister)(start) });
            outcome = outcome.and(ended);
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_protocol::{Place, Shape};

    #[test]
    fn a_range_is_cut_where_registrations_meet() {
        let mut memory = HostMemory::new(&Arc::new(Driver::refusing()));
        memory.registered =
            Runs::from([(0x1000, (0x4000, 1)), (0x4000, (0x6000, 1)), (0x8000, (0x9000, 1))]);
        let place = |addr| Place::Mapped { addr, pitch: 0, slice: 0 };
        let line = |addr, size| Copy3d::new(place(addr), place(addr), Shape::line(size));
        let seams = |addr, size| memory.seams(&line(addr, size));
        let at = |seams: &[u64]| Seams::new(seams.iter().copied());
        assert_eq!(seams(0x2200, 0x3000), at(&[0x4000]));
        assert_eq!(seams(0x1000, 0x3000), at(&[]));
        assert_eq!(seams(0, u64::MAX), at(&[0x1000, 0x4000, 0x6000, 0x8000, 0x9000]));
        let copy = Copy3d::new(place(0x7000), place(0x3000), Shape::line(0x1800));
        assert_eq!(memory.seams(&copy), at(&[0x4000, 0x8000]));
        let client = Place::Client { addr: 0, pitch: 0, slice: 0 };
        let copy = Copy3d::new(client, place(0x3000), Shape::line(u64::MAX));
        assert_eq!(memory.seams(&copy), at(&[]));
    }

    #[test]
    fn neighbours_share_a_page() {
        let mut runs = Runs::from([(0x1000, (0x4000, 1)), (0x8000, (0x9000, 1))]);
        assert_eq!(gaps(&mut runs, 0x3000, 0x6000), [(0x4000, 0x6000)]);
        assert_eq!(gaps(&mut runs, 0x2000, 0x3000), []);
        assert_eq!(gaps(&mut runs, 0, 0xa000), [(0, 0x1000), (0x4000, 0x8000), (0x9000, 0xa000)]);
        assert_eq!(gaps(&mut runs, 0x4000, 0x5000), [(0x4000, 0x5000)]);
        let starts: Vec<u64> = touched(&mut runs, 0x3fff, 0x8001).map(|(start, _)| start).collect();
        assert_eq!(starts, [0x1000, 0x8000]);
    }
}
