//! Contexts: the error that ends one, its limits, and what its kernels ask of the device.

use super::arena::{Memory, Placed};
use super::tasks::lock;
use super::textures::TextureTable;
use crate::builtin::heap::Heap;
use crate::builtin::query::Question;
use crate::exec::texture::TextureView;
use crate::fault::Fault;
use crate::launch::Services;
use crate::memory::Spans;
use crate::spec;
use kedge_cuda_types::CuError;
use kedge_device::Host;
use kedge_protocol::{CtxId, DeviceInfo, OutputTarget};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// What the tasks of a context share.
pub(super) struct Context {
    pub(super) id: CtxId,
    /// Device ordinal.
    pub(super) device: u32,
    /// The CUresult of the first execution fault; 0 while there is none.
    sticky: AtomicU32,
    limits: Mutex<Limits>,
    /// Placed by the first kernel that asks for it, as large as the limit then says; `None` inside
    /// where the device had no room.
    heap: OnceLock<Option<(Placed, Heap)>>,
    host: Arc<dyn Host>,
    memory: Arc<Memory>,
    textures: Arc<TextureTable>,
    /// All devices of the client.
    devices: Arc<[DeviceInfo]>,
}

/// What cuCtxGetLimit tells: CUlimit values in their order. Stack size, printf buffer and device
/// heap, bytes; sync depth and pending launches of the device runtime; L2 fetch granularity and
/// persisting L2, bytes; shared memory of a block, bytes; whether the context runs beside graphics
/// (CIG). All but stack and heap are kept and mean nothing: output goes to the host at once, there
/// is no L2, and no context runs beside graphics.
type Limits = [u64; CIG_FALLBACK as usize];

/// Smallest stack of a thread, in bytes, however small the program's limit is: an interpreter's
/// frames are not compacted as compiled ones are.
const MIN_STACK_SIZE: u64 = 64 << 10;
const DEFAULT_LIMITS: Limits = [
    spec::DEFAULT_STACK as u64,
    1 << 20,
    8 << 20,
    2,
    2048,
    64,
    0,
    spec::SHARED_PER_BLOCK_OPTIN as u64,
    0,
];
/// CU_LIMIT_STACK_SIZE, CU_LIMIT_MALLOC_HEAP_SIZE.
const STACK_SIZE: usize = 0;
const MALLOC_HEAP_SIZE: usize = 2;
/// CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH: devices of compute capability 9.0 do not have it.
const SYNC_DEPTH: u32 = 3;
/// CU_LIMIT_SHMEM_SIZE and CU_LIMIT_CIG_ENABLED "can only be queried, cannot be set" (cuda.h).
const SHMEM_SIZE: u32 = 7;
const CIG_ENABLED: u32 = 8;
/// CU_LIMIT_CIG_SHMEM_FALLBACK_ENABLED: of contexts beside graphics alone. What comes after it is
/// no limit of the driver's.
const CIG_FALLBACK: u32 = 9;

impl Context {
    pub(super) fn new(
        id: CtxId,
        device: u32,
        host: Arc<dyn Host>,
        memory: Arc<Memory>,
        textures: Arc<TextureTable>,
        devices: Arc<[DeviceInfo]>,
    ) -> Self {
        Self {
            id,
            device,
            sticky: AtomicU32::new(0),
            limits: Mutex::new(DEFAULT_LIMITS),
            heap: OnceLock::new(),
            host,
            memory,
            textures,
            devices,
        }
    }

    pub(super) fn is_faulted(&self) -> bool {
        self.sticky.load(Ordering::Acquire) != 0
    }

    /// The sticky error, if there is one.
    pub(super) fn status(&self) -> Result<(), CuError> {
        match self.sticky.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(CuError(code)),
        }
    }

    /// Records an execution fault. The first one counts; work that is not yet running is dropped.
    pub(super) fn fault(&self, error: CuError, what: &str) {
        if let Some(checker) = &self.memory.checker {
            checker.add_error(error, what);
        }
        self.broken_by(error, what);
    }

    /// As [`Context::fault`], of a kernel.
    pub(super) fn fault_of_kernel(&self, fault: &Fault) {
        if let Some(checker) = &self.memory.checker {
            checker.add_fault(fault);
        }
        self.broken_by(fault.kind.error(), &fault.to_string());
    }

    /// Tells the host what was found of which it does not know, where programs are checked.
    pub(super) fn tell_findings(&self) {
        if let Some(checker) = &self.memory.checker {
            checker.tell(&*self.host);
        }
    }

    fn broken_by(&self, error: CuError, what: &str) {
        // Before the client is told, which may end at once.
        self.tell_findings();
        if self.sticky.compare_exchange(0, error.0, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            self.host.fault_by(self.id, error, what);
        } else {
            self.host.log(&format!("context {}, later: {error}: {what}", self.id.0));
        }
    }

    /// Tells again of the fault that the context had before a checkpoint.
    pub(super) fn restore_fault(&self, error: CuError) {
        self.sticky.store(error.0, Ordering::Release);
        self.host.fault(self.id, error);
    }

    /// Drops what the context has not yet run, without telling the client, who destroyed it.
    pub(super) fn kill(&self) {
        let destroyed = CuError::CONTEXT_IS_DESTROYED.0;
        // A context that has faulted keeps its error.
        let _ = self.sticky.compare_exchange(0, destroyed, Ordering::AcqRel, Ordering::Acquire);
    }

    /// # Errors
    /// What an H200's driver answers (580): UNSUPPORTED_LIMIT for limits that the device does not
    /// have, NOT_PERMITTED for those that nobody may set, INVALID_VALUE for numbers that are none.
    pub(super) fn set_limit(&self, limit: u32, value: u64) -> Result<(), CuError> {
        self.limit(limit)?;
        if matches!(limit, SHMEM_SIZE | CIG_ENABLED) {
            return Err(CuError::NOT_PERMITTED);
        }
        *lock(&self.limits).get_mut(limit as usize).ok_or(CuError::INVALID_VALUE)? = value;
        Ok(())
    }

    /// # Errors
    /// As [`Context::set_limit`].
    pub(super) fn limit(&self, limit: u32) -> Result<u64, CuError> {
        match limit {
            SYNC_DEPTH | CIG_FALLBACK => Err(CuError::UNSUPPORTED_LIMIT),
            0..CIG_FALLBACK => Ok(lock(&self.limits)[limit as usize]),
            _ => Err(CuError::INVALID_VALUE),
        }
    }

    pub(super) fn spans(&self) -> Arc<Spans> {
        Arc::clone(&self.memory.spans)
    }

    /// Bytes of local memory that a thread may use.
    pub(super) fn stack_limit(&self) -> u32 {
        let stack = lock(&self.limits)[STACK_SIZE].max(MIN_STACK_SIZE);
        u32::try_from(stack).unwrap_or(u32::MAX).min(spec::MAX_LOCAL)
    }
}

impl Context {
    /// Where the device heap lies and what is taken of it; `None` before a kernel has asked for it.
    pub(super) fn heap_state(&self) -> Option<(Placed, Vec<(u64, u64)>)> {
        let (placed, heap) = self.heap.get()?.as_ref()?;
        Some((*placed, heap.used()))
    }

    /// Gives a context that has run nothing yet its device heap.
    pub(super) fn restore_heap(&self, placed: Placed, heap: Heap) -> Result<(), CuError> {
        self.heap.set(Some((placed, heap))).map_err(|_| CuError::ILLEGAL_STATE)
    }

    fn heap(&self) -> Option<&Heap> {
        let place = || {
            let size = lock(&self.limits)[MALLOC_HEAP_SIZE];
            let placed = self.memory.place(self.device, size, 256).ok()?;
            Some((placed, Heap::new(placed.addr, placed.size)))
        };
        self.heap.get_or_init(place).as_ref().map(|(_, heap)| heap)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Some(Some((placed, _))) = self.heap.take() {
            self.memory.unplace(placed);
        }
    }
}

impl Services for Context {
    fn print(&self, target: OutputTarget, bytes: &[u8]) {
        self.host.output(target, bytes);
    }

    fn malloc(&self, bytes: u64) -> u64 {
        self.heap().map_or(0, |heap| heap.malloc(bytes))
    }

    fn free(&self, addr: u64) -> bool {
        self.heap().is_some_and(|heap| heap.free(addr))
    }

    fn texture(&self, handle: u64) -> Option<Arc<TextureView>> {
        self.textures.find(handle)
    }

    fn answer(&self, question: Question) -> Option<u64> {
        match question {
            Question::Device => Some(self.device.into()),
            Question::Devices => Some(self.devices.len() as u64),
            Question::Attribute { device, attribute } => {
                let at = self.memory.windows.position(device)?;
                let mut known = self.devices.get(at)?.attributes.iter();
                known.find(|(id, _)| *id == attribute).map(|(_, value)| *value as u64)
            }
            Question::Limit(limit) => self.limit(limit).ok(),
        }
    }
}
