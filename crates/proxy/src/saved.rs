//! A client's device state in an image: `gpu-PID.kimg`. A section tells what there was, extents hold the
//! bytes of its objects.

use crate::bonds::SavedSharing;
use crate::record::SavedStep;
use kedge_device::{Object, Piece};
use kedge_protocol::{ArrayId, CtxId, DeviceInfo, Hello, MemHandleId, ModuleId, Output};
use kedge_wire::{Bytes, List, Text, wire};

pub(crate) const VERSION: u32 = 4;
/// The number of the section.
pub(crate) const SECTION: u64 = 16;

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
    pub(crate) fn of(piece: &Piece) -> SavedObject {
        let Piece { object, start, bytes } = piece.clone();
        match object {
            Object::Memory => SavedObject::Memory { start, bytes },
            Object::Handle(handle) => SavedObject::Handle { handle, start, bytes },
            Object::Array(array) => SavedObject::Array { array, start, bytes },
            Object::Variable { module, name } => {
                SavedObject::Variable { module, name: Text::truncated(name), start, bytes }
            }
        }
    }

    /// What the backend knows it as.
    pub(crate) fn piece(&self) -> Option<Piece> {
        let (object, start, bytes) = match self.clone() {
            SavedObject::Memory { start, bytes } => (Object::Memory, start, bytes),
            SavedObject::Handle { handle, start, bytes } => (Object::Handle(handle), start, bytes),
            SavedObject::Array { array, start, bytes } => (Object::Array(array), start, bytes),
            SavedObject::Variable { module, name, start, bytes } => {
                (Object::Variable { module, name: name.into_inner() }, start, bytes)
            }
            SavedObject::Image { .. } | SavedObject::Arena { .. } => return None,
        };
        Some(Piece { object, start, bytes })
    }

    pub(crate) fn bytes(&self) -> u64 {
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
