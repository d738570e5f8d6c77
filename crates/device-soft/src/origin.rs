//! Where a function's instructions come from, and what they do to memory: for messages alone.

use kedge_ptx::ast::{Body, Function, Instruction, Location, Statement};
use std::fmt;
use std::sync::Arc;

/// What an instruction does to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
    Atomic,
    Copy,
}

impl Access {
    fn of(instruction: &Instruction) -> Option<Access> {
        let name = |at: usize| instruction.name.get(at).map_or("", String::as_str);
        Some(match (name(0), name(1)) {
            ("ld" | "ldu" | "ldmatrix", _) | ("wmma", "load") => Access::Read,
            ("st" | "stmatrix", _) | ("wmma", "store") => Access::Write,
            ("atom" | "red", _) => Access::Atomic,
            ("cp", _) => Access::Copy,
            _ => return None,
        })
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Access::Read => "read",
            Access::Write => "write",
            Access::Atomic => "atomic access",
            Access::Copy => "copy",
        })
    }
}

/// A line of a source file, and the one into which the compiler has inlined it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    pub file: String,
    pub line: u32,
    pub inlined_at: Option<(String, u32)>,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)?;
        match &self.inlined_at {
            Some((file, line)) => write!(f, " (inlined at {file}:{line})"),
            None => Ok(()),
        }
    }
}

/// What a function's lines of PTX are.
#[derive(Debug, Clone, Default)]
pub(crate) struct Origins {
    files: Arc<[(u32, String)]>,
    /// By their lines of PTX, ascending.
    locations: Vec<Location>,
    accesses: Vec<(u32, Access)>,
}

impl Origins {
    pub(crate) fn of(function: &Function, body: &Body) -> Origins {
        let accesses = body.statements.iter().filter_map(|statement| match statement {
            Statement::Instruction(it) => Some((it.line, Access::of(it)?)),
            Statement::Label(_) => None,
        });
        let (files, locations) = (function.files.clone(), body.locations.clone());
        Origins { files, locations, accesses: accesses.collect() }
    }

    /// Returns where the instruction at a line of PTX comes from, if the compiler has told
    /// (`nvcc -lineinfo` or `-G`).
    pub(crate) fn source(&self, ptx_line: u32) -> Option<Source> {
        let behind = self.locations.partition_point(|location| location.ptx_line <= ptx_line);
        let Location { file, line, inlined_at, .. } = *self.locations[..behind].last()?;
        let inlined_at = inlined_at.and_then(|(file, line)| Some((self.file(file)?, line)));
        let file = self.file(file)?;
        (line != 0).then_some(Source { file, line, inlined_at })
    }

    fn file(&self, number: u32) -> Option<String> {
        let (_, name) = self.files.iter().find(|(own, _)| *own == number)?;
        Some(name.clone())
    }

    /// Returns what the instruction at a line of PTX does to memory.
    pub(crate) fn access(&self, ptx_line: u32) -> Option<Access> {
        let at = self.accesses.binary_search_by_key(&ptx_line, |(line, _)| *line).ok()?;
        Some(self.accesses[at].1)
    }
}
