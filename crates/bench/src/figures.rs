//! Figures: what was measured, what it should be, and what others reach.

use kedge_probe::Series;
use serde::Serialize;

/// One figure of the list.
#[derive(Debug, Serialize)]
pub struct Figure {
    pub name: String,
    pub unit: String,
    /// The median.
    pub value: f64,
    pub min: f64,
    pub max: f64,
    pub better: Better,
    pub target: Option<f64>,
    pub reference: Option<Reference>,
}

impl Figure {
    /// Returns the median, the extremes and what is known of a series; `None` without samples.
    pub fn of(series: Series) -> Option<Figure> {
        let mut samples = series.samples;
        samples.retain(|sample| sample.is_finite());
        samples.sort_by(f64::total_cmp);
        let (min, max) = (*samples.first()?, *samples.last()?);
        let middle = samples.len() / 2;
        let value = match samples.len() % 2 {
            1 => samples[middle],
            _ => f64::midpoint(samples[middle - 1], samples[middle]),
        };
        let Known { better, target, reference } = known(&series.name, &series.unit);
        let (name, unit) = (series.name, series.unit);
        Some(Figure { name, unit, value, min, max, better, target, reference })
    }
}

/// Whether less or more of a figure is better.

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    Lower,
    Higher,
}

impl Better {
    /// Whether a figure is as good as its target.
    pub fn reaches(self, value: f64, target: f64) -> bool {
        match self {
            Better::Lower => value <= target,
            Better::Higher => value >= target,
        }
    }

    /// Returns the sign between a figure and its target.
    pub fn sign(self) -> &'static str {
        match self {
            Better::Lower => "≤",
            Better::Higher => "≥",
        }
    }
}

/// Somebody else's figure, in the same unit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Reference {
    pub value: f64,
    pub what: &'static str,
    pub source: &'static str,
}

#[derive(Debug, Clone, PartialEq)]
struct Known {
    better: Better,
    target: Option<f64>,
    reference: Option<Reference>,
}

const NATIVE: &str = "native, H200";
const H200: &str = "one H200, driver 580.159.04, measured 2026-11-20";
const LUPINE: &str = "natively beside LUPINE 7fbd364 on an H200, measured 2026-11-20";
const GIB: f64 = 1.073_741_824;

/// What is known of the figure `name`, measured in `unit`.
fn known(name: &str, unit: &str) -> Known {
    let own = super::checkpoint::known::is_rate(name);
    let rate = own || unit.contains("/s") || unit.starts_with("of ") && unit != "of 1";
    let better = if rate { Better::Higher } else { Better::Lower };
    let target = target(name).or_else(|| super::cost::target(name));
    let target = target.or_else(|| super::cluster::target(name, unit));
    let target = target.or_else(|| super::process::known::target(name));
    let target = target.or_else(|| super::checkpoint::known::target(name));
    let target = target.or_else(|| super::far::target(name, unit));
    let target = target.or_else(|| super::cache::target(name));
    let target = target.or_else(|| super::migrate::target(name, unit));
    let target = target.or_else(|| super::managed::target(name, unit));
    let reference = reference(name).map(|(value, what, source)| Reference { value, what, source });
    Known { better, target, reference }
}

fn target(name: &str) -> Option<f64> {
    Some(match name {
        "post a launch" => 0.3,
        "local query (cuCtxGetDevice)" => 0.1,
        "round trip (cuMemGetInfo)" => 3.0,
        "idle job, share of a core" => 1.0,
        "fp32 ALU loop" | "tiled matrix product" => 1.0,
        _ => return None,
    })
}

fn reference(name: &str) -> Option<(f64, &'static str, &'static str)> {
    if let Some(found) = super::codecs::published::find(name) {
        return Some(found);
    }
    if let Some(found) = super::process::known::reference(name) {
        return Some(found);
    }
    if let Some(found) = super::checkpoint::known::reference(name) {
        return Some(found);
    }
    if let Some(found) = super::managed::reference(name) {
        return Some(found);
    }
    if let Some(found) = copy_reference(name) {
        return Some((found, NATIVE, H200));
    }
    Some(match name {
        "post a launch" => (3.76, NATIVE, H200),
        "local query (cuCtxGetDevice)" => (0.022, NATIVE, H200),
        "launch and synchronize" => (8.9, NATIVE, H200),
        "synchronize when idle" => (0.5, NATIVE, LUPINE),
        "record an event" => (0.35, NATIVE, LUPINE),
        "allocate and free 1 MiB" => (3.0, NATIVE, LUPINE),
        // The floor of any call that another process answers.
        "round trip (cuMemGetInfo)" => {
            (0.43, "bare shared-memory round trip", "two processes spinning on 2 cores, 2026-11-20")
        }
        _ => return None,
    })
}

/// GB/s of large copies; small ones have no published figure.
fn copy_reference(name: &str) -> Option<f64> {
    let gib_per_second = match name.strip_suffix(" 256 MiB")? {
        "host to device, pinned" => 50.7,
        "device to host, pinned" => 51.5,
        "host to device, pageable" => 6.6,
        "device to host, pageable" => 13.0,
        "device to device" => 2008.0,
        _ => return None,
    };
    Some(gib_per_second * GIB)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(samples: &[f64]) -> Option<Figure> {
        Figure::of(Series { name: "x".into(), unit: "µs".into(), samples: samples.to_vec() })
    }

    #[test]
    fn figures_are_medians() {
        let figure = of(&[3.0, 1.0, f64::NAN, 2.0]).unwrap();
        assert_eq!((figure.value, figure.min, figure.max), (2.0, 1.0, 3.0));
        assert_eq!(of(&[4.0, 1.0]).unwrap().value, 2.5);
        assert!(of(&[]).is_none());
    }

    #[test]
    fn rates_are_better_higher_and_times_lower() {
        assert_eq!(known("post a launch", "µs").better, Better::Lower);
        assert_eq!(
            known("fp32 ALU loop", "1e9 thread-instructions/s per core").better,
            Better::Higher
        );
        assert!(Better::Lower.reaches(0.2, 0.3) && !Better::Higher.reaches(0.2, 0.3));
    }

    #[test]
    fn large_copies_have_a_reference() {
        let known = known("device to host, pinned 256 MiB", "GB/s");
        assert!(known.reference.is_some_and(|r| r.value > 55.0));
        assert_eq!(super::known("memcpy 4 KiB", "GB/s").reference, None);
    }
}
