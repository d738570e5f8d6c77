//! Paths that lead elsewhere: forged in an image, or exchanged by who may write in a folder of the
//! job's. Nothing outside of what the job had is read, made, changed or removed. Two users and root
//! are needed, so these tests fail for anybody but root.

use crate::hostile_images::{Captured, rewritten};
use kedge_image::{ImageFile, Manifest};
use kedge_tests::copy_program;
use kedge_tests::job::{User, build, kedge_as};
use kedge_tests::place::Place;
use kedge_tests::world::{is_root, stderr};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// The section of a job's file that has its descriptors.
const DESCRIPTORS: u64 = 2;

impl Captured {
    /// A copy whose descriptors are told otherwise.
    fn opened(&self, name: &str, forge: impl FnOnce(&mut Value)) -> PathBuf {
        let copy = self.copy(name);
        let mut manifest = Manifest::read(&copy).unwrap();
        let place = manifest.files.iter().position(|file| file.name == "job.kimg").unwrap();
        let old = ImageFile::open(&copy.join("job.kimg"), Some(&manifest.files[place])).unwrap();
        let new = copy.join("new.kimg");
        manifest.files[place] = rewritten(&old, &new, DESCRIPTORS, forge);
        fs::rename(new, copy.join("job.kimg")).unwrap();
        manifest.files[place].name = "job.kimg".to_owned();
        manifest.write(&copy).unwrap();
        self.own(&copy);
        copy
    }
}

/// The state of the plugin for files: what it has of the file whose path ends so.
fn inode<'a>(descriptors: &'a mut Value, end: &str) -> &'a mut Value {
    let states = descriptors["states"].as_array_mut().unwrap();
    let files = states.iter_mut().find(|state| state["plugin"] == "files").unwrap();
    let mut inodes = files["state"].as_array_mut().unwrap().iter_mut();
    inodes.find(|inode| inode["path"].as_str().unwrap().contains(end)).expect("such a file")
}

/// Kind and mode, owner, time of the last change, contents.
type What = (u32, u32, (i64, i64), Vec<u8>);

/// All that is in a folder, and itself.
fn all_of(folder: &Path) -> BTreeMap<PathBuf, What> {
    let mut all = BTreeMap::new();
    let inside = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    for path in inside.chain([folder.to_owned()]) {
        let found = path.symlink_metadata().unwrap();
        let contents = if found.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
        let changed = (found.mtime(), found.mtime_nsec());
        all.insert(path, (found.mode(), found.uid(), changed, contents));
    }
    all
}

/// A folder of files of `user`'s by the names that the job's have, which nobody else may look into.
fn victim(place: &Place, user: u32) -> PathBuf {
    let victim = place.world.0.join("victim");
    fs::create_dir(&victim).unwrap();
    for name in ["data", "shown", "data-journal", "data-wal"] {
        let path = victim.join(name);
        fs::write(&path, "precious").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        chown(path, Some(user), Some(user)).unwrap();
    }
    fs::set_permissions(&victim, Permissions::from_mode(0o700)).unwrap();
    chown(&victim, Some(user), Some(user)).unwrap();
    victim
}

#[test]
fn paths_of_an_image_that_lead_elsewhere_are_refused() {
    let captured = Captured::by(User::Nobody, "hipath");
    let world = captured.place.world.0.clone();
    let victim = victim(&captured.place, 0);
    let before = all_of(&victim);
    let data = captured.open("data").display().to_string();
    let up = format!("{}/../victim/data", world.join("open").display());
    let long = format!("{}/{}", world.display(), "n".repeat(300));
    let deep = format!("{}/{}", world.display(), "n/".repeat(6000));
    let paths = ["data", "./data", "../data", "", &up, "/..", &long, &deep, "/a\0b"];
    let forge = |number: usize, forged: &mut Value| {
        let path = json!(paths[number]);
        let inode = inode(forged, "/data");
        inode["opened"][0]["path"] = path.clone();
        inode["path"] = path;
    };
    for (number, path) in paths.iter().enumerate() {
        let image = captured.opened(&format!("path-{number}"), |forged| forge(number, forged));
        for user in [User::Same, User::Nobody] {
            captured.refused(user, &image, "");
        }
        // As root's own, with root's rights.
        give_to_root(&image);
        captured.refused(User::Same, &image, "");
        assert_eq!(all_of(&victim), before, "{path:?}");
    }
    // Contents that are no file of the image.
    let names = ["../manifest.json", "/etc/shadow", "..", ".", "a\0b", "manifest.json", &long];
    for (number, name) in names.iter().enumerate() {
        let image = captured.opened(&format!("contents-{number}"), |forged| {
            inode(forged, "/ghost")["contents"] = json!(name);
        });
        captured.refused(User::Same, &image, "");
        let image = captured.opened(&format!("listed-{number}"), |forged| {
            forged["files"].as_array_mut().unwrap().push(json!(name));
            inode(forged, "/ghost")["contents"] = json!(name);
        });
        captured.refused(User::Same, &image, "");
        captured.refused(User::Nobody, &image, "");
    }
    // What lies beside a database is known by three names.
    let image = captured.opened("companions", |forged| {
        inode(forged, "/data")["companions"] = json!(["/../../victim/data", data]);
    });
    captured.goes_on(User::Same, &image, 65534);
    assert_eq!(all_of(&victim), before);
    // Working folder and program.
    for (number, path) in paths.iter().enumerate() {
        let image = captured.forged(&format!("cwd-{number}"), |state| state["cwd"] = json!(path));
        captured.refused(User::Same, &image, "");
        let image = captured.forged(&format!("exe-{number}"), |state| {
            state["exe"]["path"] = json!(path);
        });
        captured.refused(User::Nobody, &image, "");
    }
}

fn give_to_root(image: &Path) {
    for entry in fs::read_dir(image).unwrap() {
        lchown(entry.unwrap().path(), Some(0), Some(0)).unwrap();
    }
    chown(image, Some(0), Some(0)).unwrap();
}

#[test]
fn a_manifest_whose_files_lie_elsewhere_is_refused() {
    let captured = Captured::by(User::Nobody, "himani");
    let other = captured.copy("other");
    let outside = format!("../{}/job.kimg", other.file_name().unwrap().display());
    let absolute = other.join("job.kimg").display().to_string();
    let long = "n".repeat(300);
    let names = [&*outside, &absolute, "..", ".", "", "./job.kimg", "a\0b", &long];
    for (number, name) in names.iter().enumerate() {
        let tell = |what: &'static str| {
            let name = (*name).to_owned();
            captured.told(&format!("{what}-{number}"), move |manifest| match what {
                "file" => manifest.files[0].name = name,
                "another" => {
                    let mut file = manifest.files[0].clone();
                    file.name = name;
                    manifest.files.push(file);
                }
                "parent" => {
                    let mut parent = manifest.as_parent(Path::new("/a/other")).unwrap();
                    parent.name = name;
                    manifest.parent = Some(parent);
                }
                _ => {
                    let mut part = kedge_image::Part::of("p", manifest);
                    part.name = name;
                    manifest.parts = vec![part];
                }
            })
        };
        // A file that nobody asks for is only kept out of other folders.
        let plain = !name.is_empty() && !name.contains('/') && !name.starts_with('.');
        let another = (!plain).then_some("another");
        for what in ["file", "parent", "part"].into_iter().chain(another) {
            let image = tell(what);
            for user in [User::Same, User::Nobody] {
                captured.refused(user, &image, "");
            }
        }
    }
}

/// A job of `by` whose things lie in a folder of `whose`, where all may write; captured and killed.
struct Spread {
    place: Place,
    image: PathBuf,
    nonce: String,
    /// The folder, and where it is put while a link has its name.
    theirs: PathBuf,
    away: PathBuf,
    victim: PathBuf,
    whose: u32,
}

impl Spread {
    fn new(by: User, whose: User, name: &str) -> Spread {
        assert!(is_root(), "run these tests as root: they need root and two other users");
        let place = Place::new(name, by).expect("root can be anybody");
        let whose = whose.id();
        let around = place.world.0.join("around");
        let theirs = around.join("theirs");
        fs::create_dir_all(&theirs).unwrap();
        for (folder, mode) in [(&around, 0o755), (&theirs, 0o777)] {
            fs::set_permissions(folder, Permissions::from_mode(mode)).unwrap();
            chown(folder, Some(whose), Some(whose)).unwrap();
        }
        let built = build(&place.world, "spread", &[]);
        let program = place.world.home().join("program");
        copy_program(&built, &program);
        let [program, folder] = [&program, &theirs].map(|path| path.display().to_string());
        let mut job = place.run(&[], &[&program, "100", "10", &folder]);
        job.read_to(5);
        let image = place.checkpoint(&[]);
        let nonce = job.nonce.clone();
        // On a busy machine it may be over by now.
        job.stop();
        drop(job);
        let (victim, away) = (victim(&place, by.id()), around.join("away"));
        let spread = Spread { place, image, nonce, theirs, away, victim, whose };
        spread.change();
        spread
    }

    /// What the job had open is not as it was.
    fn change(&self) {
        for name in ["data", "shown"] {
            fs::write(self.theirs.join(name), "changed since").unwrap();
        }
    }

    /// Has a link to the victim's folder take the name.
    fn plant(&self) {
        // There it is the other user's from its first moment on: one of root's is followed.
        let link = self.theirs.with_file_name("link");
        symlink(&self.victim, &link).unwrap();
        lchown(&link, Some(self.whose), Some(self.whose)).unwrap();
        fs::rename(&self.theirs, &self.away).unwrap();
        fs::rename(&link, &self.theirs).unwrap();
    }

    fn restore(&self) {
        fs::remove_file(&self.theirs).unwrap();
        fs::rename(&self.away, &self.theirs).unwrap();
    }

    fn restart(&self) -> Output {
        let job = format!("spread-{}", self.nonce);
        let image = self.image.display().to_string();
        let arguments = ["restart", &image, "--job", &job];
        kedge_as(&self.place.world, self.place.user, &arguments).output().unwrap()
    }
}

#[test]
fn a_planted_link_gives_nothing_away() {
    for (by, whose, name) in
        [(User::Same, User::Nobody, "hispread"), (User::Nobody, User::Other, "hispreaduser")]
    {
        let spread = Spread::new(by, whose, name);
        let before = all_of(&spread.victim);
        // The folder itself, one above it, and the file alone.
        spread.plant();
        let output = spread.restart();
        spread.restore();
        assert_eq!(output.status.code(), Some(125), "{by:?}: {}", stderr(&output));
        assert!(stderr(&output).contains("symbolic link"), "{}", stderr(&output));
        assert_eq!(all_of(&spread.victim), before, "{by:?}: the folder");
        for name in ["data", "shown"] {
            let (path, aside) = (spread.theirs.join(name), spread.theirs.join("put-away"));
            fs::rename(&path, &aside).unwrap();
            symlink(spread.victim.join(name), &path).unwrap();
            lchown(&path, Some(spread.whose), Some(spread.whose)).unwrap();
            let output = spread.restart();
            fs::remove_file(&path).unwrap();
            fs::rename(&aside, &path).unwrap();
            assert_eq!(output.status.code(), Some(125), "{by:?}: {}", stderr(&output));
            assert!(stderr(&output).contains("symbolic link"), "{}", stderr(&output));
            assert_eq!(all_of(&spread.victim), before, "{by:?}: {name}");
        }
        // Without it, all comes back.
        let output = spread.restart();
        assert_eq!(output.status.code(), Some(7), "{by:?}: {}", stderr(&output));
        assert_eq!(fs::read(spread.theirs.join("data")).unwrap(), b"the job's");
    }
}

/// The user's own links, and root's where nobody else could put them, are followed.
#[test]
fn links_of_one_s_own_and_of_root_s_are_followed() {
    let spread = Spread::new(User::Nobody, User::Nobody, "hiown");
    for owner in [65534, 0] {
        fs::rename(&spread.theirs, &spread.away).unwrap();
        symlink(&spread.away, &spread.theirs).unwrap();
        lchown(&spread.theirs, Some(owner), Some(owner)).unwrap();
        let output = spread.restart();
        spread.restore();
        assert_eq!(output.status.code(), Some(7), "{owner}: {}", stderr(&output));
        assert_eq!(fs::read(spread.theirs.join("data")).unwrap(), b"the job's");
        spread.change();
    }
}

/// The folder is exchanged for the link again and again while the job is restarted.
#[test]
fn a_folder_that_is_exchanged_meanwhile_gives_nothing_away() {
    for (by, whose, name) in
        [(User::Same, User::Nobody, "hiswap"), (User::Nobody, User::Other, "hiswapuser")]
    {
        let spread = Spread::new(by, whose, name);
        let before = all_of(&spread.victim);
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let exchange = || {
                for pause in [100, 3_000, 900, 9_000, 300, 30_000].into_iter().cycle() {
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                    spread.plant();
                    thread::sleep(Duration::from_micros(pause / 3));
                    spread.restore();
                    thread::sleep(Duration::from_micros(pause));
                }
            };
            scope.spawn(exchange);
            let ended = catch_unwind(AssertUnwindSafe(|| {
                let (mut ran, mut refused) = (0, 0);
                for _ in 0..60 {
                    let output = spread.restart();
                    assert_eq!(all_of(&spread.victim), before, "{by:?}: {}", stderr(&output));
                    match output.status.code() {
                        Some(7) => ran += 1,
                        Some(125) => refused += 1,
                        _ => panic!("{output:?}"),
                    }
                    // The folder may be away just now.
                    for folder in [&spread.theirs, &spread.away] {
                        let data = folder.join("data");
                        if data.symlink_metadata().is_ok_and(|found| found.len() == 9) {
                            let _ = fs::write(data, "changed since");
                        }
                    }
                    if ran > 4 && refused > 4 {
                        return;
                    }
                }
                panic!("{ran} ran and {refused} were refused: no race");
            }));
            over.store(true, Ordering::Relaxed);
            ended.unwrap_or_else(|panic| resume_unwind(panic));
        });
    }
}
