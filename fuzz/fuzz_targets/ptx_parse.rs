//! Random texts at the PTX parser and the linker: see `kedge_ptx::check`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kedge_ptx::check::check_text(bytes));
