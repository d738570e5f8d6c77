//! The handshake: who the client is, and what devices it gets.

use kedge_wire::{List, Text, wire};

/// Changes with every incompatible change of a message.
pub const PROTOCOL_VERSION: u32 = 9;

wire! {
    /// The client's first message, sent over the socket together with the descriptors of the ring
    /// and of the shared arena.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Hello {
        pub version: u32,
        pub pid: u32,
        /// A word in the client's memory and its value: the proxy reads it to learn whether
        /// process_vm_readv works here.
        pub probe_addr: u64,
        pub probe_value: u64,
        /// The program's name, for logs.
        pub program: Text<4096>,
        pub choice: DeviceChoice,
    }

    /// Which of the job's devices this client wants to see, and in which order: what its
    /// environment says as it calls cuInit. The proxy applies it, so that device numbers mean the
    /// same on both sides.
    #[derive(Debug, Clone, PartialEq, Eq, Default)]
    pub struct DeviceChoice {
        /// CUDA_VISIBLE_DEVICES; `None`: all.
        pub visible: Option<Text<4096>>,
        /// CUDA_DEVICE_ORDER is PCI_BUS_ID.
        pub pci_order: bool,
    }

    /// A device as the program sees it.
    #[derive(Debug, Clone, PartialEq)]
    pub struct DeviceInfo {
        pub name: Text<256>,
        pub uuid: [u8; 16],
        pub pci: [i32; 3],
        /// Bytes of device memory.
        pub total_memory: u64,
        /// Every allocation is checked: the device is told of each (`Post::MemAlloc`, `MemFree`),
        /// and its modules' variables lie in its arena. Else memory is valid a slab at a time, and
        /// variables lie where the driver puts them.
        pub exact: bool,
        /// Managed memory can lie in its arena, while the client keeps pages of its own at the same
        /// addresses. Where the device says CONCURRENT_MANAGED_ACCESS it can be the shared arena's
        /// as well, and the client decides; else the device sees none of the host's pages.
        pub apart: bool,
        /// (CUdevice_attribute, value).
        pub attributes: List<(u32, i32), 512>,
    }

    /// The proxy's answer to `Hello`: `Result<Welcome, Refusal>`.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Welcome {
        /// What cuDriverGetVersion answers, such as 13000.
        pub driver_version: u32,
        /// Whether `Place::Client` works; where not, the client stages through the shared arena.
        pub client_memory: bool,
        pub devices: List<DeviceInfo, 16>,
    }

    /// The proxy's answer where it has no device for the client.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Refusal {
        /// The CUresult of cuInit.
        pub code: u32,
        /// What is wrong and what mends it, as the job's log has it.
        pub reason: Text<4096>,
    }
}

impl DeviceInfo {
    /// Parses domain, bus and device of "[domain:]bus:device[.0]", in hexadecimal.
    pub fn parse_pci(text: &str) -> Option<[i32; 3]> {
        let address = match text.split_once('.') {
            Some((address, "0")) => address,
            Some(_) => return None,
            None => text,
        };
        let numbers: Option<Vec<i32>> =
            address.split(':').map(|part| i32::from_str_radix(part, 16).ok()).collect();
        match numbers?[..] {
            [domain, bus, device] => Some([domain, bus, device]),
            [bus, device] => Some([0, bus, device]),
            _ => None,
        }
    }
}
