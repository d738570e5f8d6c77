//! Vector registers (`.reg .v2 .u32 v;`): each becomes registers for its elements, and `v` in an
//! instruction the vector `{v.x, v.y}` of those, which may be written for it (PTX ISA, "Vectors as
//! Operands").

use super::Result;
use crate::ParseError;
use crate::ast::{AddressBase, Body, Operand, RegId, Register, Statement};
use std::collections::HashMap;

/// Names of elements, by their numbers.
const ELEMENTS: [&str; 4] = ["x", "y", "z", "w"];

/// The registers of each vector register's elements.
type Elements = HashMap<RegId, Vec<RegId>>;

/// Leaves no vector register in `body`.
///
/// # Errors
/// An element that a register does not have, or a vector that is an address.
pub(super) fn split(body: &mut Body) -> Result<()> {
    let elements = declare(&mut body.registers);
    if elements.is_empty() {
        return Ok(());
    }
    for statement in &mut body.statements {
        let Statement::Instruction(instruction) = statement else { continue };
        for operand in &mut instruction.operands {
            replace(&elements, operand)
                .map_err(|(what, found)| ParseError::new(instruction.line, what, &found))?;
        }
    }
    Ok(())
}

/// Declares a register for each element.
fn declare(registers: &mut Vec<Register>) -> Elements {
    let mut elements = Elements::new();
    for index in 0..registers.len() {
        let lanes = registers[index].lanes as usize;
        if lanes == 1 {
            continue;
        }
        let of = |part| format!("{}.{part}", registers[index].name);
        let ty = registers[index].ty;
        let parts = ELEMENTS.iter().take(lanes);
        let parts: Vec<_> = parts.map(|part| Register { name: of(part), ty, lanes: 1 }).collect();
        let first = registers.len() as u32;
        let ids = (first..).take(lanes).map(RegId).collect();
        registers.extend(parts);
        registers[index].lanes = 1;
        elements.insert(RegId(index as u32), ids);
    }
    elements
}

/// Replaces what names a vector register, or one of its elements; the error is what is wrong, and
/// with what.
fn replace(
    elements: &Elements,
    operand: &mut Operand,
) -> std::result::Result<(), (&'static str, String)> {
    match operand {
        Operand::Register(id) => {
            if let Some(parts) = elements.get(id) {
                *operand = Operand::Vector(parts.iter().copied().map(Operand::Register).collect());
            }
        }
        Operand::Component(id, part) => {
            let Some(parts) = elements.get(id) else { return Ok(()) };
            let index = element(part);
            let found = index.and_then(|index| parts.get(index));
            let found = found.ok_or_else(|| ("no such element", part.clone()))?;
            *operand = Operand::Register(*found);
        }
        Operand::Address(AddressBase::Register(id), _) if elements.contains_key(id) => {
            return Err(("a vector is no address", String::new()));
        }
        Operand::Pair(left, right) => {
            replace(elements, left)?;
            replace(elements, right)?;
        }
        Operand::Vector(all) | Operand::List(all) | Operand::Bracket(all) => {
            all.iter_mut().try_for_each(|operand| replace(elements, operand))?;
        }
        _ => {}
    }
    Ok(())
}

/// The number of an element, which `r`, `g`, `b` and `a` name as well.
fn element(part: &str) -> Option<usize> {
    let colours = ["r", "g", "b", "a"];
    ELEMENTS.iter().position(|name| *name == part).or(colours.iter().position(|name| *name == part))
}
