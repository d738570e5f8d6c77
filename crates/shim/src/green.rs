//! Green contexts: parts of a device's multiprocessors, on software devices.
//!
//! Resources are counted and shared out as the program asks. What runs in a green context may use
//! all of the device all the same: a software device's multiprocessors are threads, which take
//! whatever block is next. A green context stands in its device's primary context; its CUcontext is
//! one of its own, in which all is done as in the primary one.

use crate::context::{self, Context};
use crate::handle::{Kind, Table};
use crate::{entry, ffi, session, stream};
use kedge_cuda_types::CuError;
use kedge_cuda_types::attribute::MULTIPROCESSOR_COUNT;
use kedge_cuda_types::graph::CU_STREAM_NON_BLOCKING;
use kedge_cuda_types::handle::{CUcontext, CUdevice, CUgreenCtx, CUstream};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// CU_DEV_RESOURCE_TYPE_SM.
const MULTIPROCESSORS: u32 = 1;
/// CU_GREEN_CTX_DEFAULT_STREAM, which must be given.
const DEFAULT_STREAM: u32 = 1;
/// Resources of one descriptor, and groups of one split, at most.
const MAX_RESOURCES: u32 = 1 << 10;

/// `CUdevResource`, of multiprocessors.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Resource {
    kind: u32,
    /// Ours: which device's.
    device: u32,
    /// Ours: the number of the first multiprocessor.
    first: u32,
    _padding: [u32; 21],
    count: u32,
    /// Since CUDA 13: the smallest part, and what a part's size is a multiple of.
    least: u32,
    multiple: u32,
    _oversize: [u32; 9],
}

const _: () = assert!(size_of::<Resource>() == 144);

impl Resource {
    fn new(device: u32, first: u32, count: u32) -> Self {
        Self {
            kind: MULTIPROCESSORS,
            device,
            first,
            _padding: [0; 21],
            count,
            least: 1,
            multiple: 1,
            _oversize: [0; 9],
        }
    }

    fn check(self) -> Result<Self, CuError> {
        let known = self.kind == MULTIPROCESSORS;
        if known { Ok(self) } else { Err(CuError::INVALID_RESOURCE_TYPE) }
    }

    /// `groups` parts of `each` multiprocessors, and what is left.
    fn split(self, groups: u32, each: u32) -> (Vec<Self>, Self) {
        let part = |index: u32| Self::new(self.device, self.first + index * each, each);
        let used = groups * each;
        let rest = Self::new(self.device, self.first + used, self.count - used);
        ((0..groups).map(part).collect(), rest)
    }
}

/// What a resource descriptor stands for.
#[derive(Debug)]
struct Descriptor(Resource);

#[derive(Debug)]
struct GreenContext {
    id: u64,
    /// It as a CUcontext; set right after its own handle is known.
    context: OnceLock<Arc<Context>>,
    resource: Resource,
}

impl GreenContext {
    fn context(&self) -> Result<&Arc<Context>, CuError> {
        self.context.get().ok_or(CuError::INVALID_CONTEXT)
    }
}

static DESCRIPTORS: Table<Descriptor> = Table::new(Kind::ResourceDescriptor);
static CONTEXTS: Table<GreenContext> = Table::new(Kind::GreenContext);

fn find(green: CUgreenCtx) -> Result<Arc<GreenContext>, CuError> {
    CONTEXTS.get(green.0).ok_or(CuError::INVALID_CONTEXT)
}

/// All multiprocessors of a device.
///
/// # Errors
/// NOT_SUPPORTED on real GPUs, where kedge would have to ask the driver.
fn whole(device: CUdevice) -> Result<Resource, CuError> {
    let known = session::get()?.device(device)?;
    if !known.exact {
        return Err(entry::not_supported("green contexts on a GPU"));
    }
    Ok(Resource::new(device as u32, 0, known.limit(MULTIPROCESSOR_COUNT, 1)))
}

/// # Safety
/// `result` is NULL or valid for a write of a `CUdevResource`.
unsafe fn give(result: *mut c_void, kind: u32, resource: Resource) -> Result<(), CuError> {
    if kind != MULTIPROCESSORS {
        return Err(CuError::INVALID_RESOURCE_TYPE);
    }
    // SAFETY: `result` is NULL or valid for a write, by this function's contract.
    unsafe { ffi::write(result.cast::<Resource>(), resource) }
}

pub(crate) unsafe fn cuDeviceGetDevResource(
    device: CUdevice,
    result: *mut c_void,
    kind: u32,
) -> Result<(), CuError> {
    // SAFETY: the caller's out pointer.
    unsafe { give(result, kind, whole(device)?) }
}

pub(crate) unsafe fn cuCtxGetDevResource(
    ctx: CUcontext,
    result: *mut c_void,
    kind: u32,
) -> Result<(), CuError> {
    let context = context::by_handle(ctx)?;
    let resource = match context.green() {
        CUgreenCtx::NULL => whole(context.ordinal() as CUdevice)?,
        green => find(green)?.resource,
    };
    // SAFETY: the caller's out pointer.
    unsafe { give(result, kind, resource) }
}

pub(crate) unsafe fn cuGreenCtxGetDevResource(
    green: CUgreenCtx,
    result: *mut c_void,
    kind: u32,
) -> Result<(), CuError> {
    let resource = find(green)?.resource;
    // SAFETY: the caller's out pointer.
    unsafe { give(result, kind, resource) }
}

/// With `result` NULL it only tells how many groups there can be.
pub(crate) unsafe fn cuDevSmResourceSplitByCount(
    result: *mut c_void,
    groups: *mut u32,
    input: *const c_void,
    remaining: *mut c_void,
    flags: u32,
    least: u32,
) -> Result<(), CuError> {
    // SAFETY: `input` is NULL or valid for a read, `groups` for a write, and `result` has room for
    // as many as `groups` says: the API asks that of the program.
    unsafe {
        let input = ffi::read(input.cast::<Resource>())?.check()?;
        let each = least.max(1);
        if groups.is_null() || flags & !3 != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let possible = (input.count / each).min(MAX_RESOURCES);
        if possible == 0 {
            return Err(CuError::INVALID_RESOURCE_CONFIGURATION);
        }
        if result.is_null() {
            return ffi::write(groups, possible);
        }
        let wanted = ffi::read(groups)?.min(possible);
        let (parts, rest) = input.split(wanted, each);
        for (index, part) in parts.into_iter().enumerate() {
            ffi::write(result.cast::<Resource>().wrapping_add(index), part)?;
        }
        ffi::write_optional(remaining.cast::<Resource>(), rest);
        ffi::write(groups, wanted)
    }
}

/// The resources must be of one device.
pub(crate) unsafe fn cuDevResourceGenerateDesc(
    out: *mut *mut c_void,
    resources: *const c_void,
    count: u32,
) -> Result<(), CuError> {
    if count > MAX_RESOURCES {
        return Err(CuError::INVALID_RESOURCE_CONFIGURATION);
    }
    // SAFETY: the caller's array.
    let all = unsafe { ffi::read_array(resources.cast::<Resource>(), count as usize) }?;
    let first = all.first().ok_or(CuError::INVALID_VALUE)?.check()?;
    let mut sum = 0u32;
    for resource in all {
        if resource.check()?.device != first.device {
            return Err(CuError::INVALID_RESOURCE_CONFIGURATION);
        }
        sum = sum.saturating_add(resource.count);
    }
    if sum == 0 || sum > whole(first.device as CUdevice)?.count {
        return Err(CuError::INVALID_RESOURCE_CONFIGURATION);
    }
    let descriptor = Descriptor(Resource::new(first.device, first.first, sum));
    let handle = DESCRIPTORS.insert(descriptor).ok_or(CuError::OUT_OF_MEMORY)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(out, handle as *mut c_void) }
}

pub(crate) unsafe fn cuGreenCtxCreate(
    out: *mut CUgreenCtx,
    descriptor: *const c_void,
    device: CUdevice,
    flags: u32,
) -> Result<(), CuError> {
    let found = DESCRIPTORS.get(descriptor as usize).ok_or(CuError::INVALID_HANDLE)?;
    let resource = found.0;
    if out.is_null() || flags != DEFAULT_STREAM || resource.device != device as u32 {
        return Err(CuError::INVALID_VALUE);
    }
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let primary = context::retain(device)?;
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let made = GreenContext { id, context: OnceLock::new(), resource };
    let handle = CUgreenCtx(CONTEXTS.insert(made).ok_or(CuError::OUT_OF_MEMORY)?);
    let green = find(handle)?;
    let context = Context::of_green(handle, primary)?;
    green.context.get_or_init(|| context);
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(out, handle) }
}

pub(crate) unsafe fn cuGreenCtxDestroy(green: CUgreenCtx) -> Result<(), CuError> {
    let gone = CONTEXTS.remove(green.0).ok_or(CuError::INVALID_CONTEXT)?;
    gone.context()?.end_green();
    // SAFETY: it asks nothing of its caller.
    unsafe { context::cuDevicePrimaryCtxRelease_v2(gone.resource.device as CUdevice) }
}

pub(crate) unsafe fn cuCtxFromGreenCtx(
    out: *mut CUcontext,
    green: CUgreenCtx,
) -> Result<(), CuError> {
    let green = find(green)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(out, green.context()?.handle()) }
}

pub(crate) unsafe fn cuGreenCtxGetId(green: CUgreenCtx, id: *mut u64) -> Result<(), CuError> {
    let green = find(green)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(id, green.id) }
}

pub(crate) unsafe fn cuGreenCtxStreamCreate(
    out: *mut CUstream,
    green: CUgreenCtx,
    flags: u32,
    priority: c_int,
) -> Result<(), CuError> {
    let green = find(green)?;
    if out.is_null() || flags != CU_STREAM_NON_BLOCKING {
        return Err(CuError::INVALID_VALUE);
    }
    let made = stream::create_in(green.context()?, flags, priority)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(out, made) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap_and_nothing_is_lost() {
        let (parts, rest) = Resource::new(1, 4, 11).split(3, 3);
        let places: Vec<_> = parts.iter().map(|part| (part.first, part.count)).collect();
        assert_eq!(places, [(4, 3), (7, 3), (10, 3)]);
        assert_eq!((rest.device, rest.first, rest.count), (1, 13, 2));
        assert!(Resource { kind: 1000, ..rest }.check().is_err());
    }
}
