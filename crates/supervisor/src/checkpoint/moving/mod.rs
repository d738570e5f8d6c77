//! A job's devices move while it runs: for each client, a new proxy takes the place of the one that
//! it has, for all of them in one step. docs/design/0036-moves.md has the protocol between the
//! three, and says who has the client when.

mod one;
mod owner;
mod together;

use crate::checkpoint::checkpointer::Checkpointer;
use crate::checkpoint::error::{CheckpointError, MoveError};
use crate::devices::proxies::Proxy;
use crate::job::jobs;
use kedge_control::gpu::GpuSpec;
use kedge_control::job::{Migrate, Moving};
use kedge_control::{error, warn};
use owner::Owner;
use std::sync::Arc;
use std::time::Instant;
use together::Together;

impl Checkpointer {
    /// Moves the job's devices, and tells how far that has come.
    pub(crate) fn migrate(
        &self,
        order: &Migrate,
        mut tell: impl FnMut(Moving),
    ) -> Result<(), CheckpointError> {
        self.of_one_place("moving a job")?;
        let _one = self.turn.take().ok_or(CheckpointError::Busy)?;
        let begin = Instant::now();
        let moved = self.move_all(order, &mut tell);
        if let Err(error) = &moved {
            let what = if order.check { "cannot move" } else { "not moved" };
            error!(self.log, "{what}: {error}");
        }
        let (processes, seconds) = (moved?, begin.elapsed().as_secs_f64());
        tell(Moving::Done { processes, seconds });
        Ok(())
    }

    fn move_all(&self, order: &Migrate, tell: &mut dyn FnMut(Moving)) -> Result<u32, MoveError> {
        let from = self.devices().as_ref().ok_or(MoveError::NoDevices)?.gpu.clone();
        let (from, to) = (spec_of(&from)?, spec_of(&order.to)?);
        let to = place(&from, to)?;
        let launch = self.proxies.launch().ok_or(MoveError::NoDevices)?.elsewhere();
        let launch = if to == from { launch } else { launch.on(&to) };
        let target = launch.clone().cold();
        let decision = |source| MoveError::System { what: "make a file in memory", source };
        let owner = Owner::new().map_err(decision)?;
        let moved = Together::new(self, (&target, &launch), order, &owner).run(tell);
        let is_there = matches!(moved, Ok(_) | Err(MoveError::Lost { .. }));
        if is_there && !order.check && to != from {
            self.is_on(&to);
        }
        moved
    }

    /// The job's proxies.
    fn clients(&self) -> Vec<Arc<Proxy>> {
        self.proxies.locked().values().cloned().collect()
    }

    /// The job is on other devices.
    fn is_on(&self, gpu: &GpuSpec) {
        let gpu = gpu.to_string();
        if let Err(error) = jobs::note_gpu(&self.home, &gpu) {
            warn!(self.log, "cannot note that the job is on {gpu}: {error}");
        }
        if let Some(devices) = self.devices().as_mut() {
            devices.gpu = gpu;
        }
    }
}

fn spec_of(gpu: &str) -> Result<GpuSpec, MoveError> {
    gpu.parse().map_err(|source| MoveError::Target { to: gpu.to_owned(), source })
}

/// Returns where a job on `from` goes that is to move `to`: to as many software devices as it has,
/// where that says no number, and to the GPUs that it has, where that says none.
fn place(from: &GpuSpec, to: GpuSpec) -> Result<GpuSpec, MoveError> {
    match (from, to) {
        (GpuSpec::Soft { .. }, GpuSpec::Soft { devices: 1, apart: false }) => Ok(from.clone()),
        (GpuSpec::Soft { .. }, to @ GpuSpec::Soft { .. }) if *from == to => Ok(to),
        (GpuSpec::Local { .. }, GpuSpec::Local { ordinals }) if ordinals.is_empty() => {
            Ok(from.clone())
        }
        (GpuSpec::Local { ordinals: has }, GpuSpec::Local { ordinals })
            if has.is_empty() || has.len() == ordinals.len() =>
        {
            // Where it has all, as many are found out by the new proxy.
            Ok(GpuSpec::Local { ordinals })
        }
        (GpuSpec::Local { ordinals }, GpuSpec::Soft { devices: 1, apart: false }) => {
            Ok(GpuSpec::Soft { devices: ordinals.len().max(1) as u32, apart: false })
        }
        // As many are found out by the new proxy.
        (GpuSpec::Local { .. }, to @ GpuSpec::Soft { .. })
        | (GpuSpec::Soft { .. }, to @ GpuSpec::Local { .. }) => Ok(to),
        (
            GpuSpec::Remote { .. },
            to @ (GpuSpec::Soft { apart: false, .. } | GpuSpec::Remote { .. }),
        )
        | (GpuSpec::Soft { apart: false, .. }, to @ GpuSpec::Remote { .. }) => Ok(to),
        (from, to) => Err(MoveError::Unsupported { from: from.to_string(), to: to.to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_control::job::FailureKind;
    use kedge_control::proxy::ControlError;

    #[test]
    fn devices_move_to_as_many() {
        let placed = |from: &str, to: &str| {
            let placed = place(&from.parse().unwrap(), to.parse().unwrap());
            placed.map(|to| to.to_string()).map_err(|error| error.to_string())
        };
        assert_eq!(placed("soft:2", "soft").unwrap(), "soft:2");
        assert_eq!(placed("soft:2:apart", "soft").unwrap(), "soft:2:apart");
        assert_eq!(placed("local:2,3", "local").unwrap(), "local:2,3");
        assert_eq!(placed("local:2", "local:5").unwrap(), "local:5");
        assert_eq!(placed("local", "local:5").unwrap(), "local:5");
        assert_eq!(placed("local:2,3", "soft").unwrap(), "soft:2");
        assert_eq!(placed("local", "soft").unwrap(), "soft");
        assert_eq!(placed("soft:2", "local:2,3").unwrap(), "local:2,3");
        assert_eq!(placed("soft", "there:9/0").unwrap(), "there:9/0");
        assert_eq!(placed("there", "soft").unwrap(), "soft");
        assert_eq!(placed("there", "elsewhere").unwrap(), "elsewhere:7531");
        assert!(placed("there", "a/0,soft").is_err());
        let never = place(&"soft:2".parse().unwrap(), "soft:3".parse().unwrap()).unwrap_err();
        assert_eq!(never.kind(), FailureKind::Refused);
        assert_eq!(MoveError::NoClients.kind(), FailureKind::Failed);
        let source = ControlError::Nonsense;
        assert_eq!(MoveError::Lost { pid: 1, source }.kind(), FailureKind::Lost);
        for (from, to) in [
            ("soft:2", "soft:3"),
            ("local:0", "local:0,1"),
            ("soft", "soft:apart"),
            ("local", "there"),
        ] {
            assert!(placed(from, to).unwrap_err().contains(&format!("on {from}")), "{from} {to}");
        }
    }
}
