//! What the fuzz target and its test hold the codecs to.

use crate::{aliases, job, keeper, machine, peer, proxy, session, sharing, stats, usage, warm};
use kedge_wire::{Wire, decode, encode};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Decodes `bytes` as every message and every note of another process that is read here. Decoding
/// must not panic, and what it accepts must have exactly one encoding: these bytes; of JSON, one
/// meaning.
///
/// # Panics
/// Where a decoded value encodes to another one.
pub fn check_bytes(bytes: &[u8]) {
    one::<proxy::Order>(bytes);
    one::<proxy::Answer>(bytes);
    one::<(u64, proxy::Order)>(bytes);
    one::<(u64, proxy::Answer)>(bytes);
    one::<keeper::Ask>(bytes);
    one::<keeper::Reply>(bytes);
    one::<warm::Ask>(bytes);
    one::<warm::Reply>(bytes);
    one::<peer::Question>(bytes);
    one::<Result<peer::Answer, ()>>(bytes);
    one::<sharing::Share>(bytes);
    one::<sharing::Bond>(bytes);
    one::<machine::Description>(bytes);
    one::<usage::Usage>(bytes);
    let _ = usage::Usage::read(bytes);
    said::<job::Request>(bytes);
    said::<job::Reply>(bytes);
    text::<session::FarSession>(bytes);
    text::<stats::JobStats>(bytes);
    text::<Vec<warm::PoolStatus>>(bytes);
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Some(name) = aliases::parse(text)
    {
        assert_eq!(aliases::parse(&aliases::text(&name)), Some(name));
    }
}

fn one<T: Wire>(bytes: &[u8]) {
    if let Ok(value) = decode::<T>(bytes) {
        let mut again = Vec::with_capacity(bytes.len());
        encode(&value, &mut again);
        assert!(again == bytes, "{} has two encodings", std::any::type_name::<T>());
    }
}

/// Reads what is said on a control socket, its length first.
fn said<T: Serialize + DeserializeOwned>(bytes: &[u8]) {
    if let Ok(message) = job::receive::<T>(bytes) {
        let mut again = Vec::new();
        // What was escaped may be longer than a message may be.
        if job::send(&mut again, &message).is_ok() {
            let back = job::receive::<T>(&again[..]).map(|back| serde_json::to_value(&back).ok());
            assert_eq!(back.ok().flatten(), serde_json::to_value(&message).ok());
        }
    }
}

fn text<T: DeserializeOwned>(bytes: &[u8]) {
    let _ = serde_json::from_slice::<T>(bytes);
}
