//! `mov.v2` and `mov.v4`, which gcc writes and ptxas takes: a `mov` of each element.

use super::function::{Complaint, FunctionLowering};
use super::ir::Opnd;
use crate::exec::mov;
use crate::exec::select::type_named;
use kedge_ptx::ast::{Instruction, Operand};

/// Lowers a `mov` of a vector; false where `instruction` is none.
pub(super) fn lower(
    f: &mut FunctionLowering<'_, '_>,
    instruction: &Instruction,
) -> Result<bool, Complaint> {
    let [mov, vector, ty] = instruction.name.as_slice() else { return Ok(false) };
    let [Operand::Vector(to), Operand::Vector(from)] = instruction.operands.as_slice() else {
        return Ok(false);
    };
    let lanes = match vector.as_str() {
        "v2" => 2,
        "v4" => 4,
        _ => return Ok(false),
    };
    if mov != "mov" || [to.len(), from.len()] != [lanes; 2] {
        return Ok(false);
    }
    let Some((ty, copy)) = type_named(ty).and_then(|ty| Some((ty, mov::copy(ty)?))) else {
        return Ok(false);
    };
    let mut values = Vec::with_capacity(lanes);
    for operand in from {
        let value = f.source(operand, ty)?;
        // All are read before one is written.
        values.push(match operand {
            Operand::Register(_) if to.contains(operand) => {
                let copied = f.temporary(super::ir::Bank::of(ty));
                f.push(&copy, vec![Opnd::Def(copied), value]);
                Opnd::Use(copied)
            }
            _ => value,
        });
    }
    for (operand, value) in to.iter().zip(values) {
        let mut after = Vec::new();
        let to = f.destination(operand, ty, &mut after)?;
        f.push(&copy, vec![to, value]);
        f.nodes.append(&mut after);
    }
    Ok(true)
}
