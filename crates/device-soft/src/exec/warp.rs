//! A warp's registers.

use crate::code::Inst;
use crate::launch::Services;
use crate::memory::Space;
use crate::spec::WARP;

/// A 32-bit register of all lanes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Row32(pub [u32; WARP]);

/// A 64-bit register of all lanes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Row64(pub [u64; WARP]);

/// A warp while it runs.
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
    pub(crate) operands: *const i32,
    pub(crate) services: *const dyn Services,
    /// Lanes of the running fragment.
    pub(crate) active: u32,
    /// The carry flag (`add.cc`) of each lane.
    pub carry: u32,
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

    /// The memory behind one lane's access of `size` bytes at `addr` of `space`. Where there is none,
    /// or `addr` is not a multiple of `align`, records the fault: the handler returns
    /// [`Flow::Fault`](super::Flow::Fault). Slow path: for handlers whose work dwarfs it.
    pub fn resolve(
        &mut self,
        inst: &Inst,
        lane: usize,
        space: Space,
        addr: u64,
        size: u64,
        align: u64,
    ) -> Option<*mut u8> {
        let _ = (inst, lane, space, addr, size, align);
        None
    }

    /// The device's services: textures, printing, the heap.
    pub fn services(&self) -> &dyn Services {
        // SAFETY: the grid, and with it its services, outlives the warp's run.
        unsafe { &*self.services }
    }
}
