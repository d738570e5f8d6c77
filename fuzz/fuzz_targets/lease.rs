//! Random bytes at what programs and a cache say of leases: see `kedge_cache_lease::check_bytes`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kedge_cache_lease::check_bytes(bytes));
