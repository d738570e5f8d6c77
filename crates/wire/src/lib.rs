//! Bounded, little-endian encoding of what crosses a process boundary.
//!
//! Every length carries its maximum in its type ([`Bytes`], [`List`], [`Text`]), so a message from
//! a hostile peer is refused before anything is allocated for it. No unsafe code.
#![forbid(unsafe_code)]

mod bounded;
mod codec;
mod macros;

pub use bounded::{Bytes, List, Text, TooLong};
pub use codec::{Reader, Wire, WireError, Writer, decode, decode_canonical, encode};
