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

use crate::code::Inst;
use crate::exec::control::CallSite;
use crate::exec::{Flow, Warp};
pub(crate) use call::Call;

/// One of the functions of [`TABLE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Builtin(u16);

/// What a builtin does for the lanes of a call. `Err` is the fault that it has recorded.
type Body = fn(&mut Call<'_>) -> Result<(), Flow>;

/// Sorted by name.
const TABLE: &[(&str, Body)] = &[
    ("__assertfail", assert::assertfail),
    ("__cudaCDP2Free", launch::free),
    ("__cudaCDP2GetErrorString", launch::error_string),
    ("__cudaCDP2GetLastError", launch::succeed),
    ("__cudaCDP2GetParameterBufferV2", launch::get_parameter_buffer),
    ("__cudaCDP2LaunchDeviceV2", launch::launch_device),
    ("__cudaCDP2LaunchDeviceV2_ptsz", launch::launch_device),
    ("__cudaCDP2Malloc", launch::malloc),
    ("__cudaCDP2MemcpyAsync", launch::memcpy),
    ("__cudaCDP2MemcpyAsync_ptsz", launch::memcpy),
    ("__cudaCDP2MemsetAsync", launch::memset),
    ("__cudaCDP2MemsetAsync_ptsz", launch::memset),
    ("__cudaCDP2PeekAtLastError", launch::succeed),
    ("__cudaCDP2StreamCreateWithFlags", launch::stream_create),
    ("__cudaCDP2StreamDestroy", launch::succeed),
    ("cudaFree", launch::free),
    ("cudaGetErrorString", launch::error_string),
    ("cudaGetLastError", launch::succeed),
    ("cudaGetParameterBufferV2", launch::get_parameter_buffer),
    ("cudaGraphSetConditional", conditional::set),
    ("cudaLaunchDeviceV2", launch::launch_device),
    ("cudaLaunchDeviceV2_ptsz", launch::launch_device),
    ("cudaMalloc", launch::malloc),
    ("cudaMemcpyAsync", launch::memcpy),
    ("cudaMemcpyAsync_ptsz", launch::memcpy),
    ("cudaMemsetAsync", launch::memset),
    ("cudaMemsetAsync_ptsz", launch::memset),
    ("cudaPeekAtLastError", launch::succeed),
    ("cudaStreamCreateWithFlags", launch::stream_create),
    ("cudaStreamDestroy", launch::succeed),
    ("free", memory::free),
    ("malloc", memory::malloc),
    ("vprintf", printf::vprintf),
];

impl Builtin {
    /// The builtin that a program means by `name`.
    pub(crate) fn find(name: &str) -> Option<Self> {
        let index = TABLE.binary_search_by(|(entry, _)| (*entry).cmp(name)).ok()?;
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
        assert_eq!(Builtin::from_index(TABLE.len() as u64), None);
    }
}
