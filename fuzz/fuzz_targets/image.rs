//! Random bytes at the readers of images: see `kedge_image::check`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kedge_image::check::check_bytes(bytes));
