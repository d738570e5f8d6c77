//! What the two ends of a remote shell say to each other: a kind in one byte, a length in four
//! bytes, little-endian, and so many bytes.

use std::io;

/// Bytes of a stream in one frame, at most.
pub(super) const MOST: usize = 32 << 10;
const HEAD: usize = 5;

/// A stream of the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stream {
    In,
    Out,
    Err,
}

impl Stream {
    const ALL: [Stream; 3] = [Stream::In, Stream::Out, Stream::Err];
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Frame {
    Data(Stream, Vec<u8>),
    /// Nothing more comes on it, or nobody reads it any more.
    End(Stream),
    /// For the command.
    Signal(u8),
    /// The command has ended, as ssh tells it.
    Exit(u8),
}

impl Frame {
    /// Appends it to `bytes`.
    pub(super) fn put(&self, bytes: &mut Vec<u8>) {
        let (kind, body) = match self {
            Frame::Data(stream, data) => (*stream as u8, &data[..]),
            Frame::End(stream) => (3, &[*stream as u8][..]),
            Frame::Signal(signal) => (4, &[*signal][..]),
            Frame::Exit(code) => (5, &[*code][..]),
        };
        bytes.push(kind);
        bytes.extend((body.len() as u32).to_le_bytes());
        bytes.extend(body);
    }
}

/// Bytes that have come, and are not yet taken.
#[derive(Debug, Default)]
pub(super) struct Decoder(Vec<u8>);

impl Decoder {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The next frame, if all of it is there.
    ///
    /// # Errors
    /// What comes is none.
    pub(super) fn next(&mut self) -> io::Result<Option<Frame>> {
        let Some((head, rest)) = self.0.split_first_chunk::<HEAD>() else { return Ok(None) };
        let length = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
        if length > MOST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let frame = decode(head[0], body).ok_or(io::ErrorKind::InvalidData)?;
        self.0.drain(..HEAD + length);
        Ok(Some(frame))
    }
}

fn decode(kind: u8, body: &[u8]) -> Option<Frame> {
    let stream = |number: u8| Stream::ALL.get(usize::from(number)).copied();
    match (kind, body) {
        (0..=2, data) => Some(Frame::Data(stream(kind)?, data.to_vec())),
        (3, [number]) => Some(Frame::End(stream(*number)?)),
        (4, [signal]) => Some(Frame::Signal(*signal)),
        (5, [code]) => Some(Frame::Exit(*code)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn frames_come_back_however_they_are_cut() {
        let frames = [
            Frame::Data(Stream::In, b"abc".to_vec()),
            Frame::Data(Stream::Err, Vec::new()),
            Frame::End(Stream::Out),
            Frame::Signal(15),
            Frame::Data(Stream::Out, vec![7; MOST]),
            Frame::Exit(255),
        ];
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.put(&mut bytes));
        for size in [1, 2, 7, 4096, bytes.len()] {
            let (mut decoder, mut found) = (Decoder::default(), Vec::new());
            for piece in bytes.chunks(size) {
                decoder.push(piece);
                while let Some(frame) = decoder.next().unwrap() {
                    found.push(frame);
                }
            }
            assert_eq!(found, frames);
        }
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let too_long = [&[0][..], &(MOST as u32 + 1).to_le_bytes()].concat();
        for bytes in [&too_long[..], &[9, 0, 0, 0, 0], &[3, 1, 0, 0, 0, 3], &[4, 0, 0, 0, 0]] {
            let mut decoder = Decoder::default();
            decoder.push(bytes);
            assert!(decoder.next().is_err(), "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn nothing_that_comes_is_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut decoder = Decoder::default();
            decoder.push(&bytes);
            while let Ok(Some(_)) = decoder.next() {}
        }
    }
}
