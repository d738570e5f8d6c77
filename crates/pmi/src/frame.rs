//! PMI-2's frames: a length in six characters, then `cmd=NAME;key=value;…` with each semicolon of a
//! value doubled.

use crate::PmiError;

/// Characters of a frame's length.
const HEAD: usize = 6;
/// Longest body, in bytes: what six digits can say.
pub const MAX_FRAME_LEN: usize = 999_999;

/// Takes the first frame's body out of `buffer`. `None`: it is not there as a whole.
///
/// # Errors
/// The length is none. A length is never longer than [`MAX_FRAME_LEN`].
pub fn take_frame(buffer: &mut Vec<u8>) -> Result<Option<Vec<u8>>, PmiError> {
    let Some(head) = buffer.first_chunk::<HEAD>() else { return Ok(None) };
    let text = String::from_utf8_lossy(head);
    let digits = text.trim_matches(' ');
    let all_digits = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let length = all_digits.then(|| digits.parse::<usize>().ok()).flatten();
    let Some(length) = length else { return Err(PmiError::Length(text.into_owned())) };
    if buffer.len() < HEAD + length {
        return Ok(None);
    }
    let rest = buffer.split_off(HEAD + length);
    let body = buffer.split_off(HEAD);
    *buffer = rest;
    Ok(Some(body))
}

/// A request or an answer: its name, then pairs in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Command {
    name: String,
    pairs: Vec<(String, String)>,
}

impl Command {
    /// Returns one without pairs.
    pub fn new(name: &str) -> Command {
        Command { name: name.to_owned(), pairs: Vec::new() }
    }

    /// Returns the same with one pair more. `key` has neither `=` nor `;`.
    pub fn with(mut self, key: &str, value: impl ToString) -> Command {
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

    /// Whether it answers that what was asked has failed: why.
    pub fn failure(&self) -> Option<String> {
        match self.get("rc") {
            None | Some("0") => None,
            Some(code) => Some(self.get("errmsg").unwrap_or(code).to_owned()),
        }
    }

    /// Returns what a frame's body says.
    ///
    /// # Errors
    /// It is not text, has no `cmd` at its beginning, or has a pair without `=`.
    pub fn parse(body: &[u8]) -> Result<Command, PmiError> {
        let text = std::str::from_utf8(body).map_err(|_| PmiError::Text)?;
        let mut pairs = pairs(text)?.into_iter();
        match pairs.next() {
            Some((key, name)) if key == "cmd" => Ok(Command { name, pairs: pairs.collect() }),
            _ => Err(PmiError::NoCommand),
        }
    }

    /// Returns the frame, with its length.
    ///
    /// # Errors
    /// It would be longer than [`MAX_FRAME_LEN`].
    pub fn encode(&self) -> Result<Vec<u8>, PmiError> {
        let mut body = format!("cmd={};", doubled(&self.name));
        for (key, value) in &self.pairs {
            body.push_str(&format!("{key}={};", doubled(value)));
        }
        frame(body.as_bytes())
    }
}

/// Returns `body` with its length before it.
pub(crate) fn frame(body: &[u8]) -> Result<Vec<u8>, PmiError> {
    if body.len() > MAX_FRAME_LEN {
        return Err(PmiError::LongFrame { bytes: body.len(), most: MAX_FRAME_LEN });
    }
    let mut frame = format!("{:6}", body.len()).into_bytes();
    frame.extend_from_slice(body);
    Ok(frame)
}

fn doubled(value: &str) -> String {
    value.replace(';', ";;")
}

fn pairs(text: &str) -> Result<Vec<(String, String)>, PmiError> {
    let mut pairs = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let bad = || PmiError::Pair(rest.chars().take(40).collect());
        let (key, value) = rest.split_once('=').ok_or_else(bad)?;
        if key.is_empty() || key.contains(';') {
            return Err(bad());
        }
        let (value, after) = value_of(value);
        pairs.push((key.to_owned(), value));
        rest = after;
    }
    Ok(pairs)
}

/// The value that `text` begins with, and what comes after its semicolon.
fn value_of(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut rest = text;
    loop {
        let Some((before, after)) = rest.split_once(';') else {
            value.push_str(rest);
            return (value, "");
        };
        value.push_str(before);
        match after.strip_prefix(';') {
            Some(after) => {
                value.push(';');
                rest = after;
            }
            None => return (value, after),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_whole_or_not_at_all() {
        let mut whole = Command::new("kvs-fence").encode().unwrap();
        assert_eq!(whole, b"    14cmd=kvs-fence;");
        whole.extend_from_slice(b"3     a=b");
        for end in 0..20 {
            let mut part = whole[..end].to_vec();
            assert_eq!(take_frame(&mut part), Ok(None), "{end}");
            assert_eq!(part, whole[..end]);
        }
        assert_eq!(take_frame(&mut whole), Ok(Some(b"cmd=kvs-fence;".to_vec())));
        assert_eq!(take_frame(&mut whole), Ok(Some(b"a=b".to_vec())));
        assert_eq!(take_frame(&mut whole), Ok(None));
        for bad in ["  -1  ", "1 2   ", "      ", "+10000", "cmd=in"] {
            let mut bad = bad.as_bytes().to_vec();
            assert!(matches!(take_frame(&mut bad), Err(PmiError::Length(_))));
        }
    }

    #[test]
    fn semicolons_of_values_are_doubled() {
        for value in ["", ";", "a;b", "a;", ";;a", "a=b;c=d", "(vector,(0,2,1))"] {
            let command = Command::new("kvs-put").with("key", "k").with("value", value);
            let mut frame = command.encode().unwrap();
            let body = take_frame(&mut frame).unwrap().unwrap();
            let again = Command::parse(&body).unwrap();
            assert_eq!(again, command);
            assert_eq!(again.get("value"), Some(value));
            assert_eq!(again.get("other"), None);
        }
    }

    #[test]
    fn what_is_no_command_is_refused() {
        assert_eq!(Command::parse(b""), Err(PmiError::NoCommand));
        assert_eq!(Command::parse(b"key=a;cmd=b;"), Err(PmiError::NoCommand));
        assert_eq!(Command::parse(b"cmd=a;b"), Err(PmiError::Pair("b".to_owned())));
        assert_eq!(Command::parse(b"cmd=a;=b"), Err(PmiError::Pair("=b".to_owned())));
        assert_eq!(Command::parse(b"cmd=\xff;"), Err(PmiError::Text));
        let long = Command::new("a").with("b", "c".repeat(MAX_FRAME_LEN));
        assert!(matches!(long.encode(), Err(PmiError::LongFrame { .. })));
    }

    #[test]
    fn answers_tell_why_they_failed() {
        assert_eq!(Command::parse(b"cmd=x;rc=0;").unwrap().failure(), None);
        assert_eq!(Command::parse(b"cmd=x;rc=1;").unwrap().failure(), Some("1".to_owned()));
        let why = Command::parse(b"cmd=x;rc=1;errmsg=no;").unwrap().failure();
        assert_eq!(why, Some("no".to_owned()));
    }
}
