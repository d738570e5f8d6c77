//! Bringing a client back on devices of another kind than those that it was captured on: GPUs for
//! software devices, or the reverse. The messages that made its objects mean the same to both, and
//! so do the addresses of what it has allocated. What each kind notes, and where variables of
//! modules lie, is translated here.

use kedge_control::gpu::GpuSpec;
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::{DEVICE_CLIENT_LEN, device_base, device_of};
use kedge_device::portable::{PlacedVariable, Portable};
use kedge_device::{Object, Piece, Ranges, SnapshotError};
use kedge_gpu_image::SavedProxy;
use kedge_protocol::{CtxId, ModuleId};
use std::collections::HashMap;
use std::ops::Range;
use thiserror::Error;

#[derive(Debug, Error)]
pub(crate) enum CrossingError {
    #[error("the image does not tell what kind of devices it is of")]
    Unknown,
    #[error(
        "the program cannot go on {there}: {why}; restart it on devices of the kind that it was on"
    )]
    Refused { there: &'static str, why: SnapshotError },
}

pub(crate) struct Crossing {
    /// For the new devices.
    pub(crate) notes: Vec<u8>,
    to_software: bool,
    /// In the order of their addresses.
    variables: Vec<PlacedVariable>,
    by_name: HashMap<(ModuleId, String), usize>,
    /// To software devices, of a client that told of them: all that is valid of its slabs.
    allocations: Option<Ranges>,
}

/// A part of some bytes, and where it goes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) object: Object,
    pub(crate) start: u64,
    pub(crate) bytes: Range<usize>,
}

fn is_software(gpu: &GpuSpec) -> bool {
    matches!(gpu, GpuSpec::Soft { .. })
}

impl Crossing {
    /// `None` where the devices here are of the kind that there was.
    pub(crate) fn between(
        saved: &SavedProxy,
        here: &GpuSpec,
    ) -> Result<Option<Crossing>, CrossingError> {
        let was: GpuSpec = saved.gpu.parse().map_err(|_| CrossingError::Unknown)?;
        if is_software(&was) == is_software(here) {
            return Ok(None);
        }
        let to_software = is_software(here);
        let there = if to_software { "on software devices" } else { "on GPUs" };
        let refused = |why| CrossingError::Refused { there, why };
        Crossing::new(&saved.notes, to_software).map(Some).map_err(refused)
    }

    pub(crate) fn new(notes: &[u8], to_software: bool) -> Result<Crossing, SnapshotError> {
        use {kedge_device_nvidia as gpu, kedge_device_soft::device as soft};
        let (portable, notes) = if to_software {
            let portable = gpu::read_notes(notes)?;
            let notes = soft::make_notes(&portable)?;
            (portable, notes)
        } else {
            let portable = soft::read_notes(notes)?;
            let notes = gpu::make_notes(&portable)?;
            (portable, notes)
        };
        let Portable { mut variables, exact, allocations, .. } = portable;
        let allocations = (to_software && exact).then(|| ranges(&allocations));
        variables.sort_unstable_by_key(|variable| variable.addr);
        let key = |(at, variable): (usize, &PlacedVariable)| {
            ((variable.module, variable.name.clone()), at)
        };
        let by_name = variables.iter().enumerate().map(key).collect();
        Ok(Crossing { notes, to_software, variables, by_name, allocations })
    }

    /// Where `bytes` bytes from `start` on of an object go: on GPUs, variables are objects of their
    /// own, and on software devices memory as all else.
    pub(crate) fn places(
        &self,
        object: &Object,
        start: u64,
        bytes: usize,
    ) -> Result<Vec<Part>, SnapshotError> {
        match object {
            Object::Variable { module, name } if self.to_software => {
                let found = self.by_name.get(&(*module, name.clone()));
                let variable = found.and_then(|at| self.variables.get(*at));
                let inside = |variable: &&PlacedVariable| {
                    start.checked_add(bytes as u64).is_some_and(|end| end <= variable.bytes)
                };
                let variable = variable.filter(inside).ok_or(CuError::INVALID_VALUE)?;
                let start = variable.addr.checked_add(start).ok_or(CuError::INVALID_VALUE)?;
                Ok(vec![Part { object: Object::Memory, start, bytes: 0..bytes }])
            }
            Object::Memory if !self.to_software && !is_client_s(start) => {
                Ok(self.variables_in(start, bytes).collect())
            }
            Object::Memory if is_client_s(start) => Ok(self.valid_in(start, bytes)),
            _ => Ok(vec![Part { object: object.clone(), start, bytes: 0..bytes }]),
        }
    }

    /// Where all of these go.
    pub(crate) fn pieces(&self, all: &[Piece]) -> Result<Vec<Piece>, SnapshotError> {
        let mut there = Vec::new();
        for Piece { object, start, bytes } in all {
            let parts = self.places(object, *start, *bytes as usize)?.into_iter();
            there.extend(parts.map(|Part { object, start, bytes }| {
                let bytes = (bytes.end - bytes.start) as u64;
                Piece { object, start, bytes }
            }));
        }
        Ok(there)
    }

    /// The parts of a client's memory that are valid where it goes.
    fn valid_in(&self, start: u64, bytes: usize) -> Vec<Part> {
        let part = |bytes: Range<usize>| Part {
            object: Object::Memory,
            start: start + bytes.start as u64,
            bytes,
        };
        let Some(allocations) = &self.allocations else { return vec![part(0..bytes)] };
        let end = start.saturating_add(bytes as u64);
        let inside = allocations.within(start, end);
        inside.map(|(from, to)| part((from - start) as usize..(to - start) as usize)).collect()
    }

    /// The parts of a software device's own memory that are variables; between them is nothing.
    fn variables_in(&self, start: u64, bytes: usize) -> impl Iterator<Item = Part> {
        let end = start.saturating_add(bytes as u64);
        let ends_before =
            |variable: &PlacedVariable| variable.addr.saturating_add(variable.bytes) <= start;
        let first = self.variables.partition_point(ends_before);
        let some = self.variables[first..].iter().take_while(move |variable| variable.addr < end);
        some.map(move |variable| {
            let from = variable.addr.max(start);
            let to = variable.addr.saturating_add(variable.bytes).min(end);
            let (module, name) = (variable.module, variable.name.clone());
            Part {
                object: Object::Variable { module, name },
                start: from - variable.addr,
                bytes: (from - start) as usize..(to - start) as usize,
            }
        })
    }
}

fn ranges(allocations: &[(CtxId, u64, u64)]) -> Ranges {
    let mut all = Ranges::default();
    for &(_, addr, size) in allocations.iter().filter(|at| at.1.checked_add(at.2).is_some()) {
        all.add(addr, size);
    }
    all
}

/// Whether an address is one that clients allocate.
fn is_client_s(addr: u64) -> bool {
    device_of(addr).is_some_and(|device| addr - device_base(device) < DEVICE_CLIENT_LEN)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = device_base(0) + DEVICE_CLIENT_LEN;

    fn variable(name: &str, addr: u64, bytes: u64) -> PlacedVariable {
        let (module, name) = (ModuleId(2), name.to_owned());
        PlacedVariable { module, name, addr, bytes, asked: false, shared: false }
    }

    fn of(name: &str) -> Object {
        Object::Variable { module: ModuleId(2), name: name.to_owned() }
    }

    fn portable(variables: Vec<PlacedVariable>) -> Portable {
        Portable { exact: true, variables, ..Portable::default() }
    }

    #[test]
    fn a_software_device_s_own_memory_is_cut_into_variables() {
        let portable = portable(vec![variable("b", BASE + 256, 8), variable("a", BASE, 4)]);
        let notes = kedge_device_soft::device::make_notes(&portable).unwrap();
        let crossing = Crossing::new(&notes, false).unwrap();
        let parts = crossing.places(&Object::Memory, BASE + 2, 300).unwrap();
        let part = |name, start, bytes| Part { object: of(name), start, bytes };
        assert_eq!(parts, [part("a", 2, 0..2), part("b", 0, 254..262)]);
        assert_eq!(crossing.places(&Object::Memory, BASE + 260, 2).unwrap(), [part("b", 4, 0..2)]);
        assert_eq!(crossing.places(&Object::Memory, BASE + 8, 64).unwrap(), []);
        let plain = Part { object: Object::Memory, start: device_base(0), bytes: 0..16 };
        assert_eq!(crossing.places(&Object::Memory, device_base(0), 16).unwrap(), [plain]);
    }

    #[test]
    fn of_slabs_only_what_is_allocated_goes_to_a_client_that_told_of_it() {
        let base = device_base(0);
        let allocations = vec![(CtxId(1), base, 64), (CtxId(1), base + 4096, 512)];
        let portable = Portable { exact: true, allocations, ..Portable::default() };
        let notes = kedge_device_nvidia::make_notes(&portable).unwrap();
        let crossing = Crossing::new(&notes, true).unwrap();
        let part = |start, bytes| Part { object: Object::Memory, start, bytes };
        let parts = crossing.places(&Object::Memory, base + 16, 4128).unwrap();
        assert_eq!(parts, [part(base + 16, 0..48), part(base + 4096, 4080..4128)]);
        assert_eq!(crossing.places(&Object::Memory, base + 64, 64).unwrap(), []);
    }

    #[test]
    fn a_driver_s_variables_are_memory_where_it_had_placed_them() {
        let at = 0x7fff_d000_0200;
        let notes =
            kedge_device_nvidia::make_notes(&portable(vec![variable("a", at, 16)])).unwrap();
        let crossing = Crossing::new(&notes, true).unwrap();
        let parts = crossing.places(&of("a"), 4, 12).unwrap();
        assert_eq!(parts, [Part { object: Object::Memory, start: at + 4, bytes: 0..12 }]);
        for (name, start, bytes) in [("a", 5, 12), ("a", u64::MAX, 1), ("b", 0, 1)] {
            assert!(crossing.places(&of(name), start, bytes).is_err(), "{name} {start}");
        }
    }
}
