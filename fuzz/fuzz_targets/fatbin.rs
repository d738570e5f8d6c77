//! Random bytes at the fatbin reader and its decompressors: see `kedge_ptx::check`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kedge_ptx::check::check_fatbin(bytes));
