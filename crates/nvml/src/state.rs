//! What the job's proxy tells of its devices: asked when the library is initialised, by a connection
//! that ends at once. The process need not use CUDA for that, and its children may ask again.

use crate::types::Status;
use kedge_protocol::{DeviceInfo, Welcome};
use kedge_transport::Client;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) devices: Vec<DeviceInfo>,
    /// As cuDriverGetVersion answers.
    pub(crate) cuda_version: u32,
    /// Calls of nvmlInit less calls of nvmlShutdown.
    users: u32,
}

fn lock() -> MutexGuard<'static, Option<State>> {
    static STATE: Mutex<Option<State>> = Mutex::new(None);
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One more user. DRIVER_NOT_LOADED where there is no job, or no device.
pub(crate) fn init() -> Result<(), Status> {
    let mut state = lock();
    match state.as_mut() {
        Some(state) => state.users += 1,
        None => *state = Some(ask().ok_or(Status::DRIVER_NOT_LOADED)?),
    }
    Ok(())
}

pub(crate) fn shut_down() -> Result<(), Status> {
    let mut state = lock();
    let users = &mut state.as_mut().ok_or(Status::UNINITIALIZED)?.users;
    *users -= 1;
    if *users == 0 {
        *state = None;
    }
    Ok(())
}

/// Answers from the state.
pub(crate) fn with<T>(answer: impl FnOnce(&State) -> Result<T, Status>) -> Result<T, Status> {
    answer(lock().as_ref().ok_or(Status::UNINITIALIZED)?)
}

fn ask() -> Option<State> {
    let socket = UnixStream::connect(std::env::var_os("KEDGE_SOCKET")?).ok()?;
    let (client, welcome) = Client::connect_bare(socket.into(), "libnvidia-ml.so.1").ok()?;
    client.end();
    let Welcome { driver_version, devices, .. } = welcome;
    Some(State { devices: devices.into_inner(), cuda_version: driver_version, users: 1 })
}

/// "GPU-6b656467-652d-736f-6674-000000000000".
pub(crate) fn uuid_text(uuid: &[u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// "00006B64:01:00.0", with a domain of `digits`.
pub(crate) fn bus_text(info: &DeviceInfo, digits: usize) -> String {
    let [domain, bus, device] = info.pci;
    format!("{domain:0digits$X}:{bus:02X}:{device:02X}.0")
}

/// Domain, bus and device of "[domain:]bus:device[.function]", in hexadecimal.
pub(crate) fn parse_bus(text: &str) -> Option<[i32; 3]> {
    let address = match text.split_once('.') {
        Some((address, "0")) => address,
        Some(_) => return None,
        None => text,
    };
    let parts: Option<Vec<i32>> =
        address.split(':').map(|part| i32::from_str_radix(part, 16).ok()).collect();
    match parts?[..] {
        [domain, bus, device] => Some([domain, bus, device]),
        [bus, device] => Some([0, bus, device]),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_as_nvml_writes_them() {
        let uuid = *b"kedge-soft\0\0\0\0\0\x01";
        assert_eq!(uuid_text(&uuid), "GPU-6b656467-652d-736f-6674-000000000001");
        assert_eq!(parse_bus("00006B64:01:00.0"), Some([0x6b64, 1, 0]));
        assert_eq!(parse_bus("6b64:1:0"), Some([0x6b64, 1, 0]));
        assert_eq!(parse_bus("01:00.0"), Some([0, 1, 0]));
        assert!(
            ["", "1", "0:1:2.1", "x:1:0", "0:1:2:3"].iter().all(|bad| parse_bus(bad).is_none())
        );
    }

    #[test]
    fn nothing_is_told_before_init_or_without_a_job() {
        assert_eq!(with(|_| Ok(())), Err(Status::UNINITIALIZED));
        assert_eq!(shut_down(), Err(Status::UNINITIALIZED));
    }
}
