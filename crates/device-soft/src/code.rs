//! What a module becomes: a flat list of pre-decoded instructions, and tables about it.

use crate::check::Checker;
use crate::exec::control::CallSite;
use crate::exec::{Flow, Warp};
use crate::origin::Origins;
use kedge_cuda_types::CuError;
use std::sync::Arc;

/// An instruction's body. `mask` holds the lanes that execute it (active, and guard true); it is
/// never 0.
///
/// # Safety
/// `inst` must come from a [`Program`] that was lowered for this warp's frame: its operands name
/// slots inside the frame and the pool, and the CPU has the ISA level that the handler was chosen
/// for.
pub type Handler = unsafe fn(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow;

/// A pre-decoded instruction: one cache line.
///
/// An operand is a slot: ≥ 0 counts from the frame's base, < 0 names a constant of the program's
/// read-only pool. Its bank (32-bit, 64-bit, predicate) follows from the handler.
#[repr(C, align(64))]
#[derive(Clone)]
pub struct Inst {
    pub run: Handler,
    /// Immediate, address offset, jump target: the handler's own meaning.
    pub imm: u64,
    /// Operands in the order of the PTX text, destinations first. With more than six, `op[0]` is
    /// the index of the first in `Program::operands` and `op[1]` their number.
    pub op: [i32; 6],
    /// Guard predicate's slot, or `NO_GUARD`.
    pub guard: i32,
    /// All ones for `@!p`, else 0.
    pub guard_not: u32,
    /// Line in the PTX text.
    pub line: u32,
    /// A handler's small parameter (access size, kind, index).
    pub aux: u32,
    /// Number of the access's inline cache.
    pub cache: u32,
}

impl Inst {
    pub const NO_GUARD: i32 = i32::MIN;
}

/// A module, ready to run. Built by [`crate::lower::build`].
///
/// Nothing in it changes once it is built, so any number of workers run it at once.
pub struct Program {
    pub(crate) code: Vec<Inst>,
    /// Operand lists of instructions with more than six.
    pub(crate) operands: Vec<i32>,
    pub(crate) pool32: Vec<crate::exec::Row32>,
    pub(crate) pool64: Vec<crate::exec::Row64>,
    pub(crate) functions: Vec<FunctionCode>,
    pub(crate) calls: Vec<CallSite>,
    /// Program counters of each `brx.idx` list.
    pub(crate) branch_targets: Vec<Vec<u32>>,
    /// What each unsupported instruction is.
    pub(crate) complaints: Vec<String>,
    pub kernels: Vec<Kernel>,
    pub globals: Vec<Global>,
    /// What takes the findings, where the program is checked.
    pub(crate) checker: Option<Arc<Checker>>,
}

/// A function's place in the code, and its frame.
pub(crate) struct FunctionCode {
    pub name: String,
    /// First instruction.
    pub entry: u32,
    /// Instructions at its start that a warp need not run again in another block of the same grid.
    pub prologue: u32,
    /// Slots of each bank.
    pub frame32: u32,
    pub frame64: u32,
    pub frame_pred: u32,
    /// Bytes of local memory, parameters and returns included.
    pub local: u32,
    /// Why it cannot run: the instruction that is missing.
    pub poison: Option<String>,
    pub origins: Origins,
}

impl Program {
    /// Returns the origins of the function that the instruction at `pc` belongs to.
    pub(crate) fn origins(&self, pc: usize) -> Option<&Origins> {
        let behind = self.functions.partition_point(|function| function.entry as usize <= pc);
        Some(&self.functions[..behind].last()?.origins)
    }
}

/// A kernel's metadata; its position in `Program::kernels` is its index.
#[derive(Debug, Clone)]
pub struct Kernel {
    pub name: String,
    /// Index in the program's functions.
    pub function: u32,
    /// (offset, size) of each parameter, bytes.
    pub params: Vec<(u32, u32)>,
    /// Bytes of all parameters.
    pub param_bytes: u32,
    pub registers: u32,
    /// Static shared memory, bytes.
    pub shared_bytes: u32,
    /// Local memory a thread, bytes.
    pub local_bytes: u32,
    /// Shared memory beyond the program's own (`%reserved_smem_offset_…`), bytes: large tiles of
    /// cooperative groups meet there.
    pub reserved_shared: u32,
    /// Recursion, an indirect call or `alloca` may need more: the stack limit comes on top.
    pub unbounded_stack: bool,
    pub const_bytes: u32,
    pub max_threads: u32,
    pub required_cluster: [u32; 3],
    pub explicit_cluster: bool,
    /// The virtual architecture that the PTX is for: 90 for `compute_90`.
    pub ptx_version: u32,
    /// Why a launch fails with NOT_SUPPORTED: the instruction that is missing, and its line.
    pub unsupported: Option<String>,
}

/// A variable of the module, at its address.
#[derive(Debug, Clone)]
pub struct Global {
    pub name: String,
    pub addr: u64,
    pub size: u64,
    pub constant: bool,
    pub managed: bool,
}

/// Where a variable goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlaceKind {
    Global,
    Constant,
    /// `__managed__`: in the shared arena.
    Managed,
}

/// Gives a module's variables their addresses.
pub trait Placement {
    /// `size` zeroed bytes at a multiple of `align`, mapped and writable in this process, and valid
    /// in the client's spans while the module is loaded.
    fn place(&mut self, name: &str, size: u64, align: u64, kind: PlaceKind)
    -> Result<u64, CuError>;
    /// Whether what lies there is older than the module, and stays: initial values are not written.
    fn keeps_content(&self) -> bool {
        false
    }
}

/// Why a module does not become a program.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BuildError {
    pub code: CuError,
    /// What, and at which line.
    pub message: String,
}
