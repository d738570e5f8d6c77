//! What CRUM's Tables II and III say.

const TABLE_2: &str = "CRUM (CLUSTER 2018), Table II: two vectors, 33 GB";
const TABLE_3: &str = "CRUM (CLUSTER 2018), Table III: 32 ranks on 4 nodes";

/// Strategy and data, seconds, GB in the image; 33 GB in memory.
const RANDOM: [(&str, f64, f64); 8] = [
    ("naive, 100 % random", 45.0, 33.0),
    ("gzip, 100 % random", 1296.0, 29.0),
    ("parallel gzip, 100 % random", 86.0, 29.0),
    ("LZ4, 100 % random", 62.0, 33.0),
    ("forked, 100 % random", 4.1, 32.0),
    ("gzip, 50 % random", 749.0, 15.0),
    ("parallel gzip, 50 % random", 56.0, 15.0),
    ("LZ4, 50 % random", 45.0, 17.0),
];
const GB: f64 = 33.0;

/// Strategy and data, time relative to the naive strategy's, MB in the image and in memory.
const APPLICATIONS: [(&str, f64, f64, f64); 8] = [
    ("gzip, multigrid", 0.78, 14.0, 113.0),
    ("parallel gzip, multigrid", 0.60, 14.0, 113.0),
    ("LZ4, multigrid", 0.30, 16.0, 113.0),
    ("forked, multigrid", 0.025, 113.0, 113.0),
    ("gzip, sparse matrix", 2.0, 176.0, 868.0),
    ("parallel gzip, sparse matrix", 1.0, 176.0, 868.0),
    ("LZ4, sparse matrix", 1.0, 296.0, 868.0),
    ("forked, sparse matrix", 0.032, 868.0, 868.0),
];

/// The figure that stands there for `name`, in the same unit: value, whose, where.
pub(crate) fn find(name: &str) -> Option<(f64, &'static str, &'static str)> {
    let (of, size) = match name.strip_suffix(": size") {
        Some(of) => (of, true),
        None => (name, false),
    };
    if let Some((_, seconds, stored)) = RANDOM.iter().find(|(known, ..)| *known == of) {
        let value = if size { stored / GB } else { GB / seconds };
        return Some((value, "CRUM", TABLE_2));
    }
    let (_, time, stored, memory) = APPLICATIONS.iter().find(|(known, ..)| *known == of)?;
    let value = if size { stored / memory } else { *time };
    let whose = if of.ends_with("multigrid") { "CRUM, HPGMG-FV" } else { "CRUM, HYPRE" };
    Some((value, whose, TABLE_3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_stand_beside_the_published_ones() {
        let value = |name| find(name).map(|(value, ..)| (value * 1000.0).round() / 1000.0);
        assert_eq!(value("gzip, 100 % random"), Some(0.025));
        assert_eq!(value("gzip, 50 % random: size"), Some(0.455));
        assert_eq!(value("LZ4, multigrid"), Some(0.3));
        assert_eq!(value("LZ4, sparse matrix: size"), Some(0.341));
        assert_eq!(value("Zstd, multigrid"), None);
    }
}
