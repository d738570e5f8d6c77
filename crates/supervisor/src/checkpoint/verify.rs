//! Reading back an image that was just written, before anything is done that relies on it.

use crate::services::control::Progress;
use kedge_gpu_image::check_places;
use kedge_image::{ImageError, ReadFrom};
use kedge_process::EngineError;
use std::path::Path;
use std::thread;
use thiserror::Error;

#[derive(Debug, Error)]
pub(crate) enum Unverified {
    #[error("{first}{}", others(*.more))]
    Damaged { first: Box<ImageError>, more: usize },
    #[error("a restart would refuse it: {0}")]
    Refused(#[from] EngineError),
}

fn others(more: usize) -> String {
    match more {
        0 => String::new(),
        more => format!(" (and {more} places more)"),
    }
}

/// Reads the image in `folder`, of about so many bytes, from its device, and as a restart would:
/// where it was read from.
///
/// # Errors
///
/// The first place that is damaged, or why a restart would refuse it.
pub(crate) fn read_back(
    folder: &Path,
    bytes: u64,
    tell: &mut impl FnMut(Progress),
) -> Result<String, Unverified> {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let mut told = |done| tell(Progress::Verifying { image: folder.to_owned(), done, bytes });
    told(0);
    let verified = kedge_image::verify_written(folder, threads, &mut told);
    let verified = verified.and_then(|good| check_places(folder).map(|()| good));
    let verified = verified.map_err(|errors| {
        let more = errors.len().saturating_sub(1);
        let none = || ImageError::NoImage { path: folder.to_owned() };
        let first = Box::new(errors.into_iter().next().unwrap_or_else(none));
        Unverified::Damaged { first, more }
    })?;
    kedge_process::check(folder)?;
    Ok(match verified.read_from {
        ReadFrom::Device => "device",
        ReadFrom::DroppedCache => "dropped cache",
        ReadFrom::Memory => "memory",
    }
    .to_owned())
}
