//! Devices on another machine. The near end of a session is the [`session::Session`], an executor
//! beside the client; the far end ([`far::serve`]) is a proxy without a ring, which carries out
//! what comes over the line. Both keep memory that client and devices see alike by a
//! [`mirror::Mirror`].

mod capture;
pub mod far;
mod far_lane;
mod far_lanes;
mod handed;
mod image_way;
mod images;
mod mirror;
pub(crate) mod moving;
mod named;
mod near;
mod near_lanes;
pub(crate) mod open;
mod outlet;
mod patch;
pub(crate) mod restore;
pub(crate) mod session;
mod shown_there;
mod staged;
mod stand_in;
mod ticker;
mod turns;

use crate::shared::MAX_ALIASES;
use kedge_cuda_types::arena;
use kedge_device::Ranges;
use kedge_gpu_image::{SavedProxy, SavedStep};
use kedge_protocol::{Call, Message, Place, Post, Shape, StreamOp};
use kedge_remote::PAGE;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Has this process keep memory that it frees, as far as the buffers of a session go: each megabyte
/// that crosses takes several, and to have the kernel make them anew costs more than all else.
fn keep_freed_memory() {
    const KEPT: libc::c_int = 64 << 20;
    // SAFETY: mallopt sets two numbers of the allocator's, and takes no pointer.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, KEPT / 2);
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT);
    }
}

/// Returns whether from this message on there is memory that the client and devices see.
fn shares(message: &Message) -> bool {
    let Message::Call { call } = message else { return false };
    matches!(
        call,
        Call::Share { .. } | Call::Alias { .. } | Call::ModuleLoad { .. } | Call::ModuleLink { .. }
    )
}

/// Returns whether a client that goes on from an image has memory that devices see, too.
fn shared_in(saved: &SavedProxy) -> bool {
    saved.steps.iter().any(|step| match step {
        SavedStep::Message { message, .. } => shares(message),
        SavedStep::Module { .. } | SavedStep::Linked { .. } => true,
    })
}

/// The client's memory that devices see at addresses of their own arenas as well: blocks of managed
/// memory.
#[derive(Debug, Default)]
struct Lent {
    ranges: Mutex<Ranges>,
    /// There are too many to tell one from the other: any address may be such.
    many: AtomicBool,
}

impl Lent {
    /// A message is about to be carried out.
    fn note(&self, message: &Message) {
        match message {
            Message::Call { call: Call::Alias { alias, size, .. } }
                if Lent::on_devices(*alias, *size) =>
            {
                // Whether it is refused is not known yet; so many are.
                let mut ranges = self.ranges();
                match ranges.count() < MAX_ALIASES {
                    true => ranges.add(*alias, *size),
                    false => self.many.store(true, Ordering::Relaxed),
                }
            }
            Message::Post { post: Post::Unalias { alias, size } }
                if Lent::on_devices(*alias, *size) =>
            {
                self.ranges().cut(*alias, *size);
            }
            _ => {}
        }
    }

    /// Takes note of what the record of a client shows that goes on from an image.
    fn remember(&self, steps: &[SavedStep]) {
        for step in steps {
            if let SavedStep::Message { message, .. } = step {
                self.note(message);
            }
        }
    }

    /// Whether pages begin where devices have memory; what leaves the address space is none.
    fn on_devices(addr: u64, size: u64) -> bool {
        let pages = (addr | size).is_multiple_of(PAGE as u64) && size > 0;
        pages && arena::device_of(addr).is_some() && addr.checked_add(size).is_some()
    }

    fn overlaps(&self, addr: u64, len: u64) -> bool {
        self.many.load(Ordering::Relaxed) || self.ranges().overlap(addr, len)
    }

    fn ranges(&self) -> MutexGuard<'_, Ranges> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a message may have devices read and write of memory that the client sees.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Touches {
    Nothing,
    Parts { reads: Option<Part>, writes: Option<Part> },
    Anything,
}

/// A part of the memory that the client sees.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    /// By offset.
    range: Range<u64>,
    /// A message reads or writes all of it, and not rows with gaps between.
    whole: bool,
}

impl Part {
    /// Returns whether a page has bytes of both.
    fn shares_page(&self, other: &Part) -> bool {
        let pages = |range: &Range<u64>| range.start / PAGE as u64..range.end.div_ceil(PAGE as u64);
        let (own, other) = (pages(&self.range), pages(&other.range));
        own.start < other.end && other.start < own.end
    }
}

/// Tells of a message. What the client has changed there by then crosses before it: later, it would
/// cover what the devices write.
fn touches(message: &Message, lent: &Lent) -> Touches {
    let op = match message {
        Message::Post { post: Post::Enqueue { op, .. } } => op,
        // A module's managed variables lie in memory that both see.
        Message::Call {
            call: Call::ModuleLoad { .. } | Call::ModuleLink { .. } | Call::Alias { .. },
        } => return Touches::Anything,
        Message::Call { .. } | Message::Post { .. } => return Touches::Nothing,
    };
    let [reads, writes] = match op {
        StreamOp::Copy { copy } => [Some((copy.src, copy.shape())), Some((copy.dst, copy.shape()))],
        StreamOp::CopyInline { dst, bytes } => [None, Some(line(*dst, bytes.len() as u64))],
        StreamOp::Memset { dst, pitch, element, width, height, .. } => {
            let place = Place::Mapped { addr: *dst, pitch: *pitch, slice: 0 };
            let width = width.saturating_mul((*element).into());
            [None, Some((place, Shape { width, height: *height, depth: 1 }))]
        }
        StreamOp::WriteValue { addr, .. } => [None, Some(line(*addr, 8))],
        StreamOp::Launch { .. }
        | StreamOp::GraphLaunch { .. }
        | StreamOp::WaitValue { .. }
        | StreamOp::HostFn { .. }
        | StreamOp::Scatter { .. }
        | StreamOp::Conditional { .. } => return Touches::Anything,
        StreamOp::Empty {}
        | StreamOp::EventRecord { .. }
        | StreamOp::EventWait { .. }
        | StreamOp::MemAlloc { .. }
        | StreamOp::MemFree { .. }
        | StreamOp::SetCondition { .. } => return Touches::Nothing,
    };
    let part =
        |side: Option<(Place, Shape)>| side.map_or(Ok(None), |(at, shape)| part(at, shape, lent));
    // Four of its bytes may be somebody else's.
    let narrow = matches!(op, StreamOp::WriteValue { .. });
    let less = |part: Part| Part { whole: part.whole && !narrow, ..part };
    match (part(reads), part(writes).map(|part| part.map(less))) {
        (Ok(None), Ok(None)) => Touches::Nothing,
        (Ok(reads), Ok(writes)) => Touches::Parts { reads, writes },
        _ => Touches::Anything,
    }
}

fn line(addr: u64, bytes: u64) -> (Place, Shape) {
    (Place::Mapped { addr, pitch: 0, slice: 0 }, Shape::line(bytes))
}

/// An address that may be any memory's.
struct Unknown;

/// Returns which part of the memory that both see a side of a copy is, if any.
fn part(place: Place, shape: Shape, lent: &Lent) -> Result<Option<Part>, Unknown> {
    let Place::Mapped { addr, pitch, slice } = place else { return Ok(None) };
    if arena::device_of(addr).is_some() {
        let len = shape.reach(pitch, slice).unwrap_or(0);
        return if lent.overlaps(addr, len) { Err(Unknown) } else { Ok(None) };
    }
    // Where the program has registered its own memory, a device sees it at another address.
    let start = addr.checked_sub(arena::SHARED_BASE).filter(|_| arena::is_shared(addr));
    match (start, shape.reach(pitch, slice)) {
        (_, None) if shape.is_empty() => Ok(None),
        (Some(start), Some(len)) => {
            let (range, whole) = (start..start.saturating_add(len), place.is_packed(shape));
            Ok(Some(Part { range, whole }))
        }
        _ => Err(Unknown),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_protocol::{Copy3d, StreamId};

    fn of(op: StreamOp) -> Touches {
        seen(op, &Lent::default())
    }

    fn seen(op: StreamOp, lent: &Lent) -> Touches {
        touches(&Message::Post { post: Post::Enqueue { stream: StreamId(1), op } }, lent)
    }

    /// A block of managed memory that lies in host memory, for as long as it does.
    #[test]
    fn device_addresses_may_be_the_client_s_memory() {
        let (alias, addr, size) = (arena::device_base(0) + (2 << 20), arena::SHARED_BASE, 8192);
        let fill = |dst| {
            let (pitch, value, element, width, height) = (0, 1, 4, 1024, 1);
            StreamOp::Memset { dst, pitch, value, element, width, height }
        };
        let lent = Lent::default();
        assert_eq!(seen(fill(alias), &lent), Touches::Nothing);
        let call = Call::Alias { alias, addr, size };
        let step = SavedStep::Message { result: 0, message: Message::Call { call } };
        lent.remember(&[step]);
        assert_eq!(seen(fill(alias), &lent), Touches::Anything);
        assert_eq!(seen(fill(alias - 4), &lent), Touches::Anything);
        assert_eq!(seen(fill(alias + size), &lent), Touches::Nothing);
        lent.note(&Message::Post { post: Post::Unalias { alias, size: 4096 } });
        assert_eq!(seen(fill(alias), &lent), Touches::Nothing);
        assert_eq!(seen(fill(alias + 4096), &lent), Touches::Anything);
        lent.note(&Message::Call { call: Call::Alias { alias, addr, size: u64::MAX } });
    }

    /// Nobody grows what this end notes without a bound by asking for what is refused.
    #[test]
    fn too_many_parts_of_the_client_s_memory_may_be_anywhere() {
        let lent = Lent::default();
        let base = arena::device_base(0);
        for number in 0..=MAX_ALIASES as u64 {
            let alias = base + number * 8192;
            lent.note(&Message::Call { call: Call::Alias { alias, addr: 4096, size: 4096 } });
            lent.note(&Message::Call { call: Call::Alias { alias, addr: 4096, size: 1 } });
        }
        assert_eq!(lent.ranges().count(), MAX_ALIASES);
        assert!(lent.overlaps(base + 4096, 4));
    }

    #[test]
    fn a_copy_touches_its_own_bytes() {
        let shape = Shape { width: 100, height: 3, depth: 2 };
        let at = |addr| Place::Mapped { addr, pitch: 256, slice: 1024 };
        let (shared, device) = (at(arena::SHARED_BASE + 4096), at(arena::device_base(0)));
        let copy = |src, dst| of(StreamOp::Copy { copy: Copy3d::new(src, dst, shape) });
        let part = Some(Part { range: 4096..4096 + 1024 + 512 + 100, whole: false });
        let own = Place::Client { addr: 4096, pitch: 256, slice: 1024 };
        let reads = Touches::Parts { reads: part.clone(), writes: None };
        assert_eq!(copy(shared, device), reads);
        assert_eq!(copy(device, shared), Touches::Parts { reads: None, writes: part });
        assert_eq!(copy(own, device), Touches::Nothing);
        // The program's own memory, where it is registered; and what leaves the address space.
        assert_eq!(copy(device, at(0x7000_0000)), Touches::Anything);
        let beyond = Place::Mapped { addr: arena::SHARED_BASE, pitch: u64::MAX, slice: 0 };
        assert_eq!(copy(beyond, device), Touches::Anything);
    }

    #[test]
    fn parts_share_pages() {
        let part = |range| Part { range, whole: true };
        let one = part(4000..5000);
        assert!(one.shares_page(&part(0..1)) && part(8000..8100).shares_page(&one));
        assert!(!one.shares_page(&part(8192..9000)) && !part(8192..9000).shares_page(&one));
    }

    #[test]
    fn fills_touch_what_they_fill() {
        let dst = arena::SHARED_BASE;
        let fill =
            of(StreamOp::Memset { dst, pitch: 4096, value: 1, element: 4, width: 3, height: 2 });
        let part = Some(Part { range: 0..4096 + 12, whole: false });
        assert_eq!(fill, Touches::Parts { reads: None, writes: part });
        let fill =
            of(StreamOp::Memset { dst, pitch: 0, value: 1, element: 4, width: 3, height: 1 });
        let part = Some(Part { range: 0..12, whole: true });
        assert_eq!(fill, Touches::Parts { reads: None, writes: part });
        assert_eq!(of(StreamOp::HostFn { token: 1 }), Touches::Anything);
        assert_eq!(of(StreamOp::Empty {}), Touches::Nothing);
    }
}
