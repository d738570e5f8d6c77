//! What an operation touches of managed memory.

use kedge_protocol::{Place, Shape, StreamOp};
use std::ops::Range;

/// What an operation may read and write, by address.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Touched {
    Nothing,
    Bytes { reads: Option<Range<u64>>, writes: Option<Range<u64>> },
    Anything,
}

impl Touched {
    /// Returns what an operation touches. A host function touches nothing by the device.
    pub(super) fn of(op: &StreamOp) -> Touched {
        let (reads, writes) = match op {
            StreamOp::Copy { copy } => (side(copy.src, copy.shape()), side(copy.dst, copy.shape())),
            StreamOp::CopyInline { dst, bytes } => (None, line(*dst, bytes.len() as u64)),
            StreamOp::Scatter { pieces } => {
                let first = pieces.first().map_or(0, |piece| piece.dst);
                let end = pieces.last().map_or(0, |piece| piece.dst.saturating_add(piece.bytes));
                (None, Some(first..end))
            }
            StreamOp::Memset { dst, pitch, element, width, height, .. } => {
                let width = width.saturating_mul((*element).into());
                let place = Place::Mapped { addr: *dst, pitch: *pitch, slice: 0 };
                (None, side(place, Shape { width, height: *height, depth: 1 }))
            }
            StreamOp::WriteValue { addr, .. } => (None, line(*addr, 8)),
            StreamOp::WaitValue { addr, .. } => (line(*addr, 8), None),
            StreamOp::HostFn { .. } => (None, None),
            StreamOp::Launch { .. }
            | StreamOp::GraphLaunch { .. }
            | StreamOp::Conditional { .. } => return Touched::Anything,
            StreamOp::Empty {}
            | StreamOp::EventRecord { .. }
            | StreamOp::EventWait { .. }
            | StreamOp::MemAlloc { .. }
            | StreamOp::MemFree { .. }
            | StreamOp::SetCondition { .. } => return Touched::Nothing,
        };
        Touched::Bytes { reads, writes }
    }
}

fn line(addr: u64, bytes: u64) -> Option<Range<u64>> {
    Some(addr..addr.saturating_add(bytes))
}

/// Returns the bytes from the first to the last of a copy's side, if devices have them.
fn side(place: Place, shape: Shape) -> Option<Range<u64>> {
    let Place::Mapped { addr, pitch, slice } = place else { return None };
    line(addr, shape.reach(pitch, slice)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_protocol::Copy3d;

    #[test]
    fn copies_and_fills_touch_their_own_bytes() {
        let shape = Shape { width: 100, height: 3, depth: 1 };
        let here = Place::Client { addr: 4096, pitch: 100, slice: 0 };
        let there = Place::Mapped { addr: 8192, pitch: 256, slice: 0 };
        let bytes = Some(8192..8192 + 2 * 256 + 100);
        let copy = |src, dst| Touched::of(&StreamOp::Copy { copy: Copy3d::new(src, dst, shape) });
        let (reads, writes) = (bytes.clone(), bytes);
        assert_eq!(copy(there, here), Touched::Bytes { reads, writes: None });
        assert_eq!(copy(here, there), Touched::Bytes { reads: None, writes });
        let (dst, pitch, value) = (8192, 256, 0);
        let fill = StreamOp::Memset { dst, pitch, value, element: 4, width: 3, height: 2 };
        let writes = Some(8192..8192 + 256 + 12);
        assert_eq!(Touched::of(&fill), Touched::Bytes { reads: None, writes });
        assert_eq!(Touched::of(&StreamOp::Empty {}), Touched::Nothing);
    }
}
