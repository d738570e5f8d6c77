//! The control socket of a job: `control` in its folder, private to the user, on which the process
//! that can trace the job answers. That is the supervisor, or a restarted job's init.

mod client;

pub use crate::base::sending::{Sending, Stage};
pub use client::{
    AskError, DepartAskError, Until, checkpoint, depart, hail, kill, measure, migrate, swap,
};
pub(crate) use client::{TakeError, settle, take};
pub use kedge_control::job::{CodecName, Content, Kill, Migrate, Moving, Order, Progress, Settles};

#[cfg(test)]
mod tests {
    use kedge_control::job::{Ask, FailureKind, Migrate, Moving, Reply, Request, Settles};

    /// What docs/control.md has programs say, and what they are to expect.
    #[test]
    fn messages_are_what_their_page_says() {
        let page = include_str!("../../../../../docs/control.md");
        let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once(" |"));
        let mut asks = 0;
        for (ask, _) in rows.filter(|(ask, _)| ask.starts_with(['{', '"'])) {
            for one in ask.trim_end_matches('`').split("`, `") {
                let text =
                    format!(r#"{{"version":1,"ask":{}}}"#, one.replace("PLACE", r#""soft""#));
                let request: Request = serde_json::from_str(&text).expect(&text);
                asks += 1;
                if let Ask::Migrate(order) = request.ask {
                    let to = "soft".to_owned();
                    let (max_pause_ms, rounds, or_stay, rate, check) = (50, 8, false, None, false);
                    let said = Migrate { to, max_pause_ms, rounds, or_stay, rate, check };
                    assert_eq!(order, said);
                }
            }
        }
        assert_eq!(asks, 8, "{page}");
        let (process, bytes, seconds) = (1, 2, 0.5);
        for (moving, name) in [
            (Moving::Round { process, round: 1, bytes, seconds }, "round"),
            (Moving::Pause { process, bytes, seconds, why: Settles::NoLess }, "pause"),
            (Moving::Stays { process, bytes, seconds }, "stays"),
            (Moving::Done { processes: 1, seconds }, "done"),
        ] {
            let said = serde_json::to_value(Reply::Moving(moving)).unwrap();
            assert_eq!(said["moving"]["event"], name);
            let row = page.lines().find(|line| line.starts_with(&format!("| `{name}`"))).unwrap();
            for field in said["moving"].as_object().unwrap().keys().filter(|key| *key != "event") {
                assert!(row.contains(&format!("`{field}`")), "{name}: {field}");
            }
        }
        assert_eq!(serde_json::to_value(Reply::Settled).unwrap(), "settled");
        let failed = Reply::Failed { kind: FailureKind::Busy, message: "why".to_owned() };
        let said = serde_json::to_value(failed).unwrap();
        assert_eq!(said["failed"]["kind"], "busy");
        assert_eq!(said["failed"]["message"], "why");
    }
}
