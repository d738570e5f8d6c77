//! `txq` and `suq`: what a texture or surface is.

use super::TextureView;
use super::lookup::each_view;
use crate::code::Inst;
use crate::exec::lanewise::Parts;
use crate::exec::{Arg, Flow, Isa, Lane, Op, Query, Selected, Warp};
use crate::spec::WARP;
use kedge_ptx::ast::Type;

/// By position: `aux`.
const QUERIES: [&str; 6] =
    ["width", "height", "depth", "array_size", "num_mipmap_levels", "normalized_coords"];

fn answer(view: &TextureView, query: u32) -> u32 {
    let array = &view.levels[0];
    let layers = if array.cubemap { array.size[2] / 6 } else { array.size[2] };
    match query {
        0 => array.size[0],
        1 => array.size[1],
        2 if array.layered || array.cubemap => 1,
        2 => array.size[2],
        3 if array.layered => layers,
        3 => 0,
        4 => view.levels.len() as u32,
        _ => u32::from(view.sampler.normalised),
    }
}

/// op = result, handle.
struct Ask;

impl Op for Ask {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: op[1] is in the 64-bit bank (the selector).
        let handles = unsafe { u64::read(warp, inst.op[1]) };
        let mut out = [0u32; WARP];
        let asked = each_view(warp, inst, mask, &handles, |_, view, lanes| {
            for (lane, slot) in out.iter_mut().enumerate() {
                if lanes >> lane & 1 != 0 {
                    *slot = answer(view, inst.aux);
                }
            }
            Ok(())
        });
        if let Err(flow) = asked {
            return flow;
        }
        // SAFETY: op[0] is in the 32-bit bank (the selector).
        unsafe { u32::write(warp, inst.op[0], &out, mask) };
        Flow::Next
    }
}

/// `txq.query.b32 d, [a]`.
pub(super) fn select(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    if parts.take_type()? != Type::B32 {
        return None;
    }
    let what = parts.take_map(|part| QUERIES.iter().position(|query| *query == part))?;
    let selected = Selected::scalar::<Ask>([Arg::Dst(Type::B32), Arg::Address]);
    parts.done().then(|| selected.aux(what as u32))
}
