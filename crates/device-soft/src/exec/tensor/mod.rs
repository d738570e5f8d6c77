//! Tensor copies: `cp.async.bulk.tensor`, `cp.reduce.async.bulk.tensor`, and the tensor maps that
//! they read ([`kedge_cuda_types::tensor_map`]).
//!
//! - [`rows`]: which elements of a tensor a copy takes.
//! - [`copy`]: moving them.
//! - [`replace`]: changing a map on the device.

mod copy;
mod replace;
mod rows;

use super::atomic::Operation;
use super::control::Nop;
use super::lanewise::Parts;
use super::select::{Arg, Query, Selected};
use crate::memory::Space;
use kedge_ptx::ast::{Operand, Type};

/// This family's selector.
pub(crate) fn select(query: &Query<'_>) -> Option<Selected> {
    let part = |index| query.part(index);
    match (part(0), part(1), part(2), part(3), part(4)) {
        ("cp", "async", "bulk", "prefetch", "tensor") => prefetch(query),
        ("cp", "async", "bulk", "tensor", _) => copy(query),
        ("cp", "reduce", "async", "bulk", "tensor") => reduce(query),
        ("tensormap", ..) => replace::select(query),
        _ => None,
    }
}

/// How a copy's instruction is laid out, packed in `Inst::aux`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Form {
    /// Coordinates, 1 to 5.
    rank: usize,
    im2col: bool,
    /// Offsets that follow the coordinates of an im2col load.
    offsets: usize,
    multicast: bool,
}

impl Form {
    fn encode(self) -> u32 {
        self.rank as u32
            | u32::from(self.im2col) << 3
            | (self.offsets as u32) << 4
            | u32::from(self.multicast) << 6
    }

    fn decode(aux: u32) -> Form {
        Form {
            rank: (aux & 7) as usize,
            im2col: aux >> 3 & 1 != 0,
            offsets: (aux >> 4 & 3) as usize,
            multicast: aux >> 6 & 1 != 0,
        }
    }
}

/// Takes what all of the family's names have: dimensions, load mode, cache hint; `words` is what is
/// left out of account. None: something that this device lacks.
fn form(parts: &mut Parts<'_>, words: &[&str]) -> Option<(Form, bool)> {
    words.iter().for_each(|word| {
        parts.take(word);
    });
    let rank = parts.take_map(|part| {
        part.strip_suffix('d')?.parse().ok().filter(|rank| (1..=5).contains(rank))
    })?;
    let cached = parts.take("L2::cache_hint");
    let loads = parts.take("im2col");
    let stores = parts.take("im2col_no_offs");
    let _tiled = parts.take("tile");
    let im2col = loads || stores;
    if im2col && rank < 3 {
        return None;
    }
    let offsets = if loads { rank - 2 } else { 0 };
    Some((Form { rank, im2col, offsets, multicast: false }, cached))
}

/// The arguments of `[map, {coordinates}]`, which is operand `index`.
fn map_args(query: &Query<'_>, index: usize, rank: usize) -> Option<Vec<Arg>> {
    let Operand::Bracket(items) = query.operand(index)? else { return None };
    let map = match items.first()? {
        Operand::Address(..) => Arg::Pointer(Space::Generic),
        _ => Arg::Src(Type::U64),
    };
    let coordinates = match items.get(1)? {
        Operand::Vector(items) => items.len(),
        _ => 1,
    };
    let mut args = vec![map];
    args.extend(vec![Arg::Src(Type::S32); rank]);
    (items.len() == 2 && coordinates == rank).then_some(args)
}

/// `cp.async.bulk.tensor.dim.dst.src{.load_mode}.completion{.multicast}{.level} …`.
fn copy(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    let (mut form, cached) = form(&mut parts, &["async", "bulk", "tensor"])?;
    let policy = vec![Arg::Src(Type::U64); usize::from(cached)];
    let global = parts.take("global");
    if parts.take("bulk_group") {
        let known = parts.take("shared::cta") && parts.done() && form.offsets == 0;
        let map = map_args(query, 0, form.rank)?;
        let args = [map, vec![Arg::Pointer(Space::Shared)], policy].concat();
        return (global && known).then(|| Selected::scalar::<copy::Store>(args).aux(form.encode()));
    }
    let shared = parts.take("shared::cluster") || parts.take("shared::cta");
    form.multicast = parts.take("multicast::cluster");
    let completes = parts.take("mbarrier::complete_tx::bytes");
    if !shared || !global || !completes || !parts.done() || form.im2col != (form.offsets > 0) {
        return None;
    }
    let args = [
        vec![Arg::Pointer(Space::Shared)],
        map_args(query, 1, form.rank)?,
        vec![Arg::Pointer(Space::Shared)],
        vec![Arg::Src(Type::U16); form.offsets + usize::from(form.multicast)],
        policy,
    ];
    Some(Selected::scalar::<copy::Load>(args.concat()).aux(form.encode()))
}

/// `cp.reduce.async.bulk.tensor.dim.global.shared::cta.op{.load_mode}.bulk_group{.level} [map,
/// {…}],
/// [src]`.
fn reduce(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    let words = ["reduce", "async", "bulk", "tensor", "global", "shared::cta", "bulk_group"];
    let (form, cached) = form(&mut parts, &words)?;
    let operation = parts.take_map(Operation::from_name).filter(|o| !o.compares())?;
    if !parts.done() || form.offsets > 0 || operation == Operation::Exch {
        return None;
    }
    let mut args = map_args(query, 0, form.rank)?;
    args.push(Arg::Pointer(Space::Shared));
    args.extend(vec![Arg::Src(Type::U64); usize::from(cached)]);
    Some(Selected::scalar::<copy::Reduce>(args).aux(form.encode()).imm(operation as u64))
}

/// `cp.async.bulk.prefetch.tensor.dim.L2.global{.load_mode}{.level} [map, {…}]{, offsets}`: a hint.
fn prefetch(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    let words = ["async", "bulk", "prefetch", "tensor", "L2", "global"];
    let (form, cached) = form(&mut parts, &words)?;
    let args = [
        map_args(query, 0, form.rank)?,
        vec![Arg::Src(Type::U16); form.offsets],
        vec![Arg::Src(Type::U64); usize::from(cached)],
    ];
    parts.done().then(|| Selected::scalar::<Nop>(args.concat()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_survive_encoding() {
        let form = Form { rank: 5, im2col: true, offsets: 3, multicast: true };
        assert_eq!(Form::decode(form.encode()), form);
        let form = Form { rank: 1, im2col: false, offsets: 0, multicast: false };
        assert_eq!(Form::decode(form.encode()), form);
    }
}
