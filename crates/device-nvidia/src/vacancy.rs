//! Memory of slabs and of the program's handles that is given back for a while: addresses, and who
//! may use what is mapped there, stay as they are.

use crate::arena::{AWAY, Arena, Mapping};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::device_of;
use kedge_protocol::MemHandleId;

/// What has no memory.
enum Vacant {
    Slab { addr: u64, size: u64 },
    Handle(MemHandleId),
}

impl Arena {
    /// Gives the memory of all slabs and handles back, but for other processes' handles: how many
    /// bytes. What fails leaves the rest as it is.
    pub(crate) fn vacate(&mut self) -> Result<u64, CuError> {
        let mut bytes = 0;
        let there: Vec<(u64, Mapping)> = self.slabs.iter().map(|(at, slab)| (*at, *slab)).collect();
        for (addr, slab) in there.into_iter().filter(|(_, slab)| slab.raw != AWAY) {
            self.vacate_slab(addr, slab)?;
            bytes += slab.size;
        }
        let own: Vec<(MemHandleId, u64)> =
            self.handles().map(|(id, _, size, _)| (id, size)).collect();
        for (id, size) in own {
            self.vacate_handle(id)?;
            bytes += size;
        }
        Ok(bytes)
    }

    /// Takes memory for all that has none, or for none of it.
    pub(crate) fn occupy(&mut self) -> Result<(), CuError> {
        let slabs = self.slabs.iter().filter(|(_, slab)| slab.raw == AWAY);
        let slabs = slabs.map(|(addr, slab)| Vacant::Slab { addr: *addr, size: slab.size });
        let handles = self.handles.iter().filter(|(_, handle)| handle.raw == AWAY);
        let all: Vec<Vacant> = slabs.chain(handles.map(|(id, _)| Vacant::Handle(*id))).collect();
        for (index, vacant) in all.iter().enumerate() {
            if let Err(error) = self.back(vacant) {
                for vacant in &all[..index] {
                    let _ = self.leave(vacant);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn leave(&mut self, vacant: &Vacant) -> Result<(), CuError> {
        match vacant {
            Vacant::Slab { addr, .. } => {
                let slab = *self.slabs.get(addr).ok_or(CuError::INVALID_VALUE)?;
                self.vacate_slab(*addr, slab)
            }
            Vacant::Handle(id) => self.vacate_handle(*id),
        }
    }

    fn back(&mut self, vacant: &Vacant) -> Result<(), CuError> {
        match *vacant {
            Vacant::Slab { addr, size } => {
                let index = device_of(addr).ok_or(CuError::INVALID_VALUE)?;
                let raw = self.map_new(index, addr, size)?;
                self.slabs.insert(addr, Mapping { size, raw });
                Ok(())
            }
            Vacant::Handle(id) => self.back_handle(id),
        }
    }

    fn vacate_slab(&mut self, addr: u64, slab: Mapping) -> Result<(), CuError> {
        self.unmap(addr, slab.size)?;
        self.slabs.insert(addr, Mapping { raw: AWAY, ..slab });
        self.release(slab.raw)
    }

    fn vacate_handle(&mut self, id: MemHandleId) -> Result<(), CuError> {
        let raw = self.handles.get(&id).ok_or(CuError::INVALID_HANDLE)?.raw;
        for (addr, size) in self.shown(id) {
            self.unmap(addr, size)?;
        }
        if let Some(handle) = self.handles.get_mut(&id) {
            handle.raw = AWAY;
        }
        self.release(raw)
    }

    /// Memory for a handle that has none, mapped where it was.
    fn back_handle(&mut self, id: MemHandleId) -> Result<(), CuError> {
        let handle = *self.handles.get(&id).ok_or(CuError::INVALID_HANDLE)?;
        let size = handle.size.ok_or(CuError::INVALID_HANDLE)?;
        let raw = self.create(handle.device, size, handle.shareable)?;
        let mut mapped = Vec::new();
        let made = self.shown(id).into_iter().try_for_each(|(addr, size)| {
            self.show(addr, raw)?;
            mapped.push((addr, size));
            self.allow_again(addr)
        });
        if let Err(error) = made {
            for (addr, size) in mapped {
                let _ = self.unmap(addr, size);
            }
            let _ = self.release(raw);
            return Err(error);
        }
        if let Some(handle) = self.handles.get_mut(&id) {
            handle.raw = raw;
        }
        Ok(())
    }
}
