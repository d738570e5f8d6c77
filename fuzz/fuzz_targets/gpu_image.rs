//! Random bytes at what an image notes of devices: see `kedge_gpu_image::check_bytes`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kedge_gpu_image::check_bytes(bytes));
