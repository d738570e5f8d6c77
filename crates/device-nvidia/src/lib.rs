//! CUDA devices driven through the installed driver, as a [`Backend`].
//!
//! - [`driver`]: `libcuda.so.1`, opened at run time. [`devices`]: what the program is told.
//! - [`arena`], [`host_memory`]: memory at addresses of the client's choice.
//! - [`tables`]: what the client has named. [`context`], [`stream`], [`modules`], [`textures`].
//! - [`submit`]: one operation: [`launch`], [`copies`], [`staging`], [`host_call`]; [`graphs`]: many.
//! - [`waiters`]: threads that wait for the device. [`output`]: what kernels print.

mod arena;
mod backend;
mod context;
mod copies;
mod devices;
mod driver;
mod graphs;
mod host_call;
mod host_memory;
mod launch;
mod modules;
mod occupancy;
mod output;
mod staging;
mod stream;
mod submit;
mod tables;
mod tensor_maps;
mod textures;
mod waiters;

pub use arena::ArenaError;
pub use driver::DriverError;

use arena::Arena;
use driver::{Driver, check};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::CUdevice;
use kedge_device::{Done, Host};
use kedge_protocol::DeviceInfo;
use output::Capture;
use staging::Buffers;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use stream::{Busy, Stream};
use tables::Tables;
use waiters::Waiters;

/// Why the devices cannot be driven.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("{0}")]
    Driver(#[from] DriverError),
    #[error("the NVIDIA driver does not start: {0}; see `nvidia-smi` and the kernel's log")]
    Init(CuError),
    #[error("the NVIDIA driver finds no GPU; use --gpu soft, or look at CUDA_VISIBLE_DEVICES")]
    NoDevice,
    #[error("--gpu local:{0}: there is no such GPU; the driver shows {1}")]
    NoSuchDevice(u32, usize),
    #[error("{0}")]
    Arena(#[from] ArenaError),
    #[error("cannot capture what kernels print: {0}")]
    Output(io::Error),
}

/// The GPUs of one client.
pub struct NvidiaBackend {
    shared: Arc<Shared>,
    waiters: Waiters,
    infos: Vec<DeviceInfo>,
    devices: Vec<CUdevice>,
    version: u32,
    tables: Mutex<Tables>,
}

/// What waiting threads need.
struct Shared {
    driver: Arc<Driver>,
    host: Arc<dyn Host>,
    busy: Arc<Busy>,
    buffers: Buffers,
    capture: Capture,
}

impl Shared {
    /// A wait for a stream's operation `number` is over.
    fn over(&self, stream: &Stream, number: u64) {
        if stream.completed(number) {
            self.host.idle();
        }
    }

    /// A wait is over: tells of output and of a fault, and passes the result on.
    fn waited(
        &self,
        ctx: kedge_protocol::CtxId,
        result: Result<(), CuError>,
    ) -> Result<(), CuError> {
        self.capture.drain(&*self.host);
        result.inspect_err(|error| self.host.fault(ctx, *error))
    }
}

impl NvidiaBackend {
    /// Starts the driver and reserves the address map. `ordinals` picks GPUs as the driver counts
    /// them; empty: all. From now on, what is written to standard output and error goes to the
    /// client.
    ///
    /// # Errors
    /// [`StartError`], which says what is missing and what mends it.
    pub fn new(ordinals: &[u32], host: Arc<dyn Host>) -> Result<Arc<NvidiaBackend>, StartError> {
        let driver = Arc::new(Driver::open()?);
        // SAFETY: the first call, as the reference demands.
        check(unsafe { (driver.cuInit)(0) }).map_err(|error| match error {
            CuError::NO_DEVICE => StartError::NoDevice,
            error => StartError::Init(error),
        })?;
        let all = devices::all(&driver).map_err(StartError::Init)?;
        let devices = pick(&all, ordinals)?;
        let infos = devices.iter().map(|&device| devices::describe(&driver, device));
        let infos = infos.collect::<Result<Vec<_>, _>>().map_err(StartError::Init)?;
        let mut version = 0;
        // SAFETY: a live out pointer.
        check(unsafe { (driver.cuDriverGetVersion)(&mut version) }).map_err(StartError::Init)?;
        let arena = Arena::reserve(&driver, &devices)?;
        let capture = Capture::begin().map_err(StartError::Output)?;
        Ok(Arc::new(NvidiaBackend {
            tables: Mutex::new(Tables::new(&driver, arena)),
            shared: Arc::new(Shared {
                buffers: Buffers::new(&driver),
                busy: Arc::default(),
                driver,
                host,
                capture,
            }),
            waiters: Waiters::default(),
            infos,
            devices,
            version: u32::try_from(version).unwrap_or(0),
        }))
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits on a thread of its own until operation `number` of `stream` is over.
    fn wait_for_stream(&self, stream: Arc<Stream>, number: u64, done: Done) {
        let shared = Arc::clone(&self.shared);
        self.waiters.run(Box::new(move || {
            stream.wait_for_copies();
            let result = stream.ctx.enter().and_then(|()| {
                // SAFETY: a stream that lives as long as its object does.
                check(unsafe { (shared.driver.cuStreamSynchronize)(stream.raw) })
            });
            let result = shared.waited(stream.ctx.id, result);
            shared.over(&stream, number);
            done(result);
        }));
    }
}

/// The GPUs that were asked for.
fn pick(all: &[CUdevice], ordinals: &[u32]) -> Result<Vec<CUdevice>, StartError> {
    if all.is_empty() {
        return Err(StartError::NoDevice);
    }
    if ordinals.is_empty() {
        return Ok(all.to_vec());
    }
    ordinals
        .iter()
        .map(|&index| {
            let found = all.get(index as usize).copied();
            found.ok_or(StartError::NoSuchDevice(index, all.len()))
        })
        .collect()
}
