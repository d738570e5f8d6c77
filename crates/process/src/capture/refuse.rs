//! What kedge cannot bring back yet, by name.

use crate::EngineError;
use crate::proc::{self, Status};
use crate::stop::{self, Roots};
use libc::pid_t;
use std::path::Path;

const NAMESPACES: [&str; 7] =
    ["ns/mnt", "ns/user", "ns/pid", "ns/net", "ns/ipc", "ns/uts", "ns/cgroup"];

/// Looks at all processes of `roots` before one of them is stopped.
pub(super) fn ahead(roots: &Roots) -> Result<(), EngineError> {
    for pid in stop::alive(roots) {
        match one(pid) {
            // What has ended meanwhile is in nobody's way.
            Err(EngineError::Ended { .. }) => {}
            other => other?,
        }
    }
    Ok(())
}

fn one(pid: pid_t) -> Result<(), EngineError> {
    let at = proc::reach(pid);
    let tracer = Status::of(at)?.decimal("TracerPid") as pid_t;
    if tracer != 0 {
        return Err(EngineError::Traced { pid, tracer });
    }
    process(at)
}

/// Of a process, reached by its thread `pid`.
pub(super) fn process(pid: pid_t) -> Result<(), EngineError> {
    let unsupported = |what: &str| {
        Err(EngineError::unsupported(pid, format!("{what}, which kedge cannot save yet")))
    };
    let own = std::process::id() as pid_t;
    for name in NAMESPACES {
        if proc::link(pid, name)? != proc::link(own, name)? {
            return unsupported("it has namespaces of its own");
        }
    }
    if proc::link(pid, "root")? != Path::new("/") {
        return unsupported("it has changed its root folder");
    }
    if let Some(group) = control_group(pid, own)? {
        return unsupported(&format!("it has moved into the control group {group}"));
    }
    Ok(())
}

/// The control group of `pid` that is not that of `own`, if there is one.
fn control_group(pid: pid_t, own: pid_t) -> Result<Option<String>, EngineError> {
    let (its, own) = (proc::text(pid, "cgroup")?, proc::text(own, "cgroup")?);
    let other = its.lines().find(|line| !own.lines().any(|own| own == *line));
    Ok(other.map(str::to_owned))
}
