//! What a program sees of its devices before it uses one.

use crate::ProbeError;
use crate::driver::{Code, Driver};
use serde::{Deserialize, Serialize};
use std::ffi::{CStr, c_char};

/// What the driver says of one device.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DeviceReport {
    pub name: String,
    pub uuid: [u8; 16],
    /// As `domain:bus:device.function`.
    pub pci_bus_id: String,
    /// Bytes.
    pub total_memory: u64,
    /// 1000 × major + 10 × minor.
    pub driver_version: i32,
    /// (CUdevice_attribute, value) of those that were asked for and are known.
    pub attributes: Vec<(u32, i32)>,
}

/// All devices of the driver that the loader finds, in its order.
pub fn devices(attributes: &[u32]) -> Result<Vec<DeviceReport>, ProbeError> {
    let driver = Driver::open()?;
    // SAFETY: the calls take numbers, or store one int into a live local.
    unsafe {
        driver.check("cuInit", (driver.init)(0))?;
        let count = int(&driver, "cuDeviceGetCount", |out| (driver.device_count)(out))?;
        (0..count).map(|index| describe(&driver, index, attributes)).collect()
    }
}

fn describe(driver: &Driver, index: i32, asked: &[u32]) -> Result<DeviceReport, ProbeError> {
    let (mut uuid, mut total_memory) = ([0; 16], 0);
    // SAFETY: every call stores into a live local of the type that it expects, and strings within
    // the length that it was told.
    unsafe {
        let device = int(driver, "cuDeviceGet", |out| (driver.device_get)(out, index))?;
        driver.check("cuDeviceGetUuid", (driver.device_uuid)(&mut uuid, device))?;
        let code = (driver.device_total_memory)(&mut total_memory, device);
        driver.check("cuDeviceTotalMem", code)?;
        let mut attributes = Vec::new();
        for &attribute in asked {
            let mut value = 0;
            // One that this driver is too old for is left out.
            if (driver.device_attribute)(&mut value, attribute as i32, device) == 0 {
                attributes.push((attribute, value));
            }
        }
        let name =
            text(driver, "cuDeviceGetName", |out, size| (driver.device_name)(out, size, device))?;
        let pci_bus_id = text(driver, "cuDeviceGetPCIBusId", |out, size| {
            (driver.device_pci_bus_id)(out, size, device)
        })?;
        let version = int(driver, "cuDriverGetVersion", |out| (driver.driver_version)(out))?;
        Ok(DeviceReport {
            name,
            uuid,
            pci_bus_id,
            total_memory: total_memory as u64,
            driver_version: version,
            attributes,
        })
    }
}

fn int(
    driver: &Driver,
    function: &'static str,
    get: impl FnOnce(*mut i32) -> Code,
) -> Result<i32, ProbeError> {
    let mut value = 0;
    driver.check(function, get(&mut value))?;
    Ok(value)
}

/// A string that `get` stores, given the room for it.
fn text(
    driver: &Driver,
    function: &'static str,
    get: impl FnOnce(*mut c_char, i32) -> Code,
) -> Result<String, ProbeError> {
    let mut bytes = [0u8; 256];
    driver.check(function, get(bytes.as_mut_ptr().cast(), bytes.len() as i32))?;
    let text = CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned());
    Ok(text.unwrap_or_default())
}
