//! Numbers that differ from run to run: moments and names.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns a number of [0, 1), not the same twice.
pub fn fraction() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut x = now.as_nanos() as u64 ^ u64::from(std::process::id()) << 32;
    for _ in 0..3 {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
    }
    (x >> 11) as f64 / (1u64 << 53) as f64
}

/// Returns a whole number below `below`.
pub fn number(below: u32) -> u32 {
    (fraction() * f64::from(below)) as u32
}
