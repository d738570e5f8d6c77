//! PMI-1's lines, `cmd=NAME key=value …`, with one of which a session of PMI-2 begins as well.

use crate::PmiError;
use std::fmt;

/// Longest line, in bytes; MPICH's has half as many.
pub const MAX_LINE_LEN: usize = 2048;

/// Takes the first line out of `buffer`, without its end. `None`: it is not there as a whole.
///
/// # Errors
/// It is longer than [`MAX_LINE_LEN`], or not text.
pub fn take_line(buffer: &mut Vec<u8>) -> Result<Option<String>, PmiError> {
    let seen = &buffer[..buffer.len().min(MAX_LINE_LEN)];
    let Some(end) = seen.iter().position(|byte| *byte == b'\n') else {
        let long = buffer.len() >= MAX_LINE_LEN;
        return if long { Err(PmiError::LongLine { most: MAX_LINE_LEN }) } else { Ok(None) };
    };
    let rest = buffer.split_off(end + 1);
    let mut line = std::mem::replace(buffer, rest);
    line.truncate(end);
    String::from_utf8(line).map(Some).map_err(|_| PmiError::Text)
}

/// What a rank speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Version {
    /// PMI 1.1: lines.
    One,
    /// PMI 2.0: frames.
    Two,
}

impl Version {
    /// The number and the number behind the dot.
    pub fn numbers(self) -> (u32, u32) {
        match self {
            Version::One => (1, 1),
            Version::Two => (2, 0),
        }
    }
}

/// A line: its command, then pairs in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    name: String,
    pairs: Vec<(String, String)>,
}

impl Line {
    /// Returns one without pairs.
    pub fn new(name: &str) -> Line {
        Line { name: name.to_owned(), pairs: Vec::new() }
    }

    /// Returns the same with one pair more. Neither has a blank.
    pub fn with(mut self, key: &str, value: impl ToString) -> Line {
        self.pairs.push((key.to_owned(), value.to_string()));
        self
    }

    /// What is asked for or answered.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the first value of that key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.pairs.iter().find(|(own, _)| own == key).map(|(_, value)| value.as_str())
    }

    /// Returns the line that a session begins with.
    pub fn init(version: Version) -> Line {
        let (number, sub) = version.numbers();
        Line::new("init").with("pmi_version", number).with("pmi_subversion", sub)
    }

    /// Returns the answer to it.
    pub fn inited(version: Version) -> Line {
        let (number, sub) = version.numbers();
        let line = Line::new("response_to_init").with("rc", 0);
        line.with("pmi_version", number).with("pmi_subversion", sub)
    }

    /// Of the line that a session begins with: what is spoken in it.
    ///
    /// # Errors
    /// It is another line, or an unknown version.
    pub fn version(&self) -> Result<Version, PmiError> {
        let number = |key| self.get(key).and_then(|text| text.parse::<u32>().ok());
        match (self.name.as_str(), number("pmi_version"), number("pmi_subversion")) {
            ("init", Some(1), Some(1)) => Ok(Version::One),
            ("init", Some(2), Some(0)) => Ok(Version::Two),
            ("init", Some(number), Some(sub)) => Err(PmiError::Version(number, sub)),
            _ => Err(PmiError::NoInit(self.name.chars().take(40).collect())),
        }
    }

    /// Returns what `text`, a line without its end, says.
    ///
    /// # Errors
    /// It does not begin with `cmd`, or has a word without `=`.
    pub fn parse(text: &str) -> Result<Line, PmiError> {
        let words = text.split([' ', '\t', '\r', '\n']).filter(|word| !word.is_empty());
        let mut pairs = words.map(|word| match word.split_once('=') {
            Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
            _ => Err(PmiError::Pair(word.chars().take(40).collect())),
        });
        match pairs.next().transpose()? {
            Some((key, name)) if key == "cmd" || key == "mcmd" => {
                Ok(Line { name, pairs: pairs.collect::<Result<_, _>>()? })
            }
            _ => Err(PmiError::NoCommand),
        }
    }
}

/// With the line's end.
impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cmd={}", self.name)?;
        self.pairs.iter().try_for_each(|(key, value)| write!(f, " {key}={value}"))?;
        writeln!(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_whole_or_not_at_all() {
        let mut bytes = b"cmd=get_maxes\ncmd=barr".to_vec();
        assert_eq!(take_line(&mut bytes), Ok(Some("cmd=get_maxes".to_owned())));
        assert_eq!(take_line(&mut bytes), Ok(None));
        assert_eq!(bytes, b"cmd=barr");
        let mut long = vec![b'a'; MAX_LINE_LEN];
        assert!(matches!(take_line(&mut long), Err(PmiError::LongLine { .. })));
        assert_eq!(take_line(&mut b"\xff\n".to_vec()), Err(PmiError::Text));
    }

    #[test]
    fn a_session_begins_with_a_version() {
        for version in [Version::One, Version::Two] {
            let text = Line::init(version).to_string();
            assert_eq!(Line::parse(text.trim_end()).unwrap().version(), Ok(version));
        }
        let first = Line::parse("cmd=init pmi_version=2 pmi_subversion=0").unwrap();
        assert_eq!(first.version(), Ok(Version::Two));
        let newer = Line::parse("cmd=init pmi_version=3 pmi_subversion=1").unwrap();
        assert_eq!(newer.version(), Err(PmiError::Version(3, 1)));
        let other = Line::parse("cmd=get_maxes").unwrap();
        assert_eq!(other.version(), Err(PmiError::NoInit("get_maxes".to_owned())));
        assert_eq!(Line::parse("a=b"), Err(PmiError::NoCommand));
        assert_eq!(Line::parse("cmd=a b"), Err(PmiError::Pair("b".to_owned())));
    }
}
