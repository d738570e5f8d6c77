//! Which spans of the view are mapped: those in which something is allocated.

use kedge_pages::{BLOCK, Pages};
use std::collections::BTreeMap;

/// Spans of [`BLOCK`] pages, by their numbers, and how many allocations each holds some of.
#[derive(Debug, Default)]
pub(super) struct Spans(BTreeMap<u64, u64>);

impl Spans {
    /// There is one allocation more. Returns the pages of the spans that were nobody's so far.
    pub(super) fn enter(&mut self, pages: &Pages) -> Vec<Pages> {
        let mut new = Vec::new();
        for span in spans_of(pages) {
            let users = self.0.entry(span).or_default();
            *users += 1;
            if *users == 1 {
                join(&mut new, span);
            }
        }
        new
    }

    /// There is one less. Returns the pages of the spans that are nobody's any more.
    pub(super) fn leave(&mut self, pages: &Pages) -> Vec<Pages> {
        let mut over = Vec::new();
        for span in spans_of(pages) {
            let Some(users) = self.0.get_mut(&span) else { continue };
            *users -= 1;
            if *users == 0 {
                self.0.remove(&span);
                join(&mut over, span);
            }
        }
        over
    }
}

fn spans_of(pages: &Pages) -> std::ops::Range<u64> {
    pages.start / BLOCK..pages.end.div_ceil(BLOCK)
}

/// Adds the pages of a span behind all others.
fn join(runs: &mut Vec<Pages>, span: u64) {
    let (start, end) = (span * BLOCK, (span + 1) * BLOCK);
    match runs.last_mut() {
        Some(run) if run.end == start => run.end = end,
        _ => runs.push(start..end),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(runs: Vec<Pages>) -> Vec<(u64, u64)> {
        runs.into_iter().map(|run| (run.start, run.end)).collect()
    }

    #[test]
    fn a_span_is_there_as_long_as_something_is_in_it() {
        let mut spans = Spans::default();
        assert_eq!(ends(spans.enter(&(10..12))), [(0, 512)]);
        assert!(spans.enter(&(12..512)).is_empty());
        // The first of these is there already.
        assert_eq!(ends(spans.enter(&(511..1025))), [(512, 1536)]);
        assert!(spans.leave(&(12..512)).is_empty());
        assert_eq!(ends(spans.leave(&(511..1025))), [(512, 1536)]);
        assert_eq!(ends(spans.leave(&(10..12))), [(0, 512)]);
        assert_eq!(ends(spans.enter(&(10..12))), [(0, 512)]);
    }

    #[test]
    fn spans_that_follow_each_other_are_one_mapping() {
        let mut spans = Spans::default();
        assert_eq!(ends(spans.enter(&(512..1024))), [(512, 1024)]);
        assert_eq!(ends(spans.enter(&(0..2048))), [(0, 512), (1024, 2048)]);
        assert_eq!(ends(spans.leave(&(0..2048))), [(0, 512), (1024, 2048)]);
    }
}
