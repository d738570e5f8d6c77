//! The kernel's own mappings in a process that is rebuilt: the vDSO and its data. Those of the same
//! kernel are moved to where the old ones lay. Beside another kernel's, whose code the program
//! knows by address, the running one's stay where there is room, and the old code leads to them. A
//! thread that was inside of that gets it as it was, at another place: jumps lie over the beginning
//! of the functions.

use super::tree::Area;
use crate::inject::{Batch, Parasite};
use crate::maps::{self, Mapping};
use crate::state::{Backing, Hex, KERNEL_MAPPINGS, ProcessState, Saved, ThreadState};
use crate::sys;
use crate::track::Run;
use crate::vdso::{Redirected, Vdso};
use crate::{EngineError, Thread};
use libc::pid_t;
use std::ops::Range;

/// The end of what a program can map.
const TASK_SIZE: u64 = (1 << 47) - 4096;
const VDSO: &str = "[vdso]";

#[derive(Debug)]
pub(super) struct KernelMappings {
    /// As the process has them now, each with where it lies while the process is emptied.
    here: Vec<(Mapping, u64)>,
    fate: Fate,
}

#[derive(Debug)]
enum Fate {
    /// They are moved to where the old ones lay, one for each of `here`.
    Back(Vec<u64>),
    /// They stay, and the old vDSO is this code.
    Beside(Redirected, Option<Detour>),
}

/// Where the old vDSO and its data are once more, unchanged, for threads that were inside.
#[derive(Debug, Clone)]
pub(super) struct Detour {
    /// Where the vDSO lay.
    vdso: Range<u64>,
    code: Vec<u8>,
    /// How far from it the other place is.
    distance: u64,
}

impl Detour {
    /// Where a thread at `rip` goes on.
    pub(super) fn instead_of(&self, rip: u64) -> u64 {
        if self.vdso.contains(&rip) { rip.wrapping_add(self.distance) } else { rip }
    }
}

impl KernelMappings {
    /// What is to become of those of the process `pid`, which is to be what `state` says.
    pub(super) fn plan(
        state: &ProcessState,
        vdsos: &[Hex],
        pid: pid_t,
        area: Area,
    ) -> Result<KernelMappings, EngineError> {
        let mut here = maps::of(pid)?;
        here.retain(|mapping| KERNEL_MAPPINGS.contains(&mapping.name.as_str()));
        let here = if area.sealed { stay(here, state)? } else { into(area, here)? };
        let back = places(state, pid, &here)?;
        let stays = |places: &Vec<u64>| here.iter().zip(places).all(|((m, _), to)| m.start == *to);
        let fate = match back.filter(|places| !area.sealed || stays(places)) {
            Some(places) => Fate::Back(places),
            None => beside(state, vdsos, pid, area, &here)?,
        };
        Ok(KernelMappings { here, fate })
    }

    /// Adds calls to `batch` that unmap all but the area, what is `kept`, and what cannot be
    /// unmapped.
    pub(super) fn empty(
        &self,
        batch: &mut Batch<'_>,
        area: Area,
        mut kept: Vec<Run>,
    ) -> Result<(), EngineError> {
        kept.push((area.start, area.end()));
        for (mapping, to) in &self.here {
            move_mapping(batch, mapping.start, mapping.len(), *to)?;
            kept.push((*to, to + mapping.len()));
        }
        kept.push((TASK_SIZE, TASK_SIZE));
        kept.sort_unstable();
        let mut from = 0;
        for (start, end) in kept {
            if start > from {
                batch.call("unmap what it inherited", libc::SYS_munmap, &[from, start - from])?;
            }
            from = from.max(end);
        }
        Ok(())
    }

    /// Puts the old vDSO where it was, if it is another kernel's, and zeros in the place of its
    /// data.
    pub(super) fn replace(
        &self,
        state: &ProcessState,
        thread: &mut Thread,
        parasite: Parasite,
    ) -> Result<(), EngineError> {
        let Fate::Beside(redirected, detour) = &self.fate else { return Ok(()) };
        let copies = [(&redirected.0, 0)].into_iter();
        for (code, distance) in copies.chain(detour.iter().map(|d| (&d.code, d.distance))) {
            for (saved, name) in kernels(state) {
                let code = (name == VDSO).then_some(code);
                map_old(thread, parasite, saved, saved.start.wrapping_add(distance), code)?;
            }
        }
        Ok(())
    }

    /// Where threads are to go on that were inside of the old vDSO.
    pub(super) fn detour(self) -> Option<Detour> {
        match self.fate {
            Fate::Beside(_, detour) => detour,
            Fate::Back(_) => None,
        }
    }

    /// Moves the kernel's to where the old ones lay, if they take their place.
    pub(super) fn place(&self, batch: &mut Batch<'_>) -> Result<(), EngineError> {
        let Fate::Back(places) = &self.fate else { return Ok(()) };
        for ((mapping, from), to) in self.here.iter().zip(places) {
            move_mapping(batch, *from, mapping.len(), *to)?;
        }
        Ok(())
    }
}

/// Maps memory at `at` as the kernel's mapping `saved` was, with the vDSO's `code` in it or zeros.
fn map_old(
    thread: &mut Thread,
    parasite: Parasite,
    saved: &Saved,
    at: u64,
    code: Option<&Vec<u8>>,
) -> Result<(), EngineError> {
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED) as u64;
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let arguments = [at, saved.len(), protection, flags, u64::MAX, 0];
    parasite.call(thread, "map the old vDSO", libc::SYS_mmap, &arguments)?;
    if let Some(code) = code {
        sys::write(thread.pid(), at, code)?;
    }
    let arguments = [at, saved.len(), saved.protection as u64];
    parasite.call(thread, "protect the old vDSO", libc::SYS_mprotect, &arguments).map(drop)
}

/// Whether the kernel lets nobody move its own mappings (mseal(2)), of which some are among these.
pub(super) fn are_sealed(mappings: &[Mapping]) -> bool {
    let kernels = mappings.iter().filter(|m| KERNEL_MAPPINGS.contains(&m.name.as_str()));
    kernels.flat_map(|mapping| &mapping.flags).any(|flag| flag == "sl")
}

/// Sealed ones can be neither moved nor unmapped.
fn stay(here: Vec<Mapping>, state: &ProcessState) -> Result<Vec<(Mapping, u64)>, EngineError> {
    let kernel = |saved: &Saved| matches!(saved.backing, Backing::Kernel { .. });
    let there = |saved: &Saved| here.iter().any(|m| m.start == saved.start && m.end == saved.end);
    let over = |saved: &Saved| here.iter().any(|m| m.start < saved.end && saved.start < m.end);
    if state.mappings.iter().any(|saved| over(saved) && !(kernel(saved) && there(saved))) {
        let text = "its kernel has sealed its vDSO where the program has memory of its own: it \
                    lies elsewhere each time, so try again";
        return Err(EngineError::Machine(text.into()));
    }
    Ok(here.into_iter().map(|mapping| (mapping.clone(), mapping.start)).collect())
}

/// One after the other into the area.
fn into(area: Area, here: Vec<Mapping>) -> Result<Vec<(Mapping, u64)>, EngineError> {
    let mut to = area.kernel();
    let place = |mapping: Mapping| {
        let at = to;
        to += mapping.len();
        (mapping, at)
    };
    let placed = here.into_iter().map(place).collect();
    if to > area.detour() {
        return Err(EngineError::Nonsense("kernel mappings that are too long"));
    }
    Ok(placed)
}

/// The kernel's mappings that the process had, and what they are called.
fn kernels(state: &ProcessState) -> impl Iterator<Item = (&Saved, &str)> {
    state.mappings.iter().filter_map(|saved| match &saved.backing {
        Backing::Kernel { name, .. } => Some((saved, name.as_str())),
        _ => None,
    })
}

/// Where those of `here` lay in the old process; `None` if that had another kernel's.
fn places(
    state: &ProcessState,
    pid: pid_t,
    here: &[(Mapping, u64)],
) -> Result<Option<Vec<u64>>, EngineError> {
    let mut places = Vec::new();
    for (own, _) in here {
        let same = |saved: &&Saved| {
            let Backing::Kernel { name, .. } = &saved.backing else { return false };
            *name == own.name && saved.len() == own.len()
        };
        let Some(saved) = state.mappings.iter().find(same) else { return Ok(None) };
        if own.name == VDSO {
            let code = Vdso::of(pid, own)?.clean();
            let sum = kedge_image::checksum(&code);
            if !matches!(saved.backing, Backing::Kernel { checksum, .. } if checksum == sum) {
                return Ok(None);
            }
        }
        places.push(saved.start);
    }
    Ok((kernels(state).count() == places.len()).then_some(places))
}

/// The old vDSO's code leads to this kernel's.
fn beside(
    state: &ProcessState,
    vdsos: &[Hex],
    pid: pid_t,
    area: Area,
    here: &[(Mapping, u64)],
) -> Result<Fate, EngineError> {
    let failed = |what: &str| {
        let text = format!(
            "its kernel's vDSO is another one, which cannot take the old one's place ({what}): \
             restart under the same kernel"
        );
        EngineError::Machine(text)
    };
    let mut vdso = kernels(state).filter(|(_, name)| *name == VDSO).map(|(saved, _)| saved);
    let (Some(saved), None) = (vdso.next(), vdso.next()) else {
        return Err(failed("the program had none, or had divided it"));
    };
    let Backing::Kernel { checksum, .. } = saved.backing else { return Err(failed("")) };
    let kept = |Hex(code): &&Hex| {
        code.len() as u64 == saved.len() && kedge_image::checksum(code) == checksum
    };
    let Hex(old) = vdsos.iter().find(kept).ok_or_else(|| failed("the image has not kept it"))?;
    let own = here.iter().find(|(mapping, _)| mapping.name == VDSO);
    let (own, to) = own.ok_or_else(|| failed("this one has none"))?;
    let new = Vdso::of(pid, own)?.clean();
    let redirected = Redirected::new(old, saved.start, &new, *to).map_err(failed)?;
    let vdso = saved.start..saved.end;
    let inside = |thread: &ThreadState| {
        let words = thread.registers.first_chunk().copied();
        words.is_some_and(|words| vdso.contains(&sys::from_words(words).rip))
    };
    if !state.threads.iter().any(inside) {
        return Ok(Fate::Beside(redirected, None));
    }
    let (first, last) = kernels(state).fold((u64::MAX, 0), |(first, last), (saved, _)| {
        (first.min(saved.start), last.max(saved.end))
    });
    if last - first > Area::DETOUR_ROOM {
        return Err(failed("a thread is inside of it, and its parts lie far apart"));
    }
    let (code, distance) = (old.clone(), area.detour().wrapping_sub(first));
    Ok(Fate::Beside(redirected, Some(Detour { vdso, code, distance })))
}

fn move_mapping(batch: &mut Batch<'_>, from: u64, length: u64, to: u64) -> Result<(), EngineError> {
    if from == to {
        return Ok(());
    }
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
    batch.call("move its vDSO", libc::SYS_mremap, &[from, length, length, flags, to])
}
