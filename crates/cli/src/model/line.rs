//! Fitting a line through measured times.

/// A time that grows with a size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Line {
    /// Seconds at size 0; not below 0.
    pub(super) fixed: f64,
    /// Seconds for each of the size's units; not below 0.
    pub(super) each: f64,
}

impl Line {
    /// Returns the line with the least squares of relative errors through (size, seconds): a
    /// quick copy counts as much as a slow one. `None` of fewer than two sizes.
    pub(super) fn through(points: &[(f64, f64)]) -> Option<Line> {
        let weighted =
            points.iter().filter(|(_, y)| *y > 0.0).map(|(x, y)| (*x, *y, 1.0 / (y * y)));
        let (mut s, mut sx, mut sy, mut sxx, mut sxy) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for (x, y, w) in weighted {
            s += w;
            sx += w * x;
            sy += w * y;
            sxx += w * x * x;
            sxy += w * x * y;
        }
        let determinant = s * sxx - sx * sx;
        if !determinant.is_finite() || determinant <= 1e-9 * s * sxx {
            return None;
        }
        let each = ((s * sxy - sx * sy) / determinant).max(0.0);
        Some(Line { fixed: ((sy - each * sx) / s).max(0.0), each })
    }
}

/// Returns the least of some times; `None` of none.
pub(super) fn shortest(mut times: Vec<f64>) -> Option<f64> {
    times.retain(|time| time.is_finite());
    times.into_iter().reduce(f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found() {
        let points = [1.0, 4.0, 16.0, 64.0].map(|x| (x, 0.5 + 0.25 * x));
        let line = Line::through(&points).unwrap();
        assert!((line.fixed - 0.5).abs() < 1e-9 && (line.each - 0.25).abs() < 1e-9, "{line:?}");
    }

    #[test]
    fn times_are_never_negative() {
        let falling = Line::through(&[(1.0, 2.0), (2.0, 1.0)]).unwrap();
        assert!(falling.each == 0.0 && falling.fixed > 0.0, "{falling:?}");
        let steep = Line::through(&[(1.0, 0.1), (2.0, 10.0)]).unwrap();
        assert_eq!(steep.fixed, 0.0);
    }

    #[test]
    fn one_size_is_no_line() {
        assert_eq!(Line::through(&[(1.0, 1.0), (1.0, 1.0)]), None);
        assert_eq!(Line::through(&[]), None);
    }

    #[test]
    fn the_shortest_passes_over_nonsense() {
        assert_eq!(shortest(vec![3.0, f64::NAN, 1.0, 2.0]), Some(1.0));
        assert_eq!(shortest(vec![f64::INFINITY]), None);
    }
}
