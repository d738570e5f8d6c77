//! What the daemon says: lines for people, or objects for programs.

use super::decide::{Trigger, Wait};
use crate::output;
use crate::time::Time;
use kedge_control::size::Size;
use serde::Serialize;
use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Something that is told.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub(super) enum Event {
    /// It looks from now on.
    Begins { places: Vec<String>, gain: f64, settle_seconds: f64, dry_run: bool },
    /// A job moves now, or, with `dry_run`, would.
    Decides {
        job: String,
        from: String,
        to: String,
        #[serde(flatten)]
        trigger: Trigger,
        /// Of the devices there.
        free_bytes: u64,
        dry_run: bool,
    },
    /// A job would move, and does not now.
    Waits(Wait),
    /// `pause_seconds` is the longest of its processes'.
    Moved { job: String, to: String, seconds: f64, pause_seconds: f64, bytes: u64 },
    /// It stays; `again_seconds` where it is tried again.
    Failed {
        job: String,
        to: String,
        why: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        again_seconds: Option<f64>,
    },
    /// Something is not known.
    Lacks { why: String },
    /// It looks no more.
    Ends,
}

/// An event, and when it was.
#[derive(Debug, Serialize)]
struct Line<'a> {
    /// Seconds since 1970.
    time: f64,
    #[serde(flatten)]
    event: &'a Event,
}

/// Prints events, each as a line.
#[derive(Debug)]
pub(super) struct Log {
    json: bool,
    /// Why jobs were told to wait last.
    waits: Vec<Wait>,
    printed: io::Result<()>,
}

impl Log {
    pub(super) fn new(json: bool) -> Log {
        Log { json, waits: Vec::new(), printed: Ok(()) }
    }

    pub(super) fn tell(&mut self, event: &Event) {
        let line = match self.json {
            true => json(event, SystemTime::now()),
            false => text(event),
        };
        // A log that cannot be written is no reason to leave jobs where they are.
        if self.printed.is_ok() {
            self.printed = output::print(&(line + "\n"));
        }
    }

    /// Tells why jobs wait, of each what is new.
    pub(super) fn waits(&mut self, waits: Vec<Wait>) {
        let before = std::mem::replace(&mut self.waits, waits.clone());
        for wait in waits.into_iter().filter(|wait| !before.contains(wait)) {
            self.tell(&Event::Waits(wait));
        }
    }

    /// Returns whether all could be printed.
    ///
    /// # Errors
    /// What the first line met that could not be.
    pub(super) fn end(self) -> io::Result<()> {
        self.printed
    }
}

fn json(event: &Event, now: SystemTime) -> String {
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    // Milliseconds are enough, and fewer digits.
    let time = since.as_millis() as f64 / 1000.0;
    serde_json::to_string(&Line { time, event }).unwrap_or_default()
}

fn text(event: &Event) -> String {
    let said = match event {
        Event::Begins { places, gain, settle_seconds, dry_run } => {
            let settle = time(*settle_seconds);
            let dry = if *dry_run { "; nothing is moved (--dry-run)" } else { "" };
            let places = places.join(", ");
            format!("places, the best first: {places}; gain {gain}; settle {settle}{dry}")
        }
        Event::Decides { job, from, to, trigger, free_bytes, dry_run } => {
            let moves = if *dry_run { "would move" } else { "moves" };
            let free = Size(*free_bytes);
            format!("{job}: {moves} from {from} to {to} ({free} free): {}", because(trigger))
        }
        Event::Waits(Wait { job, to, why }) => format!("{job}: not to {to} now: {why}"),
        Event::Moved { job, to, seconds, pause_seconds, bytes } => format!(
            "{job}: has moved to {to} within {seconds:.2} s, {} of it in a pause of {:.1} ms",
            Size(*bytes),
            pause_seconds * 1e3
        ),
        Event::Failed { job, to, why, again_seconds } => {
            let again = match again_seconds {
                Some(seconds) => format!("not tried again within {}", time(*seconds)),
                None => "not tried again".to_owned(),
            };
            format!("{job}: could not move to {to}: {why}; {again}")
        }
        Event::Lacks { why } => why.clone(),
        Event::Ends => "ends".to_owned(),
    };
    output::harmless(&said)
}

pub(super) fn because(trigger: &Trigger) -> String {
    match trigger {
        Trigger::Free => "devices of this machine are free".to_owned(),
        Trigger::Errors { errors } => {
            format!("the devices that it is on have reported {errors} errors")
        }
        Trigger::Gain { gain, threshold, here_seconds, there_seconds, move_seconds } => format!(
            "the predicted gain is {gain:.3}, no less than {threshold}: {here_seconds:.2} s here, \
             {there_seconds:.2} s there, {move_seconds:.2} s for the move"
        ),
    }
}

fn time(seconds: f64) -> String {
    Time(Duration::try_from_secs_f64(seconds).unwrap_or_default()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decides(trigger: Trigger, dry_run: bool) -> Event {
        let (job, from, to) = ("sim".to_owned(), "gpu7:7531/0".to_owned(), "local:0".to_owned());
        Event::Decides { job, from, to, trigger, free_bytes: 3 << 30, dry_run }
    }

    #[test]
    fn people_read_why() {
        let gain = Trigger::Gain {
            gain: 1.8,
            threshold: 1.2,
            here_seconds: 9.0,
            there_seconds: 4.5,
            move_seconds: 0.5,
        };
        let failed = |again_seconds| Event::Failed {
            job: "sim".into(),
            to: "soft".into(),
            why: "no\x1b".into(),
            again_seconds,
        };
        for (event, said) in [
            (
                decides(gain, false),
                "sim: moves from gpu7:7531/0 to local:0 (3 GiB free): the predicted gain is 1.800, \
                 no less than 1.2: 9.00 s here, 4.50 s there, 0.50 s for the move",
            ),
            (
                decides(Trigger::Errors { errors: 2 }, true),
                "sim: would move from gpu7:7531/0 to local:0 (3 GiB free): the devices that it is on \
                 have reported 2 errors",
            ),
            (failed(None), "sim: could not move to soft: no ; not tried again"),
            (failed(Some(10.0)), "sim: could not move to soft: no ; not tried again within 10s"),
        ] {
            assert_eq!(text(&event), said);
        }
    }

    #[test]
    fn programs_read_one_object_a_line() {
        let at = UNIX_EPOCH + Duration::from_micros(1_700_000_000_123_999);
        assert_eq!(
            json(&decides(Trigger::Errors { errors: 2 }, false), at),
            r#"{"time":1700000000.123,"event":"decides","job":"sim","from":"gpu7:7531/0","#
                .to_owned()
                + r#""to":"local:0","trigger":"errors","errors":2,"free_bytes":3221225472,"#
                + r#""dry_run":false}"#
        );
        let wait = Wait { job: "sim".into(), to: "soft".into(), why: "a \"b\"".into() };
        assert_eq!(
            json(&Event::Waits(wait), at),
            r#"{"time":1700000000.123,"event":"waits","job":"sim","to":"soft","why":"a \"b\""}"#
        );
        assert_eq!(json(&Event::Ends, at), r#"{"time":1700000000.123,"event":"ends"}"#);
    }
}
