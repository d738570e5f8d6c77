//! The version before this one: its devices do not say whether they stand apart, and none does.

use crate::saved::{self, SavedProxy};
use kedge_protocol::DeviceInfo;
use kedge_wire::{List, Reader, Text, Wire, WireError, wire};

pub(crate) const VERSION: u32 = 4;

wire! {
    /// What [`DeviceInfo`] was.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Device {
        pub name: Text<256>,
        pub uuid: [u8; 16],
        pub pci: [i32; 3],
        pub total_memory: u64,
        pub exact: bool,
        pub attributes: List<(u32, i32), 512>,
    }
}

impl From<Device> for DeviceInfo {
    fn from(device: Device) -> DeviceInfo {
        let Device { name, uuid, pci, total_memory, exact, attributes } = device;
        DeviceInfo { name, uuid, pci, total_memory, exact, apart: false, attributes }
    }
}

/// Decodes a section of that version, as one of this.
pub(crate) fn decode(section: &[u8]) -> Result<SavedProxy, WireError> {
    let mut reader = Reader::new(section);
    let r = &mut reader;
    let _version = u32::get(r)?;
    // Fields are encoded in their order, and these expressions are evaluated in it.
    let saved = SavedProxy {
        version: saved::VERSION,
        gpu: Wire::get(r)?,
        hello: Wire::get(r)?,
        driver_version: Wire::get(r)?,
        client_memory: Wire::get(r)?,
        devices: devices(r)?,
        position: Wire::get(r)?,
        faults: Wire::get(r)?,
        output: Wire::get(r)?,
        objects: Wire::get(r)?,
        steps: Wire::get(r)?,
        notes: Wire::get(r)?,
        sharing: Wire::get(r)?,
    };
    reader.finish()?;
    Ok(saved)
}

fn devices(r: &mut Reader<'_>) -> Result<List<DeviceInfo, 16>, WireError> {
    let devices = List::<Device, 16>::get(r)?.into_inner();
    let devices = devices.into_iter().map(DeviceInfo::from).collect();
    List::new(devices).map_err(|_| WireError::Invalid { what: "devices" })
}
