//! The property that the fuzz target and the mutation test share.

use crate::management::{Answer, Question, function};
use crate::{
    Call, Elapsed, GlobalInfo, Hello, Imported, KernelInfo, KernelNames, LoadError, Message,
    Output, PeerName, Post, Refusal, SharedSlab, Welcome,
};
use kedge_wire::decode_canonical;

/// Decodes `bytes` as every type that crosses the boundary. Decoding must not panic, and what it
/// accepts must have exactly one encoding: these bytes.
///
/// # Panics
/// Where a decoded value encodes to other bytes.
pub fn check_bytes(bytes: &[u8]) {
    decode_canonical::<Message>(bytes);
    decode_canonical::<Post>(bytes);
    decode_canonical::<Call>(bytes);
    decode_canonical::<Hello>(bytes);
    decode_canonical::<Result<Welcome, Refusal>>(bytes);
    decode_canonical::<Result<(), LoadError>>(bytes);
    decode_canonical::<Result<KernelInfo, u32>>(bytes);
    decode_canonical::<Result<KernelNames, u32>>(bytes);
    decode_canonical::<Result<GlobalInfo, u32>>(bytes);
    decode_canonical::<Output>(bytes);
    decode_canonical::<Result<(), u32>>(bytes);
    decode_canonical::<Result<u64, u32>>(bytes);
    decode_canonical::<Result<[u8; 128], u32>>(bytes);
    decode_canonical::<Result<Elapsed, u32>>(bytes);
    decode_canonical::<Result<Imported, u32>>(bytes);
    decode_canonical::<Result<SharedSlab, u32>>(bytes);
    decode_canonical::<Result<PeerName, u32>>(bytes);
    decode_canonical::<Answer>(bytes);
    if let Some(question) = decode_canonical::<Question>(bytes) {
        // Whatever is asked with is taken or not.
        let _ = function(&question.function).map(|row| row.takes(&question.arguments));
    }
}
