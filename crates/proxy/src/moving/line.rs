//! What the two proxies of a move say to each other, on a stream of bytes.

use crate::error::LineError;
use kedge_gpu_image::SavedProxy;
use kedge_image::MAX_EXTENT;
use kedge_wire::{Text, Wire, wire};
use std::io::{Read, Write};

/// Longest message without bytes.
const MAX_MESSAGE: u32 = 8 << 10;
/// Longest description of what there is: notes are 64 MiB at most.
const MAX_SAVED: u64 = 1 << 30;
/// Most descriptors of memory that are given at a time: a job on GPUs has one for each 4 GiB.
pub(crate) const MAX_PARTS: usize = 512;

wire! {
    /// To the target.
    #[derive(Debug, Clone, PartialEq)]
    pub enum Message {
        /// A round begins; what there is follows.
        Round = 1 { last: bool },
        /// Bytes of an object, which follow.
        Bytes = 2 { number: u64, from: u64, len: u64 },
        /// All images of modules are there: the objects can be made → [`Reply`].
        Make = 3 {},
        /// The round is over → [`Reply`].
        End = 4 {},
        /// After [`Reply::Near`]: so many [`Message::Part`] follow → [`Reply`]. Where that is none
        /// of its use, the bytes go themselves.
        Lend = 5 { parts: u32 },
        /// A part of a device's memory, whose descriptor comes with it.
        Part = 6 { device: u32, bytes: u64 },
        /// Bytes of an object that lie in that memory.
        There = 7 { number: u64, from: u64, len: u64, device: u32, offset: u64 },
    }

    /// To the source.
    #[derive(Debug, Clone, PartialEq)]
    pub enum Reply {
        Done = 1 {},
        /// What was made before cannot become what there is now.
        Unfit = 2 { why: Text<4096> },
        Failed = 3 { why: Text<4096> },
        /// Instead of `Done`, to [`Message::Make`]: it takes memory by its descriptors.
        Near = 4 {},
    }
}

pub(crate) fn send(stream: &mut impl Write, message: &impl Wire) -> Result<(), LineError> {
    let mut bytes = vec![0; 4];
    kedge_wire::encode(message, &mut bytes);
    let len = (bytes.len() - 4) as u32;
    bytes[..4].copy_from_slice(&len.to_le_bytes());
    Ok(stream.write_all(&bytes)?)
}

pub(crate) fn receive<T: Wire>(stream: &mut impl Read) -> Result<T, LineError> {
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len);
    if len > MAX_MESSAGE {
        return Err(LineError::TooLong { len: len.into(), max: MAX_MESSAGE.into() });
    }
    let mut bytes = vec![0; len as usize];
    stream.read_exact(&mut bytes)?;
    Ok(kedge_wire::decode(&bytes)?)
}

pub(crate) fn send_saved(stream: &mut impl Write, saved: &SavedProxy) -> Result<(), LineError> {
    let mut bytes = vec![0; 8];
    kedge_wire::encode(saved, &mut bytes);
    let len = (bytes.len() - 8) as u64;
    bytes[..8].copy_from_slice(&len.to_le_bytes());
    Ok(stream.write_all(&bytes)?)
}

pub(crate) fn receive_saved(stream: &mut impl Read) -> Result<SavedProxy, LineError> {
    let mut len = [0; 8];
    stream.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    if len > MAX_SAVED {
        return Err(LineError::TooLong { len, max: MAX_SAVED });
    }
    // Grows with what arrives, not with what is promised.
    let mut bytes = Vec::new();
    stream.take(len).read_to_end(&mut bytes)?;
    Ok(kedge_wire::decode(&bytes)?)
}

/// Reads the bytes behind [`Message::Bytes`] into `buffer`.
pub(crate) fn receive_bytes(
    stream: &mut impl Read,
    len: u64,
    buffer: &mut Vec<u8>,
) -> Result<(), LineError> {
    if len > MAX_EXTENT {
        return Err(LineError::TooLong { len, max: MAX_EXTENT });
    }
    buffer.resize(len as usize, 0);
    Ok(stream.read_exact(buffer)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_and_hostile_ones_are_refused() {
        let message = Message::Bytes { number: 7, from: 4096, len: 8192 };
        let mut bytes = Vec::new();
        send(&mut bytes, &message).unwrap();
        assert_eq!(receive::<Message>(&mut &bytes[..]).unwrap(), message);
        let long = [&(MAX_MESSAGE + 1).to_le_bytes()[..], &[0; 64]].concat();
        assert!(matches!(receive::<Message>(&mut &long[..]), Err(LineError::TooLong { .. })));
        let nonsense = [&4_u32.to_le_bytes()[..], &[0xff; 4]].concat();
        assert!(matches!(receive::<Message>(&mut &nonsense[..]), Err(LineError::Nonsense(_))));
        let endless = u64::MAX.to_le_bytes();
        assert!(matches!(receive_saved(&mut &endless[..]), Err(LineError::TooLong { .. })));
        let cut = 100_u64.to_le_bytes();
        assert!(matches!(receive_saved(&mut &cut[..]), Err(LineError::Nonsense(_))));
        let mut buffer = Vec::new();
        let bytes = receive_bytes(&mut &[0; 8][..], MAX_EXTENT + 1, &mut buffer);
        assert!(matches!(bytes, Err(LineError::TooLong { .. })) && buffer.is_empty());
    }
}
