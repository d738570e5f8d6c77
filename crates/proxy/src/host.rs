//! This process, as its backend sees it.

use crate::account::Account;
use crate::client_memory;
use crate::counts::Counts;
use crate::faults::Faults;
use crate::findings;
use crate::host_fns::HostFns;
use crate::outlet::{Outlet, PrivateMemory};
use crate::output::OutputBuffer;
use crate::tickets::Tickets;
use crate::trace;
use kedge_control::joblog::{DEVICE, JobLog};
use kedge_control::{fault, warn};
use kedge_cuda_types::CuError;
use kedge_device::trace::Tracer;
use kedge_device::{Backend, Done, Findings, Host};
use kedge_protocol::{CtxId, Output, OutputTarget};
use kedge_transport::{Announcement, processors_to_spare};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

pub(crate) struct ProxyHost {
    pub(crate) outlet: Box<dyn Outlet>,
    pub(crate) log: Arc<JobLog>,
    pub(crate) faults: Faults,
    pub(crate) host_fns: HostFns,
    pub(crate) tickets: Tickets,
    /// Calls that are answered when a device says so.
    pub(crate) waiting: AtomicUsize,
    /// The gate is closed: whatever the dispatcher's thread does, a checkpoint waits for it.
    pub(crate) parked: AtomicBool,
    /// What the client uses of its devices.
    pub(crate) counts: Counts,
    memory: Box<dyn PrivateMemory>,
    output: Mutex<OutputBuffer>,
    /// Sequence number of the newest message whose backend call has returned.
    dispatched: AtomicU64,
    backend: OnceLock<Weak<dyn Backend>>,
    /// Where the job's keeper answers.
    keeper: Option<PathBuf>,
    /// The folder where what is found in the program is told.
    findings: Option<PathBuf>,
    /// What a server's tenant has of it.
    pub(crate) account: Option<Arc<Account>>,
}

impl ProxyHost {
    pub(crate) fn new(
        outlet: impl Outlet + 'static,
        memory: impl PrivateMemory + 'static,
        log: Arc<JobLog>,
        keeper: Option<PathBuf>,
    ) -> ProxyHost {
        ProxyHost {
            outlet: Box::new(outlet),
            log,
            memory: Box::new(memory),
            faults: Faults::default(),
            host_fns: HostFns::default(),
            tickets: Tickets::default(),
            waiting: AtomicUsize::new(0),
            parked: AtomicBool::new(false),
            counts: Counts::default(),
            output: Mutex::default(),
            dispatched: AtomicU64::new(0),
            backend: OnceLock::new(),
            keeper,
            findings: None,
            account: None,
        }
    }

    /// The same, with what is found in the program told in a folder.
    pub(crate) fn with_findings(self, findings: Option<PathBuf>) -> ProxyHost {
        ProxyHost { findings, ..self }
    }

    /// The same, for a session of a server's tenant.
    pub(crate) fn with_account(self, account: Arc<Account>) -> ProxyHost {
        ProxyHost { account: Some(account), ..self }
    }

    /// The job's.
    pub(crate) fn folder(&self) -> Option<PathBuf> {
        self.keeper.as_deref().and_then(Path::parent).map(Path::to_owned)
    }

    /// Tells the host whom it hosts; once.
    pub(crate) fn set_backend(&self, backend: &Arc<dyn Backend>) {
        let _ = self.backend.set(Arc::downgrade(backend));
    }

    /// The backend has taken everything up to message `seq`.
    pub(crate) fn set_dispatched(&self, seq: u64) {
        self.dispatched.store(seq, Ordering::Release);
    }

    /// Tells the client how far everything is complete, if the device is idle. `dispatched` is read
    /// before the device is asked: what it counts was submitted by then, so an idle device has
    /// finished it, whatever is submitted meanwhile.
    pub(crate) fn publish_progress(&self) {
        let dispatched = self.dispatched.load(Ordering::Acquire);
        if self.backend.get().and_then(Weak::upgrade).is_some_and(|b| b.is_idle()) {
            self.outlet.set_completed(dispatched);
        }
    }

    pub(crate) fn take_output(&self) -> Output {
        let mut output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = output.take();
        self.outlet.set_output_pending(!output.is_empty());
        taken
    }

    /// The client is this process from now on.
    pub(crate) fn client_is(&self, pid: u32) {
        self.memory.belongs_to(pid);
    }

    /// The client has ended: its devices tell what they can only tell by now.
    pub(crate) fn conclude(&self) {
        if let Some(backend) = self.backend.get().and_then(Weak::upgrade) {
            backend.conclude();
        }
    }

    /// What the client has not taken of the output.
    pub(crate) fn copy_output(&self) -> Vec<Output> {
        let output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        let mut copy = output.clone();
        let mut all = Vec::new();
        while !copy.is_empty() {
            all.push(copy.take());
        }
        all
    }

    /// Bytes that the client points at, in its private memory or in the shared arena.
    pub(crate) fn read_bytes(&self, addr: u64, len: usize) -> Result<Vec<u8>, CuError> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).map_err(|_| CuError::OUT_OF_MEMORY)?;
        bytes.resize(len, 0);
        if client_memory::in_shared_arena(addr, len as u64) {
            client_memory::read_shared(addr, &mut bytes)?;
        } else {
            self.memory.read(addr, &mut bytes)?;
        }
        Ok(bytes)
    }
}

impl ProxyHost {
    /// What the client has said on its socket; `false` where that breaks the rules.
    pub(crate) fn heard(&self, announcement: Announcement) -> bool {
        match announcement {
            Announcement::Returned(token) => self.host_function_done(token),
            Announcement::Descriptor(ticket, fd) => self.tickets.put(ticket, fd),
            Announcement::Nonsense => false,
        }
    }

    /// Asks the client to run what waits for room in its queue.
    pub(crate) fn ask_waiting(&self) {
        self.host_fns.ask_waiting(&*self.outlet);
    }

    /// The client has run host function `token`; `false` where it was not asked to.
    pub(crate) fn host_function_done(&self, token: u64) -> bool {
        let done = self.host_fns.done(&*self.outlet, token);
        done.map(|done| done(Ok(()))).is_some()
    }
}

impl Host for ProxyHost {
    fn read_client(&self, addr: u64, out: &mut [u8]) -> Result<(), CuError> {
        self.memory.read(addr, out)
    }

    fn read_client_parts(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), CuError> {
        self.memory.read_parts(parts)
    }

    fn write_client(&self, addr: u64, bytes: &[u8]) -> Result<(), CuError> {
        self.memory.write(addr, bytes)
    }

    fn host_function(&self, token: u64, done: Done) {
        self.host_fns.ask(&*self.outlet, token, done);
    }

    fn output(&self, target: OutputTarget, bytes: &[u8]) {
        let mut output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        if !output.append(target, bytes) {
            warn!(
                self.log,
                "device output exceeds its buffer before the program synchronised: cut"
            );
        }
        self.outlet.set_output_pending(!output.is_empty());
    }

    fn fault(&self, ctx: CtxId, error: CuError) {
        if self.faults.set(&*self.outlet, ctx, error) {
            fault!(self.log, "context {} is broken from now on: {error}", ctx.0);
        }
    }

    fn fault_by(&self, ctx: CtxId, error: CuError, what: &str) {
        // Logged before the client is told, which may end at once.
        fault!(self.log, "context {}: {error}: {what}", ctx.0);
        self.faults.set(&*self.outlet, ctx, error);
    }

    fn idle(&self) {
        self.publish_progress();
    }

    fn may_spin(&self) -> bool {
        processors_to_spare() && !self.parked.load(Ordering::Relaxed) && !self.outlet.wants_reader()
    }

    fn log(&self, line: &str) {
        warn!(target: DEVICE, self.log, "{line}");
    }

    fn found(&self, found: &Findings) {
        let Some(folder) = &self.findings else { return };
        if let Err(error) = findings::report(found).write(folder) {
            warn!(self.log, "{}: findings are lost: {error}", folder.display());
        }
    }

    fn tracer(&self) -> Option<Arc<dyn Tracer>> {
        trace::tracer()
    }

    fn release_held(&self) -> bool {
        let Some(keeper) = &self.keeper else { return false };
        match kedge_control::keeper::release(keeper) {
            Ok((on_devices, _)) => on_devices > 0,
            Err(error) => {
                warn!(self.log, "cannot have device memory that is held: {error}");
                false
            }
        }
    }
}
