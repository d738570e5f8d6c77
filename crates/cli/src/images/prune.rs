//! `kedge prune`.

use super::{date, name, real};
use crate::Failure;
use crate::output::{self, PLAIN, Table};
use crate::time::Time;
use clap::Args;
use kedge_control::size::Size;
use kedge_image::{Found, State, catalogue};
use kedge_supervisor::policy;
use rustix::process::geteuid;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

const AFTER_HELP: &str = "\
The oldest images go first. The newest finished image of each job stays, and so does every image \
that one which stays builds on, even if --max-size is exceeded. What a checkpoint left unfinished \
goes too; damaged images stay, for `kedge verify` and `kedge rm`. Of others' images none is \
touched, except by root.

Examples:
  kedge prune --older 7d                        what is older than a week
  kedge prune --max-size 200G /scratch/images   until the rest is 200 GiB at most
  kedge prune --keep 3 --dry-run                what would go if each job kept three";

/// Remove old checkpoint images by age, size and number
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
#[command(group = clap::ArgGroup::new("rule").required(true).multiple(true))]
pub(crate) struct PruneArgs {
    /// The folder that holds the images
    /// [default: $XDG_STATE_HOME/kedge/images, else ~/.local/state/kedge/images]
    #[arg(value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Remove images captured longer ago than this, such as 7d or 12h
    #[arg(long, value_name = "TIME", group = "rule")]
    older: Option<Time>,
    /// Remove the oldest until the images take this much at most, such as 200G
    #[arg(long, value_name = "SIZE", group = "rule")]
    max_size: Option<Size>,
    /// Keep this many of the newest images of each job: without another rule all others go, with
    /// one these are safe from it
    #[arg(long, value_name = "COUNT", group = "rule")]
    keep: Option<NonZeroUsize>,
    /// Remove nothing, but say what would go
    #[arg(long)]
    dry_run: bool,
    /// Print a JSON list of objects: image (its path), job, captured (seconds since 1970), bytes
    #[arg(long)]
    json: bool,
}

/// What is asked of [`to_go`].
#[derive(Debug, Clone, Copy)]
struct Rules {
    /// Captured before this time, in seconds since 1970.
    before: Option<u64>,
    max_bytes: Option<u64>,
    keep: Option<NonZeroUsize>,
}

/// A finished image.
#[derive(Debug, Clone, Serialize)]
struct Image {
    #[serde(rename = "image")]
    path: PathBuf,
    job: Option<String>,
    captured: Option<u64>,
    bytes: Option<u64>,
    #[serde(skip)]
    parent: Option<String>,
}

/// The positions of `images`, which are finished ones, the newest first, that the rules let go.
fn to_go(images: &[Image], rules: Rules) -> BTreeSet<usize> {
    let stays = staying(images, rules.keep.map_or(1, NonZeroUsize::get));
    let others = || (0..images.len()).filter(|at| !stays.contains(at));
    if rules.before.is_none() && rules.max_bytes.is_none() {
        return others().collect();
    }
    let old = |at: &usize| images[*at].captured < rules.before;
    let mut gone: BTreeSet<usize> =
        others().filter(|at| rules.before.is_some() && old(at)).collect();
    if let Some(most) = rules.max_bytes {
        let bytes = |at: usize| images[at].bytes.unwrap_or(0);
        let left = (0..images.len()).filter(|at| !gone.contains(at));
        let mut sum = left.map(bytes).fold(0, u64::saturating_add);
        for at in others().collect::<Vec<_>>().into_iter().rev() {
            if sum > most && gone.insert(at) {
                sum -= bytes(at).min(sum);
            }
        }
    }
    let stays = needed(images, (0..images.len()).filter(|at| !gone.contains(at)).collect());
    gone.retain(|at| !stays.contains(at));
    gone
}

/// The newest `keep` images of each job, and what these build on.
fn staying(images: &[Image], keep: usize) -> BTreeSet<usize> {
    let mut kept = BTreeMap::new();
    let newest = images.iter().enumerate().filter(|(_, image)| {
        let count = kept.entry(&image.job).or_insert(0);
        *count += 1;
        *count <= keep
    });
    let newest = newest.map(|(at, _)| at).collect();
    needed(images, newest)
}

/// `stay`, and all that these build on.
fn needed(images: &[Image], mut stay: BTreeSet<usize>) -> BTreeSet<usize> {
    let by_name: BTreeMap<_, _> =
        images.iter().enumerate().map(|(at, image)| (image.path.file_name(), at)).collect();
    let mut open: Vec<usize> = stay.iter().copied().collect();
    while let Some(at) = open.pop() {
        let parent = images[at].parent.as_ref().map(AsRef::as_ref);
        if let Some(parent) = parent.and_then(|parent| by_name.get(&Some(parent)))
            && stay.insert(*parent)
        {
            open.push(*parent);
        }
    }
    stay
}

/// The finished images in `dir` that are this user's to remove, and the unfinished.
fn own(dir: &Path) -> Result<(Vec<Image>, Vec<Image>), Failure> {
    let user = geteuid();
    let is_own = |folder: &Path| {
        user.is_root() || folder.symlink_metadata().is_ok_and(|it| it.uid() == user.as_raw())
    };
    let (mut finished, mut unfinished) = (Vec::new(), Vec::new());
    for Found { folder, state } in catalogue(dir)? {
        if !is_own(&folder) {
            continue;
        }
        let empty = Image { path: folder, job: None, captured: None, bytes: None, parent: None };
        match state {
            State::Finished(manifest) => finished.push(Image {
                captured: Some(manifest.captured),
                bytes: Some(manifest.bytes()),
                job: Some(manifest.job),
                parent: manifest.parent.map(|parent| parent.name),
                ..empty
            }),
            State::Unfinished => unfinished.push(empty),
            State::Damaged(_) | State::Writing => {}
        }
    }
    Ok((finished, unfinished))
}

pub(crate) fn run(args: &PruneArgs) -> Result<(), Failure> {
    let dir = match &args.dir {
        Some(dir) => real(dir)?,
        None => policy::default_dir()?,
    };
    let (finished, unfinished) = if dir.exists() { own(&dir)? } else { Default::default() };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let rules = Rules {
        before: args.older.map(|time| now.saturating_sub(time.0).as_secs()),
        max_bytes: args.max_size.map(|size| size.0),
        keep: args.keep,
    };
    let chosen = to_go(&finished, rules);
    let going: Vec<&Image> = chosen.iter().map(|at| &finished[*at]).chain(&unfinished).collect();
    if !args.dry_run {
        let folders: Vec<PathBuf> = going.iter().map(|image| image.path.clone()).collect();
        kedge_image::remove(&folders)?;
    }
    if args.json {
        return Ok(output::json(&going)?);
    }
    Ok(output::print(&told(&going, args.dry_run))?)
}

/// What has gone, or would, for people.
fn told(going: &[&Image], dry_run: bool) -> String {
    if going.is_empty() {
        return "nothing to remove\n".into();
    }
    let mut table = Table::new(&["IMAGE", "CAPTURED", "SIZE"], &[2]);
    for image in going {
        table.row([
            (PLAIN, output::harmless(&name(&image.path))),
            (PLAIN, image.captured.map(date).unwrap_or_default()),
            (PLAIN, image.bytes.map(|bytes| Size(bytes).to_string()).unwrap_or_default()),
        ]);
    }
    let bytes = going.iter().filter_map(|image| image.bytes).fold(0, u64::saturating_add);
    let verb = if dry_run { "would be removed" } else { "removed" };
    format!("{}{} {verb}, {}\n", table.render(), going.len(), Size(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn image(name: &str, captured: u64, bytes: u64, parent: Option<&str>) -> Image {
        Image {
            path: Path::new("/images").join(name),
            job: Some(name.split('-').next().unwrap_or_default().to_owned()),
            captured: Some(captured),
            bytes: Some(bytes),
            parent: parent.map(str::to_owned),
        }
    }

    /// Two jobs, the newest image first; b-2 builds on b-1.
    fn images() -> Vec<Image> {
        vec![
            image("b-2", 60, 1, Some("b-1")),
            image("a-3", 50, 10, None),
            image("a-2", 40, 10, None),
            image("b-1", 30, 10, None),
            image("b-0", 20, 10, None),
            image("a-1", 10, 10, None),
        ]
    }

    fn gone(rules: Rules) -> Vec<String> {
        let images = images();
        to_go(&images, rules).iter().map(|at| name(&images[*at].path)).collect()
    }

    const NONE: Rules = Rules { before: None, max_bytes: None, keep: None };

    #[test]
    fn the_newest_of_each_job_and_what_it_builds_on_stay() {
        assert_eq!(gone(Rules { before: Some(100), ..NONE }), ["a-2", "b-0", "a-1"]);
        assert_eq!(gone(Rules { max_bytes: Some(0), ..NONE }), ["a-2", "b-0", "a-1"]);
        assert_eq!(gone(Rules { keep: NonZeroUsize::new(1), ..NONE }), ["a-2", "b-0", "a-1"]);
        assert_eq!(gone(Rules { keep: NonZeroUsize::new(2), ..NONE }), ["b-0", "a-1"]);
    }

    #[test]
    fn age_and_size_take_the_oldest_and_no_more() {
        assert_eq!(gone(Rules { before: Some(20), ..NONE }), ["a-1"]);
        assert_eq!(gone(Rules { max_bytes: Some(41), ..NONE }), ["a-1"]);
        assert_eq!(gone(Rules { max_bytes: Some(40), ..NONE }), ["b-0", "a-1"]);
        assert_eq!(gone(Rules { max_bytes: Some(51), ..NONE }), [""; 0]);
        let both = Rules { before: Some(20), max_bytes: Some(41), keep: NonZeroUsize::new(3) };
        assert_eq!(gone(both), [""; 0]);
    }

    proptest! {
        /// Whatever is asked, no image that stays has lost what it builds on, and each job has one.
        #[test]
        fn what_stays_can_be_restarted(
            told in prop::collection::vec((0..4u8, any::<Option<u8>>(), 0..1000u64), 0..20),
            before in any::<Option<u8>>(),
            max_bytes in proptest::option::of(0..9000u64),
            keep in 0..4usize,
        ) {
            let count = told.len();
            let images: Vec<Image> = told.iter().enumerate().map(|(at, (job, parent, bytes))| {
                // An image builds on an older one, which stands behind it.
                let parent = parent.map(|it| at + 1 + usize::from(it) % 5).filter(|it| *it < count);
                let parent = parent.map(|it| format!("{}-{it}", told[it].0));
                image(&format!("{job}-{at}"), (count - at) as u64, *bytes, parent.as_deref())
            }).collect();
            let rules = Rules { before: before.map(u64::from), max_bytes, keep: NonZeroUsize::new(keep) };
            let gone = to_go(&images, rules);
            let stays: BTreeSet<usize> = (0..count).filter(|at| !gone.contains(at)).collect();
            prop_assert_eq!(&needed(&images, stays.clone()), &stays);
            let jobs = |of: &BTreeSet<usize>| -> BTreeSet<_> {
                of.iter().map(|at| images[*at].job.clone()).collect()
            };
            prop_assert_eq!(jobs(&stays), jobs(&(0..count).collect()));
        }
    }
}
