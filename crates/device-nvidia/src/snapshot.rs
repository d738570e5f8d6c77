//! A snapshot: what the devices hold is copied inside of each device, where that has room, else
//! over the bus into pinned host memory; the program goes on, and the copy is read at leisure.

use crate::NvidiaBackend;
use crate::Shared;
use crate::context::{Context, Held as HeldContext};
use crate::copies::{self, RawCopy};
use crate::devices::Devices;
use crate::digests::Found;
use crate::drain;
use crate::driver::{Driver, check};
use crate::held;
use crate::meter::Meter;
use crate::notes::Notes;
use crate::pace::Pace;
use crate::pinned::Pinned;
use crate::sources::{From, Run, Sources, Texels, aligned};
use crate::spare::{LEFT, Need, Region, Room};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::CUarray;
use kedge_cuda_types::memory::{CU_MEMORYTYPE_ARRAY, CU_MEMORYTYPE_UNIFIED, CUDA_MEMCPY3D};
use kedge_device::digest::BLOCK;
use kedge_device::{
    Digests, Drained, Held, HeldPart, HeldPlace, Known, Object, Piece, Snapshot, SnapshotError,
};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// Bytes of one copy over the bus.
const HOP: u64 = 64 << 20;
/// Parts that are no longer are copied by kernels, where there may be thousands.
const GATHERED: u64 = 8 << 20;
/// What may change between an estimate and the pause.
const MARGIN: u64 = 64 << 20;

/// A part of a run, and where it is copied to.
struct Part<'a> {
    run: &'a Run,
    offset: u64,
    bytes: u64,
    to: Place,
}

/// Where a part of a snapshot is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// At an address in spare memory of a device.
    Device { device: u32, addr: u64 },
    /// In pinned memory.
    Host { at: usize },
}

impl Place {
    fn plus(self, offset: u64) -> Place {
        match self {
            Place::Device { device, addr } => Place::Device { device, addr: addr + offset },
            Place::Host { at } => Place::Host { at: at + offset as usize },
        }
    }
}

impl NvidiaBackend {
    /// See [`kedge_device::Backend::at_rest`]. Streams of which nobody has asked lately are asked
    /// here.
    pub(crate) fn rests(&self) -> bool {
        let settled = |context: &Arc<Context>| {
            context.streams().iter().all(|stream| {
                let Some(number) = stream.pending() else { return true };
                if stream.copies_under_way() {
                    return false;
                }
                let asked = context.enter().and_then(|()| {
                    // SAFETY: a stream that lives as long as its object does.
                    check(unsafe { (self.shared.driver.cuStreamQuery)(stream.raw) })
                });
                if asked == Err(CuError::NOT_READY) {
                    return false;
                }
                // What has failed is over as well; the client is told.
                let _ = self.shared.waited(context.id, asked);
                self.shared.over(stream, number);
                true
            })
        };
        self.shared.live.all().iter().all(settled) && self.shared.busy.none() && self.waiters.idle()
    }

    /// See [`kedge_device::Snapshots::prepare_snapshot`].
    pub(crate) fn prepare(&self, known: Option<&Known>) -> Result<(), SnapshotError> {
        let mut tables = self.tables();
        let mut sources = self.sources(&mut tables)?;
        if !sources.allocating.is_empty() {
            drop(tables);
            self.shared.heaps.prepare(&self.shared, &self.devices, &sources.allocating);
            tables = self.tables();
            sources = self.sources(&mut tables)?;
        }
        if sources.runs.is_empty() {
            return Ok(());
        }
        // While the tables are held, nothing is unmapped. What the program writes meanwhile makes
        // this an estimate, and the kernels are ready for the pause.
        let leave = left_to_others(known, &sources);
        self.leave_out(known, &mut sources);
        drop(tables);
        if self.needs_what_is_held(&sources) {
            self.shared.host.release_held();
        }
        let more = known.is_some_and(|known| !known.pieces.is_empty());
        self.make_room(&sources, more, leave)?;
        Ok(self.shared.slots.ready()?)
    }

    /// Leaves out of `sources` what is known; all digests, as far as the devices can compute them.
    fn leave_out(&self, known: Option<&Known>, sources: &mut Sources) -> Found {
        let Some(known) = known else { return Found::default() };
        let shared = &self.shared;
        let found = shared.digester.compute(shared, &self.devices, &sources.runs, &known.keys);
        let found = found.unwrap_or_else(|error| {
            shared.host.log(&format!(
                "the GPU cannot tell what has changed ({error}): all of its memory is copied"
            ));
            Found::default()
        });
        sources.runs = found.changed(std::mem::take(&mut sources.runs), known);
        found
    }

    /// Has the cache hold all of `sources`, as far as it can, and some `more`.
    fn make_room(
        &self,
        sources: &Sources,
        more: bool,
        leave: HashMap<u32, u64>,
    ) -> Result<(), CuError> {
        let mut needs = Vec::new();
        for (index, raw) in self.devices.iter() {
            let bytes = sources.bytes_on(index);
            let bytes = if more { bytes + bytes / 4 + MARGIN } else { bytes };
            if bytes > 0 {
                let context = self.context_on(index)?;
                let _held = context.hold()?;
                let free = free_memory(&self.shared.driver)?;
                let free = free.saturating_sub(leave.get(&index).copied().unwrap_or(0));
                needs.push(Need { index, raw, bytes, free });
            }
        }
        self.shared.cache.prepare(&needs)
    }

    /// See [`kedge_device::Snapshots::snapshot`].
    pub(crate) fn take_snapshot(
        &self,
        known: Option<&Known>,
    ) -> Result<Box<dyn Snapshot>, SnapshotError> {
        let mut tables = self.tables();
        let mut sources = self.sources(&mut tables)?;
        self.shared.heaps.check(&self.shared, &self.devices, &sources.allocating)?;
        let notes = Notes::take(self, &mut tables)?.encode()?;
        let pieces = sources.runs.iter().flat_map(|run| run.pieces.iter().map(|(_, piece)| piece));
        let mut pieces: Vec<Piece> = pieces.cloned().collect();
        pieces.sort_by(|a, b| (&a.object, a.start).cmp(&(&b.object, b.start)));
        let leave = left_to_others(known, &sources);
        let found = self.leave_out(known, &mut sources);
        self.make_room(&sources, false, leave)?;
        let room = Lent { room: self.shared.cache.take(), shared: Arc::clone(&self.shared) };
        let parts = lay_out(&sources.runs, &room.room)?;
        self.copy_all(&parts, !found.is_empty())?;
        let mut kept: Vec<(Piece, Place)> = parts.iter().flat_map(kept).collect();
        kept.sort_by(|(a, _), (b, _)| (&a.object, a.start).cmp(&(&b.object, b.start)));
        let limits = self.shared.cache.limits;
        let pace = Pace::new(limits.drain, limits.ways.at_once, &self.shared.busy);
        let devices = self.devices.clone();
        let meter = Meter::default();
        Ok(Box::new(GpuSnapshot { pieces, found, kept, notes, room, devices, pace, meter }))
    }
}

/// What is left free of each device for another process, which is about to hold what this one does.
fn left_to_others(known: Option<&Known>, sources: &Sources) -> HashMap<u32, u64> {
    let mut left = HashMap::new();
    if known.is_some_and(|known| known.leave) {
        for run in &sources.runs {
            *left.entry(run.device).or_insert(LEFT) += run.bytes;
        }
    }
    left
}

pub(crate) fn free_memory(driver: &Driver) -> Result<u64, CuError> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: live out pointers.
    check(unsafe { (driver.cuMemGetInfo_v2)(&mut free, &mut total) })?;
    Ok(free as u64)
}

/// A place where runs are put one after the other.
struct Shelf {
    place: Place,
    left: u64,
}

/// Finds a place for each run: on its own device, else in host memory. Only linear runs are parted.
fn lay_out<'a>(runs: &'a [Run], room: &Room) -> Result<Vec<Part<'a>>, SnapshotError> {
    let shelf = |device| {
        move |region: &Region| Shelf {
            place: Place::Device { device, addr: region.base() },
            left: region.filled(),
        }
    };
    let mut devices: HashMap<u32, Vec<Shelf>> = HashMap::new();
    for (device, regions) in &room.devices {
        devices.insert(*device, regions.iter().map(shelf(*device)).collect());
    }
    let pinned = room.host.iter();
    let mut host: Vec<Shelf> = pinned
        .map(|pinned| Shelf {
            place: Place::Host { at: pinned.addr() as usize },
            left: pinned.bytes(),
        })
        .collect();
    let mut parts = Vec::new();
    let mut missing = 0;
    for run in runs {
        let mut offset = 0;
        let own = devices.get_mut(&run.device);
        for shelf in own.into_iter().flatten().chain(&mut host) {
            let left = run.bytes - offset;
            let bytes = left.min(shelf.left);
            let array = matches!(run.from, From::Array(..));
            if bytes == 0 || array && bytes < left {
                continue;
            }
            parts.push(Part { run, offset, bytes, to: shelf.place });
            shelf.place = shelf.place.plus(aligned(bytes).min(shelf.left));
            shelf.left -= aligned(bytes).min(shelf.left);
            offset += bytes;
        }
        missing += run.bytes - offset;
    }
    if missing > 0 { Err(no_room(missing, room)) } else { Ok(parts) }
}

fn no_room(missing: u64, room: &Room) -> SnapshotError {
    let on_devices: u64 = room.devices.values().flatten().map(Region::filled).sum();
    let host: u64 = room.host.iter().map(Pinned::bytes).sum();
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let message = format!(
        "a snapshot needs {} MiB more than the {} MiB of GPU memory and {} MiB of host memory that it \
         may take: raise --cache-gpu or --cache-host, or free device memory",
        mib(missing),
        mib(on_devices),
        mib(host),
    );
    SnapshotError::new(CuError::OUT_OF_MEMORY, message)
}

/// Small parts of memory, which a device's kernel copies together.
type Moves = HashMap<u32, Vec<[u64; 3]>>;

impl NvidiaBackend {
    /// Copies all parts and waits for them, also where one fails. `gathered`: many small ones by
    /// kernels.
    fn copy_all(&self, parts: &[Part<'_>], gathered: bool) -> Result<(), SnapshotError> {
        let driver = &*self.shared.driver;
        let mut held: HashMap<*const Context, HeldContext<'_>> = HashMap::new();
        let mut moves = Moves::new();
        // The bus is the slower way: it begins.
        let (host, device): (Vec<_>, Vec<_>) =
            parts.iter().partition(|part| matches!(part.to, Place::Host { .. }));
        let mut outcome = host.into_iter().chain(device).try_for_each(|part| {
            let ctx = &part.run.ctx;
            let held = match held.entry(Arc::as_ptr(ctx)) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => entry.insert(ctx.hold()?),
            };
            if gathered && self.gathers(part, &mut moves)? {
                return Ok(());
            }
            ctx.enter()?;
            start(driver, part, held).map_err(|error| not_copied(error, part))
        });
        for (device, moves) in &moves {
            let on = self.devices.get(*device);
            let started = on
                .ok_or(CuError::INVALID_DEVICE)
                .and_then(|raw| self.shared.digester.gather(&self.shared, (*device, raw), moves));
            outcome = outcome.and(started.map_err(|error| failed(error, "gathered")));
        }
        for held in held.values() {
            let streams = held.streams();
            for stream in [streams.inside, streams.bus] {
                // SAFETY: a stream of a context that is held.
                let over = check(unsafe { (driver.cuStreamSynchronize)(stream) });
                outcome = outcome.and(over.map_err(|error| failed(error, "copied")));
            }
        }
        outcome
    }

    /// Whether a part is small and where a kernel can read it; then it is in `moves`.
    fn gathers(&self, part: &Part<'_>, moves: &mut Moves) -> Result<bool, CuError> {
        let (From::Linear(from), Place::Device { device, addr }) = (part.run.from, part.to) else {
            return Ok(false);
        };
        let from = from + part.offset;
        let words = [from, addr, part.bytes].iter().all(|number| number.is_multiple_of(16));
        let ctx = self.context_on(device)?;
        let own = Arc::ptr_eq(&part.run.ctx, &ctx) && self.shared.digester.gathers(ctx.id);
        if !words || !own || part.bytes > GATHERED {
            return Ok(false);
        }
        let pieces = (0..part.bytes).step_by(BLOCK as usize);
        let moved = pieces.map(|at| [from + at, addr + at, BLOCK.min(part.bytes - at)]);
        moves.entry(device).or_default().extend(moved);
        Ok(true)
    }
}

fn not_copied(error: CuError, part: &Part<'_>) -> SnapshotError {
    let what = match part.run.pieces.first() {
        Some((_, piece)) => format!("{:?}", piece.object),
        None => "memory".to_owned(),
    };
    let message =
        format!("{} bytes of the devices' memory could not be copied: {what}", part.bytes);
    SnapshotError::new(error, message)
}

fn failed(error: CuError, what: &str) -> SnapshotError {
    SnapshotError::new(error, format!("the devices' memory could not be {what}"))
}

/// Starts the copy of a part, in its context.
fn start(driver: &Driver, part: &Part<'_>, held: &HeldContext<'_>) -> Result<(), CuError> {
    let streams = held.streams();
    match (part.run.from, part.to) {
        (From::Linear(from), Place::Device { addr, .. }) => {
            let (from, bytes) = (from + part.offset, part.bytes as usize);
            // SAFETY: the program's memory, and spare memory of that length.
            check(unsafe { (driver.cuMemcpyDtoDAsync_v2)(addr, from, bytes, streams.inside) })
        }
        (From::Linear(from), Place::Host { at }) => {
            let mut done = 0;
            while done < part.bytes {
                let hop = HOP.min(part.bytes - done);
                let (from, to) = (from + part.offset + done, at + done as usize);
                let to = std::ptr::with_exposed_provenance_mut(to);
                // SAFETY: the program's memory, and pinned memory of that length.
                check(unsafe {
                    (driver.cuMemcpyDtoHAsync_v2)(to, from, hop as usize, streams.bus)
                })?;
                done += hop;
            }
            Ok(())
        }
        (From::Array(array, texels), to) => {
            let (dst, stream) = match to {
                Place::Device { addr, .. } => (addr, streams.inside),
                Place::Host { at } => (at as u64, streams.bus),
            };
            copies::run(driver, &RawCopy::Shaped(from_array(array, texels, dst)), stream)
        }
    }
}

/// An array's texels to memory, without padding.
fn from_array(array: CUarray, texels: Texels, dst: u64) -> CUDA_MEMCPY3D {
    CUDA_MEMCPY3D {
        srcMemoryType: CU_MEMORYTYPE_ARRAY,
        srcArray: array,
        dstMemoryType: CU_MEMORYTYPE_UNIFIED,
        dstDevice: dst,
        dstPitch: texels.row as usize,
        dstHeight: texels.rows as usize,
        WidthInBytes: texels.row as usize,
        Height: texels.rows as usize,
        Depth: texels.slices as usize,
        ..Default::default()
    }
}

/// The pieces in a part, and where each is kept.
fn kept(part: &Part<'_>) -> Vec<(Piece, Place)> {
    let (begin, end) = (part.offset, part.offset + part.bytes);
    let inside = part.run.pieces.iter().filter_map(|(at, piece)| {
        let (from, to) = (begin.max(*at), end.min(at + piece.bytes));
        let object = || piece.object.clone();
        (from < to).then(|| {
            let piece =
                Piece { object: object(), start: piece.start + from - at, bytes: to - from };
            (piece, part.to.plus(from - begin))
        })
    });
    inside.collect()
}

/// Memory that a snapshot has taken from the cache.
struct Lent {
    room: Room,
    shared: Arc<Shared>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.shared.cache.give_back(std::mem::take(&mut self.room));
    }
}

struct GpuSnapshot {
    /// By object and start.
    pieces: Vec<Piece>,
    found: Found,
    /// What of them was copied, in the same order, and where it is.
    kept: Vec<(Piece, Place)>,
    notes: Vec<u8>,
    room: Lent,
    devices: Devices,
    pace: Pace,
    /// What has left the devices since.
    meter: Meter,
}

impl Snapshot for GpuSnapshot {
    fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    fn read(&self, piece: &Piece, start: u64, out: &mut [u8]) -> Result<(), CuError> {
        let last = last_from(&self.pieces, |piece| piece, &piece.object, start);
        let left = last.map_or(0, |(piece, offset)| piece.bytes.saturating_sub(offset));
        if (out.len() as u64) > left {
            return Err(CuError::INVALID_VALUE);
        }
        let mut done = 0;
        while done < out.len() {
            let at = start + done as u64;
            let kept = last_from(&self.kept, |(piece, _)| piece, &piece.object, at);
            let ((piece, place), offset) = kept.ok_or(CuError::INVALID_VALUE)?;
            let bytes = piece.bytes.saturating_sub(offset).min((out.len() - done) as u64) as usize;
            if bytes == 0 {
                return Err(CuError::INVALID_VALUE);
            }
            self.fetch(place.plus(offset), &mut out[done..done + bytes])?;
            done += bytes;
        }
        Ok(())
    }

    fn look(
        &self,
        piece: &Piece,
        start: u64,
        bytes: usize,
        see: &mut dyn FnMut(&[u8]),
    ) -> Result<bool, CuError> {
        let kept = last_from(&self.kept, |(piece, _)| piece, &piece.object, start);
        let whole = kept.filter(|((piece, _), at)| piece.bytes.saturating_sub(*at) >= bytes as u64);
        let Some(((_, place), offset)) = whole else { return Ok(false) };
        match place.plus(offset) {
            Place::Host { at } => {
                self.pace.wait(bytes as u64);
                let from = std::ptr::with_exposed_provenance::<u8>(at);
                // SAFETY: so many bytes of a part lie there, in pinned memory that the snapshot
                // owns and nobody writes any longer.
                see(unsafe { std::slice::from_raw_parts(from, bytes) });
                Ok(true)
            }
            Place::Device { device, addr } => {
                let raw = self.devices.get(device).ok_or(CuError::INVALID_DEVICE)?;
                let (shared, pace, on) = (&self.room.shared, &self.pace, (device, raw));
                let look = || drain::look(shared, pace, on, (addr, bytes), see);
                self.meter.during(bytes, look)
            }
        }
    }

    fn digests(&self, piece: &Piece) -> Option<Digests> {
        self.found.of(piece)
    }

    fn notes(&self) -> Vec<u8> {
        self.notes.clone()
    }

    fn drained(&self) -> Drained {
        self.meter.drained()
    }

    fn lend(&self) -> Result<Vec<HeldPart>, CuError> {
        held::lend(&self.room.room)
    }

    fn lent(&self, piece: &Piece, start: u64, bytes: u64) -> Option<HeldPlace> {
        let kept = last_from(&self.kept, |(piece, _)| piece, &piece.object, start);
        let whole = kept.filter(|((piece, _), at)| piece.bytes.saturating_sub(*at) >= bytes);
        whole.and_then(|((_, place), at)| held::lent(&self.room.room, place.plus(at)))
    }

    fn export(&self) -> Result<Held, CuError> {
        held::export(&self.room.room, &self.pieces, &self.kept)
    }
}

impl GpuSnapshot {
    /// Bytes of one part.
    fn fetch(&self, place: Place, out: &mut [u8]) -> Result<(), CuError> {
        match place {
            Place::Host { at } => {
                self.pace.wait(out.len() as u64);
                let from = std::ptr::with_exposed_provenance::<u8>(at);
                // SAFETY: the caller has checked that so many bytes of a part lie there, in pinned
                // memory that the snapshot owns and nobody writes any longer.
                unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
                Ok(())
            }
            Place::Device { device, addr } => {
                let raw = self.devices.get(device).ok_or(CuError::INVALID_DEVICE)?;
                let (shared, pace, bytes) = (&self.room.shared, &self.pace, out.len());
                let fetch = || drain::fetch(shared, pace, (device, raw), addr, out).map(|()| true);
                self.meter.during(bytes, fetch).map(drop)
            }
        }
    }
}

/// The last of `sorted` that begins at `start` or before it, in the same object, and how far in it
/// `start` is.
fn last_from<'a, T>(
    sorted: &'a [T],
    piece: impl Fn(&T) -> &Piece,
    object: &Object,
    start: u64,
) -> Option<(&'a T, u64)> {
    let after =
        sorted.partition_point(|one| (&piece(one).object, piece(one).start) <= (object, start));
    let one = &sorted[after.checked_sub(1)?];
    (&piece(one).object == object).then(|| (one, start - piece(one).start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_move_on() {
        let device = Place::Device { device: 1, addr: 0x1000 };
        assert_eq!(device.plus(0x200), Place::Device { device: 1, addr: 0x1200 });
        assert_eq!(Place::Host { at: 8 }.plus(8), Place::Host { at: 16 });
    }
}
