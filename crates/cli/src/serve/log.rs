//! A server's log: lines on standard error.

use kedge_control::joblog::{Entry, Level};
use serde::Serialize;
use serde_json::Value;
use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// Says what happens to people. A terminal that is gone is no reason to end.
pub(super) fn text(entry: &Entry<'_>) {
    let _ = writeln!(std::io::stderr(), "kedge: {}", entry.text);
}

/// Says it to programs: an object a line, in one write, so that lines of two threads stay apart.
pub(super) fn json(entry: &Entry<'_>) {
    let line = Line::new(entry, SystemTime::now());
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
    level: Level,
    target: &'a str,
    host: &'a str,
    process: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    event: Option<&'a Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<&'a Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<&'a Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    proxy: Option<&'a Value>,
    text: &'a str,
}

impl<'a> Line<'a> {
    fn new(entry: &Entry<'a>, now: SystemTime) -> Line<'a> {
        let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let Entry { level, target, host, process, text, fields, .. } = *entry;
        let field = |name| fields.iter().find(|(known, _)| *known == name).map(|(_, value)| value);
        Line {
            // Milliseconds are enough, and fewer digits.
            time: since.as_millis() as f64 / 1000.0,
            level,
            target,
            host,
            process,
            event: field("event"),
            key: field("key"),
            from: field("from"),
            gpu: field("gpu"),
            proxy: field("proxy"),
            text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_control::joblog::JobLog;
    use kedge_server::{Event, Said};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    /// Returns the line that tells of what is said.
    fn line(said: &Said) -> String {
        let told = Arc::new(Mutex::new(String::new()));
        let keep = told.clone();
        let log = JobLog::told("kedge[5]".into(), move |entry: &Entry<'_>| {
            let at = UNIX_EPOCH + Duration::from_micros(1_700_000_000_123_999);
            let entry = Entry { host: "gpuhost", ..*entry };
            *keep.lock().unwrap() = serde_json::to_string(&Line::new(&entry, at)).unwrap();
        });
        said.log(&log);
        std::mem::take(&mut told.lock().unwrap())
    }

    #[test]
    fn a_line_is_one_object_of_what_is_known() {
        let mut said = Said::new(Event::Refused, "no \"more\"\nof it");
        let front = |level: &str| {
            format!(
                r#"{{"time":1700000000.123,"level":"{level}","target":"server","host":"gpuhost","#
            ) + r#""process":"kedge[5]","#
        };
        let text = r#""text":"no \"more\" of it"}"#;
        assert_eq!(line(&said), front("warn") + r#""event":"refused","# + text);
        said.key = Some("alice".into());
        said.from = Some("192.0.2.1:5".parse().unwrap());
        (said.gpu, said.proxy) = (Some("soft".into()), Some(7));
        let known = r#""key":"alice","from":"192.0.2.1:5","gpu":"soft","proxy":7,"#;
        assert_eq!(line(&said), front("warn") + r#""event":"refused","# + known + text);
        assert!(
            line(&Said { event: Event::Trouble, ..said.clone() }).contains(r#""level":"error""#)
        );
        assert!(line(&Said { event: Event::Ends, ..said }).contains(r#""level":"info""#));
    }
}
