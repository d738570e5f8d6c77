//! Frames on a stream of bytes: a `u32` length, then the message.

use crate::link::Sender;
use kedge_wire::{Wire, WireError, Writer};
use std::io::{self, Read, Write};
use thiserror::Error;

/// Longest frame, bytes: a reply of the ring's longest and what is around it.
const MAX_FRAME: usize = (64 << 20) + 64;
/// What is read at once.
const ROOM: usize = 256 << 10;
/// Bytes of a frame's length.
const HEAD: usize = 4;
/// Room that is kept from one frame to the next: that of a frame of bulk bytes, and no long
/// reply's. To have the kernel make it anew costs as much as the bytes' whole way.
const KEPT: usize = 4 << 20;

/// Why a stream is of no more use.
#[derive(Debug, Error)]
pub enum FrameError {
    #[error("the connection is closed")]
    Closed,
    #[error("the connection is broken: {0}")]
    Broken(#[from] io::Error),
    #[error("a frame of {len} bytes exceeds the maximum {max}")]
    TooLong { len: usize, max: usize },
    #[error("a frame is nonsense: {0}")]
    Nonsense(#[from] WireError),
}

/// Frames as they arrive.
#[derive(Debug)]
pub struct Frames<S> {
    stream: S,
    buffer: Vec<u8>,
    /// What of the buffer has arrived and not been taken.
    from: usize,
    to: usize,
}

impl<S: Read> Frames<S> {
    pub fn new(stream: S) -> Frames<S> {
        Frames { stream, buffer: vec![0; ROOM], from: 0, to: 0 }
    }

    /// Returns whether a whole frame is here already.
    pub fn has_next(&self) -> bool {
        let here = &self.buffer[self.from..self.to];
        let len = here.first_chunk::<HEAD>().map(|head| u32::from_le_bytes(*head) as usize);
        len.is_some_and(|len| here.len() - HEAD >= len)
    }

    /// Returns the next frame, which it waits for.
    ///
    /// # Errors
    /// The stream has ended, or what has come is no such frame: nothing later can be trusted.
    pub fn receive<T: Wire>(&mut self) -> Result<T, FrameError> {
        self.fill(HEAD)?;
        let mut head = [0; HEAD];
        head.copy_from_slice(&self.buffer[self.from..self.from + HEAD]);
        let len = u32::from_le_bytes(head) as usize;
        if len > MAX_FRAME {
            return Err(FrameError::TooLong { len, max: MAX_FRAME });
        }
        self.fill(HEAD + len)?;
        let frame = &self.buffer[self.from + HEAD..self.from + HEAD + len];
        let message = kedge_wire::decode(frame)?;
        self.from += HEAD + len;
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
            self.buffer.truncate(KEPT);
            self.buffer.shrink_to(KEPT);
        }
        Ok(message)
    }

    /// Reads until so many bytes are here. The buffer grows with what arrives, not with what a
    /// hostile length promises.
    fn fill(&mut self, need: usize) -> Result<(), FrameError> {
        while self.to - self.from < need {
            if self.buffer.len() - self.to < ROOM / 2 {
                self.buffer.copy_within(self.from..self.to, 0);
                (self.from, self.to) = (0, self.to - self.from);
                let room = (2 * self.to).clamp(ROOM, self.to + 8 * ROOM);
                self.buffer.resize(self.buffer.len().max(room), 0);
            }
            match self.stream.read(&mut self.buffer[self.to..]) {
                Ok(0) if self.from == self.to => return Err(FrameError::Closed),
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(n) => self.to += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Frames that are collected, and sent together.
#[derive(Debug)]
pub struct Sending<S> {
    stream: S,
    buffer: Vec<u8>,
}

/// Bytes that are collected before they are sent.
const FLUSH_THRESHOLD: usize = 64 << 10;

impl<S: Write> Sending<S> {
    pub fn new(stream: S) -> Sending<S> {
        Sending { stream, buffer: Vec::with_capacity(2 * FLUSH_THRESHOLD) }
    }

    /// Adds a frame that `put` writes; sends if much has been collected.
    ///
    /// # Errors
    /// The stream is broken.
    #[inline]
    pub fn put(&mut self, put: impl FnOnce(&mut Writer<'_>)) -> io::Result<()> {
        let at = self.buffer.len();
        self.buffer.extend_from_slice(&[0; HEAD]);
        put(&mut Writer::new(&mut self.buffer));
        let len = (self.buffer.len() - at - HEAD) as u32;
        self.buffer[at..at + HEAD].copy_from_slice(&len.to_le_bytes());
        if self.buffer.len() >= FLUSH_THRESHOLD { self.flush() } else { Ok(()) }
    }

    /// Adds a message.
    ///
    /// # Errors
    /// As [`Sending::put`].
    pub fn add<T: Wire>(&mut self, message: &T) -> io::Result<()> {
        self.put(|w| message.put(w))
    }

    /// Returns whether nothing was collected that has not been sent.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Sends what was collected.
    ///
    /// # Errors
    /// As [`Sending::put`].
    pub fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let sent = self.stream.write_all(&self.buffer);
        self.buffer.clear();
        self.buffer.shrink_to(KEPT);
        sent
    }
}

impl Sending<Sender> {
    /// Returns memory for a large frame, with nothing in it.
    pub fn large(&self) -> Vec<u8> {
        self.stream.piece()
    }

    /// Gives memory back that was not needed.
    pub fn give_back(&self, frame: Vec<u8>) {
        self.stream.give_back(frame);
    }

    /// Sends a large frame at once, after what was collected: it is not copied.
    ///
    /// # Errors
    /// As [`Sending::put`].
    pub fn give(&mut self, frame: Vec<u8>) -> io::Result<()> {
        self.flush()?;
        self.stream.give(frame)
    }
}

/// Reads one frame, `max` bytes at most, and nothing behind it.
///
/// # Errors
/// As [`Frames::receive`].
pub fn read_one<T: Wire>(stream: &mut impl Read, max: usize) -> Result<T, FrameError> {
    let mut head = [0; HEAD];
    stream.read_exact(&mut head).map_err(ended)?;
    let len = u32::from_le_bytes(head) as usize;
    if len > max {
        return Err(FrameError::TooLong { len, max });
    }
    let mut frame = vec![0; len];
    stream.read_exact(&mut frame)?;
    Ok(kedge_wire::decode(&frame)?)
}

fn ended(error: io::Error) -> FrameError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => FrameError::Closed,
        _ => error.into(),
    }
}

/// Sends one message.
///
/// # Errors
/// The stream is broken.
pub fn write_one<T: Wire>(stream: &mut impl Write, message: &T) -> io::Result<()> {
    let mut sending = Sending::new(stream);
    sending.add(message)?;
    sending.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_wire::Bytes;

    /// Gives its bytes a few at a time.
    struct Dripping(Vec<u8>, usize, usize);
    impl Read for Dripping {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            let n = self.2.min(out.len()).min(self.0.len() - self.1);
            out[..n].copy_from_slice(&self.0[self.1..self.1 + n]);
            self.1 += n;
            Ok(n)
        }
    }

    type Some = Bytes<{ 4 << 20 }>;

    fn sent(lengths: &[usize]) -> Vec<u8> {
        let mut sending = Sending::new(Vec::new());
        for len in lengths {
            sending.add(&Some::new(vec![*len as u8; *len]).unwrap()).unwrap();
        }
        sending.flush().unwrap();
        sending.stream
    }

    #[test]
    fn frames_arrive_whole_however_they_are_cut() {
        let lengths = [0, 1, 300_000, 7, 3 << 20, 65_536, 2];
        for step in [1usize << 20, 4097, 300_001] {
            let mut frames = Frames::new(Dripping(sent(&lengths), 0, step));
            for len in lengths {
                let got: Some = frames.receive().unwrap();
                assert_eq!((got.len(), got.first()), (len, (len > 0).then_some(&(len as u8))));
            }
            assert!(matches!(frames.receive::<Some>(), Err(FrameError::Closed)));
        }
    }

    #[test]
    fn a_whole_frame_is_seen_before_it_is_read() {
        let mut frames = Frames::new(Dripping(sent(&[5, 6, 7]), 0, 1 << 20));
        assert!(!frames.has_next());
        for more in [true, true, false] {
            let _: Some = frames.receive().unwrap();
            assert_eq!(frames.has_next(), more);
        }
    }

    #[test]
    fn what_is_no_frame_is_an_error() {
        let whole = sent(&[100]);
        for cut in 1..whole.len() {
            let mut frames = Frames::new(Dripping(whole[..cut].to_vec(), 0, 9));
            assert!(matches!(frames.receive::<Some>(), Err(FrameError::Broken(_))), "{cut}");
        }
        let mut frames = Frames::new(Dripping(vec![0xff; 64], 0, 64));
        assert!(matches!(frames.receive::<Some>(), Err(FrameError::TooLong { .. })));
        let mut frames = Frames::new(Dripping(vec![1, 0, 0, 0, 9], 0, 64));
        assert!(matches!(frames.receive::<Some>(), Err(FrameError::Nonsense(_))));
    }

    /// A length that is never followed by so many bytes takes no memory for them.
    #[test]
    fn a_promise_of_bytes_takes_no_room() {
        let mut bytes = ((60u32) << 20).to_le_bytes().to_vec();
        bytes.extend([0; 1000]);
        let mut frames = Frames::new(Dripping(bytes, 0, 1 << 20));
        assert!(matches!(frames.receive::<Some>(), Err(FrameError::Broken(_))));
        assert!(frames.buffer.len() <= 8 * ROOM);
    }

    #[test]
    fn one_frame_leaves_what_is_behind_it() {
        let bytes = sent(&[3, 4]);
        let mut rest = &bytes[..];
        let got: Some = read_one(&mut rest, 100).unwrap();
        assert_eq!(got.len(), 3);
        assert_eq!(rest.len(), 4 + 4 + 4);
        assert!(matches!(read_one::<Some>(&mut rest, 7), Err(FrameError::TooLong { .. })));
        assert!(matches!(read_one::<Some>(&mut &[][..], 7), Err(FrameError::Closed)));
    }
}
