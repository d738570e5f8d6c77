//! Timing loops.

use crate::ProbeError;
use crate::series::Series;
use std::time::{Duration, Instant};

/// How long one series may take, roughly.
const BUDGET: Duration = Duration::from_millis(400);
const MIN_SAMPLES: usize = 7;
const MAX_SAMPLES: usize = 301;

/// Times `body`, which does its thing `batch` times, and then runs `settle` untimed; seconds for
/// one, of each sample. The first run only warms up.
pub(crate) fn sample(
    batch: usize,
    mut body: impl FnMut() -> Result<(), ProbeError>,
    mut settle: impl FnMut() -> Result<(), ProbeError>,
) -> Result<Vec<f64>, ProbeError> {
    body()?;
    settle()?;
    let mut samples = Vec::new();
    let begin = Instant::now();
    while samples.len() < MIN_SAMPLES || (begin.elapsed() < BUDGET && samples.len() < MAX_SAMPLES) {
        let start = Instant::now();
        body()?;
        samples.push(start.elapsed().as_secs_f64() / batch as f64);
        settle()?;
    }
    Ok(samples)
}

/// How often to do what takes `once` so that a sample lasts `target`.
pub(crate) fn repetitions(once: Duration, target: Duration) -> usize {
    (target.as_secs_f64() / once.as_secs_f64().max(1e-9)).ceil().clamp(1.0, 100_000.0) as usize
}

/// Nothing to do between samples.
pub(crate) fn nothing() -> Result<(), ProbeError> {
    Ok(())
}

/// Seconds as microseconds.
pub(crate) fn microseconds(name: impl Into<String>, seconds: Vec<f64>) -> Series {
    Series::lower(name, "µs", seconds.into_iter().map(|s| s * 1e6).collect())
}

/// Seconds for `amount` as a rate.
pub(crate) fn rate(name: impl Into<String>, unit: &str, amount: f64, seconds: Vec<f64>) -> Series {
    Series::higher(name, unit, seconds.into_iter().map(|s| amount / s).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetitions_fill_the_target() {
        let ms = Duration::from_millis;
        assert_eq!(repetitions(ms(10), ms(100)), 10);
        assert_eq!(repetitions(ms(500), ms(100)), 1);
        assert_eq!(repetitions(Duration::ZERO, ms(100)), 100_000);
    }

    #[test]
    fn a_sample_is_the_time_of_one() {
        let sleep = || {
            std::thread::sleep(Duration::from_millis(20));
            Ok(())
        };
        let samples = sample(10, sleep, nothing).unwrap();
        assert!(samples.len() >= MIN_SAMPLES);
        assert!(samples.iter().all(|s| *s >= 0.002), "{samples:?}");
    }

    #[test]
    fn a_rate_is_per_second() {
        assert_eq!(rate("x", "GB/s", 8.0, vec![2.0, 4.0]).samples, [4.0, 2.0]);
    }
}
