//! Sizes as people write them: `10G`, `512M`, `1.5GiB`, `4096`.

use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// Bytes. A K is 1024.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

/// A text that is no size.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{0}` is no size: write a number and K, M, G or T, such as 512M or 1.5G")]
pub struct BadSize(String);

const UNITS: [(&str, u32); 5] = [("", 0), ("K", 10), ("M", 20), ("G", 30), ("T", 40)];

impl FromStr for Size {
    type Err = BadSize;
    fn from_str(text: &str) -> Result<Size, BadSize> {
        let bad = || BadSize(text.to_owned());
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let unit = unit.to_ascii_uppercase();
        let unit = unit.strip_suffix("IB").or(unit.strip_suffix('B')).unwrap_or(&unit);
        let (_, shift) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(bad)?;
        let bytes = match number.parse::<u64>() {
            Ok(whole) => whole.checked_mul(1 << shift).ok_or_else(bad)?,
            Err(_) => {
                let value = number.parse::<f64>().map_err(|_| bad())? * (1u64 << shift) as f64;
                if !(0.0..1e18).contains(&value) {
                    return Err(bad());
                }
                value as u64
            }
        };
        Ok(Size(bytes))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS.iter().rev().find(|(_, shift)| self.0 >= 1 << shift && *shift > 0);
        match unit {
            None => write!(f, "{} B", self.0),
            Some((name, shift)) => {
                let value = self.0 as f64 / (1u64 << shift) as f64;
                let digits = usize::from(value < 10.0 && !self.0.is_multiple_of(1 << shift));
                write!(f, "{value:.digits$} {name}iB")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("1k", 1024),
            ("512M", 512 << 20),
            ("10G", 10 << 30),
            ("1.5GiB", 3 << 29),
            ("2TB", 2 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for bad in ["", "G", "-1", "1.2.3G", "10X", "99999999999T", "1e3", "10 G"] {
            assert!(bad.parse::<Size>().is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_print_short() {
        for (bytes, text) in
            [(12, "12 B"), (2048, "2 KiB"), (3 << 29, "1.5 GiB"), (12 << 30, "12 GiB")]
        {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }
}
