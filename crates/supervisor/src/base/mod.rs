//! What all the others stand on: how kedge starts kedge, signals, sockets, limits, waiting times,
//! points where tests look.

pub(crate) mod again;
pub(crate) mod apart;
pub(crate) mod ends;
pub(crate) mod limits;
pub(crate) mod phases;
pub(crate) mod sending;
pub(crate) mod signals;
pub(crate) mod sockets;
pub(crate) mod told;
