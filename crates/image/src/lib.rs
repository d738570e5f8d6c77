//! The checkpoint image: a folder with one file for each process, and a manifest that is written
//! last and makes it count.
//!
//! ```text
//! NAME-0001/manifest.json   the files, their lengths and checksums; written by fsync and rename
//! NAME-0001/job.kimg        what the processes share
//! NAME-0001/96.kimg         process 96: its state and its memory
//! NAME-0001/96-ahead.kimg  memory of process 96 that was written before it was stopped; 96.kimg builds on it
//! NAME-0001/*.data          files that are kept as they are
//! ```
//!
//! A `.kimg` file is a header, payloads, a table of [`Extent`]s and a footer; [`layout`] has the
//! bytes. Everything that is read back is bounded and checked before use: a damaged image is an
//! [`ImageError`] that names the file and the offset.
#![forbid(unsafe_code)]

mod bytes;
mod cached;
mod chain;
pub mod check;
mod codec;
mod direct;
mod elsewhere;
mod error;
mod folder;
pub mod layout;
mod manifest;
mod plain;
mod read;
mod retention;
mod sink;
mod verify;
mod write;

pub use bytes::ReadFrom;
pub use cached::{alone, undrained};
pub use chain::{Layers, Opened, Source, ahead_of, chain, process_file};
pub use codec::{Choice, Codec, Encoded, encode};
pub use direct::{PageBuffer, Spare};
pub use elsewhere::ReadAt;
pub use error::ImageError;
pub use folder::Folder;
pub use layout::{Extent, MAX_EXTENT, MAX_SECTION, PAGE};
pub use manifest::{
    DeviceLimits, Devices, FileEntry, Manifest, NAME as MANIFEST, Parent, Part, list, newest,
    next_folder,
};
pub use read::ImageFile;
pub use retention::{Claim, Fate, Found, Pin, State, catalogue, fate, remove, retain};
pub use sink::{Sink, SumSink};
pub use verify::{Verified, verify, verify_telling, verify_written};
pub use write::{ImageWriter, Meter, Packer, check_new, is_file_name};

/// Returns the checksum of everything in an image: XXH3, 64 bits. It finds damage; it does not
/// authenticate: an image is as trustworthy as the folder that it lies in.
pub fn checksum(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

/// Returns what the page `bytes` at `address` is known by: XXH3, 128 bits. Two pages at one address
/// that have the same are taken for equal.
pub fn page_sum(address: u64, bytes: &[u8]) -> u128 {
    xxhash_rust::xxh3::xxh3_128_with_seed(bytes, address)
}
