//! A device as the proxy described it.

use kedge_protocol::DeviceInfo;
use kedge_transport::ATTRIBUTE_PLACE;

/// Attribute numbers beyond this are unknown to CUDA 13.
const MAX_ATTRIBUTE: u32 = 1024;

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) uuid: [u8; 16],
    /// Domain, bus, device.
    pub(crate) pci: [i32; 3],
    /// Bytes.
    pub(crate) total_memory: u64,
    /// It checks every allocation, and its modules' variables lie in its arena.
    pub(crate) exact: bool,
    /// It sees none of the host's pages: managed memory lies in its arena.
    pub(crate) apart: bool,
    /// Where it is: see [`ATTRIBUTE_PLACE`].
    place: i32,
    attributes: Vec<Option<i32>>,
}

impl Device {
    pub(crate) fn new(info: DeviceInfo) -> Self {
        let place = info.attributes.iter().find(|(id, _)| *id == ATTRIBUTE_PLACE);
        let place = place.map_or(0, |(_, place)| *place);
        let mut attributes = Vec::new();
        for &(attribute, value) in info.attributes.iter().filter(|(a, _)| *a < MAX_ATTRIBUTE) {
            let index = attribute as usize;
            if attributes.len() <= index {
                attributes.resize(index + 1, None);
            }
            attributes[index] = Some(value);
        }
        Self {
            name: info.name.into_inner(),
            uuid: info.uuid,
            pci: info.pci,
            total_memory: info.total_memory,
            exact: info.exact,
            apart: info.apart,
            place,
            attributes,
        }
    }

    /// The value of a CUdevice_attribute, where the device has told one.
    #[inline]
    pub(crate) fn attribute(&self, attribute: u32) -> Option<i32> {
        self.attributes.get(attribute as usize).copied().flatten()
    }

    /// Whether each of the two reaches the other's memory.
    pub(crate) fn reaches(&self, other: &Device) -> bool {
        self.place == other.place
    }

    /// A limit: an attribute that is not negative, or `default`.
    pub(crate) fn limit(&self, attribute: u32, default: u32) -> u32 {
        self.attribute(attribute).and_then(|v| u32::try_from(v).ok()).unwrap_or(default)
    }
}
