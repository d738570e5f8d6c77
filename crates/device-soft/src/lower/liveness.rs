//! Register compaction: virtual registers share slots where their lives do not overlap, so that a
//! warp's working set stays in the first-level cache.
//!
//! A lane follows one path through the control flow, whatever the other lanes of its warp do, and
//! owns one column of every row: liveness on the control-flow graph is exact enough for warps too.
//! A guarded write does not end a value's life. Lives are intervals in program order that cover
//! everything from the first to the last place where the value is live.

use super::ir::{Bank, Node, NodeFlow, Opnd, VReg};
use kedge_ptx::ast::LabelId;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Where each virtual register lives, and how many slots each bank takes.
pub(super) struct Allocation {
    pub slots: Vec<i32>,
    pub frame32: u32,
    pub frame64: u32,
    pub frame_pred: u32,
}

/// Assigns a slot to every virtual register. `labels` gives the node that each label stands before;
/// the registers in `kept` share their slots with no others.
pub(super) fn allocate(
    nodes: &[Node],
    banks: &[Bank],
    labels: &[u32],
    tables: impl Fn(u32) -> Vec<LabelId>,
    kept: &[VReg],
) -> Allocation {
    let blocks = Blocks::find(nodes, labels, tables);
    let mut lives = lives(nodes, banks.len(), &blocks);
    for register in kept {
        lives[register.0 as usize] = Some((0, u32::MAX));
    }
    scan(banks, &lives)
}

/// Basic blocks, in program order.
struct Blocks {
    /// First node of each block, and one past the last node.
    starts: Vec<u32>,
    predecessors: Vec<Vec<u32>>,
}

impl Blocks {
    fn find(nodes: &[Node], labels: &[u32], tables: impl Fn(u32) -> Vec<LabelId>) -> Blocks {
        let mut leader = vec![false; nodes.len() + 1];
        leader[0] = true;
        leader[nodes.len()] = true;
        for &at in labels {
            leader[(at as usize).min(nodes.len())] = true;
        }
        for (index, node) in nodes.iter().enumerate() {
            if node.flow != NodeFlow::Next {
                leader[index + 1] = true;
            }
        }
        let starts: Vec<u32> = (0..=nodes.len() as u32).filter(|&at| leader[at as usize]).collect();
        let count = starts.len() - 1;
        let mut blocks = Blocks { starts, predecessors: vec![Vec::new(); count] };
        for block in 0..count {
            let last = &nodes[blocks.starts[block + 1] as usize - 1];
            let falls = last.flow == NodeFlow::Next || last.guard.is_some();
            if falls && block + 1 < count {
                blocks.predecessors[block + 1].push(block as u32);
            }
            let targets = match last.flow {
                NodeFlow::Branch(label) => vec![label],
                NodeFlow::Table(table) => tables(table),
                NodeFlow::Next | NodeFlow::End => Vec::new(),
            };
            for label in targets {
                let to = blocks.of(labels[label.0 as usize]);
                if let Some(list) = blocks.predecessors.get_mut(to) {
                    list.push(block as u32);
                }
            }
        }
        blocks
    }

    /// The block that holds node `at`.
    fn of(&self, at: u32) -> usize {
        self.starts.partition_point(|&start| start <= at) - 1
    }
}

#[derive(Clone, Copy)]
struct Occurrence {
    at: u32,
    reads: bool,
    /// Writes it in every lane that comes by.
    kills: bool,
}

/// [first, last] node of each register's life; None: it never occurs.
fn lives(nodes: &[Node], registers: usize, blocks: &Blocks) -> Vec<Option<(u32, u32)>> {
    let mut occurrences: Vec<Vec<Occurrence>> = vec![Vec::new(); registers];
    for (at, node) in nodes.iter().enumerate() {
        let at = at as u32;
        if let Some((register, _)) = node.guard {
            occurrences[register.0 as usize].push(Occurrence { at, reads: true, kills: false });
        }
        // Reads come first: an instruction reads before it writes.
        for operand in &node.operands {
            if let Opnd::Use(register) = operand {
                occurrences[register.0 as usize].push(Occurrence { at, reads: true, kills: false });
            }
        }
        for operand in &node.operands {
            if let Opnd::Def(register) = operand {
                let kills = node.guard.is_none();
                occurrences[register.0 as usize].push(Occurrence { at, reads: !kills, kills });
            }
        }
    }
    let mut visited = vec![u32::MAX; blocks.predecessors.len()];
    occurrences
        .iter()
        .enumerate()
        .map(|(register, list)| life(register as u32, list, blocks, &mut visited))
        .collect()
}

fn life(
    register: u32,
    list: &[Occurrence],
    blocks: &Blocks,
    visited: &mut [u32],
) -> Option<(u32, u32)> {
    let (mut first, mut last) = (list.first()?.at, list.last()?.at);
    let mut work = Vec::new();
    // Blocks in which a read comes before every unconditional write: live on entry.
    let mut seen_block = usize::MAX;
    let mut killed = false;
    for occurrence in list {
        let block = blocks.of(occurrence.at);
        if block != seen_block {
            seen_block = block;
            killed = false;
        }
        if occurrence.reads && !killed && visited[block] != register {
            visited[block] = register;
            work.push(block);
        }
        killed |= occurrence.kills;
    }
    while let Some(block) = work.pop() {
        first = first.min(blocks.starts[block]);
        for &before in &blocks.predecessors[block] {
            let before = before as usize;
            let (start, end) = (blocks.starts[before], blocks.starts[before + 1]);
            last = last.max(end - 1);
            let from = list.partition_point(|occurrence| occurrence.at < start);
            let kills = list[from..]
                .iter()
                .take_while(|occurrence| occurrence.at < end)
                .any(|occurrence| occurrence.kills);
            if !kills && visited[before] != register {
                visited[before] = register;
                work.push(before);
            }
        }
    }
    Some((first, last))
}

/// Free slots of one bank.
#[derive(Default)]
struct Slots {
    free: BinaryHeap<Reverse<i32>>,
    /// (last node, slot) of the values that live now.
    busy: BinaryHeap<Reverse<(u32, i32)>>,
    count: u32,
}

impl Slots {
    /// A slot for a life that begins at `first` and ends at `last`; `width` slots of their own
    /// where it is not 1.
    fn take(&mut self, first: u32, last: u32, width: u32) -> i32 {
        while let Some(&Reverse((end, slot))) = self.busy.peek() {
            if end >= first {
                break;
            }
            self.busy.pop();
            self.free.push(Reverse(slot));
        }
        if width == 1
            && let Some(Reverse(slot)) = self.free.pop()
        {
            self.busy.push(Reverse((last, slot)));
            return slot;
        }
        let slot = self.count as i32;
        self.count += width;
        if width == 1 {
            self.busy.push(Reverse((last, slot)));
        }
        slot
    }
}

fn scan(banks: &[Bank], lives: &[Option<(u32, u32)>]) -> Allocation {
    let mut order: Vec<u32> =
        (0..banks.len() as u32).filter(|&index| lives[index as usize].is_some()).collect();
    order.sort_by_key(|&index| lives[index as usize].map(|(first, _)| first));
    let mut slots = vec![0; banks.len()];
    let (mut b32, mut b64, mut pred) = (Slots::default(), Slots::default(), Slots::default());
    for index in order {
        let index = index as usize;
        let Some((first, last)) = lives[index] else { continue };
        slots[index] = match banks[index] {
            Bank::B32 => b32.take(first, last, 1),
            Bank::B64 => b64.take(first, last, 1),
            Bank::B128 => b64.take(first, last, 2),
            Bank::Pred => pred.take(first, last, 1),
        };
    }
    Allocation { slots, frame32: b32.count, frame64: b64.count, frame_pred: pred.count }
}

/// The slot of an operand.
pub(super) fn slot_of(operand: Opnd, allocation: &Allocation) -> i32 {
    match operand {
        Opnd::Def(VReg(index)) | Opnd::Use(VReg(index)) => allocation.slots[index as usize],
        Opnd::Fixed(slot) => slot,
    }
}

#[cfg(test)]
mod tests {
    use super::super::ir::Role;
    use super::*;
    use crate::exec::control::Nop;
    use crate::exec::{Handlers, Level};

    fn node(operands: Vec<Opnd>, guard: Option<u32>, flow: NodeFlow) -> Node {
        Node {
            run: Handlers::scalar::<Nop>().at(Level::Portable),
            imm: 0,
            operands,
            guard: guard.map(|register| (VReg(register), false)),
            line: 0,
            aux: 0,
            cached: false,
            steady: false,
            pure: false,
            role: Role::None,
            flow,
        }
    }

    fn step(defs: &[u32], uses: &[u32]) -> Node {
        let defs = defs.iter().map(|&r| Opnd::Def(VReg(r)));
        let operands = defs.chain(uses.iter().map(|&r| Opnd::Use(VReg(r)))).collect();
        node(operands, None, NodeFlow::Next)
    }

    #[test]
    fn values_that_never_meet_share_a_slot() {
        let nodes = [step(&[0], &[]), step(&[1], &[0]), step(&[2], &[1]), step(&[], &[2])];
        let allocation = allocate(&nodes, &[Bank::B32; 3], &[], |_| Vec::new(), &[]);
        assert_eq!(allocation.frame32, 2);
        assert_eq!(allocation.slots[0], allocation.slots[2]);
    }

    #[test]
    fn what_is_kept_shares_no_slot() {
        let nodes = [step(&[0], &[]), step(&[1], &[0]), step(&[2], &[1]), step(&[], &[2])];
        let allocation = allocate(&nodes, &[Bank::B32; 3], &[], |_| Vec::new(), &[VReg(2)]);
        assert_eq!(allocation.frame32, 3);
    }

    #[test]
    fn a_value_lives_around_the_loop_that_reads_it() {
        // 0 is read at the top of a loop whose body writes 1 and 2 after that.
        let mut nodes = vec![step(&[0], &[]), step(&[1], &[0]), step(&[2], &[1])];
        nodes.push(node(vec![], Some(2), NodeFlow::Branch(LabelId(0))));
        nodes.push(step(&[], &[1]));
        let banks = [Bank::B32, Bank::B32, Bank::B32];
        let allocation = allocate(&nodes, &banks, &[1], |_| Vec::new(), &[]);
        assert_eq!(allocation.frame32, 3, "all three live at the branch");
    }

    #[test]
    fn a_guarded_write_keeps_the_old_value_alive() {
        let mut nodes = vec![step(&[0], &[]), step(&[1], &[]), step(&[], &[1])];
        nodes.push(node(vec![Opnd::Def(VReg(0))], Some(2), NodeFlow::Next));
        nodes.push(step(&[], &[0]));
        let banks = [Bank::B32, Bank::B32, Bank::Pred];
        let allocation = allocate(&nodes, &banks, &[], |_| Vec::new(), &[]);
        assert_ne!(allocation.slots[0], allocation.slots[1]);
    }
}
