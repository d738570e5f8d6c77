//! One function: from statements to instructions on virtual registers.

use super::ir::{Bank, Node, NodeFlow, Opnd, Role, VReg};
use super::symbols::{ModuleContext, Symbol, builtin_address, signature_layout};
use super::{control, dots, memory, pairs, probes, prologue, stagger, vectors};
use crate::code::Handler;
use crate::exec::control::function_address;
use crate::exec::run::{Stagger, Turn, Unsupported};
use crate::exec::select::{Arg, Query, Selected};
use crate::exec::{CORE, Handlers, Level, Op, adapt, families, special};
use crate::memory::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, Space as MemorySpace};
use kedge_ptx::ast::{self, AddressBase, Instruction, Operand, RegId, Space, Statement, Type};
use std::collections::{HashMap, HashSet};

/// Why an instruction does not lower; the line is added to it.
pub(super) type Complaint = String;

pub(super) struct FunctionLowering<'a, 'm> {
    pub module: &'m mut ModuleContext<'a>,
    pub function: &'a ast::Function,
    pub body: &'a ast::Body,
    pub index: u32,
    pub level: Level,
    pub nodes: Vec<Node>,
    pub banks: Vec<Bank>,
    /// Node that each label stands before.
    pub labels: Vec<u32>,
    /// This function's own names.
    pub own: HashMap<&'a str, Symbol>,
    /// Bytes of local memory so far: signature, variables, call arguments.
    pub frame_local: u32,
    /// Frame offsets of the returns, and of the parameters.
    pub returns: Vec<u32>,
    pub params: Vec<u32>,
    /// Guard and line of the instruction at hand.
    guard: Option<(VReg, bool)>,
    line: u32,
    /// It gives the same results in every block.
    steady: bool,
    /// It only computes.
    pure: bool,
    /// The first thing that this device lacks.
    pub poison: Option<String>,
    /// Call sites whose frame sizes are filled in after register allocation.
    pub sites: Vec<u32>,
    /// `brx.idx` target lists of this function: (index in the module's lists, labels).
    pub tables: Vec<(u32, Vec<ast::LabelId>)>,
    /// Registers with which compare-and-swaps compare, where the program is checked.
    pub compared: HashSet<u32>,
}

impl<'a, 'm> FunctionLowering<'a, 'm> {
    pub(super) fn new(
        module: &'m mut ModuleContext<'a>,
        function: &'a ast::Function,
        body: &'a ast::Body,
        index: u32,
        level: Level,
    ) -> Self {
        let compared = if module.checked { probes::compared(body) } else { HashSet::new() };
        let mut lowering = FunctionLowering {
            banks: body.registers.iter().map(|register| Bank::of(register.ty)).collect(),
            labels: vec![0; body.labels.len()],
            module,
            function,
            body,
            index,
            level,
            nodes: Vec::with_capacity(body.statements.len()),
            own: HashMap::new(),
            frame_local: 0,
            returns: Vec::new(),
            params: Vec::new(),
            guard: None,
            line: function.line,
            steady: false,
            pure: false,
            poison: None,
            sites: Vec::new(),
            tables: Vec::new(),
            compared,
        };
        lowering.lay_out();
        lowering
    }

    /// Gives parameters and local variables their places.
    fn lay_out(&mut self) {
        let function = self.function;
        let (returns, params, end) = signature_layout(&function.returns, &function.params);
        let symbol = |offset: u32| match function.entry {
            true => Symbol::KernelParam(offset),
            false => Symbol::FrameParam(offset),
        };
        for (variable, &offset) in function.params.iter().zip(&params) {
            self.own.insert(&variable.name, symbol(offset));
        }
        for (variable, &offset) in function.returns.iter().zip(&returns) {
            self.own.insert(&variable.name, Symbol::FrameParam(offset));
        }
        (self.returns, self.params) = (returns, params);
        self.frame_local = if function.entry { 0 } else { end };
        for variable in &self.body.variables {
            let symbol = match variable.space {
                Space::Local => Symbol::Local(self.reserve(variable.size(), variable.align)),
                Space::Param => Symbol::FrameParam(self.reserve(variable.size(), variable.align)),
                Space::Shared => {
                    let key = (self.index, variable.name.as_str());
                    self.module.own_shared.get(&key).copied().unwrap_or(Symbol::DynamicShared)
                }
                Space::Global | Space::Const => continue,
            };
            self.own.insert(&variable.name, symbol);
        }
    }

    /// `size` bytes of the frame's local memory.
    pub(super) fn reserve(&mut self, size: u64, align: u32) -> u32 {
        let align = u64::from(align.max(1));
        let at = u64::from(self.frame_local).next_multiple_of(align);
        let end = at.saturating_add(size).min(1 << 30);
        self.frame_local = end as u32;
        at as u32
    }

    /// Lowers the whole body.
    pub(super) fn lower(&mut self) {
        control::load_register_params(self);
        let staggered = match self.function.entry {
            true => stagger::stores(self.body),
            false => HashSet::new(),
        };
        let broadcasts = stagger::broadcasts(self.body);
        for (index, statement) in self.body.statements.iter().enumerate() {
            if staggered.contains(&index) {
                self.push_turn::<Stagger>();
            }
            match statement {
                Statement::Label(label) => {
                    self.labels[label.0 as usize] = self.nodes.len() as u32;
                }
                Statement::Instruction(instruction) => self.instruction_or_trap(instruction),
            }
            if broadcasts.contains(&index) {
                self.push_turn::<Turn>();
            }
        }
        self.guard = None;
        (self.steady, self.pure) = (false, false);
        control::emit_return(self);
    }

    /// Appends what lets the block's other warps go first.
    fn push_turn<O: Op>(&mut self) {
        self.guard = None;
        (self.steady, self.pure) = (false, false);
        self.push(&Selected::scalar::<O>([]), Vec::new());
    }

    fn instruction_or_trap(&mut self, instruction: &'a Instruction) {
        self.line = instruction.line;
        self.steady = self.function.entry && prologue::is_steady(self.function, instruction);
        self.pure = prologue::is_pure(instruction);
        self.guard = instruction.guard.map(|guard| (VReg(guard.register.0), guard.negated));
        let begin = self.nodes.len();
        if let Err(complaint) = self.instruction(instruction) {
            self.nodes.truncate(begin);
            let what = format!("{} (PTX line {})", complaint, instruction.line);
            self.poison.get_or_insert_with(|| what.clone());
            self.module.complaints.push(what);
            let selected = Unsupported::selected(self.module.complaints.len() - 1);
            self.push(&selected, Vec::new());
        }
    }

    fn instruction(&mut self, instruction: &'a Instruction) -> Result<(), Complaint> {
        if control::lower(self, instruction)? || memory::lower(self, instruction)? {
            return Ok(());
        }
        if self.special_move(instruction) || vectors::lower(self, instruction)? {
            return Ok(());
        }
        let query = Query { name: &instruction.name, instruction, registers: &self.body.registers };
        let selected = CORE
            .iter()
            .find_map(|select| select(&query))
            .or_else(|| families::select(&query))
            .ok_or_else(|| format!("instruction {} is not supported", dotted(instruction)))?;
        let behind = self.probe_before(instruction)?;
        self.apply(instruction, selected)?;
        self.probe_behind(behind);
        Ok(())
    }

    /// `mov` of a special register: read where it goes, without a copy.
    fn special_move(&mut self, instruction: &Instruction) -> bool {
        let [Operand::Register(to), Operand::Special(name)] = instruction.operands.as_slice()
        else {
            return false;
        };
        let Some(ty) = self.register_type(*to) else { return false };
        if instruction.name.first().is_none_or(|name| name != "mov") {
            return false;
        }
        match (special::find(name), Bank::of(ty)) {
            (Some(special), Bank::B32) if !special.wide() => {
                self.push(&special.selected(), vec![Opnd::Def(VReg(to.0))]);
                true
            }
            (Some(special), Bank::B64) if special.wide() => {
                self.push(&special.selected(), vec![Opnd::Def(VReg(to.0))]);
                true
            }
            _ => false,
        }
    }

    /// Emits a selected instruction with the operands of the PTX text.
    pub(super) fn apply(
        &mut self,
        instruction: &Instruction,
        selected: Selected,
    ) -> Result<(), Complaint> {
        let mut flat = Vec::with_capacity(selected.args.len());
        for operand in &instruction.operands {
            flatten(operand, &mut flat);
        }
        if flat.len() != selected.args.len() {
            return Err(format!(
                "{} with {} operands is not supported",
                dotted(instruction),
                flat.len()
            ));
        }
        let mut imm = selected.imm;
        let mut operands = Vec::with_capacity(flat.len());
        let mut after = Vec::new();
        let mut cached = false;
        let mut updated = Vec::new();
        for (&arg, operand) in selected.args.iter().zip(flat) {
            // A part of a register: only video instructions take one, and their selector has read
            // it.
            let whole;
            let operand = match operand {
                Operand::Component(register, _) if instruction.name[0].starts_with('v') => {
                    whole = Operand::Register(*register);
                    &whole
                }
                operand => operand,
            };
            match arg {
                Arg::Dst(ty) => operands.push(self.destination(operand, ty, &mut after)?),
                Arg::Update(ty) => {
                    updated.push(self.source(operand, ty)?);
                    operands.push(self.destination(operand, ty, &mut after)?);
                }
                Arg::Known => {}
                Arg::Src(ty) => operands.push(self.source(operand, ty)?),
                Arg::Address => {
                    operands.push(self.pointer(operand, 0)?);
                    cached = true;
                }
                Arg::Pointer(space) => {
                    let window = match space {
                        MemorySpace::Shared => SHARED_WINDOW,
                        MemorySpace::Local => LOCAL_WINDOW,
                        _ => 0,
                    };
                    operands.push(self.pointer(operand, window)?);
                    cached = true;
                }
                Arg::Imm => match operand {
                    Operand::Int(value) => imm = *value as u64,
                    _ => return Err(format!("{}: a constant is needed", dotted(instruction))),
                },
            }
        }
        operands.append(&mut updated);
        let node = self.push(&selected, operands);
        node.imm = imm;
        if after.is_empty() {
            node.role = match dots::role(instruction) {
                Role::None => pairs::role(instruction),
                role => role,
            };
        }
        if cached {
            self.give_cache();
        }
        self.nodes.append(&mut after);
        Ok(())
    }

    /// An address operand's value, offset included, plus `window`: `Inst::imm` is the handler's
    /// own.
    pub(super) fn pointer(&mut self, operand: &Operand, window: u64) -> Result<Opnd, Complaint> {
        let (base, offset) = self.base64(operand)?;
        let step = offset.wrapping_add(window);
        if step == 0 {
            return Ok(base);
        }
        let pointer = self.temporary(Bank::B64);
        self.push_before::<adapt::AddImm64>(vec![Opnd::Def(pointer), base], step, 0);
        Ok(Opnd::Use(pointer))
    }

    /// Numbers the last node's inline cache.
    pub(super) fn give_cache(&mut self) {
        if let Some(node) = self.nodes.last_mut() {
            node.cached = true;
        }
    }

    /// Appends an instruction under the current guard.
    pub(super) fn push(&mut self, selected: &Selected, operands: Vec<Opnd>) -> &mut Node {
        let run = selected.handlers.at(self.level);
        self.push_node(run, selected.imm, selected.aux, operands, self.guard)
    }

    /// Appends what is done beside the instruction, under its guard: it has an effect of its own,
    /// and is neither moved nor left out.
    pub(super) fn push_beside<O: Op>(&mut self, operands: Vec<Opnd>, imm: u64, aux: u32) {
        let run = Handlers::scalar::<O>().at(self.level);
        let node = self.push_node(run, imm, aux, operands, self.guard);
        (node.steady, node.pure) = (false, false);
    }

    /// Appends an instruction for all lanes: a step before the instruction itself.
    pub(super) fn push_before<O: Op>(&mut self, operands: Vec<Opnd>, imm: u64, aux: u32) {
        let run = Handlers::of::<O>().at(self.level);
        self.push_node(run, imm, aux, operands, None);
    }

    fn push_node(
        &mut self,
        run: Handler,
        imm: u64,
        aux: u32,
        operands: Vec<Opnd>,
        guard: Option<(VReg, bool)>,
    ) -> &mut Node {
        let at = self.nodes.len();
        let line = self.line;
        let (cached, steady, pure, flow) = (false, self.steady, self.pure, NodeFlow::Next);
        let role = Role::None;
        let node = Node { run, imm, operands, guard, line, aux, cached, steady, pure, role, flow };
        self.nodes.push(node);
        &mut self.nodes[at]
    }

    pub(super) fn temporary(&mut self, bank: Bank) -> VReg {
        self.banks.push(bank);
        VReg(self.banks.len() as u32 - 1)
    }

    pub(super) fn register_type(&self, register: RegId) -> Option<Type> {
        self.body.registers.get(register.0 as usize).map(|r| r.ty)
    }

    pub(super) fn bank(&self, register: RegId) -> Bank {
        self.banks[register.0 as usize]
    }

    /// Where an instruction writes a value of type `ty`; what has to follow goes to `after`.
    pub(super) fn destination(
        &mut self,
        operand: &Operand,
        ty: Type,
        after: &mut Vec<Node>,
    ) -> Result<Opnd, Complaint> {
        let want = Bank::of(ty);
        match operand {
            Operand::Sink => Ok(Opnd::Def(self.temporary(want))),
            Operand::Register(register) if self.bank(*register) == want => {
                Ok(Opnd::Def(VReg(register.0)))
            }
            Operand::Register(register)
                if self.bank(*register) == Bank::B64 && want == Bank::B32 =>
            {
                let narrow = self.temporary(Bank::B32);
                let signed = matches!(ty, Type::S8 | Type::S16 | Type::S32);
                let handlers = match signed {
                    true => Handlers::of::<adapt::SignExtend>(),
                    false => Handlers::of::<adapt::ZeroExtend>(),
                };
                after.push(Node {
                    run: handlers.at(self.level),
                    imm: 0,
                    operands: vec![Opnd::Def(VReg(register.0)), Opnd::Use(narrow)],
                    guard: self.guard,
                    line: self.line,
                    aux: 0,
                    cached: false,
                    steady: self.steady,
                    pure: self.pure,
                    role: Role::None,
                    flow: NodeFlow::Next,
                });
                Ok(Opnd::Def(narrow))
            }
            Operand::Register(_) => Err(format!("a register does not hold a {ty:?} result")),
            _ => Err("a destination is not a register".into()),
        }
    }

    /// A value of type `ty`.
    pub(super) fn source(&mut self, operand: &Operand, ty: Type) -> Result<Opnd, Complaint> {
        match operand {
            Operand::Register(register) => self.value_of(VReg(register.0), ty),
            Operand::NotRegister(register) => {
                let inverse = self.temporary(Bank::Pred);
                let operands = vec![Opnd::Def(inverse), Opnd::Use(VReg(register.0))];
                self.push_before::<adapt::NotPred>(operands, 0, 0);
                self.value_of(inverse, ty)
            }
            Operand::NegRegister(register) => {
                let value = self.value_of(VReg(register.0), ty)?;
                let negative = self.temporary(Bank::of(ty));
                let operands = vec![Opnd::Def(negative), value];
                match ty {
                    Type::F32 => self.push_before::<adapt::NegF32>(operands, 0, 0),
                    Type::F64 => self.push_before::<adapt::NegF64>(operands, 0, 0),
                    _ if Bank::of(ty) == Bank::B64 => {
                        self.push_before::<adapt::Neg64>(operands, 0, 0);
                    }
                    _ => self.push_before::<adapt::Neg32>(operands, 0, 0),
                }
                Ok(Opnd::Use(negative))
            }
            Operand::Int(value) => self.constant(ty, int_bits(*value, ty)),
            Operand::F32(bits) => self.constant(ty, f32_bits(*bits, ty)),
            Operand::F64(bits) => self.constant(ty, f64_bits(*bits, ty)),
            Operand::Special(name) => {
                let special =
                    special::find(name).ok_or_else(|| format!("{name} is not supported"))?;
                let bank = if special.wide() { Bank::B64 } else { Bank::B32 };
                let value = self.temporary(bank);
                let selected = special.selected();
                let run = selected.handlers.at(self.level);
                self.push_node(run, selected.imm, selected.aux, vec![Opnd::Def(value)], None);
                if (bank, ty) == (Bank::B32, Type::Pred) {
                    let holds = self.temporary(Bank::Pred);
                    let operands = vec![Opnd::Def(holds), Opnd::Use(value)];
                    self.push_before::<adapt::NonZero>(operands, 0, 0);
                    return Ok(Opnd::Use(holds));
                }
                self.value_of(value, ty)
            }
            Operand::Symbol(name, offset) => self.symbol_value(name, *offset, ty),
            Operand::Address(..) => Err("an address stands where a value is needed".into()),
            _ => Err(format!("operand {operand:?} is not supported")),
        }
    }

    /// A register's value as a `ty`: its low bits if it is wider.
    fn value_of(&mut self, register: VReg, ty: Type) -> Result<Opnd, Complaint> {
        match (self.banks[register.0 as usize], Bank::of(ty)) {
            (have, want) if have == want => Ok(Opnd::Use(register)),
            (Bank::B64, Bank::B32) => {
                let low = self.temporary(Bank::B32);
                let operands = vec![Opnd::Def(low), Opnd::Use(register)];
                self.push_before::<adapt::Truncate>(operands, 0, 0);
                Ok(Opnd::Use(low))
            }
            (Bank::B32, Bank::B64) => Ok(Opnd::Use(self.widened(register))),
            _ => Err(format!("a register does not hold a {ty:?} value")),
        }
    }

    /// A 32-bit register's value in the 64-bit bank.
    fn widened(&mut self, register: VReg) -> VReg {
        let wide = self.temporary(Bank::B64);
        let operands = vec![Opnd::Def(wide), Opnd::Use(register)];
        self.push_before::<adapt::ZeroExtend>(operands, 0, 0);
        wide
    }

    pub(super) fn constant(&mut self, ty: Type, bits: u64) -> Result<Opnd, Complaint> {
        match Bank::of(ty) {
            Bank::B32 => Ok(Opnd::Fixed(self.module.pools.value32(bits as u32))),
            Bank::B64 => Ok(Opnd::Fixed(self.module.pools.value64(bits))),
            Bank::Pred => Ok(Opnd::Fixed(if bits != 0 { -1 } else { -2 })),
            Bank::B128 => Err("a 128-bit constant is not supported".into()),
        }
    }

    pub(super) fn symbol(&self, name: &str) -> Result<Symbol, Complaint> {
        let symbol = self.own.get(name).or_else(|| self.module.symbols.get(name));
        symbol.copied().ok_or_else(|| format!("{name} is not defined in this module"))
    }

    /// A symbol's address in its own space, as `mov` gives it.
    fn symbol_value(&mut self, name: &str, offset: i64, ty: Type) -> Result<Opnd, Complaint> {
        let constant = match self.symbol(name)? {
            Symbol::Absolute(addr) => addr,
            Symbol::Shared(at) => u64::from(at),
            Symbol::Function(index) => function_address(index),
            Symbol::Builtin(builtin) => builtin_address(builtin),
            Symbol::KernelParam(at) => PARAM_WINDOW + u64::from(at),
            Symbol::DynamicShared => return self.computed::<special::DynamicShared>(0, offset, ty),
            Symbol::Local(at) => {
                return self.computed::<special::FrameAddress>(u64::from(at), offset, ty);
            }
            // Param space has no addresses of its own: a parameter's address is generic.
            Symbol::FrameParam(at) => {
                let at = LOCAL_WINDOW + u64::from(at);
                return self.computed::<special::FrameAddress>(at, offset, ty);
            }
        };
        self.constant(ty, constant.wrapping_add_signed(offset))
    }

    /// An address that depends on the grid or the frame: `O` writes `imm` plus its base to op[0].
    fn computed<O: Op>(&mut self, at: u64, offset: i64, ty: Type) -> Result<Opnd, Complaint> {
        let value = self.temporary(Bank::B64);
        self.push_before::<O>(vec![Opnd::Def(value)], at.wrapping_add_signed(offset), 0);
        self.value_of(value, ty)
    }

    /// An address operand's base in the 64-bit bank, and its offset. The address is in the space
    /// that the operand's own symbol or register says.
    pub(super) fn base64(&mut self, operand: &Operand) -> Result<(Opnd, u64), Complaint> {
        match operand {
            Operand::Address(AddressBase::Register(register), offset) => {
                let base = self.value_of(VReg(register.0), Type::B64)?;
                Ok((base, *offset as u64))
            }
            Operand::Address(AddressBase::Symbol(name), offset) => {
                Ok((self.symbol_value(name, *offset, Type::B64)?, 0))
            }
            Operand::Address(AddressBase::Absolute, offset) => {
                Ok((self.constant(Type::B64, 0)?, *offset as u64))
            }
            _ => Err("an address is needed".into()),
        }
    }
}

/// The instruction's name as written.
pub(super) fn dotted(instruction: &Instruction) -> String {
    instruction.name.join(".")
}

/// Elements of `{…}`, `[…]`, `(…)` and `d|p` operands, in order.
fn flatten<'o>(operand: &'o Operand, out: &mut Vec<&'o Operand>) {
    match operand {
        Operand::Vector(items) | Operand::Bracket(items) | Operand::List(items) => {
            items.iter().for_each(|item| flatten(item, out));
        }
        Operand::Pair(a, b) => {
            flatten(a, out);
            flatten(b, out);
        }
        other => out.push(other),
    }
}

fn int_bits(value: i64, ty: Type) -> u64 {
    match ty {
        Type::F32 => u64::from((value as f32).to_bits()),
        Type::F64 => (value as f64).to_bits(),
        _ => value as u64,
    }
}

fn f32_bits(bits: u32, ty: Type) -> u64 {
    match ty {
        Type::F64 => f64::from(f32::from_bits(bits)).to_bits(),
        _ => u64::from(bits),
    }
}

fn f64_bits(bits: u64, ty: Type) -> u64 {
    match Bank::of(ty) {
        Bank::B32 => u64::from((f64::from_bits(bits) as f32).to_bits()),
        _ => bits,
    }
}
