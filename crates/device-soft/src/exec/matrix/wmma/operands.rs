//! `wmma.load` of the commonest operands, each compiled for its shape and type.

use super::super::{Params, slots};
use super::{Load, Role, Transfer, extent};
use crate::code::Inst;
use crate::exec::{Arg, Flow, Isa, Lane, Op, Selected, Warp};
use crate::spec::WARP;
use std::marker::PhantomData;

/// `wmma.load` of an operand whose shape and type are known when this is compiled: LINES lines of
/// LEN elements, TILE in all, PER to a register.
struct Operand<T, const LINES: usize, const LEN: usize, const TILE: usize>(PhantomData<T>);

impl<T: Packed, const LINES: usize, const LEN: usize, const TILE: usize> Op
    for Operand<T, LINES, LEN, TILE>
{
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        const { assert!(LINES * LEN == TILE) };
        let transfer = Transfer::of(inst);
        let mut lines = [[T::default(); LEN]; LINES];
        // SAFETY: the operands are as the selector listed them.
        unsafe {
            let slots = slots(warp, inst, transfer.registers + 1 + usize::from(transfer.stride));
            let (registers, source) = slots.split_at(transfer.registers);
            let read = transfer.each_line(warp, inst, mask, source, |line, bytes| {
                if let Some(line) = lines.get_mut(line) {
                    T::take_line(bytes, line);
                }
            });
            if !read {
                return Flow::Fault;
            }
            let mut tile = [T::default(); TILE];
            if transfer.column_major {
                for at in 0..LEN {
                    for line in 0..LINES {
                        tile[at * LINES + line] = lines[line][at];
                    }
                }
            } else {
                tile.copy_from_slice(lines.as_flattened());
            }
            for (register, slot) in registers.iter().enumerate() {
                let first = register * T::PER * WARP % TILE;
                T::put(warp, *slot, &tile[first..first + T::PER * WARP], mask);
            }
        }
        Flow::Next
    }
}

/// An operand's element, in registers that hold several in order.
trait Packed: Copy + Default + 'static {
    const PER: usize;
    fn take_line(bytes: &[u8], line: &mut [Self]);
    /// Stores [`Self::PER`] elements of each lane in a register.
    ///
    /// # Safety
    /// `slot` is a destination in the element's bank.
    unsafe fn put(warp: &mut Warp, slot: i32, elements: &[Self], mask: u32);
}

macro_rules! packed {
    ($($ty:ty => $row:ty;)*) => {
        $(impl Packed for $ty {
            const PER: usize = size_of::<$row>() / size_of::<$ty>();
            #[inline(always)]
            fn take_line(bytes: &[u8], line: &mut [$ty]) {
                let elements = bytes.as_chunks::<{ size_of::<$ty>() }>().0;
                for (place, element) in line.iter_mut().zip(elements) {
                    *place = <$ty>::from_le_bytes(*element);
                }
            }
            #[inline(always)]
            unsafe fn put(warp: &mut Warp, slot: i32, elements: &[$ty], mask: u32) {
                let mut words: [$row; WARP] = [0; WARP];
                for index in 0..Self::PER {
                    for lane in 0..WARP {
                        let element = <$row>::from(elements[index * WARP + lane]);
                        words[lane] |= element << (index * <$ty>::BITS as usize);
                    }
                }
                // SAFETY: the caller's contract.
                unsafe { <$row>::write(warp, slot, &words, mask) };
            }
        })*
    };
}

packed! { u8 => u32; u16 => u32; u32 => u32; u64 => u64; }

/// The handler of a load; the commonest operands have one of their own.
pub(super) fn load_of(params: &Params, role: u32, column_major: bool, args: Vec<Arg>) -> Selected {
    let role = [Role::A, Role::B, Role::Accumulator][role as usize % 3];
    let (rows, columns) = extent(params, role);
    let (lines, len) = if column_major { (columns, rows) } else { (rows, columns) };
    let in_order = role != Role::Accumulator;
    match (params.a.bits(), lines, len) {
        (8, 16, 16) if in_order => Selected::new::<Operand<u8, 16, 16, 256>>(args),
        (16, 16, 16) if in_order => Selected::new::<Operand<u16, 16, 16, 256>>(args),
        (32, 16, 8) if in_order => Selected::new::<Operand<u32, 16, 8, 128>>(args),
        (32, 8, 16) if in_order => Selected::new::<Operand<u32, 8, 16, 128>>(args),
        (64, 8, 4) if in_order => Selected::new::<Operand<u64, 8, 4, 32>>(args),
        (64, 4, 8) if in_order => Selected::new::<Operand<u64, 4, 8, 32>>(args),
        _ => Selected::new::<Load>(args),
    }
}
