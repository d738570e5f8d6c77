//! Memory instructions: which space, which address, which handler.

use super::function::{Complaint, FunctionLowering, dotted};
use super::ir::{Bank, Opnd, Role, VReg};
use super::probes::Does;
use super::symbols::Symbol;
use crate::exec::access::Place;
use crate::exec::load_store::Access;
use crate::exec::select::{Selected, type_named};
use crate::exec::{adapt, atomic};
use crate::memory::{SHARED_WINDOW, Space};
use kedge_ptx::ast::{AddressBase, Instruction, Operand, Type};

/// Lowers a memory instruction; false if it is none of this module's.
pub(super) fn lower(
    lowering: &mut FunctionLowering<'_, '_>,
    instruction: &Instruction,
) -> Result<bool, Complaint> {
    if instruction.name.get(1).is_some_and(|part| part == "async") {
        return Ok(false);
    }
    match instruction.name.first().map_or("", String::as_str) {
        "ld" | "ldu" => load(lowering, instruction)?,
        "st" => store(lowering, instruction)?,
        "atom" | "red" => atomic(lowering, instruction)?,
        "cvta" => cvta(lowering, instruction)?,
        _ => return Ok(false),
    }
    Ok(true)
}

/// What the name of a memory instruction says.
struct Name {
    space: Space,
    /// `shared::cluster`.
    cluster: bool,
    strong: bool,
    /// Past a cache.
    uncached: bool,
    count: u32,
    ty: Type,
}

fn parse_name(instruction: &Instruction) -> Result<Name, Complaint> {
    let mut name = Name {
        space: Space::Generic,
        cluster: false,
        strong: false,
        uncached: false,
        count: 1,
        ty: Type::B32,
    };
    let mut ty = None;
    for part in &instruction.name[1..] {
        match part.as_str() {
            "global" => name.space = Space::Global,
            "shared" | "shared::cta" => name.space = Space::Shared,
            "shared::cluster" => (name.space, name.cluster) = (Space::Shared, true),
            "local" => name.space = Space::Local,
            "const" => name.space = Space::Const,
            "param" | "param::entry" | "param::func" => name.space = Space::Param,
            "volatile" | "relaxed" | "acquire" | "release" | "mmio" => name.strong = true,
            "cg" | "cv" | "wt" => name.uncached = true,
            "v2" => name.count = 2,
            "v4" => name.count = 4,
            "v8" => name.count = 8,
            part if is_hint(part) => {}
            part => {
                let found = type_named(part);
                ty =
                    Some(found.ok_or_else(|| format!("{} is not supported", dotted(instruction)))?);
            }
        }
    }
    name.ty = ty.ok_or_else(|| format!("{} has no type", dotted(instruction)))?;
    Ok(name)
}

/// Operations of `atom`, and what this device does not tell apart: scopes, cache levels and
/// policies.
fn is_hint(part: &str) -> bool {
    const HINTS: &[&str] = &[
        "cta", "cluster", "gpu", "sys", "weak", "nc", "ca", "cs", "lu", "wb", "noftz", "unified",
        "acq_rel", "level", "add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec",
    ];
    HINTS.contains(&part) || part.starts_with("L1::") || part.starts_with("L2::")
}

/// An address operand: place, base (for places with one), offset.
pub(super) struct Address {
    pub place: Place,
    pub base: Option<Opnd>,
    pub offset: u64,
}

/// Resolves an address operand of an access to `space`.
pub(super) fn address(
    lowering: &mut FunctionLowering<'_, '_>,
    operand: &Operand,
    space: Space,
    cluster: bool,
) -> Result<Address, Complaint> {
    let Operand::Address(base, offset) = operand else {
        return Err("an address is needed".into());
    };
    match base {
        AddressBase::Register(register) => {
            let wide = lowering.bank(*register) == Bank::B64;
            let register = Opnd::Use(VReg(register.0));
            let place = match (space, wide) {
                (Space::Shared, _) if cluster => {
                    let (base, offset) = lowering.base64(operand)?;
                    let offset = offset.wrapping_add(SHARED_WINDOW);
                    return Ok(Address { place: Place::Generic, base: Some(base), offset });
                }
                (Space::Shared, false) => Place::Shared32,
                (Space::Shared, true) => Place::Shared64,
                _ => {
                    let (base, offset) = lowering.base64(operand)?;
                    let place = match space {
                        Space::Global | Space::Const => Place::Global,
                        Space::Local => Place::Local,
                        _ => Place::Generic,
                    };
                    return Ok(Address { place, base: Some(base), offset });
                }
            };
            Ok(Address { place, base: Some(register), offset: *offset as u64 })
        }
        AddressBase::Symbol(name) => {
            let symbol = lowering.symbol(name)?;
            let frame = |at: u32| Address {
                place: Place::Frame,
                base: None,
                offset: u64::from(at).wrapping_add_signed(*offset),
            };
            match symbol {
                Symbol::Local(at) | Symbol::FrameParam(at) => Ok(frame(at)),
                Symbol::KernelParam(at) => {
                    let offset = u64::from(at).wrapping_add_signed(*offset);
                    Ok(Address { place: Place::Param, base: None, offset })
                }
                Symbol::Shared(_) | Symbol::DynamicShared => {
                    let (base, offset) = lowering.base64(operand)?;
                    Ok(Address { place: Place::Shared64, base: Some(base), offset })
                }
                _ => {
                    let (base, offset) = lowering.base64(operand)?;
                    Ok(Address { place: Place::Global, base: Some(base), offset })
                }
            }
        }
        AddressBase::Absolute => {
            let (base, offset) = lowering.base64(operand)?;
            let place = match space {
                Space::Shared => Place::Shared64,
                Space::Local => Place::Local,
                _ => Place::Generic,
            };
            Ok(Address { place, base: Some(base), offset })
        }
    }
}

/// The registers or constants of a possibly vectored operand.
fn items(operand: &Operand) -> &[Operand] {
    match operand {
        Operand::Vector(items) => items,
        other => std::slice::from_ref(other),
    }
}

fn describe(
    lowering: &FunctionLowering<'_, '_>,
    name: &Name,
    items: &[Operand],
    place: Place,
) -> Access {
    let narrow = name.ty.size() < 8;
    let wide_registers = narrow
        && items.iter().any(|item| match item {
            Operand::Register(register) => lowering.bank(*register) == Bank::B64,
            _ => false,
        });
    Access {
        log2: name.ty.size().trailing_zeros(),
        signed: matches!(name.ty, Type::S8 | Type::S16 | Type::S32),
        count: name.count,
        place,
        strong: name.strong,
        uncached: name.uncached && name.count > 1,
        wide_registers,
    }
}

fn load(
    lowering: &mut FunctionLowering<'_, '_>,
    instruction: &Instruction,
) -> Result<(), Complaint> {
    let name = parse_name(instruction)?;
    let [to, from, ..] = instruction.operands.as_slice() else {
        return Err(format!("{} wants a destination and an address", dotted(instruction)));
    };
    let to = items(to);
    if to.len() != name.count as usize {
        return Err(format!("{}: {} destinations", dotted(instruction), to.len()));
    }
    let address = address(lowering, from, name.space, name.cluster)?;
    let access = describe(lowering, &name, to, address.place);
    let ty = if access.wide_registers { Type::B64 } else { name.ty };
    let mut after = Vec::new();
    let mut operands = Vec::with_capacity(to.len() + 1);
    for item in to {
        operands.push(lowering.destination(item, ty, &mut after)?);
    }
    operands.push(address.base.unwrap_or(Opnd::Fixed(-1)));
    lowering.probe(instruction, &address, access, Does::Read, &[]);
    let handlers = access.load();
    let selected =
        Selected { handlers, args: Vec::new(), imm: address.offset, aux: access.encode() };
    let checked = lowering.module.checked;
    let node = lowering.push(&selected, operands);
    if after.is_empty()
        && !checked
        && let Some(load) = access.in_strips()
    {
        node.role = Role::Load(load);
    }
    lowering.give_cache();
    lowering.nodes.append(&mut after);
    Ok(())
}

fn store(
    lowering: &mut FunctionLowering<'_, '_>,
    instruction: &Instruction,
) -> Result<(), Complaint> {
    let name = parse_name(instruction)?;
    let [to, from, ..] = instruction.operands.as_slice() else {
        return Err(format!("{} wants an address and a value", dotted(instruction)));
    };
    if name.space == Space::Const {
        return Err("constants cannot be stored to".into());
    }
    let from = items(from);
    if from.len() != name.count as usize {
        return Err(format!("{}: {} sources", dotted(instruction), from.len()));
    }
    let address = address(lowering, to, name.space, name.cluster)?;
    let access = describe(lowering, &name, from, address.place);
    let ty = if access.wide_registers { Type::B64 } else { name.ty };
    let mut operands = Vec::with_capacity(from.len() + 1);
    operands.push(address.base.unwrap_or(Opnd::Fixed(-1)));
    for item in from {
        operands.push(lowering.source(item, ty)?);
    }
    lowering.probe(instruction, &address, access, Does::Write, &operands[1..]);
    let handlers = access.store();
    let selected =
        Selected { handlers, args: Vec::new(), imm: address.offset, aux: access.encode() };
    lowering.push(&selected, operands);
    lowering.give_cache();
    Ok(())
}

fn atomic(
    lowering: &mut FunctionLowering<'_, '_>,
    instruction: &Instruction,
) -> Result<(), Complaint> {
    let name = parse_name(instruction)?;
    let returns = instruction.name[0] == "atom";
    let skip = usize::from(returns);
    let operation = atomic::Operation::named(&instruction.name, name.ty)
        .ok_or_else(|| format!("instruction {} is not supported", dotted(instruction)))?;
    let operands = &instruction.operands;
    let from = operands.get(skip).ok_or("an address is needed")?;
    let address = address(lowering, from, name.space, name.cluster)?;
    let mut after = Vec::new();
    let mut slots = vec![address.base.unwrap_or(Opnd::Fixed(-1))];
    if returns {
        for item in items(&operands[0]) {
            slots.push(lowering.destination(item, name.ty, &mut after)?);
        }
    }
    // The operand, and what cas compares with; a cache policy may follow.
    let inputs = if operation.compares() { 2 } else { 1 };
    for operand in operands.iter().skip(skip + 1).take(inputs) {
        for item in items(operand) {
            slots.push(lowering.source(item, name.ty)?);
        }
    }
    let vector = if returns { items(&operands[0]).len() } else { 1 };
    let count = name.count as usize;
    if slots.len() != 1 + count * (skip + inputs) || (returns && vector != count) {
        return Err(format!("{}: its operands do not match", dotted(instruction)));
    }
    let access = Access { strong: true, ..describe(lowering, &name, &[], address.place) };
    lowering.probe(instruction, &address, access, Does::Update, &[]);
    let (handlers, aux) = operation.selected(name.ty, name.count, address.place, returns);
    let selected = Selected { handlers, args: Vec::new(), imm: address.offset, aux };
    lowering.push(&selected, slots);
    lowering.give_cache();
    lowering.nodes.append(&mut after);
    Ok(())
}

/// `cvta{.to}.space.u64`: between a space's own addresses and generic ones.
fn cvta(
    lowering: &mut FunctionLowering<'_, '_>,
    instruction: &Instruction,
) -> Result<(), Complaint> {
    let [to, from] = instruction.operands.as_slice() else {
        return Err("cvta wants two operands".into());
    };
    let has = |part: &str| instruction.name.iter().any(|p| p == part);
    let ty = if has("u32") { Type::U32 } else { Type::U64 };
    let window = match () {
        () if has("shared") || has("shared::cta") || has("shared::cluster") => SHARED_WINDOW,
        () if has("local") => crate::memory::LOCAL_WINDOW,
        // Global, constant and param addresses are generic ones.
        () => 0,
    };
    let from = match from {
        Operand::Symbol(..) | Operand::Register(_) | Operand::Int(_) => {
            lowering.source(from, Type::U64)?
        }
        _ => return Err("cvta of something that is no address".into()),
    };
    let mut after = Vec::new();
    let to = lowering.destination(to, ty, &mut after)?;
    let imm = if has("to") { window.wrapping_neg() } else { window };
    if ty == Type::U32 {
        return Err("32-bit generic addresses are not supported".into());
    }
    let selected = Selected::new::<adapt::AddImm64>([]).imm(imm);
    lowering.push(&selected, vec![to, from]);
    lowering.nodes.append(&mut after);
    Ok(())
}
