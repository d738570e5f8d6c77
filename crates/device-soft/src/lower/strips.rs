//! Loads from one base register, joined: a tile's row, a structure's fields.
//!
//! Compilers unroll loops into `ld` after `ld` from one register with growing offsets. Joined, they
//! check their addresses once. A load moves up to the first of its kind past instructions that only
//! compute, which neither read nor write its destination nor write the base.

use super::ir::{Node, NodeFlow, Opnd, Role, VReg};
use crate::exec::Level;
use crate::exec::strip::{MAX_LOADS, Strip};
use std::collections::HashSet;

/// How far a load may move.
const REACH: usize = 192;
/// Offsets lie between minus and plus this.
const MAX_OFFSET: i64 = 1 << 28;

/// Joins loads, for the level that gains from it; `labels`, the nodes that labels stand before,
/// follow.
pub(super) fn join(nodes: &mut Vec<Node>, labels: &mut [u32], level: Level) {
    if level < Level::Avx512 {
        return;
    }
    let landing = landings(nodes, labels);
    let mut gone = vec![false; nodes.len()];
    for at in 0..nodes.len() {
        if gone[at] {
            continue;
        }
        let members = group(nodes, &landing, &gone, at);
        if members.len() > 1 {
            let joined = joined(nodes, &members, level);
            nodes[at] = joined;
            members[1..].iter().for_each(|&member| gone[member] = true);
        }
    }
    remove(nodes, labels, &gone);
}

/// The loads, that at `first` included, which may be done there together.
fn group(nodes: &[Node], landing: &[bool], gone: &[bool], first: usize) -> Vec<usize> {
    let Some(base) = base_of(&nodes[first]) else { return Vec::new() };
    let mut members = vec![first];
    let mut touched: HashSet<VReg> = HashSet::new();
    let end = nodes.len().min(first + REACH);
    for at in first + 1..end {
        let node = &nodes[at];
        if landing[at] || node.flow != NodeFlow::Next || members.len() == MAX_LOADS {
            break;
        }
        if gone[at] {
            continue;
        }
        let alike = base_of(node) == Some(base)
            && node.load().map(|load| (load.element, load.global))
                == nodes[first].load().map(|load| (load.element, load.global));
        if alike && node.written().all(|register| !touched.contains(&register)) {
            members.push(at);
            continue;
        }
        if !(node.pure || node.load().is_some()) || node.written().any(|register| register == base)
        {
            break;
        }
        let guard = node.guard.map(|(register, _)| register);
        touched.extend(guard.into_iter().chain(node.operands.iter().filter_map(register)));
    }
    members
}

/// The base register of a load that may be joined with others.
fn base_of(node: &Node) -> Option<VReg> {
    let load = node.load()?;
    let offset = node.imm as i64;
    let bytes = (u64::from(load.element) * u64::from(load.count)) as i64;
    let fits = node.guard.is_none() && offset.abs() < MAX_OFFSET && offset % bytes == 0;
    match node.operands.last() {
        Some(Opnd::Use(base)) if fits && node.written().all(|to| to != *base) => Some(*base),
        _ => None,
    }
}

/// One instruction that does what `members` do; its operands are as [`Strip`] says.
fn joined(nodes: &[Node], members: &[usize], level: Level) -> Node {
    let first = &nodes[members[0]];
    let bytes =
        |member: usize| nodes[member].load().map_or(0, |load| load.element * load.count) as i32;
    let offset = |member: usize| nodes[member].imm as i32;
    let all = || members.iter().copied();
    let align = all().map(bytes).max().unwrap_or(0);
    // Lanes lie side by side only where all loads are of one size.
    let step = if all().all(|member| bytes(member) == align) { align } else { 0 };
    let from = all().map(offset).min().unwrap_or(0);
    let to = all().map(|member| offset(member) + bytes(member)).max().unwrap_or(0);
    let mut operands: Vec<Opnd> = [from, to, align, step].map(Opnd::Fixed).into();
    for &member in members {
        let node = &nodes[member];
        let (_, to) = node.operands.split_last().unwrap_or((&Opnd::Fixed(0), &[]));
        operands.push(Opnd::Fixed(node.imm as i32));
        operands.push(Opnd::Fixed(to.len() as i32));
        operands.extend_from_slice(to);
    }
    operands.extend(first.operands.last());
    let load = first.load();
    let run = load.map_or(first.run, |load| Strip::handlers(load).at(level));
    Node { run, operands, role: load.map_or(Role::None, Role::Strip), ..first.clone() }
}

/// Before which nodes, and whether behind the last, a label stands.
pub(super) fn landings(nodes: &[Node], labels: &[u32]) -> Vec<bool> {
    let mut landing = vec![false; nodes.len() + 1];
    for &label in labels {
        landing[(label as usize).min(nodes.len())] = true;
    }
    landing
}

/// Which registers one instruction writes and one reads.
pub(super) fn once(nodes: &[Node], registers: usize) -> Vec<bool> {
    let mut counts = vec![(0u32, 0u32); registers];
    for node in nodes {
        node.written().for_each(|register| counts[register.0 as usize].0 += 1);
        node.read().for_each(|register| counts[register.0 as usize].1 += 1);
    }
    counts.into_iter().map(|count| count == (1, 1)).collect()
}

/// Takes out the nodes that are `gone`; `labels` follow.
pub(super) fn remove(nodes: &mut Vec<Node>, labels: &mut [u32], gone: &[bool]) {
    let mut kept = Vec::with_capacity(gone.len() + 1);
    let mut count = 0;
    for &gone in gone {
        kept.push(count);
        count += u32::from(!gone);
    }
    kept.push(count);
    for label in labels {
        *label = kept[(*label as usize).min(gone.len())];
    }
    let mut gone = gone.iter();
    nodes.retain(|_| !gone.next().copied().unwrap_or(false));
}

fn register(operand: &Opnd) -> Option<VReg> {
    match operand {
        Opnd::Def(register) | Opnd::Use(register) => Some(*register),
        Opnd::Fixed(_) => None,
    }
}
