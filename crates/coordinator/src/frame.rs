//! Frames: a length in four bytes, little-endian, and that much of a message.

use kedge_wire::{Wire, decode, encode};
use std::io::{self, Write};

const HEAD: usize = 4;
/// Read at a time.
const PIECE: usize = 4096;

/// Returns the frame of `message`.
pub(crate) fn frame(message: &impl Wire) -> Vec<u8> {
    let mut bytes = vec![0; HEAD];
    encode(message, &mut bytes);
    let length = u32::try_from(bytes.len() - HEAD).unwrap_or(u32::MAX);
    bytes[..HEAD].copy_from_slice(&length.to_le_bytes());
    bytes
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

fn invalid_data(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Returns the length that the head of a frame tells, if it is allowed.
fn length(head: [u8; HEAD], most: usize) -> io::Result<usize> {
    let length = u32::from_le_bytes(head) as usize;
    if length > most {
        return Err(invalid_data("a message is too long"));
    }
    Ok(length)
}

/// Returns the first message in `bytes`, and how many bytes it took; `None` where it is not all
/// there.
pub(crate) fn first<T: Wire>(bytes: &[u8], most: usize) -> io::Result<Option<(T, usize)>> {
    let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() else { return Ok(None) };
    let length = length(*head, most)?;
    let Some(body) = rest.get(..length) else { return Ok(None) };
    Ok(Some((decode(body).map_err(invalid)?, HEAD + length)))
}

pub(crate) fn send(mut stream: impl Write, message: &impl Wire) -> io::Result<()> {
    stream.write_all(&frame(message))
}

/// Reads one message; nothing follows it, because it answers the only question. Nearly every one
/// comes with one call of `read`.
pub(crate) fn receive<T: Wire>(
    mut read: impl FnMut(&mut [u8]) -> io::Result<usize>,
    most: usize,
) -> io::Result<T> {
    let mut bytes = Vec::new();
    let mut piece = [0; PIECE];
    loop {
        match read(&mut piece) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(length) => bytes.extend_from_slice(&piece[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        match first(&bytes, most)? {
            None => {}
            Some((message, length)) if length == bytes.len() => return Ok(message),
            Some(_) => return Err(invalid_data("two answers to one question")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{MAX_REQUEST, Request};
    use std::io::Read;

    fn receive_from(mut bytes: &[u8]) -> io::Result<Request> {
        receive(|piece| bytes.read(piece), MAX_REQUEST)
    }

    #[test]
    fn a_frame_comes_back_and_a_piece_of_one_does_not() {
        let bytes = frame(&Request::Members {});
        let whole = first::<Request>(&bytes, MAX_REQUEST).unwrap();
        assert_eq!(whole, Some((Request::Members {}, bytes.len())));
        for cut in 0..bytes.len() {
            assert_eq!(first::<Request>(&bytes[..cut], MAX_REQUEST).unwrap(), None);
        }
        assert_eq!(receive_from(&bytes).unwrap(), Request::Members {});
        let twice = [&bytes[..], &bytes].concat();
        assert!(receive_from(&twice).is_err());
    }

    #[test]
    fn hostile_frames_are_refused() {
        let long = (MAX_REQUEST as u32 + 1).to_le_bytes();
        let unknown = [&4_u32.to_le_bytes()[..], &77_u32.to_le_bytes()].concat();
        let trailing = [&5_u32.to_le_bytes()[..], &8_u32.to_le_bytes(), b"x"].concat();
        for bytes in [&long[..], &unknown, &trailing] {
            assert!(first::<Request>(bytes, MAX_REQUEST).is_err());
            assert!(receive_from(bytes).is_err());
        }
    }
}
