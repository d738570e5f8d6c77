//! The end of all processes of a job that this one is the parent of.

use crate::base::ends::{LAST, looks};
use crate::job::spec::RunError;
use kedge_process::Roots;
use std::time::Instant;

/// Ends every child of this process, and what they leave behind, and collects them.
pub(crate) fn end_all() -> Result<(), RunError> {
    let all = Roots::ChildrenOf { parent: std::process::id() as i32, except: Vec::new() };
    let begin = Instant::now();
    for wait in looks() {
        if !kedge_process::reap(&[]).more {
            break;
        }
        if begin.elapsed() > LAST {
            let what = "end the job's processes to go back to its image";
            return Err(RunError::System { what, source: std::io::ErrorKind::TimedOut.into() });
        }
        kedge_process::signal(&all, libc::SIGKILL);
        std::thread::sleep(wait);
    }
    Ok(())
}

/// The same, however long it takes: the job has moved, and runs elsewhere once this returns.
pub(crate) fn see_all_end() {
    while end_all().is_err() {}
}
