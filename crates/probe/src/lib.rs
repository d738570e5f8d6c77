//! Small CUDA programs that need no compiler, for `kedge doctor` to start and `kedge bench` to
//! time.
//!
//! They load the driver or a runtime by name as every program does, so they run natively, or as
//! clients in a job of `kedge run`. They use none of kedge's own crates, so they measure what a
//! program gets.

mod calls;
mod copy;
mod count;
mod cpu;
mod device;
mod devices;
mod driver;
mod driver_checkpoint;
mod far;
mod heartbeat;
mod kernels;
mod loops;
mod managed;
mod model;
mod room;
mod runtime;
mod series;
mod soft;
mod timing;

pub use count::count;
pub use devices::{DeviceReport, devices};
pub use driver_checkpoint::{DriverTimes, checkpoint_by_driver};
pub use far::obey;
pub use heartbeat::{Held, beat};
pub use loops::{hold_many, hold_memory, time_loop};
pub use managed::obey_managed;
pub use model::{READS, WRITES, hold_objects, time_session, time_uses};
pub use room::{Room, rooms};
pub use runtime::{RuntimeReport, start_runtime};
pub use series::{Better, Reference, Series, Sink};

use thiserror::Error;

/// Why a probe could not run, or what it found wrong.
#[derive(Debug, Error)]
pub enum ProbeError {
    /// A library cannot be loaded; the loader's message names it.
    #[error(transparent)]
    Load(#[from] libloading::Error),
    /// A CUDA function failed.
    #[error("{function}: {} (CUDA error {code})", name.as_deref().unwrap_or("unknown error"))]
    Cuda { function: &'static str, code: i32, name: Option<String> },
    /// A kernel or a copy gave a wrong result.
    #[error("{what}: the result is wrong: {detail}")]
    Wrong { what: &'static str, detail: String },
}

/// A measurement of `kedge bench`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bench {
    /// The cost of driver calls to the application.
    Calls,
    /// The rate of copies.
    Copy,
    /// The rate at which the device executes instructions.
    Soft,
}

/// Runs a kernel on device 0 of the driver that the loader finds, and checks its result.
///
/// # Errors
/// The driver cannot be loaded, a function of it fails, or the result is wrong.
pub fn check_kernel() -> Result<(), ProbeError> {
    soft::check(&device::Device::open()?)
}

/// Measures on device 0 of the driver that the loader finds, and gives `sink` each series as it
/// ends.
///
/// # Errors
/// The driver cannot be loaded, a function of it fails, or a result is wrong.
pub fn bench(bench: Bench, sink: &mut Sink<'_>) -> Result<(), ProbeError> {
    let device = device::Device::open()?;
    match bench {
        Bench::Calls => calls::measure(&device, sink),
        Bench::Copy => copy::measure(&device, sink),
        Bench::Soft => soft::measure(&device, sink),
    }
}
