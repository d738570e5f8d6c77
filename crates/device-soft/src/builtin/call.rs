//! A builtin's view of the warp that calls it.

use crate::code::Inst;
use crate::exec::control::CallSite;
use crate::exec::{Flow, Warp};
use crate::fault::FaultKind;
use crate::launch::{Grid, Services};
use crate::memory::Space;
use crate::spec::WARP;

/// Longest string that a builtin reads, bytes.
const MAX_STRING: usize = 64 << 10;

/// A call of a builtin by the lanes of `mask`.
pub(crate) struct Call<'a> {
    warp: &'a mut Warp,
    inst: &'a Inst,
    site: &'a CallSite,
    mask: u32,
}

impl<'a> Call<'a> {
    /// # Safety
    /// `site` was lowered for the warp's current frame.
    pub(super) unsafe fn new(
        warp: &'a mut Warp,
        inst: &'a Inst,
        mask: u32,
        site: &'a CallSite,
    ) -> Self {
        Self { warp, inst, site, mask }
    }

    /// The lanes that call, in order.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = usize> + use<> {
        let mask = self.mask;
        (0..WARP).filter(move |lane| mask >> lane & 1 != 0)
    }

    /// Argument `index` of a lane: its first `N` bytes, zeros where it has fewer.
    pub(crate) fn argument<const N: usize>(&self, lane: usize, index: usize) -> [u8; N] {
        let mut out = [0; N];
        if let Some(place) = self.site.arguments.get(index) {
            let len = N.min(place.bytes as usize);
            // SAFETY: lowering put the argument into this frame, of every lane.
            unsafe { self.frame(lane, place.caller).copy_to_nonoverlapping(out.as_mut_ptr(), len) };
        }
        out
    }

    pub(crate) fn u32(&self, lane: usize, index: usize) -> u32 {
        u32::from_le_bytes(self.argument(lane, index))
    }

    pub(crate) fn u64(&self, lane: usize, index: usize) -> u64 {
        u64::from_le_bytes(self.argument(lane, index))
    }

    /// Stores a lane's result, if the caller takes it.
    pub(crate) fn set_result<const N: usize>(&mut self, lane: usize, value: [u8; N]) {
        if let Some(place) = self.site.results.first() {
            let len = N.min(place.bytes as usize);
            // SAFETY: lowering reserved the result's place in this frame, of every lane.
            unsafe { self.frame(lane, place.caller).copy_from_nonoverlapping(value.as_ptr(), len) };
        }
    }

    /// Returns a cudaError_t, which the lane's thread also remembers if it is one.
    pub(crate) fn set_status(&mut self, lane: usize, status: u32) {
        if status != 0 {
            self.set_error(lane, status);
        }
        self.set_result(lane, status.to_le_bytes());
    }

    /// Sets the last error of a lane's thread.
    pub(crate) fn set_error(&self, lane: usize, error: u32) {
        self.services().set_last_error(self.thread_number(lane), error);
    }

    fn frame(&self, lane: usize, offset: u32) -> *mut u8 {
        let base = self.warp.local.wrapping_add(lane * self.warp.local_len as usize);
        base.wrapping_add((self.warp.current.local + offset) as usize)
    }

    /// Reads a lane's memory at a generic address.
    ///
    /// # Errors
    /// The recorded fault where the range is not all valid.
    pub(crate) fn read<const N: usize>(&mut self, lane: usize, addr: u64) -> Result<[u8; N], Flow> {
        let mut out = [0; N];
        let from = self.pointer(lane, addr, N as u64)?;
        // SAFETY: `pointer` found N valid bytes.
        unsafe { from.copy_to_nonoverlapping(out.as_mut_ptr(), N) };
        Ok(out)
    }

    /// Writes a lane's memory at a generic address.
    ///
    /// # Errors
    /// As `read`.
    pub(crate) fn write(&mut self, lane: usize, addr: u64, bytes: &[u8]) -> Result<(), Flow> {
        let to = self.pointer(lane, addr, bytes.len() as u64)?;
        // SAFETY: `pointer` found as many valid bytes.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// A lane's string at a generic address, without its NUL; cut at 64 KiB.
    ///
    /// # Errors
    /// The recorded fault where the string leaves valid memory before it ends.
    pub(crate) fn string(&mut self, lane: usize, addr: u64) -> Result<Vec<u8>, Flow> {
        let mut out = Vec::new();
        while out.len() < MAX_STRING {
            let [byte] = self.read(lane, addr.wrapping_add(out.len() as u64))?;
            if byte == 0 {
                break;
            }
            out.push(byte);
        }
        Ok(out)
    }

    fn pointer(&mut self, lane: usize, addr: u64, size: u64) -> Result<*mut u8, Flow> {
        let found = self.warp.resolve(self.inst, lane, Space::Generic, addr, size, 1);
        found.ok_or(Flow::Fault)
    }

    /// Records a fault of `lane`; the body returns it.
    pub(crate) fn fault(&mut self, lane: usize, kind: FaultKind, detail: String) -> Flow {
        self.warp.fault(self.inst, lane, kind, None, detail)
    }

    pub(crate) fn services(&self) -> &dyn Services {
        self.warp.services()
    }

    pub(crate) fn grid(&self) -> &Grid {
        self.warp.grid()
    }

    /// `%ctaid` of the calling block.
    pub(crate) fn block(&self) -> [u32; 3] {
        // SAFETY: the block outlives the warp's run, and only this warp runs.
        unsafe { (*self.warp.block).id }
    }

    /// The block's number in its grid.
    pub(crate) fn block_number(&self) -> u64 {
        let (block, grid) = (self.block().map(u64::from), self.grid().spec.grid.map(u64::from));
        block[0] + grid[0] * (block[1] + grid[1] * block[2])
    }

    /// The number of a lane's thread in its grid.
    pub(crate) fn thread_number(&self, lane: usize) -> u64 {
        let in_block = u64::from(self.warp.index) * WARP as u64 + lane as u64;
        self.block_number() * u64::from(self.grid().threads) + in_block
    }

    /// `%tid` of a lane.
    pub(crate) fn thread(&self, lane: usize) -> [u32; 3] {
        self.grid().thread_of(self.warp.index as usize * WARP + lane)
    }
}
