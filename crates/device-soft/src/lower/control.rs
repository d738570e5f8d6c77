//! Branches, calls and returns.

use super::function::{Complaint, FunctionLowering, dotted};
use super::ir::{NodeFlow, Opnd, VReg};
use super::symbols::{Symbol, signature_layout};
use crate::exec::control::{
    Branch, BranchIndexed, Call, CallSite, Copy, Exit, Return, Target, Trap,
};
use crate::exec::load_store::Access;
use crate::exec::select::Selected;
use kedge_ptx::ast::{Instruction, LabelId, Operand, Type, Variable};

/// Lowers a control instruction; false if it is none.
pub(super) fn lower(
    lowering: &mut FunctionLowering<'_, '_>,
    instruction: &Instruction,
) -> Result<bool, Complaint> {
    match instruction.name.first().map_or("", String::as_str) {
        "bra" => branch(lowering, instruction)?,
        "brx" => branch_indexed(lowering, instruction)?,
        "call" => call(lowering, instruction)?,
        "ret" => emit_return(lowering),
        "exit" => end::<Exit>(lowering),
        "trap" | "brkpt" => end::<Trap>(lowering),
        _ => return Ok(false),
    }
    Ok(true)
}

fn end<O: crate::exec::Op>(lowering: &mut FunctionLowering<'_, '_>) {
    lowering.push(&Selected::scalar::<O>([]), Vec::new()).flow = NodeFlow::End;
}

fn branch(
    lowering: &mut FunctionLowering<'_, '_>,
    instruction: &Instruction,
) -> Result<(), Complaint> {
    let Some(Operand::Label(label)) = instruction.operands.first() else {
        return Err("bra without a label".into());
    };
    if label.0 as usize >= lowering.labels.len() {
        return Err("bra to an unknown label".into());
    }
    let selected = Selected::scalar::<Branch>([]);
    lowering.push(&selected, Vec::new()).flow = NodeFlow::Branch(*label);
    Ok(())
}

fn branch_indexed(
    lowering: &mut FunctionLowering<'_, '_>,
    instruction: &Instruction,
) -> Result<(), Complaint> {
    let [index, list] = instruction.operands.as_slice() else {
        return Err(format!("{} wants an index and a list", dotted(instruction)));
    };
    let name = match list {
        Operand::Symbol(name, _) => name.as_str(),
        Operand::Label(label) => &lowering.body.labels[label.0 as usize],
        _ => return Err("brx.idx without a target list".into()),
    };
    let targets: Vec<LabelId> = lowering
        .body
        .branch_targets
        .iter()
        .find(|(list, _)| list == name)
        .map(|(_, targets)| targets.clone())
        .ok_or_else(|| format!("target list {name} is not declared"))?;
    let index = lowering.source(index, Type::U32)?;
    let number = lowering.module.branch_targets.len() as u32;
    lowering.module.branch_targets.push(Vec::new());
    lowering.tables.push((number, targets));
    let selected = Selected::scalar::<BranchIndexed>([]).imm(u64::from(number));
    lowering.push(&selected, vec![index]).flow = NodeFlow::Table(number);
    Ok(())
}

fn call(
    lowering: &mut FunctionLowering<'_, '_>,
    instruction: &Instruction,
) -> Result<(), Complaint> {
    let parts = parts(lowering, instruction)?;
    let (target, address, returns, params) = match parts.target {
        Operand::Symbol(name, _) => {
            let target = match lowering.symbol(name)? {
                Symbol::Function(index) => Target::Function(index),
                Symbol::Builtin(builtin) => Target::Builtin(builtin),
                _ => return Err(format!("call of {name}, which is no function")),
            };
            let signature = lowering.module.signatures.get(name.as_str());
            let signature = signature.ok_or_else(|| format!("{name} is not declared"))?;
            (target, None, signature.returns.as_slice(), signature.params.as_slice())
        }
        Operand::Register(register) => {
            let name = parts.prototype.as_ref().ok_or("an indirect call without a prototype")?;
            let prototypes = &lowering.body.prototypes;
            let prototype = prototypes.iter().find(|(label, _)| label == name);
            let (_, prototype) =
                prototype.ok_or_else(|| format!("prototype {name} is not declared"))?;
            let returns = prototype.returns.as_slice();
            (Target::Indirect, Some(*register), returns, prototype.params.as_slice())
        }
        _ => return Err("call of something that is no function".into()),
    };
    let (return_places, param_places, _) = signature_layout(returns, params);
    if parts.arguments.len() > params.len() || parts.returns.len() > returns.len() {
        return Err("call: more arguments than the function has".into());
    }
    let mut site = CallSite { target, ..CallSite::default() };
    for (index, argument) in parts.arguments.iter().enumerate() {
        let caller = outgoing(lowering, argument, &params[index])?;
        let bytes = params[index].size() as u32;
        site.arguments.push(Copy { caller, callee: param_places[index], bytes });
    }
    let mut incoming = Vec::new();
    for (index, result) in parts.returns.iter().enumerate() {
        let caller = match result {
            Operand::Symbol(name, offset) => frame_offset(lowering, name, *offset)?,
            Operand::Register(register) => {
                let size = returns[index].size().max(4);
                let at = lowering.reserve(size, 8);
                incoming.push((*register, returns[index].ty, at));
                at
            }
            Operand::Sink => lowering.reserve(returns[index].size(), 16),
            _ => return Err("call: a result is neither a parameter nor a register".into()),
        };
        let bytes = returns[index].size() as u32;
        site.results.push(Copy { caller, callee: return_places[index], bytes });
    }
    let operands = match address {
        Some(register) => vec![lowering.source(&Operand::Register(register), Type::B64)?],
        None => Vec::new(),
    };
    let number = lowering.module.calls.len() as u32;
    lowering.module.calls.push(site);
    lowering.sites.push(number);
    lowering.push(&Selected::scalar::<Call>([]).imm(u64::from(number)), operands);
    for (register, ty, at) in incoming {
        load_frame(lowering, VReg(register.0), ty, at);
    }
    Ok(())
}

/// A call's operands by role.
struct CallParts<'o> {
    returns: &'o [Operand],
    target: &'o Operand,
    arguments: &'o [Operand],
    prototype: Option<String>,
}

fn parts<'o>(
    lowering: &FunctionLowering<'_, '_>,
    instruction: &'o Instruction,
) -> Result<CallParts<'o>, Complaint> {
    let mut operands = instruction.operands.as_slice();
    let mut returns: &[Operand] = &[];
    if let [Operand::List(items), rest @ ..] = operands {
        returns = items;
        operands = rest;
    }
    let [target, rest @ ..] = operands else { return Err("call without a target".into()) };
    let (mut arguments, mut prototype): (&[Operand], _) = (&[], None);
    for operand in rest {
        match operand {
            Operand::List(items) => arguments = items,
            Operand::Symbol(name, _) => prototype = Some(name.clone()),
            Operand::Label(label) => {
                prototype = lowering.body.labels.get(label.0 as usize).cloned();
            }
            _ => return Err("call: an operand is out of place".into()),
        }
    }
    Ok(CallParts { returns, target, arguments, prototype })
}

/// Where in the caller's frame an argument lies: its `.param` variable, or a place that its value
/// is stored to here.
fn outgoing(
    lowering: &mut FunctionLowering<'_, '_>,
    argument: &Operand,
    param: &Variable,
) -> Result<u32, Complaint> {
    if let Operand::Symbol(name, offset) = argument
        && let Ok(at) = frame_offset(lowering, name, *offset)
    {
        return Ok(at);
    }
    let value = lowering.source(argument, param.ty)?;
    let at = lowering.reserve(param.size().max(8), 8);
    let access = frame_access(param.ty);
    let selected = Selected { handlers: access.store(), args: Vec::new(), imm: 0, aux: 0 };
    // Op 0 is the base, which frame accesses do not look at.
    let node = lowering.push(&selected, vec![Opnd::Fixed(-1), value]);
    node.imm = u64::from(at);
    node.aux = access.encode();
    Ok(at)
}

fn frame_offset(
    lowering: &FunctionLowering<'_, '_>,
    name: &str,
    offset: i64,
) -> Result<u32, Complaint> {
    match lowering.symbol(name)? {
        Symbol::FrameParam(at) => Ok(at.wrapping_add_signed(offset as i32)),
        _ => Err(format!("{name} is no parameter")),
    }
}

fn frame_access(ty: Type) -> Access {
    Access {
        log2: ty.size().trailing_zeros(),
        signed: matches!(ty, Type::S8 | Type::S16),
        count: 1,
        place: crate::exec::access::Place::Frame,
        strong: false,
        uncached: false,
        wide_registers: false,
    }
}

fn load_frame(lowering: &mut FunctionLowering<'_, '_>, to: VReg, ty: Type, at: u32) {
    let access = frame_access(ty);
    let selected = Selected { handlers: access.load(), args: Vec::new(), imm: 0, aux: 0 };
    let node = lowering.push(&selected, vec![Opnd::Def(to), Opnd::Fixed(-1)]);
    node.imm = u64::from(at);
    node.aux = access.encode();
}

/// Old-style `.reg` parameters: filled from the frame at entry.
pub(super) fn load_register_params(lowering: &mut FunctionLowering<'_, '_>) {
    for (index, param) in lowering.function.params.iter().enumerate() {
        if let Some(register) = param.in_register {
            let at = lowering.params[index];
            load_frame(lowering, VReg(register.0), param.ty, at);
        }
    }
}

/// `ret`, with old-style `.reg` results stored to the frame first.
pub(super) fn emit_return(lowering: &mut FunctionLowering<'_, '_>) {
    for (index, result) in lowering.function.returns.iter().enumerate() {
        if let Some(register) = result.in_register {
            let access = frame_access(result.ty);
            let selected = Selected { handlers: access.store(), args: Vec::new(), imm: 0, aux: 0 };
            let at = lowering.returns[index];
            let operands = vec![Opnd::Fixed(-1), Opnd::Use(VReg(register.0))];
            let node = lowering.push(&selected, operands);
            node.imm = u64::from(at);
            node.aux = access.encode();
        }
    }
    end::<Return>(lowering);
}
