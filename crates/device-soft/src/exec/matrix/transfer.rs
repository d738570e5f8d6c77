//! `ldmatrix`, `stmatrix`, `movmatrix`: 8 × 8 matrices of 16-bit elements, one row to eight bytes'
//! worth of four lanes.

use super::{space, space_of};
use crate::code::Inst;
use crate::exec::lanewise::Parts;
use crate::exec::{Arg, Flow, Isa, Lane, Op, Query, Selected, Warp};
use crate::memory::Space;
use crate::spec::WARP;
use kedge_ptx::ast::Type;

/// `aux`: number of matrices, above the space's bits; and whether they are transposed.
const COUNT: u32 = 4;
const TRANSPOSED: u32 = 1 << 8;

/// The rows of one matrix.
type Matrix = [[u16; 8]; 8];

/// The row and column of the low and of the high half of a lane's register.
#[inline(always)]
fn places(lane: usize, transposed: bool) -> [(usize, usize); 2] {
    let (group, pair) = (lane / 4, lane % 4 * 2);
    if transposed { [(pair, group), (pair + 1, group)] } else { [(group, pair), (group, pair + 1)] }
}

/// A matrix as the warp's registers hold it.
fn to_registers(matrix: &Matrix, transposed: bool) -> [u32; WARP] {
    std::array::from_fn(|lane| {
        let [low, high] = places(lane, transposed).map(|(row, column)| matrix[row][column]);
        u32::from(low) | u32::from(high) << 16
    })
}

fn from_registers(words: &[u32; WARP], transposed: bool) -> Matrix {
    let mut matrix = [[0; 8]; 8];
    for (lane, word) in words.iter().enumerate() {
        let [low, high] = places(lane, transposed);
        matrix[low.0][low.1] = *word as u16;
        matrix[high.0][high.1] = (word >> 16) as u16;
    }
    matrix
}

/// The 16 bytes of row `row` of matrix `index`, whose address lane `8·index + row` gives.
fn row_memory(
    warp: &mut Warp,
    inst: &Inst,
    addresses: &[u64; WARP],
    index: usize,
    row: usize,
) -> Option<*mut [u8; 16]> {
    let lane = index * 8 + row;
    let memory = warp.resolve(inst, lane, space_of(inst.aux), addresses[lane], 16, 16)?;
    Some(memory.cast())
}

/// The rows' memory where all of them lie in the block's own shared memory, aligned.
#[inline(always)]
fn rows_of_block(
    warp: &Warp,
    inst: &Inst,
    addresses: &[u64; WARP],
    count: usize,
) -> Option<*const [u32; 4]> {
    let room = warp.shared_len.checked_sub(16)?;
    let good = |address: &u64| *address <= room && address.is_multiple_of(16);
    let here = space_of(inst.aux) == Space::Shared && addresses.iter().take(8 * count).all(good);
    here.then_some(warp.shared.cast_const().cast())
}

/// `ldmatrix`: op = registers, address.
struct Load;

impl Op for Load {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let count = (inst.aux >> COUNT & 7) as usize;
        // SAFETY: op = `count` 32-bit slots and an address (the selector); `row_memory` checks.
        unsafe {
            let addresses = u64::read(warp, inst.op[count]);
            if inst.aux & TRANSPOSED == 0
                && let Some(base) = rows_of_block(warp, inst, &addresses, count)
            {
                // A register holds its matrix's rows as they lie in memory.
                for index in 0..count {
                    let mut words = [0; WARP];
                    for (row, words) in words.as_chunks_mut().0.iter_mut().enumerate() {
                        *words = base.byte_add(addresses[index * 8 + row] as usize).read();
                    }
                    u32::write(warp, inst.op[index], &words, mask);
                }
                return Flow::Next;
            }
            // All rows before any register: the address may be among the destinations.
            let mut matrices = [[[0u16; 8]; 8]; 4];
            for (index, matrix) in matrices.iter_mut().enumerate().take(count) {
                for (row, elements) in matrix.iter_mut().enumerate() {
                    let Some(memory) = row_memory(warp, inst, &addresses, index, row) else {
                        return Flow::Fault;
                    };
                    let bytes = memory.read();
                    *elements = std::array::from_fn(|at| {
                        u16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]])
                    });
                }
            }
            for (index, matrix) in matrices.iter().enumerate().take(count) {
                let words = to_registers(matrix, inst.aux & TRANSPOSED != 0);
                u32::write(warp, inst.op[index], &words, mask);
            }
        }
        Flow::Next
    }
}

/// `stmatrix`: op = address, registers.
struct Store;

impl Op for Store {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, _: u32) -> Flow {
        let count = (inst.aux >> COUNT & 7) as usize;
        // SAFETY: op = an address and `count` 32-bit slots (the selector); `row_memory` checks.
        unsafe {
            let addresses = u64::read(warp, inst.op[0]);
            for index in 0..count {
                let words = u32::read(warp, inst.op[1 + index]);
                let matrix = from_registers(&words, inst.aux & TRANSPOSED != 0);
                for (row, elements) in matrix.iter().enumerate() {
                    let Some(memory) = row_memory(warp, inst, &addresses, index, row) else {
                        return Flow::Fault;
                    };
                    let mut bytes = [0; 16];
                    for (at, element) in elements.iter().enumerate() {
                        bytes[2 * at..][..2].copy_from_slice(&element.to_le_bytes());
                    }
                    memory.write(bytes);
                }
            }
        }
        Flow::Next
    }
}

/// `movmatrix.trans`: op = d, a.
struct Transpose;

impl Op for Transpose {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: op = two 32-bit slots (the selector).
        unsafe {
            let matrix = from_registers(&u32::read(warp, inst.op[1]), false);
            u32::write(warp, inst.op[0], &to_registers(&matrix, true), mask);
        }
        Flow::Next
    }
}

/// `ldmatrix.sync.aligned.m8n8.num{.trans}{.ss}.b16 r, [p]`, `stmatrix…`, `movmatrix….trans.b16 d,
/// a`.
pub(super) fn select(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    if parts.take_type()? != Type::B16
        || !parts.take("sync")
        || !parts.take("aligned")
        || !parts.take("m8n8")
    {
        return None;
    }
    let transposed = parts.take("trans");
    if query.part(0) == "movmatrix" {
        let args = [Arg::Dst(Type::B32), Arg::Src(Type::B32)];
        return (transposed && parts.done()).then(|| Selected::scalar::<Transpose>(args));
    }
    let count = parts.take_map(|part| match part {
        "x1" => Some(1),
        "x2" => Some(2),
        "x4" => Some(4),
        _ => None,
    })?;
    let space = space(&mut parts);
    let load = query.part(0) == "ldmatrix";
    if !parts.done() || query.lanes(if load { 0 } else { 1 }) != count {
        return None;
    }
    let aux = space | (count as u32) << COUNT | if transposed { TRANSPOSED } else { 0 };
    let selected = if load {
        let mut args = vec![Arg::Dst(Type::B32); count];
        args.push(Arg::Address);
        Selected::new::<Load>(args)
    } else {
        let mut args = vec![Arg::Address];
        args.extend(vec![Arg::Src(Type::B32); count]);
        Selected::scalar::<Store>(args)
    };
    Some(selected.aux(aux))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_hold_the_elements_of_the_reference() {
        let matrix: Matrix =
            std::array::from_fn(|row| std::array::from_fn(|column| (row * 8 + column) as u16));
        let words = to_registers(&matrix, false);
        assert_eq!((words[0], words[5], words[31]), (0x0001_0000, 0x000B_000A, 0x003F_003E));
        let transposed = to_registers(&matrix, true);
        assert_eq!((transposed[0], transposed[5]), (0x0008_0000, 0x0019_0011));
        assert_eq!(from_registers(&words, false), matrix);
        assert_eq!(from_registers(&transposed, true), matrix);
    }
}
