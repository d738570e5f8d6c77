//! What the program has allocated: every range of device-accessible memory, by address.

use kedge_cuda_types::handle::{CUcontext, CUmemoryPool};
use kedge_protocol::{CtxId, MemHandleId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// How a range came to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `cuMemAlloc`.
    Device,
    /// `cuMemAllocAsync`, `cuMemAllocFromPoolAsync`.
    Pool(CUmemoryPool),
    /// An allocation node of a graph, for the graph's life.
    Graph,
    /// A module's variable, which its module owns; `managed`: the host can access it as well.
    Variable { managed: bool },
    /// `cuMemMap`: a mapping of a handle.
    Mapping(MemHandleId),
    /// `cuIpcOpenMemHandle`, or `cuMemPoolImportPointer` where `pooled`: another process's.
    Peer { pooled: bool },
    /// `cuMemHostAlloc`, with its flags.
    Pinned { flags: u32 },
    /// `cuMemHostRegister`, with its flags; `host` is the program's address of it, which devices
    /// can use as well where `aliased`. The arena shows the program's own shared pages where they
    /// are `theirs`; else private pages have moved into it.
    Registered { flags: u32, host: u64, aliased: bool, theirs: bool },
    /// `cuMemAllocManaged`, with its flags.
    Managed { flags: u32 },
}

/// A range of memory that a device can access.
#[derive(Debug)]
pub(crate) struct Allocation {
    /// First address, as the device sees it.
    pub(crate) base: u64,
    /// Bytes that the program asked for.
    pub(crate) size: u64,
    /// Bytes that it occupies in its arena.
    pub(crate) taken: u64,
    pub(crate) kind: Kind,
    /// The context that was current when it was made.
    pub(crate) context: CUcontext,
    pub(crate) ctx: CtxId,
    /// Device ordinal of that context.
    pub(crate) device: u32,
    /// Never used twice in a process (`CU_POINTER_ATTRIBUTE_BUFFER_ID`).
    pub(crate) id: u64,
    /// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
    pub(crate) sync_memops: AtomicBool,
}

impl Allocation {
    /// First address, as the program sees it; 0 for memory that the host cannot access.
    pub(crate) fn host_base(&self) -> u64 {
        match self.kind {
            Kind::Pinned { .. } | Kind::Managed { .. } | Kind::Variable { managed: true } => {
                self.base
            }
            Kind::Registered { host, .. } => host,
            _ => 0,
        }
    }

    /// What a kernel is to be given for device address `addr` of this allocation: the program's own
    /// address where devices know that.
    pub(crate) fn kernel_address(&self, addr: u64) -> u64 {
        match self.kind {
            Kind::Registered { host, aliased: true, .. } => host + (addr - self.base),
            _ => addr,
        }
    }

    /// Whether it is managed memory, variables included.
    pub(crate) fn managed(&self) -> bool {
        matches!(self.kind, Kind::Managed { .. } | Kind::Variable { managed: true })
    }

    /// Whether the bytes lie in a device's own memory.
    pub(crate) fn on_device(&self) -> bool {
        self.host_base() == 0
    }

    fn holds(&self, addr: u64) -> bool {
        addr.wrapping_sub(self.base) < self.size
    }
}

/// All live allocations of the process. Ranges never overlap.
#[derive(Debug, Default)]
pub(crate) struct Table {
    by_addr: BTreeMap<u64, Arc<Allocation>>,
    /// Registered ranges: the program's address → the device's.
    by_host: BTreeMap<u64, u64>,
}

impl Table {
    pub(crate) fn insert(&mut self, allocation: Allocation) {
        if let Kind::Registered { host, .. } = allocation.kind {
            self.by_host.insert(host, allocation.base);
        }
        self.by_addr.insert(allocation.base, Arc::new(allocation));
    }

    /// Removes the allocation that begins at `base`, if `wanted` says so.
    pub(crate) fn remove(
        &mut self,
        base: u64,
        wanted: impl FnOnce(&Allocation) -> bool,
    ) -> Option<Arc<Allocation>> {
        if !wanted(self.by_addr.get(&base)?) {
            return None;
        }
        let allocation = self.by_addr.remove(&base)?;
        if let Kind::Registered { host, .. } = allocation.kind {
            self.by_host.remove(&host);
        }
        Some(allocation)
    }

    /// The allocation that holds a device address.
    pub(crate) fn find(&self, addr: u64) -> Option<&Arc<Allocation>> {
        let (_, allocation) = self.by_addr.range(..=addr).next_back()?;
        allocation.holds(addr).then_some(allocation)
    }

    /// The registered allocation that holds a host address, and the address's offset in it.
    pub(crate) fn find_registered(&self, host: u64) -> Option<(&Arc<Allocation>, u64)> {
        let (start, base) = self.by_host.range(..=host).next_back()?;
        let allocation = self.by_addr.get(base)?;
        let offset = host - start;
        (offset < allocation.size).then_some((allocation, offset))
    }

    /// A registered allocation that shares a byte with host range [host, host+size).
    pub(crate) fn overlapping_registered(&self, host: u64, size: u64) -> Option<&Arc<Allocation>> {
        let (start, base) = self.by_host.range(..host.saturating_add(size)).next_back()?;
        self.by_addr.get(base).filter(|allocation| start + allocation.size > host)
    }

    /// The allocation that holds an address of either kind, and the device's address of it.
    pub(crate) fn resolve(&self, addr: u64) -> Option<(&Arc<Allocation>, u64)> {
        if let Some(found) = self.find(addr) {
            return Some((found, addr));
        }
        let (found, offset) = self.find_registered(addr)?;
        Some((found, found.base + offset))
    }

    /// Whether all of [addr, addr+size) is allocated; mappings that touch count as one range.
    pub(crate) fn covers(&self, addr: u64, size: u64) -> bool {
        let Some(end) = addr.checked_add(size) else { return false };
        let mut at = addr;
        while at < end {
            match self.find(at) {
                Some(found) if at == addr || matches!(found.kind, Kind::Mapping(_)) => {
                    at = found.base + found.size;
                }
                _ => return false,
            }
        }
        true
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Allocation>> {
        self.by_addr.values()
    }

    /// Allocations that share a byte with [addr, addr+size), from the first to the last.
    pub(crate) fn within(&self, addr: u64, size: u64) -> impl Iterator<Item = &Arc<Allocation>> {
        let start = self.find(addr).map_or(addr, |found| found.base);
        self.by_addr.range(start..addr.saturating_add(size)).map(|(_, allocation)| allocation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocation(base: u64, size: u64, kind: Kind) -> Allocation {
        Allocation {
            base,
            size,
            taken: size,
            kind,
            context: CUcontext(1),
            ctx: CtxId(1),
            device: 0,
            id: base,
            sync_memops: AtomicBool::new(false),
        }
    }

    #[test]
    fn finds_by_any_address_inside() {
        let mut table = Table::default();
        table.insert(allocation(1000, 100, Kind::Device));
        table.insert(allocation(2000, 100, Kind::Device));
        assert_eq!(table.find(1099).map(|a| a.base), Some(1000));
        assert!(table.find(1100).is_none() && table.find(999).is_none());
        assert!(table.covers(1000, 100) && !table.covers(1000, 101));
        assert!(!table.covers(u64::MAX, 2));
        assert!(table.remove(1001, |_| true).is_none(), "only a base can be freed");
        assert!(table.remove(1000, |a| a.kind != Kind::Device).is_none());
        assert!(table.remove(1000, |_| true).is_some() && table.find(1000).is_none());
    }

    #[test]
    fn touching_allocations_are_one_range_only_where_mapped() {
        let mut table = Table::default();
        table.insert(allocation(0x1000, 0x1000, Kind::Mapping(MemHandleId(1))));
        table.insert(allocation(0x2000, 0x1000, Kind::Mapping(MemHandleId(2))));
        table.insert(allocation(0x3000, 0x1000, Kind::Device));
        assert!(table.covers(0x1800, 0x1800));
        assert!(!table.covers(0x2800, 0x1000));
        let bases = |addr, size| table.within(addr, size).map(|a| a.base).collect::<Vec<_>>();
        assert_eq!(bases(0x1800, 0x1000), [0x1000, 0x2000]);
        assert_eq!(bases(0x2000, 1), [0x2000]);
    }

    #[test]
    fn registered_memory_has_two_addresses() {
        let mut table = Table::default();
        table.insert(allocation(
            0x9000,
            0x100,
            Kind::Registered { flags: 0, host: 0x40, aliased: false, theirs: false },
        ));
        assert_eq!(table.resolve(0x50).map(|(a, at)| (a.base, at)), Some((0x9000, 0x9010)));
        assert_eq!(table.resolve(0x9010).map(|(_, at)| at), Some(0x9010));
        assert!(table.resolve(0x140).is_none());
        let overlaps = |host, size| table.overlapping_registered(host, size).is_some();
        assert!(overlaps(0x100, 0x100) && !overlaps(0x140, 1) && !overlaps(0, 0x40));
        table.remove(0x9000, |_| true);
        assert!(table.resolve(0x50).is_none());
    }
}
