//! `libnvidia-ml.so.1` for jobs on software devices: which devices there are, and what they are.
//!
//! NVIDIA's own library is what jobs on real GPUs use; it would find no GPU here, or another one than
//! the job's. What a software device has not got (temperatures, NVLink, fans) is NOT_SUPPORTED, and a
//! function that is not in [`api`] is missing from the library, which programs take for an old driver.
//!
//! - [`state`]: what the job's proxy tells of its devices. [`types`]: the structures of nvml.h.
//! - [`api`]: the functions.

mod api;
mod state;
mod types;
