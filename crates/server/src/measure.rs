//! Connections that measure the line.

use crate::Lender;
use crate::sessions::Client;
use kedge_keys::Connection;
use kedge_remote::be_measured;
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most such connections at a time.
const MAX_CONNECTIONS: usize = 16;

static COUNT: AtomicUsize = AtomicUsize::new(0);

impl Lender {
    /// Answers one to its end.
    pub(crate) fn measured(
        &self,
        who: Option<&Client>,
        connection: &mut Connection,
    ) -> Result<(), String> {
        if COUNT.fetch_add(1, Ordering::SeqCst) >= MAX_CONNECTIONS {
            COUNT.fetch_sub(1, Ordering::SeqCst);
            return self.refuse(
                who,
                connection,
                format!("{MAX_CONNECTIONS} connections measure its line already"),
            );
        }
        let processors = || self.sessions.processes(who).into_iter().map(nanoseconds).sum();
        let measured = be_measured(connection, processors);
        COUNT.fetch_sub(1, Ordering::SeqCst);
        measured.map_err(|error| error.to_string())
    }
}

/// Returns for how long a process's threads have run, by the scheduler's own count; 0 for one that
/// is gone.
fn nanoseconds(pid: u32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let ran = |text: String| text.split_whitespace().next()?.parse::<u64>().ok();
    let text = threads.filter_map(|it| fs::read_to_string(it.path().join("schedstat")).ok());
    text.filter_map(ran).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_seen_to_run() {
        let own = std::process::id();
        let begin = std::time::Instant::now();
        while begin.elapsed().as_millis() < 100 {
            std::hint::spin_loop();
        }
        assert!(nanoseconds(own) > 10_000_000);
        assert_eq!(nanoseconds(u32::MAX), 0);
    }
}
