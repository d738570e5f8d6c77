//! A server's log: lines on standard error.

use kedge_server::Said;
use serde::Serialize;
use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// Says what happens to people. A terminal that is gone is no reason to end.
pub(super) fn text(said: &Said) {
    let _ = writeln!(std::io::stderr(), "kedge: {}", said.text);
}

/// Says it to programs: an object a line, in one write, so that lines of two threads stay apart.
pub(super) fn json(said: &Said) {
    let line = Line::new(said, SystemTime::now());
    if let Ok(mut line) = serde_json::to_vec(&line) {
        line.push(b'\n');
        let _ = std::io::stderr().write_all(&line);
    }
}

/// What is not known is not there.
#[derive(Debug, Serialize)]
struct Line<'a> {
    /// Seconds since 1970.
    time: f64,
    event: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    proxy: Option<u32>,
    text: &'a str,
}

impl Line<'_> {
    fn new(said: &Said, now: SystemTime) -> Line<'_> {
        let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        Line {
            // Milliseconds are enough, and fewer digits.
            time: since.as_millis() as f64 / 1000.0,
            event: said.event.name(),
            key: said.key.as_deref(),
            from: said.from.map(|from| from.to_string()),
            gpu: said.gpu.as_deref(),
            proxy: said.proxy,
            text: &said.text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_server::Event;
    use std::time::Duration;

    #[test]
    fn a_line_is_one_object_of_what_is_known() {
        let at = UNIX_EPOCH + Duration::from_micros(1_700_000_000_123_999);
        let mut said = Said::new(Event::Refused, "no \"more\"\nof it");
        let line = |said: &Said| serde_json::to_string(&Line::new(said, at)).unwrap();
        let text = r#""text":"no \"more\"\nof it"}"#;
        assert_eq!(line(&said), r#"{"time":1700000000.123,"event":"refused","#.to_owned() + text);
        said.key = Some("alice".into());
        said.from = Some("192.0.2.1:5".parse().unwrap());
        (said.gpu, said.proxy) = (Some("soft".into()), Some(7));
        let known = r#""key":"alice","from":"192.0.2.1:5","gpu":"soft","proxy":7,"#;
        let all = r#"{"time":1700000000.123,"event":"refused","#.to_owned() + known + text;
        assert_eq!(line(&said), all);
    }
}
