//! The program's side of the write-back cache's leases: writes that go into the cache's memory
//! without a way to its daemon.
//!
//! [`Files::write`] does what `write` and `pwrite` do, for any descriptor, or says that the caller
//! is to make the real call; that is always right, as the daemon ends a lease when it sees a call.
//! `libkedge_cache.so` offers this to programs ([`c`]); `libkedge_cache_preload.so` does it for
//! programs that are not changed.
//!
//! It runs in somebody's process, and also in signal handlers: it allocates nothing, waits for no
//! lock, prints nothing, never panics, and leaves errno alone unless a call fails.
//!
//! - [`files`]: what is known of each descriptor, and the way of a write. [`claim`]: its place in
//!   the file.
//! - [`held`]: a lease in use. [`ask`]: how one is got. [`pause`]: when none is asked for.
//! - [`mounts`]: which files are a cache's. [`mapped`]: those that never get a lease.
//! - [`shadows`]: descriptors of this library's own. [`parts`]: the bytes. [`sys`]: system calls.
#![deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod ask;
pub mod c;
mod claim;
mod files;
mod held;
mod mapped;
mod mounts;
mod parts;
mod pause;
mod shadows;
mod sys;
mod try_lock;

pub use files::{FILES, Files, start};
pub use parts::Parts;
pub use sys::fail;
