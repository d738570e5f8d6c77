//! User objects: a program's resources that live as long as the graphs that use them.

use super::world;
use crate::callback::{self, HostFn};
use crate::ffi;
use crate::handle::{Kind, Table};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::{CU_GRAPH_USER_OBJECT_MOVE, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC};
use kedge_cuda_types::handle::{CUgraph, CUhostFn, CUuserObject};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

/// A program's resource and its destructor, which runs when no reference is left and the device is
/// done with what was launched before.
#[derive(Debug)]
pub(crate) struct UserObject {
    /// References that the program itself holds.
    own: Mutex<u32>,
    /// Runs the destructor when the program and every graph have let go.
    _life: Life,
}

#[derive(Debug)]
struct Life(HostFn);

impl Drop for Life {
    fn drop(&mut self) {
        let HostFn { function, user_data } = self.0;
        let destructor = HostFn { function, user_data };
        callback::after_device(move || destructor.run());
    }
}

static OBJECTS: Table<UserObject> = Table::new(Kind::UserObject);

/// The references that a graph holds, counted by handle.
#[derive(Debug, Clone, Default)]
pub(crate) struct UserObjects(BTreeMap<CUuserObject, (Arc<UserObject>, u32)>);

impl UserObjects {
    fn retain(&mut self, handle: CUuserObject, object: Arc<UserObject>, count: u32) {
        self.0.entry(handle).or_insert((object, 0)).1 += count;
    }

    /// Lets go of `count` references; the object is returned when it was the last.
    fn release(
        &mut self,
        handle: CUuserObject,
        count: u32,
    ) -> Result<Option<Arc<UserObject>>, CuError> {
        let (_, held) = self.0.get_mut(&handle).ok_or(CuError::INVALID_VALUE)?;
        *held = held.checked_sub(count).ok_or(CuError::INVALID_VALUE)?;
        if *held > 0 {
            return Ok(None);
        }
        Ok(self.0.remove(&handle).map(|(object, _)| object))
    }
}

fn find(object: CUuserObject) -> Result<Arc<UserObject>, CuError> {
    OBJECTS.get(object.0).ok_or(CuError::INVALID_VALUE)
}

pub(crate) unsafe fn cuUserObjectCreate(
    out: *mut CUuserObject,
    user_data: *mut c_void,
    destroy: Option<CUhostFn>,
    references: u32,
    flags: u32,
) -> Result<(), CuError> {
    let function = destroy.ok_or(CuError::INVALID_VALUE)?;
    if out.is_null() || references == 0 || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC {
        return Err(CuError::INVALID_VALUE);
    }
    let life = Life(HostFn { function, user_data });
    let object = UserObject { own: Mutex::new(references), _life: life };
    let handle = OBJECTS.insert(object).ok_or(CuError::OUT_OF_MEMORY)?;
    // SAFETY: `out` is NULL or valid for a write: the API asks that of the program.
    unsafe { ffi::write(out, CUuserObject(handle)) }
}

pub(crate) unsafe fn cuUserObjectRetain(object: CUuserObject, count: u32) -> Result<(), CuError> {
    let object = find(object)?;
    let mut own = object.own.lock().unwrap_or_else(PoisonError::into_inner);
    if count == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    *own = own.checked_add(count).ok_or(CuError::INVALID_VALUE)?;
    Ok(())
}

pub(crate) unsafe fn cuUserObjectRelease(handle: CUuserObject, count: u32) -> Result<(), CuError> {
    release(handle, count)?;
    callback::sweep();
    Ok(())
}

/// Gives up references of the program. The object stays known while it has any; a graph's
/// references are its own.
fn release(handle: CUuserObject, count: u32) -> Result<(), CuError> {
    let object = find(handle)?;
    let mut own = object.own.lock().unwrap_or_else(PoisonError::into_inner);
    if count == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    *own = own.checked_sub(count).ok_or(CuError::INVALID_VALUE)?;
    if *own == 0 {
        OBJECTS.remove(handle.0);
    }
    Ok(())
}

pub(crate) unsafe fn cuGraphRetainUserObject(
    graph: CUgraph,
    handle: CUuserObject,
    count: u32,
    flags: u32,
) -> Result<(), CuError> {
    if count == 0 || flags & !CU_GRAPH_USER_OBJECT_MOVE != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let object = find(handle)?;
    world::ask(|graphs| {
        graphs.get_mut(graph)?.user_objects.retain(handle, object, count);
        Ok(())
    })?;
    if flags == CU_GRAPH_USER_OBJECT_MOVE { release(handle, count) } else { Ok(()) }
}

pub(crate) unsafe fn cuGraphReleaseUserObject(
    graph: CUgraph,
    handle: CUuserObject,
    count: u32,
) -> Result<(), CuError> {
    if count == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let last = world::ask(|graphs| graphs.get_mut(graph)?.user_objects.release(handle, count))?;
    drop(last);
    callback::sweep();
    Ok(())
}
