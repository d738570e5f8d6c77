//! Memory and events that several clients share.

use kedge_wire::wire;

wire! {
    /// Where another client's proxy can be asked for what its client shares, and the key that it
    /// wants to see: 128 random bits each.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub struct PeerName { pub proxy: [u8; 16], pub key: [u8; 16] }

    /// Device memory that other clients can open: the slab [base, base+size).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct SharedSlab { pub name: PeerName, pub base: u64, pub size: u64 }

    /// Memory of another process.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Imported {
        /// The device on which it lies, as this client counts; `None` if that is not one of its
        /// own.
        pub device: Option<u32>,
        /// Bytes; `None` where the driver does not tell, and checks every mapping itself.
        pub size: Option<u64>,
    }
}
