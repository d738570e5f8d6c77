//! What of the devices' memory a snapshot takes, and where that lies.

use crate::NvidiaBackend;
use crate::context::Context;
use crate::heap::Allocating;
use crate::modules::Variable;
use crate::spare::Region;
use crate::tables::Tables;
use kedge_cuda_types::arena::device_of;
use kedge_cuda_types::handle::CUarray;
use kedge_cuda_types::{CuError, memory::channel_bytes};
use kedge_device::{Object, Piece, SnapshotError};
use kedge_protocol::{ArrayDesc, ModuleId};
use std::collections::HashMap;
use std::sync::Arc;

/// A piece of memory is no longer; it spans no two of the places that a snapshot is kept in.
const PIECE: u64 = 1 << 30;

/// Bytes that are copied together.
pub(crate) struct Run {
    pub(crate) device: u32,
    pub(crate) ctx: Arc<Context>,
    pub(crate) from: From,
    pub(crate) bytes: u64,
    /// The run's pieces, by their offsets in it.
    pub(crate) pieces: Vec<(u64, Piece)>,
}

#[derive(Clone, Copy)]
pub(crate) enum From {
    Linear(u64),
    Array(CUarray, Texels),
}

/// The shape of an array's bytes: rows, and slices or layers of them, without padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Texels {
    pub(crate) row: u64,
    pub(crate) rows: u64,
    pub(crate) slices: u64,
}

impl Texels {
    /// `None` where a texel is not made of whole channels, or there is too much.
    pub(crate) fn of(desc: &ArrayDesc) -> Option<Texels> {
        let texel = channel_bytes(desc.format)?.checked_mul(desc.channels.into())?;
        let row = desc.width.checked_mul(texel)?;
        let shape = Texels { row, rows: desc.height.max(1), slices: desc.depth.max(1) };
        row.checked_mul(shape.rows)?.checked_mul(shape.slices).map(|_| shape)
    }

    pub(crate) fn bytes(self) -> u64 {
        self.row * self.rows * self.slices
    }
}

/// All runs, and what must be kept until they are copied.
#[derive(Default)]
pub(crate) struct Sources {
    pub(crate) runs: Vec<Run>,
    /// The program's handles, mapped once more.
    pub(crate) mappings: Vec<Region>,
    /// Where kernels may have memory of their own, which is not in this.
    pub(crate) allocating: Allocating,
}

impl Sources {
    /// Bytes on each device.
    pub(crate) fn bytes_on(&self, device: u32) -> u64 {
        self.runs.iter().filter(|run| run.device == device).map(|run| aligned(run.bytes)).sum()
    }
}

/// Where runs begin in the memory that they are copied to.
pub(crate) const fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(512)
}

impl NvidiaBackend {
    /// What a snapshot would take now.
    pub(crate) fn sources(&self, tables: &mut Tables) -> Result<Sources, SnapshotError> {
        let mut all = Sources::default();
        self.variables(tables, &mut all)?;
        arrays(tables, &mut all)?;
        self.handles(tables, &mut all)?;
        for (addr, bytes) in tables.arena.slabs() {
            let device = device_of(addr).ok_or(CuError::INVALID_VALUE)?;
            let ctx = self.context_on(device)?;
            let pieces = cut(Object::Memory, addr, bytes);
            all.runs.push(Run { device, ctx, from: From::Linear(addr), bytes, pieces });
        }
        Ok(all)
    }

    /// A context for copies of a device's memory.
    pub(crate) fn context_on(&self, device: u32) -> Result<Arc<Context>, CuError> {
        let raw = self.devices.get(device).ok_or(CuError::INVALID_DEVICE)?;
        self.shared.live.on(&self.shared.driver, device, raw)
    }

    fn variables(&self, tables: &mut Tables, all: &mut Sources) -> Result<(), SnapshotError> {
        let mut ids: Vec<ModuleId> = tables.modules.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            let Some(module) = tables.modules.get_mut(&id) else { continue };
            let ctx = Arc::clone(&module.ctx);
            if let Some(kernel) = module.allocator() {
                all.allocating.entry(ctx.id).or_insert((Arc::clone(&ctx), kernel.to_owned()));
            }
            let variables = module.variables().map_err(|why| unnamed(id, &why))?;
            all.runs.extend(runs_of_variables(id, &ctx, variables));
        }
        Ok(())
    }

    /// The program's handles, of which some may not be mapped, side by side.
    fn handles(&self, tables: &Tables, all: &mut Sources) -> Result<(), SnapshotError> {
        let driver = &self.shared.driver;
        let mut needed = HashMap::<u32, u64>::new();
        for (_, _, bytes, device) in tables.arena.handles() {
            *needed.entry(device).or_default() += bytes;
        }
        for (device, total) in needed {
            let ctx = self.context_on(device)?;
            let mut region = Region::reserve(driver, tables.arena.device(device)?, total)?;
            for (id, raw, bytes, _) in tables.arena.handles().filter(|h| h.3 == device) {
                let from = From::Linear(region.map(raw, bytes)?);
                let pieces = cut(Object::Handle(id), 0, bytes);
                all.runs.push(Run { device, ctx: Arc::clone(&ctx), from, bytes, pieces });
            }
            region.open()?;
            all.mappings.push(region);
        }
        Ok(())
    }
}

fn arrays(tables: &Tables, all: &mut Sources) -> Result<(), SnapshotError> {
    for (id, ctx, raw, desc) in tables.textures.arrays() {
        let texels = Texels::of(desc).ok_or_else(|| {
            let message = format!(
                "array {} has format {:#x}, whose texels kedge cannot copy: free it before a checkpoint",
                id.0, desc.format
            );
            SnapshotError::new(CuError::NOT_SUPPORTED, message)
        })?;
        let bytes = texels.bytes();
        let piece = Piece { object: Object::Array(id), start: 0, bytes };
        let (device, ctx) = (ctx.device, Arc::clone(ctx));
        let (from, pieces) = (From::Array(raw, texels), vec![(0, piece)]);
        all.runs.push(Run { device, ctx, from, bytes, pieces });
    }
    Ok(())
}

/// A module's variables, each by itself: the driver refuses a copy that leaves one of its
/// allocations, and does not tell where these end.
fn runs_of_variables<'a>(
    module: ModuleId,
    ctx: &'a Arc<Context>,
    variables: &'a [Variable],
) -> impl Iterator<Item = Run> + 'a {
    variables.iter().map(move |Variable { name, addr, bytes }| {
        let (name, bytes) = (name.clone(), *bytes);
        let piece = Piece { object: Object::Variable { module, name }, start: 0, bytes };
        let (ctx, device) = (Arc::clone(ctx), ctx.device);
        Run { device, ctx, from: From::Linear(*addr), bytes, pieces: vec![(0, piece)] }
    })
}

/// The pieces of a long object.
fn cut(object: Object, start: u64, bytes: u64) -> Vec<(u64, Piece)> {
    let piece = |at: u64| {
        let bytes = PIECE.min(bytes - at);
        (at, Piece { object: object.clone(), start: start + at, bytes })
    };
    (0..bytes.div_ceil(PIECE)).map(|n| piece(n * PIECE)).collect()
}

fn unnamed(module: ModuleId, why: &str) -> SnapshotError {
    let message = format!(
        "the variables of module {} cannot be found ({why}): load it from PTX, a cubin or a fatbin",
        module.0
    );
    SnapshotError::new(CuError::NOT_SUPPORTED, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_are_rows_and_slices() {
        let desc = |width, height, depth, format, channels| ArrayDesc {
            device: 0,
            width,
            height,
            depth,
            format,
            channels,
            flags: 0,
        };
        let line = Texels::of(&desc(10, 0, 0, 0x20, 4)).unwrap();
        assert_eq!((line, line.bytes()), (Texels { row: 160, rows: 1, slices: 1 }, 160));
        let layers = Texels::of(&desc(8, 0, 5, 0x01, 1)).unwrap();
        assert_eq!((layers.rows, layers.slices, layers.bytes()), (1, 5, 40));
        assert_eq!(Texels::of(&desc(8, 8, 0, 0x91, 1)), None, "a compressed format");
        assert_eq!(Texels::of(&desc(u64::MAX, 2, 0, 0x20, 4)), None);
    }

    #[test]
    fn long_objects_are_cut() {
        let pieces = cut(Object::Memory, 0x1000, 2 * PIECE + 5);
        let spans: Vec<_> = pieces.iter().map(|(at, p)| (*at, p.start, p.bytes)).collect();
        let expected = [
            (0, 0x1000, PIECE),
            (PIECE, 0x1000 + PIECE, PIECE),
            (2 * PIECE, 0x1000 + 2 * PIECE, 5),
        ];
        assert_eq!(spans, expected);
    }
}
