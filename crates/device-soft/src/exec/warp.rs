//! A warp: its registers, and all that it knows while it runs.

use super::Flow;
use super::access::SpanCache;
use super::fragment::Fragment;
use crate::block::BlockState;
use crate::code::{Inst, Program};
use crate::fault::FaultKind;
use crate::launch::{Grid, Services};
use crate::spec::WARP;
use std::sync::Arc;

/// A 32-bit register of all lanes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Row32(pub [u32; WARP]);

/// A 64-bit register of all lanes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Row64(pub [u64; WARP]);

/// The register banks of a warp: all frames of all its fragments.
#[derive(Default)]
pub(crate) struct Banks {
    pub rows32: Vec<Row32>,
    pub rows64: Vec<Row64>,
    pub preds: Vec<u32>,
}

impl Banks {
    /// Grows the banks to hold at least that many slots.
    pub(crate) fn reserve(&mut self, slots32: usize, slots64: usize, preds: usize) {
        if self.rows32.len() < slots32 {
            self.rows32.resize(slots32, Row32([0; WARP]));
        }
        if self.rows64.len() < slots64 {
            self.rows64.resize(slots64, Row64([0; WARP]));
        }
        if self.preds.len() < preds {
            self.preds.resize(preds, 0);
        }
    }
}

/// A warp.
///
/// Banks of 32-bit, 64-bit and predicate registers; the pointers are to the current frame's base.
/// Lanes are columns, so fragments of the warp that are in different functions may share rows.
pub struct Warp {
    pub(crate) r32: *mut Row32,
    pub(crate) r64: *mut Row64,
    pub(crate) preds: *mut u32,
    /// One past the last constant of the program's pools.
    pub(crate) pool32: *const Row32,
    pub(crate) pool64: *const Row64,
    /// Lanes of the running fragment.
    pub(crate) active: u32,
    /// The carry flag (`add.cc`) of each lane.
    pub carry: u32,
    /// The program counter at which the running fragment meets another.
    pub(crate) stop: u32,
    /// Instructions until the warp is set aside; loops and polling draw on it.
    pub(crate) fuel: i64,
    /// The block's shared memory, as long as this block may use.
    pub(crate) shared: *mut u8,
    pub(crate) shared_len: u64,
    /// Local memory of lane 0; lane `i`'s is `i * local_len` further.
    pub(crate) local: *mut u8,
    pub(crate) local_len: u64,
    pub(crate) cache: *mut SpanCache,
    pub(crate) grid: *const Grid,
    pub(crate) block: *mut BlockState,
    pub(crate) operands: *const i32,
    pub(crate) code: *const Inst,

    pub(crate) current: Fragment,
    pub(crate) others: Vec<Fragment>,
    /// Lanes that have not exited.
    pub(crate) live: u32,
    pub(crate) slices: u64,
    /// The cluster barrier's generation at the last arrival.
    pub(crate) cluster_generation: u32,
    /// Let another fragment run, though this one would be first.
    pub(crate) rotate: bool,
    /// Accesses in this slice that saw what they had seen before, and the last such access.
    pub(crate) polls: u32,
    pub(crate) last_poll: (usize, u64),
    /// The warp asked to be set aside soon (`nanosleep`, a long spin).
    pub(crate) yielded: bool,
    /// It has let the block's other warps catch up ([`super::run::Stagger`]).
    pub(crate) staggered: bool,
    /// The grid whose `%tid` values the warp holds.
    pub(crate) shape: u64,
    /// Number of the warp in its block.
    pub(crate) index: u32,
    /// `%tid`, by dimension.
    pub(crate) tid: [Row32; 3],
    pub(crate) banks: Banks,
    pub(crate) fault: Option<Box<FaultRecord>>,
}

/// What went wrong, before it is a [`crate::Fault`].
#[derive(Debug, Clone)]
pub(crate) struct FaultRecord {
    pub kind: FaultKind,
    pub lane: usize,
    pub address: Option<u64>,
    /// How many bytes the lane was to access there.
    pub bytes: Option<u64>,
    /// The instruction's place in the program's code.
    pub pc: Option<usize>,
    pub line: u32,
    pub detail: String,
}

impl Warp {
    /// # Safety
    /// `slot` is an operand in the 32-bit bank.
    #[inline(always)]
    pub unsafe fn row32(&self, slot: i32) -> &[u32; WARP] {
        let base = if slot >= 0 { self.r32.cast_const() } else { self.pool32 };
        // SAFETY: lowering gave the slot, so it lies in the frame or in the pool.
        unsafe { &(*base.offset(slot as isize)).0 }
    }

    /// # Safety
    /// `slot` is an operand in the 64-bit bank.
    #[inline(always)]
    pub unsafe fn row64(&self, slot: i32) -> &[u64; WARP] {
        let base = if slot >= 0 { self.r64.cast_const() } else { self.pool64 };
        // SAFETY: lowering gave the slot, so it lies in the frame or in the pool.
        unsafe { &(*base.offset(slot as isize)).0 }
    }

    /// Stores the lanes of `mask`.
    ///
    /// # Safety
    /// `slot` is a destination in the 32-bit bank.
    #[inline(always)]
    pub unsafe fn set32(&mut self, slot: i32, value: &[u32; WARP], mask: u32) {
        // SAFETY: lowering gave the slot, so it lies in the frame.
        let row = unsafe { &mut (*self.r32.offset(slot as isize)).0 };
        if mask == u32::MAX {
            *row = *value;
        } else {
            for lane in 0..WARP {
                row[lane] = if mask >> lane & 1 != 0 { value[lane] } else { row[lane] };
            }
        }
    }

    /// Stores the lanes of `mask`.
    ///
    /// # Safety
    /// `slot` is a destination in the 64-bit bank.
    #[inline(always)]
    pub unsafe fn set64(&mut self, slot: i32, value: &[u64; WARP], mask: u32) {
        // SAFETY: lowering gave the slot, so it lies in the frame.
        let row = unsafe { &mut (*self.r64.offset(slot as isize)).0 };
        if mask == u32::MAX {
            *row = *value;
        } else {
            for lane in 0..WARP {
                row[lane] = if mask >> lane & 1 != 0 { value[lane] } else { row[lane] };
            }
        }
    }

    /// A predicate of all lanes, lane 0 in bit 0.
    ///
    /// # Safety
    /// `slot` is an operand in the predicate bank. −1 is true, −2 false.
    #[inline(always)]
    pub unsafe fn pred(&self, slot: i32) -> u32 {
        if slot < 0 {
            return if slot == -1 { u32::MAX } else { 0 };
        }
        // SAFETY: lowering gave the slot, so it lies in the frame.
        unsafe { *self.preds.offset(slot as isize) }
    }

    /// Stores the bits of `mask`.
    ///
    /// # Safety
    /// `slot` is a destination in the predicate bank.
    #[inline(always)]
    pub unsafe fn set_pred(&mut self, slot: i32, bits: u32, mask: u32) {
        // SAFETY: lowering gave the slot, so it lies in the frame.
        let pred = unsafe { &mut *self.preds.offset(slot as isize) };
        *pred = (*pred & !mask) | (bits & mask);
    }

    /// The operands of an instruction with more than six.
    ///
    /// # Safety
    /// `inst` was lowered with an operand list.
    #[inline(always)]
    pub unsafe fn operands(&self, inst: &Inst) -> &'static [i32] {
        // SAFETY: lowering wrote `op[1]` operands at `op[0]`; the program outlives the warp's run.
        unsafe {
            std::slice::from_raw_parts(self.operands.add(inst.op[0] as usize), inst.op[1] as usize)
        }
    }

    /// The device's services: textures, printing, the heap.
    pub fn services(&self) -> &dyn Services {
        self.grid().spec.services.as_ref()
    }

    pub(crate) fn grid(&self) -> &Grid {
        // SAFETY: the grid outlives the warp's run.
        unsafe { &*self.grid }
    }

    /// The program, for a lifetime of the caller's choice.
    ///
    /// # Safety
    /// The reference must not outlive the warp's run.
    pub(crate) unsafe fn program<'p>(&self) -> &'p Program {
        // SAFETY: the grid keeps the program for the whole run.
        unsafe { &*Arc::as_ptr(&self.grid().spec.program) }
    }

    /// The place of `inst` in the program's code.
    pub(crate) fn pc_of(&self, inst: &Inst) -> u32 {
        let bytes = std::ptr::from_ref(inst) as usize - self.code as usize;
        (bytes / size_of::<Inst>()) as u32
    }

    /// Records a fault of `lane`; the handler returns what this returns.
    #[cold]
    pub fn fault(
        &mut self,
        inst: &Inst,
        lane: usize,
        kind: FaultKind,
        address: Option<u64>,
        detail: impl Into<String>,
    ) -> Flow {
        self.fault = Some(Box::new(FaultRecord {
            kind,
            lane,
            address,
            bytes: None,
            pc: self.place_of(inst),
            line: inst.line,
            detail: detail.into(),
        }));
        Flow::Fault
    }

    /// Where an instruction stands in the program's code; `None` for one that a handler made up.
    fn place_of(&self, inst: &Inst) -> Option<usize> {
        let (code, inst) = (self.grid().spec.program.code.as_ptr_range(), std::ptr::from_ref(inst));
        let offset = || inst.addr() - code.start.addr();
        code.contains(&inst).then(|| offset() / size_of::<Inst>())
    }
}
