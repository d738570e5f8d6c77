//! Jobs of several parts, each with a supervisor of its own: checkpointed and restarted as one, and
//! what becomes of them when one is killed.
use kedge_tests::job::{
    User, allow, build, family, is_right, kedge_as, kill_all_in, send, steps_in, wait_for_steps,
    writers_of,
};
use kedge_tests::world::{World, is_root, stderr};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const STEPS: u64 = 120;
/// Nobody gets further until it is said: so no part has ended when it is to be saved.
const HALF: u64 = STEPS / 2;
/// What the program ends with when all of its steps were right.
const WELL: i32 = 7;
const TIMEOUT: Duration = Duration::from_secs(40);

/// A job of some parts, each of which writes its steps to a file of its own.
struct Joint {
    world: World,
    user: User,
    parts: Vec<Child>,
}

impl Joint {
    fn start(name: &str, user: User, parts: usize, options: &[&str]) -> Option<Joint> {
        Joint::with_memory(name, user, &vec![1; parts], options)
    }

    /// One whose parts have so many MiB each.
    fn with_memory(name: &str, user: User, parts: &[u64], options: &[&str]) -> Option<Joint> {
        if user == User::Nobody && !is_root() {
            println!("not root: every other test is this one");
            return None;
        }
        let world = World::new(name);
        let program = build(&world, "steps", &[]).display().to_string();
        if user == User::Nobody {
            world.give_home_away();
        }
        allow(&world.home(), HALF);
        let mut joint = Joint { world, user, parts: Vec::new() };
        for (part, megabytes) in parts.iter().enumerate() {
            let line = format!("exec {program} {STEPS} 20 2 {megabytes} go > out.{part}");
            let run =
                [&["run", "--gpu", "none", "--join", "pair"], options, &["--", "sh", "-c", &line]];
            let mut command = kedge_as(&joint.world, user, &run.concat());
            command.stdout(Stdio::null()).stderr(Stdio::null());
            joint.parts.push(command.spawn().expect("timeout, from coreutils"));
            joint.wait_for(part, 1);
        }
        Some(joint)
    }

    fn steps(&self, part: usize) -> Vec<String> {
        steps_in(&self.world.home(), part)
    }

    /// All parts do more steps than they have, and may do all.
    fn goes_on(&self) {
        let before: Vec<usize> = (0..self.parts.len()).map(|part| self.steps(part).len()).collect();
        self.may_end();
        before.iter().enumerate().for_each(|(part, lines)| self.wait_for(part, lines + 3));
    }

    fn may_end(&self) {
        allow(&self.world.home(), STEPS);
    }

    fn wait_for(&self, part: usize, lines: usize) {
        wait_for_steps(&self.world.home(), part, lines);
    }

    fn output(&self, arguments: &[&str]) -> Output {
        kedge_as(&self.world, self.user, arguments).output().expect("kedge")
    }

    fn checkpoint(&self, options: &[&str]) -> Value {
        let output = self.output(&[&["checkpoint", "pair", "--json"], options].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// All of its parts, with everything that they have started, are dead.
    fn kill(&mut self) {
        for part in &mut self.parts {
            send("KILL", &family(part.id()));
            let _ = part.wait();
        }
    }

    /// The supervisor of that part, and nothing else.
    fn kill_supervisor(&self, part: usize) {
        let timeout = self.parts[part].id();
        send("KILL", &kedge_tests::job::children(timeout));
    }

    fn is_right(&self, part: usize) {
        is_right(&self.world.home(), part, STEPS);
    }

    fn images(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.world.home().join("kedge/images")).into_iter().flatten();
        entries.flatten().map(|entry| entry.path()).filter(|path| is_image(path)).collect()
    }

    fn restart(&self, image: &str) -> Output {
        self.output(&["restart", image])
    }
}

fn is_image(path: &Path) -> bool {
    path.join("manifest.json").exists()
}

impl Drop for Joint {
    fn drop(&mut self) {
        self.kill();
        kill_all_in(&self.world.home());
    }
}

fn comes_back_as_one(name: &str, user: User, parts: usize) {
    let Some(mut joint) = Joint::start(name, user, parts, &[]) else { return };
    (0..parts).for_each(|part| joint.wait_for(part, 10));
    let report = joint.checkpoint(&[]);
    assert_eq!(report["processes"], parts, "{report}");
    let image = report["image"].as_str().expect("a path").to_owned();
    assert!(image.ends_with("/pair-0001"), "{image}");
    joint.goes_on();
    joint.kill();
    let rows = joint.output(&["images", "--json"]);
    let rows: Value = serde_json::from_slice(&rows.stdout).expect("JSON");
    assert_eq!((&rows[0]["state"], &rows[0]["processes"]), (&"finished".into(), &parts.into()));
    assert!(joint.output(&["verify", &image]).status.success());
    let ended = joint.restart(&image);
    assert_eq!(ended.status.code(), Some(WELL), "{}", stderr(&ended));
    (0..parts).for_each(|part| joint.is_right(part));
}

#[test]
fn two_parts_come_back_as_one() {
    comes_back_as_one("joint", User::Same, 2);
}

/// A part keeps its name, also where there are more than ten.
#[test]
fn the_eleventh_part_comes_back_as_the_eleventh() {
    const PARTS: usize = 11;
    let mut joint = Joint::start("joint11", User::Same, PARTS, &[]).expect("the test's own user");
    let report = joint.checkpoint(&[]);
    let image = report["image"].as_str().expect("a path").to_owned();
    joint.kill();
    let mut again =
        kedge_as(&joint.world, User::Same, &["restart", &image]).spawn().expect("kedge");
    (0..PARTS).for_each(|part| joint.wait_for(part, HALF as usize));
    let jobs = joint.output(&["ps", "--json"]);
    let jobs: Value = serde_json::from_slice(&jobs.stdout).expect("JSON");
    let file = |job: &Value| {
        let words = job["command"].as_array().expect("words");
        let line = words.last().and_then(Value::as_str).unwrap_or("");
        line.rsplit('.').next().unwrap_or("").to_owned()
    };
    let all = jobs.as_array().expect("jobs");
    let parts = all.iter().map(|job| (job["name"].as_str().unwrap_or("").to_owned(), file(job)));
    let found: BTreeSet<(String, String)> = parts.collect();
    let expected = (0..PARTS).map(|part| (format!("pair.{part}"), part.to_string()));
    assert_eq!(found, expected.collect(), "{jobs}");
    joint.may_end();
    assert_eq!(again.wait().expect("ended").code(), Some(WELL));
    (0..PARTS).for_each(|part| joint.is_right(part));
}

#[test]
fn so_they_do_for_an_ordinary_user() {
    comes_back_as_one("jointn", User::Nobody, 3);
}

/// The large one is written while both run, and neither waits for the other standing still.
#[test]
fn a_part_with_much_memory_is_written_while_all_run() {
    let sizes = [160, 1];
    let mut joint = Joint::with_memory("jointbig", User::Same, &sizes, &[]).expect("the same user");
    let report = joint.checkpoint(&["--codec", "raw"]);
    let image = report["image"].as_str().expect("a path").to_owned();
    let ahead = |part: usize| {
        let files = fs::read_dir(format!("{image}/pair.{part}-0001")).expect("the part's image");
        let names = files.flatten().filter_map(|file| file.file_name().into_string().ok());
        names.filter(|name| name.ends_with("-ahead.kimg")).count()
    };
    assert_eq!((ahead(0), ahead(1)), (1, 0), "{report}");
    joint.goes_on();
    joint.kill();
    assert!(joint.output(&["verify", &image]).status.success());
    assert_eq!(joint.restart(&image).status.code(), Some(WELL));
    (0..2).for_each(|part| joint.is_right(part));
}

/// Each part's image builds on that part's before, and the whole on the whole.
fn builds_on_each_other(name: &str, user: User) {
    let options = ["--incremental", "--full-every", "3", "--keep", "2"];
    let Some(mut joint) = Joint::with_memory(name, user, &[32, 8], &options) else { return };
    let checkpoint = |joint: &Joint, options: &[&str]| {
        let report = joint.checkpoint(options);
        let image = report["image"].as_str().expect("a path").to_owned();
        let rows = joint.output(&["images", "--json"]);
        let rows: Value = serde_json::from_slice(&rows.stdout).expect("JSON");
        let row = rows.as_array().expect("rows").iter().find(|row| row["image"] == image.as_str());
        let row = row.expect("its row");
        let parent = row["parent"].as_str().map(str::to_owned);
        (image, parent, report["bytes"].as_u64().expect("bytes"))
    };
    let (first, none, all) = checkpoint(&joint, &["--codec", "raw"]);
    let (second, on, changes) = checkpoint(&joint, &["--codec", "raw"]);
    assert_eq!((none, on.as_deref()), (None, Some("pair-0001")));
    assert!(changes < all / 4, "{changes} of {all}");
    let (third, on, _) = checkpoint(&joint, &[]);
    assert_eq!(on.as_deref(), Some("pair-0002"));
    assert!([&first, &second, &third].iter().all(|image| is_image(Path::new(image))));
    let refused = joint.output(&["rm", &first]);
    assert!(!refused.status.success() && is_image(Path::new(&first)), "{}", stderr(&refused));
    assert!(joint.output(&["verify", &third]).status.success());
    joint.goes_on();
    joint.kill();
    let ended = joint.restart(&third);
    assert_eq!(ended.status.code(), Some(WELL), "{}", stderr(&ended));
    (0..2).for_each(|part| joint.is_right(part));
}

#[test]
fn the_images_of_parts_build_on_each_other() {
    builds_on_each_other("jointinc", User::Same);
}

#[test]
fn so_do_those_of_an_ordinary_user_s() {
    builds_on_each_other("jointincn", User::Nobody);
}

#[test]
fn a_job_that_is_stopped_does_nothing_twice_and_can_be_restarted_and_saved_again() {
    let mut joint = Joint::start("jointst", User::Same, 2, &[]).expect("the test's own user");
    (0..2).for_each(|part| joint.wait_for(part, 10));
    let first = joint.checkpoint(&["--stop"])["image"].as_str().expect("a path").to_owned();
    for part in &mut joint.parts {
        part.wait().expect("ended");
    }
    let (before, again) = (joint.steps(0).len(), joint.steps(1).len());
    allow(&joint.world.home(), HALF + 20);
    // In the background: it is saved once more, by a coordinator that its parts have elected.
    let mut restarting =
        kedge_as(&joint.world, User::Same, &["restart", &first]).spawn().expect("kedge");
    joint.wait_for(0, before + 5);
    joint.wait_for(1, again + 5);
    let all = family(restarting.id());
    let second = joint.checkpoint(&[])["image"].as_str().expect("a path").to_owned();
    assert_ne!(first, second);
    send("KILL", &all);
    restarting.wait().expect("ended");
    joint.may_end();
    let ended = joint.restart(&second);
    assert_eq!(ended.status.code(), Some(WELL), "{}", stderr(&ended));
    (0..2).for_each(|part| joint.is_right(part));
}

#[test]
fn a_part_whose_supervisor_is_killed_goes_on_and_is_named() {
    let mut joint = Joint::start("jointl", User::Same, 2, &[]).expect("the test's own user");
    (0..2).for_each(|part| joint.wait_for(part, 5));
    // The first one coordinates.
    joint.kill_supervisor(0);
    let refused = joint.output(&["checkpoint", "pair"]);
    assert!(
        stderr(&refused).contains("the supervisor of pair.0 was killed"),
        "{}",
        stderr(&refused)
    );
    joint.wait_for(0, 20);
    joint.wait_for(1, 20);
    // With its program dead too, the rest is the job, under another coordinator.
    send("KILL", &writers_of(&joint.world.home().join("out.0")));
    let report = joint.checkpoint(&[]);
    assert_eq!(report["processes"], 1, "{report}");
    joint.kill();
    joint.may_end();
    let ended = joint.restart(report["image"].as_str().expect("a path"));
    assert_eq!(ended.status.code(), Some(WELL), "{}", stderr(&ended));
    joint.is_right(1);
}

/// At moments all over a checkpoint, the supervisor of one part is killed: what is asked for ends,
/// by name if it fails, no half of an image counts, and the programs go on.
#[test]
fn a_supervisor_that_is_killed_at_any_moment_leaves_no_half() {
    for round in 0..8u64 {
        let joint = Joint::start("jointk", User::Same, 2, &[]).expect("the test's own user");
        (0..2).for_each(|part| joint.wait_for(part, 3));
        let asking =
            kedge_as(&joint.world, User::Same, &["checkpoint", "pair"]).spawn().expect("kedge");
        thread::sleep(Duration::from_millis(15 + 9 * round));
        joint.kill_supervisor((round % 2) as usize);
        let begin = Instant::now();
        let asked = asking.wait_with_output().expect("ended");
        assert!(begin.elapsed() < TIMEOUT, "round {round}");
        let (images, said) = (joint.images(), stderr(&asked));
        assert!(asked.status.success() || !said.is_empty(), "round {round}: {asked:?}");
        assert!(!asked.status.success() || images.len() == 1, "round {round}: {said}");
        for image in &images {
            let verified = joint.output(&["verify", &image.display().to_string()]);
            assert!(verified.status.success(), "round {round}: {verified:?}");
        }
        joint.goes_on();
    }
}

#[test]
fn a_part_that_cannot_be_restarted_leaves_nothing_of_the_others() {
    let mut joint = Joint::start("jointd", User::Same, 2, &[]).expect("the test's own user");
    (0..2).for_each(|part| joint.wait_for(part, 5));
    let image = PathBuf::from(joint.checkpoint(&[])["image"].as_str().expect("a path"));
    joint.kill();
    let part = image.join("pair.1-0001");
    let file = fs::read_dir(&part).expect("a part").flatten().map(|entry| entry.path());
    let file = file.filter(|path| path.extension().is_some_and(|end| end == "kimg"));
    let file =
        file.max_by_key(|path| fs::metadata(path).map_or(0, |meta| meta.len())).expect("memory");
    let mut bytes = fs::read(&file).expect("its bytes");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).expect("damage");
    assert_eq!(joint.output(&["verify", &image.display().to_string()]).status.code(), Some(1));
    let before = (joint.steps(0), joint.steps(1));
    let failed = joint.restart(&image.display().to_string());
    assert_eq!(failed.status.code(), Some(125), "{}", stderr(&failed));
    assert!(stderr(&failed).contains("pair.1"), "{}", stderr(&failed));
    thread::sleep(Duration::from_millis(200));
    assert_eq!((joint.steps(0), joint.steps(1)), before);
    let rows: Value =
        serde_json::from_slice(&joint.output(&["ps", "--json"]).stdout).expect("JSON");
    assert_eq!(rows, Value::Array(Vec::new()));
}
