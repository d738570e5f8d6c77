//! `suld.b` and `sust.b`: elements of surfaces as bytes.

use super::lookup::each_view;
use super::sample::Geometry;
use super::{ArrayView, TextureView};
use crate::code::Inst;
use crate::exec::lanewise::{Parts, slots};
use crate::exec::{Arg, Flow, Isa, Lane, Op, Query, Selected, Warp};
use crate::fault::FaultKind;
use crate::spec::WARP;
use kedge_ptx::ast::{Operand, Type};

/// What happens to an access outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outside {
    Trap,
    /// The nearest element.
    Clamp,
    /// Loads give 0, stores are dropped.
    Zero,
}

/// A surface instruction, packed in `aux`.
#[derive(Debug, Clone, Copy)]
struct Access {
    geometry: Geometry,
    outside: Outside,
    /// log2 of the bytes of a register.
    size: u32,
    /// Registers: 1, 2 or 4.
    count: usize,
    /// Elements of the coordinate vector.
    vector: usize,
}

impl Access {
    fn encode(self) -> u32 {
        self.geometry as u32
            | (self.outside as u32) << 3
            | self.size << 5
            | (self.count as u32) << 7
            | (self.vector as u32) << 10
    }

    fn decode(aux: u32) -> Self {
        Self {
            geometry: Geometry::from_index(aux & 7),
            outside: [Outside::Trap, Outside::Clamp, Outside::Zero][(aux >> 3 & 3) as usize % 3],
            size: aux >> 5 & 3,
            count: (aux >> 7 & 7) as usize,
            vector: (aux >> 10 & 7) as usize,
        }
    }

    /// Bytes of an access, at most 32.
    fn bytes(&self) -> u64 {
        (self.count as u64) << self.size
    }

    /// The address for one lane's coordinates (x in bytes); None: outside.
    fn locate(&self, array: &ArrayView, at: [u32; 4]) -> Option<u64> {
        let (layer, [x, y, z]) = match self.geometry.layered() {
            true => (at[0], [at[1], at[2], 0]),
            false => (0, [at[0], at[1], at[2]]),
        };
        let [mut x, mut y, mut z] = [x, y, z].map(|at| i64::from(at as i32));
        let bytes = self.bytes() as i64;
        if self.geometry.coordinates() < 2 {
            y = 0;
        }
        if self.geometry != Geometry::D3 {
            z = layer.into();
        }
        let row = i64::from(array.size[0]) * i64::from(array.format.bytes());
        let [_, height, depth] = array.size.map(i64::from);
        if self.outside == Outside::Clamp {
            x = x.clamp(0, (row - bytes).max(0));
            y = y.clamp(0, height - 1);
            z = z.clamp(0, depth - 1);
        }
        let inside = x >= 0
            && x + bytes <= row
            && (0..height).contains(&y)
            && (0..depth).contains(&z)
            && x % bytes == 0;
        inside.then(|| array.address(x as u64, y as u32, z as u32))
    }
}

/// The address of each lane of `mask` (0: outside, and to be left out).
///
/// # Safety
/// `slots` are a handle in the 64-bit bank and the coordinates in the 32-bit one.
unsafe fn addresses(
    warp: &mut Warp,
    inst: &Inst,
    mask: u32,
    access: &Access,
    slots: &[i32],
) -> Result<[u64; WARP], Flow> {
    // SAFETY: the caller's contract.
    let (handles, rows) = unsafe {
        let mut rows = [[0u32; WARP]; 4];
        for (row, slot) in rows.iter_mut().zip(&slots[1..=access.vector]) {
            *row = u32::read(warp, *slot);
        }
        (u64::read(warp, slots[0]), rows)
    };
    let mut out = [0; WARP];
    each_view(warp, inst, mask, &handles, |warp, view: &TextureView, lanes| {
        for (lane, slot) in out.iter_mut().enumerate() {
            if lanes >> lane & 1 == 0 {
                continue;
            }
            let at = [0, 1, 2, 3].map(|index: usize| rows[index][lane]);
            match access.locate(&view.levels[0], at) {
                Some(addr) => *slot = addr,
                None if access.outside == Outside::Zero => {}
                None => {
                    let detail = format!("surface access outside, at {at:?}");
                    return Err(warp.fault(inst, lane, FaultKind::IllegalAddress, None, detail));
                }
            }
        }
        Ok(())
    })?;
    Ok(out)
}

/// `suld.b`: op = registers, handle, coordinates.
struct Load;

impl Op for Load {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let access = Access::decode(inst.aux);
        // SAFETY: the operands are as the selector listed them; `addresses` gives addresses of
        // `access.bytes()` bytes inside the view's memory, or 0.
        unsafe {
            let slots = slots(warp, inst, access.count + 1 + access.vector);
            let found = match addresses(warp, inst, mask, &access, &slots[access.count..]) {
                Ok(found) => found,
                Err(flow) => return flow,
            };
            let size = 1usize << access.size;
            for (index, slot) in slots[..access.count].iter().enumerate() {
                let mut values = [0u64; WARP];
                for (value, addr) in values.iter_mut().zip(found) {
                    if addr != 0 {
                        let from = (addr as *const u8).add(index * size);
                        let mut word = [0; 8];
                        std::ptr::copy_nonoverlapping(from, word.as_mut_ptr(), size);
                        *value = u64::from_le_bytes(word);
                    }
                }
                if size == 8 {
                    u64::write(warp, *slot, &values, mask);
                } else {
                    u32::write(warp, *slot, &values.map(|value| value as u32), mask);
                }
            }
        }
        Flow::Next
    }
}

/// `sust.b`: op = handle, coordinates, registers.
struct Store;

impl Op for Store {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let access = Access::decode(inst.aux);
        // SAFETY: the operands are as the selector listed them; `addresses` gives addresses of
        // `access.bytes()` bytes inside the view's memory, or 0.
        unsafe {
            let slots = slots(warp, inst, access.count + 1 + access.vector);
            let found = match addresses(warp, inst, mask, &access, slots) {
                Ok(found) => found,
                Err(flow) => return flow,
            };
            let size = 1usize << access.size;
            for (index, slot) in slots[1 + access.vector..].iter().enumerate() {
                let values = if size == 8 {
                    u64::read(warp, *slot)
                } else {
                    u32::read(warp, *slot).map(u64::from)
                };
                for (value, addr) in values.iter().zip(found) {
                    if addr != 0 {
                        let to = (addr as *mut u8).add(index * size);
                        std::ptr::copy_nonoverlapping(value.to_le_bytes().as_ptr(), to, size);
                    }
                }
            }
        }
        Flow::Next
    }
}

/// `suld.b.geom{.cop}{.vec}.dtype.clamp d, [a, b]`, `sust.b.… [a, b], c`.
pub(super) fn select(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    if parts.take_first()? != "b" {
        return None;
    }
    let geometry = parts.take_map(Geometry::named)?;
    let _cache = parts
        .take_map(|part| matches!(part, "ca" | "cg" | "cs" | "cv" | "wb" | "wt").then_some(()));
    let count = match (parts.take("v2"), parts.take("v4")) {
        (true, _) => 2,
        (_, true) => 4,
        _ => 1,
    };
    let outside = parts.take_map(|part| {
        Some(match part {
            "trap" => Outside::Trap,
            "clamp" => Outside::Clamp,
            "zero" => Outside::Zero,
            _ => return None,
        })
    })?;
    let ty = parts.take_type()?;
    let size = match ty {
        Type::B8 => 0,
        Type::B16 => 1,
        Type::B32 => 2,
        Type::B64 => 3,
        _ => return None,
    };
    let load = query.part(0) == "suld";
    let (place, data) = if load { (1, 0) } else { (0, 1) };
    let vector = match query.operand(place)? {
        Operand::Bracket(items) if items.len() == 2 => match &items[1] {
            Operand::Vector(items) => items.len(),
            _ => 1,
        },
        _ => return None,
    };
    let needed = geometry.coordinates() + usize::from(geometry.layered());
    if !parts.done()
        || query.lanes(data) != count
        || !(needed..=4).contains(&vector)
        || matches!(geometry, Geometry::Cube | Geometry::ACube)
    {
        return None;
    }
    let access = Access { geometry, outside, size, count, vector };
    let mut address = vec![Arg::Src(Type::U64)];
    address.extend(vec![Arg::Src(Type::S32); vector]);
    let selected = if load {
        let args = [vec![Arg::Dst(ty); count], address].concat();
        Selected::scalar::<Load>(args)
    } else {
        let args = [address, vec![Arg::Src(ty); count]].concat();
        Selected::scalar::<Store>(args)
    };
    Some(selected.aux(access.encode()))
}
