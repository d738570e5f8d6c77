//! Random bytes at what supervisors, proxies and the command say: see `kedge_control::check_bytes`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kedge_control::check_bytes(bytes));
