//! Two steps of integer arithmetic done as one, where nothing else reads the first one's result.
//!
//! Indices and addresses are most of what a kernel computes, and of an instruction that only adds,
//! most is the way to it, its operands' rows and its result's.

use super::ir::{Node, NodeFlow, Opnd, Role, Step, VReg};
use super::strips;
use crate::exec::alu_int::{Add3, MadWideS32, MadWideU32};
use crate::exec::bitwise::{AddAnd, AddShl, AndShl, ShlAdd, ShlAnd};
use crate::exec::lanewise::lanes;
use crate::exec::{Handlers, Level};
use kedge_ptx::ast::Instruction;

/// Most nodes from a step to the next.
const MAX_DISTANCE: usize = 16;

/// What an instruction may be part of.
pub(super) fn role(instruction: &Instruction) -> Role {
    let mut parts = [""; 3];
    if instruction.name.len() <= parts.len() {
        parts.iter_mut().zip(&instruction.name).for_each(|(to, part)| *to = part);
    }
    Role::Step(match parts {
        ["add", "s32" | "u32", ""] => Step::Add32,
        ["add", "s64" | "u64", ""] => Step::Add64,
        ["and", "b32", ""] => Step::And32,
        ["shl", "b32", ""] => Step::Shl32,
        ["mul", "wide", "s32"] => Step::MulWideS32,
        ["mul", "wide", "u32"] => Step::MulWideU32,
        _ => return Role::None,
    })
}

/// The handler of `second(first(x, y), z)`.
fn handlers(first: Step, second: Step) -> Option<Handlers> {
    Some(match (first, second) {
        (Step::Add32, Step::Add32) => lanes::<Add3>().handlers,
        (Step::Add32, Step::And32) => lanes::<AddAnd>().handlers,
        (Step::Add32, Step::Shl32) => lanes::<AddShl>().handlers,
        (Step::And32, Step::Shl32) => lanes::<AndShl>().handlers,
        (Step::Shl32, Step::Add32) => lanes::<ShlAdd>().handlers,
        (Step::Shl32, Step::And32) => lanes::<ShlAnd>().handlers,
        (Step::MulWideS32, Step::Add64) => lanes::<MadWideS32>().handlers,
        (Step::MulWideU32, Step::Add64) => lanes::<MadWideU32>().handlers,
        _ => return None,
    })
}

/// Fuses pairs among the nodes after the first `skipped`; `labels`, the nodes that labels stand
/// before, follow. `registers`: how many there are.
pub(super) fn fuse(
    nodes: &mut Vec<Node>,
    labels: &mut [u32],
    registers: usize,
    skipped: usize,
    level: Level,
) {
    if level == Level::Portable {
        return;
    }
    let landing = strips::landings(nodes, labels);
    let once = strips::once(nodes, registers);
    let mut gone = vec![false; nodes.len()];
    for at in skipped..nodes.len() {
        if let Some((second, pair)) = pair_at(nodes, &landing, &once, at, level) {
            gone[at] = true;
            nodes[second] = pair;
        }
    }
    strips::remove(nodes, labels, &gone);
}

/// A step of its own: what it does, its result and operands.
fn step(node: &Node) -> Option<(Step, VReg, [Opnd; 2])> {
    match (node.role, node.operands.as_slice()) {
        (Role::Step(step), &[Opnd::Def(result), x, y])
            if node.guard.is_none() && node.flow == NodeFlow::Next =>
        {
            Some((step, result, [x, y]))
        }
        _ => None,
    }
}

/// The pair whose first step is at `at`, and the place of its second.
fn pair_at(
    nodes: &[Node],
    landing: &[bool],
    once: &[bool],
    at: usize,
    level: Level,
) -> Option<(usize, Node)> {
    let (first, between, [x, y]) = step(&nodes[at])?;
    if !once[between.0 as usize] {
        return None;
    }
    for next in at + 1..nodes.len().min(at + MAX_DISTANCE) {
        let node = &nodes[next];
        if landing[next] || node.flow != NodeFlow::Next {
            return None;
        }
        if node.read().any(|register| register == between) {
            let (second, result, operands) = step(node)?;
            let z = match operands {
                [of, z] if of == Opnd::Use(between) => z,
                // A shift's second operand says how far.
                [z, of] if of == Opnd::Use(between) && second != Step::Shl32 => z,
                _ => return None,
            };
            let run = handlers(first, second)?.at(level);
            let operands = vec![Opnd::Def(result), x, y, z];
            return Some((next, Node { run, operands, role: Role::None, ..node.clone() }));
        }
        if node.written().any(|register| [x, y].contains(&Opnd::Use(register))) {
            return None;
        }
    }
    None
}
