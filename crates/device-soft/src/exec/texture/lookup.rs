//! From the handles in a warp's registers to views that may be read.

use super::TextureView;
use crate::code::Inst;
use crate::exec::{Flow, Warp};
use crate::fault::FaultKind;
use crate::spec::WARP;
use std::sync::Arc;

/// Calls `body` with each distinct handle's view and the lanes of `mask` that hold it.
///
/// # Errors
/// The recorded fault, where a handle names nothing or its memory has been freed.
pub(super) fn each_view(
    warp: &mut Warp,
    inst: &Inst,
    mask: u32,
    handles: &[u64; WARP],
    mut body: impl FnMut(&mut Warp, &TextureView, u32) -> Result<(), Flow>,
) -> Result<(), Flow> {
    let mut left = mask;
    while left != 0 {
        let first = left.trailing_zeros() as usize;
        let handle = handles[first];
        let same = (0..WARP).fold(0, |same, lane| {
            same | u32::from(left >> lane & 1 != 0 && handles[lane] == handle) << lane
        });
        left &= !same;
        let Some(view) = find(warp, handle) else {
            let detail = format!("{handle:#x} is no texture or surface object");
            return Err(warp.fault(inst, first, FaultKind::IllegalAddress, None, detail));
        };
        body(warp, &view, same)?;
    }
    Ok(())
}

/// The view that `handle` names, if all of its memory is valid.
pub(super) fn find(warp: &Warp, handle: u64) -> Option<Arc<TextureView>> {
    let view = warp.services().texture(handle)?;
    // An array lives as long as its view; device memory can be freed under it.
    let spans = &warp.grid().spec.spans;
    let valid = |level: &super::ArrayView| {
        level.owner.is_some() || level.extent().is_some_and(|size| spans.covers(level.base, size))
    };
    view.levels.iter().all(valid).then_some(view)
}
