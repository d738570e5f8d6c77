//! Random bytes at the coordinator's codec: see `kedge_coordinator::check_bytes`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kedge_coordinator::check_bytes(bytes));
