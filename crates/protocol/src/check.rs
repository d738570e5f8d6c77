//! The property that the fuzz target and the mutation test share.

use crate::management::{Answer, Question, function};
use crate::{
    Call, Elapsed, GlobalInfo, Hello, Imported, KernelInfo, KernelNames, LoadError, Message,
    Output, PeerName, Post, Refusal, SharedSlab, Welcome,
};
use kedge_wire::{Wire, decode, encode};

/// Decodes `bytes` as every type that crosses the boundary. Decoding must not panic, and what it
/// accepts must have exactly one encoding: these bytes.
///
/// # Panics
/// Where a decoded value encodes to other bytes.
pub fn check_bytes(bytes: &[u8]) {
    one::<Message>(bytes);
    one::<Post>(bytes);
    one::<Call>(bytes);
    one::<Hello>(bytes);
    one::<Result<Welcome, Refusal>>(bytes);
    one::<Result<(), LoadError>>(bytes);
    one::<Result<KernelInfo, u32>>(bytes);
    one::<Result<KernelNames, u32>>(bytes);
    one::<Result<GlobalInfo, u32>>(bytes);
    one::<Output>(bytes);
    one::<Result<(), u32>>(bytes);
    one::<Result<u64, u32>>(bytes);
    one::<Result<[u8; 128], u32>>(bytes);
    one::<Result<Elapsed, u32>>(bytes);
    one::<Result<Imported, u32>>(bytes);
    one::<Result<SharedSlab, u32>>(bytes);
    one::<Result<PeerName, u32>>(bytes);
    one::<Answer>(bytes);
    if let Some(question) = one::<Question>(bytes) {
        // Whatever is asked with is taken or not.
        let _ = function(&question.function).map(|row| row.takes(&question.arguments));
    }
}

fn one<T: Wire>(bytes: &[u8]) -> Option<T> {
    let value = decode::<T>(bytes).ok()?;
    let mut again = Vec::with_capacity(bytes.len());
    encode(&value, &mut again);
    assert!(again == bytes, "{} has two encodings", std::any::type_name::<T>());
    Some(value)
}
