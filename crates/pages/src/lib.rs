//! The page engine: which copy of managed memory is current, the host's or a device's.
//!
//! The host and the devices must see one managed memory. If a device does not see the host's pages,
//! there are two copies, and [`Engine`] decides page by page which one is current. It is a state
//! machine without I/O: each event returns the [`Action`]s to carry out, in order. The caller does
//! so with the engine locked, before the next event. If it has to wait ([`Step::Wait`]), it unlocks
//! the engine, waits, and repeats the event.
//!
//! A page is in one of three states while its block lies on a node:
//!
//! | state | the host's view | current |
//! |---|---|---|
//! | device | no access | the node's copy |
//! | both clean | read | both |
//! | host | read and write | the host's copy |
//!
//! A block that lies in host memory, mapped for the devices, has one copy and no states: the host's
//! view is open, and host and devices see every write. [docs/design/0038-page-engine.md] has the
//! decisions.
//!
//! Three rules keep the copies one memory:
//!
//! - **A block is closed to the host while work that may touch it is posted and not known to be
//!   over**, unless it lies in host memory. A touch by the host waits for that work.
//! - **A launch may read and write all that its stream may touch.** Of that, all pages that the
//!   host has open are closed, and those that it has written are sent. Blocks are listed when they
//!   are opened, so a launch costs nothing for the others.
//! - **Blocks move only while no work that may touch them runs.**
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
