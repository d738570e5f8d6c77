//! A device as the proxy described it.

use kedge_cuda_types::attribute::{CONCURRENT_MANAGED_ACCESS, DIRECT_MANAGED_MEM_ACCESS_FROM_HOST};
use kedge_protocol::DeviceInfo;
use kedge_transport::{ATTRIBUTE_FAR, ATTRIBUTE_PLACE};

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
    /// Managed memory lies in its arena, and moves by pages.
    pub(crate) pages: bool,
    /// The device can have it so, whether it is kept so or not.
    pub(crate) takes_pages: bool,
    /// Where it is: see [`ATTRIBUTE_PLACE`].
    place: i32,
    /// It is on another machine.
    pub(crate) far: bool,
    attributes: Vec<Option<i32>>,
}

impl Device {
    /// `pages`: whether managed memory is kept by pages where the device leaves that to the client.
    pub(crate) fn new(info: DeviceInfo, pages: &impl Fn() -> bool) -> Self {
        let own = |wanted| info.attributes.iter().find(|(id, _)| *id == wanted);
        let own = |wanted| own(wanted).map_or(0, |(_, value)| *value);
        let (place, far) = (own(ATTRIBUTE_PLACE), own(ATTRIBUTE_FAR) != 0);
        let mut attributes = Vec::new();
        for &(attribute, value) in info.attributes.iter().filter(|(a, _)| *a < MAX_ATTRIBUTE) {
            let index = attribute as usize;
            if attributes.len() <= index {
                attributes.resize(index + 1, None);
            }
            attributes[index] = Some(value);
        }
        let also_host = attributes.get(CONCURRENT_MANAGED_ACCESS as usize).copied().flatten();
        let pages = info.apart && (also_host.is_none_or(|told| told == 0) || pages());
        for withheld in [CONCURRENT_MANAGED_ACCESS, DIRECT_MANAGED_MEM_ACCESS_FROM_HOST] {
            // Pages cannot move while a kernel runs that may touch them.
            if let Some(told) = attributes.get_mut(withheld as usize).filter(|_| pages) {
                *told = told.map(|_| 0);
            }
        }
        Self {
            name: info.name.into_inner(),
            uuid: info.uuid,
            pci: info.pci,
            total_memory: info.total_memory,
            exact: info.exact,
            pages,
            takes_pages: info.apart,
            place,
            far,
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
