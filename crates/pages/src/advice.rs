//! Prefetches and advice. They move pages while nothing runs that may touch them; else they wait.

use crate::engine::{Engine, Wish};
use crate::out::Out;
use crate::region::offsets;
use crate::types::{Access, Action, Advice, Attach, Error, Pages, Place};

/// Most wishes that wait; a hint that is given up does no harm.
const MAX_WISHES: usize = 256;

impl Engine {
    /// The program wants a range to be at a place soon. On the host, it is opened for reading.
    ///
    /// # Errors
    /// The first page is no managed memory, or there is no such node.
    pub fn prefetch(&mut self, pages: Pages, to: Place) -> Result<Vec<Action>, Error> {
        self.check(&pages, to)?;
        Ok(self.wish(Wish::Prefetch { pages, to }))
    }

    /// The program says where a range is best.
    ///
    /// # Errors
    /// The first page is no managed memory, or there is no such node.
    pub fn advise(&mut self, pages: Pages, advice: Advice) -> Result<Vec<Action>, Error> {
        let to = match advice {
            Advice::Prefer(to) => to,
            Advice::NoPreference => Place::Host,
        };
        self.check(&pages, to)?;
        Ok(self.wish(Wish::Advise { pages, advice }))
    }

    fn check(&self, pages: &Pages, to: Place) -> Result<(), Error> {
        self.region(pages.start).ok_or(Error::NotManaged(pages.start))?;
        match to {
            Place::Host => Ok(()),
            Place::Node(node) => self.known(node),
        }
    }

    fn wish(&mut self, wish: Wish) -> Vec<Action> {
        let mut out = Out::default();
        self.wishes.push(wish);
        self.run_deferred(&mut out);
        out.done()
    }

    /// Work has ended: carries out what has waited for that, in order.
    pub(crate) fn run_deferred(&mut self, out: &mut Out) {
        if self.wishes.is_empty() {
            return;
        }
        for wish in std::mem::take(&mut self.wishes) {
            let (Wish::Prefetch { pages, .. } | Wish::Advise { pages, .. }) = &wish;
            let attaches = self.attaches(pages);
            if attaches.iter().all(|attach| self.busy.is_idle_for(*attach)) {
                self.carry_out(wish, out);
            } else if self.wishes.len() < MAX_WISHES {
                self.wishes.push(wish);
            }
        }
    }

    fn attaches(&self, pages: &Pages) -> Vec<Attach> {
        let regions = self.regions_within(pages);
        regions.iter().map(|start| self.regions[start].attach).collect()
    }

    fn carry_out(&mut self, wish: Wish, out: &mut Out) {
        let (Wish::Prefetch { pages, .. } | Wish::Advise { pages, .. }) = &wish;
        let now = self.tick();
        for start in self.regions_within(pages) {
            // What is wanted on a node does not give way to itself.
            if matches!(
                wish,
                Wish::Prefetch { to: Place::Node(_), .. }
                    | Wish::Advise { advice: Advice::Prefer(Place::Node(_)), .. }
            ) {
                self.note_use(start, now);
            }
            let parts: Vec<_> = self.regions[&start].parts(pages).collect();
            for (index, part) in parts {
                match wish {
                    Wish::Prefetch { to: Place::Host, .. } => self.open(part, Access::Read, out),
                    Wish::Prefetch { to: Place::Node(_), .. } if self.stays(start, index) => {}
                    Wish::Prefetch { to, .. } => {
                        self.place(start, index, to, now, out);
                        self.clean(start, index, &part, out);
                    }
                    Wish::Advise { advice: Advice::Prefer(to), .. } => {
                        self.place(start, index, to, now, out);
                    }
                    Wish::Advise { advice: Advice::NoPreference, .. } => {
                        self.clear_stays(start, index)
                    }
                }
            }
        }
    }

    /// Moves a block, as far as it can be there without what was used since `since` giving way.
    fn place(&mut self, start: u64, index: u32, to: Place, since: u64, out: &mut Out) {
        let Some(region) = self.regions.get(&start) else { return };
        let pages = region.block_pages(index);
        let there = region.blocks[index as usize].place == to;
        let possible = match to {
            _ if region.fixed => there,
            Place::Host => self.all_map_host(),
            Place::Node(node) => there || self.make_room(node, offsets(&pages).len(), since, out),
        };
        if possible {
            self.relocate((start, index), to, true, out);
        }
    }

    fn stays(&self, start: u64, index: u32) -> bool {
        self.regions[&start].blocks[index as usize].stays
    }

    /// Launches may bring the block to their node again.
    fn clear_stays(&mut self, start: u64, index: u32) {
        let Some(place) = self.leave((start, index)) else { return };
        if let Some(block) = self.block_mut((start, index)) {
            block.stays = false;
        }
        self.enter((start, index), place);
    }
}
