//! Filters of system calls: given anew to a process's threads, before these lose the rights that it
//! takes. What they are made to call from then on is not filtered, as long as they are traced.

use crate::filters::are_saved;
use crate::filters::program::Filter;
use crate::inject::Parasite;
use crate::state::{ProcessState, ThreadState};
use crate::{EngineError, Thread};
use libc::pid_t;

const SET_MODE_FILTER: u64 = 1;
/// struct sock_fprog: how many instructions, and where.
const HEAD: u64 = 16;
const WHAT: &str = "have its system calls filtered again";

/// Gives the threads of a process their filters. What all have in common they share, as the
/// kernel's way to give all threads one more filter (SECCOMP_FILTER_FLAG_TSYNC) wants it.
///
/// # Errors
/// If this process may not, or the kernel takes a filter for none.
pub(super) fn give(
    state: &ProcessState,
    leader: &mut Thread,
    others: &mut [Thread],
    parasite: Parasite,
) -> Result<(), EngineError> {
    if state.filters.is_empty() {
        return Ok(());
    }
    if !are_saved() {
        let what = "filters its system calls (seccomp), which root alone can bring back, and where \
                    no filter is upon kedge itself";
        return Err(EngineError::unsupported(state.ids.pid, what));
    }
    leader.suspend_filters()?;
    others.iter_mut().try_for_each(Thread::suspend_filters)?;
    let shared = in_common(&state.threads);
    for index in &state.threads[0].filters[..shared] {
        let flags = libc::SECCOMP_FILTER_FLAG_TSYNC;
        set(leader, parasite, state.ids.pid, &state.filters[*index], flags)?;
    }
    let all = std::iter::once(leader).chain(others).zip(&state.threads);
    for (thread, saved) in all {
        for index in &saved.filters[shared..] {
            set(thread, parasite, saved.tid, &state.filters[*index], 0)?;
        }
    }
    Ok(())
}

/// Returns with how many of the same filters all threads begin.
fn in_common(threads: &[ThreadState]) -> usize {
    let [first, others @ ..] = threads else { return 0 };
    let same = |index: usize| {
        let own = first.filters[index];
        others.iter().all(|other| other.filters.get(index) == Some(&own))
    };
    (0..first.filters.len()).take_while(|index| same(*index)).count()
}

fn set(
    thread: &mut Thread,
    parasite: Parasite,
    tid: pid_t,
    filter: &Filter,
    flags: u64,
) -> Result<(), EngineError> {
    let Filter { program, log } = filter;
    let at = parasite.data();
    let mut data = filter.length().to_ne_bytes().to_vec();
    data.extend((at + HEAD).to_ne_bytes());
    data.extend(&program.0);
    let flags = flags | if *log { libc::SECCOMP_FILTER_FLAG_LOG } else { 0 };
    let arguments = [SET_MODE_FILTER, flags, at];
    let answer = parasite.call_with(thread, WHAT, libc::SYS_seccomp, &arguments, &data)?;
    // One that is not in step with the first is told by its id.
    let what = || format!("cannot {WHAT}: its thread {answer} has another one");
    if answer == 0 { Ok(()) } else { Err(EngineError::unsupported(tid, what())) }
}
