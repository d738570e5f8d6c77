//! Pages that the host is expected to touch again, since it did before the last launch: one touch
//! of such a page fetches others that are, so that a program which repeats itself pays for one
//! round trip and not for one a page. They are not shown before they are touched, so that those
//! that are expected in vain are found out.

use crate::engine::Engine;
use crate::out::Out;
use crate::region::{Block, Key, offsets, runs};
use crate::set::PageSet;
use crate::types::{Action, Attach, BLOCK, Place};

/// Pages that the first such touch behind a launch fetches; each further one fetches twice as many.
const FIRST: u64 = 64;

/// Pages that may have been fetched for each that was touched then, besides the first ones: a few
/// touches behind many, as after an initialisation, do not fetch all of it for nothing.
const FOR_EACH: u64 = 16;

/// How much is fetched for pages that are touched again.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Again {
    /// The most at once; 0: nothing.
    most: u64,
    next: u64,
    /// Pages that were fetched since the last launch, for others' touches.
    fetched: u64,
    /// Expected pages that were touched since then.
    touched: u64,
}

impl Again {
    pub(crate) fn new(most: u64) -> Again {
        Again { most, next: FIRST, ..Again::default() }
    }

    /// A launch has closed what the host had open.
    pub(crate) fn begin(&mut self) {
        *self = Again::new(self.most);
    }

    /// The host touches so many pages that are expected and there.
    pub(crate) fn note_touched(&mut self, pages: PageSet) {
        self.touched += pages.len();
    }

    /// It touches one that is not there: how many are to be fetched with it.
    fn window(&mut self) -> u64 {
        self.touched += 1;
        let owed = (FIRST + FOR_EACH * self.touched).saturating_sub(self.fetched);
        let now = self.next.min(self.most).min(owed);
        self.next = (2 * now).max(FIRST);
        now
    }
}

impl Block {
    /// The host can touch some pages no longer without a fault. Those that it has touched it may
    /// touch again; those that it has not touched although they were there it is not expected to.
    pub(crate) fn closed(&mut self, open: PageSet) {
        self.again = (self.again - open) | (self.touched & open);
        self.touched = self.touched - open;
    }
}

impl Engine {
    /// Has touches fetch up to `most` pages that the host has touched before the last launch, too.
    #[must_use]
    pub fn expecting(self, most: u64) -> Engine {
        Engine { again: Again::new(most), ..self }
    }

    /// Whether the host has not got a page that it touched before the last launch.
    pub(crate) fn is_again(&self, page: u64) -> bool {
        let Some(region) = self.region(page).filter(|region| !self.is_fresh(region)) else {
            return false;
        };
        let block = &region.blocks[region.index(page) as usize];
        !((block.again - block.readable) & offsets(&(page..page + 1))).is_empty()
    }

    /// Fetches pages of a class, behind this one, that the host is expected to touch again.
    pub(crate) fn fetch_again(&mut self, page: u64, attach: Attach, out: &mut Out) {
        let (Some(region), Some(class)) = (self.region(page), self.classes.get(&attach)) else {
            return;
        };
        let first = (region.pages.start, region.index(page));
        let window = self.again.window();
        let mut left = window;
        let keys: Vec<Key> = class.again.range(first..).copied().take(left as usize).collect();
        for key in keys {
            let before = if key == first { page / BLOCK * BLOCK..page + 1 } else { page..page };
            match self.expected(key, attach) {
                None => _ = self.classes.entry(attach).or_default().again.remove(&key),
                Some(set) => self.fetch_unseen(key, set - offsets(&before), &mut left, out),
            }
            if left == 0 {
                break;
            }
        }
        self.again.fetched += window - left;
    }

    /// Returns the pages of a block that the host is expected to touch; `None` where it is another
    /// block by now, or none are.
    fn expected(&self, key: Key, attach: Attach) -> Option<PageSet> {
        let region = self.regions.get(&key.0).filter(|region| region.attach == attach)?;
        let block = region.blocks.get(key.1 as usize).filter(|block| !block.again.is_empty())?;
        // What nobody has touched is zero on both sides.
        let set = if self.is_fresh(region) { PageSet::EMPTY } else { block.again };
        Some(set - block.readable)
    }

    /// Fetches up to `left` pages of a block, which the view does not show as yet.
    fn fetch_unseen(&mut self, key: Key, set: PageSet, left: &mut u64, out: &mut Out) {
        let Some(region) = self.regions.get_mut(&key.0) else { return };
        let inside = region.block_pages(key.1).start;
        let Some(block) = region.blocks.get_mut(key.1 as usize) else { return };
        let Place::Node(node) = block.place else { return };
        let mut taken = PageSet::EMPTY;
        for run in set.runs() {
            let end = run.end.min(run.start + *left);
            *left -= end - run.start;
            taken = taken | PageSet::of(run.start..end);
            if *left == 0 {
                break;
            }
        }
        block.readable = block.readable | taken;
        runs(inside, taken).for_each(|pages| out.push(Action::Fetch { node, pages }));
        self.list(key);
    }
}
