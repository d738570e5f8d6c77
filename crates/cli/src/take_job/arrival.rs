//! What arrives of a job: its images, file by file. All names are plain ones, all files are new,
//! and no image counts before its manifest is there, which comes last.

use super::standby::Standby;
use crate::output;
use kedge_image::{MANIFEST, Manifest};
use kedge_keys::Connection;
use kedge_process::plugins::PathMap;
use kedge_remote::{FrameError, SessionSecret, ToTaker, answer, hear};
use kedge_supervisor::Parts;
use kedge_supervisor::jobs::{JobName, Jobs, State};
use kedge_supervisor::policy;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// Between two words of whoever moves the job: a round may take long.
const SILENCE: Duration = Duration::from_secs(600);
/// In the folder of a job that arrives, locked by who takes it, until it may run here.
const ARRIVES: &str = "arrives";
/// Opens no link (open(2)).
const NO_LINK: i32 = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
/// Most images that a move brings.
const MAX_IMAGES: usize = 1000;
/// Most files of one image.
const MAX_FILES: usize = 100_000;

/// A job that arrives.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) job: JobName,
    /// Where its files are here: old and new.
    pub(super) paths: Vec<(PathBuf, PathBuf)>,
    /// What seals its streams.
    pub(super) secret: SessionSecret,
    /// Where its images go: a folder of its own in that of all images, which the host that it comes
    /// from may share, once the first one comes.
    pub(super) folder: PathBuf,
    /// Locked as long as nobody can have decided that the job runs here.
    arrives: Option<File>,
    /// Those that have come, by their folders.
    images: Vec<PathBuf>,
    files: usize,
    /// What is made of the job before its last image is here.
    standby: Prepared,
}

/// How far a job is made before its last image is here.
#[derive(Debug, Default)]
enum Prepared {
    /// Nothing is, so far.
    #[default]
    Not,
    /// As it was in the image that came last.
    So(Standby),
    /// It cannot be, or is not to be any more.
    Never,
}

/// One that is here, and the image that it is to be restarted from.
#[derive(Debug)]
pub(super) struct Arrived {
    pub(super) arrival: Arrival,
    pub(super) image: PathBuf,
}

impl Arrival {
    /// Receives images until the job is to be restarted; `None` where it stays.
    ///
    /// # Errors
    /// The line is lost: nothing is left of what has come.
    pub(super) fn receive(line: &mut Connection) -> io::Result<Option<Arrived>> {
        let mut arrival = None;
        match Arrival::hear_all(line, &mut arrival) {
            Ok(image) => {
                let images = image.zip(arrival);
                Ok(images.map(|(image, arrival)| Arrived { arrival, image }))
            }
            Err(error) => {
                arrival.map_or(Ok(()), |mut arrival| arrival.remove())?;
                Err(io::Error::other(error))
            }
        }
    }

    fn hear_all(
        line: &mut Connection,
        arrival: &mut Option<Arrival>,
    ) -> Result<Option<PathBuf>, FrameError> {
        line.stream().set_read_timeout(Some(SILENCE))?;
        loop {
            let word = hear(line)?;
            let done = match (word, &mut *arrival) {
                (ToTaker::Stay {}, Some(arrival)) => {
                    answer(line, arrival.remove().map_err(|error| error.to_string()))?;
                    return Ok(None);
                }
                (ToTaker::Hello { job, build, paths, secret }, none @ None) => {
                    let paths = paths.iter().map(|pair| (**pair).to_owned());
                    let begun = Arrival::begin(&job, &build, paths.collect(), secret);
                    begun.map(|begun| *none = Some(begun))
                }
                (ToTaker::Image { name }, Some(arrival)) => arrival.image(&name),
                (ToTaker::File { name, bytes }, Some(arrival)) => {
                    arrival.file(&name, bytes, line)?
                }
                (ToTaker::Standby { name }, Some(arrival)) => {
                    arrival.known(&name).map(|image| arrival.stand_by(&image))
                }
                (ToTaker::Check { name }, Some(arrival)) => {
                    arrival.known(&name).and_then(|image| arrival.check(&image))
                }
                (ToTaker::Restart { name }, Some(arrival)) => match arrival.known(&name) {
                    Ok(image) => return Ok(Some(image)),
                    Err(why) => Err(why),
                },
                _ => return Err(io::Error::from(io::ErrorKind::InvalidData).into()),
            };
            answer(line, done)?;
        }
    }

    /// Looks whether such a job may come here at all.
    fn begin(
        job: &str,
        build: &str,
        paths: Vec<String>,
        secret: SessionSecret,
    ) -> Result<Arrival, String> {
        let own = env!("CARGO_PKG_VERSION");
        if build != own {
            return Err(format!(
                "the job is of kedge {build}, and here is {own}: install the same on both hosts"
            ));
        }
        let job: JobName = job.parse().map_err(|bad| format!("{bad}"))?;
        let jobs = Jobs::open().map_err(|error| error.to_string())?;
        let goes_on = [State::Running, State::Unsupervised];
        let found = jobs.find(&job).filter(|meta| goes_on.contains(&meta.state));
        match found.map(|meta| meta.pid) {
            Some(None) => {
                return Err(format!(
                    "a job named {job} is being restarted here, by a move that has failed, say: \
                     try again in a moment"
                ));
            }
            Some(_) => return Err(format!("a job named {job} runs here already")),
            None => {}
        }
        let paths = paths.iter().map(|pair| crate::restart::pair(pair));
        let paths = paths.collect::<Result<_, _>>()?;
        let folder = policy::default_dir().map_err(|error| error.to_string())?;
        fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        sweep(&folder);
        let (arrives, images, standby) = (None, Vec::new(), Prepared::Not);
        Ok(Arrival { job, paths, secret, folder, arrives, images, files: 0, standby })
    }

    /// Begins an image.
    fn image(&mut self, name: &str) -> Result<(), String> {
        // Of another job's it could take no place, since it is new.
        if !is_plain(name) || !name.starts_with(&format!("{}.m", self.job)) {
            return Err(format!("`{name}` is no name of an image of {}", self.job));
        }
        if self.images.len() == MAX_IMAGES {
            return Err(format!("it has brought {MAX_IMAGES} images already"));
        }
        if self.images.is_empty() {
            let own =
                format!("{}-at-{}", name.rsplit_once('-').map_or(name, |both| both.0), host());
            let own = self.folder.join(own);
            create(&own)?;
            let marked = mark(&own);
            self.arrives = Some(marked.map_err(|error| format!("{}: {error}", own.display()))?);
            self.folder = own;
        }
        let folder = self.folder.join(name);
        create(&folder)?;
        self.images.push(folder);
        self.files = 0;
        Ok(())
    }

    /// Takes a file of the image that has begun last, whose bytes are read in any case.
    fn file(
        &mut self,
        name: &str,
        bytes: u64,
        line: &mut Connection,
    ) -> Result<Result<(), String>, FrameError> {
        let made = self.create(name);
        let mut left = bytes;
        let mut written = made;
        while left > 0 {
            let ToTaker::Chunk { bytes } = hear(line)? else {
                return Err(io::Error::from(io::ErrorKind::InvalidData).into());
            };
            let count = bytes.len() as u64;
            if count == 0 || count > left {
                return Err(io::Error::from(io::ErrorKind::InvalidData).into());
            }
            left -= count;
            written = written.and_then(|(mut file, path)| match file.write_all(&bytes) {
                Ok(()) => Ok((file, path)),
                Err(error) => Err(format!("{}: {error}", path.display())),
            });
        }
        Ok(written.and_then(|(file, path)| {
            file.sync_all().map_err(|error| format!("{}: {error}", path.display()))
        }))
    }

    fn create(&mut self, name: &str) -> Result<(File, PathBuf), String> {
        let folder = self.images.last().ok_or("no image has begun")?;
        if !is_plain(name) || self.files == MAX_FILES || folder.join(MANIFEST).exists() {
            return Err(format!("`{name}` is no file of an image"));
        }
        self.files += 1;
        let path = folder.join(name);
        let made = File::options().write(true).create_new(true).mode(0o600).open(&path);
        made.map(|file| (file, path.clone()))
            .map_err(|error| format!("{}: {error}", path.display()))
    }

    /// The folder of an image that has come.
    fn known(&self, name: &str) -> Result<PathBuf, String> {
        let image = self.folder.join(name);
        match self.images.contains(&image) {
            true => Ok(image),
            false => Err(format!("no image `{name}` has come")),
        }
    }

    /// Finds out whether the job could be restarted here, as far as that shows without doing it.
    fn check(&self, image: &Path) -> Result<(), String> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        kedge_image::verify(image, cores).map_err(|damage| {
            damage.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
        })?;
        let manifest = Manifest::read(image).map_err(|error| error.to_string())?;
        if manifest.devices.is_some() {
            Parts::find().map_err(|error| error.to_string())?;
        }
        kedge_process::check(image).map_err(|error| error.to_string())?;
        let paths = PathMap::new(self.paths.iter().cloned());
        let lacking = kedge_process::lacking(image, paths).map_err(|error| error.to_string())?;
        match lacking.is_empty() {
            true => Ok(()),
            false => Err(lacking.join("; ")),
        }
    }

    /// Makes the job as it is in an image, as far as its last one is not needed. Where that fails,
    /// it is not tried again: nothing is lost by it but time.
    fn stand_by(&mut self, image: &Path) {
        // Devices come with the last image.
        let has_devices = Manifest::read(image).map_or(true, |found| found.devices.is_some());
        let standby = match (std::mem::take(&mut self.standby), has_devices) {
            (Prepared::Not, false) => Standby::begin(self, image),
            (Prepared::So(standby), false) => standby.take_in(image),
            (Prepared::Not, true) => return,
            _ => Err("it has devices by now".to_owned()),
        };
        self.standby = match standby {
            Ok(standby) => Prepared::So(standby),
            Err(why) => {
                let job = &self.job;
                output::complain(&format!("{job}: not made before it stands still: {why}"));
                Prepared::Never
            }
        };
    }

    /// What is made of the job.
    pub(super) fn take_standby(&mut self) -> Option<Standby> {
        match std::mem::take(&mut self.standby) {
            Prepared::So(standby) => Some(standby),
            Prepared::Not | Prepared::Never => None,
        }
    }

    /// What has come is the job from here on: whoever takes it may be killed, and it stays.
    ///
    /// # Errors
    /// That is not known to be so on the disk.
    pub(super) fn stays(&mut self) -> io::Result<()> {
        fs::remove_file(self.folder.join(ARRIVES))?;
        File::open(&self.folder)?.sync_all()?;
        self.arrives = None;
        Ok(())
    }

    /// Removes what has come.
    pub(super) fn remove(&mut self) -> io::Result<()> {
        self.standby = Prepared::Never;
        if self.images.is_empty() {
            return Ok(());
        }
        // Each before those that it builds on.
        self.images.iter().rev().try_for_each(|image| match fs::remove_dir_all(image) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        })?;
        match fs::remove_file(self.folder.join(ARRIVES)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::remove_dir(&self.folder)
    }
}

/// Marks a folder as one that only arrives. It is never seen there without its lock.
fn mark(folder: &Path) -> io::Result<File> {
    let new = folder.join("arrives.new");
    let file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
    file.try_lock()?;
    fs::rename(&new, folder.join(ARRIVES))?;
    Ok(file)
}

/// Removes what takers on this host have left that were killed before the job could run here.
fn sweep(images: &Path) {
    let (end, own) = (format!("-at-{}", host()), rustix::process::geteuid().as_raw());
    let left = |entry: fs::DirEntry| {
        let folder = entry.path();
        // A link leads elsewhere, and is none of ours.
        let is_ours = entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == own)
            && entry.file_name().to_str().is_some_and(|name| name.ends_with(&end));
        let mark =
            || OpenOptions::new().read(true).custom_flags(NO_LINK).open(folder.join(ARRIVES));
        let mark = is_ours.then(mark)?.ok()?;
        mark.try_lock().ok()?;
        // A job that has just been decided to run here has no mark any more: this one was opened
        // before.
        (mark.metadata().ok()?.nlink() > 0).then_some((folder, mark))
    };
    for (folder, _mark) in fs::read_dir(images).into_iter().flatten().flatten().filter_map(left) {
        // What cannot be removed is tried again with the next job.
        let _ = fs::remove_dir_all(folder);
    }
}

/// Makes a new folder for this user alone.
fn create(folder: &Path) -> Result<(), String> {
    let made = DirBuilder::new().mode(0o700).create(folder);
    made.map_err(|error| format!("{}: {error}", folder.display()))
}

/// This host's name, as a part of a file's.
fn host() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let plain = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | '.');
    name.chars().filter(|letter| plain(*letter)).take(64).collect()
}

/// Whether it names something in a folder and nothing else.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\0'])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrival(name: &str) -> Arrival {
        let folder = std::env::temp_dir().join(format!("kedge-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let job = "sim".parse().unwrap();
        let (paths, arrives) = (vec![], None);
        let (images, standby) = (vec![], Prepared::Not);
        Arrival { job, paths, secret: [0; 32], folder, arrives, images, files: 0, standby }
    }

    #[test]
    fn names_lead_nowhere_else() {
        let mut arrival = arrival("arrival");
        for name in ["..", ".", "", "sim.m1/../x", "other.m1-0001", "/sim.m1", "sim-0001", ".sim.m"]
        {
            assert!(arrival.image(name).is_err(), "{name}");
        }
        assert!(arrival.create("1.kimg").is_err(), "no image has begun");
        let all = arrival.folder.clone();
        // That a host has it from which it comes is no matter.
        fs::create_dir(all.join("sim.m1-0001")).unwrap();
        arrival.image("sim.m1-0001").unwrap();
        assert_eq!(arrival.folder.parent(), Some(&*all));
        assert!(arrival.image("sim.m1-0001").is_err(), "it is there");
        for name in ["..", "a/b", "", ".hidden"] {
            assert!(arrival.create(name).is_err(), "{name}");
        }
        drop(arrival.create("1.kimg").unwrap());
        assert!(arrival.create("1.kimg").is_err(), "it is there");
        drop(arrival.create(MANIFEST).unwrap());
        assert!(arrival.create("2.kimg").is_err(), "nothing comes after a manifest");
        assert!(arrival.known("sim.m2-0001").is_err() && arrival.known("sim.m1-0001").is_ok());
        arrival.remove().unwrap();
        assert_eq!(fs::read_dir(&all).unwrap().count(), 1);
        fs::remove_dir_all(&all).unwrap();
    }

    #[test]
    fn what_a_killed_taker_has_left_is_swept() {
        let all = arrival("sweep").folder;
        let begin = |name: &str| {
            let (job, folder) = (name.split('.').next().unwrap().parse().unwrap(), all.clone());
            let mut arrival = Arrival { job, folder, ..arrival("sweep") };
            arrival.image(&format!("{name}-0001")).unwrap();
            drop(arrival.create("1.kimg").unwrap());
            arrival
        };
        // One that arrives, one whose taker was killed, one that may run, and the user's own.
        let (mut arriving, mut killed, mut may_run) =
            (begin("one.m1"), begin("two.m1"), begin("ran.m1"));
        killed.arrives = None;
        may_run.stays().unwrap();
        let own = all.join(format!("own.m1-at-{}", host()));
        fs::create_dir(&own).unwrap();
        sweep(&all);
        let is_there = |folder: &Path| folder.exists();
        assert!(is_there(&arriving.folder) && is_there(&may_run.folder) && is_there(&own));
        assert!(!is_there(&killed.folder));
        arriving.remove().unwrap();
        may_run.remove().unwrap();
        assert_eq!(fs::read_dir(&all).unwrap().count(), 1);
        fs::remove_dir_all(&all).unwrap();
    }

    #[test]
    fn another_version_s_job_does_not_come() {
        let refused = Arrival::begin("sim", "0.0.0", vec![], [0; 32]).unwrap_err();
        assert!(refused.contains("install the same"), "{refused}");
    }
}
