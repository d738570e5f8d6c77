//! Starting what runs beside a job. A job whose log tells that it lacks one of them runs all the
//! same.

use crate::job::jobs::JobDir;
use crate::job::noted::open_log;
use crate::job::parts::Parts;
use crate::job::policy::Policy;
use crate::services::management::Management;
use crate::services::warm::{Kind, Own};
use kedge_control::gpu::GpuSpec;
use kedge_control::warn;
use kedge_image::DeviceLimits;

/// What keeps proxies ready for the job, where its policy wants some.
pub(crate) fn warm_of(dir: &JobDir, kind: &Kind, policy: &Policy) -> Option<Own> {
    let own = Own::start(dir, kind, policy.warm?);
    if let (Err(error), Ok(log)) = (&own, open_log(dir)) {
        warn!(log, "no proxies are kept ready: {error}");
    }
    own.ok()
}

/// What answers the job's questions to NVML, where there is a library to ask with.
pub(crate) fn management_of(
    dir: &JobDir,
    parts: &Parts,
    gpu: &GpuSpec,
    limits: &DeviceLimits,
) -> Option<Management> {
    parts.nvml.as_ref()?;
    let management = Management::start(dir, parts, gpu, limits);
    if let (Err(error), Ok(log)) = (&management, open_log(dir)) {
        warn!(log, "no process answers for NVML: {error}");
    }
    management.ok()
}
