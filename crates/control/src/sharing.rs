//! What ties the proxies of a job together, in the words of the orders and the image: device memory
//! and events of one client that others have opened. One of them owns each: it saves the bytes, and
//! at a restart the others open it again.

pub use kedge_protocol::PeerName;
use kedge_protocol::{EventId, MemHandleId};
use kedge_wire::{List, wire};

/// Shared things of one client that a checkpoint keeps; so few that the orders fit into their
/// frames.
pub const MAX_SHARES: usize = 1024;

wire! {
    /// Something that several clients can have, by what it is in one of them.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum What {
        /// By its address.
        Slab = 1 { addr: u64 },
        Handle = 2 { handle: MemHandleId },
        Event = 3 { event: EventId },
    }

    /// What tells that two clients have the same.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Identity {
        /// The name under which it was opened.
        Name = 1 { name: PeerName },
        /// Memory that is a file: a software device's.
        File = 2 { device: u64, inode: u64 },
        /// A descriptor of this proxy: of memory that only the driver can tell.
        Descriptor = 3 { number: i32 },
    }

    #[derive(Debug, Clone, PartialEq)]
    pub struct Share {
        pub what: What,
        /// The owner's: where a restart finds it. `None`: another's.
        pub name: Option<PeerName>,
        pub known: List<Identity, 16>,
    }

    /// Another's thing, and where a restart finds it.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct Bond { pub what: What, pub name: PeerName }
}
