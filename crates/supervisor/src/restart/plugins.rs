//! The plugins of one restart, as what they are: this process and the job's init ask more of them
//! than the engine does.

use crate::devices::gpu::GpuRestart;
use crate::job::rank::RankRestart;
use crate::job::shown::Shown;
use crate::restart::gate::Gate;
use crate::restart::join::Join;
use kedge_process::plugins::{Plugin, Plugins};
use std::os::fd::RawFd;
use std::sync::Arc;

/// The plugins of one restart. After the fork, the job's init has copies of them.
#[derive(Debug)]
pub(crate) struct RestartPlugins {
    /// Where the job had devices.
    pub(crate) gpu: Option<Arc<GpuRestart>>,
    pub(crate) rank: Arc<RankRestart>,
    /// Where it is a part of several.
    pub(crate) join: Option<Arc<Join>>,
    /// Where the user is shown what happens.
    pub(crate) shown: Option<Arc<Shown>>,
    /// Where it waits before it runs.
    pub(crate) gate: Option<Arc<Gate>>,
}

impl RestartPlugins {
    /// Returns all of them, for the engine.
    pub(crate) fn all(&self) -> Plugins {
        let rank: Arc<dyn Plugin> = self.rank.clone();
        let before = some(&self.gpu).into_iter().chain([rank]);
        before.chain(some(&self.join)).chain(some(&self.shown)).chain(some(&self.gate)).collect()
    }

    /// Returns the descriptors of this process that the job's init needs for them.
    pub(crate) fn numbers(&self) -> Vec<RawFd> {
        let gpu = self.gpu.iter().flat_map(|gpu| gpu.numbers());
        let gate = self.gate.iter().filter_map(|gate| gate.number());
        gpu.chain(self.rank.number()).chain(gate).collect()
    }
}

fn some<P: Plugin + 'static>(plugin: &Option<Arc<P>>) -> Option<Arc<dyn Plugin>> {
    plugin.clone().map(|plugin| plugin as Arc<dyn Plugin>)
}
