//! What a clone does not inherit of its process, and what is stored of that while all is stopped.

use super::{Held, Memory, Options, guards, memory, process_file};
use crate::freeze::FrozenClone;
use crate::maps::{self, Mapping};
use crate::pagemap::{self, Run, Scanner, Wanted};
use crate::proc::{self, Status};
use crate::state::{ProcessState, Saved};
use crate::{EngineError, huge, inject};
use kedge_image::{Packer, PageBuffer};
use libc::pid_t;
use std::collections::{BTreeMap, BTreeSet};

/// Flags of smaps that a clone does not have: its pages are to be copied while all is stopped.
pub(super) const NOT_INHERITED: &str = "dc";

/// The flag of those whose pages the kernel may drop: what random numbers are made of must not come
/// twice, so none of it is stored.
const DROPPABLE: &str = "dp";
/// The flag of those of which a clone has no pages (MADV_WIPEONFORK).
const WIPED: &str = "wf";

impl Held {
    /// Stores what the clone has not inherited, as mappings or as pages (MADV_WIPEONFORK), and the
    /// huge pages that it is not to have, and notes those mappings. `at` is the thread that answers
    /// for the process. Nothing is asked as their tracer.
    pub(super) fn store_not_inherited(
        &mut self,
        at: pid_t,
        status: &Status,
        options: &Options,
    ) -> Result<(), EngineError> {
        let Memory::Clone(clone, _) = &self.memory else { return Ok(()) };
        let pid = self.state.ids.pid;
        // Whoever has mappings of the same size in all has inherited every one.
        let all = proc::mapped_kib(clone.pid()) == Some(status.kib("VmSize"));
        let there = if all { Vec::new() } else { maps::of(clone.pid())? };
        let there: BTreeMap<u64, u64> = there.into_iter().map(|m| (m.start, m.end)).collect();
        let inherited = |m: &Mapping| all || there.get(&m.start) == Some(&m.end);
        let failed = |source| EngineError::System { pid, what: "see what is wiped", source };
        let mut pages = Pages::of(at, clone.pid()).map_err(failed)?;
        pages.look_at_once(&self.mappings, status).map_err(failed)?;
        let mut marked = None;
        let mut chunks = Vec::new();
        for (mapping, saved) in self.mappings.iter().zip(&mut self.state.mappings) {
            let missing = !inherited(mapping);
            if missing && !huge::is_private(mapping) {
                saved.flags.retain(|flag| flag != NOT_INHERITED);
                saved.flags.push(NOT_INHERITED.to_owned());
            }
            if !memory::own(mapping) {
                continue;
            }
            if huge::is_private(mapping) {
                self.written.push(mapping.start);
                let runs = memory::runs(at, &mut pages.own, mapping)?;
                memory::split(mapping, &runs, &mut chunks);
                continue;
            }
            let is_stored = missing
                || pages.are_wiped(mapping).map_err(failed)?
                    && is_marked(mapping, at, &mut marked)?;
            if !is_stored {
                continue;
            }
            self.written.push(mapping.start);
            memory::split(mapping, &[(mapping.start, mapping.end)], &mut chunks);
        }
        if chunks.is_empty() {
            return Ok(());
        }
        let written = self.mappings.iter().filter(|m| self.written.contains(&m.start));
        let written: Vec<_> = written.map(|mapping| (mapping.start, mapping.end)).collect();
        self.state.guards = guards::among(at, &written)?;
        // Otherwise the file is made when the job goes on again: a disk may be slow.
        let writer = options.create(&process_file(pid))?;
        let (mut buffer, mut packer) = (PageBuffer::default(), Packer::new(&writer));
        let reader = memory::Reader::of(at)?;
        for chunk in &chunks {
            let (place, codec) = (chunk.address(), options.codec);
            memory::store(&reader, 0, chunk, place, &mut packer, codec, &mut buffer)?;
        }
        packer.flush()?;
        drop(packer);
        self.writer = Some(writer);
        Ok(())
    }

    /// Has the clone let go of huge pages, which are stored already.
    pub(super) fn let_go_of_huge(&self) -> Result<(), EngineError> {
        let Memory::Clone(clone, _) = &self.memory else { return Ok(()) };
        let huge: Vec<&Mapping> = self.mappings.iter().filter(|m| huge::is_private(m)).collect();
        let_go(clone, &huge)
    }
}

/// Has the clone unmap those that are the program's alone.
fn let_go(clone: &FrozenClone, mappings: &[&Mapping]) -> Result<(), EngineError> {
    if mappings.is_empty() {
        return Ok(());
    }
    let (pid, mut thread) = (clone.pid(), clone.thread()?);
    let entry = inject::entry(pid)?;
    for mapping in mappings {
        let arguments = [mapping.start, mapping.len()];
        let result = thread.call(entry, libc::SYS_munmap, &arguments)?;
        inject::checked(pid, "let go of huge pages", result)?;
    }
    Ok(())
}

/// Whether the mapping is one of those of which a clone has no pages, or may lose them. The kernel
/// tells by walking all page tables, so it is asked once, and only where a clone lacks pages.
fn is_marked(
    mapping: &Mapping,
    pid: pid_t,
    marked: &mut Option<BTreeSet<u64>>,
) -> Result<bool, EngineError> {
    let marked = match marked {
        Some(marked) => marked,
        None => {
            let is = |m: &Mapping| m.flags.iter().any(|flag| [WIPED, DROPPABLE].contains(&&**flag));
            let all = maps::with_flags(pid)?.into_iter().filter(is);
            marked.insert(all.map(|mapping| mapping.start).collect())
        }
    };
    Ok(marked.contains(&mapping.start))
}

/// Which pages a process and its clone have.
struct Pages {
    own: Scanner,
    clone: Scanner,
    /// All pages of each, where they were looked at once: written to, and there.
    at_once: Option<(Vec<Run>, Vec<Run>)>,
}

/// So many mappings are not asked about one by one, as long as all pages are few: each answer ends
/// at the first page, and a look at all pages does not.
const MANY_MAPPINGS: usize = 256;
const FEW_KIB: u64 = 256 << 10;

impl Pages {
    fn of(pid: pid_t, clone: pid_t) -> std::io::Result<Pages> {
        Ok(Pages { own: Scanner::of(pid)?, clone: Scanner::of(clone)?, at_once: None })
    }

    /// Looks at all pages of `mappings` where that takes less than a look at each mapping.
    fn look_at_once(&mut self, mappings: &[Mapping], status: &Status) -> std::io::Result<()> {
        let anonymous = mappings.iter().filter(|m| m.inode == 0 && memory::own(m)).count();
        if anonymous < MANY_MAPPINGS || status.kib("VmRSS") + status.kib("VmSwap") > FEW_KIB {
            return Ok(());
        }
        let all = (0, maps::TOP);
        let looked = self
            .own
            .runs(all, &Wanted::WRITTEN_TO)
            .and_then(|own| Ok((own, self.clone.runs(all, &Wanted::OWN)?)));
        self.at_once = match looked {
            Err(error) if pagemap::cannot_tell(&error) => None,
            looked => Some(looked?),
        };
        Ok(())
    }

    /// Whether the clone has none of the pages of a mapping that has some.
    fn are_wiped(&mut self, mapping: &Mapping) -> std::io::Result<bool> {
        // Nobody can ask for it in a mapping of a file.
        if mapping.inode != 0 {
            return Ok(false);
        }
        let range = (mapping.start, mapping.end);
        if let Some((own, clone)) = &self.at_once {
            return Ok(!has_some(clone, range) && has_some(own, range));
        }
        // A clone has no page that was only read: the kernel's page of zeros.
        match self.clone.has(range, &Wanted::OWN) {
            Err(error) if pagemap::cannot_tell(&error) => self.may_be_wiped(mapping),
            there => Ok(!there? && self.own.has(range, &Wanted::WRITTEN_TO)?),
        }
    }

    /// The same on kernels without PAGEMAP_SCAN, by entries: `true` as well if there are too many
    /// to see.
    fn may_be_wiped(&self, mapping: &Mapping) -> std::io::Result<bool> {
        const PART: u64 = 64 << 20;
        const MAX_PARTS: u64 = 16;
        let mut some = mapping.len() > PART * MAX_PARTS;
        let parts = (mapping.start..mapping.end).step_by(PART as usize);
        for start in parts.take(MAX_PARTS as usize) {
            let part = (start, mapping.end.min(start + PART));
            if self.clone.has_entry(part)? {
                return Ok(false);
            }
            some |= self.own.has_entry(part)?;
        }
        Ok(some)
    }
}

/// Whether one of `runs`, which are in order, has a part of `range`.
fn has_some(runs: &[Run], (start, end): Run) -> bool {
    let after = runs.partition_point(|(_, last)| *last <= start);
    runs.get(after).is_some_and(|(first, _)| *first < end)
}

/// The mappings of which nothing is to be stored: those that are stored already, and those that the
/// kernel may drop.
pub(super) fn except(state: &ProcessState, written: &[u64]) -> Vec<(u64, u64)> {
    let dropped = |saved: &&Saved| saved.flags.iter().any(|flag| flag == DROPPABLE);
    let all =
        state.mappings.iter().filter(|saved| dropped(saved) || written.contains(&saved.start));
    all.map(|saved| (saved.start, saved.end)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pagemap::tests::scans;

    #[test]
    fn a_part_of_a_range_is_found() {
        let runs = [(10, 20), (30, 40)];
        for (range, some) in [
            ((0, 10), false),
            ((0, 11), true),
            ((19, 25), true),
            ((20, 30), false),
            ((12, 13), true),
            ((5, 50), true),
            ((40, 90), false),
        ] {
            assert_eq!(has_some(&runs, range), some, "{range:?}");
        }
        assert!(!has_some(&[], (0, u64::MAX)));
    }

    /// This process stands for both, so nothing is wiped whichever way it is asked.
    #[test]
    fn many_mappings_are_looked_at_once() {
        if !scans() {
            return;
        }
        let own = std::process::id() as pid_t;
        let mappings = maps::of(own).unwrap();
        let many: Vec<Mapping> =
            mappings.iter().cycle().take(64 * MANY_MAPPINGS).cloned().collect();
        let mut pages = Pages::of(own, own).unwrap();
        let status = Status::of(own).unwrap();
        pages.look_at_once(&mappings[..1], &status).unwrap();
        assert!(pages.at_once.is_none());
        pages.look_at_once(&many, &status).unwrap();
        let stack = mappings.iter().find(|mapping| mapping.name == "[stack]").unwrap();
        let range = (stack.start, stack.end);
        assert!(
            pages
                .at_once
                .as_ref()
                .is_some_and(|(own, clone)| { has_some(own, range) && has_some(clone, range) })
        );
        assert!(!pages.are_wiped(stack).unwrap());
        let (_, clone) = pages.at_once.as_mut().unwrap();
        clone.retain(|(start, end)| *end <= range.0 || *start >= range.1);
        assert!(pages.are_wiped(stack).unwrap());
    }
}
