//! Which images a part can come back from: what it has noted, what others know of, and whether it
//! is as it was written. All of it may take long, and is done by a thread of its own.

use super::plan::{Image, number_of};
use crate::job::policy::Policy;
use kedge_image::{ImageError, Manifest, Part};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread;

/// Most images that are told of.
const MAX_IMAGES: usize = 8;

/// Images of the whole job whose part is one of `parts`, the newest first.
pub(super) fn known(parts: &[PathBuf]) -> Vec<Image> {
    let mut all: Vec<Image> = parts.iter().filter_map(|part| of_part(part)).collect();
    all.sort();
    all.dedup();
    all.reverse();
    all.truncate(MAX_IMAGES);
    all
}

fn of_part(part: &Path) -> Option<Image> {
    let folder = part.parent()?;
    let name = part.file_name()?.to_str()?.to_owned();
    let whole = Manifest::read(folder).ok()?;
    whole.parts.iter().find(|part| part.name == name)?;
    Some(Image { captured: whole.captured, folder: folder.to_owned(), part: name })
}

/// The names of the parts of an image.
pub(super) fn parts(folder: &Path) -> Vec<String> {
    let parts = Manifest::read(folder).map(|whole| whole.parts).unwrap_or_default();
    parts.into_iter().map(|part| part.name).collect()
}

/// What is being read.
#[derive(Debug)]
pub(super) struct Reading {
    pub(super) image: Image,
    /// Names of parts that are read for others.
    pub(super) others: Vec<String>,
    done: Receiver<Result<(), String>>,
}

impl Reading {
    /// Reads the part that is this warden's, to its last byte.
    pub(super) fn begin(image: Image) -> Reading {
        let own = [image.part.clone()].into_iter().filter(|part| !part.is_empty()).collect();
        Reading::of(image, own, Vec::new())
    }

    /// Reads parts that are nobody's.
    pub(super) fn for_others(folder: PathBuf, others: Vec<String>) -> Reading {
        let image = Image { captured: 0, folder, part: String::new() };
        Reading::of(image, others.clone(), others)
    }

    fn of(image: Image, parts: Vec<String>, others: Vec<String>) -> Reading {
        let (tell, done) = mpsc::channel();
        let folder = image.folder.clone();
        let is_others = !others.is_empty();
        let read = move || drop(tell.send(read(&folder, &parts, is_others)));
        // One that cannot be started has hung up.
        let _ = thread::Builder::new().name("reading".into()).spawn(read);
        Reading { image, others, done }
    }

    /// How it went, once it is done.
    pub(super) fn result(&self) -> Option<Result<(), String>> {
        match self.done.try_recv() {
            Ok(result) => Some(result),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err("no thread reads it".to_owned())),
        }
    }
}

/// Parts that are nobody's must have had a warden, which has stopped them by now.
fn read(folder: &Path, names: &[String], others: bool) -> Result<(), String> {
    let said = |error: ImageError| error.to_string();
    // Whoever names a folder names a program.
    check_owner(folder)?;
    let whole = Manifest::read(folder).map_err(said)?;
    for name in names {
        let part = whole.parts.iter().find(|part| part.name == *name);
        let part = part.ok_or_else(|| format!("{} has no part {name}", folder.display()))?;
        check_owner(&folder.join(name))?;
        check(folder, part)?;
        let had_warden = || -> Option<bool> {
            let part = Manifest::read(&folder.join(name)).ok()?;
            Some(Policy::of_image(&part).recover.is_some())
        };
        if others && had_warden() != Some(true) {
            return Err(format!("{name} was saved without --recover, and may run"));
        }
    }
    Ok(())
}

/// Sees that a folder is the user's, and that nobody else can write there.
pub(super) fn check_owner(folder: &Path) -> Result<(), String> {
    let found = fs::symlink_metadata(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() {
        return Err(format!("{} is no folder of this user's", folder.display()));
    }
    match found.mode() & 0o022 {
        0 => Ok(()),
        _ => Err(format!("{}: others than its user can write there", folder.display())),
    }
}

fn check(folder: &Path, part: &Part) -> Result<(), String> {
    let path = part.check(folder).map_err(|error| error.to_string())?;
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let failed = |errors: Vec<ImageError>| {
        errors.first().map_or_else(|| format!("{} is damaged", path.display()), ToString::to_string)
    };
    kedge_image::verify(&path, threads).map(drop).map_err(failed)
}

/// The folders of the image and of those of its parts.
pub(super) fn check_owners(folder: &Path, numbers: &[u32]) -> Result<(), String> {
    check_owner(folder)?;
    let names = parts(folder);
    let named = numbers.iter().filter_map(|number| names.get(*number as usize));
    named.map(|name| folder.join(name)).try_for_each(|part| check_owner(&part))
}

/// The name of the part `number` in the image: what this part would come back from that others
/// know of. Nothing, if it is in no part of it.
pub(super) fn own_part(folder: &Path, number: u32) -> String {
    parts(folder).into_iter().find(|part| number_of(part) == Some(number)).unwrap_or_default()
}
