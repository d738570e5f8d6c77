//! The near end's links for the bytes of images: each has connections of its own, so that it holds
//! up nothing, and goes on over their cuts.

use super::near::Near;
use kedge_remote::{
    Aside, Dialer, FIRST_IMAGE, FrameError, ImageAsk, ImageLineError, Links, Receiver, Sender,
    SessionKey, Which, write_one,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The far end may be silent for so long while it reads what it has captured.
const SILENCE: Duration = Duration::from_secs(120);
/// Bytes that the far end may have asked for and not taken: each of its threads waits for one
/// chunk.
const UNTAKEN: usize = 1 << 30;

/// Where a session's images cross.
#[derive(Clone)]
pub(crate) struct ImageWay {
    near: Arc<Near>,
    key: SessionKey,
    reconnect: Duration,
    next: Arc<AtomicU32>,
}

/// A link for an image's bytes.
pub(crate) struct ImageStream {
    pub(crate) reading: Receiver<Dialer>,
    /// For answers: it fails where they are not taken.
    pub(crate) writing: Sender,
    pub(crate) end: ImageEnd,
}

/// Ends the link, here and there.
pub(crate) struct ImageEnd {
    near: Arc<Near>,
    links: Arc<Links>,
    link: u32,
}

impl ImageWay {
    pub(super) fn new(near: Arc<Near>, key: SessionKey, reconnect: Duration) -> ImageWay {
        ImageWay { near, key, reconnect, next: Arc::new(FIRST_IMAGE.into()) }
    }

    /// Opens a link and says what for. It has its first connection once somebody reads.
    pub(crate) fn open(&self, ask: &ImageAsk) -> Result<ImageStream, ImageLineError> {
        let links = Links::single(None).map_err(FrameError::from)?;
        let link = self.next.fetch_add(1, Ordering::SeqCst);
        let end = ImageEnd { near: self.near.clone(), links: links.clone(), link };
        let dialer = Dialer::new(self.near.server(), self.key, link, self.reconnect, |_| ());
        let reading = Receiver::new(links.clone(), Which::Line, dialer);
        reading.set_patience(Some(SILENCE));
        let mut writing = Sender::limited(links, Which::Line, UNTAKEN);
        write_one(&mut writing, ask).map_err(FrameError::from)?;
        Ok(ImageStream { reading, writing, end })
    }
}

impl ImageEnd {
    /// What sends bytes of any number by the link, and waits for room: somebody must read it.
    pub(super) fn sender(&self) -> Sender {
        Sender::waiting(self.links.clone(), Which::Line)
    }
}

impl Drop for ImageEnd {
    fn drop(&mut self) {
        self.links.end();
        self.near.say(&Aside::ImageOver { link: self.link });
    }
}
