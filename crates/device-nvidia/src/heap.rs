//! Tells whether anything lives on a context's heap, from which kernels allocate (malloc, new) and
//! which the driver lets nobody read: a kernel of our own takes all that the heap can still give,
//! and gives it back.
//!
//! What it gets from a fresh heap, address by address from the first on, is everything: whoever
//! has as little as 16 bytes has them where one of these blocks would be. So a heap that gives the
//! same blocks in the same order is empty.

use crate::Shared;
use crate::context::Context;
use crate::devices::Devices;
use crate::driver::{Driver, check};
use crate::pinned::Pinned;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUdeviceptr, CUfunction, CUmodule, CUstream};
use kedge_device::SnapshotError;
use kedge_protocol::CtxId;
use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// CU_LIMIT_MALLOC_HEAP_SIZE.
const HEAP_SIZE: u32 = 2;
/// The largest blocks are this part of the heap: the time that its allocator takes grows with the
/// square of their number.
const PART: u64 = 1024;
/// The largest blocks have at least so many bytes, and the smallest [`MIN_BLOCK`]. Those of half
/// the size take the allocator fifty times as long (H100, driver 580).
const CHUNK: u64 = 64 << 10;
const MIN_BLOCK: u64 = 16;
/// For a fresh heap.
const LIMIT: Duration = Duration::from_secs(2);
/// For another, beyond a multiple of what a fresh one takes: a full one is slow.
const MORE: Duration = Duration::from_millis(20);

/// Takes blocks of `size` bytes until there are none, then of half of that, down to [`MIN_BLOCK`],
/// for `limit` nanoseconds at most. Tells of them a hash of their places and sizes and how many
/// there are, and whether it was late.
const TEXT: &CStr = c"
.version 7.0
.target sm_70
.address_size 64
.extern .func (.param .b64 result) malloc (.param .b64 size);
.extern .func free (.param .b64 block);
.visible .entry kedge_heap(.param .u64 size, .param .u64 limit, .param .u64 out) {
.reg .pred %p;
.reg .b64 %size, %limit, %out, %begin, %now, %hash, %count, %late, %base, %chain, %block, %t;
ld.param.u64 %size, [size];
ld.param.u64 %limit, [limit];
ld.param.u64 %out, [out];
mov.u64 %begin, %globaltimer;
mov.u64 %hash, 0xcbf29ce484222325;
mov.u64 %count, 0;
mov.u64 %late, 0;
mov.u64 %base, 0;
mov.u64 %chain, 0;
TAKE:
setp.lt.u64 %p, %size, 16;
@%p bra GIVE;
{
.param .b64 asked;
.param .b64 got;
st.param.b64 [asked], %size;
call.uni (got), malloc, (asked);
ld.param.b64 %block, [got];
}
setp.ne.u64 %p, %block, 0;
@%p bra KEEP;
shr.u64 %size, %size, 1;
bra.uni NEXT;
KEEP:
setp.eq.u64 %p, %count, 0;
selp.b64 %base, %block, %base, %p;
sub.u64 %t, %block, %base;
xor.b64 %hash, %hash, %t;
mul.lo.u64 %hash, %hash, 0x100000001b3;
xor.b64 %hash, %hash, %size;
mul.lo.u64 %hash, %hash, 0x100000001b3;
st.u64 [%block], %chain;
mov.u64 %chain, %block;
add.u64 %count, %count, 1;
NEXT:
mov.u64 %now, %globaltimer;
sub.u64 %now, %now, %begin;
setp.le.u64 %p, %now, %limit;
@%p bra TAKE;
mov.u64 %late, 1;
GIVE:
setp.eq.u64 %p, %chain, 0;
@%p bra END;
ld.u64 %t, [%chain];
{
.param .b64 freed;
st.param.b64 [freed], %chain;
call.uni free, (freed);
}
mov.u64 %chain, %t;
bra.uni GIVE;
END:
st.u64 [%out], %hash;
st.u64 [%out+8], %count;
st.u64 [%out+16], %late;
ret;
}
";

/// What a heap has given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Given {
    hash: u64,
    count: u64,
}

/// What a fresh heap gives, and within which time.
#[derive(Debug, Clone, Copy)]
struct Fresh {
    given: Given,
    took: Duration,
}

/// What fresh heaps give, by device and size.
#[derive(Default)]
pub(crate) struct Heaps(Mutex<HashMap<(u32, u64), Fresh>>);

/// The contexts whose heaps kernels may have allocated from: of each one such kernel.
pub(crate) type Allocating = HashMap<CtxId, (Arc<Context>, String)>;

impl Heaps {
    /// Finds out what fresh heaps give that are as large as these. It takes a context of its own
    /// for a moment, so it is done before the pause.
    pub(crate) fn prepare(&self, shared: &Shared, devices: &Devices, of: &Allocating) {
        for (context, _) in of.values() {
            // A heap that cannot be told about is refused in the pause, with this error.
            let _ = size_of(&shared.driver, context)
                .and_then(|size| self.fresh(shared, devices, context.device, size));
        }
    }

    /// Refuses contexts whose heaps are not empty. All rests.
    pub(crate) fn check(
        &self,
        shared: &Shared,
        devices: &Devices,
        of: &Allocating,
    ) -> Result<(), SnapshotError> {
        for (context, kernel) in of.values() {
            match self.is_empty(shared, devices, context) {
                Ok(true) => {}
                Ok(false) => return Err(refused(kernel, "some of which is not free")),
                Err(error) => {
                    let why = format!("and whether all of it is free cannot be told ({error})");
                    return Err(refused(kernel, &why));
                }
            }
        }
        Ok(())
    }

    fn is_empty(
        &self,
        shared: &Shared,
        devices: &Devices,
        context: &Context,
    ) -> Result<bool, CuError> {
        let size = size_of(&shared.driver, context)?;
        let Fresh { given, took } = self.fresh(shared, devices, context.device, size)?;
        let held = context.hold()?;
        let found = fill(&shared.driver, held.streams().inside, size, 4 * took + MORE)?;
        Ok(found == Some(given))
    }

    /// Returns what a fresh heap of `size` bytes gives.
    fn fresh(
        &self,
        shared: &Shared,
        devices: &Devices,
        device: u32,
        size: u64,
    ) -> Result<Fresh, CuError> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(fresh) = known.get(&(device, size)) {
            return Ok(*fresh);
        }
        let raw = devices.get(device).ok_or(CuError::INVALID_DEVICE)?;
        // No client has this name.
        let context = Context::create(&shared.driver, CtxId(0), device, raw)?;
        let found = fill_fresh(&shared.driver, &context, size);
        let ended = context.destroy();
        let fresh = found?;
        ended?;
        known.insert((device, size), fresh);
        Ok(fresh)
    }
}

/// Returns the size of a context's heap, bytes.
fn size_of(driver: &Driver, context: &Context) -> Result<u64, CuError> {
    context.enter()?;
    let mut size = 0;
    // SAFETY: a live out pointer; the current context's limit.
    check(unsafe { (driver.cuCtxGetLimit)(&mut size, HEAP_SIZE) })?;
    Ok(size as u64)
}

fn fill_fresh(driver: &Arc<Driver>, context: &Context, size: u64) -> Result<Fresh, CuError> {
    let held = context.hold()?;
    // SAFETY: the current context's limit.
    check(unsafe { (driver.cuCtxSetLimit)(HEAP_SIZE, size as usize) })?;
    // The first launch makes the heap.
    fill(driver, held.streams().inside, size, LIMIT)?;
    let begin = Instant::now();
    let given = fill(driver, held.streams().inside, size, LIMIT)?.ok_or(CuError::NOT_SUPPORTED)?;
    Ok(Fresh { given, took: begin.elapsed() })
}

/// Fills the current context's heap of `size` bytes and empties it again; `None` where that takes
/// longer than `limit`.
fn fill(
    driver: &Arc<Driver>,
    stream: CUstream,
    size: u64,
    limit: Duration,
) -> Result<Option<Given>, CuError> {
    let module = Loaded::load(driver)?;
    let out = Pinned::new(driver, 4096, 1)?;
    let host = out.addr();
    let mut on_device: CUdeviceptr = 0;
    // SAFETY: a live out pointer, and memory that was just registered.
    check(unsafe { (driver.cuMemHostGetDevicePointer_v2)(&mut on_device, host.cast(), 0) })?;
    let mut chunk = (size / PART).max(CHUNK).next_power_of_two();
    let mut nanoseconds = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
    let mut parameters: [*mut c_void; 3] = [
        ptr::from_mut(&mut chunk).cast(),
        ptr::from_mut(&mut nanoseconds).cast(),
        ptr::from_mut(&mut on_device).cast(),
    ];
    let (kernel, none) = (module.kernel, ptr::null_mut());
    let parameters = parameters.as_mut_ptr();
    // SAFETY: a kernel of ours with as many parameters as it has, each live and of its size; it
    // writes three words of memory that is registered until it is waited for.
    let launched = check(unsafe {
        (driver.cuLaunchKernel)(kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, none)
    });
    // SAFETY: our own stream, in a context that is held.
    let over = check(unsafe { (driver.cuStreamSynchronize)(stream) });
    launched.and(over)?;
    // SAFETY: the first three words of a page of ours, which the kernel has written and writes no
    // more.
    let [hash, count, late] = unsafe { host.cast::<[u64; 3]>().read_volatile() };
    Ok((late == 0 && count > 0).then_some(Given { hash, count }))
}

/// The kernel in the current context, which it leaves with this: a program without it is placed
/// as if it had not been there.
struct Loaded {
    driver: Arc<Driver>,
    module: CUmodule,
    kernel: CUfunction,
}

impl Loaded {
    fn load(driver: &Arc<Driver>) -> Result<Loaded, CuError> {
        let (mut module, mut kernel) = (CUmodule::NULL, CUfunction::NULL);
        // SAFETY: text that ends in a NUL, and no options.
        check(unsafe {
            let (none, values) = (ptr::null_mut(), ptr::null_mut());
            (driver.cuModuleLoadDataEx)(&mut module, TEXT.as_ptr().cast(), 0, none, values)
        })?;
        let mut loaded = Loaded { driver: Arc::clone(driver), module, kernel };
        // SAFETY: live pointers, and a module that was just loaded.
        check(unsafe {
            (driver.cuModuleGetFunction)(&mut kernel, module, c"kedge_heap".as_ptr())
        })?;
        loaded.kernel = kernel;
        Ok(loaded)
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: a module that only this knows, unloaded once, of which nothing runs.
        unsafe { (self.driver.cuModuleUnload)(self.module) };
    }
}

fn refused(kernel: &str, why: &str) -> SnapshotError {
    let message = format!(
        "kernel {kernel} allocates memory on the device (malloc or new), {why}, and the driver lets \
         nobody read it: free it before a checkpoint, or allocate with cudaMalloc before the launch \
         instead"
    );
    SnapshotError::new(CuError::NOT_SUPPORTED, message)
}

const _: () = assert!(CHUNK >= MIN_BLOCK && CHUNK.is_power_of_two());
