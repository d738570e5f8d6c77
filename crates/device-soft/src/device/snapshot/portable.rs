//! A software device's notes as other kinds of devices can read them, and the other way about.

use super::notes::{Allocation, ModuleNote, Notes, Variable, list};
use kedge_cuda_types::CuError;
use kedge_device::SnapshotError;
use kedge_device::portable::{PlacedVariable, Portable};
use kedge_protocol::{CtxId, EventId, ModuleId};
use kedge_wire::Text;
use std::collections::BTreeMap;

const NANOS_PER_MS: f64 = 1e6;
/// What the clock shows at the least when a client goes on.
const SECOND: u64 = 1_000_000_000;
/// No event is older.
const OLDEST_MS: f64 = 1e12;

/// What notes of a software device mean to another kind of device.
///
/// # Errors
/// As for notes that are damaged, or of another version.
pub fn read_notes(bytes: &[u8]) -> Result<Portable, SnapshotError> {
    let notes = Notes::decode(bytes)?;
    let mut bound = Vec::new();
    let mut variables = Vec::new();
    for note in &*notes.modules {
        if !note.bound.is_empty() {
            bound.push(format!("the code of module {} {}", note.module.0, &*note.bound));
        }
        variables.extend(note.variables.iter().map(|variable| PlacedVariable {
            module: note.module,
            name: variable.name.to_string(),
            addr: variable.addr,
            bytes: variable.size,
            asked: variable.asked,
            shared: variable.managed,
        }));
    }
    if notes.heaps.iter().any(|heap| !heap.used.is_empty()) {
        bound.push("kernels have allocated memory on the device (malloc)".to_owned());
    }
    if notes.tensor_maps {
        let what = "the program has made tensor maps (cuTensorMapEncodeTiled), which lie in its memory in the \
                    form that software devices read";
        bound.push(what.to_owned());
    }
    let before = |nanos: u64| -(notes.clock.saturating_sub(nanos) as f64) / NANOS_PER_MS;
    let events = notes.events.iter().map(|(event, nanos)| (*event, before(*nanos))).collect();
    let allocation = |at: &Allocation| (at.ctx, at.addr, at.size);
    let allocations = notes.allocations.iter().map(allocation).collect();
    let textures = notes.textures.into_inner();
    Ok(Portable { exact: notes.exact, allocations, variables, textures, events, bound })
}

/// Notes from which a software device goes on where another kind of device was.
///
/// # Errors
/// Names what it cannot go on with.
pub fn make_notes(portable: &Portable) -> Result<Vec<u8>, SnapshotError> {
    if let Some(why) = portable.bound.first() {
        return Err(SnapshotError::new(CuError::NOT_SUPPORTED, why.clone()));
    }
    let mut modules: BTreeMap<ModuleId, Vec<Variable>> = BTreeMap::new();
    for variable in &portable.variables {
        let name = Text::new(variable.name.clone()).map_err(|error| {
            let what = format!("the name of a variable of module {}: {error}", variable.module.0);
            SnapshotError::new(CuError::NOT_SUPPORTED, what)
        })?;
        let PlacedVariable { module, addr, bytes, asked, shared, .. } = *variable;
        let variable = Variable { name, addr, size: bytes.max(1), managed: shared, asked };
        modules.entry(module).or_default().push(variable);
    }
    let note = |(module, variables)| {
        let variables = list(variables, "module variables")?;
        Ok(ModuleNote { module, variables, bound: Text::default() })
    };
    let modules = modules.into_iter().map(note).collect::<Result<Vec<_>, SnapshotError>>()?;
    let (clock, events) = moments(&portable.events);
    let last_texture = portable.textures.iter().map(|(_, handle)| *handle).max().unwrap_or(0);
    let allocation = |&(ctx, addr, size): &(CtxId, u64, u64)| Allocation { ctx, addr, size };
    let allocations = portable.allocations.iter().map(allocation).collect();
    let notes = Notes {
        clock,
        allocations: list(allocations, "allocations")?,
        modules: list(modules, "modules")?,
        events: list(events, "events")?,
        textures: list(portable.textures.clone(), "textures")?,
        last_texture,
        exact: portable.exact,
        foreign: true,
        ..Notes::default()
    };
    notes.encode()
}

/// A clock, and when by it each event was reached.
fn moments(events: &[(EventId, f64)]) -> (u64, Vec<(EventId, u64)>) {
    let ago = |before: f64| ((-before).clamp(0.0, OLDEST_MS) * NANOS_PER_MS) as u64;
    let oldest = events.iter().map(|(_, before)| ago(*before)).max().unwrap_or(0);
    let clock = oldest + SECOND;
    (clock, events.iter().map(|(event, before)| (*event, clock - ago(*before))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_protocol::CtxId;

    fn portable() -> Portable {
        let variable = |name: &str, addr, asked| PlacedVariable {
            module: ModuleId(3),
            name: name.to_owned(),
            addr,
            bytes: 4,
            asked,
            shared: false,
        };
        Portable {
            allocations: vec![(CtxId(1), 0x3000_0000_0000, 64)],
            exact: false,
            variables: vec![
                variable("counter", 0x7fff_d000_0000, true),
                variable("other", 0x7fff_d000_0200, false),
            ],
            // The driver's numbers do not tell the order.
            textures: vec![(CtxId(1), 0x20_0002), (CtxId(1), 0x10_0001)],
            events: vec![(EventId(1), -1500.0), (EventId(2), -0.5)],
            bound: Vec::new(),
        }
    }

    #[test]
    fn what_is_made_of_it_reads_the_same() {
        assert_eq!(read_notes(&make_notes(&portable()).unwrap()).unwrap(), portable());
    }

    #[test]
    fn what_is_bound_to_its_device_is_refused_by_name() {
        let why = "the code of module 3 calls functions by pointers".to_owned();
        let refused = make_notes(&Portable { bound: vec![why.clone()], ..portable() });
        assert_eq!(refused.unwrap_err().message, why);
    }

    #[test]
    fn moments_that_are_none_do_no_harm() {
        let (clock, all) = moments(&[(EventId(1), f64::NAN), (EventId(2), f64::NEG_INFINITY)]);
        assert!(all.iter().all(|(_, at)| *at <= clock));
    }
}
