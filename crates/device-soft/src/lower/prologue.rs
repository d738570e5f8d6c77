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

/// Whether an instruction of kernel `function` gives the same result in every block, if what it reads
/// does.
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

/// Moves what is steady in the kernel's first stretch, up to a label or a branch, to its front.
pub(super) fn hoist(nodes: &mut Vec<Node>, labels: &[u32], registers: usize) -> Prologue {
    let branch = nodes.iter().position(|node| node.flow != NodeFlow::Next).unwrap_or(nodes.len());
    let label = labels.iter().copied().min().unwrap_or(u32::MAX) as usize;
    let rest = nodes.split_off(branch.min(label).min(nodes.len()));
    let mut writes = vec![0u32; registers];
    for register in nodes.iter().chain(&rest).flat_map(Node::written) {
        writes[register.0 as usize] += 1;
    }
    let mut steady = vec![false; registers];
    let (mut front, mut back) = (Vec::with_capacity(nodes.len()), Vec::new());
    for node in nodes.drain(..) {
        let fits = node.steady
            && node.guard.is_none()
            && node.read().all(|register| steady[register.0 as usize])
            && node.written().all(|register| writes[register.0 as usize] == 1);
        if fits {
            node.written().for_each(|register| steady[register.0 as usize] = true);
            front.push(node);
        } else {
            back.push(node);
        }
    }
    let len = front.len() as u32;
    let mut kept: Vec<VReg> = back.iter().chain(&rest).flat_map(Node::read).collect();
    kept.retain(|register| steady[register.0 as usize]);
    kept.sort_unstable();
    kept.dedup();
    front.append(&mut back);
    front.extend(rest);
    *nodes = front;
    Prologue { len, kept }
}
