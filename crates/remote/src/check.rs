//! What the fuzz target and its test hold the codecs to.

use crate::frame::{FrameError, Frames};
use crate::messages::{
    Accepted, Answer, Aside, Ask, Drained, FileBytes, HandedOver, Handover, ImageAsk, Measure,
    Measured, Offer, Opening, ReadFile, Refused, Start, Terms, ToFar, ToNear,
};
use crate::{Bulk, ToTaker};
use kedge_wire::{Wire, decode_canonical};

/// Decodes `bytes` as every message that crosses a line between machines, and as a stream of
/// frames. Decoding must not panic, and what it accepts must have exactly one encoding: these
/// bytes.
///
/// # Panics
/// Where a decoded value encodes to other bytes.
pub fn check_bytes(bytes: &[u8]) {
    decode_canonical::<Opening>(bytes);
    decode_canonical::<Measure>(bytes);
    decode_canonical::<Result<Measured, Refused>>(bytes);
    decode_canonical::<HandedOver>(bytes);
    decode_canonical::<Terms>(bytes);
    decode_canonical::<Handover>(bytes);
    decode_canonical::<Result<Accepted, Refused>>(bytes);
    decode_canonical::<Result<Offer, Refused>>(bytes);
    decode_canonical::<Start>(bytes);
    decode_canonical::<ToFar>(bytes);
    decode_canonical::<ToNear>(bytes);
    decode_canonical::<Ask>(bytes);
    decode_canonical::<Answer>(bytes);
    decode_canonical::<Aside>(bytes);
    decode_canonical::<ImageAsk>(bytes);
    decode_canonical::<Drained>(bytes);
    decode_canonical::<ReadFile>(bytes);
    decode_canonical::<FileBytes>(bytes);
    decode_canonical::<Bulk>(bytes);
    decode_canonical::<ToTaker>(bytes);
    stream::<ToFar>(bytes);
    stream::<ToNear>(bytes);
    stream::<Drained>(bytes);
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
