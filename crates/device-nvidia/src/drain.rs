//! How a snapshot leaves a device: through pinned buffers, the next bytes travelling while the last
//! are copied on, by as many threads as call; as fast as [`Pace`] lets them.

use crate::Shared;
use crate::context::{Context, Held};
use crate::driver::check;
use crate::pace::{Pace, Permit};
use crate::pinned::{SLOT, Slot};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::CUdevice;
use std::sync::Arc;

/// Copies from `addr` on, of a device as the client counts and as the driver does.
pub(crate) fn fetch(
    shared: &Shared,
    pace: &Pace,
    on: (u32, CUdevice),
    addr: u64,
    out: &mut [u8],
) -> Result<(), CuError> {
    let context = context(shared, on)?;
    let held = context.hold()?;
    let lane = Lane { shared, pace, context: &context, held: &held };
    let size = shared.cache.limits.ways.piece.clamp(1, SLOT);
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
            Ok(Some(room)) if outcome.is_ok() => {
                lane.send(room, from, chunk.len()).map(|sent| Some((sent, chunk)))
            }
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

/// Shows `bytes` of a device from `addr` on to `see`, in the pinned buffer where they arrive;
/// `false` where that is too small.
pub(crate) fn look(
    shared: &Shared,
    pace: &Pace,
    on: (u32, CUdevice),
    (addr, bytes): (u64, usize),
    see: &mut dyn FnMut(&[u8]),
) -> Result<bool, CuError> {
    if bytes > shared.cache.limits.ways.piece.min(SLOT) {
        return Ok(false);
    }
    let context = context(shared, on)?;
    let held = context.hold()?;
    let lane = Lane { shared, pace, context: &context, held: &held };
    pace.wait(bytes as u64);
    let sent = lane.send(lane.room()?, addr, bytes)?;
    lane.arrived(sent, see).map(|()| true)
}

/// The one in which bytes leave a device.
fn context(shared: &Shared, (device, raw): (u32, CUdevice)) -> Result<Arc<Context>, CuError> {
    match shared.cache.limits.ways.apart {
        true => shared.live.apart(&shared.driver, device, raw),
        false => shared.live.on(&shared.driver, device, raw),
    }
}

/// One thread's way from a device to memory.
struct Lane<'a> {
    shared: &'a Shared,
    pace: &'a Pace,
    context: &'a Context,
    held: &'a Held<'a>,
}

/// A copy that is under way.
struct Sent<'a> {
    slot: Slot,
    permit: Permit<'a>,
    bytes: usize,
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
    fn send(
        &self,
        (mut slot, permit): (Slot, Permit<'a>),
        from: u64,
        bytes: usize,
    ) -> Result<Sent<'a>, CuError> {
        let driver = &*self.shared.driver;
        let (to, stream) = (slot.bytes().as_mut_ptr(), self.held.streams().bus);
        // SAFETY: spare memory of the snapshot's, and a buffer of at least that length.
        let started =
            check(unsafe { (driver.cuMemcpyDtoHAsync_v2)(to.cast(), from, bytes, stream) });
        match started.and_then(|()| slot.sent(driver, self.context, stream)) {
            Ok(()) => Ok(Sent { slot, permit, bytes }),
            Err(error) => {
                self.shared.slots.put(slot);
                Err(error)
            }
        }
    }

    /// Waits for a copy and copies it on.
    fn receive(&self, sent: Option<(Sent<'_>, &mut [u8])>) -> Result<(), CuError> {
        let Some((sent, out)) = sent else { return Ok(()) };
        self.arrived(sent, &mut |bytes| out.copy_from_slice(bytes))
    }

    /// Waits for a copy and shows it to `see`.
    fn arrived(&self, sent: Sent<'_>, see: &mut dyn FnMut(&[u8])) -> Result<(), CuError> {
        let Sent { mut slot, permit, bytes } = sent;
        let arrived = match self.shared.cache.limits.ways.ask {
            true => slot.ask(&self.shared.driver),
            false => slot.wait(&self.shared.driver),
        };
        drop(permit);
        if arrived.is_ok() {
            see(&slot.bytes()[..bytes]);
        }
        self.shared.slots.put(slot);
        arrived
    }
}
