//! A backend without a device, for the dispatcher's tests: one executor thread, one queue.

use kedge_cuda_types::CuError;
use kedge_device::{Backend, Code, Done, EventShare, Host, Interprocess, Query};
use kedge_protocol::*;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

enum Work {
    Op(StreamOp),
    Done(Done),
}

pub(crate) struct Fake {
    queue: Mutex<Sender<Work>>,
    unfinished: Arc<AtomicU64>,
    /// Operations that have run.
    pub(crate) ran: Arc<AtomicU64>,
    /// How often it was asked whether it rests.
    pub(crate) asked_at_rest: AtomicU64,
}

/// What the fake does: `Memset` faults context 1 with the code in `value`, `WriteValue` prints
/// `value` bytes, `HostFn` runs in the client, the rest takes a moment.
fn execute(queue: &Receiver<Work>, host: &dyn Host, unfinished: &AtomicU64, ran: &AtomicU64) {
    while let Ok(work) = queue.recv() {
        match work {
            Work::Done(done) => {
                done(Ok(()));
                continue;
            }
            Work::Op(StreamOp::Memset { value, .. }) => host.fault(CtxId(1), CuError(value)),
            Work::Op(StreamOp::WriteValue { value, .. }) => {
                host.output(OutputTarget::Stdout {}, &vec![b'o'; value as usize]);
            }
            Work::Op(StreamOp::HostFn { token }) => {
                let (sender, receiver) = channel();
                host.host_function(token, Box::new(move |_| sender.send(()).unwrap()));
                receiver.recv().unwrap();
            }
            Work::Op(_) => (0..200).for_each(|_| std::hint::spin_loop()),
        }
        ran.fetch_add(1, Ordering::SeqCst);
        if unfinished.fetch_sub(1, Ordering::SeqCst) == 1 {
            host.idle();
        }
    }
}

impl Fake {
    pub(crate) fn new(host: Arc<dyn Host>) -> Arc<Fake> {
        let (sender, receiver) = channel();
        let (unfinished, ran) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let (count, done) = (unfinished.clone(), ran.clone());
        std::thread::spawn(move || execute(&receiver, &*host, &count, &done));
        Arc::new(Fake {
            queue: Mutex::new(sender),
            unfinished,
            ran,
            asked_at_rest: AtomicU64::new(0),
        })
    }

    /// A fake that executes nothing.
    pub(crate) fn idle() -> Arc<Fake> {
        let (queue, unfinished, ran) = (Mutex::new(channel().0), Arc::default(), Arc::default());
        Arc::new(Fake { queue, unfinished, ran, asked_at_rest: AtomicU64::new(0) })
    }

    fn push(&self, work: Work) {
        self.queue.lock().unwrap().send(work).unwrap();
    }
}

const NO: CuError = CuError::NOT_SUPPORTED;

impl Backend for Fake {
    fn devices(&self) -> Vec<DeviceInfo> {
        Vec::new()
    }
    fn driver_version(&self) -> u32 {
        13000
    }
    fn create_context(&self, _: CtxId, device: u32, _: StreamId) -> Result<(), CuError> {
        if device == 9 { Err(CuError::DEVICE_UNAVAILABLE) } else { Ok(()) }
    }
    fn destroy_context(&self, _: CtxId) -> Result<(), CuError> {
        Ok(())
    }
    fn set_limit(&self, _: CtxId, _: u32, _: u64) -> Result<(), CuError> {
        Err(CuError::UNSUPPORTED_LIMIT)
    }
    fn limit(&self, _: CtxId, _: u32) -> Result<u64, CuError> {
        Err(CuError::UNSUPPORTED_LIMIT)
    }
    fn set_kernel_attribute(&self, _: KernelRef, _: u32, _: i32) -> Result<(), CuError> {
        Err(NO)
    }
    fn occupancy(&self, _: KernelRef, _: &Occupancy) -> Result<u64, CuError> {
        Err(NO)
    }
    fn grant(&self, _: u32, _: u64, bytes: u64) -> Result<(), CuError> {
        if bytes > 100 { Err(CuError::OUT_OF_MEMORY) } else { Ok(()) }
    }
    fn give_back(&self, _: u32, _: u64, _: u64) -> Result<(), CuError> {
        Err(NO)
    }
    fn free_memory(&self, _: u32) -> Result<u64, CuError> {
        Ok(100)
    }
    fn map(&self, _: CtxId, _: u64, _: u64) -> Result<(), CuError> {
        Err(NO)
    }
    fn unmap(&self, _: u64, _: u64) -> Result<(), CuError> {
        Err(CuError::INVALID_VALUE)
    }
    fn share(&self, _: u64, size: u64) -> Result<(), CuError> {
        if size > 1 << 20 { Err(CuError::OUT_OF_MEMORY) } else { Ok(()) }
    }
    fn unshare(&self, _: u64, _: u64) -> Result<(), CuError> {
        Ok(())
    }
    fn create_handle(&self, _: MemHandleId, _: u32, _: u64, _: bool) -> Result<(), CuError> {
        Err(NO)
    }
    fn destroy_handle(&self, _: MemHandleId) -> Result<(), CuError> {
        Ok(())
    }
    fn map_handle(&self, _: MemHandleId, _: u64, _: u64, _: u64) -> Result<(), CuError> {
        Err(NO)
    }
    fn unmap_handle(&self, _: u64, _: u64) -> Result<(), CuError> {
        Err(NO)
    }
    fn set_access(&self, _: u64, _: u64, _: u32, _: u32) -> Result<(), CuError> {
        Err(NO)
    }
    fn create_array(&self, _: CtxId, _: ArrayId, _: &ArrayDesc) -> Result<(), CuError> {
        Err(CuError::OUT_OF_MEMORY)
    }
    fn create_mipmap(&self, _: CtxId, _: &[ArrayId], _: &ArrayDesc) -> Result<(), CuError> {
        Err(CuError::OUT_OF_MEMORY)
    }
    fn destroy_array(&self, _: ArrayId) -> Result<(), CuError> {
        Err(NO)
    }
    fn create_texture(&self, _: CtxId, _: &Texture) -> Result<u64, CuError> {
        Err(NO)
    }
    fn destroy_texture(&self, _: CtxId, _: u64) -> Result<(), CuError> {
        Err(NO)
    }
    /// Says how long the images are.
    fn load_module(&self, _: CtxId, _: ModuleId, code: Code<Vec<u8>>) -> Result<(), LoadError> {
        let message = format!("{:?}", code.images().iter().map(Vec::len).collect::<Vec<_>>());
        Err(LoadError { code: 218, message: kedge_wire::Text::truncated(message) })
    }
    fn kernel(&self, _: ModuleId, index: u32, name: &str) -> Result<KernelInfo, CuError> {
        if index > 0 {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(KernelInfo {
            name: kedge_wire::Text::truncated(name.to_owned()),
            params: kedge_wire::List::default(),
            registers: 1,
            shared_bytes: 0,
            local_bytes: 0,
            const_bytes: 0,
            max_threads_per_block: 0,
            required_cluster: [0; 3],
            cluster_must_be_set: false,
            ptx_version: 80,
            binary_version: 90,
            unsupported: kedge_wire::Text::default(),
        })
    }
    /// More than fit into one reply by number (module 1) or by bytes, one of them too long for any.
    fn kernel_names(&self, module: ModuleId) -> Result<Vec<String>, CuError> {
        let name = |i| match module {
            ModuleId(1) => format!("k{i}"),
            _ => format!("{i:060000}"),
        };
        let mut names: Vec<String> =
            (0..if module.0 == 1 { 10_000 } else { 40 }).map(name).collect();
        names.insert(3, "n".repeat(65_537));
        Ok(names)
    }
    fn global(&self, _: ModuleId, _: &str) -> Result<GlobalInfo, CuError> {
        Err(CuError::NOT_FOUND)
    }
    fn unload_module(&self, _: ModuleId) -> Result<(), CuError> {
        Err(NO)
    }
    fn create_stream(&self, _: StreamId, _: CtxId, _: bool, _: i32) -> Result<(), CuError> {
        Ok(())
    }
    fn destroy_stream(&self, _: StreamId) -> Result<(), CuError> {
        Ok(())
    }
    fn create_event(&self, _: EventId, _: CtxId, _: bool, _: bool) -> Result<(), CuError> {
        Ok(())
    }
    fn destroy_event(&self, _: EventId) -> Result<(), CuError> {
        Ok(())
    }
    fn submit(&self, _: StreamId, op: StreamOp) -> Result<(), CuError> {
        self.unfinished.fetch_add(1, Ordering::SeqCst);
        self.push(Work::Op(op));
        Ok(())
    }
    fn when_stream_idle(&self, _: StreamId, done: Done) {
        self.push(Work::Done(done));
    }
    fn when_context_idle(&self, _: CtxId, done: Done) {
        self.push(Work::Done(done));
    }
    fn when_event_done(&self, _: EventId, done: Done) {
        self.push(Work::Done(done));
    }
    fn query_stream(&self, _: StreamId) -> Query {
        if self.is_idle() { Ok(()) } else { Err(CuError::NOT_READY) }
    }
    fn query_event(&self, _: EventId) -> Query {
        Err(CuError::INVALID_HANDLE)
    }
    fn is_idle(&self) -> bool {
        self.unfinished.load(Ordering::SeqCst) == 0
    }
    fn at_rest(&self) -> bool {
        self.asked_at_rest.fetch_add(1, Ordering::SeqCst);
        self.is_idle()
    }
    fn elapsed_ms(&self, _: EventId, _: EventId) -> Result<f32, CuError> {
        Ok(1.5)
    }
    fn graph_begin(&self, _: GraphExecId, _: CtxId) -> Result<(), CuError> {
        Ok(())
    }
    fn graph_node(&self, _: GraphExecId, _: StreamOp) -> Result<(), CuError> {
        Err(CuError::INVALID_PTX)
    }
    fn graph_edges(&self, _: GraphExecId, _: &[(u32, u32)]) -> Result<(), CuError> {
        Err(NO)
    }
    fn graph_ready(&self, _: GraphExecId, _: bool) -> Result<(), CuError> {
        Err(NO)
    }
    fn graph_update(&self, _: GraphExecId, _: u32, _: StreamOp) -> Result<(), CuError> {
        Err(NO)
    }
    fn graph_destroy(&self, _: GraphExecId) -> Result<(), CuError> {
        Err(NO)
    }
    fn interprocess(&self) -> Option<&dyn Interprocess> {
        Some(self)
    }
}

impl Interprocess for Fake {
    /// The same for all handles.
    fn export_handle(&self, _: MemHandleId) -> Result<OwnedFd, CuError> {
        Ok(File::open("/dev/null").map_err(|_| NO)?.into())
    }
    /// Its size: that of the file.
    fn import_handle(&self, _: MemHandleId, fd: OwnedFd) -> Result<Imported, CuError> {
        let size = File::from(fd).metadata().map_err(|_| NO)?.len();
        Ok(Imported { device: Some(0), size: Some(size) })
    }
    fn adopt_handle(&self, _: MemHandleId, _: u32, _: u64) -> Result<(), CuError> {
        Err(NO)
    }
    fn export_slab(&self, _: u64) -> Result<(OwnedFd, u64, u64), CuError> {
        Err(NO)
    }
    fn export_event(&self, _: EventId) -> Result<EventShare, CuError> {
        Err(NO)
    }
    fn import_event(&self, _: EventId, _: CtxId, _: EventShare) -> Result<(), CuError> {
        Err(NO)
    }
}
