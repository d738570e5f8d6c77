//! The tables' layout: arrays of pointers whose slot 0 is their size in bytes.
//!
//! A slot that nobody was seen to call reports itself and returns NOT_SUPPORTED.

use super::{compile_cache, handshake, slots};
use crate::log;
use kedge_cuda_types::CuError;
use kedge_cuda_types::error::CUresult;

/// An entry: a function, or the size.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(super) struct Slot(*const ());

// SAFETY: a function's address or a number; nothing is reached through it but by calling.
unsafe impl Sync for Slot {}

/// The tables, numbered for [`unknown`].
const NAMES: [&str; 10] = [
    "CUDART_INTERFACE",
    "TOOLS_RUNTIME_CALLBACK_HOOKS",
    "TOOLS_TLS",
    "CONTEXT_LOCAL_STORAGE",
    "CONTEXT_CHECKS",
    "INTEGRITY_CHECK",
    "tools context (21318c60)",
    "half-precision products (1734dc26)",
    "tools module (6e163fbe)",
    "compile cache (da9151d3)",
];

/// What stands in slot `SLOT` of table `TABLE` until somebody needs it.
unsafe extern "C" fn unknown<const TABLE: usize, const SLOT: usize>() -> CUresult {
    let table = NAMES.get(TABLE).unwrap_or(&"?");
    log::line(&format!("private table {table}: slot {SLOT} is not known; the caller got 801"));
    CuError::NOT_SUPPORTED.0
}

/// The longest table.
const MAX: usize = 96;

macro_rules! unknowns {
    ($table:literal: $($slot:literal)*) => { [$(Slot(unknown::<$table, $slot> as *const ())),*] };
    ($table:literal) => {
        unknowns!($table:
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
            32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60
            61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89
            90 91 92 93 94 95)
    };
}

/// The first `N` of `all`, with the size in slot 0 and `known` in its places.
const fn table<const N: usize>(all: [Slot; MAX], known: &[(usize, *const ())]) -> [Slot; N] {
    let mut slots = [Slot(std::ptr::without_provenance(N * size_of::<Slot>())); N];
    let mut i = 1;
    while i < N {
        slots[i] = all[i];
        i += 1;
    }
    let mut k = 0;
    while k < known.len() {
        slots[known[k].0] = Slot(known[k].1);
        k += 1;
    }
    slots
}

pub(super) static CUDART_INTERFACE: [Slot; 13] = table(
    unknowns!(0),
    &[(2, slots::primary_context as *const ()), (12, slots::load_compilers as *const ())],
);
static CALLBACK_HOOKS: [Slot; 7] = table(
    unknowns!(1),
    &[(2, slots::hooks_buffer as *const ()), (6, slots::hooks_flags as *const ())],
);
static TOOLS_TLS: [Slot; 4] = table(unknowns!(2), &[(2, slots::tools_tls as *const ())]);
/// Without a size: slot 0 is a function.
static LOCAL_STORAGE: [Slot; 4] = table(
    unknowns!(3),
    &[
        (0, slots::storage_put as *const ()),
        (1, slots::storage_delete as *const ()),
        (2, slots::storage_get as *const ()),
    ],
);
static CONTEXT_CHECKS: [Slot; 15] = table(
    unknowns!(4),
    &[(2, slots::context_check as *const ()), (3, slots::context_check_all as *const ())],
);
pub(super) static INTEGRITY_CHECK: [Slot; 3] =
    table(unknowns!(5), &[(1, handshake::check as *const ())]);
static TOOLS_CONTEXT: [Slot; 95] = table(
    unknowns!(6),
    &[
        (3, slots::context_device as *const ()),
        (4, slots::context_id as *const ()),
        (39, slots::stream_number as *const ()),
        (51, slots::stream_of_handle as *const ()),
    ],
);
static HALF_PRODUCTS: [Slot; 17] = table(
    unknowns!(7),
    &[(4, slots::two_blocks as *const ()), (13, slots::free_blocks as *const ())],
);
static TOOLS_MODULE: [Slot; 16] = table(unknowns!(8), &[(7, slots::each_function as *const ())]);

static COMPILE_CACHE: [Slot; 7] = table(
    unknowns!(9),
    &[
        (1, compile_cache::open as *const ()),
        (2, compile_cache::close as *const ()),
        (3, compile_cache::look_up as *const ()),
        (4, compile_cache::store as *const ()),
    ],
);

/// A UUID as it is written, without dashes.
pub(super) fn by_uuid(uuid: u128) -> Option<&'static [Slot]> {
    Some(match uuid {
        0x6bd5fb6c_5bf4_e74a_8987_d93912fd9df9 => &CUDART_INTERFACE,
        0xa094798c_2e74_2e74_93f2_0800200c0a66 => &CALLBACK_HOOKS,
        0x42d85a81_23f6_cb47_8298_f6e78a3aecdc => &TOOLS_TLS,
        0xc693336e_1121_df11_a8c3_68f355d89593 => &LOCAL_STORAGE,
        0x263e8860_7cd2_6143_92f6_bbd5006dfa7e => &CONTEXT_CHECKS,
        0xd4082055_bde6_704b_8d34_ba123c66e1f2 => &INTEGRITY_CHECK,
        0x21318c60_9714_3248_8ca6_41ff7324c8f2 => &TOOLS_CONTEXT,
        0x1734dc26_800d_4745_8726_c0f1e7dd8bca => &HALF_PRODUCTS,
        0x6e163fbe_b958_444d_835c_e182aff1991e => &TOOLS_MODULE,
        0xda9151d3_3ae6_cc41_a5c0_4f26d533e328 => &COMPILE_CACHE,
        _ => return None,
    })
}

/// Tables that real drivers have and whose absence every caller was seen to bear.
pub(super) fn known_absent(uuid: u128) -> bool {
    matches!(
        uuid,
        0xf8cff951_2146_8b4e_b9e2_fb469e7c0dd9 // asked for by every runtime, used by none
            | 0x69a28e9f_2449_8b47_b030_c5da330ea4e9 // NVML's own
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slot_0_is_the_size_except_where_it_is_a_function() {
        assert_eq!(CUDART_INTERFACE[0].0 as usize, 13 * 8);
        assert_eq!(INTEGRITY_CHECK[0].0 as usize, 3 * 8);
        assert_eq!(LOCAL_STORAGE[0].0, slots::storage_put as *const ());
        assert_eq!(CUDART_INTERFACE[2].0, slots::primary_context as *const ());
        assert_ne!(CUDART_INTERFACE[3].0, CUDART_INTERFACE[4].0);
    }

    #[test]
    fn uuids_read_as_written() {
        let bytes = [
            0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd,
            0x9d, 0xf9,
        ];
        let table = by_uuid(u128::from_be_bytes(bytes)).unwrap();
        assert_eq!(table.as_ptr(), CUDART_INTERFACE.as_ptr());
    }
}
