//! Special registers, and values that depend on the grid or the frame.

use super::select::Selected;
use super::{Flow, Isa, Op, Warp};
use crate::code::Inst;
use crate::spec::{RESERVED_SHARED, WARP};
use std::sync::OnceLock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A special register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Special {
    TidX,
    TidY,
    TidZ,
    NtidX,
    NtidY,
    NtidZ,
    CtaidX,
    CtaidY,
    CtaidZ,
    NctaidX,
    NctaidY,
    NctaidZ,
    ClusterIdX,
    ClusterIdY,
    ClusterIdZ,
    NclusterIdX,
    NclusterIdY,
    NclusterIdZ,
    ClusterCtaidX,
    ClusterCtaidY,
    ClusterCtaidZ,
    ClusterNctaidX,
    ClusterNctaidY,
    ClusterNctaidZ,
    ClusterCtaRank,
    ClusterNctaRank,
    IsExplicitCluster,
    LaneId,
    WarpId,
    NwarpId,
    SmId,
    NsmId,
    LanemaskEq,
    LanemaskLe,
    LanemaskLt,
    LanemaskGe,
    LanemaskGt,
    Clock,
    ClockHi,
    Clock64,
    GlobalTimer,
    GlobalTimerLo,
    GlobalTimerHi,
    DynamicSmemSize,
    TotalSmemSize,
    AggregateSmemSize,
    ReservedBegin,
    ReservedMiddle,
    ReservedEnd,
    ReservedSize,
    GridId,
    WorkspaceLo,
    WorkspaceHi,
    Zero,
    Zero64,
    WarpSize,
}

/// Whether the register tells of reserved shared memory.
pub(crate) fn is_reserved(name: &str) -> bool {
    name.starts_with("%reserved_smem")
}

/// The register that a name with its `%` stands for.
pub(crate) fn find(name: &str) -> Option<Special> {
    use Special::*;
    Some(match name {
        "%tid.x" => TidX,
        "%tid.y" => TidY,
        "%tid.z" => TidZ,
        "%ntid.x" => NtidX,
        "%ntid.y" => NtidY,
        "%ntid.z" => NtidZ,
        "%ctaid.x" => CtaidX,
        "%ctaid.y" => CtaidY,
        "%ctaid.z" => CtaidZ,
        "%nctaid.x" => NctaidX,
        "%nctaid.y" => NctaidY,
        "%nctaid.z" => NctaidZ,
        "%clusterid.x" => ClusterIdX,
        "%clusterid.y" => ClusterIdY,
        "%clusterid.z" => ClusterIdZ,
        "%nclusterid.x" => NclusterIdX,
        "%nclusterid.y" => NclusterIdY,
        "%nclusterid.z" => NclusterIdZ,
        "%cluster_ctaid.x" => ClusterCtaidX,
        "%cluster_ctaid.y" => ClusterCtaidY,
        "%cluster_ctaid.z" => ClusterCtaidZ,
        "%cluster_nctaid.x" => ClusterNctaidX,
        "%cluster_nctaid.y" => ClusterNctaidY,
        "%cluster_nctaid.z" => ClusterNctaidZ,
        "%cluster_ctarank" => ClusterCtaRank,
        "%cluster_nctarank" => ClusterNctaRank,
        "%is_explicit_cluster" => IsExplicitCluster,
        "%laneid" => LaneId,
        "%warpid" => WarpId,
        "%nwarpid" => NwarpId,
        "%smid" => SmId,
        "%nsmid" => NsmId,
        "%lanemask_eq" => LanemaskEq,
        "%lanemask_le" => LanemaskLe,
        "%lanemask_lt" => LanemaskLt,
        "%lanemask_ge" => LanemaskGe,
        "%lanemask_gt" => LanemaskGt,
        "%clock" => Clock,
        "%clock_hi" => ClockHi,
        "%clock64" => Clock64,
        "%globaltimer" => GlobalTimer,
        "%globaltimer_lo" => GlobalTimerLo,
        "%globaltimer_hi" => GlobalTimerHi,
        "%dynamic_smem_size" => DynamicSmemSize,
        "%total_smem_size" => TotalSmemSize,
        "%aggr_smem_size" => AggregateSmemSize,
        "%reserved_smem_offset_begin" | "%reserved_smem_offset_0" => ReservedBegin,
        "%reserved_smem_offset_1" => ReservedMiddle,
        "%reserved_smem_offset_end" => ReservedEnd,
        "%reserved_smem_offset_cap" => ReservedSize,
        "%gridid" => GridId,
        "WARP_SZ" => WarpSize,
        // Cooperative groups find the grid's workspace there.
        "%envreg1" => WorkspaceHi,
        "%envreg2" => WorkspaceLo,
        _ if name.starts_with("%envreg") => Zero,
        _ if name.starts_with("%pm") && name.ends_with("_64") => Zero64,
        _ if name.starts_with("%pm") => Zero,
        _ => return None,
    })
}

impl Special {
    /// Whether it is a 64-bit register.
    pub(crate) fn wide(self) -> bool {
        matches!(self, Special::Clock64 | Special::GlobalTimer | Special::GridId | Special::Zero64)
    }

    /// The instruction that writes it to op[0].
    pub(crate) fn selected(self) -> Selected {
        let selected = match self {
            _ if self.wide() => Selected::scalar::<Read64>([]),
            Special::TidX | Special::TidY | Special::TidZ => Selected::new::<ReadTid>([]),
            _ if self.varies() => Selected::scalar::<Read32>([]),
            Special::Clock | Special::ClockHi | Special::GlobalTimerLo | Special::GlobalTimerHi => {
                Selected::scalar::<ReadTime>([])
            }
            _ => Selected::new::<ReadUniform>([]),
        };
        selected.imm(self as u64)
    }

    fn from_imm(imm: u64) -> Special {
        // SAFETY: only `selected` writes the field, from a value of this type.
        unsafe { std::mem::transmute::<u32, Special>(imm as u32) }
    }

    /// Whether it differs from lane to lane.
    fn varies(self) -> bool {
        matches!(
            self,
            Special::TidX
                | Special::TidY
                | Special::TidZ
                | Special::LaneId
                | Special::LanemaskEq
                | Special::LanemaskLe
                | Special::LanemaskLt
                | Special::LanemaskGe
                | Special::LanemaskGt
        )
    }

    /// Its value in a lane, for the 32-bit ones.
    fn value(self, warp: &Warp, lane: u32) -> u32 {
        let grid = warp.grid();
        let spec = &grid.spec;
        // SAFETY: the block outlives the warp's run.
        let block = unsafe { (*warp.block).id };
        let dim = self as u32 % 3;
        let cluster = spec.cluster[dim as usize].max(1);
        match self {
            Special::TidX | Special::TidY | Special::TidZ => {
                warp.tid[self as usize].0[lane as usize]
            }
            Special::NtidX | Special::NtidY | Special::NtidZ => spec.block[dim as usize],
            Special::CtaidX | Special::CtaidY | Special::CtaidZ => block[dim as usize],
            Special::NctaidX | Special::NctaidY | Special::NctaidZ => spec.grid[dim as usize],
            Special::ClusterIdX | Special::ClusterIdY | Special::ClusterIdZ => {
                block[dim as usize] / cluster
            }
            Special::NclusterIdX | Special::NclusterIdY | Special::NclusterIdZ => {
                spec.grid[dim as usize] / cluster
            }
            Special::ClusterCtaidX | Special::ClusterCtaidY | Special::ClusterCtaidZ => {
                block[dim as usize] % cluster
            }
            Special::ClusterNctaidX | Special::ClusterNctaidY | Special::ClusterNctaidZ => cluster,
            Special::ClusterCtaRank => {
                let [x, y, z] = [0, 1, 2].map(|d: usize| block[d] % spec.cluster[d].max(1));
                x + spec.cluster[0].max(1) * (y + spec.cluster[1].max(1) * z)
            }
            Special::ClusterNctaRank => spec.cluster.iter().map(|&n| n.max(1)).product(),
            // A launch with clusters of one block is not told from one without.
            Special::IsExplicitCluster => u32::from(spec.cluster.iter().any(|&n| n > 1)),
            Special::LaneId => lane,
            Special::WarpId => warp.index,
            Special::NwarpId => grid.warps(),
            Special::SmId => worker_number(),
            Special::NsmId => 64,
            Special::LanemaskEq => 1 << lane,
            Special::LanemaskLe => u32::MAX >> (31 - lane),
            Special::LanemaskLt => (1 << lane) - 1,
            Special::LanemaskGe => u32::MAX << lane,
            Special::LanemaskGt => u32::MAX << lane << 1,
            Special::Clock => clock() as u32,
            Special::ClockHi => (clock() >> 32) as u32,
            Special::GlobalTimerLo => global_timer() as u32,
            Special::GlobalTimerHi => (global_timer() >> 32) as u32,
            Special::DynamicSmemSize => spec.shared_bytes,
            Special::TotalSmemSize => grid.reserved_base,
            Special::AggregateSmemSize => grid.shared_len as u32,
            Special::ReservedBegin => grid.reserved_base,
            Special::ReservedMiddle => grid.reserved_base + RESERVED_SHARED / 2,
            Special::ReservedEnd => grid.shared_len as u32,
            Special::ReservedSize => RESERVED_SHARED,
            Special::WorkspaceLo => grid.workspace as u32,
            Special::WorkspaceHi => (grid.workspace >> 32) as u32,
            Special::WarpSize => WARP as u32,
            _ => 0,
        }
    }
}

/// Nanoseconds since the process started to count: a clock of 1 GHz.
fn clock() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// Nanoseconds since 1970.
fn global_timer() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// The number of this worker, which stands for a multiprocessor.
fn worker_number() -> u32 {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    thread_local! {
        static NUMBER: u32 = NEXT.fetch_add(1, Ordering::Relaxed) % 64;
    }
    NUMBER.with(|number| *number)
}

/// `%tid`: from the warp's own rows.
struct ReadTid;

impl Op for ReadTid {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let row = warp.tid[inst.imm as usize % 3].0;
        // SAFETY: op[0] is a 32-bit destination.
        unsafe { warp.set32(inst.op[0], &row, mask) };
        Flow::Next
    }
}

/// A 32-bit register that differs from lane to lane.
struct Read32;

impl Op for Read32 {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let special = Special::from_imm(inst.imm);
        let row = std::array::from_fn(|lane| special.value(warp, lane as u32));
        // SAFETY: op[0] is a 32-bit destination.
        unsafe { warp.set32(inst.op[0], &row, mask) };
        Flow::Next
    }
}

/// A 32-bit register that the lanes share.
struct ReadUniform;

impl Op for ReadUniform {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let value = Special::from_imm(inst.imm).value(warp, 0);
        // SAFETY: op[0] is a 32-bit destination.
        unsafe { warp.set32(inst.op[0], &[value; WARP], mask) };
        Flow::Next
    }
}

/// Half of a clock. A loop of nothing else waits for time to pass, and lets others run meanwhile.
struct ReadTime;

impl Op for ReadTime {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        warp.watch_time(inst);
        let value = Special::from_imm(inst.imm).value(warp, 0);
        // SAFETY: op[0] is a 32-bit destination.
        unsafe { warp.set32(inst.op[0], &[value; WARP], mask) };
        Flow::Next
    }
}

/// A 64-bit register; of the clocks as [`ReadTime`].
struct Read64;

impl Op for Read64 {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let special = Special::from_imm(inst.imm);
        if matches!(special, Special::Clock64 | Special::GlobalTimer) {
            warp.watch_time(inst);
        }
        let value = match special {
            Special::Clock64 => clock(),
            Special::GlobalTimer => global_timer(),
            Special::GridId => warp.grid().id,
            _ => 0,
        };
        // SAFETY: op[0] is a 64-bit destination.
        unsafe { warp.set64(inst.op[0], &[value; WARP], mask) };
        Flow::Next
    }
}

/// The address of dynamic shared memory plus `imm`.
pub(crate) struct DynamicShared;

impl Op for DynamicShared {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let value = u64::from(warp.grid().dynamic_base).wrapping_add(inst.imm);
        // SAFETY: op[0] is a 64-bit destination.
        unsafe { warp.set64(inst.op[0], &[value; WARP], mask) };
        Flow::Next
    }
}

/// The frame's local memory plus `imm`.
pub(crate) struct FrameAddress;

impl Op for FrameAddress {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let value = u64::from(warp.current.local).wrapping_add(inst.imm);
        // SAFETY: op[0] is a 64-bit destination.
        unsafe { warp.set64(inst.op[0], &[value; WARP], mask) };
        Flow::Next
    }
}
