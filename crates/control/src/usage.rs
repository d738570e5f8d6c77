//! What a client uses of its devices now: told by its proxy to whoever connects to the proxy's
//! socket in [`FOLDER`], at once and without being asked in words.

use kedge_wire::{List, Text, wire};

/// Where proxies listen: a folder in the job's.
pub const FOLDER: &str = "usage";
/// Changes with what [`Usage`] means.
pub const VERSION: u32 = 1;
/// Most devices of a client.
pub const MAX_DEVICES: usize = 16;

wire! {
    /// A device, and what of it a client has.
    #[derive(Debug, Clone, PartialEq)]
    pub struct DeviceUse {
        pub name: Text<256>,
        pub uuid: [u8; 16],
        /// Bytes that it has.
        pub size: u64,
        /// Bytes that the client has of them; `None` where that cannot be told now, or at all.
        pub used: Option<u64>,
    }

    /// What a client has asked for since its proxy began, and what it has.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Usage {
        pub version: u32,
        /// Launches of kernels; one of a graph is one.
        pub launches: u64,
        pub copies: u64,
        /// Whether what it had in its devices' memory is swapped out.
        pub swapped_out: bool,
        pub devices: List<DeviceUse, MAX_DEVICES>,
    }
}

impl Usage {
    /// Reads what a proxy has sent, without the length that goes before; `None` of another
    /// version's.
    pub fn read(bytes: &[u8]) -> Option<Usage> {
        kedge_wire::decode::<Usage>(bytes).ok().filter(|usage| usage.version == VERSION)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_read_as_it_was_sent_and_of_this_version_alone() {
        let device = DeviceUse {
            name: Text::truncated("a device".into()),
            uuid: [7; 16],
            size: 1 << 30,
            used: Some(5),
        };
        let usage = Usage {
            version: VERSION,
            launches: 1,
            copies: 2,
            swapped_out: true,
            devices: List::new(vec![device.clone(), DeviceUse { used: None, ..device }]).unwrap(),
        };
        let bytes = |usage: &Usage| {
            let mut bytes = Vec::new();
            kedge_wire::encode(usage, &mut bytes);
            bytes
        };
        let sent = bytes(&usage);
        assert_eq!(Usage::read(&sent), Some(usage.clone()));
        assert_eq!(Usage::read(&bytes(&Usage { version: VERSION + 1, ..usage })), None);
        for cut in 0..sent.len() {
            assert_eq!(Usage::read(&sent[..cut]), None, "{cut} bytes of it");
        }
    }
}
