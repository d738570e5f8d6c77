//! The page engine: which copy of managed memory is current, the host's or a device's.
//!
//! A host that touches managed memory and devices that run kernels on it must see one memory. Where
//! a device does not see the host's pages, there are two copies, and [`Engine`] decides which one
//! is current, page by page. It is a state machine: each event returns the [`Action`]s that make it
//! true, in order, and it does no I/O of its own. Whoever drives it carries them out before the
//! next event, with the engine locked; where it has to wait ([`Step::Wait`]), it does so unlocked
//! and asks again.
//!
//! A page is in one of three states while its block lies on a node:
//!
//! | state | the host's view | current |
//! |---|---|---|
//! | device | no access | the node's copy |
//! | both clean | read | both |
//! | host | read and write | the host's copy |
//!
//! A block that lies in host memory, mapped for the devices, has one copy and no states: the view
//! is open, and everybody sees every write. [docs/design/0038-page-engine.md] has the decisions.
//!
//! What keeps this one memory:
//!
//! - **While work that may touch a block is posted and not known to be over, the view of the block
//!   is
//!   closed** (but for blocks in host memory). A touch then waits for that work.
//! - **A launch may read and write all that its stream may touch**: all pages that the host has
//!   open there are closed, and those that it has written are sent. These blocks are listed as they
//!   are opened, so a launch costs nothing for the others.
//! - **Blocks move only while no work runs that may touch them.**
#![forbid(unsafe_code)]

mod advice;
mod again;
mod ahead;
mod busy;
mod copies;
mod engine;
mod launch;
mod moves;
mod out;
mod region;
mod room;
mod set;
mod touch;
mod types;

pub use ahead::ReadAhead;
pub use engine::Engine;
pub use set::PageSet;
pub use types::{
    Access, Action, Advice, Attach, BLOCK, Error, NodeConfig, NodeId, Note, PAGE, Pages, Place,
    Protection, Step, StreamId, Ticket,
};
