//! What the fuzz target and its test hold the codecs to.

use crate::{aliases, job, keeper, machine, peer, proxy, session, sharing, stats, usage, warm};
use kedge_wire::decode_canonical;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Decodes `bytes` as every message and every note of another process that is read here. Decoding
/// must not panic, and what it accepts must have exactly one encoding: these bytes; of JSON, one
/// meaning.
///
/// # Panics
/// Where a decoded value encodes to another one.
pub fn check_bytes(bytes: &[u8]) {
    decode_canonical::<proxy::Order>(bytes);
    decode_canonical::<proxy::Answer>(bytes);
    decode_canonical::<(u64, proxy::Order)>(bytes);
    decode_canonical::<(u64, proxy::Answer)>(bytes);
    decode_canonical::<keeper::Ask>(bytes);
    decode_canonical::<keeper::Reply>(bytes);
    decode_canonical::<warm::Ask>(bytes);
    decode_canonical::<warm::Reply>(bytes);
    decode_canonical::<peer::Question>(bytes);
    decode_canonical::<Result<peer::Answer, ()>>(bytes);
    decode_canonical::<sharing::Share>(bytes);
    decode_canonical::<sharing::Bond>(bytes);
    decode_canonical::<machine::Description>(bytes);
    decode_canonical::<usage::Usage>(bytes);
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
