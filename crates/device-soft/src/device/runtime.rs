//! What every task can reach.

use super::arena::Memory;
use super::engine::Engines;
use super::events::Clock;
use super::tables::Tables;
use crate::pool::Pool;
use kedge_device::Host;
use kedge_device::trace::Tracer;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, Weak};

pub(super) struct Runtime {
    pub(super) host: Arc<dyn Host>,
    /// Who hears what the devices do.
    pub(super) tracer: Option<Arc<dyn Tracer>>,
    pub(super) pool: Arc<Pool>,
    pub(super) engines: Engines,
    pub(super) memory: Arc<Memory>,
    /// What tasks that launch further ones look up.
    pub(super) tables: Weak<Mutex<Tables>>,
    /// The client's operations that are not over.
    pub(super) outstanding: AtomicUsize,
    /// Tasks that were started and are not over, what waits included.
    pub(super) unfinished: AtomicUsize,
    /// Of event time stamps.
    pub(super) clock: Clock,
}
