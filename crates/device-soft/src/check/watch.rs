//! What a block of a checked program remembers of its shared memory while it runs, and what was
//! found in it.

use super::clocks::{Clocks, Follow, When};
use super::{Checker, parts};
use crate::fault::demangled;
use crate::launch::Grid;
use crate::spec::WARP;
use kedge_device::{Finding, FindingKind, FindingPlace};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// Bytes of a cell, the unit in which accesses are remembered.
const CELL: u64 = 4;
/// Most findings of one block that are kept apart.
const MAX_FINDINGS: usize = 256;

/// An access as its instruction makes it, of one lane.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Touch {
    /// The instruction's place in the program's code.
    pub pc: u32,
    pub warp: u32,
    pub lane: usize,
    /// Offset in shared memory, and bytes.
    pub offset: u64,
    pub bytes: u64,
    /// Both, where it is atomic.
    pub reads: bool,
    pub writes: bool,
    /// Atomic or strong (volatile, relaxed, …): two such are no race.
    pub strong: bool,
}

/// An access that is remembered.
#[derive(Debug, Clone, Copy, Default)]
struct Past {
    when: When,
    pc: u32,
    /// Which execution of a whole instruction it was part of.
    step: u32,
    /// The cell's bytes that it touched; none: there was no access.
    bytes: u8,
    strong: bool,
}

/// What is remembered of four bytes of shared memory.
#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    write: Past,
    /// The last read, and one that nothing orders with it.
    reads: [Past; 2],
    /// The bytes that somebody has written.
    written: u8,
}

/// What was found, before it is a [`Finding`].
#[derive(Debug, Clone)]
struct Draft {
    /// Each access: where, by which thread, and what it did.
    at: (u32, u16, String),
    other: Option<(u32, u16, String)>,
    message: String,
    address: Option<u64>,
    count: u64,
    /// When it was found first.
    step: u32,
}

/// What a block of a checked program remembers.
pub(crate) struct Watch {
    pub(crate) checker: Arc<Checker>,
    cells: Vec<Cell>,
    clocks: Clocks,
    /// Executions of instructions that accessed shared memory.
    step: u32,
    /// The line of PTX whose accesses are being remembered as they are made.
    line: u32,
    /// By kind and places; which of two comes first counts for nothing.
    found: HashMap<(FindingKind, u32, u32), Draft>,
    /// Who came first to each of the block's barriers: the phase, the instruction, the thread.
    first: HashMap<u32, (u32, u32, u16)>,
}

/// The bytes of cell `cell` that [from, to) covers.
fn bytes_of(cell: u64, from: u64, to: u64) -> u8 {
    let start = from.saturating_sub(cell * CELL).min(CELL);
    let end = to.saturating_sub(cell * CELL).min(CELL);
    ((1u32 << end) - (1u32 << start)) as u8
}

impl Watch {
    /// For a new block of `grid`.
    pub(crate) fn begin(grid: &Grid, checker: &Arc<Checker>) -> Box<Watch> {
        let check = checker.check;
        // What headers do in the system's part is theirs to answer for.
        let own = grid.shared_len.min(grid.reserved_base.into());
        let cells = if check.races || check.init { own.div_ceil(CELL) } else { 0 };
        Box::new(Watch {
            checker: Arc::clone(checker),
            cells: vec![Cell::default(); cells as usize],
            clocks: Clocks::new(if check.races { grid.warps() as usize } else { 0 }),
            step: 0,
            line: 0,
            found: HashMap::new(),
            first: HashMap::new(),
        })
    }

    /// An instruction of this line of PTX begins to access memory, and tells of all that it
    /// accesses.
    pub(crate) fn begin_step(&mut self, line: u32) {
        self.step = self.step.wrapping_add(1);
        self.line = line;
    }

    /// Whether the instruction tells of what it accesses.
    pub(crate) fn is_probed(&self, line: u32) -> bool {
        self.line == line
    }

    /// Follows what orders accesses.
    pub(crate) fn follow(&mut self, what: Follow<'_>) {
        if self.checker.check.races {
            self.clocks.follow(what);
        }
    }

    /// Remembers an access, and finds what is wrong with it. `same` says whether a write writes
    /// what the other write (of this lane in the same step, if any) wrote: that harms nobody.
    pub(crate) fn touch(&mut self, touch: Touch, same: impl Fn(Option<usize>) -> bool) {
        let (from, to) = (touch.offset, touch.offset.saturating_add(touch.bytes));
        let when = match self.checker.check.races {
            true => self.clocks.now(touch.warp as usize, touch.lane),
            false => When::default(),
        };
        for cell in from / CELL..to.div_ceil(CELL) {
            let bytes = bytes_of(cell, from, to);
            let (pc, strong, step) = (touch.pc, touch.strong, self.step);
            let past = Past { when, pc, step, bytes, strong };
            if self.checker.check.races {
                self.look_for_races(&touch, cell, past, &same);
            }
            let Some(known) = self.cells.get_mut(cell as usize) else { return };
            let is_written = known.written & bytes == bytes;
            known.written |= bytes;
            if touch.reads && !is_written && self.checker.check.init {
                let (pc, warp, lane) = (touch.pc, touch.warp, touch.lane);
                self.unwritten_shared(pc, warp, lane, from, touch.bytes);
            }
        }
    }

    fn look_for_races(
        &mut self,
        touch: &Touch,
        cell: u64,
        past: Past,
        same: &impl Fn(Option<usize>) -> bool,
    ) {
        let (warp, lane) = (touch.warp as usize, touch.lane);
        let Some(known) = self.cells.get_mut(cell as usize) else { return };
        let clocks = &self.clocks;
        let conflicts = |other: &Past| {
            other.bytes & past.bytes != 0
                && !(other.strong && past.strong)
                && !clocks.is_ordered(other.when, warp, lane)
        };
        let mut race = None;
        if conflicts(&known.write) {
            let write = known.write;
            let lane = (write.step == past.step).then_some(write.when.thread as usize % WARP);
            if !(touch.writes && same(lane)) {
                race = Some((write, true));
            }
        }
        if touch.writes && race.is_none() {
            race = known.reads.iter().find(|read| conflicts(read)).map(|read| (*read, false));
        }
        if touch.writes {
            known.write = past;
        } else {
            let [last, other] = &mut known.reads;
            if last.bytes != 0 && !clocks.is_ordered(last.when, warp, lane) {
                *other = *last;
            }
            *last = past;
        }
        if let Some((other, wrote)) = race {
            self.race(touch, other, wrote);
        }
    }

    fn race(&mut self, touch: &Touch, other: Past, wrote: bool) {
        let key = (FindingKind::Race, touch.pc, other.pc);
        let thread = (touch.warp as usize * WARP + touch.lane) as u16;
        let action = |writes: bool, strong: bool| match (writes, strong) {
            (true, false) => "write",
            (false, false) => "read",
            (true, true) => "atomic or volatile write",
            (false, true) => "atomic or volatile read",
        };
        self.keep(key, || {
            let now = format!("{} of {} bytes", action(touch.writes, touch.strong), touch.bytes);
            let then = action(wrote, other.strong).to_owned();
            let message = format!("race in shared memory at offset {}", touch.offset);
            let (at, other) = ((touch.pc, thread, now), Some((other.pc, other.when.thread, then)));
            Draft { at, other, message, address: Some(touch.offset), count: 1, step: 0 }
        });
    }

    fn unwritten_shared(&mut self, pc: u32, warp: u32, lane: usize, offset: u64, bytes: u64) {
        let message = || format!("uninitialised shared memory at offset {offset}");
        self.keep_unwritten((pc, warp, lane), offset, bytes, message);
    }

    /// A lane reads device memory that nobody has written.
    pub(crate) fn unwritten(&mut self, pc: u32, warp: u32, lane: usize, addr: u64, bytes: u64) {
        let checker = Arc::clone(&self.checker);
        let message = || {
            let of = checker.memory.allocation(addr).map(|(start, end)| {
                format!(", offset {} in the {} bytes allocated", addr - start, end - start)
            });
            format!("uninitialised device memory at {addr:#x}{}", of.unwrap_or_default())
        };
        self.keep_unwritten((pc, warp, lane), addr, bytes, message);
    }

    fn keep_unwritten(
        &mut self,
        (pc, warp, lane): (u32, u32, usize),
        address: u64,
        bytes: u64,
        message: impl FnOnce() -> String,
    ) {
        let thread = (warp as usize * WARP + lane) as u16;
        self.keep((FindingKind::Uninitialised, pc, 0), || Draft {
            at: (pc, thread, format!("read of {bytes} bytes")),
            other: None,
            message: message(),
            address: Some(address),
            count: 1,
            step: 0,
        });
    }

    /// Keeps a finding about what a lane did that is no access.
    pub(crate) fn note(
        &mut self,
        kind: FindingKind,
        pc: u32,
        warp: u32,
        lane: usize,
        message: String,
    ) {
        let at = (pc, (warp as usize * WARP + lane) as u16, String::new());
        self.keep((kind, pc, 0), || Draft {
            at,
            other: None,
            message,
            address: None,
            count: 1,
            step: 0,
        });
    }

    /// A lane comes to barrier `id`, which is in phase `generation` and waits for the whole block:
    /// all threads have to come to it at one place of the program.
    pub(crate) fn wait(&mut self, pc: u32, warp: u32, lane: usize, id: u32, generation: u32) {
        let thread = (warp as usize * WARP + lane) as u16;
        let first = self.first.entry(id).or_insert((generation, pc, thread));
        if first.0 != generation {
            *first = (generation, pc, thread);
        }
        let (_, other_pc, other) = *first;
        if other_pc == pc {
            return;
        }
        let action = || "waits".to_owned();
        self.keep((FindingKind::Barrier, pc, other_pc), || Draft {
            at: (pc, thread, action()),
            other: Some((other_pc, other, action())),
            message: format!("threads of a block meet at different places in barrier {id}"),
            address: None,
            count: 1,
            step: 0,
        });
    }

    /// Keeps a finding, or counts it where there is one of the same places.
    fn keep(&mut self, key: (FindingKind, u32, u32), draft: impl FnOnce() -> Draft) {
        let full = self.found.len() >= MAX_FINDINGS;
        let (kind, one, other) = key;
        match self.found.entry((kind, one.max(other), one.min(other))) {
            Entry::Occupied(mut known) => known.get_mut().count += 1,
            Entry::Vacant(_) if full => {}
            Entry::Vacant(free) => {
                free.insert(Draft { step: self.step, ..draft() });
            }
        }
    }

    /// Something has written, or may have, in a way that is not followed: nothing of it is wrong.
    pub(crate) fn forget(&mut self, offset: u64, bytes: u64) {
        let (from, to) = (offset, offset.saturating_add(bytes));
        for cell in from / CELL..to.div_ceil(CELL) {
            let Some(known) = self.cells.get_mut(cell as usize) else { return };
            let written = known.written | bytes_of(cell, from, to);
            *known = Cell { written, ..Cell::default() };
        }
    }

    /// Tells the checker what was found.
    pub(crate) fn tell(&mut self, grid: &Grid, block: [u32; 3]) {
        let mut found: Vec<_> = self.found.drain().collect();
        found.sort_unstable_by_key(|(_, draft)| draft.step);
        for ((kind, ..), draft) in found {
            let place = |(pc, thread, action): (u32, u16, String)| {
                let program = &grid.spec.program;
                let line = program.code.get(pc as usize).map_or(0, |inst| inst.line);
                let source = program.origins(pc as usize).and_then(|origins| origins.source(line));
                let (source, inlined_at) = parts(source);
                FindingPlace {
                    action,
                    source,
                    inlined_at,
                    ptx_line: line,
                    thread: grid.thread_of(thread.into()),
                }
            };
            let (at, other) = (place(draft.at), draft.other.map(place));
            let kernel = demangled(&grid.kernel().name);
            let message = told(&draft.message, &kernel, block, &at, other.as_ref());
            self.checker.add(Finding {
                kind,
                message,
                kernel,
                block,
                place: at,
                other,
                address: draft.address,
                count: draft.count,
            });
        }
    }
}

/// The finding in one line.
fn told(
    what: &str,
    kernel: &str,
    block: [u32; 3],
    at: &FindingPlace,
    other: Option<&FindingPlace>,
) -> String {
    let place = |place: &FindingPlace| {
        let [x, y, z] = place.thread;
        let mut source = match &place.source {
            Some((file, line)) => format!("{file}:{line}"),
            None => format!("PTX line {}", place.ptx_line),
        };
        if let Some((file, line)) = &place.inlined_at {
            source.push_str(&format!(" (inlined at {file}:{line})"));
        }
        let action = &place.action;
        let gap = if action.is_empty() { "" } else { " " };
        format!("{action}{gap}at {source} by thread ({x},{y},{z})")
    };
    let [x, y, z] = block;
    let and = other.map(|other| format!(", and before it {}", place(other))).unwrap_or_default();
    format!("{what} in kernel {kernel}: {}{and}, block ({x},{y},{z})", place(at))
}
