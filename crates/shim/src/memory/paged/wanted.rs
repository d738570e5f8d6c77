//! Whether managed memory is kept by pages, where a device leaves that to the client.

use super::{blocks, view};
use crate::log;
use kedge_cuda_types::CuError;
use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Says how, for all devices that leave it open: `pages` or `shared`.
const VARIABLE: &str = "KEDGE_MANAGED";

/// How managed memory is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// In the device's memory and in the program's own, page by page.
    Pages,
    /// In host memory that devices map, because the program has asked for that.
    Shared,
    /// Likewise, because system calls on pages that are on the device would fail.
    SharedForWantOfRights,
}

/// Returns how managed memory is kept in this process. The first call decides.
pub(crate) fn wanted() -> Wanted {
    static WANTED: OnceLock<Wanted> = OnceLock::new();
    let asked = || std::env::var(VARIABLE).ok();
    *WANTED.get_or_init(|| decide(asked().as_deref(), view::all_faults_are_told))
}

fn decide(asked: Option<&str>, all_faults_are_told: impl FnOnce() -> bool) -> Wanted {
    match asked {
        Some("pages") => Wanted::Pages,
        Some("shared") => Wanted::Shared,
        Some(other) if !other.is_empty() => {
            log::line(&format!("{VARIABLE} is `{other}`; it may be `pages` or `shared`"));
            decide(None, all_faults_are_told)
        }
        _ if all_faults_are_told() => Wanted::Pages,
        _ => Wanted::SharedForWantOfRights,
    }
}

/// Whether host memory can take the place of a device's, as pages need. The log says where not:
/// managed memory is in the shared arena then.
///
/// # Errors
/// The proxy is gone.
pub(super) fn works(device: u32) -> Result<bool, CuError> {
    static WORKS: Mutex<BTreeMap<u32, bool>> = Mutex::new(BTreeMap::new());
    let mut works = WORKS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = works.get(&device) {
        return Ok(*known);
    }
    let found = blocks::takes_host_memory(device)?;
    if !found {
        log::line(
            "managed memory is the host's, and kernels reach it over the bus: this device does \
             not take host memory at its own addresses",
        );
    }
    works.insert(device, found);
    Ok(found)
}

/// Managed memory is not kept by pages on a device that would take it: the log says why, once,
/// unless the program has asked for that. `far`: the device is on another machine.
pub(super) fn tell_why_not(far: bool) {
    static TOLD: OnceLock<()> = OnceLock::new();
    let shared = match far {
        false => "managed memory is the host's, and kernels reach it over the bus",
        true => "managed memory is the host's, and each launch compares all of it",
    };
    TOLD.get_or_init(|| match wanted() {
        Wanted::Shared => {}
        Wanted::SharedForWantOfRights => log::line(&format!(
            "{shared}: with CAP_SYS_PTRACE or vm.unprivileged_userfaultfd=1 it lies on the device \
             that uses it; {VARIABLE}=pages has it there all the same, and system calls on pages \
             that are on the device fail with EFAULT"
        )),
        Wanted::Pages => {
            log::line(&format!("{shared}: the proxy cannot reach this process's memory here"))
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_decide_where_nobody_has_said_how() {
        for (asked, rights, expected) in [
            (None, true, Wanted::Pages),
            (None, false, Wanted::SharedForWantOfRights),
            (Some(""), false, Wanted::SharedForWantOfRights),
            (Some("both"), true, Wanted::Pages),
            (Some("pages"), false, Wanted::Pages),
            (Some("shared"), true, Wanted::Shared),
        ] {
            assert_eq!(decide(asked, || rights), expected, "{asked:?} {rights}");
        }
    }
}
