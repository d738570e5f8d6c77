use crate::device::{SoftBackend, SoftConfig, StartError};
use kedge_cuda_types::{CuError, arena};
use kedge_device::{Backend, Done, Host, Snapshot, Snapshots};
use kedge_protocol::{Copy3d, CtxId, OutputTarget, Place, StreamId, StreamOp};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::Duration;

pub(super) const CTX: CtxId = CtxId(1);
pub(super) const LEGACY: StreamId = StreamId(1);
/// Blocking streams.
pub(super) const A: StreamId = StreamId(2);
pub(super) const B: StreamId = StreamId(3);
/// A stream that ignores the legacy one.
pub(super) const FREE: StreamId = StreamId(4);

/// The device arenas have fixed addresses, so one backend lives at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// One device of 64 MiB with a context, a legacy stream and three more, and a slab for allocations.
pub(super) struct Fixture {
    pub(super) backend: Arc<SoftBackend>,
    pub(super) host: Arc<FakeHost>,
    alone: Option<MutexGuard<'static, ()>>,
}

impl Fixture {
    pub(super) fn new() -> Self {
        let fixture = Self::bare();
        fixture.backend.grant(0, arena::device_base(0), 32 << 20).unwrap();
        fixture
    }

    /// As `new`, without the slab.
    pub(super) fn bare() -> Self {
        let fixture = Self::empty();
        fixture.make_streams();
        fixture
    }

    /// One device, and nothing made on it.
    pub(super) fn empty() -> Self {
        Self::with_devices(1)
    }

    /// As `empty`, with more devices.
    pub(super) fn with_devices(devices: u32) -> Self {
        Self::start(devices, Some(ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// An empty one where this one was.
    pub(super) fn succeed(self) -> Self {
        let devices = self.backend.devices().len() as u32;
        self.succeed_with(devices)
    }

    /// As `succeed`, with so many devices.
    pub(super) fn succeed_with(mut self, devices: u32) -> Self {
        let alone = self.alone.take();
        drop(self);
        Self::start(devices, alone)
    }

    fn start(devices: u32, alone: Option<MutexGuard<'static, ()>>) -> Self {
        let host = Arc::new(FakeHost::default());
        let config = SoftConfig {
            devices,
            memory_per_device: 64 << 20,
            workers: 2,
            exact: true,
            apart: false,
            check: None,
        };
        Self { backend: start(config, &host), host, alone }
    }

    /// The context and its streams.
    pub(super) fn make_streams(&self) {
        self.backend.create_context(CTX, 0, LEGACY).unwrap();
        for (stream, blocking) in [(A, true), (B, true), (FREE, false)] {
            self.backend.create_stream(stream, CTX, blocking, 0).unwrap();
        }
    }

    /// Valid device memory at `offset` of the arena.
    pub(super) fn alloc(&self, offset: u64, size: u64) -> u64 {
        let addr = arena::device_base(0) + offset;
        self.backend.map(CTX, addr, size).unwrap();
        addr
    }

    /// A snapshot, as soon as the thread that finished the last work has let go of it.
    pub(super) fn snapshot(&self) -> Box<dyn Snapshot> {
        for _ in 0..2000 {
            if self.backend.at_rest() {
                return self.backend.snapshot(None).unwrap();
            }
            thread::sleep(Duration::from_millis(1));
        }
        panic!("the device does not come to rest");
    }

    /// Valid device memory of a device that has no slab yet.
    pub(super) fn alloc_in_new_slab(&self) -> u64 {
        self.backend.grant(0, arena::device_base(0), 2 << 20).unwrap();
        self.alloc(0, 4096)
    }

    pub(super) fn submit(&self, stream: StreamId, op: StreamOp) {
        self.backend.submit(stream, op).unwrap();
    }

    /// Holds the stream until `word` is not 0.
    pub(super) fn hold(&self, stream: StreamId, word: u64) {
        self.submit(stream, StreamOp::WaitValue { addr: word, value: 1, wide: false, mode: 0 });
    }

    /// Stores 1 at `word`, in stream order.
    pub(super) fn set(&self, stream: StreamId, word: u64) {
        self.submit(stream, StreamOp::WriteValue { addr: word, value: 1, wide: false });
    }

    pub(super) fn sync(&self, stream: StreamId) -> Result<(), CuError> {
        let (sender, receiver) = mpsc::channel();
        let done: Done = Box::new(move |result| sender.send(result).unwrap());
        self.backend.when_stream_idle(stream, done);
        wait(&receiver)
    }

    pub(super) fn sync_context(&self) -> Result<(), CuError> {
        let (sender, receiver) = mpsc::channel();
        self.backend.when_context_idle(CTX, Box::new(move |result| sender.send(result).unwrap()));
        wait(&receiver)
    }
}

/// A thread of the backend before may be about to let go of the addresses.
fn start(config: SoftConfig, host: &Arc<FakeHost>) -> Arc<SoftBackend> {
    for _ in 0..1000 {
        match SoftBackend::new(config, config.describe(), Arc::clone(host) as _) {
            Ok(backend) => return backend,
            Err(StartError::Memory(_)) => thread::sleep(Duration::from_millis(2)),
            Err(error) => panic!("{error}"),
        }
    }
    panic!("the device's addresses stay taken");
}

impl Drop for Fixture {
    /// The next test maps the same addresses, so whatever runs has to end first.
    fn drop(&mut self) {
        let _ = self.sync_context();
    }
}

/// What the host maps: the beginning of the proxy's part of the shared arena. It stays.
pub(super) fn map_shared() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let at = (arena::SHARED_BASE + arena::SHARED_CLIENT_LEN) as usize as *mut libc::c_void;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping where there is none.
        assert_eq!(unsafe { libc::mmap(at, 1 << 20, access, flags, -1, 0) }, at);
    });
}

pub(super) fn wait<T>(receiver: &Receiver<T>) -> T {
    receiver.recv_timeout(Duration::from_secs(20)).expect("the device does not answer")
}

/// The word at a device address.
pub(super) fn word(addr: u64) -> u32 {
    // SAFETY: tests pass addresses of memory that they have mapped.
    unsafe { (addr as *const u32).read_volatile() }
}

pub(super) fn mapped(addr: u64, pitch: u64, slice: u64) -> Place {
    Place::Mapped { addr, pitch, slice }
}

pub(super) fn client(bytes: &[u8], pitch: u64, slice: u64) -> Place {
    Place::Client { addr: bytes.as_ptr() as u64, pitch, slice }
}

pub(super) fn copy(src: Place, dst: Place, extent: [u64; 3]) -> StreamOp {
    let [width, height, depth] = extent;
    StreamOp::Copy { copy: Copy3d { src, dst, width, height, depth } }
}

/// This process as the client.
#[derive(Default)]
pub(super) struct FakeHost {
    pub(super) faults: Mutex<Vec<(CtxId, CuError)>>,
    pub(super) log: Mutex<Vec<String>>,
    pub(super) printed: Mutex<Vec<(OutputTarget, String)>>,
    /// Host functions that are not over yet.
    pub(super) functions: Mutex<Vec<(u64, Done)>>,
}

impl Host for FakeHost {
    fn read_client(&self, addr: u64, out: &mut [u8]) -> Result<(), CuError> {
        if addr < 4096 {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: tests pass addresses of their own buffers.
        unsafe { std::ptr::copy(addr as *const u8, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    fn write_client(&self, addr: u64, bytes: &[u8]) -> Result<(), CuError> {
        // SAFETY: tests pass addresses of their own buffers.
        unsafe { std::ptr::copy(bytes.as_ptr(), addr as *mut u8, bytes.len()) };
        Ok(())
    }

    fn host_function(&self, token: u64, done: Done) {
        self.functions.lock().unwrap().push((token, done));
    }

    fn output(&self, target: OutputTarget, bytes: &[u8]) {
        let text = String::from_utf8_lossy(bytes).into_owned();
        self.printed.lock().unwrap().push((target, text));
    }

    fn fault(&self, ctx: CtxId, error: CuError) {
        self.faults.lock().unwrap().push((ctx, error));
    }

    fn idle(&self) {}

    fn log(&self, line: &str) {
        self.log.lock().unwrap().push(line.to_owned());
    }
}
