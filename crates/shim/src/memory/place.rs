//! Where a pointer points, and whether a copy stays inside what is allocated there.

use super::link::{current, is_exact};
use super::table::Kind;
use super::{MEMORY, link};
use crate::session;
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::{
    DEVICE_CLIENT_LEN, SHARED_BASE, SHARED_CLIENT_LEN, device_base, device_of, is_shared,
};
pub(super) use kedge_protocol::Shape;
use kedge_protocol::{Call, Place};

/// What kind of memory one side of a copy lies in: this decides who waits for whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Home {
    /// A device's memory, or a CUDA array.
    Device,
    /// Pinned or registered host memory.
    Pinned,
    Managed,
    /// The program's own memory, which the proxy does not map.
    Private,
}

/// One side of a copy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Side {
    pub(super) place: Place,
    pub(super) home: Home,
}

impl Side {
    /// The same bytes as rows and planes of a shape, without gaps.
    pub(super) fn packed(self, shape: Shape) -> Self {
        Self { place: self.place.packed(shape), ..self }
    }
}

/// The side of a copy that begins at `addr`, an address of any kind. INVALID_VALUE where it leaves
/// the device-accessible allocation that it begins in, or begins in none of an arena.
pub(super) fn locate(addr: u64, pitch: u64, slice: u64, shape: Shape) -> Result<Side, CuError> {
    let reach = shape.reach(pitch, slice).ok_or(CuError::INVALID_VALUE)?;
    addr.checked_add(reach).ok_or(CuError::INVALID_VALUE)?;
    let mapped = |addr| Place::Mapped { addr, pitch, slice };
    if let Some(home) = home_of_arena(addr, reach)? {
        return Ok(Side { place: mapped(addr), home });
    }
    let table = MEMORY.table();
    if let Some(found) = table.find(addr) {
        // A module's variable, where the driver put it.
        let home = if found.managed() { Home::Managed } else { Home::Device };
        let inside = table.covers(addr, reach);
        return if inside {
            Ok(Side { place: mapped(addr), home })
        } else {
            Err(CuError::INVALID_VALUE)
        };
    }
    match table.find_registered(addr) {
        // A copy that leaves the registered range moves as private memory: the bytes are the same.
        Some((found, offset)) if offset + reach <= found.size => {
            Ok(Side { place: mapped(found.base + offset), home: Home::Pinned })
        }
        _ => Ok(Side { place: Place::Client { addr, pitch, slice }, home: Home::Private }),
    }
}

/// As [`locate`], for an address that a device must be able to access.
pub(super) fn locate_on_device(
    addr: u64,
    pitch: u64,
    slice: u64,
    shape: Shape,
) -> Result<Side, CuError> {
    let side = locate(addr, pitch, slice, shape)?;
    if side.home != Home::Private {
        return Ok(side);
    }
    // Outside of the arenas there may be what a driver has placed: a variable, whose address a
    // kernel told.
    let current = current().ok().filter(|current| !is_exact(current.device));
    let current = current.ok_or(CuError::INVALID_VALUE)?;
    if MEMORY.table().find_registered(addr).is_some() {
        return Err(CuError::INVALID_VALUE);
    }
    let size = shape.reach(pitch, slice).ok_or(CuError::INVALID_VALUE)?;
    session::get()?.call_status(&Call::CheckPlaced { ctx: current.ctx, addr, size })?;
    Ok(Side { place: Place::Mapped { addr, pitch, slice }, home: Home::Device })
}

/// Bytes from `addr` to the end of the device-accessible allocation that holds it.
pub(super) fn left_at(addr: u64) -> Option<u64> {
    MEMORY.table().find(addr).map(|found| found.base + found.size - addr)
}

/// What lies at an arena's address; `None` for an address outside the arenas.
fn home_of_arena(addr: u64, reach: u64) -> Result<Option<Home>, CuError> {
    // What the proxy placed itself is not all known here; the device checks it.
    let (proxys, unknown) = if let Some(device) = device_of(addr) {
        (is_exact(device) && addr - device_base(device) >= DEVICE_CLIENT_LEN, Home::Device)
    } else if is_shared(addr) {
        (link::any_exact() && addr - SHARED_BASE >= SHARED_CLIENT_LEN, Home::Managed)
    } else {
        return Ok(None);
    };
    let table = MEMORY.table();
    let Some(found) = table.find(addr) else {
        return if proxys { Ok(Some(unknown)) } else { Err(CuError::INVALID_VALUE) };
    };
    if !table.covers(addr, reach) {
        return Err(CuError::INVALID_VALUE);
    }
    Ok(Some(match found.kind {
        Kind::Pinned { .. } | Kind::Registered { .. } => Home::Pinned,
        _ if found.managed() => Home::Managed,
        _ => Home::Device,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::alloc::{variable_found, variables_gone};
    use kedge_cuda_types::handle::CUcontext;
    use kedge_protocol::{CtxId, GlobalInfo};
    use kedge_wire::Text;

    #[test]
    fn other_memory_is_private_and_free_addresses_are_invalid() {
        let side = locate(0x7fff_0000_0000, 0, 0, Shape::line(8)).unwrap();
        assert_eq!(side.home, Home::Private);
        let free = device_base(3) + (1 << 30);
        assert_eq!(locate(free, 0, 0, Shape::line(8)), Err(CuError::INVALID_VALUE));
        assert_eq!(locate(u64::MAX, 0, 0, Shape::line(8)), Err(CuError::INVALID_VALUE));
        let proxys = device_base(3) + DEVICE_CLIENT_LEN;
        assert_eq!(locate(proxys, 0, 0, Shape::line(8)).map(|s| s.home), Ok(Home::Device));
        let host = locate_on_device(0x7fff_0000_0000, 0, 0, Shape::line(8));
        assert_eq!(host, Err(CuError::INVALID_VALUE));
    }

    /// Where a driver has put a module's variable, outside of the arenas.
    const VARIABLE: u64 = 0x0005_dead_0000;

    #[test]
    fn a_variable_outside_of_the_arenas_is_device_memory_to_its_last_byte() {
        let name = Text::new("table".to_owned()).unwrap();
        let variable =
            GlobalInfo { name, addr: VARIABLE, size: 64, constant: false, managed: false };
        variable_found(CUcontext(1), CtxId(1), 0, &variable).unwrap();
        let inside = locate(VARIABLE + 60, 0, 0, Shape::line(4)).unwrap();
        assert_eq!(inside.home, Home::Device);
        assert_eq!(inside.place, Place::Mapped { addr: VARIABLE + 60, pitch: 0, slice: 0 });
        assert_eq!(locate_on_device(VARIABLE + 60, 0, 0, Shape::line(4)), Ok(inside));
        assert_eq!(locate(VARIABLE + 60, 0, 0, Shape::line(5)), Err(CuError::INVALID_VALUE));
        variables_gone(std::iter::once(&variable));
        let gone = locate(VARIABLE, 0, 0, Shape::line(4)).map(|side| side.home);
        assert_eq!(gone, Ok(Home::Private));
    }
}
