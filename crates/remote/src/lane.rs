//! Lanes: links of a session that bulk bytes alone cross by. Several threads and connections carry
//! them, and nothing small waits behind them.
//!
//! On a lane each head, a frame, has its bytes behind it. The near end opens lanes when bulk bytes
//! are first asked for, or come; the far end uses them once all that there will be are there, so
//! that it can tell by an address which lane bytes go by: those of one place all go by the same.

use crate::frame::{FrameError, read_one};
use crate::inlet::{Connections, Receiver};
use crate::link::{Links, MAX_LANES, Which};
use crate::messages::CHUNK;
use kedge_wire::wire;
use std::io::{self, Read};
use std::sync::Arc;
use std::thread;

/// Fewer bytes of the client's memory than this go with everything else.
pub const LANE_BYTES: usize = 256 << 10;
/// Longest head.
const MAX_HEAD: usize = 64;
/// There is a lane for so many processors: each takes one at both ends.
const PROCESSORS: usize = 2;

/// Returns how many lanes the near end of a session opens on this machine.
pub fn lanes() -> usize {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    (processors / PROCESSORS).clamp(1, MAX_LANES)
}

wire! {
    /// What goes before bulk bytes.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Bulk {
        /// From the near end, first on each lane: how many there are.
        Lanes = 1 { count: u32 },
        /// From the near end: the bytes that `ToNear::Read` has asked for.
        Bytes = 2 { number: u64, len: u32 },
        /// From the far end: bytes for the client's private memory. They are younger than so many
        /// `ToNear::Write`.
        Write = 3 { addr: u64, after: u64, len: u32 },
    }
}

impl Bulk {
    /// Returns how many bytes follow.
    fn len(&self) -> usize {
        match *self {
            Bulk::Lanes { .. } => 0,
            Bulk::Bytes { len, .. } | Bulk::Write { len, .. } => len as usize,
        }
    }
}

/// The sending end of a lane.
#[derive(Debug, Clone)]
pub struct Lane(Arc<Links>);

impl Lane {
    /// Makes the sending end of the one link that these have.
    pub fn new(links: Arc<Links>) -> Lane {
        Lane(links)
    }

    /// Makes what is to be sent: `fill` writes the bytes behind the head.
    ///
    /// # Errors
    /// Those of `fill`.
    pub fn piece<E>(
        &self,
        head: &Bulk,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Vec<u8>, E> {
        let mut frame = vec![0; 4];
        kedge_wire::encode(head, &mut frame);
        let len = (frame.len() - 4) as u32;
        frame[..4].copy_from_slice(&len.to_le_bytes());
        let mut piece = self.0.piece(Which::Line, frame.len() + head.len());
        let (begin, bytes) = piece.split_at_mut(frame.len());
        begin.copy_from_slice(&frame);
        fill(bytes).map(|()| piece)
    }

    /// Sends a piece, once there is room.
    ///
    /// # Errors
    /// The session is over.
    pub fn send(&self, piece: Vec<u8>) -> io::Result<()> {
        self.0.wait_for_room(Which::Line)?;
        self.0.give(Which::Line, piece)
    }

    /// Ends it.
    pub fn end(&self) {
        self.0.end();
    }
}

/// The receiving end of a lane.
#[derive(Debug)]
pub struct LaneReader<C>(Receiver<C>);

impl<C: Connections> LaneReader<C> {
    /// Makes the receiving end that reads these bytes.
    pub fn new(receiver: Receiver<C>) -> LaneReader<C> {
        LaneReader(receiver)
    }

    /// Waits for the next head, whose bytes are the ones of `into` then, of which there may have
    /// been any.
    ///
    /// # Errors
    /// The session is over, or what has come is nonsense: nothing later can be trusted.
    pub fn next(&mut self, into: &mut Vec<u8>) -> Result<Bulk, FrameError> {
        let head: Bulk = read_one(&mut self.0, MAX_HEAD)?;
        let len = head.len();
        if len > CHUNK {
            return Err(FrameError::TooLong { len, max: CHUNK });
        }
        into.resize(len, 0);
        self.0.read_exact(into)?;
        Ok(head)
    }
}
