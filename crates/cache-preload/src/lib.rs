//! `libkedge_cache_preload.so`: has programs that are not changed write into the write-back cache's
//! memory by themselves.
//!
//! It takes the place of C's functions that write ([`write`]), and of those that end a descriptor
//! ([`ends`]): what is known of it is forgotten then. Where a program maps a file or copies out of
//! it ([`reads`]), the kernel is told first how long that is. A call that is missed, as it was made
//! another way, is right as well: the daemon ends the lease when it sees it.
//!
//! It prints nothing and starts nothing, and passes on whatever it has no answer for.
#![deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod ends;
mod reads;
mod real;
mod write;

/// Has this library begin when it is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = loaded;

extern "C" fn loaded() {
    real::find_all();
    kedge_cache_client::start();
}
