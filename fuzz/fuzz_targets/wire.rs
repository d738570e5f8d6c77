//! Random bytes at the codec: see `kedge_protocol::check`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kedge_protocol::check::check_bytes(bytes));
