//! What devices on another machine show in a round of a move: it lies there, and passes through
//! here.

use super::image_way::{ImageStream, ImageWay};
use super::near::Near;
use crate::error::{CaptureError, LineError};
use crate::moving::{
    Crossed, Follows, Message, Passed, Reply, Shown, Way, pass, receive, receive_saved, send,
    send_saved,
};
use kedge_remote::{Aside, Drained, ImageAsk, ImageLineError, read_one};
use std::sync::Arc;

/// Longest last word.
const MAX_LAST: usize = 8 << 10;

/// What devices on another machine held when a round began: it lies there.
pub(super) struct ShownThere {
    pub(super) way: ImageWay,
    pub(super) near: Arc<Near>,
    pub(super) number: u64,
    pub(super) bytes: u64,
}

impl Shown for ShownThere {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn cross(&mut self, last: bool, way: &mut Way<'_>) -> Result<Option<Crossed>, CaptureError> {
        let ask = ImageAsk::Cross { number: self.number, last };
        let ImageStream { mut reading, mut writing, end: _end } = self.way.open(&ask)?;
        let Message::Round { last } = receive(&mut reading)? else {
            return Err(LineError::Order.into());
        };
        let saved = receive_saved(&mut reading)?;
        send(&mut way.to, &Message::Round { last })?;
        send_saved(&mut way.to, &saved)?;
        let Passed { bytes, ended } = pass(&mut reading, way, &mut writing)?;
        // It follows on from what the other has once it knows that.
        match read_one(&mut reading, MAX_LAST).map_err(ImageLineError::from)? {
            Drained::Done { .. } => {}
            Drained::Failed { why } => return Err(ImageLineError::Far(why.into_inner()).into()),
            Drained::Piece { .. } => return Err(LineError::Order.into()),
        }
        let crossed = Crossed { bytes, follows: Follows::There };
        Ok((ended == (Reply::Done {})).then_some(crossed))
    }
}

impl Drop for ShownThere {
    fn drop(&mut self) {
        self.near.say(&Aside::Forget { number: self.number });
    }
}
