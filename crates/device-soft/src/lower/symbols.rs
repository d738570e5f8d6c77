//! Names: what a module's variables and functions are, and where its shared memory goes.

use super::pool::Pools;
use crate::builtin::Builtin;
use crate::code::{BuildError, Global, PlaceKind, Placement};
use crate::exec::control::function_address;
use crate::exec::control::{BUILTIN_INDEX, CallSite, FUNCTION_BASE, FUNCTION_STRIDE};
use crate::exec::special;
use crate::memory::SHARED_WINDOW;
use kedge_cuda_types::CuError;
use kedge_ptx::ast::{self, AddressBase, Operand, Space, Statement, Variable};
use std::collections::HashMap;

/// What a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Symbol {
    /// A global or constant variable.
    Absolute(u64),
    /// Offset in the block's shared memory.
    Shared(u32),
    /// `extern .shared x[]`.
    DynamicShared,
    /// Offset in the frame's local memory.
    Local(u32),
    /// A parameter or call argument: offset in the frame's local memory.
    FrameParam(u32),
    /// Offset in the kernel's parameter buffer.
    KernelParam(u32),
    Function(u32),
    Builtin(Builtin),
}

/// Everything about the module that functions share while they are lowered.
pub(super) struct ModuleContext<'a> {
    pub symbols: HashMap<&'a str, Symbol>,
    pub signatures: HashMap<&'a str, &'a ast::Function>,
    /// Function-scope shared variables: (function, name).
    pub own_shared: HashMap<(u32, &'a str), Symbol>,
    pub pools: Pools,
    pub operands: Vec<i32>,
    pub calls: Vec<CallSite>,
    /// Targets of `brx.idx`, by list: program counters once the function is placed.
    pub branch_targets: Vec<Vec<u32>>,
    pub complaints: Vec<String>,
    /// Memory instructions so far: numbers of inline caches.
    pub caches: u32,
    /// Its accesses, and what orders them, are looked at.
    pub checked: bool,
}

/// Which functions each function calls, and which can be called indirectly.
#[derive(Default)]
pub(super) struct CallGraph {
    /// By function: direct callees.
    pub calls: Vec<Vec<u32>>,
    pub indirect: Vec<bool>,
    /// By function: it takes stack of a size that is known late.
    pub alloca: Vec<bool>,
    /// By function: it uses the shared memory that is the system's.
    pub reserved: Vec<bool>,
    pub address_taken: Vec<u32>,
}

/// The functions with bodies, in order: their positions are their indices.
pub(super) fn defined(module: &ast::Module) -> impl Iterator<Item = &ast::Function> {
    module.functions.iter().filter(|function| function.body.is_some())
}

/// Names of functions, aliases and builtins.
pub(super) fn function_symbols(module: &ast::Module) -> HashMap<&str, Symbol> {
    let mut symbols = HashMap::new();
    for function in &module.functions {
        if let Some(builtin) = Builtin::find(&function.name) {
            symbols.insert(function.name.as_str(), Symbol::Builtin(builtin));
        }
    }
    for (index, function) in defined(module).enumerate() {
        symbols.insert(function.name.as_str(), Symbol::Function(index as u32));
    }
    for (name, target) in &module.aliases {
        if let Some(&symbol) = symbols.get(target.as_str()) {
            symbols.insert(name.as_str(), symbol);
        }
    }
    symbols
}

impl CallGraph {
    pub(super) fn of(module: &ast::Module, symbols: &HashMap<&str, Symbol>) -> CallGraph {
        let mut graph = CallGraph::default();
        for function in defined(module) {
            let mut calls = Vec::new();
            let (mut indirect, mut alloca, mut reserved) = (false, false, false);
            for_each_instruction(function, |instruction| {
                let is_call = instruction.name.first().is_some_and(|name| name == "call");
                alloca |= instruction.name.first().is_some_and(|name| name == "alloca");
                indirect |= is_call
                    && instruction.operands.iter().any(|o| matches!(o, Operand::Register(_)));
                for operand in &instruction.operands {
                    reserved |=
                        matches!(operand, Operand::Special(name) if special::is_reserved(name));
                    if let Operand::Symbol(name, _) = operand
                        && let Some(Symbol::Function(index)) = symbols.get(name.as_str())
                    {
                        if is_call {
                            calls.push(*index);
                        } else {
                            graph.address_taken.push(*index);
                        }
                    }
                }
            });
            calls.sort_unstable();
            calls.dedup();
            graph.calls.push(calls);
            graph.indirect.push(indirect);
            graph.alloca.push(alloca);
            graph.reserved.push(reserved);
        }
        for relocation in module.variables.iter().flat_map(|v| &v.relocations) {
            if let Some(Symbol::Function(index)) = symbols.get(relocation.symbol.as_str()) {
                graph.address_taken.push(*index);
            }
        }
        graph.address_taken.sort_unstable();
        graph.address_taken.dedup();
        graph
    }

    /// Every function that can run when `root` does.
    pub(super) fn reach(&self, root: u32) -> Vec<u32> {
        let mut seen = vec![false; self.calls.len()];
        let mut work = vec![root];
        seen[root as usize] = true;
        let mut reached = Vec::new();
        while let Some(function) = work.pop() {
            reached.push(function);
            let indirect = self.indirect[function as usize];
            let taken = if indirect { self.address_taken.as_slice() } else { &[] };
            for &next in self.calls[function as usize].iter().chain(taken) {
                if !std::mem::replace(&mut seen[next as usize], true) {
                    work.push(next);
                }
            }
        }
        reached
    }
}

pub(super) fn for_each_instruction<'a>(
    function: &'a ast::Function,
    mut f: impl FnMut(&'a ast::Instruction),
) {
    let statements = function.body.iter().flat_map(|body| &body.statements);
    for statement in statements {
        if let Statement::Instruction(instruction) = statement {
            f(instruction);
        }
    }
}

/// Calls `f` with every name in an operand.
pub(super) fn for_each_name<'a>(operand: &'a Operand, f: &mut impl FnMut(&'a str)) {
    match operand {
        Operand::Symbol(name, _) | Operand::Address(AddressBase::Symbol(name), _) => f(name),
        Operand::Vector(items) | Operand::List(items) | Operand::Bracket(items) => {
            items.iter().for_each(|item| for_each_name(item, f));
        }
        Operand::Pair(a, b) => {
            for_each_name(a, f);
            for_each_name(b, f);
        }
        _ => {}
    }
}

/// Places the module's global and constant variables and writes their initial values.
pub(super) fn place_variables<'a>(
    module: &'a ast::Module,
    symbols: &mut HashMap<&'a str, Symbol>,
    placement: &mut dyn Placement,
) -> Result<Vec<Global>, BuildError> {
    let mut globals = Vec::new();
    let own = defined(module).flat_map(|f| f.body.iter().flat_map(|body| &body.variables));
    let memory =
        |v: &&Variable| matches!(v.space, Space::Global | Space::Const) && !is_declaration(v);
    let variables: Vec<&Variable> = module.variables.iter().chain(own).filter(memory).collect();
    for variable in &variables {
        let constant = variable.space == Space::Const;
        let kind = match (variable.managed, constant) {
            (true, _) => PlaceKind::Managed,
            (_, true) => PlaceKind::Constant,
            _ => PlaceKind::Global,
        };
        let (size, align) = (variable.size(), u64::from(variable.align.max(1)));
        let addr = placement.place(&variable.name, size.max(1), align, kind).map_err(|code| {
            let what = format!("no room for variable {} of {size} bytes", variable.name);
            BuildError { code, message: what }
        })?;
        symbols.insert(variable.name.as_str(), Symbol::Absolute(addr));
        globals.push(Global {
            name: variable.name.clone(),
            addr,
            size,
            constant,
            managed: variable.managed,
        });
    }
    let fresh = !placement.keeps_content();
    for (variable, global) in variables.iter().zip(&globals) {
        let bytes = initial_value(variable, global, symbols)?;
        if fresh {
            // SAFETY: `Placement` promises `size` writable bytes at `addr`, which `bytes` does not
            // exceed, and nothing runs yet that uses them.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), global.addr as *mut u8, bytes.len());
            }
        }
    }
    Ok(globals)
}

fn is_declaration(variable: &Variable) -> bool {
    variable.linkage == ast::Linkage::Extern
}

/// What a variable begins with; the rest of it is zero.
fn initial_value(
    variable: &Variable,
    global: &Global,
    symbols: &HashMap<&str, Symbol>,
) -> Result<Vec<u8>, BuildError> {
    let mut bytes = variable.init.clone();
    bytes.truncate(usize::try_from(global.size).unwrap_or(usize::MAX));
    for relocation in &variable.relocations {
        let refuse = |what: &str| BuildError {
            code: CuError::INVALID_PTX,
            message: format!(
                "initialiser of {} names {}, {what} (line {})",
                variable.name, relocation.symbol, variable.line
            ),
        };
        let symbol = symbols.get(relocation.symbol.as_str());
        let base = match symbol.ok_or_else(|| refuse("which is not defined"))? {
            Symbol::Absolute(addr) => *addr,
            Symbol::Function(index) => function_address(*index),
            Symbol::Builtin(builtin) => builtin_address(*builtin),
            Symbol::Shared(offset) if relocation.generic => SHARED_WINDOW + u64::from(*offset),
            Symbol::Shared(offset) => u64::from(*offset),
            _ => return Err(refuse("whose address is not a constant")),
        };
        let value = base.wrapping_add_signed(relocation.addend) >> relocation.shift.min(63);
        let at = relocation.offset as usize;
        let len = relocation.size.min(8) as usize;
        if bytes.len() < at.saturating_add(len) {
            if (global.size as usize) < at.saturating_add(len) {
                return Err(refuse("beyond the variable's end"));
            }
            bytes.resize(at + len, 0);
        }
        bytes[at..at + len].copy_from_slice(&value.to_le_bytes()[..len]);
    }
    Ok(bytes)
}

/// The address that a program sees for a builtin function.
pub(super) fn builtin_address(builtin: Builtin) -> u64 {
    FUNCTION_BASE + FUNCTION_STRIDE * (BUILTIN_INDEX + builtin.index())
}

/// Static shared memory: each variable at one offset for all kernels that can reach it. Returns the
/// bytes that each function needs when it runs as a kernel.
pub(super) fn place_shared<'a>(
    module: &'a ast::Module,
    graph: &CallGraph,
    symbols: &mut HashMap<&'a str, Symbol>,
    own_shared: &mut HashMap<(u32, &'a str), Symbol>,
) -> Result<Vec<u32>, BuildError> {
    let functions: Vec<&ast::Function> = defined(module).collect();
    // Kernels that reach each function.
    let mut kernels_of: Vec<Vec<u32>> = vec![Vec::new(); functions.len()];
    for (index, function) in functions.iter().enumerate() {
        if function.entry {
            for reached in graph.reach(index as u32) {
                kernels_of[reached as usize].push(index as u32);
            }
        }
    }
    let mut ends = vec![0u32; functions.len()];
    let mut place = |variable: &Variable, kernels: &[u32]| -> Result<Symbol, BuildError> {
        if variable.linkage == ast::Linkage::Extern {
            return Ok(Symbol::DynamicShared);
        }
        let size = u32::try_from(variable.size()).ok().filter(|&size| size <= 1 << 22);
        let size = size.ok_or_else(|| BuildError {
            code: CuError::INVALID_PTX,
            message: format!("shared variable {} is too large", variable.name),
        })?;
        let start = kernels.iter().map(|&kernel| ends[kernel as usize]).max().unwrap_or(0);
        let start = start.next_multiple_of(variable.align.max(1));
        for &kernel in kernels {
            ends[kernel as usize] = start + size;
        }
        Ok(Symbol::Shared(start))
    };
    let mut users: HashMap<&str, Vec<u32>> = HashMap::new();
    for variable in module.variables.iter().filter(|v| v.space == Space::Shared) {
        users.insert(&variable.name, Vec::new());
    }
    for (index, function) in functions.iter().enumerate() {
        for_each_instruction(function, |instruction| {
            for operand in &instruction.operands {
                for_each_name(operand, &mut |name| {
                    if let Some(list) = users.get_mut(name) {
                        list.extend_from_slice(&kernels_of[index]);
                    }
                });
            }
        });
    }
    for variable in module.variables.iter().filter(|v| v.space == Space::Shared) {
        let mut kernels = users.remove(variable.name.as_str()).unwrap_or_default();
        kernels.sort_unstable();
        kernels.dedup();
        symbols.insert(&variable.name, place(variable, &kernels)?);
    }
    for (index, function) in functions.iter().enumerate() {
        let variables = function.body.iter().flat_map(|body| &body.variables);
        for variable in variables.filter(|v| v.space == Space::Shared) {
            let symbol = place(variable, &kernels_of[index])?;
            own_shared.insert((index as u32, variable.name.as_str()), symbol);
        }
    }
    Ok(ends)
}

/// Offsets of a function's returns and parameters in its frame, and where they end. Caller and
/// callee compute the same from the signature.
pub(super) fn signature_layout(
    returns: &[Variable],
    params: &[Variable],
) -> (Vec<u32>, Vec<u32>, u32) {
    let mut at = 0u64;
    let mut place = |variable: &Variable| {
        at = at.next_multiple_of(u64::from(variable.align.max(1)));
        let offset = at;
        at += variable.size();
        offset.min(u64::from(u32::MAX)) as u32
    };
    let returns = returns.iter().map(&mut place).collect();
    let params = params.iter().map(&mut place).collect();
    (returns, params, at.min(1 << 30) as u32)
}
