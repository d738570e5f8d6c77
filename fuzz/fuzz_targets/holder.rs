//! Random bytes at what holders of device memory are told: see `kedge_holder::check_bytes`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kedge_holder::check_bytes(bytes));
