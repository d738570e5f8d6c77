//! What a device that checks programs tells of them.

use std::fmt;

/// The kind of a mistake in a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FindingKind {
    /// An access to memory that is not there, or not aligned, or not valid for it.
    Memory,
    /// Accesses of two threads to the same shared memory that nothing orders.
    Race,
    /// A read of memory that nobody has written.
    Uninitialised,
    /// Memory that was allocated and never used.
    Unused,
    /// A barrier that not all threads reach which it waits for.
    Barrier,
    /// What else has ended a kernel.
    Fault,
}

impl FindingKind {
    /// Returns the word for it in findings that scripts read.
    pub fn word(self) -> &'static str {
        match self {
            FindingKind::Memory => "memory",
            FindingKind::Race => "race",
            FindingKind::Uninitialised => "uninitialised",
            FindingKind::Unused => "unused",
            FindingKind::Barrier => "barrier",
            FindingKind::Fault => "fault",
        }
    }
}

/// Where in a program something was done, and by whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FindingPlace {
    /// What was done there, such as `read of 4 bytes`; empty where there is no word for it.
    pub action: String,
    /// The line of the program's source, where its compiler has told it.
    pub source: Option<(String, u32)>,
    /// The line into which the compiler has inlined that.
    pub inlined_at: Option<(String, u32)>,
    /// The line of PTX; 0 for none.
    pub ptx_line: u32,
    pub thread: [u32; 3],
}

/// A mistake of a program that a device has found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub kind: FindingKind,
    /// All of it, for people, in one line.
    pub message: String,
    /// The kernel as its source names it; empty where none ran.
    pub kernel: String,
    pub block: [u32; 3],
    pub place: FindingPlace,
    /// The other access, of two.
    pub other: Option<FindingPlace>,
    /// The generic address, or the offset in shared memory.
    pub address: Option<u64>,
    /// How often it was found at that place.
    pub count: u64,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// What a device has found so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings {
    /// One a place, in the order in which they were found.
    pub list: Vec<Finding>,
    /// Places beyond those that are kept.
    pub more: u64,
}
