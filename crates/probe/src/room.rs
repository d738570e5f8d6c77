//! How much of each device nobody has.

use crate::ProbeError;
use crate::driver::Driver;
use serde::{Deserialize, Serialize};
use std::ptr::null_mut;

/// A device's memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    pub free: u64,
    pub total: u64,
}

/// The memory of all devices of the driver that the loader finds, with a context on each.
///
/// # Errors
/// What the driver said.
pub fn rooms() -> Result<Vec<Room>, ProbeError> {
    let driver = Driver::open()?;
    let mut count = 0;
    // SAFETY: cuInit takes a number, and cuDeviceGetCount stores one int into a live local.
    unsafe {
        driver.check("cuInit", (driver.init)(0))?;
        driver.check("cuDeviceGetCount", (driver.device_count)(&mut count))?;
    }
    (0..count).map(|index| room(&driver, index)).collect()
}

fn room(driver: &Driver, index: i32) -> Result<Room, ProbeError> {
    let (mut device, mut context) = (0, null_mut());
    let (mut free, mut total) = (0_usize, 0_usize);
    // SAFETY: the calls store into live locals; the context lasts as long as the process.
    unsafe {
        driver.check("cuDeviceGet", (driver.device_get)(&mut device, index))?;
        let code = (driver.primary_retain)(&mut context, device);
        driver.check("cuDevicePrimaryCtxRetain", code)?;
        driver.check("cuCtxSetCurrent", (driver.ctx_set_current)(context))?;
        driver.check("cuMemGetInfo", (driver.mem_get_info)(&mut free, &mut total))?;
    }
    Ok(Room { free: free as u64, total: total as u64 })
}
