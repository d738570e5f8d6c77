//! What the program is told of a device: what the driver says, less what kedge cannot carry.

use crate::driver::{Driver, check};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::{MAX_DEVICES, Windows};
use kedge_cuda_types::attribute as a;
use kedge_cuda_types::handle::CUdevice;
use kedge_cuda_types::memory::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
use kedge_protocol::DeviceInfo;
use kedge_wire::{List, Text};
use std::ffi::{CStr, c_char, c_int};

/// Attributes that are 0 whatever the driver says: the functions that they announce are refused.
const WITHHELD: &[u32] = &[
    // Multicast can take GPUs that others use out of service.
    a::MULTICAST_SUPPORTED,
    // Handles of other nodes.
    a::HANDLE_TYPE_FABRIC_SUPPORTED,
    a::GPU_DIRECT_RDMA_SUPPORTED,
    a::GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
    a::DMA_BUF_SUPPORTED,
    // Host memory reaches the device through the shared arena alone.
    a::PAGEABLE_MEMORY_ACCESS,
    a::PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
    a::HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    a::HOST_NUMA_MEMORY_POOLS_SUPPORTED,
    a::HOST_MEMORY_POOLS_SUPPORTED,
    a::HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    a::HOST_ALLOC_DMA_BUF_SUPPORTED,
    a::READ_ONLY_HOST_REGISTER_SUPPORTED,
    a::SPARSE_CUDA_ARRAY_SUPPORTED,
    a::DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED,
    a::GENERIC_COMPRESSION_SUPPORTED,
];

/// A client's GPUs, by the windows of the address map that they have.
#[derive(Debug, Clone)]
pub(crate) struct Devices {
    raw: Vec<CUdevice>,
    windows: Windows,
}

impl Devices {
    /// As many as there are windows.
    pub(crate) fn new(raw: Vec<CUdevice>, windows: Option<Windows>) -> Devices {
        let count = u32::try_from(raw.len()).unwrap_or(u32::MAX);
        let windows = windows.filter(|windows| windows.count() == count);
        Devices { raw, windows: windows.unwrap_or(Windows::first(count)) }
    }

    pub(crate) fn windows(&self) -> Windows {
        self.windows
    }

    pub(crate) fn get(&self, window: u32) -> Option<CUdevice> {
        self.raw.get(self.windows.position(window)?).copied()
    }

    /// Returns each with its window.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, CUdevice)> {
        self.windows.iter().zip(self.raw.iter().copied())
    }
}

/// CUcomputemode.
const PROHIBITED: i32 = 2;
const EXCLUSIVE_PROCESS: i32 = 3;

/// All devices that the driver shows, as many as the address map has room for.
pub(crate) fn all(driver: &Driver) -> Result<Vec<CUdevice>, CuError> {
    let mut count = 0;
    // SAFETY: a live out pointer.
    check(unsafe { (driver.cuDeviceGetCount)(&mut count) })?;
    (0..count.clamp(0, MAX_DEVICES as i32))
        .map(|ordinal| {
            let mut device = 0;
            // SAFETY: a live out pointer.
            check(unsafe { (driver.cuDeviceGet)(&mut device, ordinal) })?;
            Ok(device)
        })
        .collect()
}

/// An attribute's value; `None` where the driver does not know it.
pub(crate) fn attribute(driver: &Driver, device: CUdevice, attribute: u32) -> Option<i32> {
    let mut value = 0;
    // SAFETY: a live out pointer.
    check(unsafe { (driver.cuDeviceGetAttribute)(&mut value, attribute, device) }).ok()?;
    Some(value)
}

/// Why a GPU takes no context, where its compute mode (CUcomputemode) is the reason.
pub(crate) fn unavailable(driver: &Driver, device: CUdevice, error: CuError) -> Option<String> {
    let mode = attribute(driver, device, a::COMPUTE_MODE)?;
    let [domain, bus, slot] = [a::PCI_DOMAIN_ID, a::PCI_BUS_ID, a::PCI_DEVICE_ID]
        .map(|id| attribute(driver, device, id).unwrap_or(0));
    mode_obstacle(mode, &format!("{domain:08x}:{bus:02x}:{slot:02x}.0"), error)
}

fn mode_obstacle(mode: i32, gpu: &str, error: CuError) -> Option<String> {
    let state = match mode {
        PROHIBITED => "takes no programs (compute mode PROHIBITED)",
        EXCLUSIVE_PROCESS if error == CuError::DEVICE_UNAVAILABLE => {
            "is in use by another process, and takes one at a time (compute mode EXCLUSIVE_PROCESS; \
             each process of a job has one of its own)"
        }
        _ => return None,
    };
    Some(format!("GPU {gpu} {state}: `sudo nvidia-smi -i {gpu} -c DEFAULT` lets it take several"))
}

/// Of an attribute that is a set of flags, those that kedge knows.
fn known_part(id: u32, value: c_int) -> c_int {
    match id {
        a::MEMPOOL_SUPPORTED_HANDLE_TYPES => {
            value & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.cast_signed()
        }
        _ => value,
    }
}

pub(crate) fn describe(driver: &Driver, device: CUdevice) -> Result<DeviceInfo, CuError> {
    let mut name = [0 as c_char; 256];
    let (mut uuid, mut total) = ([0; 16], 0);
    // SAFETY: live out pointers; the name's buffer has the length that is given, less a NUL.
    unsafe {
        check((driver.cuDeviceGetName)(name.as_mut_ptr(), 255, device))?;
        check((driver.cuDeviceGetUuid_v2)(&mut uuid, device))?;
        check((driver.cuDeviceTotalMem_v2)(&mut total, device))?;
    }
    // SAFETY: NUL-terminated: the last byte was never written.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    let known = a::ALL.iter().filter_map(|&id| {
        let value = attribute(driver, device, id)?;
        Some((id, if WITHHELD.contains(&id) { 0 } else { known_part(id, value) }))
    });
    let number = |id| attribute(driver, device, id).unwrap_or(0);
    Ok(DeviceInfo {
        name: Text::truncated(name.to_string_lossy().into_owned()),
        uuid,
        pci: [number(a::PCI_DOMAIN_ID), number(a::PCI_BUS_ID), number(a::PCI_DEVICE_ID)],
        total_memory: total as u64,
        exact: false,
        // Else its driver's managed memory is not what the client's is by pages.
        apart: number(a::CONCURRENT_MANAGED_ACCESS) != 0,
        attributes: List::new(known.collect()).unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_mode_that_excludes_is_an_obstacle() {
        let (gpu, busy) = ("00000000:17:00.0", CuError::DEVICE_UNAVAILABLE);
        let said = mode_obstacle(EXCLUSIVE_PROCESS, gpu, busy).unwrap();
        assert!(
            said.contains("another process") && said.contains("nvidia-smi -i 00000000:17:00.0")
        );
        assert!(mode_obstacle(PROHIBITED, gpu, busy).unwrap().contains("PROHIBITED"));
        assert_eq!(mode_obstacle(0, gpu, busy), None);
        assert_eq!(mode_obstacle(EXCLUSIVE_PROCESS, gpu, CuError::OUT_OF_MEMORY), None);
    }
}
