//! The rate of copies, beside this machine's own memcpy.

use crate::ProbeError;
use crate::device::Device;
use crate::series::{Reference, Sink};
use crate::timing::{nothing, rate, sample};

const SIZES: [(usize, &str); 5] = [
    (4 << 10, "4 KiB"),
    (64 << 10, "64 KiB"),
    (1 << 20, "1 MiB"),
    (16 << 20, "16 MiB"),
    (LARGE, "256 MiB"),
];
/// Bytes of the largest copies, whose native rate is known.
const LARGE: usize = 256 << 20;

/// What the driver itself reaches with large copies.
fn native(gib_per_second: f64) -> Reference {
    const GIB: f64 = 1.073_741_824;
    let source = "one H200, driver 580.159.04, measured 2026-11-20";
    Reference::new(gib_per_second * GIB, "native, H200", source)
}

pub(crate) fn measure(device: &Device, sink: &mut Sink<'_>) -> Result<(), ProbeError> {
    for (size, label) in SIZES {
        one_size(device, size, label, sink)?;
    }
    Ok(())
}

fn one_size(
    device: &Device,
    size: usize,
    label: &str,
    sink: &mut Sink<'_>,
) -> Result<(), ProbeError> {
    // Small copies in batches, so that reading the clock does not count.
    let batch = (1 << 20) / size.clamp(64 << 10, 1 << 20);
    let mut put = |what: &str, seconds, large: Option<f64>| {
        let row = rate(format!("{what} {label}"), "GB/s", size as f64 / 1e9, seconds);
        sink(row.reference(large.filter(|_| size == LARGE).map(native)));
    };
    // Written before they are timed: a first touch costs more than a copy.
    let (pageable, mut back) = (vec![1u8; size], vec![2u8; size]);

    let memcpy = || {
        for _ in 0..batch {
            back.copy_from_slice(std::hint::black_box(&pageable));
            std::hint::black_box(&mut back);
        }
        Ok(())
    };
    put("memcpy", sample(batch, memcpy, nothing)?, None);

    let (buffer, other) = (device.alloc(size)?, device.alloc(size)?);
    buffer.fill(0)?;
    other.fill(0)?;
    device.synchronize()?;

    let write = || (0..batch).try_for_each(|_| buffer.write(&pageable));
    put("host to device, pageable", sample(batch, write, nothing)?, Some(6.6));
    back.fill(0);
    let read = || (0..batch).try_for_each(|_| buffer.read(&mut back));
    put("device to host, pageable", sample(batch, read, nothing)?, Some(13.0));
    if back != pageable {
        let detail = format!("{label} did not come back as they were sent");
        return Err(ProbeError::Wrong { what: "copies", detail });
    }

    let mut pinned = device.pinned(size)?;
    let write = || (0..batch).try_for_each(|_| buffer.write(pinned.as_slice()));
    put("host to device, pinned", sample(batch, write, nothing)?, Some(50.7));
    let read = || (0..batch).try_for_each(|_| buffer.read(pinned.as_mut_slice()));
    put("device to host, pinned", sample(batch, read, nothing)?, Some(51.5));

    let inside = || {
        (0..batch).try_for_each(|_| buffer.copy_to(&other, size))?;
        device.synchronize()
    };
    put("device to device", sample(batch, inside, nothing)?, Some(2008.0));
    Ok(())
}
