//! What a kernel computes before it looks at its block: parameters, addresses, thread indices.
//!
//! A worker runs block after block of a grid with the same warps. What depends only on the grid and
//! on the thread's place in its block is the same for a warp every time, so those instructions move
//! to the front, their results keep slots of their own, and only a warp's first block runs them.

use super::ir::{Node, NodeFlow, VReg};
use kedge_ptx::ast::{AddressBase, Function, Instruction, Operand};

/// The instructions at the front of a kernel that need not run again.
#[derive(Debug, Default)]
pub(super) struct Prologue {
    pub len: u32,
    /// Results that the rest of the kernel reads.
    pub kept: Vec<VReg>,
}

/// Instructions that read nothing but their operands, and write nothing but their results.
const PURE: &[&str] = &[
    "abs", "add", "and", "bfe", "bfi", "brev", "clz", "cvt", "cvta", "div", "fma", "lop3", "mad",
    "mad24", "max", "min", "mov", "mul", "mul24", "neg", "not", "or", "popc", "prmt", "rcp", "rem",
    "selp", "set", "setp", "shf", "shl", "shr", "sqrt", "sub", "xor",
];

/// Special registers that a warp sees alike in every block.
const STEADY: &[&str] = &[
    "%tid.x",
    "%tid.y",
    "%tid.z",
    "%ntid.x",
    "%ntid.y",
    "%ntid.z",
    "%nctaid.x",
    "%nctaid.y",
    "%nctaid.z",
    "%laneid",
    "WARP_SZ",
];

/// Whether an instruction only computes.
pub(super) fn is_pure(instruction: &Instruction) -> bool {
    let opcode = instruction.name.first().map_or("", String::as_str);
    PURE.contains(&opcode) && !instruction.name.iter().any(|part| part == "cc")
}

/// Whether an instruction of kernel `function` gives the same result in every block, if what it
/// reads does.
pub(super) fn is_steady(function: &Function, instruction: &Instruction) -> bool {
    let opcode = instruction.name.first().map_or("", String::as_str);
    let pure = is_pure(instruction);
    let own = |name: &str| function.params.iter().any(|param| param.name == name);
    let param = opcode == "ld"
        && match instruction.operands.get(1) {
            Some(Operand::Address(AddressBase::Symbol(name), _)) => own(name),
            _ => false,
        };
    (pure || param) && instruction.operands.iter().all(steady_operand)
}

fn steady_operand(operand: &Operand) -> bool {
    match operand {
        Operand::Special(name) => STEADY.contains(&name.as_str()),
        Operand::Vector(items) | Operand::List(items) => items.iter().all(steady_operand),
        _ => true,
    }
}

/// Most instructions that are hoisted from loops: each result has a slot of its own from then on.
const MAX_FROM_LOOPS: usize = 64;

/// Moves what is steady to the kernel's front: of its first stretch, up to a label or a branch, and
/// of its loops, with all that this is computed from. `labels`, the nodes that labels stand before,
/// follow.
pub(super) fn hoist(nodes: &mut Vec<Node>, labels: &mut [u32], registers: usize) -> Prologue {
    let branch = nodes.iter().position(|node| node.flow != NodeFlow::Next).unwrap_or(nodes.len());
    let label = labels.iter().copied().min().unwrap_or(u32::MAX) as usize;
    let start = branch.min(label).min(nodes.len());
    let steady = steady(nodes, registers);
    let mut moved = wanted(nodes, &steady, registers, start, &loops(nodes, labels));
    if moved[start..].iter().filter(|moved| **moved).count() > MAX_FROM_LOOPS {
        moved[start..].fill(false);
    }
    let len = moved.iter().filter(|moved| **moved).count() as u32;
    for label in labels {
        let before = (*label as usize).min(moved.len());
        *label += moved[before..].iter().filter(|moved| **moved).count() as u32;
    }
    let mut flags = moved.into_iter();
    let (mut front, back): (Vec<_>, Vec<_>) =
        nodes.drain(..).partition(|_| flags.next().unwrap_or(false));
    let mut written = vec![false; registers];
    front.iter().flat_map(Node::written).for_each(|register| written[register.0 as usize] = true);
    let mut kept: Vec<VReg> = back.iter().flat_map(Node::read).collect();
    kept.retain(|register| written[register.0 as usize]);
    kept.sort_unstable();
    kept.dedup();
    front.extend(back);
    *nodes = front;
    Prologue { len, kept }
}

/// Which nodes give the same result in every block and wherever they stand: nothing else writes it.
fn steady(nodes: &[Node], registers: usize) -> Vec<bool> {
    let mut writes = vec![0u32; registers];
    for register in nodes.iter().flat_map(Node::written) {
        writes[register.0 as usize] += 1;
    }
    let mut steady = vec![false; registers];
    let fits = |node: &Node| {
        let fits = node.steady
            && node.guard.is_none()
            && node.read().all(|register| steady[register.0 as usize])
            && node.written().all(|register| writes[register.0 as usize] == 1);
        if fits {
            node.written().for_each(|register| steady[register.0 as usize] = true);
        }
        fits
    };
    nodes.iter().map(fits).collect()
}

/// Which of the `steady` nodes lie before `start` or in a loop, or compute what such a node reads.
fn wanted(
    nodes: &[Node],
    steady: &[bool],
    registers: usize,
    start: usize,
    in_loop: &[bool],
) -> Vec<bool> {
    let mut read = vec![false; registers];
    let mut wanted = vec![false; nodes.len()];
    for (at, node) in nodes.iter().enumerate().rev() {
        let asked = at < start || in_loop[at] || node.written().any(|to| read[to.0 as usize]);
        if steady[at] && asked {
            wanted[at] = true;
            node.read().for_each(|register| read[register.0 as usize] = true);
        }
    }
    wanted
}

/// Which nodes lie between a label and a branch back to it.
fn loops(nodes: &[Node], labels: &[u32]) -> Vec<bool> {
    let mut in_loop = vec![false; nodes.len()];
    for (at, node) in nodes.iter().enumerate() {
        if let NodeFlow::Branch(label) = node.flow {
            let target = labels[label.0 as usize] as usize;
            if target <= at {
                in_loop[target..=at].fill(true);
            }
        }
    }
    in_loop
}
