//! This process's connection to its proxy, made by cuInit.

use crate::memory::paged::{Wanted, wanted};
use crate::{entry, log};
use kedge_cuda_types::CuError;
use kedge_protocol::{Call, DeviceChoice, Post, Welcome};
use kedge_transport::{Client, ConnectError, Dead, monotonic, processors_to_spare};
use kedge_wire::{Text, Wire};
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

mod device;
mod own;
pub(crate) use device::Device;

/// What cuInit made. Lives as long as the process.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) client: Client,
    pub(crate) driver_version: u32,
    /// Whether the proxy reaches this process's private memory.
    pub(crate) client_memory: bool,
    pub(crate) devices: Vec<Device>,
}

/// How long a thread that waits for a GPU spins, where processors are many: NVIDIA's driver does so
/// until the end. Waking costs some 60 µs, which is one in a hundred of a copy that takes 5 ms.
const GPU_SPIN_TIMEOUT: Duration = Duration::from_millis(10);

const FRESH: u8 = 0;
const READY: u8 = 1;
/// A child of fork(): the ring belongs to the parent.
const FORKED: u8 = 2;

/// There where the job is traced (`kedge trace`).
const TRACED: &str = "KEDGE_TRACE_CALLS";

static PHASE: AtomicU8 = AtomicU8::new(FRESH);
static SESSION: OnceLock<Session> = OnceLock::new();
/// Why the proxy gave this process no device. Asking again would not change it.
static REFUSED: OnceLock<CuError> = OnceLock::new();

/// NOT_INITIALIZED before cuInit has succeeded in this process.
#[inline]
pub(crate) fn ready() -> Result<(), CuError> {
    if PHASE.load(Ordering::Acquire) == READY { Ok(()) } else { Err(CuError::NOT_INITIALIZED) }
}

/// As [`ready`]; DEVICE_UNAVAILABLE once the proxy is known to be gone, for calls too that would
/// not ask it.
#[inline]
pub(crate) fn alive() -> Result<(), CuError> {
    if get()?.client.is_dead() { Err(CuError::DEVICE_UNAVAILABLE) } else { Ok(()) }
}

/// The session, or NOT_INITIALIZED.
#[inline]
pub(crate) fn get() -> Result<&'static Session, CuError> {
    ready()?;
    SESSION.get().ok_or(CuError::NOT_INITIALIZED)
}

/// Connects, once. NO_DEVICE where there is no proxy; the log says why.
pub(crate) fn init() -> Result<(), CuError> {
    static CONNECTING: Mutex<()> = Mutex::new(());
    match PHASE.load(Ordering::Acquire) {
        READY => return Ok(()),
        FORKED => return Err(CuError::NOT_INITIALIZED),
        _ => {}
    }
    let _one_at_a_time = CONNECTING.lock().unwrap_or_else(PoisonError::into_inner);
    if SESSION.get().is_some() {
        return ready();
    }
    if let Ok(level) = std::env::var("KEDGE_TRACE") {
        entry::set_tracing(&level);
    }
    if let Some(refused) = REFUSED.get() {
        return Err(*refused);
    }
    let traced = std::env::var_os(TRACED).map(|_| monotonic());
    let session = connect()?;
    // SAFETY: the handler only stores to atomics and a thread-local, which is allowed after fork().
    unsafe { libc::pthread_atfork(None, None, Some(in_forked_child)) };
    if SESSION.set(session).is_ok() {
        PHASE.store(READY, Ordering::Release);
        traced.into_iter().for_each(entry::time_calls);
    }
    Ok(())
}

extern "C" fn in_forked_child() {
    PHASE.store(FORKED, Ordering::Release);
    entry::time_no_calls();
}

fn connect() -> Result<Session, CuError> {
    let program = std::env::args().next().unwrap_or_default();
    let connected = match std::env::var_os("KEDGE_SOCKET") {
        Some(socket) => Client::connect(Path::new(&socket), &program, device_choice()),
        None => {
            let proxy = own::start().map_err(|error| {
                log::line(&format!("cuInit: {error}"));
                CuError::NO_DEVICE
            })?;
            Client::connect_over(proxy, &program, device_choice())
        }
    };
    let (client, welcome) = connected.map_err(|error| match error {
        // The proxy has said it in the log.
        ConnectError::Refused { code, .. } => *REFUSED.get_or_init(|| code),
        error => {
            log::refused(&format!("cuInit: {error}"));
            CuError::NO_DEVICE
        }
    })?;
    let Welcome { driver_version, client_memory, devices } = welcome;
    if devices.is_empty() {
        log::refused("cuInit: the proxy has no device for this program");
        return Err(CuError::NO_DEVICE);
    }
    let pages = || client_memory && wanted() == Wanted::Pages;
    let devices = devices.into_inner().into_iter().map(|info| Device::new(info, &pages));
    let devices: Vec<_> = devices.collect();
    // Software devices need the processors themselves.
    if processors_to_spare() && devices.iter().all(|device| !device.exact) {
        client.set_patience(GPU_SPIN_TIMEOUT);
    }
    Ok(Session { client, driver_version, client_memory, devices })
}

/// What the environment says of devices, now that cuInit is called: a program may have set it
/// itself.
fn device_choice() -> DeviceChoice {
    let text = |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    DeviceChoice {
        visible: text("CUDA_VISIBLE_DEVICES").map(Text::truncated),
        pci_order: text("CUDA_DEVICE_ORDER").is_some_and(|order| order == "PCI_BUS_ID"),
    }
}

impl Session {
    /// Appends a one-way message. DEVICE_UNAVAILABLE when the proxy is gone.
    #[inline]
    pub(crate) fn post(&self, post: &Post) -> Result<(), CuError> {
        self.client.post(post).map_err(gone)
    }

    /// Appends `call` and waits for its reply. DEVICE_UNAVAILABLE when the proxy is gone.
    pub(crate) fn call<T: Wire>(&self, call: &Call) -> Result<T, CuError> {
        self.client.call(call).map_err(gone)
    }

    /// A call whose reply is a `Status`.
    pub(crate) fn call_status(&self, call: &Call) -> Result<(), CuError> {
        self.call::<Result<(), u32>>(call)?.map_err(CuError)
    }

    /// Calls whose replies are each a `Status`, and of which none depends on another's: what each
    /// says, in order.
    pub(crate) fn call_each(&self, calls: &[Call]) -> Result<Vec<Result<(), CuError>>, CuError> {
        let replies = self.client.call_each::<Result<(), u32>>(calls).map_err(gone)?;
        Ok(replies.into_iter().map(|status| status.map_err(CuError)).collect())
    }

    /// The device of that ordinal, or INVALID_DEVICE.
    #[inline]
    pub(crate) fn device(&self, ordinal: i32) -> Result<&Device, CuError> {
        let index = usize::try_from(ordinal).map_err(|_| CuError::INVALID_DEVICE)?;
        self.devices.get(index).ok_or(CuError::INVALID_DEVICE)
    }
}

/// What every call returns once the proxy is gone.
#[cold]
pub(crate) fn gone(_: Dead) -> CuError {
    entry::log_once("proxy gone", || {
        "the proxy is gone; CUDA calls return CUDA_ERROR_DEVICE_UNAVAILABLE from now on".to_owned()
    });
    CuError::DEVICE_UNAVAILABLE
}
