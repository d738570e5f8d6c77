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
