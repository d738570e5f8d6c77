//! Random bytes at the codecs of PMI and at its relay: see `kedge_pmi::check_bytes`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kedge_pmi::check_bytes(bytes));
