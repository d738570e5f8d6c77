//! What runs beside a job and answers for it: its control socket, what keeps proxies ready or holds
//! images in memory, what answers for NVML, a part's warden.

pub(crate) mod beside;
pub mod control;
pub(crate) mod keeper;
pub(crate) mod management;
pub(crate) mod starting;
pub(crate) mod warden;
pub mod warm;
