//! CUfunction_attribute: what a kernel needs, and what a program sets for its launches.

use super::Function;
use kedge_cuda_types::CuError;
use kedge_cuda_types::attribute as attr;
use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, Ordering};

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
    /// Bytes; negative: not set.
    max_dynamic_shared: AtomicI32,
    /// Percent; -1: the device's default.
    carveout: AtomicI32,
    /// Blocks; 0: not set.
    cluster: [AtomicI32; 3],
    non_portable_cluster: AtomicI32,
    cluster_policy: AtomicI32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_dynamic_shared: AtomicI32::new(-1),
            carveout: AtomicI32::new(-1),
            cluster: [const { AtomicI32::new(0) }; 3],
            non_portable_cluster: AtomicI32::new(0),
            cluster_policy: AtomicI32::new(0),
        }
    }
}

impl Settings {
    pub(super) fn max_dynamic_shared(&self) -> Option<u32> {
        u32::try_from(self.max_dynamic_shared.load(Ordering::Relaxed)).ok()
    }

    pub(crate) fn allows_non_portable_clusters(&self) -> bool {
        self.non_portable_cluster.load(Ordering::Relaxed) != 0
    }

    fn cluster(&self, dimension: usize) -> c_int {
        self.cluster[dimension].load(Ordering::Relaxed)
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
        PREFERRED_SHARED_MEMORY_CARVEOUT => settings.carveout.load(Ordering::Relaxed),
        CLUSTER_SIZE_MUST_BE_SET => 0,
        REQUIRED_CLUSTER_WIDTH => cluster(0),
        REQUIRED_CLUSTER_HEIGHT => cluster(1),
        REQUIRED_CLUSTER_DEPTH => cluster(2),
        NON_PORTABLE_CLUSTER_SIZE_ALLOWED => c_int::from(settings.allows_non_portable_clusters()),
        CLUSTER_SCHEDULING_POLICY_PREFERENCE => settings.cluster_policy.load(Ordering::Relaxed),
        _ => return Err(CuError::INVALID_VALUE),
    })
}

/// INVALID_VALUE for an attribute that cannot be set, or a value out of its range.
pub(crate) fn set(function: &Function, attribute: u32, value: c_int) -> Result<(), CuError> {
    let settings = function.settings();
    let (slot, range) = match attribute {
        MAX_DYNAMIC_SHARED_SIZE_BYTES => {
            let opt_in = function.device().limit(attr::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 48 << 10);
            let most = opt_in.saturating_sub(function.info().shared_bytes);
            (&settings.max_dynamic_shared, 0..=most as c_int)
        }
        PREFERRED_SHARED_MEMORY_CARVEOUT => (&settings.carveout, -1..=100),
        REQUIRED_CLUSTER_WIDTH | REQUIRED_CLUSTER_HEIGHT | REQUIRED_CLUSTER_DEPTH
            if function.info().required_cluster == [0; 3] =>
        {
            let dimension = (attribute - REQUIRED_CLUSTER_WIDTH) as usize;
            (&settings.cluster[dimension], 0..=c_int::MAX)
        }
        NON_PORTABLE_CLUSTER_SIZE_ALLOWED => (&settings.non_portable_cluster, 0..=1),
        CLUSTER_SCHEDULING_POLICY_PREFERENCE => (&settings.cluster_policy, 0..=2),
        _ => return Err(CuError::INVALID_VALUE),
    };
    if !range.contains(&value) {
        return Err(CuError::INVALID_VALUE);
    }
    slot.store(value, Ordering::Relaxed);
    Ok(())
}
