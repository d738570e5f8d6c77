//! What the coordinator knows: a state machine that no socket and no clock is in. Each request has
//! one reply, at once or later; time comes in as milliseconds.

mod barrier;
mod board;

use crate::message::{Hello, MAX_MEMBERS, Name, Reply, Request, Scope, Series, VERSION, Who, Why};
use barrier::Round;
use board::{Board, Slot};
use kedge_barrier::Page;
use kedge_wire::List;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use thiserror::Error;

/// A connection.
pub type Conn = u64;

/// What only a broken member does: it is hung up on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Violation {
    #[error("it does not begin with a greeting, or greets twice")]
    Greeting,
    #[error("it asks before it has been answered")]
    Impatient,
}

#[derive(Debug)]
struct Member {
    name: Name,
    node: Name,
    part: bool,
}

/// A node's, or the job's, with a name.
type Place = (Option<String>, String);

/// What a member waits for.
#[derive(Debug)]
enum Waiting {
    Step { place: Place, step: u64 },
    Value { slot: Slot, after: u64 },
}

#[derive(Debug)]
pub struct State {
    job: String,
    /// Members at a time.
    most: usize,
    members: BTreeMap<Conn, Member>,
    series: BTreeMap<Place, Round>,
    board: Board,
    /// With the moment at which it is answered all the same.
    waiting: BTreeMap<Conn, (Waiting, u64)>,
    deadlines: BTreeSet<(u64, Conn)>,
    replies: Vec<(Conn, Reply)>,
    /// What goes along with replies that say so.
    pages: BTreeMap<Conn, Arc<Page>>,
}

impl State {
    /// Makes an empty state; `revision` precedes that of the first publication.
    pub fn new(job: String, revision: u64) -> State {
        State::with_room(job, revision, MAX_MEMBERS)
    }

    /// Returns the same for as many members at a time as `most`.
    pub(crate) fn with_room(job: String, revision: u64, most: usize) -> State {
        State {
            job,
            most,
            members: BTreeMap::new(),
            series: BTreeMap::new(),
            board: Board::new(revision),
            waiting: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            replies: Vec::new(),
            pages: BTreeMap::new(),
        }
    }

    /// Returns what is to be said, in order; taken out.
    pub fn replies(&mut self) -> Vec<(Conn, Reply)> {
        std::mem::take(&mut self.replies)
    }

    /// Answers in the place of what is asked.
    pub(crate) fn refuse(&mut self, conn: Conn, why: &str) {
        self.reply(conn, Reply::Refused { why: Why::truncated(why.to_owned()) });
    }

    /// Returns what goes along with a [`Reply::Page`].
    pub(crate) fn page_for(&mut self, conn: Conn) -> Option<Arc<Page>> {
        self.pages.remove(&conn)
    }

    /// Takes a request of `conn` at the moment `now`.
    pub fn ask(&mut self, conn: Conn, request: Request, now: u64) -> Result<(), Violation> {
        if self.waiting.contains_key(&conn) {
            return Err(Violation::Impatient);
        }
        if self.members.contains_key(&conn) == matches!(request, Request::Hello { .. }) {
            return Err(Violation::Greeting);
        }
        match request {
            Request::Hello { hello } => self.greet(conn, hello),
            Request::Arrive { series, step, who, wait_ms } => {
                self.arrive(conn, &series, step, who, now.saturating_add(wait_ms.into()));
            }
            Request::Meet { series, members } => self.meet(conn, &series, members),
            Request::Break { series, why } => self.break_series(conn, &series, why),
            Request::End { series } => self.end(conn, &series),
            Request::Publish { at, value, alone } => {
                let (slot, by) = (self.slot(conn, &at), self.name_of(conn));
                let reply = self.board.publish(conn, by, slot.clone(), value, alone);
                let published = matches!(reply, Reply::Published { .. });
                self.reply(conn, reply);
                if published {
                    self.answer_lookers(&slot);
                }
            }
            Request::Withdraw { at } => {
                let slot = self.slot(conn, &at);
                self.board.withdraw(conn, &slot);
                self.reply(conn, Reply::Done {});
            }
            Request::Look { at, after, wait_ms } => {
                let slot = self.slot(conn, &at);
                match self.board.look(&slot, after) {
                    Some(found) => self.reply(conn, found),
                    None if wait_ms == 0 => self.reply(conn, Reply::Late {}),
                    None => {
                        let until = now.saturating_add(wait_ms.into());
                        self.wait(conn, Waiting::Value { slot, after }, until);
                    }
                }
            }
            Request::Members {} => {
                let parts = self.members.values().filter(|member| member.part);
                let names: Vec<Name> = parts.map(|member| member.name.clone()).collect();
                let names = List::new(names).unwrap_or_default();
                self.reply(conn, Reply::Members { names });
            }
        }
        Ok(())
    }

    /// Takes the member out whose connection is gone.
    pub fn lost(&mut self, conn: Conn) {
        self.forget_wait(conn);
        self.pages.remove(&conn);
        let Some(member) = self.members.remove(&conn) else { return };
        self.board.forget(conn);
        let places: Vec<Place> = self.series.keys().cloned().collect();
        for place in places {
            self.leave(conn, &place, Some(&member.name));
        }
        // Who waits for all waits for one less.
        if member.part {
            self.settle_all();
        }
    }

    /// Answers those who have waited for long enough.
    pub fn expire(&mut self, now: u64) {
        while let Some((until, conn)) = self.deadlines.first().copied().filter(|d| d.0 <= now) {
            self.deadlines.remove(&(until, conn));
            if let Some((Waiting::Step { place, step }, _)) = self.forget_wait(conn)
                && let Some(round) = self.series.get_mut(&place)
            {
                round.give_up(conn, step);
            }
            self.reply(conn, Reply::Late {});
        }
    }

    /// Returns when the next one has waited for long enough.
    pub fn next_deadline(&self) -> Option<u64> {
        self.deadlines.first().map(|(until, _)| *until)
    }

    fn greet(&mut self, conn: Conn, hello: Hello) {
        let refusal = if hello.version != VERSION {
            Some(
                "it is of another version of kedge: use the same one for all of the job".to_owned(),
            )
        } else if *hello.job != *self.job {
            Some(format!("this is the job {}, not {}", self.job, &*hello.job))
        } else if self.members.len() >= self.most {
            Some(format!("the job has {} members, and can have no more", self.most))
        } else {
            None
        };
        if let Some(why) = refusal {
            return self.reply(conn, Reply::Refused { why: Why::truncated(why) });
        }
        // On its own node it is this one come back, whose former connection may not be gone yet.
        let rival =
            |other: &&Member| other.part && other.name == hello.member && other.node != hello.node;
        if let Some(other) = self.members.values().find(rival).filter(|_| hello.part) {
            let by = other.node.clone();
            return self.reply(conn, Reply::Taken { by });
        }
        let (name, node, part) = (hello.member, hello.node, hello.part);
        self.members.insert(conn, Member { name, node, part });
        let revision = self.board.revision();
        self.reply(conn, Reply::Welcome { revision });
        for passed in hello.passed.into_inner() {
            self.recall(conn, &passed.series, Some(passed.step), None);
        }
        for broken in hello.broken.into_inner() {
            self.recall(conn, &broken.series, None, Some((broken.by, broken.why)));
        }
    }

    fn reply(&mut self, conn: Conn, reply: Reply) {
        self.replies.push((conn, reply));
    }

    fn wait(&mut self, conn: Conn, what: Waiting, until: u64) {
        self.waiting.insert(conn, (what, until));
        self.deadlines.insert((until, conn));
    }

    fn forget_wait(&mut self, conn: Conn) -> Option<(Waiting, u64)> {
        let found = self.waiting.remove(&conn)?;
        self.deadlines.remove(&(found.1, conn));
        Some(found)
    }

    fn answer_lookers(&mut self, slot: &Slot) {
        let looks = |waiting: &Waiting| match waiting {
            Waiting::Value { slot: theirs, after } if theirs == slot => Some(*after),
            _ => None,
        };
        let lookers: Vec<(Conn, u64)> = self
            .waiting
            .iter()
            .filter_map(|(conn, (waiting, _))| looks(waiting).map(|after| (*conn, after)))
            .collect();
        for (conn, after) in lookers {
            if let Some(found) = self.board.look(slot, after) {
                self.forget_wait(conn);
                self.reply(conn, found);
            }
        }
    }

    fn name_of(&self, conn: Conn) -> Name {
        self.members.get(&conn).map(|member| member.name.clone()).unwrap_or_default()
    }

    fn place(&self, conn: Conn, scope: Scope, name: &Name) -> Place {
        let node = || self.members.get(&conn).map(|member| member.node.to_string());
        match scope {
            Scope::Node {} => (node(), name.to_string()),
            Scope::Job {} => (None, name.to_string()),
        }
    }

    fn place_of(&self, conn: Conn, series: &Series) -> Place {
        self.place(conn, series.scope, &series.name)
    }

    fn slot(&self, conn: Conn, at: &crate::message::Notice) -> Slot {
        (self.place(conn, at.scope, &at.space), at.key.to_vec())
    }

    /// Returns how many arrivals make a barrier of `who` at `place`.
    fn needed(&self, place: &Place, who: Who) -> usize {
        let on = |member: &&Member| match &place.0 {
            None => true,
            Some(node) => **node == *member.node,
        };
        match who {
            Who::Count { members } => members as usize,
            Who::All {} => self.members.values().filter(on).filter(|member| member.part).count(),
        }
    }
}

#[cfg(test)]
mod tests;
