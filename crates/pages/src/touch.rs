//! The host's touches.

use crate::engine::Engine;
use crate::out::Out;
use crate::region::{Key, offsets, runs};
use crate::set::PageSet;
use crate::types::{
    Access, Action, Attach, BLOCK, Error, Note, Pages, Place, Protection, Step, StreamId,
};

impl Engine {
    /// The host touches a page that its view does not let it. `by`: the stream whose host function
    /// touches; the work behind that has not begun, and is not waited for. Nothing is to be done
    /// where another thread was faster. A kernel that has to be waited for is taken for running.
    ///
    /// # Errors
    /// The page is no managed memory.
    pub fn touch(
        &mut self,
        page: u64,
        access: Access,
        by: Option<StreamId>,
    ) -> Result<Step, Error> {
        let region = self.region(page).ok_or(Error::NotManaged(page))?;
        if !self.is_closed_to_host(page, access) {
            return Ok(Step::Do(Vec::new()));
        }
        let (attach, end) = (region.attach, region.pages.end);
        let key = (region.pages.start, region.index(page));
        let contended = region.blocks[key.1 as usize].contended && !region.fixed;
        if let Some(wait) = self.must_wait(attach, by) {
            self.note_contention(key, attach, by);
            return Ok(wait);
        }
        let mut out = Out::default();
        if contended && self.all_map_host() {
            self.share(page, &mut out);
        } else {
            if self.is_again(page) {
                self.fetch_again(page, attach, &mut out);
            }
            let count = self.ahead.window(page, access, end - page);
            self.open(page..page + count, access, &mut out);
        }
        Ok(Step::Do(out.done()))
    }

    /// Returns what a touch would have to wait for now, if anything. Nothing changes: unlike
    /// [`Self::touch`], this does not take the work for running, so whoever can tell what of it is
    /// over asks this first, and reports that.
    ///
    /// # Errors
    /// The page is no managed memory.
    pub fn touch_waits(
        &self,
        page: u64,
        access: Access,
        by: Option<StreamId>,
    ) -> Result<Option<Step>, Error> {
        let region = self.region(page).ok_or(Error::NotManaged(page))?;
        let shut = self.is_closed_to_host(page, access);
        Ok(if shut { self.must_wait(region.attach, by) } else { None })
    }

    /// The host is about to touch a range by itself: kedge's own code, or a system call.
    ///
    /// # Errors
    /// Some of it is no managed memory.
    pub fn touch_range(
        &mut self,
        pages: Pages,
        access: Access,
        by: Option<StreamId>,
    ) -> Result<Step, Error> {
        let mut shut = Vec::new();
        let mut at = pages.start;
        while at < pages.end {
            let region = self.region(at).ok_or(Error::NotManaged(at))?;
            let (attach, end) = (region.attach, region.pages.end.min(pages.end));
            if (at..end).any(|page| self.is_closed_to_host(page, access)) {
                if let Some(wait) = self.must_wait(attach, by) {
                    return Ok(wait);
                }
                shut.push(at..end);
            }
            at = end;
        }
        let mut out = Out::default();
        shut.into_iter().for_each(|pages| self.open(pages, access, &mut out));
        Ok(Step::Do(out.done()))
    }

    /// The view has lost a page that the host has open, whose bytes are where they were: has it
    /// show the page again, and those behind it that are as this one where touches follow each
    /// other.
    ///
    /// # Errors
    /// The page is no managed memory.
    pub fn reopen(&mut self, page: u64) -> Result<Vec<Action>, Error> {
        let region = self.region(page).ok_or(Error::NotManaged(page))?;
        let block = &region.blocks[region.index(page) as usize];
        let one = offsets(&(page..page + 1));
        let (alike, access) = match (block.place, (block.writable & one).is_empty()) {
            (Place::Host, _) => (PageSet::of(0..BLOCK), Access::Write),
            (Place::Node(_), false) => (block.writable, Access::Write),
            (Place::Node(_), true) => (block.readable - block.writable, Access::Read),
        };
        let end = region.block_pages(region.index(page)).end;
        let is_alike = |page: &u64| !(alike & offsets(&(*page..page + 1))).is_empty();
        let room = (page..end).take_while(is_alike).count() as u64;
        let mut out = Out::default();
        if room > 0 {
            let key = (region.pages.start, region.index(page));
            let pages = page..page + self.ahead.window(page, access, room);
            if let Some(block) = self.block_mut(key) {
                let unseen = offsets(&pages) - block.touched;
                block.touched = block.touched | unseen;
                self.again.note_touched(unseen);
            }
            let write = access == Access::Write;
            let to = if write { Protection::ReadWrite } else { Protection::Read };
            out.push(Action::Protect { pages, to });
        }
        Ok(out.done())
    }

    /// This is another process's view and host memory, which hold no more than what the host alone
    /// had: all that both had is the node's now, and the rest is shown again.
    pub fn rebuilt(&mut self) -> Vec<Action> {
        let mut out = Out::default();
        let open = self.classes.values().flat_map(|class| class.open.iter());
        let host = self.classes.values().filter_map(|class| class.homes.get(&Place::Host));
        let mut keys: Vec<Key> = open.chain(host.flatten()).copied().collect();
        keys.sort_unstable();
        keys.dedup();
        for key in keys {
            let Some(region) = self.regions.get_mut(&key.0) else { continue };
            let pages = region.block_pages(key.1);
            let Some(block) = region.blocks.get_mut(key.1 as usize) else { continue };
            if block.place == Place::Host {
                out.push(Action::Protect { pages, to: Protection::ReadWrite });
                continue;
            }
            let both = block.readable - block.writable;
            block.readable = block.writable;
            for (set, to) in [(both, Protection::None), (block.writable, Protection::ReadWrite)] {
                runs(pages.start, set).for_each(|pages| out.push(Action::Protect { pages, to }));
            }
        }
        out.done()
    }

    /// Whether the view does not let the host touch a managed page so.
    fn is_closed_to_host(&self, page: u64, access: Access) -> bool {
        let Some(region) = self.region(page) else { return true };
        let block = &region.blocks[region.index(page) as usize];
        let open = match access {
            Access::Read => block.readable,
            Access::Write => block.writable,
        };
        block.place != Place::Host && (open & offsets(&(page..page + 1))).is_empty()
    }

    /// Opens pages of one region, which no work touches.
    pub(crate) fn open(&mut self, pages: Pages, access: Access, out: &mut Out) {
        let Some(region) = self.region(pages.start) else { return };
        let (fresh, start) = (self.is_fresh(region), region.pages.start);
        let parts: Vec<_> = region.parts(&pages).collect();
        for (index, part) in parts {
            let Some(block) = self.block_mut((start, index)) else { return };
            let Place::Node(node) = block.place else { continue };
            let wanted = offsets(&part);
            let missing = wanted - block.readable;
            let unseen = (wanted & block.readable) - block.touched;
            block.readable = block.readable | wanted;
            block.touched = block.touched | wanted;
            let (to, change) = match access {
                Access::Read => (Protection::Read, missing),
                Access::Write => {
                    let change = wanted - block.writable;
                    block.writable = block.writable | wanted;
                    (Protection::ReadWrite, change)
                }
            };
            if !fresh {
                runs(part.start, missing).for_each(|pages| out.push(Action::Fetch { node, pages }));
            }
            runs(part.start, change).for_each(|pages| out.push(Action::Protect { pages, to }));
            self.again.note_touched(unseen);
            self.list((start, index));
        }
    }

    /// Remembers that the host touches a block while a kernel runs.
    fn note_contention(&mut self, key: Key, attach: Attach, by: Option<StreamId>) {
        let kernel = self.busy.blocking(attach, by).iter().any(|each| each.kernel);
        if let Some(block) = self.block_mut(key).filter(|_| kernel) {
            block.contended = true;
        }
    }

    /// Puts the block of a page into host memory for good: both sides touch it at once.
    fn share(&mut self, page: u64, out: &mut Out) {
        let Some(region) = self.region(page) else { return };
        let key = (region.pages.start, region.index(page));
        let pages = region.block_pages(key.1);
        self.relocate(key, Place::Host, true, out);
        out.push(Action::Tell(Note::TouchedByBoth { pages }));
    }

    /// Closes what the host has open of some pages of a block, and forgets that it has.
    pub(crate) fn close_to_host(&mut self, start: u64, index: u32, part: &Pages, out: &mut Out) {
        let Some(block) = self.block_mut((start, index)) else { return };
        if block.place == Place::Host {
            return;
        }
        let part_set = offsets(part);
        let open = block.readable & part_set;
        block.readable = block.readable - part_set;
        block.writable = block.writable - part_set;
        block.closed(open);
        self.list_again((start, index));
        for pages in runs(part.start, open) {
            out.push(Action::Protect { pages, to: Protection::None });
        }
    }

    /// Sends what only the host has of some pages of a block; both copies are clean then.
    pub(crate) fn clean(&mut self, start: u64, index: u32, part: &Pages, out: &mut Out) {
        let Some(region) = self.regions.get_mut(&start) else { return };
        let Some(block) = region.blocks.get_mut(index as usize) else { return };
        let Place::Node(node) = block.place else { return };
        let written = block.writable & offsets(part);
        block.writable = block.writable - written;
        if !written.is_empty() {
            region.born = 0;
        }
        for pages in runs(part.start, written) {
            out.push(Action::Protect { pages, to: Protection::Read });
        }
        runs(part.start, written).for_each(|pages| out.push(Action::Send { node, pages }));
    }

    /// Whether work of a stream may touch a region.
    pub(crate) fn is_own(attach: Attach, stream: StreamId) -> bool {
        attach == Attach::Global || attach == Attach::Stream(stream)
    }

    /// Returns the pages of a block that the host has open; for tests and attributes.
    pub fn open_pages(&self, page: u64) -> PageSet {
        let Some(region) = self.region(page) else { return PageSet::EMPTY };
        region.blocks[region.index(page) as usize].readable
    }
}
