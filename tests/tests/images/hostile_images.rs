//! Images that somebody has forged, exchanged or filled with what is no file: root gives away no
//! right by restarting them, and nothing of a third user's is touched. Two users' images and root
//! are needed, so these tests fail for anybody but root.

use kedge_image::layout::Kind;
use kedge_image::{Choice, Codec, Devices, Encoded, ImageFile, ImageWriter, Manifest, encode};
use kedge_tests::copy_program;
use kedge_tests::job::{Job, User, build, family, kedge_as};
use kedge_tests::place::Place;
use kedge_tests::world::{is_root, stderr};
use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

const STEPS: u64 = 60;

/// A job of `user`'s in a folder where all may work, captured and killed.
pub(crate) struct Captured {
    pub(crate) place: Place,
    image: PathBuf,
    nonce: String,
}

impl Captured {
    pub(crate) fn by(user: User, name: &str) -> Captured {
        assert!(is_root(), "run these tests as root: they need root and two other users");
        let place = Place::new(name, user).expect("root can be anybody");
        let open = place.world.0.join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, Permissions::from_mode(0o1777)).unwrap();
        fs::write(open.join("data"), "anybody's").unwrap();
        chown(open.join("data"), Some(user.id()), Some(user.id())).unwrap();
        let built = build(&place.world, "holds", &[]);
        let program = open.join("holds");
        copy_program(&built, &program);
        let at = |name: &str| open.join(name).display().to_string();
        let files = ["", "holds", "ghost", "data", "made"].map(at);
        let [folder, program, ghost, data, made] = files.each_ref().map(String::as_str);
        let steps = STEPS.to_string();
        let words = ["env", "-C", folder, program, &steps, "20", ghost, data, made];
        let mut job = place.run(&[], &words);
        job.read_to(5);
        let image = place.checkpoint(&[]);
        let nonce = job.nonce.clone();
        job.kill();
        // Killed in the middle of a step it may just have removed it.
        match fs::remove_file(open.join("made")) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            removed => removed.unwrap(),
        }
        let captured = Captured { place, image, nonce };
        captured.own(&captured.image);
        captured
    }

    /// Where all may work.
    pub(crate) fn open(&self, name: &str) -> PathBuf {
        self.place.world.0.join("open").join(name)
    }

    /// Gives an image, changed by this test, to the user whose job it was.
    pub(crate) fn own(&self, image: &Path) {
        let user = self.place.user.id();
        for entry in fs::read_dir(image).unwrap() {
            let path = entry.unwrap().path();
            std::os::unix::fs::lchown(path, Some(user), Some(user)).unwrap();
        }
        chown(image, Some(user), Some(user)).unwrap();
    }

    /// A copy of the image, beside it.
    pub(crate) fn copy(&self, name: &str) -> PathBuf {
        let to = self.image.with_file_name(name);
        let copied = Command::new("cp").arg("-a").arg(&self.image).arg(&to).status();
        assert!(copied.unwrap().success());
        to
    }

    /// A copy whose manifest says something else.
    pub(crate) fn told(&self, name: &str, tell: impl FnOnce(&mut Manifest)) -> PathBuf {
        let copy = self.copy(name);
        let mut manifest = Manifest::read(&copy).unwrap();
        tell(&mut manifest);
        manifest.write(&copy).unwrap();
        self.own(&copy);
        copy
    }

    /// A copy whose first process is told otherwise.
    pub(crate) fn forged(&self, name: &str, forge: impl FnOnce(&mut Value)) -> PathBuf {
        let copy = self.copy(name);
        let mut manifest = Manifest::read(&copy).unwrap();
        let name = format!("{}.kimg", manifest.processes[0]);
        let place = manifest.files.iter().position(|file| file.name == name).unwrap();
        let old = ImageFile::open(&copy.join(&name), Some(&manifest.files[place])).unwrap();
        let new = copy.join("new.kimg");
        manifest.files[place] = rewritten(&old, &new, STATE, forge);
        fs::rename(new, copy.join(&name)).unwrap();
        manifest.files[place].name = name;
        manifest.write(&copy).unwrap();
        self.own(&copy);
        copy
    }

    /// kedge restarts the image for `user`, to its end.
    fn restart(&self, user: User, image: &Path, job: &str) -> Output {
        self.command(user, image, job).output().unwrap()
    }

    fn command(&self, user: User, image: &Path, job: &str) -> Command {
        // By a name that no other test's job of this user has.
        let job = format!("{job}-{}", self.nonce);
        let image = image.display().to_string();
        let mut command = kedge_as(&self.place.world, user, &["restart", &image, "--job", &job]);
        if user != self.place.user {
            // Kedge's own folders of another user than the image's.
            let own = self.place.world.0.join(format!("own-{}", user.id()));
            fs::create_dir_all(&own).unwrap();
            chown(&own, Some(user.id()), Some(user.id())).unwrap();
            for variable in ["XDG_RUNTIME_DIR", "XDG_STATE_HOME", "HOME"] {
                command.env(variable, &own);
            }
        }
        command
    }

    /// kedge refuses the image, with these words, and nothing of it runs.
    pub(crate) fn refused(&self, user: User, image: &Path, words: &str) {
        let output = self.restart(user, image, "refused");
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(125), "{words}: {said}");
        assert!(said.contains(words), "{words}: {said}");
        assert!(!self.open("made").exists(), "{words}: it ran");
    }

    /// The job goes on to its end, with the rights of the user `owner`.
    pub(crate) fn goes_on(&self, user: User, image: &Path, owner: u32) {
        let output = self.restart(user, image, "goes");
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(7), "{said}");
        let last = format!("{} well", self.nonce);
        assert!(String::from_utf8_lossy(&output.stdout).contains(&last), "{output:?}");
        let made = self.open("made");
        assert_eq!(fs::metadata(&made).unwrap().uid(), owner, "{said}");
        fs::remove_file(made).unwrap();
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        // What root has restarted as another user is in that user's usual folder.
        for job in ["refused", "goes"] {
            let job = format!("{job}-{}", self.nonce);
            let _ = fs::remove_dir_all(format!("/tmp/kedge-65534/jobs/{job}"));
        }
    }
}

/// The section of a process's file that has its state.
const STATE: u64 = 1;

/// Writes what `old` has to `new`, with `section` as `forge` leaves it.
pub(crate) fn rewritten(
    old: &ImageFile,
    new: &Path,
    section: u64,
    forge: impl FnOnce(&mut Value),
) -> kedge_image::FileEntry {
    let writer = ImageWriter::create(new).unwrap();
    let mut forge = Some(forge);
    for extent in old.extents() {
        if extent.kind == Kind::Section {
            let mut bytes = old.section(extent.address).unwrap();
            if extent.address == section {
                let mut state = serde_json::from_slice(&bytes).unwrap();
                forge.take().expect("one state")(&mut state);
                bytes = serde_json::to_vec(&state).unwrap();
            }
            writer.section(extent.address, &bytes).unwrap();
            continue;
        }
        let mut bytes = Vec::new();
        let encoded = match extent.codec {
            Codec::Zero => Encoded { codec: Codec::Zero, bytes: (&[][..]).into() },
            Codec::Parent => Encoded::parent(),
            _ => {
                bytes.resize(extent.decoded as usize, 0);
                old.read(extent, &mut Vec::new(), &mut bytes).unwrap();
                encode(&bytes, Choice::Auto)
            }
        };
        writer.memory(extent.object, extent.address, extent.decoded, &encoded).unwrap();
    }
    writer.finish().unwrap()
}

#[test]
fn root_restarts_a_users_image_as_that_user() {
    let captured = Captured::by(User::Nobody, "hiuser");
    let image = &captured.image;
    captured.goes_on(User::Nobody, image, 65534);
    captured.goes_on(User::Same, image, 65534);
    let mut job = Job::restart(captured.command(User::Same, image, "goes"), &captured.nonce);
    let all = family(job.supervisor());
    assert!(all.len() > 2, "{all:?}");
    let mut ghosts = 0;
    for pid in all {
        let process = PathBuf::from(format!("/proc/{pid}"));
        assert_eq!(fs::metadata(&process).unwrap().uid(), 65534, "process {pid}");
        for fd in fs::read_dir(process.join("fd")).into_iter().flatten().flatten() {
            let Ok(found) = fs::metadata(fd.path()) else { continue };
            let link = fs::read_link(fd.path()).unwrap_or_default();
            if found.is_file() && link.to_string_lossy().ends_with("(deleted)") && found.size() == 5
            {
                // Set-uid or not, nobody gets another's rights by it.
                assert_eq!(found.uid(), 65534, "{link:?}");
                ghosts += 1;
            }
        }
    }
    assert!(ghosts > 0, "the deleted file has not come back");
    job.stop();
}

#[test]
fn roots_image_of_another_users_processes_is_roots() {
    let captured = Captured::by(User::Nobody, "hiroot");
    let copy = captured.copy("given");
    assert!(Command::new("chown").arg("-R").arg("0:0").arg(&copy).status().unwrap().success());
    captured.goes_on(User::Same, &copy, 65534);
}

#[test]
fn what_a_user_could_not_have_had_is_refused_by_name() {
    let captured = Captured::by(User::Nobody, "hiforge");
    let all = |id: u32| json!([id, id, id, id]);
    let forgeries: [(&str, Value, &str); 9] = [
        ("uids", all(0), "had user 0"),
        ("uids", json!([65534, 0, 65534, 65534]), "had user 0"),
        ("uids", json!([65534, 65534, 0, 65534]), "had user 0"),
        ("uids", all(1), "had user 1"),
        ("gids", all(0), "had group 0"),
        ("gids", json!([65534, 65534, 65534, 42]), "had group 42"),
        ("groups", json!([65534, 42]), "had group 42"),
        ("capabilities", json!([0, 2_097_152, 2_097_152, 0, 0]), "had capabilities"),
        ("capabilities", json!([1, 0, 0, 0, 1]), "had capabilities"),
    ];
    for (number, (what, value, words)) in forgeries.into_iter().enumerate() {
        let name = format!("forged-{number}");
        let image = captured.forged(&name, |state| {
            assert!(state["credentials"][what].is_array(), "{state}");
            state["credentials"][what] = value;
        });
        captured.refused(User::Same, &image, words);
    }
}

#[test]
fn files_and_folders_of_others_are_refused() {
    let captured = Captured::by(User::Nobody, "hiowner");
    let file = |image: &Path| image.join("job.kimg");
    type Change<'a> = &'a dyn Fn(&Path);
    let cases: [(&str, Change<'_>); 5] = [
        ("mixed", &|image| chown(file(image), Some(0), Some(0)).unwrap()),
        ("mixed", &|image| chown(image, Some(0), Some(0)).unwrap()),
        ("group", &|image| fs::set_permissions(image, Permissions::from_mode(0o770)).unwrap()),
        ("world", &|image| {
            fs::set_permissions(file(image), Permissions::from_mode(0o666)).unwrap()
        }),
        ("third", &|image| chown(file(image), Some(65533), Some(65533)).unwrap()),
    ];
    for (number, (what, change)) in cases.into_iter().enumerate() {
        let image = captured.copy(&format!("{what}-{number}"));
        change(&image);
        captured.refused(User::Same, &image, "it is not trusted");
    }
    // A link of the user's to an image of root's.
    let roots = captured.copy("roots");
    assert!(Command::new("chown").arg("-R").arg("0:0").arg(&roots).status().unwrap().success());
    let link = captured.image.with_file_name("link");
    symlink(&roots, &link).unwrap();
    std::os::unix::fs::lchown(&link, Some(65534), Some(65534)).unwrap();
    captured.refused(User::Same, &link, "it is not trusted");
}

#[test]
fn an_image_that_was_given_is_restarted_with_ones_own_rights() {
    let captured = Captured::by(User::Nobody, "higiven");
    let given = captured.open("given");
    let copied = Command::new("cp").arg("-a").arg(&captured.image).arg(&given).status();
    assert!(copied.unwrap().success());
    assert!(Command::new("chmod").arg("-R").arg("a+rX").arg(&given).status().unwrap().success());
    captured.goes_on(User::Other, &given, 65533);
    fs::set_permissions(given.join("job.kimg"), Permissions::from_mode(0o664)).unwrap();
    captured.refused(User::Other, &given, "it is not trusted");
}

/// Root would have opened what the link leads to, for a program that may not.
#[test]
fn a_path_that_leads_elsewhere_by_now_gives_nothing_away() {
    let captured = Captured::by(User::Nobody, "hilink");
    let secret = captured.place.world.0.join("secret");
    fs::write(&secret, "root's").unwrap();
    fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
    let data = captured.open("data");
    fs::remove_file(&data).unwrap();
    symlink(&secret, &data).unwrap();
    captured.refused(User::Same, &captured.image, "data");
    captured.refused(User::Nobody, &captured.image, "data");
}

#[test]
fn what_is_no_file_is_neither_waited_for_nor_read() {
    let captured = Captured::by(User::Nobody, "hispec");
    let process = format!("{}.kimg", Manifest::read(&captured.image).unwrap().processes[0]);
    for (number, name) in
        ["manifest.json", "job.kimg", &process, "descriptors.data"].into_iter().enumerate()
    {
        for (kind, words) in [("fifo", &["mkfifo"][..]), ("zero", &["ln", "-s", "/dev/zero"])] {
            let image = captured.copy(&format!("{kind}-{number}"));
            let path = image.join(name);
            fs::remove_file(&path).unwrap();
            let (program, words) = (words[0], &words[1..]);
            assert!(Command::new(program).args(words).arg(&path).status().unwrap().success());
            captured.own(&image);
            for user in [User::Same, User::Nobody] {
                captured.refused(user, &image, "it is no regular file");
            }
        }
        let image = captured.copy(&format!("null-{number}"));
        let path = image.join(name);
        fs::remove_file(&path).unwrap();
        let made = Command::new("mknod").arg(&path).args(["c", "1", "5"]).status();
        assert!(made.unwrap().success());
        captured.own(&image);
        for user in [User::Same, User::Nobody] {
            captured.refused(user, &image, "it is no regular file");
        }
    }
}

#[test]
fn folders_out_of_an_image_lead_nowhere_else() {
    let captured = Captured::by(User::Nobody, "hifolder");
    let world = &captured.place.world.0;
    let victim = world.join("victim/kedge/jobs/j");
    fs::create_dir_all(&victim).unwrap();
    for name in ["control", "socket", "nvml", "lib"] {
        fs::write(victim.join(name), "root's").unwrap();
    }
    let whole = || {
        for name in ["control", "socket", "nvml", "lib"] {
            assert_eq!(fs::read_to_string(victim.join(name)).unwrap(), "root's", "{name}");
        }
    };
    // As its processes' folder, or as the one of their devices.
    let settings = |folder: &Path| {
        let folder = json!({ "folder": folder });
        move |manifest: &mut Manifest| manifest.settings = Some(folder)
    };
    let image = captured.told("settings", settings(&victim));
    captured.goes_on(User::Same, &image, 65534);
    whole();
    let up = victim.join("../../../kedge/jobs/j");
    for (number, folder) in [victim.join(".."), up, "/".into(), "/etc".into()].iter().enumerate() {
        let image = captured.told(&format!("elsewhere-{number}"), settings(folder));
        captured.refused(User::Same, &image, "no job's");
        let image = captured.told(&format!("devices-{number}"), |manifest| {
            let (gpu, limits) = ("soft".to_owned(), Default::default());
            manifest.devices = Some(Devices { gpu, limits, folder: folder.clone() });
        });
        captured.refused(User::Same, &image, "no job's");
        captured.refused(User::Nobody, &image, "no job's");
    }
    whole();
    // Root's own image: what was root's folder is another user's by now.
    let former = world.join("open/kedge/jobs/j");
    fs::create_dir_all(&former).unwrap();
    for folder in former.ancestors().take(3) {
        fs::set_permissions(folder, Permissions::from_mode(0o700)).unwrap();
        chown(folder, Some(65534), Some(65534)).unwrap();
    }
    assert!(Command::new("mkfifo").arg(former.join("lock")).status().unwrap().success());
    fs::write(former.join("control"), "a user's").unwrap();
    let image = captured.told("fifo", settings(&former));
    captured.goes_on(User::Same, &image, 65534);
    assert!(Command::new("chown").arg("-R").arg("0:0").arg(&image).status().unwrap().success());
    captured.goes_on(User::Same, &image, 65534);
    assert_eq!(fs::read_to_string(former.join("control")).unwrap(), "a user's");
}

/// The user exchanges a good image for a forged one again and again while root restarts it.
#[test]
fn an_image_that_is_exchanged_meanwhile_gives_no_rights() {
    let captured = Captured::by(User::Nobody, "hirace");
    let forged = captured.forged("forged", |state| {
        state["credentials"]["uids"] = json!([0, 0, 0, 0]);
        state["credentials"]["gids"] = json!([0, 0, 0, 0]);
    });
    let (shown, aside) = (captured.copy("shown"), captured.image.with_file_name("aside"));
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let swaps =
                [[(&shown, &aside), (&forged, &shown)], [(&shown, &forged), (&aside, &shown)]];
            for swap in swaps.iter().cycle() {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                for (from, to) in swap {
                    fs::rename(from, to).unwrap();
                }
                // About as long as a restart looks at it.
                thread::sleep(Duration::from_millis(7));
            }
        });
        let ended = catch_unwind(AssertUnwindSafe(|| {
            let (mut ran, mut refused) = (0, 0);
            for _ in 0..60 {
                let output = captured.restart(User::Same, &shown, "goes");
                let made = captured.open("made");
                // It may have been refused, for one reason or another.
                if let Ok(found) = fs::metadata(&made) {
                    assert_eq!(found.uid(), 65534, "{}", stderr(&output));
                    fs::remove_file(made).unwrap();
                }
                match output.status.code() {
                    Some(7) => ran += 1,
                    Some(125) => refused += 1,
                    _ => panic!("{output:?}"),
                }
                if ran > 3 && refused > 3 {
                    return;
                }
            }
            panic!("{ran} ran and {refused} were refused: no race");
        }));
        over.store(true, Ordering::Relaxed);
        ended.unwrap_or_else(|panic| resume_unwind(panic));
    });
}
