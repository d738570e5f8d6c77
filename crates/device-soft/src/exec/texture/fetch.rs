//! `tex` and `tld4`.

use super::TextureView;
use super::lookup::{each_view, find};
use super::plane::Plane;
use super::sample::{self, Geometry, Point};
use crate::code::Inst;
use crate::exec::lanewise::{Parts, slots};
use crate::exec::{Arg, Flow, Isa, Lane, Op, Query, Selected, Warp};
use crate::spec::WARP;
use kedge_ptx::ast::{Operand, Type};
use std::sync::Arc;

/// A `tex` instruction, packed in `aux`.
#[derive(Debug, Clone, Copy)]
struct Fetch {
    geometry: Geometry,
    /// Coordinates are s32.
    integral: bool,
    detail: Detail,
    /// Elements of the coordinate vector.
    vector: usize,
    /// `tld4`'s channel.
    gather: Option<u32>,
    /// A predicate says whether the memory is there, after the results: arrays here have no gaps.
    resident: bool,
}

/// What says how detailed a mipmap's level is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Detail {
    Base,
    Level,
    /// Two vectors of derivatives, of this many elements each.
    Gradient(usize),
}

impl Fetch {
    fn encode(self) -> u32 {
        let (detail, elements) = match self.detail {
            Detail::Base => (0, 0),
            Detail::Level => (1, 0),
            Detail::Gradient(elements) => (2, elements as u32),
        };
        self.geometry as u32
            | u32::from(self.integral) << 3
            | detail << 4
            | elements << 6
            | (self.vector as u32) << 9
            | self.gather.map_or(0, |channel| channel + 1) << 12
            | u32::from(self.resident) << 15
    }

    fn decode(aux: u32) -> Self {
        Self {
            geometry: Geometry::from_index(aux & 7),
            integral: aux >> 3 & 1 != 0,
            detail: match aux >> 4 & 3 {
                0 => Detail::Base,
                1 => Detail::Level,
                _ => Detail::Gradient((aux >> 6 & 7) as usize),
            },
            vector: (aux >> 9 & 7) as usize,
            gather: (aux >> 12 & 7).checked_sub(1),
            resident: aux >> 15 & 1 != 0,
        }
    }

    /// Operands after the four results and the handle.
    fn operands(&self) -> usize {
        self.vector
            + match self.detail {
                Detail::Base => 0,
                Detail::Level => 1,
                Detail::Gradient(elements) => 2 * elements,
            }
    }
}

/// op = four results, perhaps a predicate, handle, coordinates, then a level or two vectors of
/// derivatives.
struct Tex;

impl Op for Tex {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let fetch = Fetch::decode(inst.aux);
        // SAFETY: the operands are as the selector listed them: the handle in the 64-bit bank, all
        // else in the 32-bit one.
        let (slots, handles, operands) = unsafe {
            let handle = 4 + usize::from(fetch.resident);
            let slots = slots(warp, inst, handle + 1 + fetch.operands());
            let mut operands = [[0u32; WARP]; 12];
            for (row, slot) in operands.iter_mut().zip(&slots[handle + 1..]) {
                *row = u32::read(warp, *slot);
            }
            (slots, u64::read(warp, slots[handle]), operands)
        };
        let mut out = [[0u32; WARP]; 4];
        // A warp usually reads one plain texture; what that leaves goes lane by lane.
        let mut left = mask;
        if let Some(view) = plain_view(warp, mask, &handles, &fetch)
            && let Some(plane) = Plane::of(&view, fetch.geometry, fetch.integral)
        {
            left &= plane.sample([&operands[0], &operands[1]], &mut out);
        }
        let sampled = each_view(warp, inst, left, &handles, |_, view, lanes| {
            for lane in (0..WARP).filter(|lane| lanes >> lane & 1 != 0) {
                let operand = |index: usize| operands[index][lane];
                let first = usize::from(fetch.geometry.layered());
                let mut at = [0; 3];
                for (index, at) in at.iter_mut().enumerate().take(fetch.geometry.coordinates()) {
                    *at = operand(first + index);
                }
                let lod = match fetch.detail {
                    Detail::Base => 0.0,
                    // Of the coordinates' type.
                    Detail::Level if fetch.integral => operand(fetch.vector) as i32 as f32,
                    Detail::Level => f32::from_bits(operand(fetch.vector)),
                    Detail::Gradient(elements) => {
                        let derivative = |from: usize| {
                            [0, 1, 2].map(|index: usize| {
                                let inside = index < elements;
                                if inside { f32::from_bits(operand(from + index)) } else { 0.0 }
                            })
                        };
                        let dx = derivative(fetch.vector);
                        let dy = derivative(fetch.vector + elements);
                        sample::level_of_detail(view, fetch.geometry, dx, dy)
                    }
                };
                let layer = if first == 1 { operand(0) } else { 0 };
                let point = Point { layer, at, integral: fetch.integral, lod };
                let texel = match fetch.gather {
                    Some(channel) => sample::gather(view, fetch.geometry, &point, channel as usize),
                    None => sample::sample(view, fetch.geometry, &point),
                };
                for (row, channel) in out.iter_mut().zip(texel) {
                    row[lane] = channel;
                }
            }
            Ok(())
        });
        if let Err(flow) = sampled {
            return flow;
        }
        for (row, slot) in out.iter().zip(slots) {
            // SAFETY: the first four operands are 32-bit destinations (the selector).
            unsafe { u32::write(warp, *slot, row, mask) };
        }
        if fetch.resident {
            // SAFETY: the fifth operand is then a predicate (the selector).
            unsafe { warp.set_pred(slots[4], u32::MAX, mask) };
        }
        Flow::Next
    }
}

/// The view that all lanes read, where neither levels nor single channels are asked for.
fn plain_view(
    warp: &Warp,
    mask: u32,
    handles: &[u64; WARP],
    fetch: &Fetch,
) -> Option<Arc<TextureView>> {
    let handle = handles[mask.trailing_zeros() as usize % WARP];
    let same = (0..WARP).all(|lane| mask >> lane & 1 == 0 || handles[lane] == handle);
    let plain = fetch.gather.is_none() && !matches!(fetch.detail, Detail::Gradient(_));
    if same && plain { find(warp, handle) } else { None }
}

/// Elements of a vector operand; 1 for a plain register.
fn vector_len(operand: &Operand) -> usize {
    match operand {
        Operand::Vector(items) => items.len(),
        _ => 1,
    }
}

/// `tex{.base,.level,.grad}.geom.v4.dtype.ctype d, [a, c]…`, `tld4.comp.geom.v4.dtype.f32 d, [a,
/// c]`.
pub(super) fn select(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    let coordinate = parts.take_type()?;
    let result = parts.take_type()?;
    let gather = query.part(0) == "tld4";
    let channel = parts.take_map(|part| ["r", "g", "b", "a"].iter().position(|c| *c == part));
    let level = parts.take("level");
    let gradient = parts.take("grad");
    let _base = parts.take("base");
    let geometry = parts.take_map(Geometry::named)?;
    let (results, resident) = match query.operand(0)? {
        Operand::Pair(results, _) => (&**results, true),
        results => (results, false),
    };
    if !parts.take("v4")
        || !parts.done()
        || gather != channel.is_some()
        || !matches!(coordinate, Type::F32 | Type::S32)
        || !matches!(result, Type::F32 | Type::S32 | Type::U32)
        || vector_len(results) != 4
    {
        return None;
    }
    let vector = match query.operand(1)? {
        Operand::Bracket(items) if items.len() == 2 => vector_len(&items[1]),
        _ => return None,
    };
    let detail = match (level, gradient) {
        (false, false) => Detail::Base,
        (true, false) => Detail::Level,
        (false, true) => Detail::Gradient(vector_len(query.operand(2)?)),
        (true, true) => return None,
    };
    let fetch = Fetch {
        geometry,
        integral: coordinate == Type::S32,
        detail,
        vector,
        gather: channel.map(|channel| channel as u32),
        resident,
    };
    let needed = geometry.coordinates() + usize::from(geometry.layered());
    if !(needed..=4).contains(&vector) || fetch.operands() > 12 || gather && detail != Detail::Base
    {
        return None;
    }
    let mut args = vec![Arg::Dst(result); 4];
    args.extend(resident.then_some(Arg::Dst(Type::Pred)));
    args.push(Arg::Src(Type::U64));
    args.extend((0..vector).map(|index| {
        let layer = index == 0 && geometry.layered();
        Arg::Src(if layer { Type::U32 } else { coordinate })
    }));
    args.extend(vec![Arg::Src(Type::F32); fetch.operands() - vector]);
    // An offset or a depth to compare with is not something CUDA's own functions emit.
    let plain = query.instruction.operands.len()
        == 2 + match detail {
            Detail::Base => 0,
            Detail::Level => 1,
            Detail::Gradient(_) => 2,
        };
    plain.then(|| Selected::scalar::<Tex>(args).aux(fetch.encode()))
}
