//! What is said: docs/design/0008-coordinator.md has the bytes.

use kedge_wire::{Bytes, List, Text, wire};

/// Changes with what messages mean.
pub(crate) const VERSION: u32 = 2;
/// Longest request: a greeting with all that it may carry.
pub(crate) const MAX_REQUEST: usize = 96 << 10;
/// Longest reply: the members.
pub(crate) const MAX_REPLY: usize = 512 << 10;
/// Members of one job.
pub(crate) const MAX_MEMBERS: usize = 4096;
/// Series that a greeting tells of.
pub(crate) const MAX_TOLD: usize = 64;

/// Of a job, a member, a node, a series, a space of keys.
pub type Name = Text<96>;
/// What a value is published under.
pub type Key = Bytes<256>;
pub type Value = Bytes<{ 16 << 10 }>;
/// For people.
pub type Why = Text<1024>;

wire! {
    /// Who is meant: the members on one's own node, or all of the job.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    pub enum Scope {
        Node = 1 {},
        Job = 2 {},
    }

    /// A series of barriers.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Series { pub scope: Scope, pub name: Name }

    /// A value's place.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Notice { pub scope: Scope, pub space: Name, pub key: Key }

    /// Whose arrival a barrier waits for.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Who {
        /// Every part that has joined, in the scope.
        All = 1 {},
        /// So many members.
        Count = 2 { members: u32 },
    }

    /// The member has passed this step of the series, and all before it.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Passed { pub series: Series, pub step: u64 }

    /// The member was told that the series is broken.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Broken { pub series: Series, pub by: Name, pub why: Why }

    /// The first request of a connection. What the member remembers of a coordinator that was lost
    /// is in it, so that nobody waits for what has happened.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Hello {
        pub version: u32,
        pub job: Name,
        pub member: Name,
        pub node: Name,
        /// One of the job's parts, and not a guest, which counts for no barrier of all.
        pub part: bool,
        pub passed: List<Passed, MAX_TOLD>,
        pub broken: List<Broken, MAX_TOLD>,
    }

    /// One at a time on a connection; the answer may be long in coming. `wait_ms` bounds that: 0 is
    /// not to wait.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum Request {
        Hello = 1 { hello: Hello },
        /// Waits for the others at a step; steps of a series only grow.
        Arrive = 2 { series: Series, step: u64, who: Who, wait_ms: u32 },
        /// This and every later step of the series fails for everybody.
        Break = 3 { series: Series, why: Why },
        /// The member has no further part in the series; whatever becomes of it does not break it.
        End = 4 { series: Series },
        /// `alone`: refused where another member holds that key, so the first one is elected.
        Publish = 5 { at: Notice, value: Value, alone: bool },
        Withdraw = 6 { at: Notice },
        /// The value, once there is one of a later revision than `after`.
        Look = 7 { at: Notice, after: u64, wait_ms: u32 },
        /// The job's parts.
        Members = 8 {},
        /// Takes part in a series of so many members on one node, which meet in memory.
        Meet = 9 { series: Series, members: u32 },
    }

    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum Reply {
        Welcome = 1 { revision: u64 },
        /// All have arrived.
        Through = 2 {},
        Broken = 3 { by: Name, why: Why },
        /// Not in time.
        Late = 4 {},
        Published = 5 { revision: u64 },
        Taken = 6 { by: Name },
        Found = 7 { by: Name, revision: u64, value: Value },
        Members = 8 { names: List<Name, MAX_MEMBERS> },
        Done = 9 {},
        /// The coordinator does not do that.
        Refused = 10 { why: Why },
        /// The page comes with it, as a descriptor.
        Page = 11 {},
    }
}
