//! A client's device state in an image: `gpu-PID.kimg`. A section tells what there was, extents
//! hold the bytes of its objects.

use crate::before;
use kedge_control::sharing::{Bond, What};
use kedge_image::{ImageError, ImageFile};
use kedge_protocol::{ArrayId, CtxId, DeviceInfo, Hello, MemHandleId, Message, ModuleId, Output};
use kedge_wire::{Bytes, List, Text, wire};
use thiserror::Error;

/// The version of what follows, which begins with it. Whoever raises it has [`before`] read the
/// version before; `tests/golden.rs` has a file of each.
pub const VERSION: u32 = 5;
/// The number of the section. Those of [`HELD_SECTION`] and of places lie in the same files.
pub const SECTION: u64 = 16;
/// The number of the section that tells what is held of the devices' memory.
pub const HELD_SECTION: u64 = 17;

wire! {
    /// Everything but bytes.
    #[derive(Debug, Clone, PartialEq)]
    pub struct SavedProxy {
        pub version: u32,
        /// As `--gpu` gave it.
        pub gpu: Text<4096>,
        pub hello: Hello,
        pub driver_version: u32,
        pub client_memory: bool,
        pub devices: List<DeviceInfo, 16>,
        /// The newest message that was taken from the ring.
        pub position: u64,
        /// Contexts that are broken, and their errors.
        pub faults: List<(CtxId, u32), 65536>,
        /// What kernels have printed and the client has not taken.
        pub output: List<Output, 16>,
        /// What extents' object numbers stand for.
        pub objects: List<(u64, SavedObject), 4194304>,
        pub steps: List<SavedStep, 16777216>,
        /// The backend's own.
        pub notes: Bytes<67108864>,
        pub sharing: SavedSharing,
    }

    /// What a step of a restart does; modules' images are objects of the file, by number.
    #[derive(Debug, Clone, PartialEq)]
    pub enum SavedStep {
        Message = 1 { message: Message, result: u64 },
        Module = 2 { ctx: CtxId, module: ModuleId, image: u64 },
        Linked = 3 { ctx: CtxId, module: ModuleId, images: List<u64, 4096> },
    }

    /// What one client has together with others.
    #[derive(Debug, Clone, PartialEq, Default)]
    pub struct SavedSharing {
        /// What others call its proxy, if they do.
        pub proxy: Option<[u8; 16]>,
        /// What it shares, and the keys.
        pub lends: List<(What, [u8; 16]), 65536>,
        pub borrows: List<Bond, 65536>,
    }

    /// A run of bytes; an extent's address counts from its beginning.
    #[derive(Debug, Clone, PartialEq)]
    pub enum SavedObject {
        Memory = 1 { start: u64, bytes: u64 },
        Handle = 2 { handle: MemHandleId, start: u64, bytes: u64 },
        Array = 3 { array: ArrayId, start: u64, bytes: u64 },
        Variable = 4 { module: ModuleId, name: Text<65536>, start: u64, bytes: u64 },
        /// A module's image.
        Image = 5 { bytes: u64 },
        /// Of the arena that client and proxy share: by its offset.
        Arena = 6 { start: u64, bytes: u64 },
    }
}

impl SavedObject {
    /// Returns how many bytes it has.
    pub fn bytes(&self) -> u64 {
        match self {
            SavedObject::Memory { bytes, .. }
            | SavedObject::Handle { bytes, .. }
            | SavedObject::Array { bytes, .. }
            | SavedObject::Variable { bytes, .. }
            | SavedObject::Image { bytes }
            | SavedObject::Arena { bytes, .. } => *bytes,
        }
    }
}

/// Why a file does not tell what a client's devices held.
#[derive(Debug, Error)]
pub enum StateError {
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("the image's GPU state is damaged: {0}")]
    Damaged(&'static str),
    #[error(
        "the image's GPU state is of version {found}; this kedge knows {} and {VERSION}: restart it \
         with the kedge that wrote it",
        before::VERSION
    )]
    Unknown { found: u32 },
    #[error(
        "the image's list of places is of version {found}; this kedge knows {}: restart it with the \
         kedge that wrote it",
        crate::places::PLACES_VERSION
    )]
    UnknownPlaces { found: u32 },
}

/// Reads everything but bytes from the file of a client's devices.
///
/// # Errors
/// The file cannot be read, is damaged, or is of another version than this one and the one before.
pub fn read(file: &ImageFile) -> Result<SavedProxy, StateError> {
    decode(&file.section(SECTION)?)
}

/// Reads the section itself.
pub(crate) fn decode(section: &[u8]) -> Result<SavedProxy, StateError> {
    let version = section.first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
    let decoded = match version {
        Some(VERSION) => kedge_wire::decode(section),
        Some(before::VERSION) => before::decode(section),
        Some(found) => return Err(StateError::Unknown { found }),
        None => return Err(StateError::Damaged("it is empty")),
    };
    decoded.map_err(|_| StateError::Damaged("a section is nonsense"))
}
