//! What the engine is told, and what it answers.

use std::collections::BTreeSet;
use std::ops::Range;
use thiserror::Error;

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Pages of a block, which lies in one place as a whole: 2 MiB, a GPU's mapping granule.
pub const BLOCK: u64 = 512;

/// A range of page numbers (addresses divided by [`PAGE`]).
pub type Pages = Range<u64>;

/// A memory of devices: of one GPU, or of all devices of one proxy that share theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

/// A stream, as the client names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub u64);

/// What a node can do.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeConfig {
    /// The most pages that may lie on it; no limit where there is none. It is kept by placing
    /// blocks in host memory, so it means nothing where some node has not got `maps_host`.
    pub quota: Option<u64>,
    /// Its devices can map the host's memory.
    pub maps_host: bool,
    /// Nodes whose memory its devices can map.
    pub peers: BTreeSet<NodeId>,
}

/// Where devices find a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// In the host's memory, mapped for devices: the one copy.
    Host,
    /// In a node's memory; the host has a copy of its own.
    Node(NodeId),
}

/// Whose work may touch a region (`cudaStreamAttachMemAsync`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Attach {
    /// That of any stream.
    Global,
    /// No device's.
    Host,
    /// That of one stream.
    Stream(StreamId),
}

/// How the host touches a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

/// What the host's view of a page allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protection {
    None,
    Read,
    ReadWrite,
}

/// What a program advises for a range (`cudaMemAdvise`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// The range is best at a place.
    Prefer(Place),
    /// It is best nowhere in particular.
    NoPreference,
}

/// What an event comes to.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Step {
    /// These actions make it true.
    Do(Vec<Action>),
    /// Nothing has changed: work has to be over first. Whoever asked waits for these streams
    /// **with the engine unlocked** (a host function may need it), reports each by
    /// [`Engine::over`](crate::Engine::over) with the ticket, and asks again.
    Wait { streams: Vec<(NodeId, StreamId)>, ticket: Ticket },
}

/// A moment: what was posted before it, and what after.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub(crate) u64);

/// What is to be done, in order, each before the next.
///
/// Bytes move between the host's memory and a node's whatever the view allows (by a mapping of
/// kedge's own), and have arrived before work that is posted later begins, on any stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Changes what the host's view allows.
    Protect { pages: Pages, to: Protection },
    /// Takes memory of a node, zeroed. Where there is none, nothing more of these actions is done
    /// for the blocks of these pages, and [`Engine::refused`](crate::Engine::refused) says what is.
    Reserve { node: NodeId, pages: Pages },
    /// Has devices find these pages there from now on. No work that may touch them runs.
    Map { pages: Pages, at: Place },
    /// Gives a node's memory back.
    Release { node: NodeId, pages: Pages },
    /// Drops the host's bytes: they are zero if they are ever touched again.
    Forget { pages: Pages },
    /// Copies bytes of a node to the host's memory.
    Fetch { node: NodeId, pages: Pages },
    /// Copies bytes of the host's memory to a node.
    Send { node: NodeId, pages: Pages },
    /// Copies bytes between nodes.
    Copy { from: NodeId, to: NodeId, pages: Pages },
    /// Tells the job's log.
    Tell(Note),
}

impl Action {
    /// Returns what is left of it without the pages of some ranges.
    pub fn without(self, ranges: &[Pages]) -> Vec<Action> {
        let Some(pages) = self.pages().cloned() else { return vec![self] };
        let mut left = vec![pages];
        for range in ranges {
            let parts = left.into_iter().flat_map(|it| {
                let before = it.start..it.end.min(range.start);
                [before, it.start.max(range.end)..it.end]
            });
            left = parts.filter(|it| it.start < it.end).collect();
        }
        left.into_iter().map(|pages| self.clone().of(pages)).collect()
    }

    /// Returns the pages that it is about.
    pub fn pages(&self) -> Option<&Pages> {
        match self {
            Action::Protect { pages, .. }
            | Action::Reserve { pages, .. }
            | Action::Map { pages, .. }
            | Action::Release { pages, .. }
            | Action::Forget { pages }
            | Action::Fetch { pages, .. }
            | Action::Send { pages, .. }
            | Action::Copy { pages, .. } => Some(pages),
            Action::Tell(_) => None,
        }
    }

    /// Returns the same for other pages.
    fn of(mut self, other: Pages) -> Action {
        match &mut self {
            Action::Protect { pages, .. }
            | Action::Reserve { pages, .. }
            | Action::Map { pages, .. }
            | Action::Release { pages, .. }
            | Action::Forget { pages }
            | Action::Fetch { pages, .. }
            | Action::Send { pages, .. }
            | Action::Copy { pages, .. } => *pages = other,
            Action::Tell(_) => {}
        }
        self
    }
}

/// What is worth a line in the job's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// The host touched a block while a kernel ran: it stays in host memory from now on.
    TouchedByBoth { pages: Pages },
    /// Kernels of two nodes use a block, and neither sees the other's memory: as above.
    UsedByNodes { pages: Pages },
}

/// Why an event is refused; nothing has changed then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Error {
    #[error("page {0:#x} is no managed memory")]
    NotManaged(u64),
    #[error("managed memory is there already, or the range is empty")]
    Overlap,
    #[error("no node has the number {0}")]
    UnknownNode(u32),
}
