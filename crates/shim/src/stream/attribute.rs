//! Stream attributes: kept for the program. They steer caches and schedulers that an executed
//! program cannot observe otherwise, so nothing is sent.

use super::{Stream, find};
use crate::ffi;
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::{
    CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW, CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN,
    CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, CU_LAUNCH_ATTRIBUTE_PRIORITY,
    CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, CU_SYNC_POLICY_AUTO, CUlaunchAttributeValue,
};
use kedge_cuda_types::handle::CUstream;
use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};

/// What was set, by `CUstreamAttrID`.
pub(super) type Attributes = BTreeMap<u32, CUlaunchAttributeValue>;

impl Stream {
    fn attributes(&self) -> MutexGuard<'_, Attributes> {
        self.attributes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attribute(&self, id: u32) -> Result<CUlaunchAttributeValue, CuError> {
        if let Some(value) = self.attributes().get(&id) {
            return Ok(*value);
        }
        let words: &[u32] = match id {
            CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW | CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN => &[],
            CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY => &[CU_SYNC_POLICY_AUTO],
            CU_LAUNCH_ATTRIBUTE_PRIORITY => &[self.priority as u32],
            // Two bytes: the default domain 0, the remote domain 1.
            CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP => &[0x0100],
            _ => return Err(CuError::INVALID_VALUE),
        };
        Ok(CUlaunchAttributeValue::from_words(words))
    }
}

pub(crate) unsafe fn cuStreamGetAttribute(
    stream: CUstream,
    id: u32,
    value: *mut CUlaunchAttributeValue,
) -> Result<(), CuError> {
    let found = find(stream)?.attribute(id)?;
    // SAFETY: the caller promises room for a value.
    unsafe { ffi::write(value, found) }
}

pub(crate) unsafe fn cuStreamSetAttribute(
    stream: CUstream,
    id: u32,
    value: *const CUlaunchAttributeValue,
) -> Result<(), CuError> {
    let stream = find(stream)?;
    stream.attribute(id)?;
    // SAFETY: the caller promises a value.
    let value = unsafe { ffi::read(value) }?;
    stream.attributes().insert(id, value);
    Ok(())
}

pub(crate) unsafe fn cuStreamCopyAttributes(
    target: CUstream,
    source: CUstream,
) -> Result<(), CuError> {
    let (target, source) = (find(target)?, find(source)?);
    let copied = source.attributes().clone();
    *target.attributes() = copied;
    Ok(())
}
