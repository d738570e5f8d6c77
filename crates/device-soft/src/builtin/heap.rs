//! The device heap: what a kernel's `malloc` and `free` use (CUDA programming guide, "Dynamic
//! Global Memory Allocation and Operations").

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// As the programming guide promises.
const ALIGN: u64 = 16;

/// A best-fit allocator over one range. What it knows lies outside of the range, where no kernel
/// can damage it.
pub struct Heap {
    state: Mutex<State>,
}

struct State {
    free: BTreeMap<u64, u64>,
    /// The same free ranges as (length, address).
    by_size: BTreeSet<(u64, u64)>,
    used: HashMap<u64, u64>,
}

impl Heap {
    pub fn new(base: u64, size: u64) -> Self {
        let mut state =
            State { free: BTreeMap::new(), by_size: BTreeSet::new(), used: HashMap::new() };
        let start = base.next_multiple_of(ALIGN);
        state.insert_free(start, size.saturating_sub(start - base) / ALIGN * ALIGN);
        Self { state: Mutex::new(state) }
    }

    /// A heap of which the ranges `used`, as [`Heap::used`] gave them, are taken.
    ///
    /// `None` where they do not lie in it, one after the other.
    pub fn with(base: u64, size: u64, used: &[(u64, u64)]) -> Option<Self> {
        let heap = Self::new(base, size);
        let mut state = heap.lock();
        let (mut at, len) = state.free.pop_first().unwrap_or((base, 0));
        let end = at + len;
        state.by_size.clear();
        for &(addr, len) in used {
            let next = addr.checked_add(len)?;
            let whole = len > 0 && (addr | len).is_multiple_of(ALIGN);
            if !whole || addr < at || next > end {
                return None;
            }
            state.insert_free(at, addr - at);
            state.used.insert(addr, len);
            at = next;
        }
        state.insert_free(at, end - at);
        drop(state);
        Some(heap)
    }

    /// (address, length) of what is taken, in order.
    pub fn used(&self) -> Vec<(u64, u64)> {
        let mut used: Vec<_> = self.lock().used.iter().map(|(addr, len)| (*addr, *len)).collect();
        used.sort_unstable();
        used
    }

    /// The address of `bytes` new bytes; 0 where the heap has no such range.
    pub fn malloc(&self, bytes: u64) -> u64 {
        let Some(need) = bytes.max(1).checked_next_multiple_of(ALIGN) else { return 0 };
        let mut state = self.lock();
        let Some(&(len, addr)) = state.by_size.range((need, 0)..).next() else { return 0 };
        state.remove_free(addr, len);
        state.insert_free(addr + need, len - need);
        state.used.insert(addr, need);
        addr
    }

    /// False where `addr` is not what `malloc` gave, or was freed already.
    pub fn free(&self, addr: u64) -> bool {
        let mut state = self.lock();
        let Some(mut len) = state.used.remove(&addr) else { return false };
        let mut addr = addr;
        if let Some(&next) = state.free.get(&(addr + len)) {
            state.remove_free(addr + len, next);
            len += next;
        }
        if let Some((&before, &size)) = state.free.range(..addr).next_back()
            && before + size == addr
        {
            state.remove_free(before, size);
            addr = before;
            len += size;
        }
        state.insert_free(addr, len);
        true
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn insert_free(&mut self, addr: u64, len: u64) {
        if len > 0 {
            self.free.insert(addr, len);
            self.by_size.insert((len, addr));
        }
    }

    fn remove_free(&mut self, addr: u64, len: u64) {
        self.free.remove(&addr);
        self.by_size.remove(&(len, addr));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gives_disjoint_aligned_ranges_and_takes_them_back() {
        let heap = Heap::new(0x1008, 0x1000);
        let (a, b, c) = (heap.malloc(1), heap.malloc(100), heap.malloc(0));
        assert_eq!((a, b, c), (0x1010, 0x1020, 0x1090));
        assert!(heap.free(b) && !heap.free(b) && !heap.free(0x1030));
        assert_eq!(heap.malloc(112), b, "best fit takes the hole");
        assert!(heap.free(a) && heap.free(b) && heap.free(c));
        assert_eq!(heap.malloc(0xff0), 0x1010, "everything is one range again");
        assert_eq!(heap.malloc(1), 0);
    }

    #[test]
    fn a_heap_made_of_what_was_used_goes_on_like_the_first() {
        let heap = Heap::new(0x1008, 0x1000);
        let all: Vec<u64> = (0..20).map(|index| heap.malloc(40 + index)).collect();
        all.iter().step_by(3).for_each(|addr| assert!(heap.free(*addr)));
        let again = Heap::with(0x1008, 0x1000, &heap.used()).unwrap();
        for bytes in [1, 48, 64, 700, 3000] {
            assert_eq!(again.malloc(bytes), heap.malloc(bytes));
        }
        assert_eq!(again.used(), heap.used());
        assert!(again.free(all[1]) && !again.free(all[0] + 16));
    }

    #[test]
    fn what_cannot_have_been_used_is_refused() {
        let refused = |used: &[(u64, u64)]| Heap::with(0x1000, 0x1000, used).is_none();
        assert!(!refused(&[]) && !refused(&[(0x1000, 16), (0x1010, 0xff0)]));
        assert!(refused(&[(0x1010, 16), (0x1000, 16)]) && refused(&[(0x1000, 32), (0x1010, 16)]));
        assert!(refused(&[(0x1000, 0)]) && refused(&[(0x1008, 16)]) && refused(&[(0x1000, 8)]));
        assert!(refused(&[(0x2000, 16)]) && refused(&[(0xff0, 32)]));
        assert!(refused(&[(0x1000, u64::MAX - 15)]) && refused(&[(u64::MAX - 15, 16)]));
    }

    #[test]
    fn refuses_what_cannot_fit() {
        let heap = Heap::new(0x1000, 64);
        assert_eq!((heap.malloc(65), heap.malloc(u64::MAX)), (0, 0));
        assert_eq!(Heap::new(0x1001, 8).malloc(1), 0);
    }
}
