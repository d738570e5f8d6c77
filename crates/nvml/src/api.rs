//! The exported functions, named as in nvml.h, whose reference is their contract.

#![allow(non_snake_case, reason = "the exported names are NVML's")]

use crate::state::{self, State, bus_text, parse_bus, uuid_text};
use crate::types::{Device, MEMORY_V2, Memory, MemoryV2, Number, PciInfo, Status, WORDS};
use kedge_cuda_types::attribute as a;
use kedge_protocol::DeviceInfo;
use std::ffi::{CStr, c_char, c_uint};

/// The driver release to which the software device's CUDA version belongs.
const DRIVER_VERSION: &str = "580.0";
const NVML_VERSION: &str = "13.580.0";
/// nvmlDeviceArchitecture_t: Hopper, as the compute capability says.
const HOPPER: c_uint = 9;

/// Exported functions: each body gives a `Result`, whose error is the function's return value.
macro_rules! functions {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        /// See NVML's reference.
        ///
        /// # Safety
        /// As the reference says of the arguments.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($arg: $ty),*) -> c_uint {
            // SAFETY: the caller keeps the C API's contract, which is the body's.
            #[allow(unused_unsafe, reason = "not every function has pointers")]
            let run = || -> Result<(), Status> { unsafe { $body } };
            // A panic must not reach the program.
            match std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
                Ok(Ok(())) => 0,
                Ok(Err(status)) => status.0,
                Err(_) => 999,
            }
        }
    )*};
}

/// Functions of what no software device has.
macro_rules! not_supported {
    ($($name:ident)*) => {$(
        /// Not supported: a software device has nothing of the kind.
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name() -> c_uint {
            match state::with(|_| Ok(())) {
                Ok(()) => Status::NOT_SUPPORTED.0,
                Err(status) => status.0,
            }
        }
    )*};
}

/// Writes a result where the program asked for it.
///
/// # Safety
/// `out` is NULL or valid for a write of `T`.
unsafe fn give<T>(out: *mut T, value: T) -> Result<(), Status> {
    if out.is_null() {
        return Err(Status::INVALID_ARGUMENT);
    }
    // SAFETY: not NULL, so valid, says the caller.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Writes text and a NUL where there is room for both.
///
/// # Safety
/// `out` is NULL or valid for `length` bytes.
unsafe fn give_text(out: *mut c_char, length: c_uint, text: &str) -> Result<(), Status> {
    if out.is_null() {
        return Err(Status::INVALID_ARGUMENT);
    }
    if text.len() >= length as usize {
        return Err(Status::INSUFFICIENT_SIZE);
    }
    // SAFETY: room for the text and its NUL (above).
    unsafe {
        out.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
        out.add(text.len()).write(0);
    }
    Ok(())
}

/// Text that the program passed.
///
/// # Safety
/// `text` is NULL or NUL-terminated.
unsafe fn text<'a>(text: *const c_char) -> Result<&'a str, Status> {
    if text.is_null() {
        return Err(Status::INVALID_ARGUMENT);
    }
    // SAFETY: as the caller promised.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| Status::INVALID_ARGUMENT)
}

fn info(state: &State, device: Device) -> Result<&DeviceInfo, Status> {
    let index = device.0.checked_sub(1).ok_or(Status::INVALID_ARGUMENT)?;
    state.devices.get(index).ok_or(Status::INVALID_ARGUMENT)
}

/// What `tell` says of a device.
fn of<T>(device: Device, tell: impl FnOnce(&DeviceInfo) -> T) -> Result<T, Status> {
    state::with(|state| info(state, device).map(tell))
}

fn attribute(info: &DeviceInfo, id: u32) -> Number {
    info.attributes.iter().find(|(known, _)| *known == id).map_or(0, |(_, value)| *value)
}

/// The device of which `wanted` holds.
fn find(wanted: impl Fn(&DeviceInfo) -> bool) -> Result<Device, Status> {
    let index = state::with(|state| Ok(state.devices.iter().position(wanted)))?;
    index.map(|index| Device(index + 1)).ok_or(Status::NOT_FOUND)
}

/// Each process has all of a software device for itself: what others use is not missing here.
fn memory(device: Device) -> Result<Memory, Status> {
    of(device, |info| Memory { total: info.total_memory, free: info.total_memory, used: 0 })
}

fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut out = [0; N];
    for (to, byte) in out[..N - 1].iter_mut().zip(text.bytes()) {
        *to = byte as c_char;
    }
    out
}

/// # Safety
/// `out` is NULL or valid for a write.
unsafe fn by_bus(bus: *const c_char, out: *mut Device) -> Result<(), Status> {
    // SAFETY: as the caller promised.
    unsafe {
        let pci = parse_bus(text(bus)?).ok_or(Status::INVALID_ARGUMENT)?;
        give(out, find(|info| info.pci == pci)?)
    }
}

/// # Safety
/// `out` is NULL or valid for a write.
unsafe fn by_index(index: c_uint, out: *mut Device) -> Result<(), Status> {
    let device = Device((index as usize).saturating_add(1));
    of(device, |_| ())?;
    // SAFETY: as the caller promised.
    unsafe { give(out, device) }
}

/// # Safety
/// `out` is NULL or valid for a write.
unsafe fn count(out: *mut c_uint) -> Result<(), Status> {
    let count = state::with(|state| Ok(state.devices.len() as c_uint))?;
    // SAFETY: as the caller promised.
    unsafe { give(out, count) }
}

/// # Safety
/// `out` is NULL or valid for a write.
unsafe fn cuda_version(out: *mut Number) -> Result<(), Status> {
    let version = state::with(|state| Ok(state.cuda_version as Number))?;
    // SAFETY: as the caller promised.
    unsafe { give(out, version) }
}

/// The words for a return value; they live for ever.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlErrorString(code: c_uint) -> *const c_char {
    let found = WORDS.iter().find(|(known, _)| *known == code);
    found.map_or(c"Unknown Error", |(_, words)| words).as_ptr()
}

functions! {
    fn nvmlInit() { state::init() }
    fn nvmlInit_v2() { state::init() }
    fn nvmlInitWithFlags(_flags: c_uint) { state::init() }
    fn nvmlShutdown() { state::shut_down() }
    fn nvmlSystemGetDriverVersion(out: *mut c_char, length: c_uint) {
        state::with(|_| Ok(()))?;
        give_text(out, length, DRIVER_VERSION)
    }
    fn nvmlSystemGetNVMLVersion(out: *mut c_char, length: c_uint) {
        state::with(|_| Ok(()))?;
        give_text(out, length, NVML_VERSION)
    }
    fn nvmlSystemGetCudaDriverVersion(out: *mut Number) { cuda_version(out) }
    fn nvmlSystemGetCudaDriverVersion_v2(out: *mut Number) { cuda_version(out) }
    fn nvmlDeviceGetCount(out: *mut c_uint) { count(out) }
    fn nvmlDeviceGetCount_v2(out: *mut c_uint) { count(out) }
    fn nvmlDeviceGetHandleByIndex(index: c_uint, out: *mut Device) { by_index(index, out) }
    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, out: *mut Device) { by_index(index, out) }
    fn nvmlDeviceGetHandleByPciBusId(bus: *const c_char, out: *mut Device) { by_bus(bus, out) }
    fn nvmlDeviceGetHandleByPciBusId_v2(bus: *const c_char, out: *mut Device) { by_bus(bus, out) }
    fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, out: *mut Device) {
        let wanted = text(uuid)?;
        give(out, find(|info| uuid_text(&info.uuid) == wanted)?)
    }
    fn nvmlDeviceGetIndex(device: Device, out: *mut c_uint) {
        of(device, |_| ())?;
        give(out, device.0 as c_uint - 1)
    }
    fn nvmlDeviceGetMinorNumber(device: Device, out: *mut c_uint) {
        of(device, |_| ())?;
        give(out, device.0 as c_uint - 1)
    }
    fn nvmlDeviceGetName(device: Device, out: *mut c_char, length: c_uint) {
        give_text(out, length, &of(device, |info| info.name.to_string())?)
    }
    fn nvmlDeviceGetUUID(device: Device, out: *mut c_char, length: c_uint) {
        give_text(out, length, &of(device, |info| uuid_text(&info.uuid))?)
    }
    fn nvmlDeviceGetPciInfo_v3(device: Device, out: *mut PciInfo) {
        give(out, of(device, |info| PciInfo {
            bus_id_legacy: chars(&bus_text(info, 4)),
            domain: info.pci[0] as c_uint,
            bus: info.pci[1] as c_uint,
            device: info.pci[2] as c_uint,
            pci_device_id: 0,
            pci_subsystem_id: 0,
            bus_id: chars(&bus_text(info, 8)),
        })?)
    }
    fn nvmlDeviceGetMemoryInfo(device: Device, out: *mut Memory) { give(out, memory(device)?) }
    fn nvmlDeviceGetMemoryInfo_v2(device: Device, out: *mut MemoryV2) {
        if out.is_null() {
            return Err(Status::INVALID_ARGUMENT);
        }
        if (&raw const (*out).version).read_unaligned() != MEMORY_V2 {
            return Err(Status::VERSION_MISMATCH);
        }
        let Memory { total, free, used } = memory(device)?;
        give(out, MemoryV2 { version: MEMORY_V2, total, reserved: 0, free, used })
    }
    fn nvmlDeviceGetCudaComputeCapability(
        device: Device,
        major: *mut Number,
        minor: *mut Number,
    ) {
        give(major, of(device, |info| attribute(info, a::COMPUTE_CAPABILITY_MAJOR))?)?;
        give(minor, of(device, |info| attribute(info, a::COMPUTE_CAPABILITY_MINOR))?)
    }
    fn nvmlDeviceGetArchitecture(device: Device, out: *mut c_uint) {
        give(out, of(device, |_| HOPPER)?)
    }
    fn nvmlDeviceGetComputeMode(device: Device, out: *mut c_uint) {
        give(out, of(device, |_| 0)?)
    }
    fn nvmlDeviceIsMigDeviceHandle(device: Device, out: *mut c_uint) {
        give(out, of(device, |_| 0)?)
    }
    fn nvmlDeviceGetP2PStatus(first: Device, second: Device, _index: c_uint, out: *mut c_uint) {
        of(first, |_| ())?;
        // NVML_P2P_STATUS_OK: one memory holds them all.
        give(out, of(second, |_| 0)?)
    }
}

not_supported! {
    nvmlDeviceGetAttributes_v2 nvmlDeviceGetBAR1MemoryInfo nvmlDeviceGetBoardId nvmlDeviceGetBrand
    nvmlDeviceGetClockInfo nvmlDeviceGetComputeRunningProcesses nvmlDeviceGetComputeRunningProcesses_v2
    nvmlDeviceGetComputeRunningProcesses_v3 nvmlDeviceGetCpuAffinity nvmlDeviceGetCurrPcieLinkGeneration
    nvmlDeviceGetCurrPcieLinkWidth nvmlDeviceGetCurrentClocksThrottleReasons nvmlDeviceGetDisplayActive
    nvmlDeviceGetDisplayMode nvmlDeviceGetEccMode nvmlDeviceGetEncoderUtilization
    nvmlDeviceGetEnforcedPowerLimit nvmlDeviceGetFanSpeed nvmlDeviceGetFieldValues
    nvmlDeviceGetGpuFabricInfo nvmlDeviceGetGpuFabricInfoV nvmlDeviceGetGraphicsRunningProcesses
    nvmlDeviceGetGraphicsRunningProcesses_v2 nvmlDeviceGetGraphicsRunningProcesses_v3
    nvmlDeviceGetMaxClockInfo nvmlDeviceGetMaxMigDeviceCount nvmlDeviceGetMaxPcieLinkGeneration
    nvmlDeviceGetMaxPcieLinkWidth nvmlDeviceGetMigMode nvmlDeviceGetNvLinkCapability
    nvmlDeviceGetNvLinkRemotePciInfo nvmlDeviceGetNvLinkRemotePciInfo_v2 nvmlDeviceGetNvLinkState
    nvmlDeviceGetNvLinkVersion nvmlDeviceGetPcieThroughput nvmlDeviceGetPerformanceState
    nvmlDeviceGetPersistenceMode nvmlDeviceGetPowerManagementLimit nvmlDeviceGetPowerUsage
    nvmlDeviceGetSerial nvmlDeviceGetTemperature nvmlDeviceGetTotalEccErrors
    nvmlDeviceGetTotalEnergyConsumption nvmlDeviceGetUtilizationRates nvmlDeviceGetVbiosVersion
    nvmlSystemGetConfComputeState nvmlSystemGetConfComputeSettings
}
