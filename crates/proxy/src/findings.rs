//! What devices have found in a program that is checked, as the job's supervisor reads it.

use kedge_control::check::{FORMAT, Finding, Place, Report};
use kedge_device::{FindingPlace, Findings};
use std::sync::OnceLock;

/// Returns what is written down of a device's findings.
pub(crate) fn report(found: &Findings) -> Report {
    let proxy = std::process::id();
    let one = |found: &kedge_device::Finding| Finding {
        kind: found.kind.word().to_owned(),
        message: found.message.clone(),
        kernel: (!found.kernel.is_empty()).then(|| found.kernel.clone()),
        block: found.block,
        place: place(&found.place),
        other: found.other.as_ref().map(place),
        address: found.address,
        count: found.count,
        proxy,
    };
    Report { format: FORMAT, findings: found.list.iter().map(one).collect(), more: found.more }
}

fn place(found: &FindingPlace) -> Place {
    let (file, line) = found.source.clone().unzip();
    Place {
        action: found.action.clone(),
        file,
        line,
        inlined_at: found.inlined_at.clone(),
        ptx_line: (found.ptx_line != 0).then_some(found.ptx_line),
        thread: found.thread,
    }
}

/// What has the devices tell more at the end.
static LAST: OnceLock<Box<dyn Fn() + Send + Sync>> = OnceLock::new();

/// Has `tell` be called when the process ends; once. It has the devices tell what they can only
/// tell by then.
pub(crate) fn ask_at_end(tell: impl Fn() + Send + Sync + 'static) {
    let _ = LAST.set(Box::new(tell));
}

/// Has the devices tell what they can only tell by now. The process is about to end.
pub(crate) fn conclude() {
    if let Some(tell) = LAST.get() {
        tell();
    }
}
