//! Sums that are kept in memory by more threads than own them.
//!
//! `for (…) x[i] += …`, run by several warps with the same `i`, is a race that hardware decides in
//! one way: a block's warps start together, and each has loaded `x[i]` long before any of them
//! stores, so that all compute the same sum. Here a warp would run to its end before the next one
//! begins. So a warp stops once before such a store, until the block's other warps have come as
//! far.

use kedge_ptx::ast::{AddressBase, Body, LabelId, Operand, RegId, Statement};
use std::collections::{HashMap, HashSet};

/// A register and an offset.
type Place = (RegId, i64);

/// The statements of a kernel that store, in a loop, to where another instruction loads from.
pub(super) fn stores(body: &Body) -> HashSet<usize> {
    let loops = loops(body);
    let mut loaded: HashSet<Place> = HashSet::new();
    let mut found = HashSet::new();
    for (index, statement) in body.statements.iter().enumerate() {
        let Statement::Instruction(instruction) = statement else { continue };
        let global = || instruction.name.iter().any(|part| part == "global");
        match instruction.name.first().map(String::as_str) {
            Some("ld") if global() => loaded.extend(instruction.operands.get(1).and_then(place)),
            Some("st") if global() => {
                let known = instruction
                    .operands
                    .first()
                    .and_then(place)
                    .is_some_and(|p| loaded.contains(&p));
                if known && loops.iter().any(|&(begin, end)| begin <= index && index < end) {
                    found.insert(index);
                }
            }
            _ => {}
        }
    }
    found
}

/// The statements that load, right behind a block's barrier, what is the same for all of it from
/// shared memory: what a sum over the block gives to its caller. The next such sum, whose first
/// store comes without another barrier, is a race that hardware decides in one way, as all warps
/// leave the barrier together: each has loaded before any has computed what it stores. So a warp
/// lets the others come as far.
pub(super) fn broadcasts(body: &Body) -> HashSet<usize> {
    let mut found = HashSet::new();
    let mut behind = false;
    for (index, statement) in body.statements.iter().enumerate() {
        let Statement::Instruction(instruction) = statement else { continue };
        let part = |at: usize| instruction.name.get(at).map_or("", String::as_str);
        match part(0) {
            "bar" | "barrier" => behind = part(1) != "warp" && part(1) != "cluster",
            "ld" if behind => {
                let shared = instruction.name.iter().any(|part| part.starts_with("shared"));
                let symbol = instruction.operands.get(1).is_some_and(|operand| {
                    matches!(operand, Operand::Address(AddressBase::Symbol(_), _))
                });
                if shared && symbol {
                    found.insert(index);
                }
                behind = false;
            }
            "mov" => {}
            _ => behind = false,
        }
    }
    found
}

fn place(operand: &Operand) -> Option<Place> {
    match operand {
        Operand::Address(AddressBase::Register(register), offset) => Some((*register, *offset)),
        _ => None,
    }
}

/// Statements from a label to a branch that leads back to it.
fn loops(body: &Body) -> Vec<(usize, usize)> {
    let mut labels: HashMap<LabelId, usize> = HashMap::new();
    let mut loops = Vec::new();
    for (index, statement) in body.statements.iter().enumerate() {
        match statement {
            Statement::Label(label) => {
                labels.insert(*label, index);
            }
            Statement::Instruction(instruction) => {
                let back = instruction.operands.iter().find_map(|operand| match operand {
                    Operand::Label(label) => labels.get(label),
                    _ => None,
                });
                loops.extend(back.map(|&begin| (begin, index)));
            }
        }
    }
    loops
}
