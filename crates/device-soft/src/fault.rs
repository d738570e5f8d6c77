//! What stops a kernel.

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
    /// An instruction that cannot run as it stands (a barrier that cannot complete, …).
    IllegalInstruction,
    /// Something that this device does not do.
    NotSupported,
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
            Self::IllegalInstruction => CuError::ILLEGAL_INSTRUCTION,
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
    /// Line in the PTX text.
    pub line: u32,
    /// The instruction, or more about it.
    pub detail: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (b, t) = (self.block, self.thread);
        write!(f, "{:?} in kernel {}", self.kind, self.kernel)?;
        write!(f, ", block ({},{},{}), thread ({},{},{})", b[0], b[1], b[2], t[0], t[1], t[2])?;
        if let Some(address) = self.address {
            write!(f, ", address {address:#x}")?;
        }
        write!(f, ", PTX line {}", self.line)?;
        if !self.detail.is_empty() {
            write!(f, ": {}", self.detail)?;
        }
        Ok(())
    }
}

impl std::error::Error for Fault {}
