//! What the figures should be, and what the best peers reach.

use super::many::{MANY_PROCESSES, MANY_THREADS};

const DMTCP: &str = "DMTCP 5.0 tree, measured 2026-11-20 on 2 cores, not paired";
const CRIU: &str = "CRIU 4.2, measured 2026-11-20 on 2 cores, not paired";

/// Loops: what others make of them, in the unit of the row.
const LOOPS: [(&str, f64); 3] =
    [("open and close", 8.5), ("malloc and free", 8.8), ("fork and wait", 9.0)];

pub(crate) fn target(name: &str) -> Option<f64> {
    if let Some(looped) = name.strip_suffix(super::LIMIT) {
        return Some(if looped == "fork and wait" { 1.2 } else { 1.02 });
    }
    if name == super::barriers::BARRIER {
        return Some(1.0);
    }
    let (what, size) = name.rsplit_once(", ")?;
    Some(match (what, size) {
        ("start of /bin/true", _) => 5.0,
        (super::STALL | super::SEEN, "4 GiB") => 0.06,
        (super::DURABLE_SHARE | super::FIO_SHARE, _) => 0.9,
        (super::CHANGED_STALL, "4 GiB") => 0.03,
        (super::CHANGED_DURABLE, "4 GiB") => 0.15,
        (super::RESTART_RATIO, _) => 1.3,
        (super::LAZY, _) => 0.1,
        (super::STALL, MANY_PROCESSES | MANY_THREADS) => 0.15,
        (super::RESTART, MANY_PROCESSES) => 2.0,
        _ => return None,
    })
}

pub(crate) fn reference(name: &str) -> Option<(f64, &'static str, &'static str)> {
    if let Some((_, value)) = LOOPS.iter().find(|(own, _)| *own == name) {
        return Some((*value, "DMTCP", DMTCP));
    }
    if name == super::barriers::BARRIER {
        return Some((1.0, "DMTCP, less than", DMTCP));
    }
    Some(match name.rsplit_once(", ")? {
        ("start of /bin/true", _) => (27.0, "DMTCP", DMTCP),
        (super::STALL, "4 GiB") => (0.26, "DMTCP forked", DMTCP),
        (super::RESTART, "4 GiB") => (1.9, "CRIU", CRIU),
        (super::RESTART, "1 GiB") => (0.46, "CRIU", CRIU),
        _ => return None,
    })
}
