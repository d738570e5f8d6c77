//! Policies of memory: on which NUMA nodes the pages of a mapping are to lie (mbind(2)).

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bits of a mask of nodes.
pub(crate) const NODES: usize = 1024;
/// The modes of linux/mempolicy.h, as numa_maps calls them.
const MODES: [(&str, i32); 7] = [
    ("prefer", 1),
    ("bind", 2),
    ("interleave", 3),
    ("local", 4),
    ("prefer (many)", 5),
    ("weighted interleave", 6),
    ("default", 0),
];
/// What may be added to them.
const FLAGS: [(&str, i32); 3] =
    [("static", 1 << 15), ("relative", 1 << 14), ("balancing", 1 << 13)];

/// The mode of set_mempolicy(2), and its nodes, a bit each.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Policy(pub(crate) i32, pub(crate) Vec<u64>);

impl Policy {
    /// Whether an image may say so.
    pub(crate) fn is_possible(&self) -> bool {
        self.1.len() <= NODES / 64
    }

    /// Its nodes, as calls take them: [`NODES`] bits.
    pub(crate) fn mask(&self) -> Vec<u8> {
        let mut mask = self.1.clone();
        mask.resize(NODES / 64, 0);
        mask.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Reads what numa_maps has behind an address, such as `bind=static:0-1,4 anon=2`; `None` of
    /// the default, and of what is not known.
    fn parse(line: &str) -> Option<Policy> {
        let is_it = |(name, _): &&(&str, i32)| {
            let rest = line.strip_prefix(name);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['=', ':', ' ']))
        };
        // `prefer` is how `prefer (many)` begins.
        let (name, mode) = MODES.iter().filter(is_it).max_by_key(|(name, _)| name.len())?;
        let mut mode = *mode;
        let text = line[name.len()..].split(' ').next().unwrap_or_default();
        let (flags, nodes) = text.split_once(':').unwrap_or((text, ""));
        let flags = flags.strip_prefix('=').unwrap_or(flags);
        for flag in flags.split('|').filter(|flag| !flag.is_empty()) {
            mode |= FLAGS.iter().find(|(known, _)| *known == flag)?.1;
        }
        let mut mask = Vec::new();
        for range in nodes.split(',').filter(|range| !range.is_empty()) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
            if last >= NODES {
                return None;
            }
            mask.resize(mask.len().max(last / 64 + 1), 0);
            (first..=last).for_each(|node| mask[node / 64] |= 1 << (node % 64));
        }
        (mode != 0).then_some(Policy(mode, mask))
    }
}

/// The policies of a process's mappings, by their first addresses.
pub(crate) type Policies = BTreeMap<u64, Policy>;

/// Reads those of a process, as its numa_maps has them. Of a mapping without one, it has the
/// process's own.
pub(crate) fn told(numa_maps: &str) -> Policies {
    let policy = |line: &str| {
        let (start, rest) = line.split_once(' ')?;
        Some((u64::from_str_radix(start, 16).ok()?, Policy::parse(rest)?))
    };
    numa_maps.lines().filter_map(policy).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_tells_is_read() {
        let policy = |text: &str| Policy::parse(text);
        assert_eq!(policy("default"), None);
        assert_eq!(policy("bind:0 anon=2 N0=2"), Some(Policy(2, vec![1])));
        assert_eq!(policy("bind=static:0-1,65"), Some(Policy(2 | 1 << 15, vec![3, 2])));
        assert_eq!(policy("prefer=balancing|relative:2"), Some(Policy(1 | 3 << 13, vec![4])));
        assert_eq!(policy("prefer (many):1 file=/a:b"), Some(Policy(5, vec![2])));
        assert_eq!(policy("prefer:1 file=/a:b"), Some(Policy(1, vec![2])));
        assert_eq!(policy("weighted interleave:0 heap"), Some(Policy(6, vec![1])));
        assert_eq!(policy("local stack"), Some(Policy(4, vec![])));
        assert_eq!(policy("prefers:0"), None);
        assert_eq!(policy("interleave:0-4000"), None);
        assert_eq!(policy("bind=odd:0"), None);
    }
}
