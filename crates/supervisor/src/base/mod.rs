//! What all the others stand on: how kedge starts kedge, signals, points where tests look.

pub(crate) mod again;
pub(crate) mod phases;
pub(crate) mod signals;
