//! Who goes first where memory runs out.

use libc::pid_t;
use std::fs;

/// Has the kernel end `pid`, which holds a copy of a program's memory, before the program and its
/// proxy where memory runs out: a checkpoint can be taken again.
///
/// Where that is not allowed, because the program hides itself from its user (PR_SET_DUMPABLE), it
/// stays as likely as the program's own end.
pub(crate) fn goes_first(pid: pid_t) {
    // proc_pid_oom_score_adj(5): 1000 is the most. Anybody may raise his own.
    let _ = fs::write(format!("/proc/{pid}/oom_score_adj"), "1000");
}
