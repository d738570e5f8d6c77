//! The list's figures, out of series.

use kedge_probe::{Better, Reference, Series};
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
        let Series { name, unit, mut samples, better, target, reference } = series;
        samples.retain(|sample| sample.is_finite());
        samples.sort_by(f64::total_cmp);
        let (min, max) = (*samples.first()?, *samples.last()?);
        let middle = samples.len() / 2;
        let value = match samples.len() % 2 {
            1 => samples[middle],
            _ => f64::midpoint(samples[middle - 1], samples[middle]),
        };
        Some(Figure { name, unit, value, min, max, better, target, reference })
    }
}

/// Bytes of a GiB.
pub(crate) const GIB: u64 = 1 << 30;

/// Returns what is known for jobs of this size, in bytes, out of what is known by size.
pub(crate) fn at(size: u64, known: &[(u64, f64)]) -> Option<f64> {
    known.iter().find(|(of, _)| *of == size).map(|(_, value)| *value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(samples: &[f64]) -> Option<Figure> {
        Figure::of(Series::lower("x", "µs", samples.to_vec()))
    }

    #[test]
    fn figures_are_medians() {
        let figure = of(&[3.0, 1.0, f64::NAN, 2.0]).unwrap();
        assert_eq!((figure.value, figure.min, figure.max), (2.0, 1.0, 3.0));
        assert_eq!(of(&[4.0, 1.0]).unwrap().value, 2.5);
        assert!(of(&[]).is_none());
    }

    #[test]
    fn targets_hold_for_the_sizes_that_they_are_of() {
        let known = [(GIB, 50.0), (4 * GIB, 60.0)];
        assert_eq!(
            [GIB, 4 * GIB, GIB + 1].map(|size| at(size, &known)),
            [Some(50.0), Some(60.0), None]
        );
    }

    #[test]
    fn a_figure_tells_all_that_the_list_promises() {
        let reference = Reference::new(0.5, "native", "here");
        let series = Series::higher("copies", "GB/s", vec![1.0]).target(2.0).reference(reference);
        let text = serde_json::to_string(&Figure::of(series)).unwrap();
        let list = r#"{"name":"copies","unit":"GB/s","value":1.0,"min":1.0,"max":1.0,"better":"higher","target":2.0,"reference":{"value":0.5,"what":"native","source":"here"}}"#;
        assert_eq!(text, list);
    }
}
