//! Figures in few characters, and text that a terminal does not obey.

use std::time::Duration;

/// A length of time in its largest unit, four characters: `59s`, `12m`, `3h`, `200d`.
pub(crate) fn time(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", (seconds / 86_400).min(999)),
    }
}

/// A pause in five characters: `0.4ms`, `12ms`, `1.2s`, `34s`.
pub(crate) fn pause(seconds: f64) -> String {
    let milliseconds = seconds.max(0.0) * 1e3;
    match milliseconds {
        ..9.95 => format!("{milliseconds:.1}ms"),
        ..999.5 => format!("{milliseconds:.0}ms"),
        ..9950.0 => format!("{:.1}s", milliseconds / 1e3),
        _ => {
            time(Duration::try_from_secs_f64(milliseconds / 1e3).map_or(u64::MAX, |t| t.as_secs()))
        }
    }
}

/// Bytes in four characters: `0`, `512`, `1.5G`, `80G`. A K is 1024.
pub(crate) fn size(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, ["", "K", "M", "G", "T", "P", "E"])
}

/// How often a second, in five characters: `0`, `0.3`, `950`, `1.2k`.
pub(crate) fn rate(times: f64) -> String {
    match times {
        ..=0.0 => "0".into(),
        ..9.95 => trimmed(times),
        _ => scaled(times.round(), 1000.0, ["", "k", "M", "G", "T", "P", "E"]),
    }
}

/// One digit behind the point where that says something.
fn trimmed(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or_else(|| text.clone(), str::to_owned)
}

fn scaled(mut value: f64, step: f64, units: [&str; 7]) -> String {
    let mut unit = 0;
    // So that there are never more than three digits.
    while value >= 999.5 && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let number = if unit > 0 && value < 9.95 { trimmed(value) } else { format!("{value:.0}") };
    format!("{number}{}", units[unit])
}

/// `text` with what a terminal would obey, or what would turn or hide the rest of a line, as Rust
/// writes it: `\u{1b}`, `\n`.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() || is_unseen(c) {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    out
}

/// Characters without a picture: marks of direction, joiners, spaces of no width, tags.
fn is_unseen(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
        | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_take_four_characters() {
        for (seconds, text) in [
            (0, "0s"),
            (59, "59s"),
            (60, "1m"),
            (3599, "59m"),
            (3600, "1h"),
            (172_799, "47h"),
            (172_800, "2d"),
            (u64::MAX, "999d"),
        ] {
            assert_eq!(time(seconds), text);
        }
    }

    #[test]
    fn pauses_take_five_characters() {
        for (seconds, text) in [
            (0.0, "0.0ms"),
            (0.000_42, "0.4ms"),
            (0.009_96, "10ms"),
            (0.12, "120ms"),
            (0.9996, "1.0s"),
            (1.24, "1.2s"),
            (34.0, "34s"),
            (1e30, "999d"),
            (-1.0, "0.0ms"),
        ] {
            assert_eq!(pause(seconds), text);
        }
    }

    #[test]
    fn sizes_take_four_characters() {
        for (bytes, text) in [
            (0, "0"),
            (999, "999"),
            (1000, "1K"),
            (1536, "1.5K"),
            (512 << 20, "512M"),
            (1023 << 20, "1G"),
            (80 << 30, "80G"),
            (u64::MAX, "16E"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn rates_take_five_characters() {
        for (times, text) in [
            (0.0, "0"),
            (0.25, "0.2"),
            (9.96, "10"),
            (950.2, "950"),
            (1234.0, "1.2k"),
            (999_600.0, "1M"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(rate(times), text);
        }
    }

    #[test]
    fn nothing_is_obeyed_turned_or_hidden() {
        assert_eq!(escaped("a\x1b[2Jb\r\n"), "a\\u{1b}[2Jb\\r\\n");
        assert_eq!(escaped("\u{202e}gpj\u{200b}\u{9b}1m"), "\\u{202e}gpj\\u{200b}\\u{9b}1m");
        assert_eq!(escaped("train-é µ\\"), "train-é µ\\");
    }
}
