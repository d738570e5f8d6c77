//! What the two ends of a remote shell say to each other: a kind in one byte, a length in four
//! bytes, little-endian, and so many bytes.

use super::bytes::Bytes;
use std::io;

/// Most bytes of a stream in one frame.
pub(crate) const MAX_DATA_LEN: usize = 64 << 10;
/// Bytes of one stream that may be on their way, or wait at the other end for whoever reads them.
pub(crate) const WINDOW: usize = 1 << 20;
const HEAD: usize = 5;

/// A stream of the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    In,
    Out,
    Err,
}

impl Stream {
    const ALL: [Stream; 3] = [Stream::In, Stream::Out, Stream::Err];
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Frame {
    Data(Stream, Vec<u8>),
    /// Nothing more comes on it, or nobody reads it any more.
    End(Stream),
    /// So many more bytes of the stream have been written: as many more may be sent.
    Taken(Stream, u32),
    /// For the command.
    Signal(u8),
    /// The command has ended, as ssh tells it.
    Exit(u8),
    /// For the command's process group: a terminal has sent it.
    GroupSignal(u8),
    /// So many bytes of frames were heard, on all connections.
    Heard(u64),
    /// The same, first of all on a connection: what came after them is to be said again.
    Resume(u64),
    /// Instead of that, where nothing was heard and nothing was said.
    Begin,
}

impl Frame {
    /// Appends it to `bytes`.
    pub(crate) fn put(&self, bytes: &mut Vec<u8>) {
        match self {
            Frame::Data(stream, data) => put_data(*stream, data, bytes),
            Frame::End(stream) => put(3, &[*stream as u8], bytes),
            Frame::Signal(signal) => put(4, &[*signal], bytes),
            Frame::Exit(code) => put(5, &[*code], bytes),
            Frame::Taken(stream, count) => {
                let [a, b, c, d] = count.to_le_bytes();
                put(6, &[*stream as u8, a, b, c, d], bytes);
            }
            Frame::GroupSignal(signal) => put(7, &[*signal], bytes),
            Frame::Heard(count) => put(8, &count.to_le_bytes(), bytes),
            Frame::Resume(count) => put(9, &count.to_le_bytes(), bytes),
            Frame::Begin => put(10, &[], bytes),
        }
    }
}

/// Appends a frame with data to `bytes`.
pub(crate) fn put_data(stream: Stream, data: &[u8], bytes: &mut Vec<u8>) {
    put(stream as u8, data, bytes);
}

fn put(kind: u8, body: &[u8], bytes: &mut Vec<u8>) {
    bytes.push(kind);
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(body);
}

/// Bytes that have come, and are not yet taken.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    bytes: Bytes,
    /// Bytes of the frame that was taken last.
    last: usize,
}

impl Decoder {
    /// For who appends what has come.
    pub(crate) fn end(&mut self) -> &mut Vec<u8> {
        self.bytes.end()
    }

    /// Bytes of the frame that was taken last.
    pub(crate) fn last(&self) -> usize {
        self.last
    }

    /// The next frame, if all of it is there.
    ///
    /// # Errors
    /// What comes is none.
    pub(crate) fn next(&mut self) -> io::Result<Option<Frame>> {
        let Some((head, rest)) = self.bytes.waiting().split_first_chunk::<HEAD>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
        if length > MAX_DATA_LEN {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let frame = decode(head[0], body).ok_or(io::ErrorKind::InvalidData)?;
        self.last = HEAD + length;
        self.bytes.take(self.last);
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
        (6, [number, count @ ..]) => {
            Some(Frame::Taken(stream(*number)?, u32::from_le_bytes(count.try_into().ok()?)))
        }
        (7, [signal]) => Some(Frame::GroupSignal(*signal)),
        (8, count) => Some(Frame::Heard(u64::from_le_bytes(count.try_into().ok()?))),
        (9, count) => Some(Frame::Resume(u64::from_le_bytes(count.try_into().ok()?))),
        (10, []) => Some(Frame::Begin),
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
            Frame::Taken(Stream::Err, 70_000),
            Frame::Data(Stream::Out, vec![7; MAX_DATA_LEN]),
            Frame::Exit(255),
            Frame::GroupSignal(2),
            Frame::Heard(1 << 40),
            Frame::Resume(0),
            Frame::Begin,
        ];
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.put(&mut bytes));
        for size in [1, 2, 7, 4096, bytes.len()] {
            let (mut decoder, mut found) = (Decoder::default(), Vec::new());
            for piece in bytes.chunks(size) {
                decoder.end().extend_from_slice(piece);
                while let Some(frame) = decoder.next().unwrap() {
                    found.push(frame);
                }
            }
            assert_eq!(found, frames);
        }
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let too_long = [&[0][..], &(MAX_DATA_LEN as u32 + 1).to_le_bytes()].concat();
        let taken = [6, 4, 0, 0, 0, 0, 1, 0, 0];
        let (kind, stream, empty) = ([11, 0, 0, 0, 0], [3, 1, 0, 0, 0, 3], [4, 0, 0, 0, 0]);
        let (short, full) = ([8, 1, 0, 0, 0, 1], [10, 1, 0, 0, 0, 1]);
        for bytes in [&too_long[..], &taken, &kind, &stream, &empty, &short, &full] {
            let mut decoder = Decoder::default();
            decoder.end().extend_from_slice(bytes);
            assert!(decoder.next().is_err(), "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn nothing_that_comes_is_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut decoder = Decoder::default();
            decoder.end().extend_from_slice(&bytes);
            while let Ok(Some(_)) = decoder.next() {}
        }
    }
}
