//! Sums of products of what two strips load, done at once: the inner loop of every product of
//! matrices.
//!
//! Unrolled and joined, that loop is two strips of shared memory and a chain of fused
//! multiply-adds, each of one element of either strip. Where nothing else reads those elements and
//! the sums in between, they need no registers.

use super::ir::{Node, NodeFlow, Opnd, Role, VReg};
use super::strips;
use crate::exec::Level;
use crate::exec::dot::{Dot, Ends};
use crate::exec::strip::HEAD;
use kedge_ptx::ast::Instruction;
use std::collections::HashMap;

/// Fewest products that are worth it.
const MIN_PRODUCTS: usize = 2;
/// Most nodes from one strip to the other.
const MAX_DISTANCE: usize = 16;

/// What an instruction that is no load may be part of.
pub(super) fn role(instruction: &Instruction) -> Role {
    let mut parts = [""; 3];
    if instruction.name.len() == parts.len() {
        parts.iter_mut().zip(&instruction.name).for_each(|(to, part)| *to = part);
    }
    match parts {
        ["fma" | "mad", "rn", "f32"] => Role::MultiplyAdd(4),
        ["fma" | "mad", "rn", "f64"] => Role::MultiplyAdd(8),
        _ => Role::None,
    }
}

/// Fuses sums of products, for the level that has strips; `labels`, the nodes that labels stand
/// before, follow. `registers`: how many there are.
pub(super) fn fuse(nodes: &mut Vec<Node>, labels: &mut [u32], registers: usize, level: Level) {
    if level < Level::Avx512 {
        return;
    }
    let landing = strips::landings(nodes, labels);
    let once = strips::once(nodes, registers);
    let mut gone = vec![false; nodes.len()];
    for at in 0..nodes.len() {
        if let Some((second, dot, len)) = dot_at(nodes, &landing, &once, at, level) {
            gone[at] = true;
            nodes[second] = dot;
            gone[second + 1..second + len].fill(true);
        }
    }
    strips::remove(nodes, labels, &gone);
}

/// A strip as a factor: its element's bytes and reach, where each register lies from the base, and
/// the base.
struct Factor {
    bytes: u32,
    reach: [Opnd; HEAD],
    offsets: HashMap<VReg, i32>,
    base: Opnd,
}

impl Factor {
    fn of(node: &Node) -> Option<Factor> {
        let Role::Strip(load) = node.role else { return None };
        if load.global {
            return None;
        }
        let (&base, rest) = node.operands.split_last()?;
        let (&reach, mut rest) = rest.split_first_chunk::<HEAD>()?;
        let mut offsets = HashMap::new();
        while let Some((&[Opnd::Fixed(offset), Opnd::Fixed(count)], tail)) =
            rest.split_first_chunk()
        {
            let (to, tail) = tail.split_at_checked(usize::try_from(count).ok()?)?;
            for (&to, item) in to.iter().zip(0..) {
                let Opnd::Def(register) = to else { return None };
                // Loaded twice: the first is not what anyone reads.
                if offsets.insert(register, offset + item * load.element as i32).is_some() {
                    return None;
                }
            }
            rest = tail;
        }
        Some(Factor { bytes: load.element, reach, offsets, base })
    }
}

/// The place of the next strip, if the one at `at` may as well be done there: in between are only a
/// few instructions that compute, and leave its base as it is.
fn second_strip(nodes: &[Node], landing: &[bool], at: usize) -> Option<usize> {
    let base = *nodes[at].operands.last()?;
    for next in at + 1..nodes.len().min(at + MAX_DISTANCE) {
        let node = &nodes[next];
        if landing[next] {
            return None;
        }
        if matches!(node.role, Role::Strip(_)) {
            return Some(next);
        }
        let computes = node.pure && node.flow == NodeFlow::Next;
        if !computes || node.written().any(|register| base == Opnd::Use(register)) {
            return None;
        }
    }
    None
}

/// The sum of products whose first strip is at `at`: where its second strip is, which it takes the
/// place of, and how many nodes it stands for from there on.
fn dot_at(
    nodes: &[Node],
    landing: &[bool],
    once: &[bool],
    at: usize,
    level: Level,
) -> Option<(usize, Node, usize)> {
    let first = Factor::of(&nodes[at])?;
    let at = second_strip(nodes, landing, at)?;
    let second = Factor::of(&nodes[at])?;
    let count = first.offsets.len();
    let len = count + 1;
    let chain = nodes.get(at + 1..at + len)?;
    let whole = !landing[at + 1..at + len].contains(&true);
    let alike = first.bytes == second.bytes && second.offsets.len() == count;
    if count < MIN_PRODUCTS || !whole || !alike {
        return None;
    }
    let mut pairs = Vec::with_capacity(2 * count);
    let mut sum: Option<(Opnd, VReg)> = None;
    for node in chain {
        let (result, factors, addend) = multiply_add(node, first.bytes)?;
        let (x, y) = match first.offsets.contains_key(&factors[0]) {
            true => (factors[0], factors[1]),
            false => (factors[1], factors[0]),
        };
        if !once[x.0 as usize] || !once[y.0 as usize] {
            return None;
        }
        pairs.push(Opnd::Fixed(*first.offsets.get(&x)?));
        pairs.push(Opnd::Fixed(*second.offsets.get(&y)?));
        let start = match sum {
            None => addend,
            Some((start, so_far)) if addend == Opnd::Use(so_far) && once[so_far.0 as usize] => {
                start
            }
            Some(_) => return None,
        };
        sum = Some((start, result));
    }
    let (start, result) = sum?;
    let mut operands = [first.reach, second.reach].concat();
    operands.append(&mut pairs);
    operands.extend(
        Ends { first: first.base, second: second.base, start, result: Opnd::Def(result) }.list(),
    );
    let run = Dot::handlers(first.bytes).at(level);
    let node = Node { run, operands, role: Role::None, line: chain[0].line, ..nodes[at].clone() };
    Some((at, node, len))
}

/// Result, factors and addend of an unguarded multiply-add of registers.
fn multiply_add(node: &Node, bytes: u32) -> Option<(VReg, [VReg; 2], Opnd)> {
    if node.role != Role::MultiplyAdd(bytes) || node.guard.is_some() || node.flow != NodeFlow::Next
    {
        return None;
    }
    match node.operands.as_slice() {
        &[Opnd::Def(result), Opnd::Use(x), Opnd::Use(y), addend] => Some((result, [x, y], addend)),
        _ => None,
    }
}
