//! Times as people write them: `10m`, `90s`, `1.5h`, `500ms`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;
use thiserror::Error;

/// A length of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Time(pub(crate) Duration);

#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{0}` is no time: write a number and ms, s, m, h or d, such as 90s or 1.5h")]
pub(crate) struct BadTime(String);

/// Names and milliseconds.
const UNITS: [(&str, f64); 5] =
    [("ms", 1.0), ("s", 1e3), ("m", 60e3), ("h", 3600e3), ("d", 86_400e3)];
/// Longest time, in milliseconds: a hundred years, so that sums never overflow.
const MAX_MILLISECONDS: f64 = 100.0 * 365.25 * 86_400e3;

impl FromStr for Time {
    type Err = BadTime;
    fn from_str(text: &str) -> Result<Time, BadTime> {
        let bad = || BadTime(text.to_owned());
        // Nothing is nothing in every unit.
        if text == "0" {
            return Ok(Time(Duration::ZERO));
        }
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(bad)?;
        let (number, unit) = text.split_at(split);
        let (_, scale) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(bad)?;
        let milliseconds = number.parse::<f64>().map_err(|_| bad())? * scale;
        if milliseconds <= MAX_MILLISECONDS {
            return Ok(Time(Duration::from_secs_f64(milliseconds / 1e3)));
        }
        Err(bad())
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let milliseconds = self.0.as_secs_f64() * 1e3;
        let unit = UNITS.iter().rev().find(|(_, scale)| milliseconds >= *scale);
        let (name, scale) = unit.unwrap_or(&UNITS[0]);
        let value = (milliseconds / scale * 100.0).round() / 100.0;
        write!(f, "{value}{name}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_read_as_people_write_them() {
        for (text, seconds) in [
            ("0", 0.0),
            ("0s", 0.0),
            ("500ms", 0.5),
            ("90s", 90.0),
            ("10m", 600.0),
            ("1.5h", 5400.0),
        ] {
            assert_eq!(text.parse(), Ok(Time(Duration::from_secs_f64(seconds))), "{text}");
        }
        for bad in ["", "5", "m", "-1s", "1.2.3s", "10x", "99999999d", "1e3s", "1 s"] {
            assert!(bad.parse::<Time>().is_err(), "{bad}");
        }
    }

    #[test]
    fn times_print_short() {
        for (milliseconds, text) in
            [(0, "0ms"), (12, "12ms"), (1500, "1.5s"), (600_000, "10m"), (5_400_000, "1.5h")]
        {
            assert_eq!(Time(Duration::from_millis(milliseconds)).to_string(), text);
        }
    }
}
