//! How a snapshot leaves a device: through pinned buffers, the next bytes travelling while the last are copied
//! on, by as many threads as call; as fast as [`Pace`] lets them.

use crate::Shared;
use crate::context::{Context, Held};
use crate::driver::check;
use crate::pace::{Pace, Permit};
use crate::pinned::{SLOT, Slot};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::CUdevice;

/// Copies from `addr` on, of a device as the client counts and as the driver does.
pub(crate) fn fetch(
    shared: &Shared,
    pace: &Pace,
    (device, raw): (u32, CUdevice),
    addr: u64,
    out: &mut [u8],
) -> Result<(), CuError> {
    let ways = shared.cache.limits.ways;
    let context = match ways.apart {
        true => shared.live.apart(&shared.driver, device, raw)?,
        false => shared.live.on(&shared.driver, device, raw)?,
    };
    let held = context.hold()?;
    let lane = Lane { shared, pace, context: &context, held: &held };
    let size = ways.piece.clamp(1, SLOT);
    let mut ahead = None;
    let mut outcome = Ok(());
    for (chunk, from) in out.chunks_mut(size).zip((addr..).step_by(size)) {
        pace.wait(chunk.len() as u64);
        let mut room = lane.try_room();
        if !matches!(room, Ok(Some(_))) {
            // Who waits for room takes none.
            outcome = outcome.and(lane.receive(ahead.take()));
            room = room.and_then(|_| lane.room().map(Some));
        }
        let sent = match room {
            Ok(Some(room)) if outcome.is_ok() => lane.send(room, from, chunk).map(Some),
            Ok(Some((slot, _))) => {
                shared.slots.put(slot);
                Ok(None)
            }
            Ok(None) => Ok(None),
            Err(error) => Err(error),
        };
        outcome = outcome.and(lane.receive(ahead.take()));
        match sent {
            Ok(sent) => ahead = sent,
            Err(error) => outcome = outcome.and(Err(error)),
        }
        if outcome.is_err() {
            break;
        }
    }
    outcome.and(lane.receive(ahead))
}

/// One thread's way from a device to memory.
struct Lane<'a> {
    shared: &'a Shared,
    pace: &'a Pace,
    context: &'a Context,
    held: &'a Held<'a>,
}

/// A copy that is under way.
struct Sent<'a, 'b> {
    slot: Slot,
    permit: Permit<'a>,
    out: &'b mut [u8],
}

impl<'a> Lane<'a> {
    /// A buffer and the right to use it, if there are.
    fn try_room(&self) -> Result<Option<(Slot, Permit<'a>)>, CuError> {
        let Some(permit) = self.pace.try_permit() else { return Ok(None) };
        Ok(self.shared.slots.try_take(self.context)?.map(|slot| (slot, permit)))
    }

    /// The same, when there are.
    fn room(&self) -> Result<(Slot, Permit<'a>), CuError> {
        let permit = self.pace.permit();
        Ok((self.shared.slots.take(self.context)?, permit))
    }

    /// Starts a copy into a pinned buffer.
    fn send<'b>(
        &self,
        (mut slot, permit): (Slot, Permit<'a>),
        from: u64,
        out: &'b mut [u8],
    ) -> Result<Sent<'a, 'b>, CuError> {
        let driver = &*self.shared.driver;
        let (to, stream) = (slot.bytes().as_mut_ptr(), self.held.streams().bus);
        // SAFETY: spare memory of the snapshot's, and a buffer of at least that length.
        let started =
            check(unsafe { (driver.cuMemcpyDtoHAsync_v2)(to.cast(), from, out.len(), stream) });
        match started.and_then(|()| slot.sent(driver, self.context, stream)) {
            Ok(()) => Ok(Sent { slot, permit, out }),
            Err(error) => {
                self.shared.slots.put(slot);
                Err(error)
            }
        }
    }

    /// Waits for a copy and copies it on.
    fn receive(&self, sent: Option<Sent<'_, '_>>) -> Result<(), CuError> {
        let Some(Sent { mut slot, permit, out }) = sent else { return Ok(()) };
        let arrived = match self.shared.cache.limits.ways.ask {
            true => slot.ask(&self.shared.driver),
            false => slot.wait(&self.shared.driver),
        };
        drop(permit);
        if arrived.is_ok() {
            out.copy_from_slice(&slot.bytes()[..out.len()]);
        }
        self.shared.slots.put(slot);
        arrived
    }
}
