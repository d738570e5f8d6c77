//! The executor whose devices are in this process: a dispatcher and its backend.

use crate::capture::Capture;
use crate::changes::Tracked;
use crate::dispatch::Dispatcher;
use crate::error::CaptureError;
use crate::executor::Holding;
use crate::executor::{Build, Captured, Executor, NearEnd, Nearby, NewFiles, Room, Shares, Stored};
use crate::host::ProxyHost;
use crate::moving::{Follows, Shown};
use crate::source::ShownHere;
use crate::wait::until;
use kedge_control::sharing::{Bond, What};
use kedge_device::{Backend, Known, SnapshotError};
use kedge_device_nvidia::CacheLimits;
use kedge_image::{Choice, ImageWriter, SumSink};
use kedge_protocol::PeerName;
use kedge_transport::{Incoming, processors_to_spare};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long to look for messages while the client waits for a GPU: what comes next follows at once,
/// and to wake a thread takes longer than many kernels.
const WAITED: Duration = Duration::from_millis(2);

pub(crate) struct Local {
    dispatcher: Dispatcher,
    host: Arc<ProxyHost>,
    tracking: Arc<Tracking>,
    limits: CacheLimits,
    /// Software devices would be in the way of a thread that spins for long, and it in theirs.
    spins: bool,
}

impl Local {
    pub(crate) fn new(dispatcher: Dispatcher, host: Arc<ProxyHost>, limits: CacheLimits) -> Local {
        let backend = dispatcher.shared_backend();
        let of_gpus = backend.devices().iter().all(|device| !device.exact);
        let tracking = Arc::new(Tracking { backend, tracked: Mutex::default() });
        Local { dispatcher, host, tracking, limits, spins: of_gpus && processors_to_spare() }
    }
}

impl Local {
    /// The same, for a client on another machine.
    pub(crate) fn of_far_client(mut self) -> Local {
        self.dispatcher.sharing.far = true;
        self
    }

    pub(crate) fn backend(&self) -> Arc<dyn Backend> {
        self.dispatcher.shared_backend()
    }

    /// Takes what the devices hold. All rests, and the client stands still.
    pub(crate) fn take(&mut self, near: &NearEnd<'_>, on: Build) -> Result<Taken, CaptureError> {
        let tracked = self.tracking.take(on.track)?.map(|mut tracked| {
            tracked.build_on(on.parent);
            tracked
        });
        let capture = Capture::take(&self.dispatcher, near, tracked)?;
        Ok(Taken { capture, tracking: self.tracking.clone(), limits: self.limits })
    }
}

impl Executor for Local {
    #[inline]
    fn execute(&mut self, incoming: Incoming) {
        self.dispatcher.dispatch(incoming);
    }

    fn flush(&mut self) -> Duration {
        self.host.publish_progress();
        Duration::ZERO
    }

    fn spin(&self, spin: Duration) -> Duration {
        let waited = self.host.waiting.load(Ordering::Relaxed) > 0;
        if waited && self.spins { spin.max(WAITED) } else { spin }
    }

    fn rest(&mut self, limit: Duration) -> bool {
        // What is not on the devices is not at rest there.
        self.dispatcher.try_come_back() && until(limit, || self.dispatcher.at_rest())
    }

    fn room(&self) -> Arc<dyn Room> {
        self.tracking.clone()
    }

    fn capture(
        &mut self,
        near: &NearEnd<'_>,
        on: Build,
    ) -> Result<Box<dyn Captured>, CaptureError> {
        self.take(near, on).map(|taken| Box::new(taken) as Box<dyn Captured>)
    }

    fn show(
        &mut self,
        near: &NearEnd<'_>,
        follows: Follows,
    ) -> Result<Box<dyn Shown>, CaptureError> {
        self.dispatcher.sharing.check_movable()?;
        let tracked = match follows {
            Follows::Here(tracked) => tracked,
            Follows::Nothing | Follows::There => Tracked::to_move().map_err(CaptureError::Keys)?,
        };
        let capture = Capture::take_to_move(&self.dispatcher, near, tracked)?;
        Ok(Box::new(ShownHere::new(capture)))
    }

    fn shares(&mut self) -> Result<Shares, SnapshotError> {
        let sharing = &mut self.dispatcher.sharing;
        Ok(Shares { shares: sharing.shares()?, released: sharing.released() })
    }

    fn adopt(&mut self, what: What) -> Result<PeerName, SnapshotError> {
        self.dispatcher.adopt(what)
    }

    fn bind(&mut self, borrows: Vec<Bond>) {
        self.dispatcher.sharing.bind(borrows);
    }

    fn swap_out(&mut self) -> Result<u64, CaptureError> {
        self.dispatcher.leave(self.limits)
    }
}

/// What the next capture can build on. It goes with a capture, and is lost with one that fails:
/// then the next is a whole one.
struct Tracking {
    backend: Arc<dyn Backend>,
    tracked: Mutex<Option<Tracked>>,
}

impl Tracking {
    /// Takes it, for a capture that is to follow changes.
    fn take(&self, track: bool) -> Result<Option<Tracked>, CaptureError> {
        if !track {
            return Ok(None);
        }
        let tracked = self.tracked.lock().unwrap_or_else(PoisonError::into_inner).take();
        tracked.map_or_else(Tracked::new, Ok).map(Some).map_err(CaptureError::Keys)
    }

    fn put(&self, tracked: Tracked) {
        *self.tracked.lock().unwrap_or_else(PoisonError::into_inner) = Some(tracked);
    }
}

impl Room for Tracking {
    fn prepare(&self, track: bool, full: bool) -> Result<(), CaptureError> {
        let known = self.take(track)?.map(|tracked| {
            let known = if full { tracked.nothing_known() } else { Arc::clone(tracked.known()) };
            self.put(tracked);
            known
        });
        Ok(kedge_device::snapshots(&*self.backend)?.prepare_snapshot(known.as_deref())?)
    }

    fn prepare_round(&self, known: &Known) -> Result<(), CaptureError> {
        Ok(kedge_device::snapshots(&*self.backend)?.prepare_snapshot(Some(known))?)
    }

    fn used(&self, device: u32) -> Option<u64> {
        self.backend.used_memory(device)
    }
}

/// A capture of devices in this process.
pub(crate) struct Taken {
    capture: Capture,
    tracking: Arc<Tracking>,
    limits: CacheLimits,
}

impl Taken {
    /// Writes it by `writer`.
    pub(crate) fn write_by(
        self,
        writer: ImageWriter,
        codec: Choice,
    ) -> Result<Stored, CaptureError> {
        let Taken { capture, tracking, .. } = self;
        let (stored, tracked) = capture.write(writer, codec)?;
        if let Some(tracked) = tracked {
            tracking.put(tracked);
        }
        Ok(stored)
    }
}

impl Captured for Taken {
    fn bytes(&self) -> u64 {
        self.capture.bytes()
    }

    fn write(self: Box<Self>, to: NewFiles, codec: Choice) -> Result<Stored, CaptureError> {
        // A restart soon after takes a tenth of the time that reading from a disk takes.
        self.write_by(ImageWriter::to_file(to.own, to.name)?, codec)
    }

    fn measure(self: Box<Self>, codec: Choice) -> Result<Stored, CaptureError> {
        let writer = ImageWriter::elsewhere("what is measured", Box::<SumSink>::default())?;
        // What a tracked capture followed is not put back: no image can build on none.
        Ok(self.capture.write(writer, codec)?.0)
    }

    fn nearby(&self) -> Result<&dyn Nearby, &'static str> {
        Ok(self)
    }
}

impl Nearby for Taken {
    fn hold(&self) -> Result<Holding, CaptureError> {
        self.capture.hold(self.limits)
    }
}
