//! What a part's folder says of it.

use super::plan::number_of;
use super::reading;
use super::touch::Touch;
use crate::job::jobs::{Meta, read_meta};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// From one look to the next.
const LOOK: Duration = Duration::from_millis(200);

/// Looks at the part's folder once in a while, in a thread of its own: its file system may be cut
/// off with the host, and who keeps the fence's clock must not wait for it.
pub(super) struct Noting {
    pub(super) folder: PathBuf,
    pub(super) touch: Touch,
}

impl Noting {
    /// Goes on for as long as the process; `image` is what the part was brought back from.
    pub(super) fn keep(
        self,
        meta: Arc<Mutex<Option<Meta>>>,
        image: Option<PathBuf>,
    ) -> io::Result<()> {
        let look = move || {
            let mut known: Vec<PathBuf> = image.into_iter().collect();
            loop {
                if let Some(found) = read_meta(&self.folder) {
                    *meta.lock().unwrap_or_else(PoisonError::into_inner) = Some(found);
                }
                let new = noted(&self.folder).into_iter().filter(|part| !known.contains(part));
                let new: Vec<PathBuf> = new.collect();
                new.iter().filter_map(|part| part.parent()).for_each(|whole| self.learn(whole));
                known.extend(new);
                thread::sleep(LOOK);
            }
        };
        thread::Builder::new().name("notes".into()).spawn(look).map(drop)
    }

    /// Parts of which nothing was heard before they were lost are known by an image that was made
    /// since this warden began.
    fn learn(&self, whole: &Path) {
        let numbers: Vec<u32> =
            reading::parts(whole).iter().filter_map(|part| number_of(part)).collect();
        let mut known = self.touch.known();
        numbers.into_iter().for_each(|number| known.learn(number));
    }
}

/// The images that the part in that folder has noted.
pub(super) fn noted(folder: &Path) -> Vec<PathBuf> {
    let noted = fs::read(folder.join("images.json")).ok();
    noted.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}
