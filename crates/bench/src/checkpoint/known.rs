//! What the figures should be, and what the driver's own checkpoint takes.

const DRIVER: &str =
    "cuCheckpointProcess*, one H200, driver 580.159.04, measured 2026-11-20, not paired";

/// What the bus carries to the host from pinned memory, GiB/s, on an H200.
const BUS: f64 = 51.5;

/// The driver's own checkpoint and restore, seconds, by GiB.
const MEASURED: [(&str, f64, f64); 3] =
    [("4 GiB", 2.33, 0.85), ("16 GiB", 8.30, 2.85), ("40 GiB", 22.28, 6.75)];

pub(crate) fn target(name: &str) -> Option<f64> {
    let (what, size) = name.rsplit_once(", ")?;
    Some(match (what, size) {
        (super::PAUSE | super::RESIDENT_PAUSE, "4 GiB") => 20.0,
        (super::PAUSE | super::RESIDENT_PAUSE, "16 GiB") => 28.0,
        (super::PAUSE | super::RESIDENT_PAUSE | super::CHANGED_PAUSE, "40 GiB") => 45.0,
        (super::PAUSE, size) if size.starts_with("100 GiB") => 1700.0,
        // Of the bus.
        (super::SUNK | super::LEFT, "16 GiB" | "40 GiB" | "100 GiB") => 0.9 * BUS,
        (super::CHANGED_BYTES, _) => 0.07,
        (super::DRAIN, _) => 0.97,
        (super::AFTER, _) => 0.99,
        (super::RESTART | super::RESTART_WARM, "4 GiB") => 0.35,
        (super::RESTART | super::RESTART_WARM, "16 GiB") => 0.6,
        (super::RESTART | super::RESTART_WARM, "40 GiB") => 1.1,
        _ => return None,
    })
}

pub(crate) fn reference(name: &str) -> Option<(f64, &'static str, &'static str)> {
    let (what, size) = name.rsplit_once(", ")?;
    let (_, checkpoint, restore) = MEASURED.iter().find(|(of, ..)| *of == size)?;
    match what {
        super::PAUSE => Some((checkpoint * 1e3, "the driver's checkpoint", DRIVER)),
        super::RESTART | super::RESTART_WARM => Some((*restore, "the driver's restore", DRIVER)),
        _ => None,
    }
}

/// Whether more of it is better.
pub(crate) fn is_rate(name: &str) -> bool {
    let rates =
        [super::DRAIN, super::AFTER, super::OTHER, super::IDLE_DRAIN, super::SUNK, super::LEFT];
    name.rsplit_once(", ").is_some_and(|(what, _)| rates.contains(&what))
}
