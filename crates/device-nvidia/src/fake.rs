//! A driver for tests: device memory is memory of this process at the device's addresses, copies
//! are made at once. One test at a time has it.

mod graphs;
mod memory;

use crate::driver::Driver;
use kedge_cuda_types::handle::*;
use kedge_cuda_types::memory::*;
use kedge_device::digest::{Digest, Keys};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const INVALID: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
const INVALID_HANDLE: u32 = 400;
const NOT_FOUND: u32 = 500;
const NOT_READY: u32 = 600;
const NOT_SUPPORTED: u32 = 801;
const OK: u32 = 0;

/// What the fake device is like, and what it holds.
#[derive(Default)]
pub(crate) struct Fake {
    /// Bytes that can be created.
    pub(crate) memory: u64,
    /// Descriptor and bytes, by the driver's handle.
    created: HashMap<u64, (c_int, u64)>,
    /// Bytes and handle, by address.
    mapped: HashMap<u64, (u64, u64)>,
    reserved: HashMap<u64, usize>,
    /// Whether streams have work.
    pub(crate) pending: bool,
    /// What streams answer that are to write a value.
    pub(crate) refuses_values: Option<u32>,
    /// Values that streams with work have not written yet: where to, and what.
    values: VecDeque<(u64, u64)>,
    /// Milliseconds.
    pub(crate) clock: f64,
    events: HashMap<usize, Option<f64>>,
    arrays: HashMap<usize, Vec<u8>>,
    /// Name and address of the variables of every module.
    pub(crate) variables: Vec<(&'static str, u64, usize)>,
    objects: BTreeSet<u64>,
    /// Nodes of graphs that are disabled, and the flags of the last instantiation.
    pub(crate) disabled: BTreeSet<usize>,
    pub(crate) instantiated: u64,
    /// The conditions of each graph: their defaults, and whether they have one.
    pub(crate) conditions: HashMap<usize, Vec<(u32, bool)>>,
    /// The bodies of conditional nodes, by the nodes' conditions.
    pub(crate) bodies: HashMap<u64, Box<[CUgraph]>>,
    /// In which graph each node is.
    pub(crate) nodes: HashMap<usize, usize>,
    /// Executables that were destroyed.
    pub(crate) ended: usize,
    functions: HashMap<usize, String>,
    /// With which digests are computed; without, nothing can be launched.
    pub(crate) keys: Option<Keys>,
    /// What the heaps give that are looked through next, in order: a hash, how many blocks, and
    /// whether it took too long. Without, nothing can be told of them.
    pub(crate) heaps: VecDeque<[u64; 3]>,
    /// Blocks that a kernel has copied.
    pub(crate) gathered: usize,
    /// What was made that the placement of later things depends on.
    pub(crate) made: Vec<&'static str>,
    next: usize,
}

static STATE: Mutex<Option<Fake>> = Mutex::new(None);
static TURN: Mutex<()> = Mutex::new(());

fn with<T>(act: impl FnOnce(&mut Fake) -> T) -> T {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    act(state.get_or_insert_default())
}

/// The only user of the fake device. What it holds is gone afterwards.
pub(crate) struct Turn(#[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

impl Turn {
    pub(crate) fn begin(memory: u64) -> (Turn, Arc<Driver>) {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        with(|fake| *fake = Fake { memory, ..Fake::default() });
        (Turn(turn), Arc::new(driver()))
    }

    pub(crate) fn set<T>(&self, act: impl FnOnce(&mut Fake) -> T) -> T {
        with(act)
    }

    /// Bytes that are created or mapped.
    pub(crate) fn used(&self) -> u64 {
        with(|fake| fake.used())
    }

    /// Another process: all memory, addresses and objects of the last are gone.
    pub(crate) fn new_process(&self) {
        with(|fake| {
            for (at, bytes) in fake.reserved.drain() {
                // SAFETY: a reservation of the fake's own.
                unsafe { libc::munmap(at as *mut _, bytes) };
            }
            for (fd, _) in fake.created.values() {
                // SAFETY: a descriptor of the fake's own.
                unsafe { libc::close(*fd) };
            }
            let (memory, variables) = (fake.memory, std::mem::take(&mut fake.variables));
            *fake = Fake { memory, variables, ..Fake::default() };
        });
    }
}

/// So many bytes more can be created.
pub(crate) fn give(bytes: u64) {
    with(|fake| fake.memory += bytes);
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.new_process();
    }
}

impl Fake {
    fn used(&self) -> u64 {
        // What is released lives on in its mapping.
        let mapped = self.mapped.values().filter(|(_, raw)| !self.created.contains_key(raw));
        let mapped: u64 = mapped.map(|(bytes, _)| bytes).sum();
        mapped + self.created.values().map(|(_, bytes)| bytes).sum::<u64>()
    }

    /// The oldest value that was not written yet is; false if there is none.
    pub(crate) fn write_first(&mut self) -> bool {
        let Some((to, value)) = self.values.pop_front() else { return false };
        // SAFETY: the address was given with a write of a value, and is this process's own memory.
        unsafe { ptr::write_volatile(to as *mut u64, value) };
        true
    }

    fn id(&mut self) -> usize {
        self.next += 1;
        self.next + 0x1000
    }
}

pub(crate) fn driver() -> Driver {
    Driver {
        cuMemAddressReserve: memory::reserve,
        cuMemAddressFree: memory::free_addresses,
        cuMemCreate: memory::create,
        cuMemRelease: memory::release,
        cuMemExportToShareableHandle: memory::export,
        cuMemImportFromShareableHandle: memory::import,
        cuMemMap: memory::map,
        cuMemUnmap: memory::unmap,
        cuMemSetAccess: memory::access,
        cuMemGetInfo_v2: memory::info,
        cuMemHostAlloc: host_alloc,
        cuMemHostRegister_v2: register,
        cuMemHostUnregister: unregister,
        cuMemHostGetDevicePointer_v2: device_pointer,
        cuCtxCreate_v2: context,
        cuCtxDestroy_v2: destroy_context,
        cuCtxSetCurrent: destroy_context,
        cuCtxGetLimit: limit,
        cuCtxSetLimit: set_limit,
        cuStreamCreateWithPriority: stream,
        cuStreamSynchronize: synchronize,
        cuStreamQuery: query,
        cuStreamWriteValue64_v2: write_value,
        cuMemcpyHtoDAsync_v2: to_device,
        cuMemcpyDtoHAsync_v2: to_host,
        cuMemcpyDtoDAsync_v2: inside,
        cuMemcpyAsync: inside,
        cuMemcpy3DAsync_v2: shaped,
        cuMemsetD8Async: fill,
        cuEventCreate: event,
        cuEventDestroy_v2: destroy_event,
        cuEventRecord: record,
        cuEventSynchronize: wait,
        cuEventElapsedTime: elapsed,
        cuArray3DCreate_v2: array,
        cuArrayDestroy: destroy_array,
        cuTexObjectCreate: texture,
        cuTexObjectDestroy: destroy_texture,
        cuModuleLoadDataEx: load,
        cuModuleGetFunction: function,
        cuLaunchKernel: launch,
        cuModuleGetGlobal_v2: global,
        cuFuncGetAttribute: attribute,
        cuFuncGetParamInfo: Some(parameter),
        cuDeviceGetAttribute: device_attribute,
        cuGraphCreate: graphs::graph,
        cuGraphDestroy: graphs::forget_graph,
        cuGraphAddMemsetNode: graphs::fill_node,
        cuGraphAddEmptyNode: graphs::empty_node,
        cuGraphInstantiateWithFlags: graphs::instantiate,
        cuGraphExecDestroy: graphs::forget_exec,
        cuGraphExecMemsetNodeSetParams: graphs::set_fill,
        cuGraphNodeSetEnabled: graphs::enable,
        cuGraphConditionalHandleCreate: Some(graphs::condition),
        cuGraphAddNode_v2: Some(graphs::conditional),
        ..Driver::refusing()
    }
}

// SAFETY of all that follows: called by the code under test as the driver would be, with pointers
// that are live where the driver's must be; device addresses are this process's own.

unsafe extern "C" fn register(_: *mut c_void, _: usize, _: c_uint) -> u32 {
    OK
}

unsafe extern "C" fn device_pointer(out: *mut u64, at: *mut c_void, _: c_uint) -> u32 {
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { *out = at as u64 };
    OK
}

/// Whose memory goes has nothing more written to it.
unsafe extern "C" fn unregister(_: *mut c_void) -> u32 {
    with(|fake| fake.values.clear());
    OK
}

unsafe extern "C" fn context(out: *mut CUcontext, _: c_uint, _: CUdevice) -> u32 {
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { *out = CUcontext(with(Fake::id)) };
    with(|fake| fake.made.push("context"));
    OK
}

unsafe extern "C" fn destroy_context(_: CUcontext) -> u32 {
    OK
}

unsafe extern "C" fn stream(out: *mut CUstream, _: c_uint, _: c_int) -> u32 {
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { *out = CUstream(with(Fake::id)) };
    with(|fake| fake.made.push("stream"));
    OK
}

unsafe extern "C" fn synchronize(_: CUstream) -> u32 {
    OK
}

unsafe extern "C" fn query(_: CUstream) -> u32 {
    if with(|fake| fake.pending) { NOT_READY } else { OK }
}

unsafe extern "C" fn write_value(_: CUstream, to: u64, value: u64, _: c_uint) -> u32 {
    with(|fake| {
        if let Some(refusal) = fake.refuses_values {
            return refusal;
        }
        fake.values.push_back((to, value));
        while !fake.pending && fake.write_first() {}
        OK
    })
}

unsafe extern "C" fn to_device(to: u64, from: *const c_void, bytes: usize, _: CUstream) -> u32 {
    // SAFETY: both ends are live memory of this process, of so many bytes: device addresses are its
    // own.
    unsafe { ptr::copy_nonoverlapping(from.cast::<u8>(), to as *mut u8, bytes) };
    OK
}

unsafe extern "C" fn to_host(to: *mut c_void, from: u64, bytes: usize, _: CUstream) -> u32 {
    // SAFETY: both ends are live memory of this process, of so many bytes: device addresses are its
    // own.
    unsafe { ptr::copy_nonoverlapping(from as *const u8, to.cast::<u8>(), bytes) };
    OK
}

/// Memory that nobody frees, as the buffers are kept.
unsafe extern "C" fn host_alloc(out: *mut *mut c_void, bytes: usize, _: c_uint) -> u32 {
    let pages = vec![[0u64; 512]; bytes.div_ceil(4096)].leak();
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { *out = pages.as_mut_ptr().cast() };
    OK
}

unsafe extern "C" fn inside(to: u64, from: u64, bytes: usize, _: CUstream) -> u32 {
    // SAFETY: both ends are live memory of this process, of so many bytes: device addresses are its
    // own.
    unsafe { ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
    OK
}

unsafe extern "C" fn fill(to: u64, value: u8, bytes: usize, _: CUstream) -> u32 {
    // SAFETY: a device address is live memory of this process, of so many bytes.
    unsafe { ptr::write_bytes(to as *mut u8, value, bytes) };
    OK
}

/// Whole arrays only, without padding.
unsafe extern "C" fn shaped(copy: *const CUDA_MEMCPY3D, _: CUstream) -> u32 {
    // SAFETY: the code under test passes a live descriptor.
    let copy = unsafe { *copy };
    let bytes = copy.WidthInBytes * copy.Height * copy.Depth;
    with(|fake| {
        let to_array = copy.dstMemoryType == CU_MEMORYTYPE_ARRAY;
        let array = if to_array { copy.dstArray } else { copy.srcArray };
        let pitch = if to_array { copy.srcPitch } else { copy.dstPitch };
        let Some(texels) = fake.arrays.get_mut(&array.0) else { return INVALID_HANDLE };
        if texels.len() != bytes || pitch != copy.WidthInBytes {
            return INVALID;
        }
        let at = texels.as_mut_ptr();
        // SAFETY: the texels are `bytes` long, as was just checked, and a device address is live
        // memory of this process.
        unsafe {
            match to_array {
                true => ptr::copy_nonoverlapping(copy.srcDevice as *const u8, at, bytes),
                false => ptr::copy_nonoverlapping(at, copy.dstDevice as *mut u8, bytes),
            }
        }
        OK
    })
}

unsafe extern "C" fn destroy_array(array: CUarray) -> u32 {
    with(|fake| fake.arrays.remove(&array.0)).map_or(INVALID_HANDLE, |_| OK)
}

unsafe extern "C" fn event(out: *mut CUevent, _: c_uint) -> u32 {
    let id = with(|fake| {
        let id = fake.id();
        fake.events.insert(id, None);
        id
    });
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { *out = CUevent(id) };
    OK
}

unsafe extern "C" fn destroy_event(event: CUevent) -> u32 {
    with(|fake| fake.events.remove(&event.0)).map_or(INVALID_HANDLE, |_| OK)
}

unsafe extern "C" fn record(event: CUevent, _: CUstream) -> u32 {
    with(|fake| match fake.events.get_mut(&event.0) {
        Some(time) => {
            *time = Some(fake.clock);
            OK
        }
        None => INVALID_HANDLE,
    })
}

unsafe extern "C" fn wait(event: CUevent) -> u32 {
    with(|fake| if fake.events.contains_key(&event.0) { OK } else { INVALID_HANDLE })
}

unsafe extern "C" fn elapsed(out: *mut f32, start: CUevent, end: CUevent) -> u32 {
    let time = |event: CUevent| with(|fake| fake.events.get(&event.0).copied().flatten());
    let (Some(start), Some(end)) = (time(start), time(end)) else { return INVALID_HANDLE };
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { *out = (end - start) as f32 };
    OK
}

unsafe extern "C" fn array(out: *mut CUarray, desc: *const CUDA_ARRAY3D_DESCRIPTOR) -> u32 {
    // SAFETY: the code under test passes a live descriptor.
    let desc = unsafe { *desc };
    let texel = channel_bytes(desc.Format).unwrap_or(1) as usize * desc.NumChannels as usize;
    let bytes = desc.Width * texel * desc.Height.max(1) * desc.Depth.max(1);
    let id = with(|fake| {
        let id = fake.id();
        fake.arrays.insert(id, vec![0; bytes]);
        id
    });
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { *out = CUarray(id) };
    OK
}

/// The lowest number that is free.
unsafe extern "C" fn texture(
    out: *mut u64,
    _: *const CUDA_RESOURCE_DESC,
    _: *const CUDA_TEXTURE_DESC,
    _: *const CUDA_RESOURCE_VIEW_DESC,
) -> u32 {
    let handle = with(|fake| {
        let handle = (1..).find(|handle| !fake.objects.contains(handle)).unwrap_or(0);
        fake.objects.insert(handle);
        handle
    });
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { *out = handle };
    OK
}

unsafe extern "C" fn destroy_texture(handle: u64) -> u32 {
    if with(|fake| fake.objects.remove(&handle)) { OK } else { INVALID_HANDLE }
}

unsafe extern "C" fn load(
    out: *mut CUmodule,
    _: *const c_void,
    _: c_uint,
    _: *mut c_uint,
    _: *mut *mut c_void,
) -> u32 {
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { *out = CUmodule(with(Fake::id)) };
    OK
}

unsafe extern "C" fn function(out: *mut CUfunction, _: CUmodule, name: *const c_char) -> u32 {
    // SAFETY: the code under test passes a C string.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let raw = with(|fake| {
        let raw = fake.id();
        fake.functions.insert(raw, name);
        raw
    });
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { *out = CUfunction(raw) };
    OK
}

unsafe extern "C" fn limit(out: *mut usize, _: c_uint) -> u32 {
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { *out = 8 << 20 };
    OK
}

unsafe extern "C" fn set_limit(_: c_uint, _: usize) -> u32 {
    OK
}

/// The kernels of `digests`, by this processor; others have no work.
unsafe extern "C" fn launch(
    function: CUfunction,
    blocks: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: CUstream,
    parameters: *mut *mut c_void,
    _: *mut *mut c_void,
) -> u32 {
    let (name, keys) = with(|fake| (fake.functions.get(&function.0).cloned(), fake.keys.clone()));
    if name.as_deref() == Some("kedge_heap") {
        let Some(given) = with(|fake| fake.heaps.pop_front()) else { return NOT_SUPPORTED };
        // SAFETY: the third parameter is the address of a page.
        unsafe { *(*(*parameters.add(2)).cast::<u64>() as *mut [u64; 3]) = given };
        return OK;
    }
    let Some(keys) = keys else { return NOT_SUPPORTED };
    // SAFETY: parameters of the kernels, which are addresses of lists of this many entries.
    let word = |list: usize, at: usize| unsafe {
        let list = *(*parameters.add(list)).cast::<u64>() as *const u64;
        list.add(at).read()
    };
    for block in 0..blocks as usize {
        match name.as_deref() {
            Some("kedge_digest") => {
                let (at, bytes) = (word(0, 2 * block) as *const u8, word(0, 2 * block + 1));
                // SAFETY: the kernel's list names memory of this process with its length, and the
                // digests have a place for each block.
                unsafe {
                    let bytes = std::slice::from_raw_parts(at, bytes as usize);
                    let out = *(*parameters.add(1)).cast::<u64>() as *mut Digest;
                    out.add(block).write(keys.digest(bytes));
                }
            }
            Some("kedge_gather") => {
                let (from, to) =
                    (word(0, 3 * block) as *const u8, word(0, 3 * block + 1) as *mut u8);
                // SAFETY: the kernel's list names two pieces of memory of this process, of so many
                // bytes.
                unsafe { ptr::copy_nonoverlapping(from, to, word(0, 3 * block + 2) as usize) };
                with(|fake| fake.gathered += 1);
            }
            _ => {}
        }
    }
    OK
}

unsafe extern "C" fn global(
    addr: *mut u64,
    size: *mut usize,
    _: CUmodule,
    name: *const c_char,
) -> u32 {
    // SAFETY: the code under test passes a C string.
    let name = unsafe { CStr::from_ptr(name) };
    let found =
        with(|fake| fake.variables.iter().find(|v| v.0.as_bytes() == name.to_bytes()).copied());
    let Some((_, at, bytes)) = found else { return NOT_FOUND };
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { (*addr, *size) = (at, bytes) };
    OK
}

unsafe extern "C" fn attribute(out: *mut c_int, _: c_uint, _: CUfunction) -> u32 {
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { *out = 0 };
    OK
}

unsafe extern "C" fn parameter(_: CUfunction, _: usize, _: *mut usize, _: *mut usize) -> u32 {
    INVALID
}

unsafe extern "C" fn device_attribute(out: *mut c_int, id: c_uint, _: CUdevice) -> u32 {
    // SAFETY: the code under test passes a live place for what it asks for. Compute capability 9.0.
    unsafe { *out = if id == 75 { 9 } else { 0 } };
    OK
}
