//! Random bytes at what a cache and its partner say: see `kedge_cache::partner::check_bytes`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kedge_cache::partner::check_bytes(bytes));
