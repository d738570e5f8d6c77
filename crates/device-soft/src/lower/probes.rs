//! What lowering adds to the instructions of a checked program ([`crate::exec::probe`]).

use super::function::{Complaint, FunctionLowering};
use super::ir::Opnd;
use super::memory::Address;
use crate::exec::access::Place;
use crate::exec::load_store::Access;
use crate::exec::probe::{
    ACQUIRES, COUNTED, Probe, ProbeBarrier, ProbeCluster, ProbeCopy, ProbeFence, ProbeMbarrier,
    ProbePassed, ProbeSync, ProbeSynced, READS, RELEASES, VALUES, WRITES,
};
use crate::memory::SHARED_WINDOW;
use kedge_ptx::ast::{Body, Instruction, Operand, Statement, Type};
use std::collections::HashSet;

/// What an instruction does to the memory that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Does {
    Read,
    Write,
    Update,
}

/// What comes behind an instruction.
pub(super) enum Behind {
    Nothing,
    Synced,
    Passed,
    Cluster,
    /// A wait for the mbarrier that the operand names.
    Mbarrier(Opnd),
}

impl FunctionLowering<'_, '_> {
    /// Looks at an access before it is made; a store's values are `values`.
    pub(super) fn probe(
        &mut self,
        instruction: &Instruction,
        address: &Address,
        access: Access,
        does: Does,
        values: &[Opnd],
    ) {
        if !self.module.checked
            || matches!(address.place, Place::Local | Place::Frame | Place::Param)
        {
            return;
        }
        let access = Access { strong: access.strong || self.is_compared(instruction), ..access };
        let has =
            |words: &[&str]| words.iter().any(|word| instruction.name.iter().any(|p| p == word));
        let flags = [
            (READS, does != Does::Write),
            (WRITES, does != Does::Read),
            (ACQUIRES, has(&["acquire", "acq_rel"])),
            (RELEASES, has(&["release", "acq_rel"])),
            (VALUES, !values.is_empty()),
        ];
        let flags = flags.iter().filter(|(_, on)| *on).fold(0, |all, (flag, _)| all | flag);
        let mut operands = vec![address.base.unwrap_or(Opnd::Fixed(-1))];
        operands.extend(values);
        self.push_beside::<Probe>(operands, address.offset, access.encode() | flags);
    }

    /// Whether it loads what a compare-and-swap compares with: the loop around that reads plainly
    /// first, as CUDA's guide has it, and sees by the swap whether that was good.
    fn is_compared(&self, it: &Instruction) -> bool {
        let Some(Operand::Register(to)) = it.operands.first() else { return false };
        it.name.first().is_some_and(|name| name == "ld") && self.compared.contains(&to.0)
    }

    /// Follows an instruction that is no access but orders accesses, or makes some that are not
    /// followed. Returns what comes behind it.
    pub(super) fn probe_before(&mut self, it: &Instruction) -> Result<Behind, Complaint> {
        if !self.module.checked {
            return Ok(Behind::Nothing);
        }
        let part = |index: usize| it.name.get(index).map_or("", String::as_str);
        match (part(0), part(1), part(2)) {
            ("bar" | "barrier", "warp", _) => self.probe_sync(it.operands.first()),
            ("barrier", "cluster", "wait") => Ok(Behind::Cluster),
            ("barrier", "cluster", _) => {
                self.push_beside::<ProbeCluster>(Vec::new(), 0, 0);
                Ok(Behind::Nothing)
            }
            ("bar" | "barrier", ..) => self.probe_barrier(it),
            ("shfl" | "vote" | "match" | "redux" | "elect", ..) if has(it, "sync") => {
                self.probe_sync(it.operands.last())
            }
            ("ldmatrix" | "stmatrix" | "mma" | "wmma" | "movmatrix", ..) => {
                self.probe_sync(Some(&Operand::Int(0xFFFF_FFFF)))
            }
            ("membar" | "fence", ..) => {
                self.push_beside::<ProbeFence>(Vec::new(), 0, 0);
                Ok(Behind::Nothing)
            }
            ("mbarrier", action, _) => self.probe_mbarrier(it, action),
            ("cp", "async", "mbarrier") => self.probe_mbarrier(it, "arrive"),
            ("cp", "async", "ca" | "cg") => self.probe_copy(it),
            _ => Ok(Behind::Nothing),
        }
    }

    /// Follows what comes behind the instruction.
    pub(super) fn probe_behind(&mut self, behind: Behind) {
        match behind {
            Behind::Nothing => {}
            Behind::Synced => self.push_beside::<ProbeSynced>(Vec::new(), 0, 0),
            Behind::Passed => self.push_beside::<ProbePassed>(Vec::new(), 0, 0),
            Behind::Cluster => self.push_beside::<ProbeCluster>(Vec::new(), 0, 1),
            Behind::Mbarrier(object) => {
                self.push_beside::<ProbeMbarrier>(vec![object], 0, ACQUIRES)
            }
        }
    }

    fn probe_sync(&mut self, members: Option<&Operand>) -> Result<Behind, Complaint> {
        let members = members.ok_or("members are needed")?;
        let members = self.source(members, Type::U32)?;
        self.push_beside::<ProbeSync>(vec![members], 0, 0);
        Ok(Behind::Synced)
    }

    fn probe_barrier(&mut self, it: &Instruction) -> Result<Behind, Complaint> {
        let reduces = has(it, "red");
        let first = usize::from(reduces);
        let id = it.operands.get(first).ok_or("a barrier is needed")?;
        let id = self.source(id, Type::U32)?;
        let counted = it.operands.len() > first + 1 + usize::from(reduces);
        self.push_beside::<ProbeBarrier>(vec![id], 0, if counted { COUNTED } else { 0 });
        Ok(if has(it, "arrive") { Behind::Nothing } else { Behind::Passed })
    }

    fn probe_mbarrier(&mut self, it: &Instruction, action: &str) -> Result<Behind, Complaint> {
        let arrives = matches!(action, "arrive" | "arrive_drop");
        let waits = matches!(action, "test_wait" | "try_wait");
        if !arrives && !waits {
            return Ok(Behind::Nothing);
        }
        let object = it.operands.iter().find(|operand| matches!(operand, Operand::Address(..)));
        let shared = it.name.iter().any(|part| part.starts_with("shared"));
        let object = object.ok_or("an mbarrier is needed")?;
        let object = self.pointer(object, if shared { SHARED_WINDOW } else { 0 })?;
        if arrives {
            self.push_beside::<ProbeMbarrier>(vec![object], 0, RELEASES);
            return Ok(Behind::Nothing);
        }
        Ok(Behind::Mbarrier(object))
    }

    fn probe_copy(&mut self, it: &Instruction) -> Result<Behind, Complaint> {
        let (Some(to), Some(Operand::Int(bytes))) = (it.operands.first(), it.operands.get(2))
        else {
            return Ok(Behind::Nothing);
        };
        let to = self.pointer(to, SHARED_WINDOW)?;
        self.push_beside::<ProbeCopy>(vec![to], *bytes as u64, 0);
        Ok(Behind::Nothing)
    }
}

/// The registers with which compare-and-swaps of a function compare, and those that they are copied
/// from.
pub(super) fn compared(body: &Body) -> HashSet<u32> {
    /// Copies of copies that are followed.
    const DEPTH: usize = 4;
    let instructions = || {
        body.statements.iter().filter_map(|statement| match statement {
            Statement::Instruction(it) => Some(it),
            Statement::Label(_) => None,
        })
    };
    let mut found: HashSet<u32> = instructions()
        .filter(|it| it.name[0] == "atom" && has(it, "cas"))
        .filter_map(|it| match it.operands.get(2) {
            Some(Operand::Register(register)) => Some(register.0),
            _ => None,
        })
        .collect();
    for _ in 0..if found.is_empty() { 0 } else { DEPTH } {
        for it in instructions().filter(|it| it.name[0] == "mov") {
            if let [Operand::Register(to), Operand::Register(from)] = it.operands.as_slice()
                && found.contains(&to.0)
            {
                found.insert(from.0);
            }
        }
    }
    found
}

fn has(it: &Instruction, word: &str) -> bool {
    it.name.iter().any(|part| part == word)
}
