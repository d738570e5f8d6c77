//! What stops a kernel.

use crate::memory::Span;
use crate::origin::{Access, Source};
use kedge_cuda_types::CuError;
use std::fmt;

/// The kind of an execution fault; each has a sticky CUDA error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// An access outside of every allocation.
    IllegalAddress,
    /// An access whose address is not a multiple of its size.
    Misaligned,
    /// An address of the wrong state space.
    AddressSpace,
    /// Device `assert`.
    Assert,
    /// `trap`.
    Trap,
    /// An indirect call of something that is no function.
    InvalidPc,
    /// Local memory or call depth beyond the stack limit.
    StackOverflow,
    /// An instruction that cannot run as it stands.
    IllegalInstruction,
    /// A barrier that cannot complete.
    Deadlock,
    /// Something that this device does not do.
    NotSupported,
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::IllegalAddress => "illegal address",
            Self::Misaligned => "misaligned address",
            Self::AddressSpace => "address of another state space",
            Self::Assert => "assertion failed",
            Self::Trap => "trap",
            Self::InvalidPc => "call of something that is no function",
            Self::StackOverflow => "stack overflow",
            Self::IllegalInstruction | Self::Deadlock => "illegal instruction",
            Self::NotSupported => "not supported",
        })
    }
}

impl FaultKind {
    pub fn error(self) -> CuError {
        match self {
            Self::IllegalAddress => CuError::ILLEGAL_ADDRESS,
            Self::Misaligned => CuError::MISALIGNED_ADDRESS,
            Self::AddressSpace => CuError::INVALID_ADDRESS_SPACE,
            Self::Assert => CuError::ASSERT,
            Self::Trap => CuError::LAUNCH_FAILED,
            Self::InvalidPc => CuError::INVALID_PC,
            Self::StackOverflow => CuError::HARDWARE_STACK_ERROR,
            Self::IllegalInstruction | Self::Deadlock => CuError::ILLEGAL_INSTRUCTION,
            Self::NotSupported => CuError::NOT_SUPPORTED,
        }
    }
}

/// An execution fault, for the context's error and the job's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub kind: FaultKind,
    pub kernel: String,
    pub block: [u32; 3],
    pub thread: [u32; 3],
    /// The offending generic address, where there is one.
    pub address: Option<u64>,
    /// What the instruction was to do, where it has been found.
    pub site: Option<Box<Site>>,
    /// Line in the PTX text.
    pub line: u32,
    /// The instruction, or more about it.
    pub detail: String,
}

/// Where a fault is in its program.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Site {
    /// What was to be done at the fault's address.
    pub accessed: Option<Accessed>,
    /// The line of the program's source, where the compiler has told it.
    pub source: Option<Source>,
}

/// An access that is not allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accessed {
    pub access: Option<Access>,
    pub bytes: u64,
    pub near: Option<Near>,
}

/// The memory that an address is next to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Near {
    /// An allocation, a variable, or what else of global memory may be accessed.
    Allocation(Span),
    /// The memory of that name which the block or thread has, of so many bytes, and the place in
    /// it.
    Window { name: &'static str, bytes: u64, offset: u64 },
}

impl Accessed {
    /// Returns what was done, and to how many bytes.
    pub fn action(&self) -> String {
        match self.access {
            Some(access) => format!("{access} of {} bytes", self.bytes),
            None => format!("access of {} bytes", self.bytes),
        }
    }

    /// Writes what was done at `address`, and what lies near it.
    fn tell(&self, f: &mut fmt::Formatter<'_>, address: u64) -> fmt::Result {
        write!(f, ", {} at {address:#x}", self.action())?;
        match self.near {
            None => Ok(()),
            Some(Near::Window { name, bytes, offset }) => {
                write!(f, ", offset {offset} in {bytes} bytes of {name} memory")
            }
            Some(Near::Allocation(Span { lo, hi })) => {
                let of = format_args!("the {} bytes allocated at {lo:#x}", hi - lo);
                match address {
                    _ if address < lo => write!(f, ", {} bytes before {of}", lo - address),
                    _ if address < hi => write!(f, ", offset {} in {of}", address - lo),
                    _ => write!(f, ", {} bytes past the end of {of}", address - hi),
                }
            }
        }
    }
}

/// Returns a function's name as its source has it.
pub(crate) fn demangled(symbol: &str) -> String {
    let name = cpp_demangle::Symbol::new(symbol).ok();
    name.and_then(|name| name.demangle().ok()).unwrap_or_else(|| symbol.to_owned())
}

impl Fault {
    /// Returns the kernel's name as its source has it.
    pub fn kernel_name(&self) -> String {
        demangled(&self.kernel)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (b, t) = (self.block, self.thread);
        write!(f, "{} in kernel {}", self.kind, demangled(&self.kernel))?;
        let site = self.site.as_deref();
        if let Some(source) = site.and_then(|site| site.source.as_ref()) {
            write!(f, " at {source}")?;
        }
        match (site.and_then(|site| site.accessed), self.address) {
            (Some(accessed), Some(address)) => accessed.tell(f, address)?,
            (None, Some(address)) => write!(f, ", address {address:#x}")?,
            (_, None) => {}
        }
        write!(f, ", block ({},{},{}), thread ({},{},{})", b[0], b[1], b[2], t[0], t[1], t[2])?;
        write!(f, ", PTX line {}", self.line)?;
        if !self.detail.is_empty() {
            write!(f, ": {}", self.detail)?;
        }
        Ok(())
    }
}

impl std::error::Error for Fault {}
