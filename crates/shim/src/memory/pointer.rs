//! What a program may ask of an address: the `cuPointer` functions.

use super::table::{Allocation, Kind};
use super::{MEMORY, give, read, vmm};
use crate::entry;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUdeviceptr, CUmemoryPool};
use kedge_cuda_types::memory::*;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// An attribute's value, in the width in which callers take it: the reference's booleans are 32
/// bits wide, for the runtime passes variables that it has not cleared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Value {
    Word(u32),
    Wide(u64),
}

impl Value {
    /// # Safety
    /// `out` is NULL or valid for a write of this width.
    unsafe fn write(self, out: *mut c_void) -> Result<(), CuError> {
        // SAFETY: `out` is NULL or valid for a write of the value's width, by this function's
        // contract.
        unsafe {
            match self {
                Self::Word(value) => give(out.cast::<u32>(), value),
                Self::Wide(value) => give(out.cast::<u64>(), value),
            }
        }
    }
}

/// What an attribute is for an address that CUDA does not know, and the attribute's width.
fn nothing(attribute: u32) -> Result<Value, CuError> {
    Ok(match attribute {
        CU_POINTER_ATTRIBUTE_CONTEXT
        | CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        | CU_POINTER_ATTRIBUTE_HOST_POINTER
        | CU_POINTER_ATTRIBUTE_BUFFER_ID
        | CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
        | CU_POINTER_ATTRIBUTE_RANGE_SIZE
        | CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
        | CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
        | CU_POINTER_ATTRIBUTE_MAPPING_SIZE
        | CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR
        | CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => Value::Wide(0),
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => Value::Word(CU_DEVICE_INVALID as u32),
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        | CU_POINTER_ATTRIBUTE_ACCESS_FLAGS
        | CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        | CU_POINTER_ATTRIBUTE_IS_MANAGED
        | CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        | CU_POINTER_ATTRIBUTE_MAPPED
        | CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
        | CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE => Value::Word(0),
        CU_POINTER_ATTRIBUTE_P2P_TOKENS => {
            return Err(entry::not_supported("CU_POINTER_ATTRIBUTE_P2P_TOKENS"));
        }
        _ => return Err(CuError::INVALID_VALUE),
    })
}

/// An attribute of `found`, asked for at device address `addr` of it.
fn value(found: &Allocation, addr: u64, attribute: u32) -> Result<Value, CuError> {
    let host = found.host_base();
    let (base, size) = (found.base, found.size);
    Ok(match attribute {
        CU_POINTER_ATTRIBUTE_CONTEXT => Value::Wide(found.context.0 as u64),
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE => {
            let on_host = host != 0 && !found.managed();
            Value::Word(if on_host { CU_MEMORYTYPE_HOST } else { CU_MEMORYTYPE_DEVICE })
        }
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER => Value::Wide(found.kernel_address(addr)),
        CU_POINTER_ATTRIBUTE_HOST_POINTER if host == 0 => return Err(CuError::INVALID_VALUE),
        CU_POINTER_ATTRIBUTE_HOST_POINTER => Value::Wide(host + (addr - base)),
        CU_POINTER_ATTRIBUTE_SYNC_MEMOPS => {
            Value::Word(found.sync_memops.load(Ordering::Relaxed).into())
        }
        CU_POINTER_ATTRIBUTE_BUFFER_ID | CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => {
            Value::Wide(found.id)
        }
        CU_POINTER_ATTRIBUTE_IS_MANAGED => Value::Word(found.managed().into()),
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => Value::Word(found.device),
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR | CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR => {
            Value::Wide(base)
        }
        CU_POINTER_ATTRIBUTE_RANGE_SIZE | CU_POINTER_ATTRIBUTE_MAPPING_SIZE => Value::Wide(size),
        CU_POINTER_ATTRIBUTE_MAPPED => Value::Word(1),
        CU_POINTER_ATTRIBUTE_ACCESS_FLAGS => Value::Word(CU_MEM_ACCESS_FLAGS_PROT_READWRITE),
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => {
            Value::Word((found.kind == Kind::Device).into())
        }
        CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => match found.kind {
            Kind::Mapping(id) => Value::Wide(vmm::exportable_as(id).into()),
            _ => Value::Wide(0),
        },
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => match found.kind {
            Kind::Pool(CUmemoryPool(handle)) => Value::Wide(handle as u64),
            _ => Value::Wide(0),
        },
        _ => nothing(attribute)?,
    })
}

/// An attribute of any address; `None` for one that CUDA does not know.
fn attribute_of(ptr: u64, attribute: u32) -> Result<Option<Value>, CuError> {
    let found = MEMORY.table().resolve(ptr).map(|(found, addr)| (Arc::clone(found), addr));
    if let Some((found, addr)) = found {
        return value(&found, addr, attribute).map(Some);
    }
    // Addresses that are reserved and not mapped have a range, and nothing else.
    let Some((start, size)) = vmm::reservation(ptr) else { return Ok(None) };
    Ok(Some(match attribute {
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => Value::Wide(start),
        CU_POINTER_ATTRIBUTE_RANGE_SIZE => Value::Wide(size),
        _ => nothing(attribute)?,
    }))
}

pub(crate) unsafe fn cuPointerGetAttribute(
    data: *mut c_void,
    attribute: u32,
    ptr: CUdeviceptr,
) -> Result<(), CuError> {
    nothing(attribute)?;
    let value = attribute_of(ptr, attribute)?.ok_or(CuError::INVALID_VALUE)?;
    // SAFETY: `data` is NULL or valid for a write of the attribute's width: the API asks that of
    // the program.
    unsafe { value.write(data) }
}

pub(crate) unsafe fn cuPointerGetAttributes(
    count: u32,
    attributes: *mut u32,
    data: *mut *mut c_void,
    ptr: CUdeviceptr,
) -> Result<(), CuError> {
    for index in 0..count as usize {
        // SAFETY: both arrays have `count` elements, the caller promises.
        let (attribute, out) =
            unsafe { (read(attributes.wrapping_add(index))?, read(data.wrapping_add(index))?) };
        let unknown = nothing(attribute)?;
        // What a known address has not got is absent here, and no error.
        let value = attribute_of(ptr, attribute).unwrap_or(None).unwrap_or(unknown);
        // SAFETY: `out` is NULL or valid for a write of its attribute's width: the API asks that of
        // the program.
        unsafe { value.write(out)? };
    }
    Ok(())
}

/// Remembered only: every copy already orders itself with what the device does.
pub(crate) unsafe fn cuPointerSetAttribute(
    value: *const c_void,
    attribute: u32,
    ptr: CUdeviceptr,
) -> Result<(), CuError> {
    if attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: `value` is NULL or valid for a read: the API asks that of the program.
    let on = unsafe { read(value.cast::<u32>())? } != 0;
    let table = MEMORY.table();
    let (found, _) = table.resolve(ptr).ok_or(CuError::INVALID_VALUE)?;
    found.sync_memops.store(on, Ordering::Relaxed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_cuda_types::handle::CUcontext;
    use kedge_protocol::CtxId;
    use std::sync::atomic::AtomicBool;

    fn allocation(kind: Kind) -> Allocation {
        Allocation {
            base: 0x9000,
            size: 0x100,
            taken: 0x200,
            kind,
            context: CUcontext(0x55),
            ctx: CtxId(1),
            device: 2,
            id: 7,
            sync_memops: AtomicBool::new(false),
        }
    }

    #[test]
    fn registered_memory_tells_both_addresses() {
        let found =
            allocation(Kind::Registered { flags: 0, host: 0x40, aliased: false, theirs: false });
        let ask = |attribute| value(&found, 0x9010, attribute).unwrap();
        assert_eq!(ask(CU_POINTER_ATTRIBUTE_HOST_POINTER), Value::Wide(0x50));
        assert_eq!(ask(CU_POINTER_ATTRIBUTE_DEVICE_POINTER), Value::Wide(0x9010));
        assert_eq!(ask(CU_POINTER_ATTRIBUTE_MEMORY_TYPE), Value::Word(CU_MEMORYTYPE_HOST));
        assert_eq!(ask(CU_POINTER_ATTRIBUTE_RANGE_SIZE), Value::Wide(0x100));
    }

    #[test]
    fn device_memory_has_no_host_address() {
        let found = allocation(Kind::Device);
        let ask = |attribute| value(&found, 0x9010, attribute);
        assert_eq!(ask(CU_POINTER_ATTRIBUTE_HOST_POINTER), Err(CuError::INVALID_VALUE));
        assert_eq!(ask(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL), Ok(Value::Word(2)));
        assert_eq!(ask(CU_POINTER_ATTRIBUTE_IS_MANAGED), Ok(Value::Word(0)));
        assert_eq!(ask(99), Err(CuError::INVALID_VALUE));
    }

    /// A value has the same width for known and unknown addresses, and overruns nobody's variable.
    #[test]
    fn widths_agree() {
        let found = allocation(Kind::Managed { flags: 1 });
        for attribute in (1..=CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE).filter(|&a| a != 5) {
            let known = value(&found, 0x9000, attribute).unwrap();
            let unknown = nothing(attribute).unwrap();
            assert_eq!(
                std::mem::discriminant(&known),
                std::mem::discriminant(&unknown),
                "{attribute}"
            );
        }
    }
}
