use super::lock::DYING;
use super::*;
use crate::Supervisor;
use crate::services::control::{self, AskError, Migrate};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::process::Command;

/// Jobs in a folder of their own.
struct World(Jobs);

impl World {
    fn new(test: &str) -> World {
        // As it is in a user's folder: …/kedge/jobs.
        let own = std::env::temp_dir().join(format!("kedge-jobs-{test}-{}", std::process::id()));
        let dir = own.join("kedge/jobs");
        DirBuilder::new().recursive(true).mode(0o700).create(&dir).unwrap();
        World(Jobs { dir, others: Vec::new() })
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let own = self.0.dir.ancestors().nth(2).unwrap();
        let _ = fs::remove_dir_all(own);
    }
}

fn meta(name: &JobName, state: State) -> Meta {
    Meta {
        name: name.to_string(),
        supervisor: 1,
        pid: None,
        command: vec!["x".into()],
        gpu: "soft".into(),
        started: 5,
        ended: None,
        state,
        policy: None,
        joint: None,
        marks: None,
    }
}

#[test]
fn names_are_safe_as_a_folder_s() {
    for good in ["a", "train-1", "0.x_y", &"a".repeat(64)] {
        assert!(good.parse::<JobName>().is_ok(), "{good}");
    }
    for bad in ["", ".", "..", "../x", "a/b", "-n", "a b", "é", &"a".repeat(65)] {
        assert!(bad.parse::<JobName>().is_err(), "{bad}");
    }
    assert!(JobName::generated(Path::new("/bin/a b")).0.starts_with("ab-"));
    assert!(JobName::generated(Path::new("..")).0.starts_with("job-"));
}

#[test]
fn a_running_job_is_one_whose_lock_is_held() {
    let world = World::new("running");
    let name: JobName = "j".parse().unwrap();
    let dir = world.0.create(&name).unwrap();
    dir.write_meta(&meta(&name, State::Running)).unwrap();
    assert_eq!(world.0.find(&name).unwrap().state, State::Running);
    assert!(matches!(world.0.create(&name), Err(JobError::InUse { .. })));
    world.0.remove(&name);
    assert!(world.0.find(&name).is_some(), "a running job was forgotten");

    // Its supervisor dies without a word.
    drop(dir);
    assert_eq!(world.0.find(&name).unwrap().state, State::Killed(libc::SIGKILL));
    world.0.remove(&name);
    assert!(world.0.find(&name).is_none() && world.0.list().unwrap().is_empty());
}

#[test]
fn the_latest_is_listed_first() {
    let world = World::new("latest");
    // All in one second, and process ids begin anew.
    let all = [("c", 30), ("a", 31), ("b", 2), ("c", 3)];
    for (name, supervisor) in all {
        let name: JobName = name.parse().unwrap();
        let dir = world.0.create(&name).unwrap();
        dir.write_meta(&Meta { supervisor, ..meta(&name, State::Exited(0)) }).unwrap();
        dir.retire();
        std::thread::sleep(Duration::from_millis(10));
    }
    let listed: Vec<String> = world.0.list().unwrap().into_iter().map(|meta| meta.name).collect();
    assert_eq!(listed, ["c", "b", "a"]);
}

#[test]
fn what_an_ended_job_left_goes_with_its_name() {
    let world = World::new("again");
    let name: JobName = "j".parse().unwrap();
    let dir = world.0.create(&name).unwrap();
    dir.write_meta(&meta(&name, State::Exited(0))).unwrap();
    fs::write(dir.log(), "old").unwrap();
    drop(dir);
    let dir = world.0.create(&name).unwrap();
    assert!(!dir.log().exists() && world.0.find(&name).is_none());
    dir.write_meta(&meta(&name, State::Exited(1))).unwrap();
    dir.retire();
    assert!(!dir.log().exists() && world.0.find(&name).unwrap().state == State::Exited(1));
}

#[test]
fn what_an_ended_job_left_stays_if_the_next_one_never_comes_to_be() {
    let world = World::new("never");
    let name: JobName = "j".parse().unwrap();
    let dir = world.0.create(&name).unwrap();
    dir.write_meta(&meta(&name, State::Exited(3))).unwrap();
    fs::write(dir.log(), "old").unwrap();
    fs::write(dir.last_image(), "{}").unwrap();
    dir.retire();
    drop(dir);
    let is_there = |dir: &Path| {
        assert_eq!(world.0.find(&name).unwrap().state, State::Exited(3));
        assert_eq!(fs::read_to_string(dir.join("log")).unwrap(), "old");
        assert!(dir.join("last.json").exists() && !dir.join("former").exists());
    };
    // It fails, with or without a word of its own; or it is killed.
    for (tells, retires) in [(false, true), (true, true), (false, false)] {
        let dir = world.0.create(&name).unwrap();
        fs::write(dir.log(), "new").unwrap();
        if tells {
            dir.write_meta(&meta(&name, State::Running)).unwrap();
            dir.remove_meta();
        }
        let path = dir.path().to_owned();
        if retires {
            dir.retire();
        }
        drop(dir);
        is_there(&path);
    }
}

#[test]
fn nonsense_in_the_folder_is_no_job() {
    let world = World::new("nonsense");
    fs::create_dir(world.0.dir.join("x")).unwrap();
    fs::write(world.0.dir.join("x/meta.json"), b"{\"name\": 3}").unwrap();
    fs::write(world.0.dir.join("file"), b"").unwrap();
    assert!(world.0.list().unwrap().is_empty());
}

#[test]
fn a_folder_that_others_enter_is_refused() {
    let world = World::new("private");
    let dir = world.0.dir.join("open");
    fs::create_dir(&dir).unwrap();
    fs::set_permissions(&dir, PermissionsExt::from_mode(0o755)).unwrap();
    let uid = fs::metadata(&dir).unwrap().uid();
    assert!(matches!(private_dir(&dir, uid), Err(JobError::NotPrivate { .. })));
    fs::set_permissions(&dir, PermissionsExt::from_mode(0o700)).unwrap();
    assert!(private_dir(&dir, uid).is_ok());
    assert!(matches!(private_dir(&dir, uid + 1), Err(JobError::NotPrivate { .. })));
    let link = world.0.dir.join("link");
    std::os::unix::fs::symlink(&dir, &link).unwrap();
    assert!(matches!(private_dir(&link, uid), Err(JobError::NotPrivate { .. })));
}

#[test]
fn who_was_just_killed_is_waited_for() {
    let world = World::new("dying");
    let [former, own] = ["former", "own"].map(|name| name.parse::<JobName>().unwrap());
    let dying = |dir: JobDir| {
        let path = dir.path().to_owned();
        // What a supervisor that is killed leaves behind.
        drop(UnixListener::bind(path.join("control")).unwrap());
        let end = thread::spawn(move || {
            thread::sleep(DYING / 6);
            drop(dir);
        });
        (path, end)
    };
    let (path, end) = dying(world.0.create(&former).unwrap());
    let dir = world.0.create(&own).unwrap();
    let stand_in = dir.stand_in_for(&path, false);
    assert!(stand_in.is_some(), "the folder is free");
    assert_eq!(fs::read_link(path.join("control")).unwrap(), dir.control());
    end.join().unwrap();
    drop(stand_in);
    let (_, end) = dying(world.0.create(&former).unwrap());
    world.0.create(&former).unwrap();
    end.join().unwrap();
}

#[test]
fn the_folder_of_a_job_that_runs_stays_its_own() {
    let world = World::new("runs");
    let [former, own] = ["former", "own"].map(|name| name.parse::<JobName>().unwrap());
    let running = world.0.create(&former).unwrap();
    fs::write(running.control(), "").unwrap();
    let dir = world.0.create(&own).unwrap();
    assert!(dir.stand_in_for(running.path(), false).is_none());
    assert!(!running.control().is_symlink());
}

/// Names out of an image lead there: nothing of a user's is removed, and nothing is waited for.
#[test]
fn a_former_folder_is_a_private_one_and_keeps_its_files() {
    let world = World::new("former");
    let own = world.0.create(&"own".parse().unwrap()).unwrap();
    let former = world.0.dir.join("former");
    DirBuilder::new().mode(0o700).create(&former).unwrap();
    fs::write(former.join("control"), "a user's").unwrap();
    assert!(own.stand_in_for(&former, false).is_none());
    assert_eq!(fs::read_to_string(former.join("control")).unwrap(), "a user's");
    fs::remove_file(former.join("control")).unwrap();
    // Opening it would wait for a writer for ever.
    assert!(Command::new("mkfifo").arg(former.join("lock")).status().unwrap().success());
    drop(own.stand_in_for(&former, false).expect("nobody's"));
    world.0.remove(&"former".parse().unwrap());
    assert!(former.exists(), "without a lock it is nobody's to remove");
    for mode in [0o777, 0o770, 0o755] {
        fs::set_permissions(&former, fs::Permissions::from_mode(mode)).unwrap();
        assert!(own.stand_in_for(&former, false).is_none(), "{mode:o}");
    }
    let link = world.0.dir.join("link");
    std::os::unix::fs::symlink(&former, &link).unwrap();
    assert!(own.stand_in_for(&link, false).is_none());
}

/// Folders of a user, and what his environment says of them.
fn surroundings(test: &str) -> (PathBuf, Surroundings) {
    let root = std::env::temp_dir().join(format!("kedge-places-{test}-{}", std::process::id()));
    let (home, runtime, temporary) = (root.join("home"), root.join("run"), root.join("tmp"));
    for folder in [&home, &runtime, &temporary] {
        fs::create_dir_all(folder).unwrap();
    }
    // SAFETY: a plain call.
    let uid = unsafe { libc::geteuid() };
    let host = "node7".to_owned();
    let (home, runtime) = (Some(home), Some(runtime));
    (root, Surroundings { uid, host, state: None, home, runtime, temporary })
}

#[test]
fn jobs_are_kept_where_a_logout_removes_nothing() {
    let (root, mut all) = surroundings("order");
    let in_home = root.join("home/.local/state/kedge/hosts/node7/jobs");
    assert_eq!(all.jobs().unwrap(), in_home);
    assert_eq!(fs::metadata(&in_home).unwrap().permissions().mode() & 0o777, 0o700);
    all.state = Some(root.join("state"));
    assert_eq!(all.jobs().unwrap(), root.join("state/kedge/hosts/node7/jobs"));
    // Said, and of no use: that is an error.
    fs::write(root.join("file"), "").unwrap();
    all.state = Some(root.join("file"));
    assert!(matches!(all.jobs(), Err(JobError::Io { .. })));
    // No home, another user's, or none that can be used.
    all.state = None;
    for home in [
        None,
        Some(root.join("nothing")),
        Some(PathBuf::from("/proc/sys")),
        Some(root.join("file")),
    ] {
        all.home = home;
        assert_eq!(all.jobs().unwrap(), root.join("run/kedge/jobs"));
    }
    all.runtime = None;
    let first = all.jobs().unwrap();
    assert!(first.starts_with(root.join("tmp")) && all.jobs().unwrap() == first);
    fs::remove_dir_all(&root).unwrap();
}

/// Root alone can make folders of others.
#[test]
fn root_keeps_no_jobs_where_others_can_make_changes() {
    let (root, mut all) = surroundings("roots");
    if all.uid == 0 {
        let theirs = root.join("theirs");
        fs::create_dir(&theirs).unwrap();
        std::os::unix::fs::chown(&theirs, Some(1234), None).unwrap();
        all.state = Some(theirs.join("state"));
        assert!(matches!(all.jobs(), Err(JobError::NotRoots { .. })));
        assert!(!theirs.join("state").exists());
    }
    fs::remove_dir_all(&root).unwrap();
}

#[test]
fn a_name_that_another_took_in_a_folder_of_all_does_no_harm() {
    let (root, mut all) = surroundings("taken");
    (all.home, all.runtime) = (None, None);
    let taken = root.join("tmp").join(format!("kedge-{}", all.uid));
    fs::create_dir(&taken).unwrap();
    fs::set_permissions(&taken, PermissionsExt::from_mode(0o777)).unwrap();
    let jobs = all.jobs().unwrap();
    assert!(!jobs.starts_with(&taken), "{jobs:?}");
    // One that older ones have made is his.
    fs::set_permissions(&taken, PermissionsExt::from_mode(0o700)).unwrap();
    assert_eq!(all.jobs().unwrap(), taken.join("jobs"));
    fs::remove_dir_all(&root).unwrap();
}

#[test]
fn jobs_of_an_older_kedge_are_found() {
    let (root, all) = surroundings("older");
    let old = root.join("run/kedge/jobs");
    private_dir(&root.join("run/kedge"), all.uid).unwrap();
    private_dir(&old, all.uid).unwrap();
    let name: JobName = "j".parse().unwrap();
    let former = Jobs { dir: old, others: Vec::new() };
    let running = former.create(&name).unwrap();
    running.write_meta(&meta(&name, State::Running)).unwrap();
    let dir = all.jobs().unwrap();
    let others = all.others(&dir);
    let jobs = Jobs { dir, others };
    assert_eq!(jobs.find(&name).unwrap().state, State::Running);
    assert_eq!(jobs.list().unwrap().len(), 1);
    assert_eq!(jobs.log_path(&name), running.log());
    assert!(matches!(jobs.create(&name), Err(JobError::InUse { .. })));
    drop(running);
    let new = jobs.create(&name).unwrap();
    new.write_meta(&meta(&name, State::Exited(3))).unwrap();
    assert_eq!(jobs.find(&name).unwrap().state, State::Exited(3));
    assert_eq!(jobs.list().unwrap().len(), 1, "of one name, the new one");
    fs::remove_dir_all(&root).unwrap();
}

/// A process that runs in the name of a part whose supervisor was killed.
fn part_left(jobs: &Jobs, name: &str) -> std::process::Child {
    let name: JobName = name.parse().unwrap();
    let child = Command::new("sleep").arg("60").spawn().unwrap();
    let pid = Some(child.id());
    let (joint, marks) = (Some("j".to_owned()), Some(Marks::here(pid)));
    let meta = Meta { pid, joint, marks, ..meta(&name, State::Running) };
    // Its lock is let go of.
    jobs.create(&name).unwrap().write_meta(&meta).unwrap();
    child
}

#[test]
fn parts_of_a_joint_job_that_were_left_running_are_seen_and_ended() {
    use crate::services::control::{self, Kill};
    let World(jobs) = &World::new("parts-left");
    let job: JobName = "j".parse().unwrap();
    let mut children = ["j.0", "j.1"].map(|name| part_left(jobs, name));
    assert_eq!(jobs.living_parts(&job).len(), 2);
    assert!(jobs.running_parts(&job).is_empty());
    assert!(matches!(jobs.make_room(&job), Err(JobError::LeftRunning { .. })));
    assert_eq!(jobs.parts(&job).unwrap().len(), 2);
    // They can be found as ended when somebody collects them.
    let ends = thread::spawn(move || children.each_mut().map(|child| child.wait().unwrap()));
    control::kill(jobs, &job, Kill::End { grace_ms: 0 }).unwrap();
    assert!(ends.join().unwrap().iter().all(|status| !status.success()));
    jobs.make_room(&job).unwrap();
    assert!(jobs.parts(&job).unwrap().is_empty());
}

#[test]
fn the_next_checkpoint_is_told_while_the_job_runs() {
    let world = World::new("next");
    let name: JobName = "j".parse().unwrap();
    let dir = world.0.create(&name).unwrap();
    dir.write_meta(&meta(&name, State::Running)).unwrap();
    assert_eq!(world.0.next_checkpoint(&name), None);
    let next = Next { at: 1234, every: Duration::from_millis(1500) };
    note_next(&dir.control(), &next).unwrap();
    assert_eq!(world.0.next_checkpoint(&name), Some(next));
    dir.retire();
    assert_eq!(world.0.next_checkpoint(&name), None, "it has ended");
}

/// The name may have got another job between the last look at it and the connection.
#[test]
fn a_move_of_one_job_is_not_asked_of_another_of_its_name() {
    let world = World::new("another");
    let name: JobName = "j".parse().unwrap();
    let dir = world.0.create(&name).unwrap();
    dir.write_meta(&meta(&name, State::Running)).unwrap();
    let listener = UnixListener::bind(world.0.control_path(&name)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let order: Migrate =
        serde_json::from_str(r#"{"to":"soft","max_pause_ms":50,"rounds":8}"#).unwrap();
    let ask = |of| control::migrate(&world.0, &name, of, &order, |_| ());
    let another = "2:7".parse().unwrap();
    let asked = ask(Some(another));
    assert!(matches!(asked, Err(AskError::Ended(_))), "{asked:?}");
    let mut said = Vec::new();
    while let Ok((mut stream, _)) = listener.accept() {
        stream.set_nonblocking(false).unwrap();
        stream.read_to_end(&mut said).unwrap();
    }
    assert_eq!(said, b"", "it was asked");
    // Its own is asked.
    let own = Supervisor::of(&world.0, &name);
    assert_ne!(own, Some(another));
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| ask(own));
        let mut said = [0; 4];
        while said == [0; 4] {
            if let Ok((mut stream, _)) = listener.accept() {
                stream.set_nonblocking(false).unwrap();
                // A connection that only finds out whether anybody listens says nothing.
                let _ = stream.read_exact(&mut said);
            }
        }
        drop(asked);
    });
}

/// From when it has the name until it says what it is.
#[test]
fn a_job_that_is_being_started_is_waited_for() {
    let world = World::new("beginning");
    let name: JobName = "j".parse().unwrap();
    let order: Migrate =
        serde_json::from_str(r#"{"to":"soft","max_pause_ms":50,"rounds":8}"#).unwrap();
    let ask = || control::migrate(&world.0, &name, None, &order, |_| ());
    assert!(matches!(ask(), Err(AskError::Unknown(_))));
    let dir = world.0.create(&name).unwrap();
    std::thread::scope(|scope| {
        let asked = scope.spawn(ask);
        thread::sleep(Duration::from_millis(50));
        dir.write_meta(&meta(&name, State::Exited(0))).unwrap();
        let asked = asked.join().unwrap();
        assert!(matches!(asked, Err(AskError::Ended(_))), "{asked:?}");
    });
}

#[test]
fn a_user_has_one_balance() {
    let world = World::new("balance");
    let lock = world.0.only_balance().unwrap();
    let error = world.0.only_balance().unwrap_err();
    let pid = std::process::id();
    assert!(matches!(error, JobError::Balances { pid: Some(by) } if by == pid), "{error}");
    assert!(error.to_string().contains(&format!("(process {pid}): end it first")), "{error}");
    drop(lock);
    let again = world.0.only_balance().unwrap();
    assert!(world.0.list().unwrap().is_empty(), "it is no job");
    drop(again);
    // What lies there in its place is not waited for, and not written to.
    let path = world.0.dir.with_file_name("balance.lock");
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("elsewhere", &path).unwrap();
    assert!(matches!(world.0.only_balance(), Err(JobError::Io { .. })));
    assert!(!path.with_file_name("elsewhere").exists());
}
