//! CUfunction_attribute: what a kernel needs, and what a program sets for its launches.

use super::Function;
use kedge_cuda_types::CuError;
use kedge_cuda_types::attribute as attr;
use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

const MAX_THREADS_PER_BLOCK: u32 = 0;
const SHARED_SIZE_BYTES: u32 = 1;
const CONST_SIZE_BYTES: u32 = 2;
const LOCAL_SIZE_BYTES: u32 = 3;
const NUM_REGS: u32 = 4;
const PTX_VERSION: u32 = 5;
const BINARY_VERSION: u32 = 6;
const CACHE_MODE_CA: u32 = 7;
const MAX_DYNAMIC_SHARED_SIZE_BYTES: u32 = 8;
const PREFERRED_SHARED_MEMORY_CARVEOUT: u32 = 9;
const CLUSTER_SIZE_MUST_BE_SET: u32 = 10;
const REQUIRED_CLUSTER_WIDTH: u32 = 11;
const REQUIRED_CLUSTER_HEIGHT: u32 = 12;
const REQUIRED_CLUSTER_DEPTH: u32 = 13;
const NON_PORTABLE_CLUSTER_SIZE_ALLOWED: u32 = 14;
const CLUSTER_SCHEDULING_POLICY_PREFERENCE: u32 = 15;

/// What cuFuncSetAttribute and cuKernelSetAttribute set.
#[derive(Debug)]
pub(crate) struct Settings {
    /// By attribute, from [`FIRST`] on; [`UNSET`] until it is set.
    values: [AtomicI32; COUNT],
    /// Counts what was set.
    changes: AtomicU32,
}

/// The attributes that can be set lie between these.
const FIRST: u32 = MAX_DYNAMIC_SHARED_SIZE_BYTES;
const COUNT: usize = (CLUSTER_SCHEDULING_POLICY_PREFERENCE - FIRST + 1) as usize;
/// No value that can be set.
const UNSET: i32 = i32::MIN;

impl Default for Settings {
    fn default() -> Self {
        Self { values: [const { AtomicI32::new(UNSET) }; COUNT], changes: AtomicU32::new(0) }
    }
}

impl Settings {
    fn get(&self, attribute: u32) -> Option<i32> {
        let value = self.values.get((attribute - FIRST) as usize)?.load(Ordering::Relaxed);
        (value != UNSET).then_some(value)
    }

    fn set(&self, attribute: u32, value: i32) {
        if let Some(slot) = self.values.get((attribute - FIRST) as usize) {
            slot.store(value, Ordering::Relaxed);
            self.changes.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Calls `f` with each attribute that was set, and its value.
    pub(super) fn each_set(
        &self,
        mut f: impl FnMut(u32, i32) -> Result<(), CuError>,
    ) -> Result<(), CuError> {
        let all = FIRST..=CLUSTER_SCHEDULING_POLICY_PREFERENCE;
        all.filter_map(|attribute| Some((attribute, self.get(attribute)?)))
            .try_for_each(|(attribute, value)| f(attribute, value))
    }

    /// Another number each time that something is set.
    pub(crate) fn changes(&self) -> u32 {
        self.changes.load(Ordering::Relaxed)
    }

    pub(super) fn max_dynamic_shared(&self) -> Option<u32> {
        self.get(MAX_DYNAMIC_SHARED_SIZE_BYTES).and_then(|bytes| u32::try_from(bytes).ok())
    }

    pub(crate) fn allows_non_portable_clusters(&self) -> bool {
        self.get(NON_PORTABLE_CLUSTER_SIZE_ALLOWED).is_some_and(|allowed| allowed != 0)
    }

    /// Blocks; 0: not set.
    fn cluster(&self, dimension: usize) -> c_int {
        self.get(REQUIRED_CLUSTER_WIDTH + dimension as u32).unwrap_or(0)
    }
}

/// The cluster that a kernel is compiled or set for, where there is one.
pub(crate) fn required_cluster(function: &Function) -> Option<[u32; 3]> {
    let compiled = function.info().required_cluster;
    if compiled != [0; 3] {
        return Some(compiled.map(|n| n.max(1)));
    }
    let set = [0, 1, 2].map(|i| function.settings().cluster(i) as u32);
    (set != [0; 3]).then(|| set.map(|n| n.max(1)))
}

/// INVALID_VALUE for an attribute that does not exist.
pub(crate) fn get(function: &Function, attribute: u32) -> Result<c_int, CuError> {
    let info = function.info();
    let settings = function.settings();
    let cluster = |i: usize| match info.required_cluster {
        [0, 0, 0] => settings.cluster(i),
        compiled => compiled[i].max(1) as c_int,
    };
    Ok(match attribute {
        MAX_THREADS_PER_BLOCK => function.max_threads() as c_int,
        SHARED_SIZE_BYTES => info.shared_bytes as c_int,
        CONST_SIZE_BYTES => info.const_bytes as c_int,
        LOCAL_SIZE_BYTES => info.local_bytes as c_int,
        NUM_REGS => info.registers as c_int,
        PTX_VERSION => info.ptx_version as c_int,
        BINARY_VERSION => info.binary_version as c_int,
        CACHE_MODE_CA => 0,
        MAX_DYNAMIC_SHARED_SIZE_BYTES => function.max_dynamic_shared() as c_int,
        PREFERRED_SHARED_MEMORY_CARVEOUT => settings.get(attribute).unwrap_or(-1),
        CLUSTER_SIZE_MUST_BE_SET => c_int::from(info.cluster_must_be_set),
        REQUIRED_CLUSTER_WIDTH => cluster(0),
        REQUIRED_CLUSTER_HEIGHT => cluster(1),
        REQUIRED_CLUSTER_DEPTH => cluster(2),
        NON_PORTABLE_CLUSTER_SIZE_ALLOWED => c_int::from(settings.allows_non_portable_clusters()),
        CLUSTER_SCHEDULING_POLICY_PREFERENCE => settings.get(attribute).unwrap_or(0),
        _ => return Err(CuError::INVALID_VALUE),
    })
}

/// INVALID_VALUE for an attribute that cannot be set, or a value out of its range; NOT_PERMITTED
/// for a cluster where the kernel was compiled for one.
pub(crate) fn set(function: &Function, attribute: u32, value: c_int) -> Result<(), CuError> {
    let range = match attribute {
        MAX_DYNAMIC_SHARED_SIZE_BYTES => {
            let opt_in = function.device().limit(attr::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 48 << 10);
            let most = opt_in.saturating_sub(function.info().shared_bytes);
            0..=most as c_int
        }
        PREFERRED_SHARED_MEMORY_CARVEOUT => -1..=100,
        REQUIRED_CLUSTER_WIDTH | REQUIRED_CLUSTER_HEIGHT | REQUIRED_CLUSTER_DEPTH
            if function.info().required_cluster != [0; 3] =>
        {
            return Err(CuError::NOT_PERMITTED);
        }
        REQUIRED_CLUSTER_WIDTH | REQUIRED_CLUSTER_HEIGHT | REQUIRED_CLUSTER_DEPTH => 0..=c_int::MAX,
        NON_PORTABLE_CLUSTER_SIZE_ALLOWED => 0..=1,
        CLUSTER_SCHEDULING_POLICY_PREFERENCE => 0..=2,
        _ => return Err(CuError::INVALID_VALUE),
    };
    if !range.contains(&value) {
        return Err(CuError::INVALID_VALUE);
    }
    function.settings().set(attribute, value);
    function.post_attribute(attribute, value)
}
