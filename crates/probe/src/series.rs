//! Rows of figures: what was measured, what it should be, and what others reach.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Whether less or more of a figure is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    Lower,
    Higher,
}

impl Better {
    /// Returns whether a figure is as good as its target.
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reference {
    pub value: f64,
    pub what: Cow<'static, str>,
    pub source: Cow<'static, str>,
}

impl Reference {
    pub const fn new(value: f64, what: &'static str, source: &'static str) -> Reference {
        Reference { value, what: Cow::Borrowed(what), source: Cow::Borrowed(source) }
    }
}

/// Everything measured of one thing, and what is known of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Series {
    pub name: String,
    pub unit: String,
    pub samples: Vec<f64>,
    pub better: Better,
    /// What kedge means to reach.
    pub target: Option<f64>,
    /// Native, or the best peer.
    pub reference: Option<Reference>,
}

/// Where results go.
pub type Sink<'a> = dyn FnMut(Series) + 'a;

impl Series {
    /// A series of which less is better.
    pub fn lower(name: impl Into<String>, unit: &str, samples: Vec<f64>) -> Series {
        let (name, unit, better) = (name.into(), unit.to_owned(), Better::Lower);
        Series { name, unit, samples, better, target: None, reference: None }
    }

    /// A series of which more is better.
    pub fn higher(name: impl Into<String>, unit: &str, samples: Vec<f64>) -> Series {
        Series { better: Better::Higher, ..Series::lower(name, unit, samples) }
    }

    /// The same with what kedge means to reach, if it is known.
    #[must_use]
    pub fn target(self, target: impl Into<Option<f64>>) -> Series {
        Series { target: target.into(), ..self }
    }

    /// The same with what others reach, if it is known.
    #[must_use]
    pub fn reference(self, reference: impl Into<Option<Reference>>) -> Series {
        Series { reference: reference.into(), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_reached_from_the_better_side() {
        assert!(Better::Lower.reaches(0.2, 0.3) && !Better::Higher.reaches(0.2, 0.3));
        assert!(Better::Higher.reaches(0.3, 0.3) && Better::Lower.reaches(0.3, 0.3));
    }

    #[test]
    fn a_series_carries_what_is_known_of_it() {
        let own = Series::lower("x", "µs", Vec::new());
        assert_eq!((own.better, own.target, &own.reference), (Better::Lower, None, &None));
        let known = own.target(2.0).reference(Reference::new(3.0, "native", "here"));
        assert_eq!(known.target, Some(2.0));
        assert_eq!(known.reference.map(|it| it.value), Some(3.0));
        assert_eq!(Series::higher("x", "GB/s", Vec::new()).better, Better::Higher);
    }
}
