//! Devices on another machine. The near end of a session is the [`session::Session`], an executor
//! beside the client; the far end ([`far::serve`]) is a proxy without a ring, which carries out
//! what comes over the line. Both keep memory that client and devices see alike by a
//! [`mirror::Mirror`].

mod capture;
pub mod far;
mod handed;
mod images;
mod mirror;
pub(crate) mod open;
mod outlet;
pub(crate) mod restore;
pub(crate) mod session;
mod ticker;

use kedge_gpu_image::{SavedProxy, SavedStep};
use kedge_protocol::{Call, Message, Post, StreamOp};

/// Returns whether from this message on there is memory that the client and devices see.
fn shares(message: &Message) -> bool {
    let Message::Call { call } = message else { return false };
    matches!(
        call,
        Call::Share { .. } | Call::Alias { .. } | Call::ModuleLoad { .. } | Call::ModuleLink { .. }
    )
}

/// Returns whether a client that goes on from an image has memory that devices see, too.
fn shared_in(saved: &SavedProxy) -> bool {
    saved.steps.iter().any(|step| match step {
        SavedStep::Message { message, .. } => shares(message),
        SavedStep::Module { .. } | SavedStep::Linked { .. } => true,
    })
}

/// Returns whether a message may have devices read or write memory that the client sees. What the
/// client has changed by then crosses before it: later, it would cover what the devices write.
fn touches_memory(message: &Message) -> bool {
    match message {
        Message::Post { post: Post::Enqueue { op, .. } } => match op {
            StreamOp::Launch { .. }
            | StreamOp::Copy { .. }
            | StreamOp::CopyInline { .. }
            | StreamOp::Memset { .. }
            | StreamOp::GraphLaunch { .. }
            | StreamOp::WriteValue { .. }
            | StreamOp::WaitValue { .. }
            | StreamOp::HostFn { .. }
            | StreamOp::Conditional { .. } => true,
            StreamOp::Empty {}
            | StreamOp::EventRecord { .. }
            | StreamOp::EventWait { .. }
            | StreamOp::MemAlloc { .. }
            | StreamOp::MemFree { .. }
            | StreamOp::SetCondition { .. } => false,
        },
        // A module's managed variables lie in memory that both see.
        Message::Call { call } => {
            matches!(call, Call::ModuleLoad { .. } | Call::ModuleLink { .. } | Call::Alias { .. })
        }
        Message::Post { .. } => false,
    }
}
