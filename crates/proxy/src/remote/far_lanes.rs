//! The far end's lanes: many bytes for the client's memory leave by them, sealed and sent by a
//! thread each, and many that were asked for come by them.

use kedge_remote::{Bulk, CHUNK, LANE_BYTES, Lane, MAX_LANES, Sender, Sending, ToNear};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Pieces that wait for a lane before whoever makes more waits.
pub(super) const TO_SEND: usize = 8;

/// What leaves by a lane.
pub(super) struct Way {
    pub(super) lane: Lane,
    /// Pieces in order. Whoever holds it may wait for room on the lane.
    pub(super) pieces: Mutex<SyncSender<Vec<u8>>>,
    /// How many there have been.
    pub(super) count: AtomicU64,
}

#[derive(Default)]
pub(super) struct FarLanes {
    /// By number; those that have come.
    begun: Mutex<[Option<Arc<Way>>; MAX_LANES]>,
    /// All of them, once they are there.
    ready: OnceLock<Vec<Arc<Way>>>,
    /// Up to which piece of each the line has told. Held with the line alone.
    told: Mutex<[u64; MAX_LANES]>,
    /// Writes that were put on the line, and those of them that were not kept for later.
    writes: AtomicU64,
    sent: AtomicU64,
}

impl FarLanes {
    /// Returns whether so many bytes go by lanes.
    pub(super) fn carry(&self, len: usize) -> bool {
        len >= LANE_BYTES && self.ready.get().is_some()
    }

    /// Returns how many writes the line has.
    pub(super) fn writes(&self) -> u64 {
        self.writes.load(Ordering::SeqCst)
    }

    /// Sends bytes for the client's memory, which do not go beyond the next multiple of [`CHUNK`],
    /// and are younger than so many writes of the line.
    ///
    /// # Errors
    /// There are no lanes, or not any more.
    pub(super) fn write(&self, addr: u64, bytes: &[u8], after: u64) -> io::Result<()> {
        let ways = self.ready.get().ok_or(io::ErrorKind::NotConnected)?;
        // The same bytes go by the same lane each time, and so in order.
        let way = &ways[(addr / CHUNK as u64) as usize % ways.len()];
        let len = bytes.len() as u32;
        let piece = way.lane.piece(&Bulk::Write { addr, after, len }, |out| {
            out.copy_from_slice(bytes);
            Ok::<(), io::Error>(())
        })?;
        let pieces = way.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        pieces.send(piece).map_err(|_| io::ErrorKind::NotConnected)?;
        way.count.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Has the line say first what has left by lanes: what it says next counts on that.
    pub(super) fn tell(&self, line: &mut Sending<Sender>) -> io::Result<()> {
        let Some(ways) = self.ready.get() else { return Ok(()) };
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        for (lane, (way, told)) in ways.iter().zip(&mut *told).enumerate() {
            let count = way.count.load(Ordering::SeqCst);
            if *told < count {
                *told = count;
                line.add(&ToNear::Bulk { lane: lane as u32, count })?;
            }
        }
        Ok(())
    }

    /// The line has one more write.
    pub(super) fn line_writes(&self) {
        self.writes.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns whether the line may keep some of so many writes for later, which a lane's next
    /// piece would wait for: they are to be sent now.
    pub(super) fn line_waits(&self, writes: u64) -> bool {
        self.sent.fetch_max(writes, Ordering::SeqCst) < writes
    }

    /// One more lane is there, of `count`.
    pub(super) fn is_there(&self, number: usize, way: Arc<Way>, count: usize) {
        let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        begun[number] = Some(way);
        let all: Vec<Arc<Way>> = begun.iter().take(count).flatten().cloned().collect();
        if all.len() == count {
            let _ = self.ready.set(all);
        }
    }
}
