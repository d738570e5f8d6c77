//! Which processors and memory nodes software devices are of: those of this process.

use rustix::thread::{CpuSet, sched_getaffinity};
use std::fs;

/// Nodes of a machine that does not tell: one.
const ONE_NODE: &str = "0";

/// The processors that this process may run on.
pub(super) fn processors() -> Vec<usize> {
    let set = sched_getaffinity(None).unwrap_or_default();
    (0..CpuSet::MAX_CPU).filter(|processor| set.is_set(*processor)).collect()
}

/// The nodes that have memory.
pub(super) fn nodes() -> Vec<usize> {
    let text = fs::read_to_string("/sys/devices/system/node/has_memory");
    ranges(text.as_deref().unwrap_or(ONE_NODE))
}

/// The numbers of a list such as "0-2,7".
fn ranges(text: &str) -> Vec<usize> {
    let range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    let ranges = text.trim().split(',').filter_map(range);
    ranges.flat_map(|range: std::ops::RangeInclusive<usize>| range.take(CpuSet::MAX_CPU)).collect()
}

/// Bits in `count` words of 64; those beyond are left out.
pub(super) fn mask(places: &[usize], count: u64) -> Vec<u8> {
    let mut words = vec![0u64; count as usize];
    for place in places {
        if let Some(word) = words.get_mut(place / 64) {
            *word |= 1 << (place % 64);
        }
    }
    words.into_iter().flat_map(u64::to_le_bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_become_masks() {
        assert_eq!(ranges("0-2,7\n"), [0, 1, 2, 7]);
        assert_eq!(ranges("x,3-1"), Vec::<usize>::new());
        let mask = mask(&[0, 65, 200], 2);
        assert_eq!(mask, [1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        assert!(!processors().is_empty() && !nodes().is_empty());
    }
}
