//! Seams: where a registration of host memory begins or ends. The driver refuses a copy or a fill
//! that reaches across one (CUDA_ERROR_INVALID_VALUE, seen with driver 580), and kernels take no
//! notice. So it is done in pieces. Neighbours in device memory have no seam between them.

use crate::copies::{self, Arrays};
use crate::driver::{Driver, check};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::CUDA_MEMSET_NODE_PARAMS_v1;
use kedge_cuda_types::handle::CUstream;
use kedge_protocol::{Copy3d, Place, Shape};

/// Addresses of seams, ascending.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Seams(Vec<u64>);

impl Seams {
    pub(crate) fn new(seams: impl Iterator<Item = u64>) -> Seams {
        let mut all: Vec<u64> = seams.collect();
        all.sort_unstable();
        all.dedup();
        Seams(all)
    }

    /// The first that is behind `start` and before `end`.
    fn first_in(&self, start: u64, end: u64) -> Option<u64> {
        let at = self.0.partition_point(|seam| *seam <= start);
        self.0.get(at).copied().filter(|seam| *seam < end)
    }
}

/// First byte of a place, and what is behind the last; `None` where it is no memory of devices.
pub(crate) fn extent(place: Place, shape: Shape) -> Option<(u64, u64)> {
    let Place::Mapped { addr, pitch, slice } = place else { return None };
    Some((addr, addr.checked_add(shape.reach(pitch, slice)?)?))
}

/// Divides a copy so that no piece reaches across a seam, in order.
fn divide(copy: Copy3d, seams: &Seams, pieces: &mut Vec<Copy3d>) {
    let extents = [copy.src, copy.dst].map(|place| extent(place, copy.shape()));
    let hit = |extent: Option<(u64, u64)>| extent.and_then(|(from, to)| seams.first_in(from, to));
    let [src, dst] = extents.map(hit);
    if src.is_none() && dst.is_none() {
        return pieces.push(copy);
    }
    let part =
        |x, y, z, shape| Copy3d::new(copy.src.advanced(x, y, z), copy.dst.advanced(x, y, z), shape);
    let one = copy.shape();
    let Shape { width, height, depth } = one;
    let (first, second) = if depth > 1 {
        let half = depth / 2;
        let (first, rest) = (Shape { depth: half, ..one }, Shape { depth: depth - half, ..one });
        (part(0, 0, 0, first), part(0, 0, half, rest))
    } else if height > 1 {
        let half = height / 2;
        let (first, rest) = (Shape { height: half, ..one }, Shape { height: height - half, ..one });
        (part(0, 0, 0, first), part(0, half, 0, rest))
    } else {
        let offset = |seam: Option<u64>, extent: Option<(u64, u64)>| Some(seam? - extent?.0);
        let cuts = [offset(src, extents[0]), offset(dst, extents[1])];
        let cut = cuts.into_iter().flatten().min().unwrap_or(width);
        (part(0, 0, 0, Shape::line(cut)), part(cut, 0, 0, Shape::line(width - cut)))
    };
    divide(first, seams, pieces);
    divide(second, seams, pieces);
}

/// Returns a copy in pieces that reach across no seam, in order.
pub(crate) fn copies(copy: &Copy3d, seams: &Seams) -> Vec<Copy3d> {
    let mut pieces = Vec::new();
    divide(*copy, seams, &mut pieces);
    pieces
}

/// Returns how an operation went as a whole; if the driver has refused it, how its pieces go.
fn or_pieces<T>(
    whole: Result<(), CuError>,
    pieces: impl FnOnce() -> Vec<T>,
    run: impl Fn(&T) -> Result<(), CuError>,
) -> Result<(), CuError> {
    if whole != Err(CuError::INVALID_VALUE) {
        return whole;
    }
    let pieces = pieces();
    if pieces.len() == 1 { whole } else { pieces.iter().try_for_each(run) }
}

/// Submits a copy to `stream`, whose context is current: in pieces where the driver refuses the
/// whole. `seams` gives those of what it touches.
pub(crate) fn copy(
    driver: &Driver,
    copy: &Copy3d,
    arrays: &impl Arrays,
    seams: impl FnOnce(&Copy3d) -> Seams,
    stream: CUstream,
) -> Result<(), CuError> {
    let run = |copy: &Copy3d| copies::run(driver, &copies::raw(copy, arrays)?, stream);
    or_pieces(run(copy), || copies(copy, &seams(copy)), run)
}

/// Returns a copy of what is filled to itself: it touches the same bytes.
pub(crate) fn filled(fill: &CUDA_MEMSET_NODE_PARAMS_v1) -> Copy3d {
    let place = Place::Mapped { addr: fill.dst, pitch: fill.pitch as u64, slice: 0 };
    let width = fill.width as u64 * u64::from(fill.elementSize);
    Copy3d::new(place, place, Shape { width, height: fill.height as u64, depth: 1 })
}

/// As [`copies`], of a fill.
pub(crate) fn fills(
    fill: &CUDA_MEMSET_NODE_PARAMS_v1,
    seams: &Seams,
) -> Vec<CUDA_MEMSET_NODE_PARAMS_v1> {
    let part = |piece: Copy3d| {
        // Seams are at pages, and elements do not lie across pages.
        let width = (piece.width / u64::from(fill.elementSize.max(1))) as usize;
        let dst = piece.dst.row(0, 0).unwrap_or(fill.dst);
        CUDA_MEMSET_NODE_PARAMS_v1 { dst, width, height: piece.height as usize, ..*fill }
    };
    copies(&filled(fill), seams).into_iter().map(part).collect()
}

/// As [`copy`], of a fill.
pub(crate) fn fill(
    driver: &Driver,
    fill: &CUDA_MEMSET_NODE_PARAMS_v1,
    seams: impl FnOnce(&Copy3d) -> Seams,
    stream: CUstream,
) -> Result<(), CuError> {
    let run = |fill: &CUDA_MEMSET_NODE_PARAMS_v1| copies::memset(driver, fill, stream);
    or_pieces(run(fill), || fills(fill, &seams(&filled(fill))), run)
}

/// As [`copy`], of bytes of this process's, which the driver has read when this returns.
pub(crate) fn bytes(
    driver: &Driver,
    dst: u64,
    bytes: &[u8],
    seams: impl FnOnce(&Copy3d) -> Seams,
    stream: CUstream,
) -> Result<(), CuError> {
    let place = Place::Mapped { addr: dst, pitch: 0, slice: 0 };
    let line = Copy3d::new(place, place, Shape::line(bytes.len() as u64));
    let run = |piece: &Copy3d| {
        let at = piece.dst.row(0, 0).unwrap_or(dst);
        let offset = (at - dst) as usize;
        let from = &bytes[offset..offset + piece.width as usize];
        // SAFETY: live bytes, pageable, so the driver copies them before it returns; it checks the
        // address.
        check(unsafe {
            (driver.cuMemcpyHtoDAsync_v2)(at, from.as_ptr().cast(), from.len(), stream)
        })
    };
    or_pieces(run(&line), || copies(&line, &seams(&line)), run)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_protocol::ArrayId;

    fn mapped(addr: u64, pitch: u64, slice: u64) -> Place {
        Place::Mapped { addr, pitch, slice }
    }

    fn pieces(copy: Copy3d, seams: &[u64]) -> Vec<Copy3d> {
        let mut pieces = Vec::new();
        divide(copy, &Seams::new(seams.iter().copied()), &mut pieces);
        pieces
    }

    #[test]
    fn a_line_is_cut_at_the_seams_of_both_sides() {
        let line =
            |src, dst, bytes| Copy3d::new(mapped(src, 0, 0), mapped(dst, 0, 0), Shape::line(bytes));
        let cut = pieces(line(0x1000, 0x9000, 0x3000), &[0x1000, 0x2000, 0xa800, 0xc000, 0x4000]);
        assert_eq!(
            cut,
            [
                line(0x1000, 0x9000, 0x1000),
                line(0x2000, 0xa000, 0x800),
                line(0x2800, 0xa800, 0x1800)
            ]
        );
        let whole = line(u64::MAX - 5, 0x9000, 0x3000);
        assert_eq!(pieces(whole, &[3]), [whole]);
    }

    #[test]
    fn only_the_row_that_has_a_seam_is_cut() {
        let array = Place::Array { array: ArrayId(1), x_bytes: 8, y: 1, z: 0 };
        let shape = Shape { width: 64, height: 8, depth: 2 };
        let copy = Copy3d::new(mapped(0, 128, 2048), array, shape);
        // In the third row of the second plane.
        let seam = 2048 + 2 * 128 + 16;
        let cut = pieces(copy, &[seam]);
        let total: u64 = cut.iter().filter_map(|piece| piece.shape().bytes()).sum();
        assert_eq!(Some(total), shape.bytes());
        for piece in &cut {
            let (from, to) = extent(piece.src, piece.shape()).unwrap();
            assert!(!(from < seam && seam < to), "{piece:?}");
        }
        let lines = cut.iter().filter(|piece| piece.width < 64).collect::<Vec<_>>();
        assert_eq!(lines.len(), 2);
        let there = Place::Array { array: ArrayId(1), x_bytes: 24, y: 3, z: 1 };
        assert_eq!((lines[1].src.row(0, 0), lines[1].dst), (Some(seam), there));
        assert!(cut.len() <= 6, "{}", cut.len());
    }

    #[test]
    fn fills_are_cut_between_elements() {
        let line = crate::tables::fill(0xff0, 0, 7, 4, 16, 1);
        let cut = fills(&line, &Seams::new([0x1000].into_iter()));
        let cut: Vec<_> = cut.iter().map(|it| (it.dst, it.width, it.height, it.value)).collect();
        assert_eq!(cut, [(0xff0, 4, 1, 7), (0x1000, 12, 1, 7)]);
        let rows = CUDA_MEMSET_NODE_PARAMS_v1 { pitch: 0x800, height: 4, ..line };
        let cut = fills(&rows, &Seams::new([0x1000].into_iter()));
        let cut: Vec<_> = cut.iter().map(|it| (it.dst, it.width, it.height)).collect();
        assert_eq!(cut, [(0xff0, 4, 1), (0x1000, 12, 1), (0x17f0, 16, 1), (0x1ff0, 16, 2)]);
    }

    #[test]
    fn a_seam_in_a_gap_between_rows_cuts_no_row() {
        let shape = Shape { width: 64, height: 2, depth: 1 };
        let copy = Copy3d::new(mapped(0, 128, 0), mapped(0x1000, 64, 0), shape);
        let cut = pieces(copy, &[100]);
        assert_eq!(cut.iter().map(|piece| piece.width).collect::<Vec<_>>(), [64, 64]);
    }
}
