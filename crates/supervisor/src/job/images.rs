//! Which images a job can go back to, as its folder notes them.

use crate::job::files::replace;
use crate::job::jobs::{JobDir, JobError};
use kedge_image::Manifest;
use std::fs;
use std::path::{Path, PathBuf};

/// Most images that are noted: more than anybody goes back past.
const MAX_IMAGES: usize = 32;

/// The images that a job has made, or was restarted from: a file.
#[derive(Debug, Clone)]
pub(crate) struct Images(PathBuf);

impl Images {
    pub(crate) fn of(dir: &JobDir) -> Images {
        Images(dir.images())
    }

    /// Notes the newest one.
    pub(crate) fn add(&self, image: &Path) -> Result<(), JobError> {
        let mut all = self.read();
        all.retain(|known| known != image);
        all.push(image.to_owned());
        let old = all.len().saturating_sub(MAX_IMAGES);
        replace(&self.0, &all[old..].to_vec())
    }

    /// Those that are there, the newest first.
    pub(crate) fn all(&self) -> Vec<(PathBuf, Manifest)> {
        let found = self.read().into_iter().rev();
        found.filter_map(|path| Manifest::read(&path).ok().map(|read| (path, read))).collect()
    }

    pub(crate) fn newest(&self) -> Option<(PathBuf, Manifest)> {
        self.all().into_iter().next()
    }

    /// The oldest first.
    fn read(&self) -> Vec<PathBuf> {
        fs::read(&self.0)
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or_default()
    }
}
