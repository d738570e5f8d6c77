//! Submits one stream operation to the driver.

use crate::NvidiaBackend;
use crate::driver::check;
use crate::host_call::{self, HostCall};
use crate::launch;
use crate::scatter::{self, Scatter};
use crate::seams;
use crate::staging::{self, Buffers, PrivateCopy};
use crate::stream::{Event, Stream};
use crate::tables::{Tables, arrays_of, fill};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::CUevent;
use kedge_device::Host;
use kedge_protocol::{Copy3d, CtxId, Place, Scattered, StreamOp};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// `CU_EVENT_DISABLE_TIMING`.
const UNTIMED: u32 = 2;

impl NvidiaBackend {
    /// Submits `op` to `stream`, whose context must be current.
    ///
    /// # Errors
    /// INVALID_HANDLE for an object that is not there, or what the driver returns.
    pub(crate) fn run(
        &self,
        tables: &Tables,
        stream: &Arc<Stream>,
        op: StreamOp,
    ) -> Result<(), CuError> {
        let (driver, raw) = (&*self.shared.driver, stream.raw);
        let seams = |touched: &Copy3d| tables.host_memory.seams(touched);
        match op {
            StreamOp::Launch { launch } => {
                let kernel = tables.module(launch.kernel.module)?.kernel(launch.kernel.index)?;
                launch::run(driver, kernel, &launch, raw)
            }
            StreamOp::Copy { copy } => match (copy.src, copy.dst) {
                (Place::Client { .. }, _) | (_, Place::Client { .. }) => {
                    self.private_copy(tables, stream, copy)
                }
                _ => seams::copy(driver, &copy, &tables.textures, seams, raw),
            },
            StreamOp::CopyInline { dst, bytes } => seams::bytes(driver, dst, &bytes, seams, raw),
            StreamOp::Scatter { pieces } => self.scatter(tables, stream, pieces.into_inner()),
            StreamOp::Memset { dst, pitch, value, element, width, height } => {
                let fill = fill(dst, pitch, value, element, width, height);
                seams::fill(driver, &fill, seams, raw)
            }
            StreamOp::EventRecord { event } => self.record(tables.event(event)?, stream),
            StreamOp::EventWait { event } => {
                let event = tables.event(event)?.raw;
                // SAFETY: the driver made both handles, and the tables hold them until they are
                // destroyed.
                check(unsafe { (driver.cuStreamWaitEvent)(raw, event, 0) })
            }
            StreamOp::HostFn { token } => {
                host_call::enqueue(driver, HostCall::new(&self.shared.host, token), raw)
            }
            StreamOp::GraphLaunch { exec } => {
                tables.graphs.get(&exec).ok_or(CuError::INVALID_HANDLE)?.launch(stream)
            }
            // SAFETY: the driver made the stream, and checks the address.
            StreamOp::WriteValue { addr, value, wide } => check(unsafe {
                match wide {
                    true => (driver.cuStreamWriteValue64_v2)(raw, addr, value, 0),
                    false => (driver.cuStreamWriteValue32_v2)(raw, addr, value as u32, 0),
                }
            }),
            // SAFETY: the driver made the stream, and checks the address.
            StreamOp::WaitValue { addr, value, wide, mode } => check(unsafe {
                match wide {
                    true => (driver.cuStreamWaitValue64_v2)(raw, addr, value, mode),
                    false => (driver.cuStreamWaitValue32_v2)(raw, addr, value as u32, mode),
                }
            }),
            StreamOp::Conditional { .. } | StreamOp::SetCondition { .. } => {
                Err(CuError::NOT_SUPPORTED)
            }
            StreamOp::Empty {} => Ok(()),
            StreamOp::MemAlloc { .. } => self.note_allocation(stream.ctx.id, &op),
            StreamOp::MemFree { addr, size } if self.checks_allocations() => {
                self.allocations().cut(addr, size)
            }
            StreamOp::MemFree { .. } => Ok(()),
        }
    }

    /// Notes memory that `op` allocates, if every allocation of the client is checked
    /// (`DeviceInfo::exact`).
    ///
    /// # Errors
    /// The memory cannot be noted.
    pub(crate) fn note_allocation(&self, ctx: CtxId, op: &StreamOp) -> Result<(), CuError> {
        match *op {
            StreamOp::MemAlloc { addr, size } if self.checks_allocations() => {
                self.allocations().add(ctx, addr, size)
            }
            _ => Ok(()),
        }
    }

    fn checks_allocations(&self) -> bool {
        self.exact.load(Ordering::Relaxed)
    }

    /// Records `event` in `stream`.
    fn record(&self, event: &Event, stream: &Arc<Stream>) -> Result<(), CuError> {
        // SAFETY: the driver made both handles, and the tables hold them until they are destroyed.
        check(unsafe { (self.shared.driver.cuEventRecord)(event.raw, stream.raw) })?;
        // The operation that is being submitted has the next number.
        event.record(stream, stream.next_number());
        Ok(())
    }

    /// Submits a copy from or to the client's private memory; a thread of its own makes it.
    fn private_copy(
        &self,
        tables: &Tables,
        stream: &Arc<Stream>,
        copy: Copy3d,
    ) -> Result<(), CuError> {
        let arrays = arrays_of(&copy, &tables.textures)?;
        let seams = tables.host_memory.seams(&copy);
        let copy = PrivateCopy { copy, arrays, seams, stream: Arc::clone(stream) };
        self.beside(stream, move |reached, buffers, host| {
            staging::run(&copy, reached, buffers, host)
        })
    }

    /// Submits copies that are too many to be made one by one.
    fn scatter(
        &self,
        tables: &Tables,
        stream: &Arc<Stream>,
        pieces: Vec<Scattered>,
    ) -> Result<(), CuError> {
        let seams = |touched: &Copy3d| tables.host_memory.seams(touched);
        // A kernel that gathers the pieces would queue behind running kernels, one of which may be
        // waiting for the program.
        let busy = &self.shared.busy;
        let alone = busy.none() || busy.one() && stream.pending().is_some();
        let gather = self.shared.digester.gatherer(stream.ctx.id).filter(|_| alone);
        let scatter = Scatter::new(pieces, seams, stream, gather)?;
        self.beside(stream, move |reached, buffers, host| {
            scatter::run(&scatter, reached, buffers, host)
        })
    }

    /// Runs `copy` on a thread of its own, with an event that is reached once everything submitted
    /// to the stream before is over.
    fn beside(
        &self,
        stream: &Arc<Stream>,
        copy: impl FnOnce(CUevent, &Buffers, &dyn Host) -> Result<(), CuError> + Send + 'static,
    ) -> Result<(), CuError> {
        let driver = &self.shared.driver;
        let mut reached = CUevent::NULL;
        // SAFETY: `reached` outlives the call, which writes the new event there.
        check(unsafe { (driver.cuEventCreate)(&mut reached, UNTIMED) })?;
        // SAFETY: the event was made above and the stream is the driver's. If recording fails,
        // nothing refers to the event, and it is destroyed once.
        check(unsafe { (driver.cuEventRecord)(reached, stream.raw) }).inspect_err(|_| unsafe {
            (driver.cuEventDestroy_v2)(reached);
        })?;
        let (shared, stream) = (Arc::clone(&self.shared), Arc::clone(stream));
        stream.copy_begins();
        self.waiters.run(Box::new(move || {
            let result = copy(reached, &shared.buffers, &*shared.host);
            // SAFETY: the event was made above, nothing else refers to it, and it is destroyed
            // once.
            unsafe { (shared.driver.cuEventDestroy_v2)(reached) };
            if let Err(error) = result {
                shared.host.fault(stream.ctx.id, error);
            }
            stream.copy_ends();
        }));
        Ok(())
    }
}
