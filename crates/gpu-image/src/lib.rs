//! A client's devices in an image, `gpu-PID.kimg`: the format of what is noted of them, and what of
//! it is for people to look at. Proxies write and read it.

#![forbid(unsafe_code)]

mod before;
mod contents;
mod places;
mod saved;

pub use contents::{DeviceContents, MemoryContents, contents};
pub use places::{
    PLACES_SECTION, PLACES_VERSION, SavedPlace, SavedPlaces, check_places, is_of_place, place_file,
    read_places,
};
pub use saved::{
    HELD_SECTION, SECTION, SavedObject, SavedProxy, SavedSharing, SavedStep, StateError, VERSION,
    read,
};

/// Checks what the fuzz target and its test hold these to: no bytes bring a reader of sections to
/// anything but an error, and what decodes has one encoding.
///
/// # Panics
/// Where what was decoded encodes to other bytes.
pub fn check_bytes(bytes: &[u8]) {
    // The version before this one is another encoding of the same.
    let _ = saved::decode(bytes);
    kedge_wire::decode_canonical::<SavedProxy>(bytes);
    kedge_wire::decode_canonical::<SavedPlaces>(bytes);
}
