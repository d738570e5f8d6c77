//! Captures of devices on another machine, at the near end: they lie at the far end until they are
//! written here, by a link of their own.

use super::image_way::{ImageStream, ImageWay};
use super::near::Near;
use crate::error::CaptureError;
use crate::executor::{Captured, Nearby, NewFiles, Room, Stored};
use kedge_device::Drained as FromDevices;
use kedge_image::{Choice, FileEntry, ImageError, ImageFile, check_new};
use kedge_remote::{Arrived, Aside, Drained, ImageAsk, ImageLineError, read_one, receive_file};
use kedge_wire::Text;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Longest last word.
const MAX_LAST: usize = 8 << 10;
/// A file may be so much longer than twice what was captured: it has the record as well, and what
/// fills pages up.
const MORE: u64 = 1 << 30;

/// Makes room at the far end.
pub(crate) struct FarRoom(pub(crate) ImageWay);

impl Room for FarRoom {
    fn prepare(&self, track: bool, full: bool) -> Result<(), CaptureError> {
        let ImageStream { mut reading, end: _end, .. } =
            self.0.open(&ImageAsk::Prepare { track, full })?;
        match read_one(&mut reading, MAX_LAST).map_err(ImageLineError::from)? {
            Drained::Done { .. } => Ok(()),
            Drained::Failed { why } => Err(ImageLineError::Far(why.into_inner()).into()),
            Drained::Piece { .. } => {
                Err(ImageLineError::Far("it sends a file that nobody asked for".into()).into())
            }
        }
    }
}

/// A capture that lies at the far end.
pub(crate) struct FarCapture {
    pub(crate) way: ImageWay,
    pub(crate) near: Arc<Near>,
    pub(crate) number: u64,
    pub(crate) bytes: u64,
}

impl Captured for FarCapture {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn write(self: Box<Self>, to: NewFiles, codec: Choice) -> Result<Stored, CaptureError> {
        let NewFiles { name, own: file, .. } = to;
        let path = Path::new(&name);
        check_new(&file, path)?;
        let at = |source| ImageError::Io { path: path.to_owned(), source };
        let Arrived { bytes, checksum, builds, drained, drained_us } =
            self.drain(&file, codec).map_err(|error| match error {
                ImageLineError::Store(source) => at(source).into(),
                other => CaptureError::from(other),
            })?;
        let entry = FileEntry { name: name.clone(), bytes, checksum };
        // What has come is what a restart will want.
        ImageFile::of_descriptor(file, path, Some(&entry))?;
        let time = Duration::from_micros(drained_us);
        let drained = FromDevices { bytes: drained, time };
        Ok(Stored { entry, beside: Vec::new(), builds, drained })
    }

    fn nearby(&self) -> Result<&dyn Nearby, &'static str> {
        Err("its devices are on another host")
    }
}

impl FarCapture {
    fn drain(&self, file: &File, codec: Choice) -> Result<Arrived, ImageLineError> {
        let (number, codec) = (self.number, Text::truncated(codec.to_string()));
        let ImageStream { reading, end: _end, .. } =
            self.way.open(&ImageAsk::Drain { number, codec })?;
        let most = self.bytes.saturating_mul(2).saturating_add(MORE);
        receive_file(reading, file, most)
    }
}

impl Drop for FarCapture {
    /// What was written is not there any more either.
    fn drop(&mut self) {
        self.near.say(&Aside::Forget { number: self.number });
    }
}
