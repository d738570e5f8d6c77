//! Random bytes at what crosses a line between machines: see `kedge_remote::check_bytes`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kedge_remote::check_bytes(bytes));
