//! What CRUM's Tables II and III say.

use super::Way;
use super::data::Set;
use kedge_probe::Reference;

const TABLE_2: &str = "CRUM (CLUSTER 2018), Table II: two vectors, 33 GB";
const TABLE_3: &str = "CRUM (CLUSTER 2018), Table III: 32 ranks on 4 nodes";
/// In memory, of Table II.
const GB: f64 = 33.0;

/// What stands there of one way to store one set of data.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Published {
    /// GB/s, or of the naive way's time.
    pub(super) time: Reference,
    /// Of the memory.
    pub(super) size: Reference,
}

/// Returns what is published of a way to store a set of data.
pub(super) fn of(set: Set, way: Way) -> Option<Published> {
    match set {
        Set::Random => random(way, [45.0, 1296.0, 86.0, 62.0, 4.1], [33.0, 29.0, 29.0, 33.0, 32.0]),
        Set::HalfRandom => {
            const NONE: f64 = f64::NAN;
            random(way, [NONE, 749.0, 56.0, 45.0, NONE], [NONE, 15.0, 15.0, 17.0, NONE])
        }
        Set::Multigrid => application(
            way,
            "CRUM, HPGMG-FV",
            [0.78, 0.60, 0.30, 0.025],
            [14.0, 14.0, 16.0, 113.0].map(|stored| stored / 113.0),
        ),
        Set::Sparse => application(
            way,
            "CRUM, HYPRE",
            [2.0, 1.0, 1.0, 0.032],
            [176.0, 176.0, 296.0, 868.0].map(|stored| stored / 868.0),
        ),
    }
}

/// Out of Table II: seconds and GB in the image, of the naive way, gzip, parallel gzip, LZ4 and the
/// forked one.
fn random(way: Way, seconds: [f64; 5], stored: [f64; 5]) -> Option<Published> {
    let column = match way {
        Way::Naive => 0,
        other => 1 + compared(other)?,
    };
    let of = |value| Reference::new(value, "CRUM", TABLE_2);
    let known = !seconds[column].is_nan();
    known.then(|| Published { time: of(GB / seconds[column]), size: of(stored[column] / GB) })
}

/// Out of Table III: the time, of the naive way's, and the size, of the memory's, of gzip, parallel
/// gzip, LZ4 and the forked way.
fn application(
    way: Way,
    whose: &'static str,
    times: [f64; 4],
    sizes: [f64; 4],
) -> Option<Published> {
    let of = |value| Reference::new(value, whose, TABLE_3);
    compared(way).map(|column| Published { time: of(times[column]), size: of(sizes[column]) })
}

fn compared(way: Way) -> Option<usize> {
    match way {
        Way::Gzip => Some(0),
        Way::ParallelGzip => Some(1),
        Way::Lz4 => Some(2),
        Way::Forked => Some(3),
        Way::Naive | Way::ParallelLz4 | Way::Zstd | Way::ParallelZstd | Way::Automatic => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_stand_beside_the_published_ones() {
        let rounded = |value: f64| (value * 1000.0).round() / 1000.0;
        let time = |set, way| of(set, way).map(|it| rounded(it.time.value));
        let size = |set, way| of(set, way).map(|it| rounded(it.size.value));
        assert_eq!(time(Set::Random, Way::Gzip), Some(0.025));
        assert_eq!(time(Set::Random, Way::Naive), Some(0.733));
        assert_eq!(size(Set::HalfRandom, Way::Gzip), Some(0.455));
        assert_eq!(time(Set::HalfRandom, Way::Forked), None);
        assert_eq!(time(Set::Multigrid, Way::Lz4), Some(0.3));
        assert_eq!(size(Set::Sparse, Way::Lz4), Some(0.341));
        assert_eq!(time(Set::Multigrid, Way::Zstd), None);
    }
}
