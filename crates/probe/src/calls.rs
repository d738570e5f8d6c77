//! What driver calls cost the application.

use crate::ProbeError;
use crate::cpu;
use crate::device::Device;
use crate::kernels;
use crate::timing::{Sink, microseconds, nothing, sample, series};
use std::time::Duration;

/// Few enough that the ring never fills, so that a post does not wait for the device.
const POSTS: usize = 64;
const LOCAL: usize = 2000;
/// Long enough that whatever spins after the last call has gone to sleep.
const SETTLE: Duration = Duration::from_millis(500);
const IDLE: Duration = Duration::from_secs(3);

pub(crate) fn measure(device: &Device, sink: &mut Sink<'_>) -> Result<(), ProbeError> {
    let null = device.kernel(kernels::NULL, "null")?;
    let launch = || device.launch(null, [1, 1], [32, 1], &[]);
    let settle = || device.synchronize();

    let seconds = sample(POSTS, || (0..POSTS).try_for_each(|_| launch()), settle)?;
    sink(microseconds("post a launch", seconds));

    let local = || (0..LOCAL).try_for_each(|_| device.current().map(drop));
    sink(microseconds("local query (cuCtxGetDevice)", sample(LOCAL, local, nothing)?));

    let asking = || (0..POSTS).try_for_each(|_| device.free_memory().map(drop));
    sink(microseconds("round trip (cuMemGetInfo)", sample(POSTS, asking, nothing)?));

    let waiting = || launch().and_then(|()| device.synchronize());
    sink(microseconds("launch and synchronize", sample(1, waiting, nothing)?));

    let idle = || (0..LOCAL).try_for_each(|_| device.synchronize());
    sink(microseconds("synchronize when idle", sample(LOCAL, idle, nothing)?));

    let event = device.event()?;
    let record = || (0..POSTS).try_for_each(|_| device.record(event));
    sink(microseconds("record an event", sample(POSTS, record, settle)?));

    let pair = || (0..POSTS).try_for_each(|_| device.alloc(1 << 20)?.free());
    sink(microseconds("allocate and free 1 MiB", sample(POSTS, pair, nothing)?));

    device.synchronize()?;
    std::thread::sleep(SETTLE);
    let shares: Vec<f64> = (0..3).filter_map(|_| cpu::idle_share(IDLE / 3)).collect();
    if !shares.is_empty() {
        sink(series("idle job, share of a core", "%", shares));
    }
    Ok(())
}
