//! Which memory of graphs' allocation nodes is in use: for the counters of
//! `cuDeviceGetGraphMemAttribute`, and because memory that a launch has allocated outlives its
//! graph until it is freed.

use crate::memory::MEMORY;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Memory at one address.
#[derive(Debug)]
struct Use {
    device: u32,
    bytes: u64,
    /// A launch has allocated it, and nothing has freed it since.
    live: bool,
    /// Executable graphs that were launched or uploaded and allocate it.
    graphs: u32,
    /// No node has it any more: it ends when it is freed.
    orphan: bool,
}

/// Bytes of one device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    pub(crate) used: u64,
    pub(crate) used_high: u64,
    /// Used before, and not given back by `cuDeviceGraphMemTrim` since.
    pub(crate) reserved: u64,
    pub(crate) reserved_high: u64,
}

#[derive(Debug, Default)]
struct Uses {
    memory: BTreeMap<u64, Use>,
    devices: BTreeMap<u32, Counters>,
}

impl Uses {
    fn begin(&mut self, addr: u64, (device, bytes): (u32, u64), live: bool, first: bool) {
        let new = || Use { device, bytes, live: false, graphs: 0, orphan: false };
        let found = self.memory.entry(addr).or_insert_with(new);
        found.live |= live;
        found.graphs += u32::from(first);
        self.count(device);
    }

    /// Ends what one graph, or a launch, has of `addr`. Whether nothing else keeps the memory.
    fn end(&mut self, addr: u64, change: impl FnOnce(&mut Use)) -> bool {
        let Some(found) = self.memory.get_mut(&addr) else { return false };
        change(found);
        let (device, over) = (found.device, !found.live && found.graphs == 0);
        let orphan = found.orphan;
        if over {
            self.memory.remove(&addr);
        }
        self.count(device);
        over && orphan
    }

    /// Brings a device's counters up to date.
    fn count(&mut self, device: u32) {
        let of_device = self.memory.values().filter(|found| found.device == device);
        let used = of_device.map(|found| found.bytes).sum();
        let counters = self.devices.entry(device).or_default();
        counters.used = used;
        counters.used_high = counters.used_high.max(used);
        counters.reserved = counters.reserved.max(used);
        counters.reserved_high = counters.reserved_high.max(counters.reserved);
    }
}

fn uses() -> MutexGuard<'static, Uses> {
    static USES: Mutex<Uses> =
        Mutex::new(Uses { memory: BTreeMap::new(), devices: BTreeMap::new() });
    USES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An executable graph that allocates at these addresses is launched (`live`) or uploaded; `first`:
/// it was neither before.
pub(crate) fn graph_begins(addresses: &[u64], live: bool, first: bool) {
    for &addr in addresses {
        let found = MEMORY.table().find(addr).map(|found| (found.device, found.taken));
        if let Some(place) = found {
            uses().begin(addr, place, live, first);
        }
    }
}

/// An executable graph that was launched or uploaded is gone.
pub(crate) fn graph_ends(addresses: &[u64]) {
    let mut uses = uses();
    for &addr in addresses {
        uses.end(addr, |found| found.graphs = found.graphs.saturating_sub(1));
    }
}

/// What a launch allocated at `addr` is freed. Whether its graph is gone, so that it is to be
/// released.
pub(crate) fn graph_freed(addr: u64) -> bool {
    uses().end(addr, |found| found.live = false)
}

/// No node has the memory at `addr` any more. Whether it is in use all the same, until it is freed.
pub(super) fn outlives(addr: u64) -> bool {
    let mut uses = uses();
    let Some(found) = uses.memory.get_mut(&addr).filter(|found| found.live) else { return false };
    found.orphan = true;
    true
}

/// The memory at `addr` is gone, with its context if not by itself.
pub(in crate::memory) fn graph_gone(addr: u64) {
    uses().end(addr, |found| (found.live, found.graphs, found.orphan) = (false, 0, false));
}

/// A device's counters now.
pub(crate) fn graph_counters(device: u32) -> Counters {
    uses().devices.get(&device).copied().unwrap_or_default()
}

/// Sets a device's counters as `change` says, and brings them up to date.
pub(crate) fn change_graph_counters(device: u32, change: impl FnOnce(&mut Counters)) {
    let mut uses = uses();
    change(uses.devices.entry(device).or_default());
    uses.count(device);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_counted_until_it_is_freed_and_its_graph_gone() {
        let mut uses = Uses::default();
        uses.begin(0x1000, (0, 512), true, true);
        uses.begin(0x1000, (0, 512), true, false);
        uses.begin(0x2000, (0, 1024), false, true);
        let counters = |uses: &Uses| uses.devices[&0];
        assert_eq!((counters(&uses).used, counters(&uses).reserved), (1536, 1536));
        assert!(!uses.end(0x2000, |found| found.graphs -= 1));
        assert!(!uses.end(0x1000, |found| found.live = false));
        assert_eq!((counters(&uses).used, counters(&uses).used_high), (512, 1536));
        uses.begin(0x1000, (0, 512), true, false);
        assert!(!uses.end(0x1000, |found| found.graphs -= 1), "live still");
        uses.memory.get_mut(&0x1000).unwrap().orphan = true;
        assert!(uses.end(0x1000, |found| found.live = false), "to be released");
        assert_eq!((counters(&uses).used, counters(&uses).reserved), (0, 1536));
    }
}
