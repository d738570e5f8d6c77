//! The client's side of memory: addresses, allocations, copies, textures.
//!
//! - [`ranges`], [`slabs`], [`heap`], [`shared`]: which addresses are free, and what lies behind
//!   them.
//! - [`table`]: what is allocated. [`place`]: where a pointer points.
//! - [`alloc`], [`host`], [`register`], [`managed`], [`pool`], [`vmm`]: the kinds of memory.
//! - [`paged`]: managed memory that lies in a device's own, with pages of this process's beside it.
//! - [`share`], [`ipc`]: memory of several processes.
//! - [`transfer`], [`linear`], [`shaped`], [`batch`], [`memset`]: moving bytes.
//! - [`array`], [`texture`], [`texref`]: CUDA arrays and what reads them.
//! - [`tensor_map`]: how kernels copy tiles of tensors.
//! - [`pointer`]: what a program may ask of an address.
//!
//! Functions named `cu…` implement the exported symbols of the same name; their contract is the
//! CUDA driver API reference's, and each is unsafe for the pointers that a program hands it.

mod advice;
mod alloc;
mod array;
mod backing;
mod batch;
mod bounce;
mod heap;
mod host;
mod ipc;
mod linear;
mod link;
mod managed;
mod memset;
pub(crate) mod paged;
mod place;
mod pointer;
mod pool;
mod ranges;
mod register;
pub(crate) mod shadow;
mod shaped;
mod share;
mod shared;
mod slabs;
mod table;
mod tensor_map;
mod texref;
mod texture;
mod transfer;
mod vmm;

pub(crate) use alloc::*;
pub(crate) use array::*;
pub(crate) use batch::*;
pub(crate) use host::*;
pub(crate) use ipc::*;
pub(crate) use linear::*;
pub(crate) use link::is_exact_at;
pub(crate) use managed::*;
pub(crate) use memset::*;
pub(crate) use pointer::*;
pub(crate) use pool::*;
pub(crate) use register::*;
pub(crate) use shaped::*;
pub(crate) use share::*;
pub(crate) use tensor_map::*;
pub(crate) use texref::*;
pub(crate) use texture::*;
pub(crate) use vmm::*;

use heap::Heap;
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::MAX_DEVICES;
use link::Current;
use shared::Shared;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use table::{Allocation, Kind, Table};

/// The process's memory, on all devices.
struct Memory {
    heaps: Vec<Heap>,
    shared: Shared,
    table: RwLock<Table>,
    next_id: AtomicU64,
}

static MEMORY: LazyLock<Memory> = LazyLock::new(|| Memory {
    heaps: (0..MAX_DEVICES).map(Heap::new).collect(),
    shared: Shared::new(physical_memory()),
    table: RwLock::default(),
    next_id: AtomicU64::new(1),
});

impl Memory {
    fn heap(&self, device: u32) -> Result<&Heap, CuError> {
        self.heaps.get(device as usize).ok_or(CuError::INVALID_DEVICE)
    }

    fn table(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn table_mut(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a new allocation of `current`'s context.
    fn record(&self, current: &Current, kind: Kind, base: u64, size: u64, taken: u64) {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.table_mut().insert(Allocation {
            base,
            size,
            taken,
            kind,
            context: current.context,
            ctx: current.ctx,
            device: current.device,
            id,
            sync_memops: AtomicBool::new(false),
        });
    }
}

/// Bytes of the machine's memory, the most that pinned and managed memory may take.
fn physical_memory() -> u64 {
    // SAFETY: sysconf only reads a number.
    let (pages, size) =
        unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    u64::try_from(pages).unwrap_or(0).saturating_mul(u64::try_from(size).unwrap_or(0))
}

/// Writes a result where the program asked for it.
///
/// # Safety
/// `out` is NULL or valid for a write of `T`.
unsafe fn give<T>(out: *mut T, value: T) -> Result<(), CuError> {
    if out.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: `out` is not NULL, and so valid for a write, by this function's contract. Programs
    // need not align it.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Reads a structure that the program passed.
///
/// # Safety
/// `from` is NULL or valid for a read of `T`, and any bytes make a `T`.
unsafe fn read<T: Copy>(from: *const T) -> Result<T, CuError> {
    if from.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: `from` is not NULL, and so valid for a read, by this function's contract. Programs
    // need not align it.
    Ok(unsafe { from.read_unaligned() })
}
