//! A GPU's notes as other kinds of devices can read them, and the other way about.

use crate::code::CodeTable;
use crate::notes::{Notes, PlacedVariable};
use kedge_cuda_types::CuError;
use kedge_device::SnapshotError;
use kedge_device::portable::{self, Portable};
use kedge_wire::{List, Text};

/// What notes of GPUs mean to another kind of device.
///
/// # Errors
/// As for notes that are damaged, or of another version.
pub fn read_notes(bytes: &[u8]) -> Result<Portable, SnapshotError> {
    let notes = Notes::decode(bytes)?;
    let variable = |variable: &PlacedVariable| portable::PlacedVariable {
        module: variable.module,
        name: variable.name.to_string(),
        addr: variable.addr,
        bytes: variable.bytes,
        asked: variable.asked,
        shared: false,
    };
    let bound = |table: &CodeTable| {
        format!("variable {} of module {} has addresses of functions", &*table.name, table.module.0)
    };
    Ok(Portable {
        exact: notes.exact,
        allocations: notes.allocations.iter().map(|at| (at.ctx, at.addr, at.size)).collect(),
        variables: notes.variables.iter().map(variable).collect(),
        textures: notes.textures.into_inner(),
        events: notes.events.into_inner(),
        bound: notes.code.iter().map(bound).collect(),
    })
}

/// Notes from which GPUs go on where another kind of device was. Where variables lie elsewhere
/// then, a restart finds out whether anything may point to them; and whether the driver gives
/// textures their numbers.
///
/// # Errors
/// Names what they cannot go on with.
pub fn make_notes(portable: &Portable) -> Result<Vec<u8>, SnapshotError> {
    let refused = |what: String| SnapshotError::new(CuError::NOT_SUPPORTED, what);
    if let Some(why) = portable.bound.first() {
        return Err(refused(why.clone()));
    }
    if let Some(variable) = portable.variables.iter().find(|variable| variable.shared) {
        let name = &variable.name;
        return Err(refused(format!(
            "managed variable {name} lies where no driver places one (cudaMallocManaged is kept)"
        )));
    }
    let too_many = |_| refused("there are too many objects".to_owned());
    let mut variables = Vec::new();
    for variable in &portable.variables {
        let name = Text::new(variable.name.clone()).map_err(too_many)?;
        let portable::PlacedVariable { module, addr, bytes, asked, .. } = *variable;
        variables.push(PlacedVariable { module, name, addr, bytes, asked });
    }
    let variables = List::new(variables).map_err(too_many)?;
    let Portable { exact, events, allocations, textures, .. } = portable.clone();
    Notes::fresh(exact, variables, textures, events, allocations)?.encode()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_protocol::{CtxId, EventId, ModuleId};

    fn portable() -> Portable {
        let variable = portable::PlacedVariable {
            module: ModuleId(3),
            name: "counter".to_owned(),
            addr: 0x30c0_0000_0000,
            bytes: 4,
            asked: true,
            shared: false,
        };
        let events = vec![(EventId(1), -2.5)];
        let allocations = vec![(CtxId(1), 0x3000_0000_0000, 64)];
        let variables = vec![variable];
        let textures = vec![(CtxId(1), 7), (CtxId(1), 3)];
        Portable { exact: true, allocations, variables, textures, events, ..Portable::default() }
    }

    #[test]
    fn what_is_made_of_it_reads_the_same() {
        assert_eq!(read_notes(&make_notes(&portable()).unwrap()).unwrap(), portable());
    }

    #[test]
    fn what_no_driver_does_is_refused_by_name() {
        let said = |portable: Portable| make_notes(&portable).unwrap_err().message;
        let mut managed = portable();
        managed.variables[0].shared = true;
        assert!(said(managed).contains("managed variable counter"));
        let bound = vec!["kernels have allocated".to_owned()];
        assert_eq!(said(Portable { bound, ..portable() }), "kernels have allocated");
    }
}
