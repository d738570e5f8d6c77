//! What devices tell of their work where a program is traced.

use kedge_protocol::StreamId;

/// What a device has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Done {
    Kernel,
    /// A copy or fill.
    Copy,
    /// A graph, as a whole.
    Graph,
    /// It has waited for a function of the client's.
    Host,
}

/// Work in a stream that is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ran<'a> {
    pub what: Done,
    /// Such as the kernel's, as its source names it.
    pub name: &'a str,
    pub device: u32,
    pub stream: StreamId,
    /// Of a copy.
    pub bytes: u64,
    /// By [`Tracer::now`], as is `end`.
    pub begin: u64,
    pub end: u64,
}

/// Who writes that down.
pub trait Tracer: Send + Sync {
    /// Nanoseconds of a clock that all processes of the machine share; never 0.
    fn now(&self) -> u64;
    /// Takes what is over. Work of one stream comes in order.
    fn ran(&self, ran: &Ran<'_>);
}
