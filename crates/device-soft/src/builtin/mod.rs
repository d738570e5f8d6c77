//! Device functions that programs call and no module defines.
//!
//! A builtin is called by all active lanes of a warp at once. Its arguments lie in the lanes' local
//! memory, where a call's parameters go; [`Call`] reads them.

mod assert;
mod call;
mod conditional;
pub mod heap;
pub mod launch;
mod memory;
pub mod printf;
pub mod query;
pub(crate) mod runtime_error;
pub(crate) mod stream;

use crate::code::Inst;
use crate::exec::control::CallSite;
use crate::exec::{Flow, Warp};
pub(crate) use call::Call;

/// One of the functions of [`TABLE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Builtin(u16);

/// What a builtin does for the lanes of a call. `Err` is the fault that it has recorded.
type Body = fn(&mut Call<'_>) -> Result<(), Flow>;

/// Sorted by name. The device runtime's functions stand here as the program writes them: see
/// [`plain`].
const TABLE: &[(&str, Body)] = &[
    ("__assertfail", assert::assertfail),
    ("cudaDeviceGetAttribute", query::attribute),
    ("cudaDeviceGetCacheConfig", query::cache_config),
    ("cudaDeviceGetLimit", query::limit),
    ("cudaDeviceGetSharedMemConfig", query::bank_size),
    ("cudaEventCreateWithFlags", stream::create),
    ("cudaEventDestroy", stream::destroy),
    ("cudaEventRecord", stream::record),
    ("cudaEventRecordWithFlags", stream::record),
    ("cudaFree", memory::cuda_free),
    ("cudaFuncGetAttributes", query::function_attributes),
    ("cudaGetDevice", query::device),
    ("cudaGetDeviceCount", query::device_count),
    ("cudaGetErrorName", runtime_error::name),
    ("cudaGetErrorString", runtime_error::string),
    ("cudaGetLastError", runtime_error::get_last),
    ("cudaGetParameterBuffer", launch::get_plain_buffer),
    ("cudaGetParameterBufferV2", launch::get_parameter_buffer),
    ("cudaGraphSetConditional", conditional::set),
    ("cudaLaunchDevice", launch::launch_plain),
    ("cudaLaunchDeviceV2", launch::launch_device),
    ("cudaMalloc", memory::cuda_malloc),
    ("cudaMemcpy2DAsync", stream::memcpy_2d),
    ("cudaMemcpy3DAsync", stream::memcpy_3d),
    ("cudaMemcpyAsync", stream::memcpy),
    ("cudaMemset2DAsync", stream::memset_2d),
    ("cudaMemset3DAsync", stream::memset_3d),
    ("cudaMemsetAsync", stream::memset),
    ("cudaOccupancyMaxActiveBlocksPerMultiprocessor", query::occupancy),
    ("cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", query::occupancy),
    ("cudaPeekAtLastError", runtime_error::peek_at_last),
    ("cudaRuntimeGetVersion", query::version),
    ("cudaStreamCreateWithFlags", stream::create),
    ("cudaStreamDestroy", stream::destroy),
    ("cudaStreamWaitEvent", stream::wait),
    ("free", memory::free),
    ("malloc", memory::malloc),
    ("vprintf", printf::vprintf),
];

/// A device runtime function's name as programs write it: for compute capability 9.0, and since
/// CUDA 12 for all, nvcc makes `__cudaCDP2X` of `cudaX`; with a default stream for each thread
/// `cudaX_ptsz`.
fn plain(name: &str) -> std::borrow::Cow<'_, str> {
    let name = name.strip_suffix("_ptsz").unwrap_or(name);
    match name.strip_prefix("__cudaCDP2") {
        Some(rest) => format!("cuda{rest}").into(),
        None => name.into(),
    }
}

/// Whether a kernel that calls `name` asks its device for work, or keeps errors of such calls: its
/// grid is over when that work is.
pub(crate) fn asks_for_work(name: &str) -> bool {
    let name = plain(name);
    let parts = ["LaunchDevice", "Memcpy", "Memset", "Event", "LastError"];
    name.starts_with("cuda") && parts.iter().any(|part| name.contains(part))
}

impl Builtin {
    /// The builtin that a program means by `name`.
    pub(crate) fn find(name: &str) -> Option<Self> {
        let name = plain(name);
        let index = TABLE.binary_search_by(|(entry, _)| (*entry).cmp(&*name)).ok()?;
        Some(Self(index as u16))
    }

    /// Its number, for its address as the program sees it.
    pub(crate) fn index(self) -> u64 {
        self.0.into()
    }

    pub(crate) fn from_index(index: u64) -> Option<Self> {
        (index < TABLE.len() as u64).then_some(Self(index as u16))
    }

    #[cfg(test)]
    fn name(self) -> &'static str {
        TABLE[usize::from(self.0)].0
    }

    /// Runs the builtin for the lanes of `mask`.
    ///
    /// # Safety
    /// `site` was lowered for this warp's current frame: its arguments and results lie in there.
    pub(crate) unsafe fn call(
        self,
        warp: &mut Warp,
        inst: &Inst,
        mask: u32,
        site: &CallSite,
    ) -> Flow {
        let (_, body) = TABLE[usize::from(self.0)];
        // SAFETY: the caller's contract.
        let mut call = unsafe { Call::new(warp, inst, mask, site) };
        match body(&mut call) {
            Ok(()) => Flow::Next,
            Err(flow) => flow,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_and_numbered() {
        assert!(TABLE.is_sorted_by_key(|(name, _)| name));
        for (name, _) in TABLE {
            let builtin = Builtin::find(name).unwrap();
            assert_eq!(builtin.name(), *name);
            assert_eq!(Builtin::from_index(builtin.index()), Some(builtin));
        }
        assert_eq!(Builtin::find("main"), None);
        let wait = Builtin::find("cudaStreamWaitEvent");
        assert_eq!(Builtin::find("__cudaCDP2StreamWaitEvent_ptsz"), wait);
        assert!(asks_for_work("__cudaCDP2MemsetAsync_ptsz") && !asks_for_work("__cudaCDP2Malloc"));
        assert_eq!(Builtin::from_index(TABLE.len() as u64), None);
    }
}
