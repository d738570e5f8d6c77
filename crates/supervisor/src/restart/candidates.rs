//! The images that a job may be restarted from.

use kedge_image::{ImageError, Manifest};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// With their folders.
pub(crate) type Candidates = Vec<(PathBuf, Manifest)>;

/// The image at `path`, or those in it, the newest first: all of one job and of one user.
pub(crate) fn candidates(path: &Path) -> Result<Candidates, ImageError> {
    match Manifest::read(path) {
        Ok(manifest) => return Ok(vec![(path.to_owned(), manifest)]),
        Err(ImageError::NoImage { .. }) => {}
        Err(other) => return Err(other),
    }
    let mut images = kedge_image::list(path)?;
    // An image is a program: who asks for the newest one does not ask for another user's instead.
    let owner = |folder: &Path| fs::symlink_metadata(folder).map(|found| found.uid()).ok();
    let first = images.first().map(|(folder, manifest)| (manifest.job.clone(), owner(folder)));
    images.retain(|(folder, manifest)| {
        first.as_ref().is_some_and(|(job, user)| *job == manifest.job && *user == owner(folder))
    });
    Ok(images)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::chown;

    #[test]
    fn an_image_of_another_user_takes_no_other_s_place() {
        let all = std::env::temp_dir().join(format!("kedge-candidates-{}", std::process::id()));
        let image = |number: u64| {
            let folder = all.join(format!("j-{number:04}"));
            fs::create_dir_all(&folder).unwrap();
            Manifest::new("j".into(), vec![], number).write(&folder).unwrap();
            folder
        };
        let [one, two, three] = [1, 2, 3].map(image);
        let found = || -> Vec<PathBuf> {
            candidates(&all).unwrap().into_iter().map(|(folder, _)| folder).collect()
        };
        assert_eq!(found(), [three.clone(), two.clone(), one.clone()]);
        let give = |folder: &Path| {
            let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
            let all = files.chain([folder.to_owned()]);
            all.for_each(|path| chown(path, Some(1234), None).unwrap());
        };
        // Root alone can make such ones.
        if rustix::process::geteuid().is_root() {
            give(&two);
            assert_eq!(found(), [three.clone(), one]);
            give(&three);
            assert_eq!(found(), [three, two]);
        }
        fs::remove_dir_all(&all).unwrap();
    }
}
