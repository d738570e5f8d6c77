//! What a new backend must know beside the bytes: where variables lay, which handles textures had,
//! when events were recorded.

use crate::NvidiaBackend;
use crate::code::{self, CodeTable};
use crate::driver::Driver;
use crate::steer::Known;
use crate::stream::Event;
use crate::tables::Tables;
use crate::texture_handles::Expected;
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::device_of;
use kedge_device::SnapshotError;
use kedge_protocol::{CtxId, EventId, ModuleId};
use kedge_wire::{List, Text, wire};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const VERSION: u32 = 5;
/// Longest notes, bytes.
const MAX_NOTES: usize = 64 << 20;

wire! {
    #[derive(Debug, Clone, PartialEq)]
    pub struct Notes {
        pub version: u32,
        pub variables: List<PlacedVariable, 1_048_576>,
        /// Those that have addresses of functions, in the order of their modules.
        pub code: List<CodeTable, 1_048_576>,
        /// Handles of texture and surface objects, in the order in which they were made.
        pub textures: List<(CtxId, u64), 1_048_576>,
        /// Milliseconds from the checkpoint to when each was recorded: negative.
        pub events: List<(EventId, f64), 1_048_576>,
        /// The client began on software devices, and was told that its devices are exact.
        pub exact: bool,
        /// What such a client has allocated.
        pub allocations: List<Allocation, 1_048_576>,
    }

    #[derive(Debug, Clone, PartialEq)]
    pub struct Allocation { pub ctx: CtxId, pub addr: u64, pub size: u64 }

    /// A module's variable, where the driver had placed it.
    #[derive(Debug, Clone, PartialEq)]
    pub struct PlacedVariable {
        pub module: ModuleId,
        pub name: Text<65536>,
        pub addr: u64,
        pub bytes: u64,
        /// The client knows the address.
        pub asked: bool,
    }
}

impl Notes {
    /// Of the devices at rest.
    pub(crate) fn take(
        backend: &NvidiaBackend,
        tables: &mut Tables,
    ) -> Result<Notes, SnapshotError> {
        let (mut variables, mut code) = (Vec::new(), Vec::new());
        for (id, module) in &mut tables.modules {
            let placed = module.variables().unwrap_or_default().to_vec();
            code.extend(code::tables(backend, *id, module, &placed)?);
            for variable in placed {
                let asked = module.was_asked_for(&variable.name);
                let name = Text::new(variable.name).map_err(too_many)?;
                let (addr, bytes) = (variable.addr, variable.bytes);
                variables.push(PlacedVariable { module: *id, name, addr, bytes, asked });
            }
        }
        Ok(Notes {
            version: VERSION,
            variables: List::new(variables).map_err(too_many)?,
            code: List::new(code).map_err(too_many)?,
            textures: List::new(tables.textures.objects()).map_err(too_many)?,
            events: List::new(moments(backend, tables)?).map_err(too_many)?,
            exact: backend.exact.load(Ordering::Relaxed),
            allocations: listed(backend.allocations().all())?,
        })
    }

    /// Of a client that comes from another kind of device.
    pub(crate) fn fresh(
        exact: bool,
        variables: List<PlacedVariable, 1_048_576>,
        textures: Vec<(CtxId, u64)>,
        events: Vec<(EventId, f64)>,
        allocations: Vec<(CtxId, u64, u64)>,
    ) -> Result<Notes, SnapshotError> {
        let events = List::new(events).map_err(too_many)?;
        let allocations = listed(allocations)?;
        let textures = List::new(textures).map_err(too_many)?;
        let code = List::default();
        Ok(Notes { version: VERSION, variables, code, textures, events, exact, allocations })
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>, SnapshotError> {
        let mut bytes = Vec::new();
        kedge_wire::encode(self, &mut bytes);
        if bytes.len() > MAX_NOTES {
            return Err(SnapshotError::new(CuError::NOT_SUPPORTED, "there are too many objects"));
        }
        Ok(bytes)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Notes, SnapshotError> {
        let damaged = "the notes of the GPU snapshot are damaged, or of another version of kedge";
        let refused = || SnapshotError::new(CuError::INVALID_VALUE, damaged);
        if bytes.len() > MAX_NOTES {
            return Err(refused());
        }
        let notes: Notes = kedge_wire::decode(bytes).map_err(|_| refused())?;
        if notes.version == VERSION { Ok(notes) } else { Err(refused()) }
    }
}

pub(crate) fn too_many<E>(_: E) -> SnapshotError {
    SnapshotError::new(CuError::NOT_SUPPORTED, "there are too many objects")
}

fn listed(all: Vec<(CtxId, u64, u64)>) -> Result<List<Allocation, 1_048_576>, SnapshotError> {
    let all = all.into_iter().map(|(ctx, addr, size)| Allocation { ctx, addr, size });
    List::new(all.collect()).map_err(too_many)
}

/// When the events that measure time were recorded.
fn moments(backend: &NvidiaBackend, tables: &Tables) -> Result<Vec<(EventId, f64)>, SnapshotError> {
    let mut by_context: BTreeMap<CtxId, Vec<(EventId, Arc<Event>)>> = BTreeMap::new();
    for (id, event) in tables.events.iter().filter(|(_, event)| event.timing) {
        by_context.entry(event.ctx.id).or_default().push((*id, Arc::clone(event)));
    }
    let mut all = Vec::new();
    for (ctx, events) in by_context {
        let context = tables.context(ctx)?;
        let shared = &backend.shared;
        all.extend(shared.timeline.moments(&shared.driver, context, &events)?);
    }
    Ok(all)
}

/// What the driver has placed elsewhere than before.
#[derive(Debug, Clone)]
pub(crate) struct Moved {
    /// Where it was.
    pub(crate) range: Range<u64>,
    /// What it is, in words.
    pub(crate) name: String,
    pub(crate) to: u64,
}

impl Moved {
    pub(crate) fn refuse(&self, why: &str) -> SnapshotError {
        // Software devices place variables in their own memory, as no driver does.
        let remedy = match device_of(self.range.start) {
            Some(_) => "restart on software devices, which had placed it (--gpu soft)",
            None => {
                "restart with the driver and the GPU model of the checkpoint, and without address space \
                 randomisation"
            }
        };
        let message = format!(
            "the driver has placed {} at {:#x} instead of {:#x}, and {why}: {remedy}",
            self.name, self.to, self.range.start
        );
        SnapshotError::new(CuError::INVALID_ADDRESS_SPACE, message)
    }
}

impl NvidiaBackend {
    /// See [`kedge_device::Restore::restore_begin`].
    pub(crate) fn expect(&self, bytes: &[u8]) -> Result<(), SnapshotError> {
        let notes = Notes::decode(bytes)?;
        self.exact.store(notes.exact, Ordering::Relaxed);
        for &Allocation { ctx, addr, size } in notes.allocations.iter() {
            self.allocations().add(ctx, addr, size)?;
        }
        let asked = || notes.variables.iter().filter(|variable| variable.asked);
        let place = |one: &PlacedVariable| (one.module, one.addr, one.bytes);
        self.managed().expect(asked().map(place));
        let mut restoring = self.restoring();
        // Software devices have variables in their own memory, where no driver places any.
        for variable in asked().filter(|variable| device_of(variable.addr).is_none()) {
            let PlacedVariable { addr, bytes, .. } = *variable;
            let known = Known { name: variable.name.to_string(), addr, bytes };
            restoring.known.entry(variable.module).or_default().push(known);
        }
        drop(restoring);
        let handles = notes.textures.into_inner().into_iter();
        self.tables().textures.expected = Expected::new(handles);
        Ok(())
    }

    /// See [`kedge_device::Restore::restore_notes`].
    pub(crate) fn take_notes(&self, bytes: &[u8]) -> Result<(), SnapshotError> {
        let notes = Notes::decode(bytes)?;
        let mut tables = self.tables();
        let mut moved = notes.variables_elsewhere(&mut tables)?;
        Notes::end_textures(&mut tables, &self.shared.driver)?;
        notes.tell_events(&tables)?;
        let locate = |module, name: &str| {
            let module = tables.module(module)?;
            let (addr, bytes) = module.locate(name)?;
            Ok((Arc::clone(&module.ctx), addr, bytes))
        };
        let mut code_moved = Vec::new();
        let code = self.find_code(&notes.code, locate, &mut code_moved)?;
        drop(tables);
        moved.extend(code_moved.iter().cloned());
        let mut restoring = self.restoring();
        (restoring.moved, restoring.code) = (moved.into(), code.into());
        (restoring.tables, restoring.code_moved) = (notes.code.into_inner(), code_moved);
        Ok(())
    }
}

impl Notes {
    /// Notes which variables the program knows; those that the driver has placed elsewhere.
    ///
    /// # Errors
    /// Where the program knows the address of one of these, or it is not what it was.
    pub(crate) fn variables_elsewhere(
        &self,
        tables: &mut Tables,
    ) -> Result<Vec<Moved>, SnapshotError> {
        let mut moved = Vec::new();
        for variable in self.variables.iter() {
            let module = tables.modules.get_mut(&variable.module).ok_or(CuError::INVALID_HANDLE)?;
            let (to, bytes) = module.locate(&variable.name).map_err(|error| {
                let message = format!("variable {} is not there any more", &*variable.name);
                SnapshotError::new(error, message)
            })?;
            if bytes != variable.bytes {
                let message = format!("variable {} has another size now", &*variable.name);
                return Err(SnapshotError::new(CuError::INVALID_VALUE, message));
            }
            if to != variable.addr {
                let range = variable.addr..variable.addr.saturating_add(bytes);
                let one = Moved { range, name: format!("variable {}", &*variable.name), to };
                if variable.asked {
                    return Err(one.refuse("the program knows the address"));
                }
                moved.push(one);
            }
            if variable.asked {
                module.knows(&variable.name);
            }
        }
        Ok(moved)
    }

    /// All textures have been made again: ends those that were made in vain.
    pub(crate) fn end_textures(tables: &mut Tables, driver: &Driver) -> Result<(), SnapshotError> {
        if let Some(handle) = tables.textures.expected.missing() {
            let message = format!("texture or surface object {handle:#x} was not made again");
            return Err(SnapshotError::new(CuError::INVALID_HANDLE, message));
        }
        Ok(tables.textures.end_spare(driver)?)
    }

    /// Tells events when they were recorded.
    pub(crate) fn tell_events(&self, tables: &Tables) -> Result<(), SnapshotError> {
        for (event, before) in self.events.iter() {
            tables.event(*event)?.was_recorded(*before);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes() -> Notes {
        let name = Text::new("counter".into()).unwrap();
        let (module, addr) = (ModuleId(3), 0x7f00_0000_0000);
        let variable = PlacedVariable { module, name, addr, bytes: 4, asked: true };
        Notes {
            version: VERSION,
            exact: false,
            allocations: listed(vec![(CtxId(1), 0x3000_0000_0000, 512)]).unwrap(),
            variables: List::new(vec![variable]).unwrap(),
            code: List::default(),
            textures: List::new(vec![(CtxId(1), 0x10_0001)]).unwrap(),
            events: List::new(vec![(EventId(9), -12.5)]).unwrap(),
        }
    }

    #[test]
    fn notes_come_back() {
        let bytes = notes().encode().unwrap();
        assert_eq!(Notes::decode(&bytes).unwrap(), notes());
    }

    #[test]
    fn where_a_moved_variable_came_from_tells_what_helps() {
        use kedge_cuda_types::arena::{DEVICE_CLIENT_LEN, device_base};
        let said = |at: u64| {
            let moved = Moved {
                range: at..at + 4,
                name: "variable counter".to_owned(),
                to: 0x7f00_0000_0000,
            };
            moved.refuse("the program knows the address").message
        };
        let software = said(device_base(0) + DEVICE_CLIENT_LEN);
        assert!(software.contains("variable counter") && software.contains("--gpu soft"));
        assert!(said(0x7e00_0000_0000).contains("the GPU model of the checkpoint"));
    }

    #[test]
    fn other_bytes_are_refused() {
        let bytes = notes().encode().unwrap();
        for end in 0..bytes.len() {
            assert!(Notes::decode(&bytes[..end]).is_err());
        }
        let mut newer = bytes.clone();
        newer[0] += 1;
        assert!(Notes::decode(&newer).unwrap_err().to_string().contains("another version"));
        assert!(Notes::decode(&[bytes, vec![0]].concat()).is_err());
    }
}
