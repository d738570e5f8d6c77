//! The ids of a restarted job: what kedge makes for itself in the job's namespace has others, and
//! what ends there is waited for.

use super::Plan;
use crate::EngineError;
use crate::proc::Status;
use libc::pid_t;
use std::collections::BTreeSet;
use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The first id that the kernel gives when it begins anew (RESERVED_PIDS, kernel/pid.c).
const FIRST: pid_t = 300;
/// The end of the ids where the kernel does not tell it: it never has more.
const MAX_END: pid_t = 1 << 22;
/// So long an id is waited for: a thread that has been joined has its own for a moment more.
const PATIENCE: Duration = Duration::from_secs(1);

/// Has whatever this process, the init, makes from here on have ids that the job of `plan` does not
/// want: threads of its own, and processes that plugins start. To be called before there are any.
///
/// The kernel may not let it: then only ids that are met are missed.
pub(super) fn keep_clear(plan: &Plan) {
    let living = plan.processes.iter().map(|process| process.ids);
    let ids = living.chain(plan.job.zombies.iter().map(|zombie| zombie.ids));
    let of_processes = ids.flat_map(|ids| [ids.pid, ids.group, ids.session]);
    let threads = plan.processes.iter().flat_map(|process| &process.threads);
    let wanted = of_processes.chain(threads.map(|thread| thread.tid)).collect();
    let told = fs::read_to_string("/proc/sys/kernel/pid_max").ok();
    let end = told.and_then(|text| text.trim().parse().ok()).unwrap_or(MAX_END);
    let (last, free) = largest_gap(&wanted, end);
    // Where later images come, the job goes on meanwhile, and its new ids follow its last ones.
    let last = if plan.is_early() { last + free / 2 } else { last };
    let _ = fs::write("/proc/sys/kernel/ns_last_pid", last.to_string());
}

/// Returns the id before the largest gap between those that are `wanted`, of what the kernel gives
/// below `end`, and how many are free there.
fn largest_gap(wanted: &BTreeSet<pid_t>, end: pid_t) -> (pid_t, pid_t) {
    let (mut before, mut largest) = (FIRST - 1, (FIRST - 1, 0));
    for id in wanted.range(FIRST..end.max(FIRST)).copied().chain([end]) {
        let free = id - before - 1;
        if free > largest.1 {
            largest = (before, free);
        }
        before = id;
    }
    largest
}

/// Makes somebody under the id `id`, waiting for a moment while another has that.
///
/// # Errors
/// [`EngineError::IdTaken`], with who has it, if that stays so.
pub(super) fn wait_for<T>(
    id: pid_t,
    mut make: impl FnMut() -> Result<T, EngineError>,
) -> Result<T, EngineError> {
    let begin = Instant::now();
    loop {
        let made = make();
        let Err(EngineError::System { source, .. }) = &made else { return made };
        if source.raw_os_error() != Some(libc::EEXIST) {
            return made;
        }
        if begin.elapsed() > PATIENCE {
            return Err(EngineError::IdTaken { id, holder: holder(id) });
        }
        sleep(Duration::from_millis(1));
    }
}

/// Returns who has an id.
fn holder(id: pid_t) -> String {
    match Status::of(id) {
        Ok(status) => format!("{} of process {}", status.get("Name"), status.decimal("Tgid")),
        Err(_) => "a process group or a session".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_gap_is_found() {
        let gap = |wanted: &[pid_t], end| largest_gap(&wanted.iter().copied().collect(), end);
        assert_eq!(gap(&[], 32768), (299, 32468));
        assert_eq!(gap(&[2, 7, 299], 32768), (299, 32468));
        assert_eq!(gap(&[0, 1, 400, 405], 32768), (405, 32362));
        assert_eq!(gap(&[400, 32760], 32768), (400, 32359));
        assert_eq!(gap(&[20000, 32767], 32768), (299, 19700));
        assert_eq!(gap(&[300, 301], 302), (299, 0));
        // An image may say what it likes.
        assert_eq!(gap(&[pid_t::MIN, pid_t::MAX], 32768), (299, 32468));
        assert_eq!(gap(&[], 10), (299, 0));
    }

    fn taken() -> Result<(), EngineError> {
        let source = std::io::Error::from_raw_os_error(libc::EEXIST);
        Err(EngineError::System { pid: 1, what: "make it", source })
    }

    #[test]
    fn who_ends_is_waited_for() {
        let mut times = 0;
        let made = wait_for(1, || {
            times += 1;
            if times < 5 { taken() } else { Ok(()) }
        });
        assert!(made.is_ok() && times == 5);
        let failed = wait_for(1, || Err::<(), _>(EngineError::NoProcess));
        assert!(matches!(failed, Err(EngineError::NoProcess)));
    }

    #[test]
    fn who_does_not_end_is_named() {
        let own = std::process::id() as pid_t;
        let name = crate::proc::name(own);
        let said = wait_for(own, taken).unwrap_err().to_string();
        assert!(said.contains(&format!("{name} of process {own}")), "{said}");
        assert!(holder(pid_t::MAX).contains("session"));
    }
}
