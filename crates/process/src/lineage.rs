//! The steps by which a tree of processes is made anew: each process by its own parent, with its
//! session and its process group. A pure function: a capture asks it whether a job can come back.
//!
//! A process is in the session of its maker until it leads one of its own. So children that stayed
//! in the session that their parent has left are made before it leaves. What has been given to a
//! parent that is not its maker (an orphan, to the init or to a subreaper) is made by a helper in
//! its session, which ends. A session or group whose leader has ended gets one for a moment, a
//! ghost.

use crate::state::Ids;
use libc::pid_t;
use std::collections::{BTreeMap, BTreeSet};

/// One step. The process 0 is the init.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// `parent` makes `pid`.
    Make { parent: pid_t, pid: pid_t },
    /// It leads a session of its own.
    Lead { pid: pid_t },
    /// Orphans among its descendants are its own, or are not any more.
    Adopt { pid: pid_t, on: bool },
    /// It joins a process group; its own number makes a new one.
    Join { pid: pid_t, group: pid_t },
    /// It ends, and `parent` collects it.
    End { pid: pid_t, parent: pid_t },
}

/// A process that cannot be put into its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Misplaced(pub(crate) pid_t);

/// The steps to make `members`, which have distinct ids. `used` are ids that helpers must not have.
pub(crate) fn steps(
    members: &[Ids],
    used: impl IntoIterator<Item = pid_t>,
) -> Result<Vec<Step>, Misplaced> {
    let mut planner = Planner::new(members, used.into_iter().collect());
    planner.make_all()?;
    planner.set_groups()?;
    planner.end_ghosts();
    Ok(planner.steps)
}

/// A process that has been made.
#[derive(Debug, Clone, Copy)]
struct Made {
    parent: pid_t,
    session: pid_t,
}

struct Planner<'a> {
    members: &'a [Ids],
    ids: BTreeMap<pid_t, Ids>,
    children: BTreeMap<pid_t, Vec<pid_t>>,
    /// The session in which each is to be made, where that matters.
    births: BTreeMap<pid_t, pid_t>,
    made: BTreeMap<pid_t, Made>,
    /// Those that have been made, by their sessions.
    sessions: BTreeMap<pid_t, Vec<pid_t>>,
    /// Those that are given to their parents.
    orphans: Vec<pid_t>,
    ghosts: Vec<(pid_t, pid_t)>,
    helper: pid_t,
    steps: Vec<Step>,
}

impl<'a> Planner<'a> {
    fn new(members: &'a [Ids], mut used: BTreeSet<pid_t>) -> Planner<'a> {
        used.extend(members.iter().flat_map(|ids| [ids.pid, ids.group, ids.session]));
        let ids: BTreeMap<pid_t, Ids> = members.iter().map(|ids| (ids.pid, *ids)).collect();
        let mut children: BTreeMap<pid_t, Vec<pid_t>> = BTreeMap::new();
        for own in members {
            children.entry(own.parent).or_default().push(own.pid);
        }
        let helper = (2..).find(|id| !used.contains(id)).unwrap_or(2);
        let init = Made { parent: 0, session: 0 };
        let mut planner = Planner {
            members,
            ids,
            children,
            births: BTreeMap::new(),
            made: BTreeMap::from([(0, init)]),
            sessions: BTreeMap::from([(0, vec![0])]),
            orphans: Vec::new(),
            ghosts: Vec::new(),
            helper,
            steps: Vec::new(),
        };
        planner.find_births();
        planner
    }

    fn children_of(&self, pid: pid_t) -> Vec<pid_t> {
        self.children.get(&pid).cloned().unwrap_or_default()
    }

    /// Children before their parents: a leader is made in the session that its children have whom
    /// it made before it led.
    fn find_births(&mut self) {
        let (mut next, mut order) = (vec![0], Vec::with_capacity(self.members.len()));
        while let Some(pid) = next.pop() {
            order.push(pid);
            next.extend(self.children_of(pid));
        }
        for pid in order.into_iter().rev().filter(|pid| *pid != 0) {
            let session = self.ids[&pid].session;
            let birth = if session == pid { self.left_by(pid) } else { Some(session) };
            self.births.extend(birth.map(|birth| (pid, birth)));
        }
    }

    /// The session that the leader `pid` has left behind with children in it. If there are several,
    /// it is one that is found elsewhere as well: in the others it has been given orphans.
    fn left_by(&self, pid: pid_t) -> Option<pid_t> {
        let births = self.children_of(pid).into_iter().filter_map(|child| self.births.get(&child));
        let left = births.copied().filter(|birth| *birth != pid && !self.descends(*birth, pid));
        let left: Vec<pid_t> = left.collect();
        let elsewhere = |session: pid_t| {
            let there = self.members.iter().filter(|ids| ids.session == session);
            session == 0 || there.into_iter().any(|ids| !self.descends(ids.pid, pid))
        };
        left.iter().copied().find(|session| elsewhere(*session)).or(left.first().copied())
    }

    /// Whether the member `pid` descends from the member `from`, or is it.
    fn descends(&self, mut pid: pid_t, from: pid_t) -> bool {
        for _ in 0..=self.members.len() {
            if pid == from {
                return true;
            }
            match self.ids.get(&pid) {
                Some(ids) => pid = ids.parent,
                None => return false,
            }
        }
        false
    }

    fn make_all(&mut self) -> Result<(), Misplaced> {
        self.make_descendants(0);
        while !self.orphans.is_empty() {
            let found = (0..self.orphans.len()).find_map(|at| Some((at, self.maker_for(at)?)));
            let (at, maker) = match found {
                Some(found) => found,
                None => self.make_ghost()?,
            };
            let pid = self.orphans.remove(at);
            self.make_orphan(pid, maker);
            self.make_descendants(pid);
        }
        match self.members.iter().find(|ids| !self.made.contains_key(&ids.pid)) {
            None => Ok(()),
            Some(ids) => Err(Misplaced(ids.pid)),
        }
    }

    fn make(&mut self, parent: pid_t, pid: pid_t) {
        let session = self.made[&parent].session;
        self.made.insert(pid, Made { parent, session });
        self.sessions.entry(session).or_default().push(pid);
        self.steps.push(Step::Make { parent, pid });
    }

    fn lead(&mut self, pid: pid_t) {
        if let Some(made) = self.made.get_mut(&pid) {
            if let Some(left) = self.sessions.get_mut(&made.session) {
                left.retain(|other| *other != pid);
            }
            made.session = pid;
        }
        self.sessions.entry(pid).or_default().push(pid);
        self.steps.push(Step::Lead { pid });
    }

    /// Makes all that descends from `root`, which has been made, but for orphans.
    fn make_descendants(&mut self, root: pid_t) {
        let mut next = vec![root];
        while let Some(parent) = next.pop() {
            let (leads, born) = match self.ids.get(&parent) {
                Some(ids) => (ids.session == parent, self.made[&parent].session),
                None => (false, 0),
            };
            let session = if leads { parent } else { born };
            let mut late = Vec::new();
            for child in self.children_of(parent) {
                match self.births.get(&child) {
                    Some(birth) if *birth == session => late.push(child),
                    Some(birth) if *birth == born => {
                        self.make(parent, child);
                        next.push(child);
                    }
                    Some(_) => self.orphans.push(child),
                    None => late.push(child),
                }
            }
            if leads {
                self.lead(parent);
            }
            for child in late {
                self.make(parent, child);
                next.push(child);
            }
        }
    }

    /// Whether `pid`, which has been made, descends from `from`, or is it.
    fn was_made_below(&self, mut pid: pid_t, from: pid_t) -> bool {
        while pid != from && pid != 0 {
            pid = self.made.get(&pid).map_or(0, |made| made.parent);
        }
        pid == from
    }

    /// Who is in the session of the orphan and descends from its parent.
    fn maker_for(&self, at: usize) -> Option<pid_t> {
        let pid = self.orphans[at];
        let parent = self.ids[&pid].parent;
        let there = self.sessions.get(self.births.get(&pid)?)?;
        there.iter().copied().find(|maker| self.was_made_below(*maker, parent))
    }

    /// Makes a leader for the session of one of the orphans: which, and the leader.
    fn make_ghost(&mut self) -> Result<(usize, pid_t), Misplaced> {
        let depth = |pid: pid_t| {
            let parents = std::iter::successors(Some(pid), |pid| Some(self.made.get(pid)?.parent));
            parents.take_while(|pid| *pid != 0).count()
        };
        let leaderless = self.orphans.iter().enumerate().filter(|(_, pid)| {
            let session = self.births[*pid];
            !self.ids.contains_key(&session) && !self.made.contains_key(&session)
        });
        // Below the last of those to whom orphans of the session are given it is below all of them.
        let lowest = leaderless.max_by_key(|(_, pid)| depth(self.ids[*pid].parent));
        let Some((at, pid)) = lowest else { return Err(Misplaced(self.orphans[0])) };
        let (parent, ghost) = (self.ids[pid].parent, self.births[pid]);
        self.make(parent, ghost);
        self.lead(ghost);
        self.ghosts.push((ghost, parent));
        Ok((at, ghost))
    }

    /// By a helper, whose end gives it to its parent.
    fn make_orphan(&mut self, pid: pid_t, maker: pid_t) {
        let (helper, parent) = (self.helper, self.ids[&pid].parent);
        if parent != 0 {
            self.steps.push(Step::Adopt { pid: parent, on: true });
        }
        self.steps.push(Step::Make { parent: maker, pid: helper });
        self.steps.push(Step::Make { parent: helper, pid });
        self.steps.push(Step::End { pid: helper, parent: maker });
        if parent != 0 {
            self.steps.push(Step::Adopt { pid: parent, on: false });
        }
        let session = self.made[&maker].session;
        self.made.insert(pid, Made { parent, session });
        self.sessions.entry(session).or_default().push(pid);
    }

    /// A group must exist before anybody can join it: its leader makes it, and may leave it.
    fn set_groups(&mut self) -> Result<(), Misplaced> {
        let grouped: Vec<Ids> = self
            .members
            .iter()
            .filter(|ids| ids.group != 0 && ids.session != ids.pid)
            .copied()
            .collect();
        for ids in &grouped {
            if !self.made.contains_key(&ids.group) {
                self.make(ids.pid, ids.group);
                self.ghosts.push((ids.group, ids.pid));
            }
        }
        let mut begun = BTreeSet::new();
        for ids in &grouped {
            let leader = self.made[&ids.group];
            // Nobody gets back into a group from outside of the job, which has no number here.
            let outside = self.ids.get(&ids.group).is_some_and(|leader| leader.group == 0);
            if outside || leader.session != self.made[&ids.pid].session {
                return Err(Misplaced(ids.pid));
            }
            if leader.session != ids.group && begun.insert(ids.group) {
                self.steps.push(Step::Join { pid: ids.group, group: ids.group });
            }
        }
        // Those that have left a group that others are in are the last.
        let (leaders, others): (Vec<&Ids>, Vec<&Ids>) = grouped
            .iter()
            .filter(|ids| ids.group != ids.pid)
            .partition(|ids| begun.contains(&ids.pid));
        for ids in others.into_iter().chain(leaders) {
            self.steps.push(Step::Join { pid: ids.pid, group: ids.group });
        }
        Ok(())
    }

    /// Everybody has joined.
    fn end_ghosts(&mut self) {
        while let Some((pid, parent)) = self.ghosts.pop() {
            self.steps.push(Step::End { pid, parent });
        }
    }
}

#[cfg(test)]
mod tests;
