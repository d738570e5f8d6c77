//! From a linked PTX module to a [`Program`].

mod control;
mod dots;
mod function;
mod ir;
mod liveness;
mod memory;
mod pairs;
mod pool;
mod probes;
mod prologue;
mod stagger;
mod strips;
mod symbols;
mod vectors;

use crate::check::Checker;
use crate::code::{BuildError, FunctionCode, Inst, Kernel, Placement, Program};
use crate::exec::Level;
use crate::origin::Origins;
use function::FunctionLowering;
use ir::{Node, NodeFlow};
use kedge_ptx::ast;
use liveness::{Allocation, allocate, slot_of};
use pool::Pools;
use std::collections::HashMap;
use std::sync::Arc;
use symbols::{CallGraph, ModuleContext, defined, signature_layout};

/// Registers of a thread, at least and at most, and what they are given out in.
const MIN_REGISTERS: u32 = 16;
const MAX_REGISTERS: u32 = 255;
const REGISTER_UNIT: u32 = 8;

/// Lowers every function of `module` and places its variables.
///
/// Functions with an instruction that this device lacks make the kernels that reach them unusable
/// ([`Kernel::unsupported`]), and not the whole module.
///
/// # Errors
/// INVALID_PTX where the module contradicts itself; what `placement` says where it has no room.
pub fn build(module: &ast::Module, placement: &mut dyn Placement) -> Result<Program, BuildError> {
    build_checked(module, placement, Level::detect(), None)
}

/// As [`build`], for an instruction-set level that this machine has.
pub fn build_at(
    module: &ast::Module,
    placement: &mut dyn Placement,
    level: Level,
) -> Result<Program, BuildError> {
    build_checked(module, placement, level, None)
}

/// As [`build_at`], with what takes the findings, where the program is checked.
pub fn build_checked(
    module: &ast::Module,
    placement: &mut dyn Placement,
    level: Level,
    checker: Option<Arc<Checker>>,
) -> Result<Program, BuildError> {
    let mut symbols = symbols::function_symbols(module);
    let graph = CallGraph::of(module, &symbols);
    let mut own_shared = HashMap::new();
    let shared = symbols::place_shared(module, &graph, &mut symbols, &mut own_shared)?;
    let globals = symbols::place_variables(module, &mut symbols, placement)?;
    let signatures = signatures(module);
    let mut context = ModuleContext {
        symbols,
        signatures,
        own_shared,
        pools: Pools::default(),
        operands: Vec::new(),
        calls: Vec::new(),
        branch_targets: Vec::new(),
        complaints: Vec::new(),
        caches: 0,
        checked: checker.is_some(),
    };
    let mut code = Vec::new();
    let mut functions = Vec::new();
    for (index, function) in defined(module).enumerate() {
        let Some(body) = &function.body else { continue };
        functions.push(lower(&mut context, function, body, index as u32, level, &mut code));
    }
    let kernels = kernels(module, &graph, &functions, &shared, &globals);
    let (pool32, pool64) = context.pools.rows();
    Ok(Program {
        code,
        operands: context.operands,
        pool32,
        pool64,
        functions,
        calls: context.calls,
        branch_targets: context.branch_targets,
        complaints: context.complaints,
        kernels,
        globals,
        checker,
    })
}

/// Declarations and definitions by name; a definition counts where there are both.
fn signatures(module: &ast::Module) -> HashMap<&str, &ast::Function> {
    let mut signatures: HashMap<&str, &ast::Function> = HashMap::new();
    for function in &module.functions {
        let name = function.name.as_str();
        if function.body.is_some() || !signatures.contains_key(name) {
            signatures.insert(name, function);
        }
    }
    for (name, target) in &module.aliases {
        if let Some(&function) = signatures.get(target.as_str()) {
            signatures.insert(name, function);
        }
    }
    signatures
}

/// Lowers one function and appends its code.
fn lower<'a>(
    context: &mut ModuleContext<'a>,
    function: &'a ast::Function,
    body: &'a ast::Body,
    index: u32,
    level: Level,
    code: &mut Vec<Inst>,
) -> FunctionCode {
    let mut lowering = FunctionLowering::new(context, function, body, index, level);
    lowering.lower();
    let FunctionLowering {
        mut nodes, banks, mut labels, tables, sites, poison, frame_local, ..
    } = lowering;
    strips::join(&mut nodes, &mut labels, level);
    dots::fuse(&mut nodes, &mut labels, banks.len(), level);
    let prologue = match function.entry {
        true => prologue::hoist(&mut nodes, &mut labels, banks.len()),
        false => prologue::Prologue::default(),
    };
    pairs::fuse(&mut nodes, &mut labels, banks.len(), prologue.len as usize, level);
    let lists: HashMap<u32, Vec<ast::LabelId>> = tables.iter().cloned().collect();
    let labels_of = |table: u32| lists.get(&table).cloned().unwrap_or_default();
    let allocation = allocate(&nodes, &banks, &labels, labels_of, &prologue.kept);
    let entry = code.len() as u32;
    let local = frame_local.next_multiple_of(16);
    for site in sites {
        context.calls[site as usize].frame =
            [allocation.frame32, allocation.frame64, allocation.frame_pred, local];
    }
    for (table, targets) in tables {
        context.branch_targets[table as usize] =
            targets.iter().map(|label| entry + labels[label.0 as usize]).collect();
    }
    for node in &nodes {
        code.push(encode(context, node, &allocation, entry, &labels));
    }
    FunctionCode {
        name: function.name.clone(),
        entry,
        prologue: prologue.len,
        frame32: allocation.frame32,
        frame64: allocation.frame64,
        frame_pred: allocation.frame_pred,
        local,
        poison,
        origins: Origins::of(function, body),
    }
}

fn encode(
    context: &mut ModuleContext<'_>,
    node: &Node,
    allocation: &Allocation,
    entry: u32,
    labels: &[u32],
) -> Inst {
    let mut op = [0; 6];
    let slots = node.operands.iter().map(|&operand| slot_of(operand, allocation));
    if node.operands.len() <= op.len() {
        for (to, slot) in op.iter_mut().zip(slots) {
            *to = slot;
        }
    } else {
        op[0] = context.operands.len() as i32;
        op[1] = node.operands.len() as i32;
        context.operands.extend(slots);
    }
    let (guard, guard_not) = match node.guard {
        Some((register, negated)) => {
            (allocation.slots[register.0 as usize], if negated { u32::MAX } else { 0 })
        }
        None => (Inst::NO_GUARD, 0),
    };
    let imm = match node.flow {
        NodeFlow::Branch(label) => u64::from(entry + labels[label.0 as usize]),
        _ => node.imm,
    };
    context.caches += u32::from(node.cached);
    Inst {
        run: node.run,
        imm,
        op,
        guard,
        guard_not,
        line: node.line,
        aux: node.aux,
        cache: context.caches,
    }
}

/// Metadata of every kernel.
fn kernels(
    module: &ast::Module,
    graph: &CallGraph,
    functions: &[FunctionCode],
    shared: &[u32],
    globals: &[crate::code::Global],
) -> Vec<Kernel> {
    let const_bytes = globals.iter().filter(|g| g.constant).map(|g| g.size).sum::<u64>();
    let mut kernels = Vec::new();
    for (index, function) in defined(module).enumerate() {
        if !function.entry {
            continue;
        }
        let reached = graph.reach(index as u32);
        let unsupported = reached.iter().find_map(|&f| {
            let code = &functions[f as usize];
            code.poison.as_ref().map(|what| match f == index as u32 {
                true => what.clone(),
                false => format!("{what}, in function {}", code.name),
            })
        });
        let reserved = reached.iter().any(|&f| graph.reserved[f as usize]);
        let (local_bytes, unbounded_stack) = stack(graph, functions, index as u32);
        let (_, offsets, param_bytes) = signature_layout(&[], &function.params);
        let sizes = function.params.iter().map(|param| param.size() as u32);
        let code = &functions[index];
        let limit = |dims: [u32; 3]| dims.iter().map(|&d| d.max(1)).product::<u32>();
        let limits = function.limits;
        let bounds = [limits.max_threads, limits.required_threads];
        let max_threads = bounds
            .into_iter()
            .filter(|dims| dims[0] != 0)
            .map(limit)
            .fold(crate::spec::MAX_THREADS_PER_BLOCK, u32::min);
        kernels.push(Kernel {
            name: function.name.clone(),
            function: index as u32,
            params: offsets.into_iter().zip(sizes).collect(),
            param_bytes,
            registers: registers(code, &limits, max_threads),
            shared_bytes: shared[index],
            local_bytes,
            unbounded_stack,
            reserved_shared: if reserved { crate::spec::RESERVED_SHARED } else { 0 },
            const_bytes: const_bytes.min(u64::from(u32::MAX)) as u32,
            max_threads,
            required_cluster: limits.required_cluster,
            explicit_cluster: limits.explicit_cluster,
            ptx_version: module.sm,
            unsupported,
        });
    }
    kernels
}

/// Registers a thread: what the frame holds, but never so many that a block, or as many as the
/// kernel asks for, could not run: a compiler would spill the rest.
fn registers(code: &FunctionCode, limits: &ast::Limits, max_threads: u32) -> u32 {
    let threads = max_threads.saturating_mul(limits.min_blocks_per_sm.max(1));
    let room = crate::spec::REGISTERS_PER_BLOCK / threads.max(1) / REGISTER_UNIT * REGISTER_UNIT;
    let asked = if limits.max_registers == 0 { u32::MAX } else { limits.max_registers };
    let most = room.min(asked).clamp(MIN_REGISTERS, MAX_REGISTERS);
    (code.frame32 + 2 * code.frame64).clamp(MIN_REGISTERS, most)
}

/// Bytes of local memory on the deepest path of calls from `root`, and whether recursion or an
/// indirect call may need more.
fn stack(graph: &CallGraph, functions: &[FunctionCode], root: u32) -> (u32, bool) {
    #[derive(Clone, Copy, PartialEq)]
    enum Mark {
        New,
        Open,
        Done(u32),
    }
    let mut marks = vec![Mark::New; functions.len()];
    let mut unbounded = false;
    let mut work = vec![(root, 0usize)];
    marks[root as usize] = Mark::Open;
    while let Some((function, next)) = work.last_mut() {
        let at = *function as usize;
        unbounded |= graph.indirect[at] || graph.alloca[at];
        match graph.calls[at].get(*next) {
            Some(&callee) => {
                *next += 1;
                match marks[callee as usize] {
                    Mark::New => {
                        marks[callee as usize] = Mark::Open;
                        work.push((callee, 0));
                    }
                    Mark::Open => unbounded = true,
                    Mark::Done(_) => {}
                }
            }
            None => {
                let deepest = graph.calls[at].iter().filter_map(|&c| match marks[c as usize] {
                    Mark::Done(bytes) => Some(bytes),
                    _ => None,
                });
                let total = functions[at].local.saturating_add(deepest.max().unwrap_or(0));
                marks[at] = Mark::Done(total);
                work.pop();
            }
        }
    }
    match marks[root as usize] {
        Mark::Done(bytes) => (bytes, unbounded),
        _ => (0, unbounded),
    }
}
