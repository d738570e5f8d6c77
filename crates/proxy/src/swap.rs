//! Swapping a client's device memory out, and in again: asked for, or because the client goes on.

use crate::away::{SwapOutFailure, SwappedOut};
use crate::dispatch::Dispatcher;
use crate::error::CaptureError;
use crate::error::RestoreError;
use kedge_control::{error, note, warn};
use kedge_cuda_types::CuError;
use kedge_device_nvidia::CacheLimits;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Between two tries to have memory again, at first and at most.
const FIRST: Duration = Duration::from_millis(10);
const LAST: Duration = Duration::from_millis(500);

impl Dispatcher {
    /// Takes the devices' memory off them, at rest: how many bytes.
    pub(crate) fn leave(&mut self, limits: CacheLimits) -> Result<u64, CaptureError> {
        self.sharing.check_private()?;
        if let Some(away) = &self.away {
            return Ok(away.bytes);
        }
        match SwappedOut::leave(self.shared_backend(), limits) {
            Ok(away) => {
                let bytes = away.bytes;
                note!(self.host().log, "{} MiB are off the devices", bytes >> 20);
                self.is_away(Some(away));
                Ok(bytes)
            }
            Err(SwapOutFailure { why, gone }) => {
                self.is_away(gone.map(|away| *away));
                self.come_back();
                Err(why)
            }
        }
    }

    /// Keeps what is off the devices, or that nothing is.
    fn is_away(&mut self, away: Option<SwappedOut>) {
        self.host().counts.swapped_out.store(away.is_some(), Ordering::Relaxed);
        self.away = away;
    }

    /// Brings it back if there is memory for it now; whether it is there.
    pub(crate) fn try_come_back(&mut self) -> bool {
        let Some(away) = self.away.take() else { return true };
        self.is_away(None);
        let begin = Instant::now();
        match away.come_back() {
            Ok(()) => {
                let (mib, ms) = (away.bytes >> 20, begin.elapsed().as_millis());
                note!(self.host().log, "{mib} MiB are on the devices again ({ms} ms)");
                true
            }
            Err(RestoreError::Device(error)) if error.code == CuError::OUT_OF_MEMORY => {
                self.is_away(Some(away));
                false
            }
            Err(error) => {
                error!(self.host().log, "the devices' memory is lost: {error}");
                for ctx in &self.contexts {
                    kedge_device::Host::fault(self.host(), *ctx, CuError::UNKNOWN);
                }
                true
            }
        }
    }

    /// Brings it back, as soon as there is memory for it: a client that goes on waits.
    #[cold]
    pub(crate) fn come_back(&mut self) {
        let mut pause = FIRST;
        while !self.try_come_back() {
            if pause == FIRST {
                warn!(
                    self.host().log,
                    "its memory does not fit on the devices: it waits until others have freed some"
                );
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LAST);
        }
    }
}
