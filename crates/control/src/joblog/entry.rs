//! An event, as a log is told it.

use super::line::Level;
use serde_json::Value;
use std::fmt::{self, Write};
use tracing::field::{Field, Visit};

/// Longest text, bytes; the rest is cut, and never made.
pub(super) const MAX_TEXT: usize = 8 << 10;
/// Fields of an event's own that are kept.
const MAX_FIELDS: usize = 16;

/// What a line is about, which its first word says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Plain,
    /// Nothing is amiss.
    Note,
    /// Devices, or what has them, have failed the program.
    Fault,
    /// The program was refused something. The shim writes such lines, too.
    Refused,
}

impl Kind {
    const ALL: [Kind; 4] = [Kind::Plain, Kind::Note, Kind::Fault, Kind::Refused];

    /// Returns its name; none for a plain line.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Plain => "",
            Kind::Note => "note",
            Kind::Fault => "fault",
            Kind::Refused => "refused",
        }
    }

    /// Returns the kind of a line, and what it says beside that.
    pub(super) fn of(text: &str) -> (Kind, &str) {
        let named = Kind::ALL.into_iter().filter(|kind| *kind != Kind::Plain);
        let mut found = named.filter_map(|kind| {
            let rest = text.strip_prefix(kind.name())?.strip_prefix(": ")?;
            Some((kind, rest))
        });
        found.next().unwrap_or((Kind::Plain, text))
    }

    fn named(name: &str) -> Kind {
        Kind::ALL.into_iter().find(|kind| kind.name() == name).unwrap_or(Kind::Plain)
    }

    /// Returns the level of lines that tell none.
    pub(super) fn level(self) -> Level {
        match self {
            Kind::Note => Level::Info,
            Kind::Fault => Level::Error,
            Kind::Plain | Kind::Refused => Level::Warn,
        }
    }
}

/// An event.
#[derive(Debug)]
pub struct Entry<'a> {
    pub level: Level,
    /// The crate and module that it comes from, such as `proxy::serve`, or its subject.
    pub target: &'a str,
    /// The job; empty where it is no job's.
    pub job: &'a str,
    /// The host that it is about.
    pub host: &'a str,
    /// The process's name and number: `proxy[1234]`.
    pub process: &'a str,
    pub kind: Kind,
    /// What it says, without control characters, and bounded.
    pub text: &'a str,
    /// Its own fields.
    pub fields: &'a [(&'static str, Value)],
}

impl Entry<'_> {
    /// Returns what it says, with its kind before it and its own fields behind it.
    pub fn line(&self) -> String {
        let mut line = match self.kind {
            Kind::Plain => String::new(),
            kind => format!("{}: ", kind.name()),
        };
        line.push_str(self.text);
        for (name, value) in self.fields {
            let _ = match value {
                Value::String(text) => write!(line, " {name}={text}"),
                other => write!(line, " {name}={other}"),
            };
        }
        line
    }
}

/// What an event's fields say.
#[derive(Debug)]
pub(super) struct Said {
    pub(super) kind: Kind,
    pub(super) text: String,
    pub(super) fields: Vec<(&'static str, Value)>,
}

impl Said {
    pub(super) fn new() -> Said {
        Said { kind: Kind::Plain, text: String::new(), fields: Vec::new() }
    }

    fn add(&mut self, field: &Field, value: Value) {
        if self.fields.len() < MAX_FIELDS {
            self.fields.push((field.name(), value));
        }
    }
}

impl Visit for Said {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = bounded(format_args!("{value:?}"));
        match field.name() {
            "message" => self.text = text,
            _ => self.add(field, text.into()),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "kind" => self.kind = Kind::named(value),
            "message" => self.text = bounded(format_args!("{value}")),
            _ => self.add(field, bounded(format_args!("{value}")).into()),
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }
}

/// Returns a text as one line: control characters become spaces, so that a client's text forges no
/// line, and what is too long is cut.
fn bounded(text: fmt::Arguments<'_>) -> String {
    let mut line = OneLine(String::new());
    let cut = line.write_fmt(text).is_err();
    let mut text = line.0;
    text.truncate(text.trim_end().len());
    if cut {
        text.push('…');
    }
    text
}

/// Takes so much that a line is full; then writing to it fails, and nothing more is made.
struct OneLine(String);

impl Write for OneLine {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            if self.0.len() + c.len_utf8() > MAX_TEXT {
                return Err(fmt::Error);
            }
            self.0.push(if c.is_control() { ' ' } else { c });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_is_too_long_is_not_made() {
        struct Endless<'a>(&'a std::cell::Cell<usize>);
        impl fmt::Display for Endless<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                for _ in 0..1 << 20 {
                    f.write_str("é\n")?;
                    self.0.set(self.0.get() + 1);
                }
                Ok(())
            }
        }
        let made = std::cell::Cell::new(0);
        let text = bounded(format_args!("{}", Endless(&made)));
        assert!(text.len() <= MAX_TEXT + '…'.len_utf8() && text.ends_with('…'), "{}", text.len());
        assert!(!text.contains('\n') && made.get() < MAX_TEXT);
        assert_eq!(bounded(format_args!("whole \n")), "whole");
    }

    #[test]
    fn a_line_begins_with_its_kind() {
        assert_eq!(Kind::of("fault: context 1"), (Kind::Fault, "context 1"));
        assert_eq!(Kind::of("faults"), (Kind::Plain, "faults"));
        assert_eq!(Kind::of(": x"), (Kind::Plain, ": x"));
        let fields = [("gpu", Value::from("soft")), ("proxy", Value::from(7))];
        let entry = Entry {
            level: Level::Info,
            target: "server",
            job: "",
            host: "h",
            process: "kedge[1]",
            kind: Kind::Note,
            text: "it is so",
            fields: &fields,
        };
        assert_eq!(entry.line(), "note: it is so gpu=soft proxy=7");
    }
}
