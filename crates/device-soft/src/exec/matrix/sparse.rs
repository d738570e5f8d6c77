//! `mma.sp.sync`: A holds only the elements that are not zero, and a register says where they
//! belong.

use super::mma::register_type;
use super::tile::{self, Number};
use super::{Params, slots};
use crate::code::Inst;
use crate::exec::lanewise::Parts;
use crate::exec::{Arg, Flow, Isa, Lane, Op, Query, Selected, Warp};
use crate::math::fragment::{Element, Layout, Shape};
use crate::spec::WARP;
use kedge_ptx::ast::{Operand, Type};
use std::marker::PhantomData;

/// Columns of a product.
const COLUMNS: usize = 8;

/// Where the elements of A that are stored belong (PTX ISA, "Sparse matrix storage").
struct Metadata {
    words: [u32; WARP],
    element: Element,
    /// Chunks of a row: of each, four bits name the elements that are stored.
    chunks: usize,
    selector: usize,
}

impl Metadata {
    /// The column in A of element `stored` of a row.
    fn column(&self, row: usize, stored: usize) -> usize {
        match self.element {
            // One of two; the indices are those of half elements.
            Element::Tf32 => 2 * stored + (self.indices(row, stored) >> 1 & 1),
            // Two pairs of four.
            Element::S4 | Element::U4 => {
                let (chunk, pair) = (stored / 4, stored / 2 % 2);
                8 * chunk + 2 * (self.indices(row, chunk) >> (2 * pair) & 3) + stored % 2
            }
            // Two of four.
            _ => {
                let (chunk, which) = (stored / 2, stored % 2);
                4 * chunk + (self.indices(row, chunk) >> (2 * which) & 3)
            }
        }
    }

    /// A chunk's four bits. Wide elements: a thread holds four chunks of a row and of the row eight
    /// below. Narrow ones: eight chunks of one of them.
    fn indices(&self, row: usize, chunk: usize) -> usize {
        let (quad, low) = (row % 8, row / 8);
        let (thread, shift) = match self.element {
            Element::F16 | Element::Bf16 | Element::Tf32 => {
                let threads = self.chunks / 4;
                (self.selector * threads + chunk / 4, 16 * low + 4 * (chunk % 4))
            }
            _ => {
                let threads = self.chunks / 4;
                (self.selector * threads + 2 * (chunk / 8) + low, 4 * (chunk % 8))
            }
        };
        (self.words[(4 * quad + thread) % WARP] >> shift) as usize & 15
    }
}

/// Chunks of a row of A.
fn chunks(params: &Params) -> usize {
    match params.a {
        Element::Tf32 => params.shape.k / 2,
        Element::S4 | Element::U4 => params.shape.k / 8,
        _ => params.shape.k / 4,
    }
}

/// Computed in T, in tiles of at most N elements. The operand list is d, a, b, c, metadata; `aux`
/// is the sparsity selector.
struct Sparse<T, const N: usize>(PhantomData<T>);

/// Registers of each operand: d, a, b, c.
fn registers(params: &Params) -> [usize; 4] {
    let Shape { m, n, k } = params.shape;
    let of = |elements: usize, element: Element| elements / WARP / element.per_register();
    [of(m * n, params.d), of(m * k / 2, params.a), of(k * n, params.b), of(m * n, params.c)]
}

impl<T: Number, const N: usize> Op for Sparse<T, N> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let params = Params::decode(inst.imm);
        let Shape { m, n, k } = params.shape;
        let stored = k / 2;
        let [d_len, a_len, b_len, c_len] = registers(&params);
        // SAFETY: the operands are d, a, b, c, of the lengths above, each in the bank of its
        // element, and a 32-bit register (the selector).
        unsafe {
            let slots = slots(warp, inst, d_len + a_len + b_len + c_len + 1);
            let (d, slots) = slots.split_at(d_len);
            let (a, slots) = slots.split_at(a_len);
            let (b, slots) = slots.split_at(b_len);
            let (c, metadata) = slots.split_at(c_len);
            let metadata = Metadata {
                words: u32::read(warp, metadata[0]),
                element: params.a,
                chunks: chunks(&params),
                selector: inst.aux as usize,
            };
            let layout = Layout::mma_a(m, stored, params.a.per_register());
            let a = tile::gather::<T, N>(warp, a, params.a, &layout);
            let layout = Layout::mma_b(n, params.b.per_register());
            let b = tile::gather::<T, N>(warp, b, params.b, &layout);
            let layout = Layout::accumulators(n, params.c.per_register());
            let mut c = tile::gather::<T, N>(warp, c, params.c, &layout);
            let row_params = Params { shape: Shape { m: 1, n, k: stored }, ..params };
            for row in 0..m {
                // The rows of B that this row of A meets.
                let mut met = [T::default(); N];
                for at in 0..stored {
                    let from = metadata.column(row, at) % k * COLUMNS;
                    met[at * COLUMNS..][..COLUMNS].copy_from_slice(&b[from..from + COLUMNS]);
                }
                let (a, c) = (&a[row * stored..][..stored], &mut c[row * n..][..n]);
                T::multiply(&row_params, a, &met[..stored * COLUMNS], c);
            }
            let layout = Layout::accumulators(n, params.d.per_register());
            tile::scatter::<T, N>(warp, d, params.d, &layout, &c, mask);
        }
        Flow::Next
    }
}

/// Whether the hardware has this shape and these types.
fn exists(params: &Params) -> bool {
    use Element::{Bf16, E4m3, E5m2, F16, F32, S4, S8, S32, Tf32, U4, U8};
    let Shape { m, n, k } = params.shape;
    let (depths, sums): (&[usize], &[Element]) = match (params.a, params.b) {
        (F16, F16) => (&[16, 32], &[F16, F32]),
        (Bf16, Bf16) => (&[16, 32], &[F32]),
        (Tf32, Tf32) => (&[8, 16], &[F32]),
        (S8 | U8, S8 | U8) => (&[32, 64], &[S32]),
        (S4 | U4, S4 | U4) => (&[64, 128], &[S32]),
        (E4m3 | E5m2, E4m3 | E5m2) => (&[64], &[F16, F32]),
        _ => return false,
    };
    (m, n) == (16, COLUMNS)
        && depths.contains(&k)
        && sums.contains(&params.c)
        && sums.contains(&params.d)
}

/// `mma.sp{::ordered_metadata}.sync.aligned.shape.row.col{.satfinite}.d.a.b.c d, a, b, c, e,
/// selector`.
pub(super) fn select(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    if !(parts.take("sp") || parts.take("sp::ordered_metadata")) {
        return None;
    }
    if !parts.take("sync") || !parts.take("aligned") || !parts.take("row") || !parts.take("col") {
        return None;
    }
    let shape = parts.take_map(Shape::named)?;
    let satfinite = parts.take("satfinite");
    let mut element = || parts.take_map(Element::named);
    let (d, a, b, c) = (element()?, element()?, element()?, element()?);
    let params = Params { shape, a, b, c, d, satfinite, xor: false };
    if !parts.done() || !exists(&params) {
        return None;
    }
    let Some(Operand::Int(selector)) = query.operand(5) else { return None };
    // A quad's threads are shared out among the selectors.
    let selectors = (16 / chunks(&params)).max(1) as i64;
    let lengths = registers(&params);
    if !(0..selectors).contains(selector) || [0, 1, 2, 3].map(|i| query.lanes(i)) != lengths {
        return None;
    }
    let [d_len, a_len, b_len, c_len] = lengths;
    let mut args = vec![Arg::Dst(register_type(d)); d_len];
    args.extend(vec![Arg::Src(register_type(a)); a_len]);
    args.extend(vec![Arg::Src(register_type(b)); b_len]);
    args.extend(vec![Arg::Src(register_type(c)); c_len]);
    args.extend([Arg::Src(Type::B32), Arg::Known]);
    let selected = match d {
        Element::S32 => Selected::new::<Sparse<i32, 1024>>(args),
        _ => Selected::new::<Sparse<f32, 512>>(args),
    };
    Some(selected.imm(params.encode()).aux(*selector as u32))
}
