//! How a proxy is started, whoever starts it.

use std::process::Command;

/// The driver's variable for the GPUs that it shows.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// Has the driver show a proxy the job's GPUs and no others: where it places things depends on how
/// many it shows, and a job must find them where they were on a machine that has more or fewer.
/// Among the job's the proxy chooses, for each client by the client's own environment.
pub(crate) fn show_only(command: &mut Command, shown: Option<&str>) {
    match shown {
        Some(list) => command.env(VISIBLE, list),
        None => command.env_remove(VISIBLE),
    };
}

/// In the child: no random places from exec on. Where that is not allowed, a restart is what finds
/// out.
pub(crate) fn fix_places() {
    const ASK: libc::c_ulong = 0xffff_ffff;
    // SAFETY: plain calls.
    unsafe {
        let now = libc::personality(ASK);
        if now >= 0 {
            libc::personality(now as libc::c_ulong | libc::ADDR_NO_RANDOMIZE as libc::c_ulong);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_control::gpu::GpuSpec;
    use std::ffi::OsStr;

    #[test]
    fn the_driver_shows_a_proxy_the_job_s_gpus_alone() {
        let shown = |gpu: &str| {
            let mut command = Command::new("true");
            show_only(&mut command, gpu.parse::<GpuSpec>().unwrap().shown().as_deref());
            let (name, value) = command.get_envs().next().unwrap();
            assert_eq!(name, VISIBLE);
            value.map(OsStr::to_os_string)
        };
        assert_eq!(shown("local:2,0"), Some("2,0".into()));
        assert_eq!((shown("local"), shown("soft")), (None, None), "whatever the job's starter has");
    }
}
