//! `kedge balance`: jobs of one user move to better devices as those become free, and never to and
//! fro; whatever happens to the daemon, they go on.
use kedge_tests::gpu_steps::GpuSteps;
use kedge_tests::job::{Job, children, send};
use kedge_tests::server::Served;
use kedge_tests::world::{failure, stderr, wait_for};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Lines};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, ExitStatus};
use std::time::Duration;

/// More steps than any test reads.
const MANY_STEPS: &str = "100000";
/// Nobody listens there.
const NOWHERE: &str = "127.0.0.1:1";
/// A daemon in a hurry.
const QUICK: [&str; 4] = ["balance", "--json", "--every=100ms", "--settle=1h"];

fn steps(place: &GpuSteps, name: &str, gpu: &str) -> Command {
    let program = place.program.display().to_string();
    place.kedge(&["run", "--gpu", gpu, "--job", name, "--", &program, MANY_STEPS, "5"])
}

fn is_on(place: &GpuSteps) -> String {
    let rows: Value =
        serde_json::from_slice(&place.output(&["ps", "--json"]).stdout).expect("rows");
    // What looks whether devices are free is a job, too.
    let row = rows.as_array().into_iter().flatten().find(|row| row["name"] == "j");
    row.and_then(|row| row["gpu"].as_str()).unwrap_or_default().to_owned()
}

/// A daemon, and its events as they come.
struct Balance {
    child: Child,
    events: Lines<BufReader<ChildStdout>>,
    /// What was read on the way to others.
    passed: Vec<Value>,
}

impl Balance {
    /// Starts one, which looks from then on.
    fn start(place: &GpuSteps, places: &[&str], options: &[&str]) -> Balance {
        let named: Vec<&str> = places.iter().flat_map(|place| ["--place", place]).collect();
        let mut command = place.kedge(&[&QUICK[..], &named, options].concat());
        let mut child = command.spawn().expect("kedge");
        let events = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let mut balance = Balance { child, events, passed: Vec::new() };
        assert_eq!(balance.event()["event"], "begins");
        balance
    }

    fn event(&mut self) -> Value {
        let Some(line) = self.events.next() else {
            let mut said = String::new();
            let stderr = self.child.stderr.take().expect("a pipe");
            let _ = std::io::Read::read_to_string(&mut { stderr }, &mut said);
            panic!("it has ended: {said}");
        };
        serde_json::from_str(&line.expect("a line")).expect("JSON")
    }

    /// Reads the next event of that kind.
    fn next(&mut self, kind: &str) -> Value {
        loop {
            let event = self.event();
            if event["event"] == kind {
                return event;
            }
            self.passed.push(event);
        }
    }

    /// Reads on until a job has been told to wait for that place, and why; it is told once.
    fn has_waited(&mut self, to: &str, why: &str) {
        let is_it = |event: &&Value| {
            let told = event["why"].as_str().is_some_and(|told| told.contains(why));
            event["event"] == "waits" && event["to"] == to && told
        };
        while !self.passed.iter().any(|event| is_it(&event)) {
            let event = self.event();
            self.passed.push(event);
        }
        assert_eq!(self.passed.iter().filter(is_it).count(), 1, "{:?}", self.passed);
    }

    fn pid(&self) -> u32 {
        children(self.child.id()).first().copied().expect("kedge")
    }

    /// Reads to its end: what it told until then, and how it ended.
    fn rest(mut self) -> (Vec<String>, ExitStatus) {
        let rest = self.events.map_while(Result::ok).collect();
        (rest, self.child.wait().expect("kedge"))
    }

    /// Ends it as Ctrl-C does: what it told until then.
    fn ends(self) -> Vec<String> {
        send("INT", &[self.pid()]);
        let (rest, status) = self.rest();
        assert!(status.success(), "{rest:?}");
        assert!(rest.last().is_some_and(|line| line.contains("\"ends\"")), "{rest:?}");
        rest
    }
}

/// What mrCUDA is for, without anybody who asks.
#[test]
fn a_job_that_began_far_comes_home_when_the_near_device_is_free() {
    let server = Served::start(&["--gpu", "soft"]);
    let place = GpuSteps::mine("blhome");
    let mut other = Job::start_recovering(steps(&place, "other", "soft"));
    let mut job = Job::start_recovering(steps(&place, "j", &server.address));
    job.read_to(10);
    let mut balance = Balance::start(&place, &["soft", &server.address], &["--hold-off=1s"]);
    let waits = balance.next("waits");
    assert_eq!((&waits["job"], &waits["to"]), (&"j".into(), &"soft".into()), "{waits}");
    assert_eq!(waits["why"], "the job other is there");
    job.read_to(job.step + 20);
    assert_eq!(is_on(&place), server.address);
    other.kill();
    let decides = balance.next("decides");
    assert_eq!((&decides["trigger"], &decides["dry_run"]), (&"free".into(), &false.into()));
    assert_eq!((&decides["from"], &decides["to"]), (&json!(server.address), &"soft".into()));
    assert!(decides["free_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{decides}");
    let moved = balance.next("moved");
    assert!(moved["bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{moved}");
    assert!(moved["pause_seconds"].as_f64() <= moved["seconds"].as_f64(), "{moved}");
    assert_eq!(is_on(&place), "soft");
    job.read_to(job.step + 20);
    assert_eq!(job.back, [] as [u64; 0]);
    assert!(place.log().contains("moves to soft: devices of this machine are free"));
    // It is well off now, also in the looks after the first second.
    std::thread::sleep(Duration::from_secs(2));
    let rest = balance.ends();
    assert!(!rest.iter().any(|line| line.contains("\"decides\"")), "{rest:?}");
    job.kill();
    place.nothing_runs();
}

/// One that cannot be reached, and one that the job does not fit on: the one is not even tried, the
/// other later and later.
#[test]
fn a_target_that_fails_is_held_off() {
    let (server, two) = (Served::start(&["--gpu", "soft"]), Served::start(&["--gpu", "soft:2"]));
    let place = GpuSteps::mine("blfail");
    let mut job = Job::start_recovering(steps(&place, "j", "soft"));
    job.read_to(10);
    let before = job.proxies();
    // Devices that report errors are left for whatever there is.
    let errors = place.world.home().join("errors.json");
    fs::write(&errors, r#"{"soft": 2}"#).expect("a file");
    let option = format!("--errors={}", errors.display());
    let options = [&option[..], "--hold-off=1s"];
    let mut balance = Balance::start(&place, &[NOWHERE, "soft", &two.address], &options);
    for again in [1.0, 2.0] {
        let decides = balance.next("decides");
        assert_eq!((&decides["trigger"], &decides["errors"]), (&"errors".into(), &2.into()));
        assert_eq!(decides["to"], json!(two.address), "nobody is at the first: {decides}");
        let failed = balance.next("failed");
        let why = failed["why"].as_str().unwrap_or_default();
        assert!(why.contains("it has seen 1, here are 2"), "{failed}");
        let seconds = failed["again_seconds"].as_f64().expect("a time");
        assert!((seconds - again).abs() < 1e-6, "{failed}");
    }
    balance.has_waited(NOWHERE, "cannot be reached");
    balance.has_waited(&two.address, "here are 2");
    job.read_to(job.step + 20);
    balance.ends();
    wait_for("a new proxy is still there", || job.proxies() == before);
    // Where there is a whole device, the job leaves; and it does not come back at once.
    let mut balance = Balance::start(&place, &["soft", &server.address], &options);
    assert_eq!(balance.next("moved")["to"], json!(server.address));
    fs::write(&errors, "{}").expect("a file");
    balance.has_waited("soft", "it has moved a short while ago");
    job.read_to(job.step + 20);
    balance.ends();
    assert_eq!((is_on(&place), job.back.len()), (server.address.clone(), 0));
    job.kill();
    place.nothing_runs();
}

#[test]
fn a_dry_run_touches_nothing_and_one_daemon_is_enough() {
    let server = Served::start(&["--gpu", "soft"]);
    let place = GpuSteps::mine("bldry");
    let mut job = Job::start_recovering(steps(&place, "j", &server.address));
    job.read_to(10);
    let before = job.proxies();
    // It has nothing to do.
    let balance = Balance::start(&place, &["soft", NOWHERE], &[]);
    let second = place.output(&["balance", "--place", "soft", "--place", NOWHERE]);
    let said = failure(&second);
    assert!(said.contains("a kedge balance of yours runs on this host already"), "{said}");
    assert!(said.contains(&format!("(process {})", balance.pid())), "{said}");
    // One that moves nothing may look beside it; its places are those of a file.
    let file = place.world.home().join("config.toml");
    let places = format!("[balance]\nplace = [\"soft\", \"{}\"]\n", server.address);
    fs::write(&file, &places).expect("a file");
    let dry = |options: &[&str]| {
        let mut command = place.kedge(&[&["balance", "--dry-run"], options].concat());
        command.env("KEDGE_CONFIG", &file).output().expect("kedge")
    };
    let output = dry(&["--once"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let would = format!("j: would move from {} to soft (", server.address);
    assert!(output.status.success() && text.contains(&would), "{text}{}", stderr(&output));
    let errors = place.world.home().join("errors.json");
    fs::write(&errors, json!({ &server.address: 2 }).to_string()).expect("a file");
    let errors = format!("--errors={}", errors.display());
    let options = ["--dry-run", "--hold-off=1s", &errors];
    let mut dry_run = Balance::start(&place, &["soft", &server.address], &options);
    assert_eq!(dry_run.next("decides")["dry_run"], true);
    // Time for several looks that hold nothing off.
    std::thread::sleep(Duration::from_secs(2));
    job.read_to(job.step + 50);
    let rest = dry_run.ends();
    assert!(!rest.iter().any(|line| line.contains("\"decides\"")), "told once: {rest:?}");
    assert_eq!((is_on(&place), job.proxies()), (server.address.clone(), before));
    assert!(!place.log().contains("balance["), "{}", place.log());
    for (option, said) in [
        ("--gain=1", "--gain 1: give more than 1"),
        ("--every=0s", "give 100ms or more"),
        ("--hold-off=999ms", "give 1s or more"),
    ] {
        let wrong = dry(&[option]);
        assert_eq!(wrong.status.code(), Some(2), "{option}");
        assert!(stderr(&wrong).contains(said), "{}", stderr(&wrong));
    }
    fs::write(&file, places.replace("place", "plaec")).expect("a file");
    let said = failure(&dry(&["--once"]));
    assert!(
        said.contains("`plaec` is no option of `kedge balance`: did you mean place?"),
        "{said}"
    );
    // One that was killed keeps no other from it.
    send("KILL", &[balance.pid()]);
    balance.rest();
    Balance::start(&place, &["soft", NOWHERE], &[]).ends();
    job.kill();
    place.nothing_runs();
}

/// A job that waits in the middle of a move by a daemon, until the file is gone.
fn moving(name: &str, server: &Served) -> (GpuSteps, Job, Balance, PathBuf) {
    let place = GpuSteps::mine(name);
    let held = place.world.home().join("held");
    let mut command = steps(&place, "j", &server.address);
    command.env("KEDGE_HOLD_MOVE", format!("round:{}", held.display()));
    let mut job = Job::start_recovering(command);
    job.read_to(10);
    let mut balance = Balance::start(&place, &["soft", &server.address], &[]);
    balance.next("decides");
    wait_for("the phase does not come", || held.exists());
    (place, job, balance, held)
}

fn comes_home(place: &GpuSteps, mut job: Job) {
    wait_for("it does not come home", || is_on(place) == "soft");
    wait_for("the old proxy is still there", || job.proxies().len() == 1);
    job.read_to(job.step + 20);
    assert_eq!(job.back, [] as [u64; 0]);
    job.kill();
    place.nothing_runs();
}

#[test]
fn a_killed_daemon_leaves_the_job_whole() {
    let server = Served::start(&["--gpu", "soft"]);
    let (place, mut job, balance, held) = moving("blkill", &server);
    send("KILL", &[balance.pid()]);
    let (rest, status) = balance.rest();
    assert!(!status.success() && rest.is_empty(), "{rest:?}");
    job.read_to(job.step + 5);
    fs::remove_file(&held).expect("held");
    comes_home(&place, job);
}

#[test]
fn one_that_is_interrupted_waits_for_the_move() {
    let server = Served::start(&["--gpu", "soft"]);
    let (place, job, mut balance, held) = moving("blint", &server);
    send("INT", &[balance.pid()]);
    std::thread::sleep(Duration::from_millis(500));
    assert!(balance.child.try_wait().expect("a child").is_none(), "it has not waited");
    fs::remove_file(&held).expect("held");
    balance.next("moved");
    let (rest, status) = balance.rest();
    assert!(status.success() && rest.len() == 1 && rest[0].contains("\"ends\""), "{rest:?}");
    comes_home(&place, job);
}

/// A model and figures by hand: the program asks 1000 times, and takes 10 s here.
#[test]
fn a_predicted_gain_decides_where_there_is_one() {
    let server = Served::start(&["--gpu", "soft"]);
    let place = GpuSteps::mine("blgain");
    let mut job = Job::start_recovering(steps(&place, "j", &server.address));
    job.read_to(10);
    let costs = |call: f64| {
        json!({
            "session": 0.0, "call": call, "post": 0.0, "write": 0.0, "write_byte": 0.0,
            "read": 0.0, "read_byte": 0.0, "shared_write_byte": 0.0, "shared_read_byte": 0.0,
        })
    };
    let model = json!({
        "format": 1, "here": "soft", "there": server.address, "near": costs(0.0),
        "far": costs(1e-3), "record": 0.0, "moving": null,
    });
    let stats = json!({
        "format": 1, "job": "before", "gpu": "soft", "seconds": 10.0,
        "command": [place.program.display().to_string(), MANY_STEPS, "5"],
        "stats": {"clients": 1, "calls": 1000},
    });
    let file = |name: &str, value: &Value| {
        let path = place.world.home().join(name);
        fs::write(&path, value.to_string()).expect("a file");
        path.display().to_string()
    };
    let (model, stats) = (file("model.json", &model), file("stats.json", &stats));
    let files = ["--once", "--model", &model, "--stats", &stats];
    let balance = |gain: &str| {
        let options = [&files[..], &["--gain", gain]].concat();
        Balance::start(&place, &["soft", &server.address], &options)
    };
    let mut small = balance("1.2");
    let waits = small.next("waits");
    assert_eq!(waits["why"], "the predicted gain is 1.100, less than 1.2", "{waits}");
    assert!(small.rest().1.success());
    assert_eq!(is_on(&place), server.address);
    let mut enough = balance("1.05");
    let decides = enough.next("decides");
    assert_eq!((&decides["trigger"], &decides["threshold"]), (&"gain".into(), &1.05.into()));
    assert_eq!((&decides["here_seconds"], &decides["there_seconds"]), (&11.0.into(), &10.0.into()));
    enough.next("moved");
    assert!(enough.rest().1.success());
    comes_home(&place, job);
    // What is no model is named, before anything is looked at.
    let named = ["balance", "--place", "soft", "--place", NOWHERE];
    let wrong = place.output(&[&named[..], &["--model", &stats, "--stats", &stats]].concat());
    assert!(failure(&wrong).contains("not what `kedge model fit` writes"), "{}", stderr(&wrong));
}
