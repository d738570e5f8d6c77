//! Temporary files that a program has closed and will still read come back with it.
use kedge_tests::job::{Job, User, allow, build, kedge_as};
use kedge_tests::place::Place;
use std::fs;
use std::path::{Path, PathBuf};

/// The program that hands such files on to itself, as the job `j`.
fn start(place: &Place, options: &[&str]) -> Job {
    let program = build(&place.world, "passing", &[]).display().to_string();
    let (go, most) = (place.world.home().join("go").display().to_string(), "160");
    place.run(options, &[&program, &go, most])
}

/// What is in /tmp of programs that have removed all of theirs at their end.
fn left(pid: u32) -> Vec<PathBuf> {
    let start = format!("kedge-passing-{pid}-");
    let is =
        |path: &PathBuf| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&start));
    let all = fs::read_dir("/tmp").expect("/tmp").flatten();
    all.map(|entry| entry.path()).filter(is).collect()
}

fn pid(place: &Place) -> u32 {
    place.json(&["ps", "--json"])[0]["pid"].as_u64().expect("a process id") as u32
}

/// The job goes on from `image`, at `step`, to its end.
fn goes_on(place: &Place, image: &Path, nonce: &str, step: u64) {
    ends_well(place, place.restart(image, nonce), step);
}

fn ends_well(place: &Place, job: Job, step: u64) {
    assert_eq!(job.step, step);
    assert_eq!(job.finish(2).code(), Some(0), "{}", place.log());
}

/// Captured, run to its end, at which it removes its files, and brought back: from the first image
/// and from the last, which builds on the first where `options` say so.
fn comes_back(name: &str, user: User, options: &[&str]) {
    let Some(place) = Place::new(name, user) else { return };
    let mut job = start(&place, options);
    let (nonce, pid, home) = (job.nonce.clone(), pid(&place), place.world.home());
    let first = place.checkpoint(&[]);
    allow(&home, 1);
    job.read_to(1);
    let last = place.checkpoint(&[]);
    assert_eq!(left(pid).len(), 3);
    allow(&home, 2);
    assert_eq!(job.finish(2).code(), Some(0));
    assert!(left(pid).is_empty());
    goes_on(&place, &last, &nonce, 2);
    goes_on(&place, &first, &nonce, 1);
    assert!(left(pid).is_empty(), "{:?}", left(pid));
}

#[test]
fn closed_temporary_files_come_back() {
    comes_back("tmp", User::Same, &[]);
}

#[test]
fn they_come_back_by_images_that_build_on_each_other() {
    comes_back("tmpinc", User::Same, &["--incremental"]);
}

#[test]
fn an_ordinary_user_s_come_back() {
    comes_back("tmpuser", User::Nobody, &[]);
}

/// They belong to the user again, who can remove them from where only their owner may.
#[test]
fn root_brings_those_of_a_user_back() {
    let Some(place) = Place::new("tmproot", User::Nobody) else { return };
    let mut job = start(&place, &[]);
    let (nonce, pid, home) = (job.nonce.clone(), pid(&place), place.world.home());
    let image = place.checkpoint(&[]);
    allow(&home, 2);
    job.read_to(2);
    job.stop();
    assert!(left(pid).is_empty());
    let mut restart =
        kedge_as(&place.world, User::Same, &["restart", &image.display().to_string()]);
    let own = home.join("root");
    fs::create_dir(&own).expect("a folder");
    restart.env("XDG_RUNTIME_DIR", &own).env("XDG_STATE_HOME", &own);
    ends_well(&place, Job::restart(restart, &nonce), 1);
    assert!(left(pid).is_empty(), "{:?}", left(pid));
}

/// Files that are still there at a restart are older than the job's processes from then on, and are
/// the job's all the same.
#[test]
fn files_that_were_still_there_are_saved_again() {
    for (name, user) in [("tmpagain", User::Same), ("tmpagainu", User::Nobody)] {
        let Some(place) = Place::new(name, user) else { continue };
        let mut job = start(&place, &[]);
        let (nonce, pid, home) = (job.nonce.clone(), pid(&place), place.world.home());
        let first = place.checkpoint(&[]);
        job.kill();
        assert_eq!(left(pid).len(), 2);
        allow(&home, 1);
        let job = place.restart(&first, &nonce);
        let second = place.checkpoint(&[]);
        allow(&home, 2);
        assert_eq!(job.finish(2).code(), Some(0));
        assert!(left(pid).is_empty());
        goes_on(&place, &second, &nonce, 2);
        assert!(left(pid).is_empty());
    }
}
