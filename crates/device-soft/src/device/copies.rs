//! Copies and fills.
//!
//! Device memory, the shared arena and arrays are memory of this process; the client's own memory
//! is reached through the host. Rows that touch are moved as one.

use super::arena::Memory;
use super::arrays::Array;
use crate::check::Shadow;
use kedge_cuda_types::CuError;
use kedge_device::Host;
use kedge_protocol::{Copy3d, Place, Scattered, scatters};
use std::sync::Arc;

/// Rows of client memory are read together up to this many bytes, gaps included.
const BATCH: usize = 1 << 20;

/// Copies from this many bytes on are moved by both engines.
const SPLIT: u64 = 2 << 20;
const PAGE: u64 = 4096;

/// A copy whose places have been resolved.
pub(super) struct Transfer {
    src: Side,
    dst: Side,
    width: u64,
    height: u64,
    depth: u64,
}

#[derive(Clone)]
struct Side {
    reach: Reach,
    addr: u64,
    pitch: u64,
    slice: u64,
}

#[derive(Clone)]
enum Reach {
    /// Device or shared arena: checked against the valid ranges when the copy runs.
    Mapped,
    Client,
    /// Checked when the copy was submitted; kept alive until it is done.
    Array {
        _array: Arc<Array>,
    },
}

impl Transfer {
    /// # Errors
    /// INVALID_VALUE where the box leaves an array, INVALID_HANDLE for an unknown array.
    pub(super) fn new(
        copy: &Copy3d,
        array: impl Fn(kedge_protocol::ArrayId) -> Result<Arc<Array>, CuError>,
    ) -> Result<Self, CuError> {
        let extent = [copy.width, copy.height, copy.depth];
        let side = |place: &Place| -> Result<Side, CuError> {
            Ok(match *place {
                Place::Mapped { addr, pitch, slice } => {
                    Side { reach: Reach::Mapped, addr, pitch, slice }
                }
                Place::Client { addr, pitch, slice } => {
                    Side { reach: Reach::Client, addr, pitch, slice }
                }
                Place::Array { array: id, x_bytes, y, z } => {
                    let array = array(id)?;
                    let addr = array.locate([x_bytes, y, z], extent)?;
                    let (pitch, slice) = (array.pitch, array.plane_bytes());
                    Side { reach: Reach::Array { _array: array }, addr, pitch, slice }
                }
            })
        };
        let [width, height, depth] = extent;
        Ok(Self { src: side(&copy.src)?, dst: side(&copy.dst)?, width, height, depth }.merged())
    }

    /// Rows that touch on both sides become one, and so do planes.
    fn merged(mut self) -> Self {
        // A single row or plane has no distance to a next one.
        for side in [&mut self.src, &mut self.dst] {
            if self.height == 1 {
                side.pitch = self.width;
            }
            if self.depth == 1 {
                side.slice = side.pitch.saturating_mul(self.height);
            }
        }
        let rows_touch = self.src.pitch == self.width && self.dst.pitch == self.width;
        let plane = self.width.saturating_mul(self.height);
        if rows_touch {
            (self.width, self.height) = (plane, 1);
            if self.src.slice == plane && self.dst.slice == plane {
                (self.width, self.depth) = (plane.saturating_mul(self.depth), 1);
            }
        }
        self
    }

    pub(super) fn bytes(&self) -> u64 {
        self.width.saturating_mul(self.height).saturating_mul(self.depth)
    }

    /// Parts that may move at the same time: halves, where the copy is long and of one piece.
    pub(super) fn split(self) -> Vec<Self> {
        let (src, dst) = (self.src.addr, self.dst.addr);
        let apart = self.src.is_client() != self.dst.is_client()
            || src.saturating_add(self.width) <= dst
            || dst.saturating_add(self.width) <= src;
        if self.width < SPLIT || self.height * self.depth != 1 || !apart {
            return vec![self];
        }
        let half = (self.width / 2).next_multiple_of(PAGE);
        let part = |offset: u64, width: u64| {
            // One row: only the address counts.
            let side = |side: &Side| Side { addr: side.addr.wrapping_add(offset), ..side.clone() };
            Self { src: side(&self.src), dst: side(&self.dst), width, ..self }
        };
        vec![part(0, half), part(half, self.width - half)]
    }

    /// Moves the bytes. On an error part of them may have moved.
    pub(super) fn run(&self, memory: &Memory, host: &dyn Host) -> Result<(), CuError> {
        if self.bytes() == 0 {
            return Ok(());
        }
        self.src.check(self, memory)?;
        self.dst.check(self, memory)?;
        for z in 0..self.depth {
            let (src, dst) = (self.src.plane(z), self.dst.plane(z));
            if self.src.is_client() && !self.dst.is_client() && self.height > 1 {
                self.gather_rows(src, dst, host)?;
                continue;
            }
            for y in 0..self.height {
                self.row(src + y * self.src.pitch, dst + y * self.dst.pitch, host)?;
            }
        }
        if let Some(checker) = &memory.checker {
            self.remember(&checker.memory);
        }
        Ok(())
    }

    /// Tells what remembers which device memory is written what this copy has written.
    fn remember(&self, memory: &Shadow) {
        if !matches!(self.dst.reach, Reach::Mapped) {
            return;
        }
        for z in 0..self.depth {
            for y in 0..self.height {
                let row = |side: &Side| side.plane(z) + y * side.pitch;
                match self.src.reach {
                    Reach::Mapped => memory.copy(row(&self.dst), row(&self.src), self.width),
                    _ => memory.write(row(&self.dst), self.width),
                }
            }
        }
    }

    fn row(&self, src: u64, dst: u64, host: &dyn Host) -> Result<(), CuError> {
        let width = self.width as usize;
        match (self.src.is_client(), self.dst.is_client()) {
            (false, false) => {
                // SAFETY: `check` found both rows inside of mapped memory of this process. What
                // else uses them at the same time is the program's own race; `copy` allows overlap.
                unsafe { std::ptr::copy(src as *const u8, dst as *mut u8, width) };
                Ok(())
            }
            (true, false) => host.read_client(src, bytes_mut(dst, width)),
            (false, true) => host.write_client(dst, bytes(src, width)),
            (true, true) => client_to_client(src, dst, self.width, host),
        }
    }

    /// Reads many short rows of the client at once: a system call costs more than the gaps do.
    fn gather_rows(&self, src: u64, dst: u64, host: &dyn Host) -> Result<(), CuError> {
        let (width, pitch) = (self.width as usize, self.src.pitch as usize);
        let sparse = pitch < width || pitch / 4 > width || width > BATCH / 2;
        let batch = if sparse { 1 } else { (BATCH / pitch).max(1) as u64 };
        let mut buffer = Vec::new();
        let mut y = 0;
        while y < self.height {
            let rows = batch.min(self.height - y) as usize;
            let (from, to) = (src + y * self.src.pitch, dst + y * self.dst.pitch);
            if rows == 1 {
                self.row(from, to, host)?;
            } else {
                // Without the gap after the last row, which may not be the client's.
                buffer.resize((rows - 1) * pitch + width, 0);
                host.read_client(from, &mut buffer)?;
                for (index, row) in buffer.chunks(pitch).enumerate() {
                    let to = to + index as u64 * self.dst.pitch;
                    bytes_mut(to, width).copy_from_slice(&row[..width]);
                }
            }
            y += rows as u64;
        }
        Ok(())
    }
}

impl Side {
    fn is_client(&self) -> bool {
        matches!(self.reach, Reach::Client)
    }

    fn plane(&self, z: u64) -> u64 {
        self.addr + z * self.slice
    }

    /// # Errors
    /// ILLEGAL_ADDRESS where a byte of the box is not valid, INVALID_VALUE where the box wraps
    /// around the address space.
    fn check(&self, transfer: &Transfer, memory: &Memory) -> Result<(), CuError> {
        let strides = [(self.slice, transfer.depth), (self.pitch, transfer.height)];
        let mut extent = transfer.width;
        for (stride, count) in strides {
            let span = stride.checked_mul(count - 1).ok_or(CuError::INVALID_VALUE)?;
            extent = extent.checked_add(span).ok_or(CuError::INVALID_VALUE)?;
        }
        self.addr.checked_add(extent).ok_or(CuError::INVALID_VALUE)?;
        match self.reach {
            Reach::Mapped if !memory.spans.covers(self.addr, extent) => {
                Err(CuError::ILLEGAL_ADDRESS)
            }
            _ => Ok(()),
        }
    }
}

fn client_to_client(src: u64, dst: u64, width: u64, host: &dyn Host) -> Result<(), CuError> {
    let mut buffer = vec![0; BATCH.min(width as usize)];
    let mut moved = 0;
    while moved < width {
        let part = &mut buffer[..BATCH.min((width - moved) as usize)];
        host.read_client(src + moved, part)?;
        host.write_client(dst + moved, part)?;
        moved += part.len() as u64;
    }
    Ok(())
}

/// Device bytes as a slice, for one system call or copy.
fn bytes_mut<'a>(addr: u64, len: usize) -> &'a mut [u8] {
    // SAFETY: callers pass rows that `check` found inside of mapped memory of this process. Bytes
    // have no invalid values, and what else writes them meanwhile is the program's own race.
    unsafe { std::slice::from_raw_parts_mut(addr as *mut u8, len) }
}

fn bytes<'a>(addr: u64, len: usize) -> &'a [u8] {
    // SAFETY: callers pass rows that `check` found inside of mapped memory of this process; any
    // bytes are valid, and what writes them meanwhile is the program's own race.
    unsafe { std::slice::from_raw_parts(addr as *const u8, len) }
}

/// Pieces of the client's memory that go to device memory.
pub(super) struct Scatter(Vec<Scattered>);

impl Scatter {
    /// # Errors
    /// INVALID_VALUE where they are not apart, or too much.
    pub(super) fn new(pieces: Vec<Scattered>) -> Result<Self, CuError> {
        if scatters(&pieces) { Ok(Self(pieces)) } else { Err(CuError::INVALID_VALUE) }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().map(|piece| piece.bytes).sum()
    }

    /// # Errors
    /// ILLEGAL_ADDRESS where a byte that is written is not valid.
    pub(super) fn run(&self, memory: &Memory, host: &dyn Host) -> Result<(), CuError> {
        if !self.0.iter().all(|piece| memory.spans.covers(piece.dst, piece.bytes)) {
            return Err(CuError::ILLEGAL_ADDRESS);
        }
        let part = |piece: &Scattered| (piece.src, bytes_mut(piece.dst, piece.bytes as usize));
        let mut parts: Vec<(u64, &mut [u8])> = self.0.iter().map(part).collect();
        host.read_client_parts(&mut parts)?;
        self.0.iter().for_each(|piece| memory.wrote(piece.dst, piece.bytes));
        Ok(())
    }
}

/// A memset: `width` elements of `element` bytes × `height` rows.
pub(super) struct Fill {
    pub(super) dst: u64,
    pub(super) pitch: u64,
    pub(super) value: u32,
    pub(super) element: u32,
    pub(super) width: u64,
    pub(super) height: u64,
}

impl Fill {
    pub(super) fn bytes(&self) -> u64 {
        self.width.saturating_mul(u64::from(self.element)).saturating_mul(self.height)
    }

    /// # Errors
    /// INVALID_VALUE for an impossible shape, ILLEGAL_ADDRESS where a byte is not valid.
    pub(super) fn run(&self, memory: &Memory) -> Result<(), CuError> {
        let invalid = CuError::INVALID_VALUE;
        if !matches!(self.element, 1 | 2 | 4) || !self.dst.is_multiple_of(self.element.into()) {
            return Err(invalid);
        }
        if self.bytes() == 0 {
            return Ok(());
        }
        let row = self.width.checked_mul(self.element.into()).ok_or(invalid)?;
        let gaps = self.pitch.checked_mul(self.height - 1).ok_or(invalid)?;
        let extent = row.checked_add(gaps).ok_or(invalid)?;
        if !memory.spans.covers(self.dst, extent) {
            return Err(CuError::ILLEGAL_ADDRESS);
        }
        if self.height > 1 && self.pitch == row {
            self.fill(self.dst, extent);
            memory.wrote(self.dst, extent);
        } else {
            for y in 0..self.height {
                self.fill(self.dst + y * self.pitch, row);
                memory.wrote(self.dst + y * self.pitch, row);
            }
        }
        Ok(())
    }

    fn fill(&self, addr: u64, bytes: u64) {
        let pattern = match self.element {
            1 => [self.value as u8; 4],
            2 => {
                let [low, high] = (self.value as u16).to_le_bytes();
                [low, high, low, high]
            }
            _ => self.value.to_le_bytes(),
        };
        let out = bytes_mut(addr, bytes as usize);
        if pattern == [pattern[0]; 4] {
            out.fill(pattern[0]);
            return;
        }
        let mut words = out.chunks_exact_mut(4);
        for word in &mut words {
            word.copy_from_slice(&pattern);
        }
        let rest = words.into_remainder();
        let len = rest.len();
        rest.copy_from_slice(&pattern[..len]);
    }
}
