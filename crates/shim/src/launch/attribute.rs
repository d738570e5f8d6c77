//! Launch attributes (`CUlaunchAttribute`).

use crate::{entry, ffi};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::{
    CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
    CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE, CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
    CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE, CU_LAUNCH_ATTRIBUTE_IGNORE,
    CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT, CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN,
    CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING,
    CU_LAUNCH_ATTRIBUTE_PORTABLE_CLUSTER_SIZE_MODE,
    CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION,
    CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, CU_LAUNCH_ATTRIBUTE_PRIORITY,
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
    CU_LAUNCH_ATTRIBUTE_SHARED_MEMORY_MODE, CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY,
    CUlaunchAttribute, CUlaunchAttributeValue,
};
use kedge_cuda_types::handle::CUevent;
use kedge_protocol::{Dim3, LaunchHint};

/// More than there are kinds of attributes.
const MAX_ATTRIBUTES: u32 = 64;

/// What a launch's attributes ask for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Attributes {
    pub(crate) cooperative: bool,
    /// Blocks of a cluster.
    pub(crate) cluster: Option<Dim3>,
    /// Recorded once the kernel has run: a correct, if late, moment for both attributes with one.
    pub(crate) event: Option<CUevent>,
    /// For the device, which may ignore them.
    pub(crate) hints: Vec<LaunchHint>,
}

/// Puts a hint in the place of an earlier one of its kind.
fn set_hint(hints: &mut Vec<LaunchHint>, hint: LaunchHint) {
    match hints.iter_mut().find(|known| known.id == hint.id) {
        Some(known) => *known = hint,
        None => hints.push(hint),
    }
}

impl Attributes {
    /// # Safety
    /// `list` is NULL or valid for `count` reads.
    pub(crate) unsafe fn read(list: *const CUlaunchAttribute, count: u32) -> Result<Self, CuError> {
        if count > MAX_ATTRIBUTES {
            return Err(CuError::INVALID_VALUE);
        }
        let mut attributes = Self::default();
        // SAFETY: `list` is NULL or has `count` values, by this function's contract.
        for attribute in unsafe { ffi::read_array(list, count as usize)? } {
            attributes.apply(attribute.id, &attribute.value)?;
        }
        Ok(attributes)
    }

    /// INVALID_VALUE for a value that is none, NOT_SUPPORTED for an attribute that would be ignored
    /// although it means something.
    pub(crate) fn apply(&mut self, id: u32, value: &CUlaunchAttributeValue) -> Result<(), CuError> {
        match id {
            CU_LAUNCH_ATTRIBUTE_COOPERATIVE => self.cooperative = value.word(0) != 0,
            CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION => {
                let cluster = Dim3 { x: value.word(0), y: value.word(1), z: value.word(2) };
                if cluster.x == 0 || cluster.y == 0 || cluster.z == 0 {
                    return Err(CuError::INVALID_VALUE);
                }
                self.cluster = Some(cluster);
            }
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT
            | CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT => self.event = Some(value.event()),
            CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE if value.word(0) != 0 => {
                return Err(entry::not_supported("a kernel node that the device updates"));
            }
            CU_LAUNCH_ATTRIBUTE_IGNORE | CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE => {}
            // Hints, and permissions to begin earlier than order demands: not needed to be right.
            CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
            | CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY
            | CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE
            | CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            | CU_LAUNCH_ATTRIBUTE_PRIORITY
            | CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP
            | CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN
            | CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION
            | CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            | CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING
            | CU_LAUNCH_ATTRIBUTE_PORTABLE_CLUSTER_SIZE_MODE
            | CU_LAUNCH_ATTRIBUTE_SHARED_MEMORY_MODE => {
                set_hint(&mut self.hints, LaunchHint { id, value: value.bytes });
            }
            _ => return Err(entry::not_supported("a launch attribute of an unknown kind")),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_matters() {
        let words = |words: &[u32]| CUlaunchAttributeValue::from_words(words);
        let mut attributes = Attributes::default();
        attributes.apply(CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &words(&[1])).unwrap();
        attributes.apply(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &words(&[2, 1, 1])).unwrap();
        for priority in [7, 5] {
            attributes.apply(CU_LAUNCH_ATTRIBUTE_PRIORITY, &words(&[priority])).unwrap();
        }
        attributes.apply(CU_LAUNCH_ATTRIBUTE_IGNORE, &words(&[])).unwrap();
        let value = words(&[5]).bytes;
        assert_eq!(attributes.hints, [LaunchHint { id: CU_LAUNCH_ATTRIBUTE_PRIORITY, value }]);
        assert!(attributes.cooperative);
        assert_eq!(attributes.cluster, Some(Dim3 { x: 2, y: 1, z: 1 }));
        let zero = attributes.apply(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &words(&[0, 1, 1]));
        assert_eq!(zero, Err(CuError::INVALID_VALUE));
        assert_eq!(attributes.apply(9999, &words(&[])), Err(CuError::NOT_SUPPORTED));
    }
}
