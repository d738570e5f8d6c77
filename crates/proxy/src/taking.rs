//! What a round brings: bytes, or memory of the devices in which they lie.

use crate::error::LineError;
use crate::error::RestoreError;
use crate::filling::{Target, put};
use crate::moving::{MAX_PARTS, Message, Reply, receive, receive_bytes, send};
use crate::saved::DevicePiece;
use kedge_device::{HeldPart, HeldPlace, Piece};
use kedge_gpu_image::SavedObject;
use kedge_socket::frame::{self, Deadline};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

/// How long after a message the descriptor that belongs to it may come.
const DESCRIPTOR_TIMEOUT: Duration = Duration::from_secs(20);

/// By their numbers.
pub(crate) type Objects<'a> = HashMap<u64, &'a SavedObject>;

/// Takes what a round brings to devices that have its objects.
pub(crate) struct Taking<'a> {
    pub(crate) objects: Objects<'a>,
    pub(crate) target: Target<'a>,
    /// By which memory comes, if it may.
    pub(crate) near: Option<BorrowedFd<'a>>,
}

impl Taking<'_> {
    /// Takes the next of what comes; false where that was all.
    pub(crate) fn one(
        &mut self,
        stream: &mut (impl Read + Write),
        buffer: &mut Vec<u8>,
    ) -> Result<bool, RestoreError> {
        match receive(stream)? {
            Message::Bytes { number, from, len } => {
                receive_bytes(stream, len, buffer)?;
                let object = self.object(number)?;
                // The last page of an object may be longer than it.
                let to = from.saturating_add(len).min(object.bytes());
                let some = to.checked_sub(from).filter(|some| *some > 0);
                let some = some.ok_or(BEYOND)?;
                put(object, from, &buffer[..some as usize], &self.target)?;
                Ok(true)
            }
            Message::Lend { parts } => {
                let reply = match self.take_parts(parts)? {
                    true => Reply::Done {},
                    false => Reply::Unfit { why: Default::default() },
                };
                send(stream, &reply)?;
                Ok(true)
            }
            Message::There { number, from, len, device, offset } => {
                self.take_lent(number, from, len, HeldPlace { device, offset })?;
                Ok(true)
            }
            Message::End {} => Ok(false),
            Message::Round { .. } | Message::Make {} | Message::Part { .. } => {
                Err(LineError::Order.into())
            }
        }
    }

    fn object(&self, number: u64) -> Result<&SavedObject, RestoreError> {
        self.objects.get(&number).copied().ok_or(RestoreError::Damaged("bytes of no object"))
    }

    /// Takes the memory that the bytes lie in; false where it is none of these devices' use.
    fn take_parts(&self, count: u32) -> Result<bool, RestoreError> {
        let Some(near) = self.near.filter(|_| count as usize <= MAX_PARTS) else {
            return Err(LineError::Order.into());
        };
        let mut parts = Vec::new();
        for _ in 0..count {
            let received = frame::receive(near, Deadline::after(DESCRIPTOR_TIMEOUT));
            let (message, fds) = received.map_err(LineError::from)?;
            let (Message::Part { device, bytes }, Ok([fd])) =
                (message, <[OwnedFd; 1]>::try_from(fds))
            else {
                return Err(LineError::Order.into());
            };
            parts.push(HeldPart { device, bytes, fd });
        }
        Ok(self.target.filling.take_held(parts).is_ok())
    }

    fn take_lent(
        &self,
        number: u64,
        from: u64,
        len: u64,
        place: HeldPlace,
    ) -> Result<(), RestoreError> {
        let object = self.object(number)?;
        let inside = from.checked_add(len).is_some_and(|end| end <= object.bytes());
        let whole = object.piece().filter(|_| inside && len > 0).ok_or(BEYOND)?;
        let start = whole.start.checked_add(from).ok_or(BEYOND)?;
        let piece = Piece { object: whole.object, start, bytes: len };
        Ok(self.target.filling.put_held(&piece, place)?)
    }
}

const BEYOND: RestoreError = RestoreError::Damaged("bytes past their object's end");
