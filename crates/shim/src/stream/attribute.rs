//! Stream attributes: kept for the program, and told to the device with each launch. They steer
//! caches and schedulers; no result depends on them.

use super::{Stream, find};
use crate::ffi;
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::{
    CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW, CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN,
    CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, CU_LAUNCH_ATTRIBUTE_PRIORITY,
    CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, CU_SYNC_POLICY_AUTO, CUlaunchAttributeValue,
};
use kedge_cuda_types::handle::CUstream;
use kedge_protocol::{Launch, LaunchHint};
use kedge_wire::List;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

/// What was set, by `CUstreamAttrID`.
pub(super) type Attributes = BTreeMap<u32, CUlaunchAttributeValue>;

impl Stream {
    fn attributes(&self) -> MutexGuard<'_, Attributes> {
        self.attributes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds to a launch what the stream says of its launches, where the launch itself says nothing.
    /// A captured launch takes the stream's priority with it.
    #[inline]
    pub(super) fn add_hints(&self, launch: &mut Launch, captured: bool) -> Result<(), CuError> {
        let priority = captured && self.priority != 0;
        if priority || self.has_attributes.load(Ordering::Relaxed) {
            self.add_hints_now(launch, priority)?;
        }
        Ok(())
    }

    #[cold]
    fn add_hints_now(&self, launch: &mut Launch, priority: bool) -> Result<(), CuError> {
        let mut all = self.attributes().clone();
        // How the host waits is no matter of a launch.
        all.remove(&CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY);
        if priority {
            let own = CUlaunchAttributeValue::from_words(&[self.priority as u32]);
            all.entry(CU_LAUNCH_ATTRIBUTE_PRIORITY).or_insert(own);
        }
        let mut hints = std::mem::take(&mut launch.hints).into_inner();
        for (id, value) in all {
            if hints.iter().all(|known| known.id != id) {
                hints.push(LaunchHint { id, value: value.bytes });
            }
        }
        launch.hints = List::new(hints).map_err(|_| CuError::INVALID_VALUE)?;
        Ok(())
    }

    fn set_attributes(&self, change: impl FnOnce(&mut Attributes)) {
        let mut attributes = self.attributes();
        change(&mut attributes);
        self.has_attributes.store(!attributes.is_empty(), Ordering::Relaxed);
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
    stream.set_attributes(|attributes| {
        attributes.insert(id, value);
    });
    Ok(())
}

pub(crate) unsafe fn cuStreamCopyAttributes(
    target: CUstream,
    source: CUstream,
) -> Result<(), CuError> {
    let (target, source) = (find(target)?, find(source)?);
    let copied = source.attributes().clone();
    target.set_attributes(|attributes| *attributes = copied);
    Ok(())
}
