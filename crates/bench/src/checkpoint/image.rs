//! The images of what is measured.

use kedge_image::{Codec, ImageFile, Manifest};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

/// How long an image may take to become durable.
const DURABLE_TIMEOUT: Duration = Duration::from_secs(300);

/// Bytes that the disk has room for.
pub(super) fn room(dir: &Path) -> u64 {
    rustix::fs::statvfs(dir).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Returns whether the image is one.
pub(super) fn durable(image: &Path) -> bool {
    Manifest::read(image).is_ok()
}

/// Returns when the image is one: seconds from `begin` until it was.
pub(super) fn settle(image: &Path, begin: SystemTime) -> Result<f64, String> {
    let end = Instant::now() + DURABLE_TIMEOUT;
    while !durable(image) {
        if Instant::now() > end {
            return Err(format!("{} does not become durable", image.display()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let since = fs::metadata(image.join("manifest.json")).and_then(|known| known.modified());
    let since = since.map_err(|error| error.to_string())?;
    Ok(since.duration_since(begin).unwrap_or_default().as_secs_f64())
}

/// Bytes of the devices' memory that the image holds itself.
pub(super) fn stored(image: &Path) -> Result<u64, String> {
    let manifest = Manifest::read(image).map_err(|error| error.to_string())?;
    let files = manifest.files.iter().filter(|file| file.name.starts_with("gpu-"));
    let mut bytes = 0;
    for entry in files {
        let file = ImageFile::open(&image.join(&entry.name), Some(entry));
        let file = file.map_err(|error| error.to_string())?;
        let own = file.memory().filter(|extent| extent.codec != Codec::Parent);
        bytes += own.map(|extent| extent.decoded).sum::<u64>();
    }
    Ok(bytes)
}

/// Removes the images of a round.
pub(super) fn empty(dir: &Path) -> Result<(), String> {
    let entries = fs::read_dir(dir).map_err(|error| error.to_string())?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    paths.try_for_each(fs::remove_dir_all).map_err(|error| error.to_string())
}
