//! What the fuzz target and its test hold the codecs to.

use crate::frame::{FrameError, Frames};
use crate::messages::{
    Accepted, Answer, Aside, Ask, Drained, FileBytes, HandedOver, Handover, ImageAsk, Measure,
    Measured, Offer, Opening, ReadFile, Refused, Start, Terms, ToFar, ToNear,
};
use crate::{Bulk, ToTaker};
use kedge_wire::{Wire, decode, encode};

/// Decodes `bytes` as every message that crosses a line between machines, and as a stream of
/// frames. Decoding must not panic, and what it accepts must have exactly one encoding: these
/// bytes.
///
/// # Panics
/// Where a decoded value encodes to other bytes.
pub fn check_bytes(bytes: &[u8]) {
    one::<Opening>(bytes);
    one::<Measure>(bytes);
    one::<Result<Measured, Refused>>(bytes);
    one::<HandedOver>(bytes);
    one::<Terms>(bytes);
    one::<Handover>(bytes);
    one::<Result<Accepted, Refused>>(bytes);
    one::<Result<Offer, Refused>>(bytes);
    one::<Start>(bytes);
    one::<ToFar>(bytes);
    one::<ToNear>(bytes);
    one::<Ask>(bytes);
    one::<Answer>(bytes);
    one::<Aside>(bytes);
    one::<ImageAsk>(bytes);
    one::<Drained>(bytes);
    one::<ReadFile>(bytes);
    one::<FileBytes>(bytes);
    one::<Bulk>(bytes);
    one::<ToTaker>(bytes);
    stream::<ToFar>(bytes);
    stream::<ToNear>(bytes);
    stream::<Drained>(bytes);
}

fn one<T: Wire>(bytes: &[u8]) {
    if let Ok(value) = decode::<T>(bytes) {
        let mut again = Vec::with_capacity(bytes.len());
        encode(&value, &mut again);
        assert!(again == bytes, "{} has two encodings", std::any::type_name::<T>());
    }
}

/// Reads frames until one is wrong or the bytes have ended.
fn stream<T: Wire>(bytes: &[u8]) {
    let mut frames = Frames::new(bytes);
    let ended: FrameError = loop {
        if let Err(error) = frames.receive::<T>() {
            break error;
        }
    };
    drop(ended);
}
