//! What goes wrong while a job is checkpointed is named, harms neither the job nor the images that
//! there are.
use kedge_tests::job::{AHEAD, Job, User, build, family, kedge_as, send};
use kedge_tests::place::Place;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant, SystemTime};

const STEPS: u64 = AHEAD + 100;

#[test]
fn any_damage_is_named_and_an_older_image_is_still_good() {
    let place = Place::mine("ckbad");
    let mut job = place.steps([3 * AHEAD, 2, 2, 4]);
    job.read_to(10);
    place.checkpoint(&[]);
    let between = 10 + AHEAD;
    job.read_to(between + 1);
    let newest = place.checkpoint(&[]);
    let nonce = job.nonce.clone();
    job.kill();
    let files: Vec<PathBuf> = fs::read_dir(&newest)
        .expect("the image")
        .map(|entry| entry.expect("a file").path())
        .collect();
    assert!(files.len() >= 3, "{files:?}");
    for file in files {
        let good = fs::read(&file).expect("the file");
        if good.is_empty() {
            continue;
        }
        let mut bad = good.clone();
        bad[good.len() / 3] ^= 1;
        for bytes in [bad, good[..good.len() - 1].to_vec()] {
            fs::write(&file, bytes).expect("written");
            let said = place.failure(&["restart", &newest.display().to_string()]);
            assert!(said.contains(&file.display().to_string()), "{said}");
            let output = place.output(&["verify", &newest.display().to_string()]);
            assert_eq!(output.status.code(), Some(1), "{}", file.display());
            assert!(place.json(&["ps", "--json"]).as_array().is_some_and(Vec::is_empty));
        }
        if file.extension().is_some_and(|kind| kind == "kimg") {
            // Passed over for the older one, which the log tells.
            let mut job = place.restart(&place.images(), &nonce);
            assert!(job.step <= between, "restarted from the damaged image");
            assert!(place.log().contains(&file.display().to_string()), "{}", place.log());
            job.kill();
        }
        fs::write(&file, good).expect("written");
    }
    let mut job = place.restart(&newest, &nonce);
    assert!(job.step > between);
    job.kill();
}

/// The processes that hold memory for the image being written: stopped children of kedge.
fn clones(kedge: u32) -> Vec<u32> {
    let traced = |pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.lines().any(|line| line.starts_with("TracerPid:") && !line.ends_with("\t0"))
    };
    family(kedge).into_iter().filter(traced).collect()
}

#[test]
fn a_checkpoint_that_fails_harms_nobody() {
    let place = Place::mine("ckfail");
    let mut job = place.steps([AHEAD + 100, 5, 2, 300]);
    job.read_to(5);
    place.checkpoint(&["--codec", "raw"]);
    for _ in 0..3 {
        // Whoever asked is killed: the image comes all the same.
        place.checkpoint(&["--wait", "captured", "--codec", "zstd"]);
        // The clone that holds the memory is killed: the image is none.
        let begin = Instant::now();
        let held = loop {
            match clones(job.supervisor()) {
                held if !held.is_empty() => break held,
                _ if begin.elapsed() > Duration::from_secs(5) => break Vec::new(),
                _ => {}
            }
        };
        send("KILL", &held);
        job.read_to(job.step + 5);
        place.settle();
    }
    job.read_to(job.step + 5);
    let states = place.states();
    assert!(states.contains(&("j-0001".into(), "finished".into())), "{states:?}");
    assert!(states.iter().all(|(_, state)| state != "damaged"), "{states:?}");
    assert!(place.log().contains("checkpoint failed"), "{}", place.log());
    assert!(place.output(&["verify", &place.images().display().to_string()]).status.success());
    assert_eq!(job.finish(AHEAD + 100).code(), Some(7));
}

#[test]
fn a_killed_supervisor_leaves_the_program_and_the_last_good_image() {
    let place = Place::mine("cksup");
    let mut job = place.steps([AHEAD + 100, 5, 2, 300]);
    job.read_to(5);
    place.checkpoint(&[]);
    let nonce = job.nonce.clone();
    let program: Vec<u32> =
        family(job.supervisor()).into_iter().filter(|p| *p != job.supervisor()).collect();
    place.checkpoint(&["--wait", "captured", "--codec", "zstd"]);
    job.signal("KILL");
    // Nobody holds it up.
    job.read_to(job.step + 50);
    let first = ("j-0001".to_owned(), "finished".to_owned());
    let states = place.states();
    assert!(
        states.contains(&first) && states.iter().all(|(_, state)| state != "damaged"),
        "{states:?}"
    );
    send("KILL", &program);
    job.drain();
    // Half an image, if there is one, is in nobody's way.
    let mut job = place.restart(&place.images(), &nonce);
    job.read_to(60);
    place.checkpoint(&[]);
    job.kill();
}

/// Kills processes that take too long, so that whoever reads their output goes on.
fn bounded(pids: Vec<u32>) -> mpsc::Sender<()> {
    let (ended, end) = mpsc::channel();
    std::thread::spawn(move || {
        if end.recv_timeout(Duration::from_secs(20)) == Err(mpsc::RecvTimeoutError::Timeout) {
            send("KILL", &pids);
        }
    });
    ended
}

/// Waits until a thread of `pid` is traced. False: the checkpoint that was `asked` for or the
/// program is over, and the pause went by unseen, as on a loaded machine it may.
fn sees_the_pause(pid: u32, asked: &mut Child) -> bool {
    let traced = |status: String| !status.contains("TracerPid:\t0\n");
    while asked.try_wait().expect("a child").is_none() {
        let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return false };
        let status = |task: fs::DirEntry| fs::read_to_string(task.path().join("status")).ok();
        if tasks.flatten().any(|task| status(task).is_some_and(traced)) {
            return true;
        }
    }
    false
}

/// The supervisor is killed at a moment within 5 ms of the pause's begin; each of the program's
/// threads still does its part of every step. Whether the pause was seen.
fn kill_amid_a_checkpoint(place: &Place) -> bool {
    let mut job = place.steps([200, 5, 16, 8]);
    let kedge = job.supervisor();
    let program: Vec<u32> = family(kedge).into_iter().filter(|pid| *pid != kedge).collect();
    let first = *program.first().expect("the program");
    let _ended = bounded(program);
    let script = format!("read -r; kill -KILL {kedge}");
    let mut killer = Command::new("bash");
    let mut killer = killer.args(["-c", &script]).stdin(Stdio::piped()).spawn().expect("bash");
    job.read_to(5);
    let mut asked =
        kedge_as(&place.world, place.user, &["checkpoint", "j"]).spawn().expect("kedge");
    let seen = sees_the_pause(first, &mut asked);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock");
    let moment = Duration::from_micros(u64::from(now.subsec_nanos()) / 1000 % 5000);
    println!("killed {moment:?} after the pause's begin");
    std::thread::sleep(moment);
    killer.stdin.take().expect("a pipe").write_all(b"\n").expect("bash reads");
    assert!(killer.wait().expect("bash").success());
    job.finish(200);
    let _ = asked.wait();
    seen
}

#[test]
fn a_supervisor_killed_amid_a_checkpoint_harms_no_thread() {
    for (name, user) in [("ckamid", User::Same), ("ckamidu", User::Nobody)] {
        let Some(place) = Place::new(name, user) else { continue };
        let times = (0..30).filter(|_| kill_amid_a_checkpoint(&place)).take(6).count();
        assert_eq!(times, 6, "a pause is rarely seen");
    }
}

#[test]
fn a_full_disk_ends_a_checkpoint_and_no_more() {
    let place = Place::mine("ckfull");
    // A limit on the size of files stands for the disk: it needs no rights.
    let program = build(&place.world, "steps", &[]).display().to_string();
    let mut command = kedge_as(
        &place.world,
        place.user,
        &["run", "--gpu", "none", "--job", "j", "--", &program, "500", "3", "2", "64"],
    );
    // `timeout` and all below it.
    let limited = {
        let mut prlimit = std::process::Command::new("prlimit");
        prlimit.arg("--fsize=1000000").arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            prlimit.env(name, value.unwrap_or_default());
        }
        prlimit.current_dir(place.world.home()).stdin(std::process::Stdio::null());
        prlimit.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        command = prlimit;
        command
    };
    let mut job = Job::start(limited);
    job.read_to(10);
    let said = place.failure(&["checkpoint", "j"]);
    assert!(said.contains("too large") && said.contains(".kimg"), "{said}");
    assert_eq!(place.names(), [] as [String; 0], "what there was of it is gone");
    assert_eq!(job.finish(STEPS).code(), Some(7));
}
