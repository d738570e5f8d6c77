//! What a program has advised for parts of managed memory, and where it has prefetched them to.

use kedge_cuda_types::memory::CUmemLocation;
use std::collections::BTreeMap;
use std::ops::Range;

/// What holds for some pages.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Advice {
    pub(super) read_mostly: bool,
    pub(super) preferred: Option<CUmemLocation>,
    pub(super) accessed_by: Vec<i32>,
    pub(super) prefetched: Option<CUmemLocation>,
}

/// What holds for the pages of one allocation: each advice for those from its key on, up to the
/// next key.
#[derive(Debug, Clone, Default)]
pub(super) struct Advised(BTreeMap<u64, Advice>);

impl Advised {
    /// Changes what holds for a range of pages.
    pub(super) fn change(&mut self, pages: &Range<u64>, change: impl Fn(&mut Advice)) {
        if pages.is_empty() {
            return;
        }
        for bound in [pages.start, pages.end] {
            let advice = self.at(bound);
            self.0.insert(bound, advice);
        }
        self.0.range_mut(pages.clone()).for_each(|(_, advice)| change(advice));
        // What is as it is before needs no entry.
        let mut before = Advice::default();
        self.0.retain(|_, advice| {
            let differs = *advice != before;
            before = advice.clone();
            differs
        });
    }

    /// Returns what holds for all of a range (not empty): a location only where it is the same for
    /// each page, and the devices that are noted for each.
    pub(super) fn of(&self, pages: &Range<u64>) -> Advice {
        let mut all = self.at(pages.start);
        for (_, other) in self.0.range(pages.clone()) {
            all.read_mostly &= other.read_mostly;
            all.preferred = all.preferred.filter(|at| other.preferred == Some(*at));
            all.prefetched = all.prefetched.filter(|at| other.prefetched == Some(*at));
            all.accessed_by.retain(|device| other.accessed_by.contains(device));
        }
        all
    }

    fn at(&self, page: u64) -> Advice {
        self.0.range(..=page).next_back().map(|(_, advice)| advice.clone()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_cuda_types::memory::{CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_LOCATION_TYPE_HOST};

    const HOST: CUmemLocation = CUmemLocation { type_: CU_MEM_LOCATION_TYPE_HOST, id: 0 };
    const DEVICE: CUmemLocation = CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: 1 };

    #[test]
    fn a_range_is_told_what_holds_for_all_of_it() {
        let mut advised = Advised::default();
        advised.change(&(10..20), |advice| advice.preferred = Some(DEVICE));
        advised.change(&(15..30), |advice| advice.read_mostly = true);
        advised.change(&(18..19), |advice| advice.preferred = Some(HOST));
        let preferred = |pages: Range<u64>| advised.of(&pages).preferred;
        assert_eq!(
            [preferred(10..18), preferred(18..19), preferred(19..20)],
            [Some(DEVICE), Some(HOST), Some(DEVICE)]
        );
        assert_eq!([preferred(10..19), preferred(9..11), preferred(19..21)], [None; 3]);
        let mostly = |pages: Range<u64>| advised.of(&pages).read_mostly;
        assert!(mostly(15..30) && !mostly(14..16) && !mostly(29..31) && !mostly(40..41));
    }

    #[test]
    fn devices_are_told_that_are_noted_for_each_page() {
        let mut advised = Advised::default();
        advised.change(&(0..10), |advice| advice.accessed_by = vec![0, 1]);
        advised.change(&(5..10), |advice| advice.accessed_by.retain(|device| *device != 0));
        assert_eq!(advised.of(&(0..5)).accessed_by, [0, 1]);
        assert_eq!(advised.of(&(4..6)).accessed_by, [1]);
        assert!(advised.of(&(9..11)).accessed_by.is_empty());
    }

    #[test]
    fn advice_that_is_taken_back_leaves_nothing() {
        let mut advised = Advised::default();
        for at in 0..100 {
            advised.change(&(at * 7..at * 7 + 3), |advice| advice.read_mostly = true);
        }
        advised.change(&(0..1000), |advice| advice.read_mostly = false);
        assert!(advised.0.is_empty(), "{advised:?}");
        advised.change(&(5..5), |advice| advice.read_mostly = true);
        assert!(advised.0.is_empty());
    }
}
