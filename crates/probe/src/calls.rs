//! What driver calls cost the application.

use crate::ProbeError;
use crate::cpu;
use crate::device::Device;
use crate::kernels;
use crate::series::{Reference, Series, Sink};
use crate::timing::{microseconds, nothing, sample};
use std::time::Duration;

/// Few enough that the ring never fills, so that a post does not wait for the device.
const POSTS: usize = 64;
const LOCAL: usize = 2000;
/// Long enough that whatever spins after the last call has gone to sleep.
const SETTLE: Duration = Duration::from_millis(500);
const IDLE: Duration = Duration::from_secs(3);

/// What a program gets of the driver itself.
const fn native(microseconds: f64) -> Reference {
    let source = "one H200, driver 580.159.04, measured 2026-11-20";
    Reference::new(microseconds, "native, H200", source)
}

/// The same, measured beside another remote driver.
const fn native_beside_lupine(microseconds: f64) -> Reference {
    let source = "natively beside LUPINE 7fbd364 on an H200, measured 2026-11-20";
    Reference::new(microseconds, "native, H200", source)
}

/// The floor of any call that another process answers.
const ROUND_TRIP: Reference = Reference::new(
    0.43,
    "bare shared-memory round trip",
    "two processes spinning on 2 cores, 2026-11-20",
);

pub(crate) fn measure(device: &Device, sink: &mut Sink<'_>) -> Result<(), ProbeError> {
    let null = device.kernel(kernels::NULL, "null")?;
    let launch = || device.launch(null, [1, 1], [32, 1], &[]);
    let settle = || device.synchronize();

    let seconds = sample(POSTS, || (0..POSTS).try_for_each(|_| launch()), settle)?;
    sink(microseconds("post a launch", seconds).target(0.3).reference(native(3.76)));

    let local = || (0..LOCAL).try_for_each(|_| device.current().map(drop));
    let row = microseconds("local query (cuCtxGetDevice)", sample(LOCAL, local, nothing)?);
    sink(row.target(0.1).reference(native(0.022)));

    let asking = || (0..POSTS).try_for_each(|_| device.free_memory().map(drop));
    let row = microseconds("round trip (cuMemGetInfo)", sample(POSTS, asking, nothing)?);
    sink(row.target(3.0).reference(ROUND_TRIP));

    let waiting = || launch().and_then(|()| device.synchronize());
    let row = microseconds("launch and synchronize", sample(1, waiting, nothing)?);
    sink(row.reference(native(8.9)));

    let idle = || (0..LOCAL).try_for_each(|_| device.synchronize());
    let row = microseconds("synchronize when idle", sample(LOCAL, idle, nothing)?);
    sink(row.reference(native_beside_lupine(0.5)));

    let event = device.event()?;
    let record = || (0..POSTS).try_for_each(|_| device.record(event));
    let row = microseconds("record an event", sample(POSTS, record, settle)?);
    sink(row.reference(native_beside_lupine(0.35)));

    let pair = || (0..POSTS).try_for_each(|_| device.alloc(1 << 20)?.free());
    let row = microseconds("allocate and free 1 MiB", sample(POSTS, pair, nothing)?);
    sink(row.reference(native_beside_lupine(3.0)));

    device.synchronize()?;
    std::thread::sleep(SETTLE);
    let shares: Vec<f64> = (0..3).filter_map(|_| cpu::idle_share(IDLE / 3)).collect();
    if !shares.is_empty() {
        sink(Series::lower("idle job, share of a core", "%", shares).target(1.0));
    }
    Ok(())
}
