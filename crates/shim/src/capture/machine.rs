//! Stream capture's rules as a state machine over ids. It knows which streams take part in which
//! capture and behind which nodes each stream's next node goes; the graph itself is elsewhere.
//!
//! Rules: CUDA C++ Programming Guide, "Creating a Graph Using Stream Capture", and the driver API's
//! reference of cuStreamBeginCapture, cuStreamEndCapture and cuThreadExchangeStreamCaptureMode.

use crate::graph::Edge;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUgraph, CUgraphNode};
use kedge_protocol::{CtxId, StreamId};
use std::collections::{BTreeMap, HashMap, HashSet};

/// `CUstreamCaptureMode`: which calls a capture forbids to which threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Global,
    ThreadLocal,
    Relaxed,
}

impl Mode {
    pub(crate) fn from_raw(mode: u32) -> Result<Self, CuError> {
        match mode {
            0 => Ok(Self::Global),
            1 => Ok(Self::ThreadLocal),
            2 => Ok(Self::Relaxed),
            _ => Err(CuError::INVALID_VALUE),
        }
    }
}

/// A host thread, numbered by the caller.
pub(crate) type Thread = u64;
/// A capture sequence, unique in this process.
pub(crate) type CaptureId = u64;

/// What the machine has to know of a stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Member {
    pub(crate) stream: StreamId,
    pub(crate) ctx: CtxId,
    /// Ordered with the legacy stream.
    pub(crate) blocking: bool,
}

/// Where in a capture an event was recorded.
#[derive(Debug, Clone)]
pub(crate) struct Mark {
    capture: CaptureId,
    tips: Vec<Edge>,
}

/// How a capture starts.
#[derive(Debug)]
pub(crate) struct Begin {
    pub(crate) mode: Mode,
    pub(crate) thread: Thread,
    pub(crate) graph: CUgraph,
    /// The graph was the caller's before.
    pub(crate) borrowed: bool,
    pub(crate) tips: Vec<Edge>,
}

/// What is left of a capture that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) graph: CUgraph,
    pub(crate) borrowed: bool,
    /// Ok: the graph is complete. Else it is to be thrown away.
    pub(crate) outcome: Result<(), CuError>,
}

/// What `cuStreamGetCaptureInfo` tells of an active capture.
#[derive(Debug)]
pub(crate) struct Info {
    pub(crate) id: CaptureId,
    pub(crate) graph: CUgraph,
    pub(crate) tips: Vec<Edge>,
    pub(crate) valid: bool,
}

struct Branch {
    member: Member,
    /// The next node goes behind these.
    tips: Vec<Edge>,
}

struct Capture {
    origin: StreamId,
    begin: Begin,
    valid: bool,
    branches: HashMap<StreamId, Branch>,
}

impl Capture {
    /// The legacy stream is ordered with blocking streams, so it cannot be used while one captures.
    fn closes_legacy(&self, ctx: CtxId) -> bool {
        self.branches.values().any(|b| b.member.blocking && b.member.ctx == ctx)
    }
}

/// Every capture of the process.
#[derive(Default)]
pub(crate) struct Captures {
    captures: BTreeMap<CaptureId, Capture>,
    by_stream: HashMap<StreamId, CaptureId>,
    last: CaptureId,
}

impl Captures {
    pub(crate) fn len(&self) -> usize {
        self.captures.len()
    }

    pub(crate) fn begin(&mut self, member: Member, begin: Begin) -> Result<(), CuError> {
        if self.by_stream.contains_key(&member.stream) {
            return Err(CuError::ILLEGAL_STATE);
        }
        self.last += 1;
        let branch = Branch { member, tips: begin.tips.clone() };
        let branches = HashMap::from([(member.stream, branch)]);
        let capture = Capture { origin: member.stream, begin, valid: true, branches };
        self.captures.insert(self.last, capture);
        self.by_stream.insert(member.stream, self.last);
        Ok(())
    }

    pub(crate) fn is_capturing(&self, stream: StreamId) -> bool {
        self.by_stream.contains_key(&stream)
    }

    pub(crate) fn info(&self, stream: StreamId) -> Option<Info> {
        let id = *self.by_stream.get(&stream)?;
        let capture = self.captures.get(&id)?;
        let tips = capture.branches.get(&stream)?.tips.clone();
        Some(Info { id, graph: capture.begin.graph, tips, valid: capture.valid })
    }

    /// The graph and the nodes behind which the stream's next node goes; INVALIDATED if an earlier
    /// violation has spoilt the capture.
    pub(crate) fn tips(&self, stream: StreamId) -> Result<(CUgraph, &[Edge]), CuError> {
        let capture = self.of(stream)?;
        if !capture.valid {
            return Err(CuError::STREAM_CAPTURE_INVALIDATED);
        }
        let branch = capture.branches.get(&stream).ok_or(CuError::ILLEGAL_STATE)?;
        Ok((capture.begin.graph, &branch.tips))
    }

    /// The stream's next node goes behind exactly these.
    pub(crate) fn set_tips(&mut self, stream: StreamId, tips: Vec<Edge>) -> Result<(), CuError> {
        let branch = self.of_mut(stream)?.branches.get_mut(&stream);
        branch.ok_or(CuError::ILLEGAL_STATE)?.tips = tips;
        Ok(())
    }

    /// The stream's next node goes behind these as well.
    pub(crate) fn add_tips(&mut self, stream: StreamId, tips: &[Edge]) -> Result<(), CuError> {
        let branch = self.of_mut(stream)?.branches.get_mut(&stream);
        join(&mut branch.ok_or(CuError::ILLEGAL_STATE)?.tips, tips);
        Ok(())
    }

    /// What an event remembers that is recorded on a capturing stream.
    pub(crate) fn mark(&self, stream: StreamId) -> Result<Mark, CuError> {
        let (_, tips) = self.tips(stream)?;
        let capture = self.by_stream[&stream];
        Ok(Mark { capture, tips: tips.to_vec() })
    }

    /// `member` waits for an event that was recorded at `mark`, or outside of any capture. True if
    /// the wait belongs to a capture (`member` may have joined it); false: wait on the device.
    pub(crate) fn wait(&mut self, member: Member, mark: Option<&Mark>) -> Result<bool, CuError> {
        let own = self.by_stream.get(&member.stream).copied();
        let Some(mark) = mark else {
            let Some(own) = own else { return Ok(false) };
            // The event lies outside of the capture: an edge would cross its boundary.
            self.invalidate(own);
            return Err(CuError::STREAM_CAPTURE_ISOLATION);
        };
        let Some(capture) = self.captures.get_mut(&mark.capture) else {
            if let Some(own) = own {
                self.invalidate(own);
            }
            return Err(CuError::CAPTURED_EVENT);
        };
        if let Some(own) = own.filter(|&own| own != mark.capture) {
            capture.valid = false;
            self.invalidate(own);
            return Err(CuError::STREAM_CAPTURE_MERGE);
        }
        if !capture.valid {
            return Err(CuError::STREAM_CAPTURE_INVALIDATED);
        }
        let branch = capture
            .branches
            .entry(member.stream)
            .or_insert_with(|| Branch { member, tips: Vec::new() });
        join(&mut branch.tips, &mark.tips);
        self.by_stream.insert(member.stream, mark.capture);
        Ok(true)
    }

    /// Ends the capture that `stream` began; also by the wrong thread, which is told so, as a
    /// driver does (580 on an H200). `ancestors` gives the nodes that some nodes of a graph
    /// depend on, themselves included: every branch must have been joined to the origin.
    pub(crate) fn end(
        &mut self,
        stream: StreamId,
        thread: Thread,
        ancestors: impl FnOnce(CUgraph, Vec<CUgraphNode>) -> HashSet<CUgraphNode>,
    ) -> Result<Ended, CuError> {
        let id = *self.by_stream.get(&stream).ok_or(CuError::ILLEGAL_STATE)?;
        let capture = self.of_mut(stream)?;
        if capture.origin != stream {
            capture.valid = false;
            return Err(CuError::STREAM_CAPTURE_UNMATCHED);
        }
        let wrong = capture.begin.mode != Mode::Relaxed && capture.begin.thread != thread;
        let tips = |branch: &Branch| branch.tips.iter().map(|e| e.node).collect::<Vec<_>>();
        let outcome = if wrong {
            Err(CuError::STREAM_CAPTURE_WRONG_THREAD)
        } else if !capture.valid {
            Err(CuError::STREAM_CAPTURE_INVALIDATED)
        } else if capture.branches.len() == 1 {
            Ok(())
        } else {
            let joined = ancestors(capture.begin.graph, tips(&capture.branches[&stream]));
            let all = capture.branches.values().all(|b| tips(b).iter().all(|t| joined.contains(t)));
            if all { Ok(()) } else { Err(CuError::STREAM_CAPTURE_UNJOINED) }
        };
        self.by_stream.retain(|_, capture| *capture != id);
        let capture = self.captures.remove(&id).ok_or(CuError::ILLEGAL_STATE)?;
        Ok(Ended { graph: capture.begin.graph, borrowed: capture.begin.borrowed, outcome })
    }

    /// A call that may interfere with captures (cuMemAlloc …), made by `thread`, whose own mode is
    /// `mode`. Refused, and what it would have interfered with is spoilt.
    pub(crate) fn check_unsafe(&mut self, thread: Thread, mode: Mode) -> Result<(), CuError> {
        let forbids = |begin: &Begin| match mode {
            Mode::Relaxed => false,
            _ if begin.thread == thread => begin.mode != Mode::Relaxed,
            Mode::Global => begin.mode == Mode::Global,
            Mode::ThreadLocal => false,
        };
        let mut refused = false;
        for capture in self.captures.values_mut().filter(|c| forbids(&c.begin)) {
            capture.valid = false;
            refused = true;
        }
        if refused { Err(CuError::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// Whether a use of `ctx`'s legacy stream would be refused now. Asking spoils nothing.
    pub(crate) fn legacy_is_closed(&self, ctx: CtxId) -> bool {
        self.captures.values().any(|capture| capture.closes_legacy(ctx))
    }

    /// A use of `ctx`'s legacy stream, which would order itself with every blocking stream:
    /// refused while one of them captures.
    pub(crate) fn check_legacy(&mut self, ctx: CtxId) -> Result<(), CuError> {
        let mut refused = false;
        for capture in self.captures.values_mut().filter(|c| c.closes_legacy(ctx)) {
            capture.valid = false;
            refused = true;
        }
        if refused { Err(CuError::STREAM_CAPTURE_IMPLICIT) } else { Ok(()) }
    }

    /// An operation that no capture can hold (a wait, a query) on a stream: refused while it
    /// captures, and the capture is spoilt.
    pub(crate) fn check_stream(&mut self, stream: StreamId) -> Result<(), CuError> {
        match self.of_mut(stream) {
            Ok(capture) => {
                capture.valid = false;
                Err(CuError::STREAM_CAPTURE_UNSUPPORTED)
            }
            Err(_) => Ok(()),
        }
    }

    /// The same for a whole context: every capture with a stream of it.
    pub(crate) fn check_context(&mut self, ctx: CtxId) -> Result<(), CuError> {
        let mut refused = false;
        let of_ctx = |c: &Capture| c.branches.values().any(|b| b.member.ctx == ctx);
        for capture in self.captures.values_mut().filter(|c| of_ctx(c)) {
            capture.valid = false;
            refused = true;
        }
        if refused { Err(CuError::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// The stream is gone. A branch's nodes stay, and must be joined as before; a capture whose
    /// origin is gone can never end, so it goes too, and gives up its graph.
    pub(crate) fn stream_destroyed(&mut self, stream: StreamId) -> Option<CUgraph> {
        let id = self.by_stream.remove(&stream)?;
        if self.captures.get(&id)?.origin != stream {
            return None;
        }
        self.by_stream.retain(|_, capture| *capture != id);
        let capture = self.captures.remove(&id)?;
        (!capture.begin.borrowed).then_some(capture.begin.graph)
    }

    pub(crate) fn spoil(&mut self, mark: &Mark) {
        self.invalidate(mark.capture);
    }

    fn invalidate(&mut self, capture: CaptureId) {
        if let Some(capture) = self.captures.get_mut(&capture) {
            capture.valid = false;
        }
    }

    fn of(&self, stream: StreamId) -> Result<&Capture, CuError> {
        let id = self.by_stream.get(&stream).ok_or(CuError::ILLEGAL_STATE)?;
        self.captures.get(id).ok_or(CuError::ILLEGAL_STATE)
    }

    fn of_mut(&mut self, stream: StreamId) -> Result<&mut Capture, CuError> {
        let id = self.by_stream.get(&stream).ok_or(CuError::ILLEGAL_STATE)?;
        self.captures.get_mut(id).ok_or(CuError::ILLEGAL_STATE)
    }
}

/// Adds the edges that are not there yet.
fn join(tips: &mut Vec<Edge>, more: &[Edge]) {
    for edge in more {
        if tips.iter().all(|tip| tip.node != edge.node) {
            tips.push(*edge);
        }
    }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
