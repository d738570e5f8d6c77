//! Leaders that had ended already: a session or a process group keeps its number after its leader's
//! end. Whoever is to join it needs somebody under that number, for a moment.

use super::tree::Maker;
use crate::EngineError;
use libc::pid_t;
use std::collections::BTreeSet;

#[derive(Debug, Default)]
pub(super) struct Ghosts {
    sessions: BTreeSet<pid_t>,
    /// Each with whose child it is.
    groups: Vec<(pid_t, pid_t)>,
}

impl Ghosts {
    pub(super) fn leads(&self, session: pid_t) -> bool {
        self.sessions.contains(&session)
    }

    pub(super) fn count(&self) -> usize {
        self.sessions.len() + self.groups.len()
    }

    /// Makes leaders for sessions that have none.
    pub(super) fn lead_sessions(&mut self, maker: &mut Maker<'_>) -> Result<(), EngineError> {
        let living: BTreeSet<pid_t> = maker.members.iter().map(|ids| ids.pid).collect();
        let sessions = maker.members.iter().map(|ids| ids.session);
        self.sessions = sessions.filter(|id| *id != 0 && !living.contains(id)).collect();
        for session in &self.sessions {
            maker.make(0, *session, 0)?;
            maker.call(*session, "make it lead a session", libc::SYS_setsid, &[])?;
        }
        Ok(())
    }

    /// Makes leaders for process groups that have none, each by somebody of the group's session.
    pub(super) fn lead_groups(&mut self, maker: &mut Maker<'_>) -> Result<(), EngineError> {
        for ids in maker.members {
            if ids.group == 0 || maker.made.contains_key(&ids.group) {
                continue;
            }
            let parent = if ids.session == 0 { 0 } else { ids.pid };
            maker.make(parent, ids.group, 0)?;
            maker.call(ids.group, "make it lead a group", libc::SYS_setpgid, &[0, 0])?;
            self.groups.push((ids.group, parent));
        }
        Ok(())
    }

    /// Everybody has joined: they end again. The children of a session's leader become the init's.
    pub(super) fn end(self, maker: &mut Maker<'_>) -> Result<(), EngineError> {
        for (group, parent) in self.groups {
            maker.end_helper(group, parent)?;
        }
        for session in self.sessions {
            maker.end_helper(session, 0)?;
        }
        Ok(())
    }
}
