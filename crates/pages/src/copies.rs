//! Work that says which bytes it touches: copies, fills, written values.

use crate::engine::Engine;
use crate::out::Out;
use crate::types::{Error, NodeId, PAGE, Pages, Step, StreamId};
use std::ops::Range;

impl Engine {
    /// Work is about to be posted that reads and writes these bytes (by address) and nothing else
    /// that is managed. Bytes that are no managed memory are nobody's concern.
    ///
    /// # Errors
    /// There is no such node.
    pub fn device_access(
        &mut self,
        node: NodeId,
        stream: StreamId,
        reads: &[Range<u64>],
        writes: &[Range<u64>],
    ) -> Result<Step, Error> {
        self.known(node)?;
        let ranges: Vec<_> = reads
            .iter()
            .map(|bytes| (bytes, false))
            .chain(writes.iter().map(|bytes| (bytes, true)))
            .collect();
        if let Some(wait) = ranges.iter().find_map(|(bytes, _)| self.wait_to_move(node, bytes)) {
            return Ok(wait);
        }
        let mut out = Out::default();
        let mut foreign = false;
        for (bytes, write) in ranges {
            for region in self.regions_within(&pages_of(bytes)) {
                foreign |= self.access(node, stream, region, bytes, write, &mut out);
            }
        }
        let now = self.tick();
        self.busy.begin(node, stream, false, foreign, now);
        Ok(Step::Do(out.done()))
    }

    /// Returns the first pages of the regions that hold some of these pages.
    pub(crate) fn regions_within(&self, pages: &Pages) -> Vec<u64> {
        let first = self.region(pages.start).map_or(pages.start, |region| region.pages.start);
        self.regions.range(first..pages.end.max(first)).map(|(start, _)| *start).collect()
    }

    /// Returns what has to be waited for before the blocks of these bytes that the node does not
    /// see are moved.
    fn wait_to_move(&self, node: NodeId, bytes: &Range<u64>) -> Option<Step> {
        let pages = pages_of(bytes);
        self.regions_within(&pages).iter().find_map(|start| {
            let region = &self.regions[start];
            let unseen = |index: u32| !self.can_map(node, region.blocks[index as usize].place);
            let any = region.parts(&pages).any(|(index, _)| unseen(index));
            any.then(|| self.must_wait(region.attach, None)).flatten()
        })
    }

    /// Prepares one region for an access. Returns whether it is not the stream's to touch.
    fn access(
        &mut self,
        node: NodeId,
        stream: StreamId,
        start: u64,
        bytes: &Range<u64>,
        write: bool,
        out: &mut Out,
    ) -> bool {
        let Some(region) = self.regions.get(&start) else { return false };
        let attach = region.attach;
        let parts: Vec<_> = region.parts(&pages_of(bytes)).collect();
        for (index, part) in parts {
            let place = self.regions[&start].blocks[index as usize].place;
            if !self.can_map(node, place) {
                self.make_mappable((start, index), node, out);
            }
            // What is overwritten as a whole is sent, too: work of another stream may come first.
            self.clean(start, index, &part, out);
            if write {
                self.close_to_host(start, index, &part, out);
            }
        }
        if let Some(region) = self.regions.get_mut(&start) {
            region.read = true;
            region.born *= u64::from(!write);
        }
        !Self::is_own(attach, stream)
    }
}

/// Returns the pages that hold some of the bytes.
fn pages_of(bytes: &Range<u64>) -> Pages {
    if bytes.is_empty() {
        return 0..0;
    }
    bytes.start / PAGE..bytes.end.div_ceil(PAGE)
}
