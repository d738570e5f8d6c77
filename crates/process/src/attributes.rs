//! Attributes of a process that change how the kernel treats it, and nothing that it computes.

use crate::inject::{Batch, Parasite};
use crate::numa::{NODES, Policy};
use crate::{EngineError, Thread, proc};
use libc::pid_t;
use serde::{Deserialize, Serialize};
use std::fs;

const MEMBARRIER_REGISTRATIONS: u64 = 1 << 9;
/// Registrations of membarrier(2): global, private, of cores, of restartable sequences.
const REGISTRATIONS: [u64; 4] = [1 << 2, 1 << 4, 1 << 6, 1 << 8];
/// Barriers that only a process can have that has registered for them: its own, of cores, of
/// restartable sequences. The registration for each is the next bit.
const BARRIERS: [u64; 3] = [1 << 3, 1 << 5, 1 << 7];
/// Calls that [`ask`] makes.
pub(crate) const QUESTIONS: usize = 4 + BARRIERS.len();
const PR_GET_THP_DISABLE: u64 = 42;
const PR_SET_THP_DISABLE: u64 = 41;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Attributes {
    /// What the kernel's out-of-memory killer adds.
    #[serde(default)]
    pub(crate) oom_score_adj: Option<i32>,
    #[serde(default)]
    pub(crate) login: Option<u32>,
    #[serde(default)]
    pub(crate) coredump_filter: Option<u32>,
    /// PR_GET_THP_DISABLE.
    #[serde(default)]
    pub(crate) thp_disable: u64,
    /// MEMBARRIER_CMD_GET_REGISTRATIONS, a bit each.
    #[serde(default)]
    pub(crate) membarrier: u64,
    /// In nanoseconds; 0 if it is not known.
    #[serde(default)]
    pub(crate) timer_slack: u64,
    /// What set_mempolicy(2) was told.
    #[serde(default)]
    pub(crate) policy: Policy,
}

/// Where the answers to [`ask`] come.
pub(crate) struct Asked {
    mode: u64,
    nodes: u64,
}

impl Attributes {
    /// What /proc tells of the process `pid`.
    pub(crate) fn of(pid: pid_t) -> Attributes {
        let mut attributes = Attributes::of_process(pid);
        attributes.add_inherited(pid);
        attributes
    }

    /// What /proc tells of the process `pid` and not of its clone, which goes first where memory
    /// runs out.
    pub(crate) fn of_process(pid: pid_t) -> Attributes {
        let oom_score_adj = read(pid, "oom_score_adj").and_then(|text| text.parse().ok());
        Attributes { oom_score_adj, ..Attributes::default() }
    }

    /// Adds the rest of what /proc tells, of the process or its clone.
    pub(crate) fn add_inherited(&mut self, at: pid_t) {
        self.login = read(at, "loginuid").and_then(|text| text.parse().ok());
        let filter = read(at, "coredump_filter");
        self.coredump_filter = filter.and_then(|text| u32::from_str_radix(&text, 16).ok());
    }

    /// Takes the results of the calls of [`ask`].
    pub(crate) fn answered(
        &mut self,
        pid: pid_t,
        asked: &Asked,
        results: [i64; QUESTIONS],
    ) -> Result<(), EngineError> {
        let [thp, membarrier, slack, policy, barriers @ ..] = results;
        self.thp_disable = thp.max(0) as u64;
        self.membarrier = u64::try_from(membarrier).unwrap_or_else(|_| registered(barriers));
        self.timer_slack = slack.max(0) as u64;
        if policy == 0 {
            let (mut mode, mut nodes) = ([0; 4], [0; NODES / 8]);
            crate::inject::read_exact(pid, asked.mode, &mut mode)?;
            crate::inject::read_exact(pid, asked.nodes, &mut nodes)?;
            let words = nodes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
            let mut nodes: Vec<u64> = words.collect();
            nodes.truncate(nodes.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1));
            self.policy = Policy(i32::from_le_bytes(mode), nodes);
        }
        Ok(())
    }

    /// Checks what an image says.
    pub(crate) fn are_possible(&self) -> bool {
        self.policy.is_possible()
            && self.oom_score_adj.is_none_or(|adjust| (-1000..=1000).contains(&adjust))
    }

    /// Gives a process that has one thread its attributes back. What this machine or user does not
    /// allow stays as it is.
    pub(crate) fn set(&self, batch: &mut Batch<'_>) -> Result<(), EngineError> {
        if self.thp_disable != 0 {
            let arguments = [PR_SET_THP_DISABLE, 1, self.thp_disable & !1, 0, 0];
            batch.attempt("disable huge pages", libc::SYS_prctl, &arguments)?;
        }
        for registration in REGISTRATIONS.iter().filter(|bit| self.membarrier & **bit != 0) {
            let arguments = [*registration, 0, 0];
            batch.attempt("register for membarrier", libc::SYS_membarrier, &arguments)?;
        }
        if self.timer_slack != 0 {
            let arguments = [libc::PR_SET_TIMERSLACK as u64, self.timer_slack];
            batch.attempt("set its timer slack", libc::SYS_prctl, &arguments)?;
        }
        let Policy(mode, _) = self.policy;
        if mode != 0 {
            let arguments = [mode as u64, batch.put(&self.policy.mask())?, NODES as u64];
            batch.attempt("set its memory policy", libc::SYS_set_mempolicy, &arguments)?;
        }
        Ok(())
    }

    /// The same of those that are files in /proc. The process sets its login itself: nobody else
    /// can.
    pub(crate) fn write(&self, thread: &mut Thread, parasite: Parasite) -> Result<(), EngineError> {
        let pid = thread.pid();
        let now = Attributes::of(pid);
        if let Some(adjust) = self.oom_score_adj.filter(|_| now.oom_score_adj != self.oom_score_adj)
        {
            let _ = fs::write(format!("/proc/{pid}/oom_score_adj"), adjust.to_string());
        }
        if let Some(filter) =
            self.coredump_filter.filter(|_| now.coredump_filter != self.coredump_filter)
        {
            let _ = fs::write(format!("/proc/{pid}/coredump_filter"), format!("{filter:#x}"));
        }
        if let Some(login) = self.login.filter(|_| now.login != self.login) {
            parasite.attempt_to_write(
                thread,
                c"/proc/self/loginuid",
                login.to_string().as_bytes(),
            )?;
        }
        Ok(())
    }
}

/// What a process has registered for on a kernel before 6.3, which does not tell: what it may have.
/// Nobody tells whether it takes part in others' barriers; it does then, which costs an interrupt
/// each.
fn registered(barriers: [i64; BARRIERS.len()]) -> u64 {
    let own = BARRIERS.iter().zip(barriers).filter(|(_, result)| *result == 0);
    own.fold(REGISTRATIONS[0], |all, (barrier, _)| all | barrier << 1)
}

/// Asks a process, or one that has inherited the answers, by [`QUESTIONS`] calls, the last of
/// `batch`.
pub(crate) fn ask(batch: &mut Batch<'_>) -> Result<Asked, EngineError> {
    batch.attempt(
        "read its use of huge pages",
        libc::SYS_prctl,
        &[PR_GET_THP_DISABLE, 0, 0, 0, 0],
    )?;
    let arguments = [MEMBARRIER_REGISTRATIONS, 0, 0];
    batch.attempt("read its membarriers", libc::SYS_membarrier, &arguments)?;
    let slack = libc::PR_GET_TIMERSLACK as u64;
    batch.attempt("read its timer slack", libc::SYS_prctl, &[slack, 0, 0, 0, 0])?;
    let asked = Asked { mode: batch.put(&[0; 8])?, nodes: batch.put(&[0; NODES / 8])? };
    let arguments = [asked.mode, asked.nodes, NODES as u64, 0, 0];
    batch.attempt("read its memory policy", libc::SYS_get_mempolicy, &arguments)?;
    for barrier in BARRIERS {
        batch.attempt("read its membarriers", libc::SYS_membarrier, &[barrier, 0, 0])?;
    }
    Ok(asked)
}

fn read(pid: pid_t, file: &'static str) -> Option<String> {
    Some(proc::text(pid, file).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_that_can_be_had_is_registered_for() {
        let denied = -i64::from(libc::EPERM);
        assert_eq!(registered([denied; 3]), 1 << 2);
        assert_eq!(registered([0, denied, denied]), 1 << 2 | 1 << 4);
        assert_eq!(registered([denied, 0, -i64::from(libc::EINVAL)]), 1 << 2 | 1 << 6);
        assert_eq!(registered([0; 3]), REGISTRATIONS.iter().sum::<u64>());
    }
}
