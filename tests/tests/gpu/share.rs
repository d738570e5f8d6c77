//! Processes that work in each other's device memory are checkpointed and restarted together.
use kedge_tests::gpu_steps::{BETWEEN, GpuSteps, STEPS};
use kedge_tests::host;
use kedge_tests::job::{Job, User, send};
use kedge_tests::random;
use kedge_tests::world::{failure, stderr, wait_for};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

fn pair(name: &str, user: User) -> Option<GpuSteps> {
    GpuSteps::of("gpu_pair", name, user)
}

fn mine(name: &str) -> GpuSteps {
    pair(name, User::Same).expect("the test's own user")
}

fn run(place: &GpuSteps, options: &[&str]) -> Command {
    let (program, steps) = (place.program.display().to_string(), STEPS.to_string());
    let run = [&["run", "--gpu", "soft", "--job", "j"], options, &["--"]].concat();
    place.kedge(&[&run[..], &[&program, &steps, BETWEEN]].concat())
}

/// All processes and proxies killed and brought back, twice.
fn survives(place: &GpuSteps, options: &[&str]) {
    let mut job = Job::start(run(place, options));
    let nonce = job.nonce.clone();
    job.read_to(STEPS / 5);
    for until in [STEPS / 2, STEPS] {
        let before = job.step;
        let image = place.checkpoint(&[]);
        job.read_to(job.step + 5);
        job.kill();
        let printed = job.step;
        job = Job::restart(place.to_restart(&image, &[]), &nonce);
        assert!((before + 1..=printed + 1).contains(&job.step), "went on at step {}", job.step);
        if until < STEPS {
            job.read_to(until);
        }
    }
    assert_eq!(job.finish(STEPS).code(), Some(7), "{}", place.log());
}

#[test]
fn processes_that_share_memory_and_events_go_on_together() {
    for (name, user) in [("share", User::Same), ("shareu", User::Nobody)] {
        let Some(place) = pair(name, user) else { continue };
        survives(&place, &[]);
    }
}

#[test]
fn their_images_may_build_on_each_other() {
    survives(&mine("shareinc"), &["--incremental"]);
}

/// Each copy finds its own processes' memory, although all have handles of one name.
#[test]
fn copies_of_a_job_run_side_by_side() {
    let place = mine("sharecopy");
    let mut first = Job::start(run(&place, &[]));
    let nonce = first.nonce.clone();
    first.read_to(STEPS / 5);
    let image = place.checkpoint(&[]);
    let second = Job::restart(place.to_restart(&image, &["--job", "second"]), &nonce);
    let third = Job::restart(place.to_restart(&image, &["--job", "third"]), &nonce);
    for job in [first, second, third] {
        assert_eq!(job.finish(STEPS).code(), Some(7));
    }
}

/// One process's proxy alone is lost.
#[test]
fn all_go_back_when_one_loses_its_devices() {
    let place = mine("sharelost");
    let mut job = Job::start_recovering(run(&place, &["--recover", "--hold"]));
    job.read_to(20);
    place.checkpoint(&[]);
    job.read_to(job.step + 10);
    let proxies = job.proxies();
    assert_eq!(proxies.len(), 2, "{proxies:?}");
    send("KILL", &proxies[1..]);
    job.read_to(STEPS);
    assert_eq!(job.back.len(), 1, "{}", place.log());
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    place.nothing_runs();
}

/// One of the proxies is killed in the middle of a restart, the owner of what the other waits for
/// or not: either all comes back, or nothing is left and one line says why; the image stays good.
#[test]
fn a_proxy_killed_amid_a_restart_leaves_all_or_nothing() {
    let place = mine("shareamid");
    let mut job = Job::start_recovering(run(&place, &[]));
    job.read_to(20);
    let image = place.checkpoint(&[]);
    job.kill();
    let nonce = job.nonce.clone();
    place.nothing_runs();
    let mut failed = 0;
    for round in 0..6 {
        let child = place.to_restart(&image, &[]).spawn().expect("kedge");
        // The first proxy makes what the second opens; they come one after the other.
        let some = 1 + round % 2;
        let mut proxies = Vec::new();
        wait_for("no proxy comes", || {
            proxies = place.proxies();
            proxies.len() >= some
        });
        std::thread::sleep(std::time::Duration::from_millis(u64::from(random::number(30))));
        send("KILL", &[proxies[some - 1]]);
        let output = child.wait_with_output().expect("it ends");
        match output.status.code() {
            Some(125) => {
                let said = failure(&output);
                assert!(said.contains("proxy"), "{said}");
                failed += 1;
            }
            // Restarted before that: it has lost its devices, and fails as a program does.
            code => assert!(![Some(7), Some(124)].contains(&code), "{output:?}"),
        }
        place.nothing_runs();
        place.is_good(&image);
    }
    println!("{failed} of 6 failed");
    place.goes_on(&image, &nonce);
}

/// The driver's documents have an error for it: a signal that comes from elsewhere, and says that
/// nothing will.
#[test]
fn who_waits_for_a_process_that_is_killed_is_told() {
    let place = mine("shareleft");
    let program = host("gpu_leaves.cu", "gpu_leaves", &[]).display().to_string();
    let output = place.output(&["run", "--gpu", "soft", "--", &program]);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert_eq!(printed.trim(), "cudaErrorExternalDevice", "{}", stderr(&output));
}

/// Memory of a process that lives, in another job, is nobody's to save.
#[test]
fn memory_of_another_job_is_refused_by_name() {
    let place = mine("sharestranger");
    let program = host("gpu_stranger.cu", "gpu_stranger", &[]).display().to_string();
    let file = place.world.0.join("handle").display().to_string();
    let start = |name: &str, does: &str| {
        let run = ["run", "--gpu", "soft", "--soft-memory", "128M", "--job", name, "--"];
        Job::start(place.kedge(&[&run[..], &[&program, does, &file]].concat()))
    };
    let mut giver = start("gives", "give");
    let mut taker = start("takes", "take");
    let refused = place.output(&["checkpoint", "takes"]);
    let said = stderr(&refused);
    assert!(!refused.status.success() && said.contains("not of this job"), "{said}");
    let taken = place.output(&["checkpoint", "gives", "--stop"]);
    assert!(taken.status.success(), "what it has given is its own: {}", stderr(&taken));
    let _ = giver.wait();
    // Who made it is gone: it is the taker's now, and comes back with it.
    let taken = place.output(&["checkpoint", "takes"]);
    assert!(taken.status.success(), "{}", stderr(&taken));
    taker.kill();
    let image = String::from_utf8_lossy(&taken.stdout).trim().to_owned();
    place.is_good(Path::new(&image));
    let mut again: Job = Job::spawn_recovering(place.to_restart(Path::new(&image), &[]), "");
    let begin = std::time::Instant::now();
    // What is left of the job before it may be there for a moment, without its supervisor.
    let runs = || {
        let rows: serde_json::Value =
            serde_json::from_slice(&place.output(&["ps", "--json"]).stdout).unwrap();
        let mut rows = rows.as_array().expect("a list").iter();
        rows.any(|row| row["name"] == "takes" && row["state"] == "running")
    };
    while !runs() {
        assert!(begin.elapsed().as_secs() < 20, "{}", place.log());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let killed = place.output(&["kill", "takes", "--grace", "0s"]);
    assert!(killed.status.success(), "{}", stderr(&killed));
    let _ = again.drain();
}

/// Runs `program` of `tests/hosts` as a part of the job `j`.
fn part(place: &GpuSteps, program: &str, arguments: &[&str]) -> Job {
    part_with(place, &[], program, arguments)
}

fn part_with(place: &GpuSteps, options: &[&str], program: &str, arguments: &[&str]) -> Job {
    let program = host(&format!("{program}.cu"), program, &[]).display().to_string();
    let run = ["run", "--gpu", "soft", "--join", "j"];
    Job::start(place.kedge(&[&run[..], options, &["--", &program], arguments].concat()))
}

/// The steps that a part printed after `nonce`, and whether it ended well.
fn told(lines: &[&str], nonce: &str) -> (Vec<u64>, bool) {
    let own = lines.iter().filter_map(|line| line.strip_prefix(nonce));
    let (steps, words): (Vec<&str>, Vec<&str>) = own.partition(|rest| rest.trim() != "well");
    (steps.iter().filter_map(|step| step.trim().parse().ok()).collect(), words.len() == 1)
}

/// Where the images lie that the parts of one build on; empty: nowhere.
fn read_parents(image: &Path) -> Vec<String> {
    let parts = kedge_image::Manifest::read(image).expect("a whole").parts;
    let manifests = parts.iter().map(|part| kedge_image::Manifest::read(&image.join(&part.name)));
    let parents = manifests.map(|part| part.expect("a part").parent);
    parents.map(|at| at.map(|at| at.place().display().to_string()).unwrap_or_default()).collect()
}

/// What three processes of two parts had on their devices: for each part, and added up.
fn inspect_tells_of_all(place: &GpuSteps, image: &Path) {
    let image = image.display().to_string();
    let output = place.output(&["inspect", &image, "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let memory = |of: &Value| {
        let kinds = of.as_array().expect("kinds").iter().filter(|kind| kind["kind"] == "memory");
        kinds.map(|kind| kind["bytes"].as_u64().expect("bytes")).sum::<u64>()
    };
    let part = |number: usize| {
        let part = &report["parts"][number];
        assert!(part["files"].as_array().is_some_and(|files| files.len() > 1), "{part}");
        let devices = part["devices"].as_array().expect("devices");
        assert!(devices.iter().all(|of| of["made"]["contexts"] == 1), "{part}");
        (devices.len(), devices.iter().map(|of| memory(&of["memory"])).sum::<u64>())
    };
    let [(one, first), (two, second)] = [part(0), part(1)];
    assert_eq!((one, two), (1, 2), "{report}");
    assert!(first > 0 && second > 0, "{report}");
    assert_eq!(memory(&report["total"]["devices"]), first + second, "{report}");
    let text = place.output(&["inspect", &image]).stdout;
    let text = String::from_utf8_lossy(&text);
    assert_eq!(text.matches("made anew: ").count(), 3, "{text}");
    assert!(text.contains("all parts") && text.contains("all devices"), "{text}");
}

#[test]
fn the_parts_of_a_joint_job_come_back_with_their_devices() {
    parts_come_back("sharejoin", &[], 1);
}

#[test]
fn the_devices_of_parts_are_saved_by_what_has_changed() {
    let image = parts_come_back("sharegrow", &["--incremental"], 3);
    assert!(image.ends_with("j-0003"), "{}", image.display());
}

/// Returns the last of so many images, from which they come back.
fn parts_come_back(name: &str, options: &[&str], images: u64) -> PathBuf {
    let place = mine(name);
    let steps = [STEPS.to_string(), BETWEEN.to_owned()];
    let steps = steps.each_ref().map(String::as_str);
    let start = |program| part_with(&place, options, program, &steps);
    let mut parts = ["gpu_steps", "gpu_pair"].map(start);
    let mut saved = |before: u64| {
        parts.iter_mut().for_each(|part| part.read_to(part.step + STEPS / 10));
        let image = place.checkpoint(&[]);
        let parents = read_parents(&image);
        let on = format!("j-{before:04}/");
        assert!(parents.iter().all(|at| before == 0 || at.starts_with(&on)), "{parents:?}");
        image
    };
    let image = (0..images).map(&mut saved).last().expect("one");
    let before = parts.each_ref().map(|part| part.step);
    parts.iter_mut().for_each(Job::stop);
    inspect_tells_of_all(&place, &image);
    let restarted = place.to_restart(&image, &[]).output().expect("kedge");
    assert_eq!(restarted.status.code(), Some(7), "{}", stderr(&restarted));
    let text = String::from_utf8_lossy(&restarted.stdout);
    let lines: Vec<&str> = text.lines().collect();
    for (part, before) in parts.iter().zip(before) {
        let (steps, well) = told(&lines, &part.nonce);
        assert!(steps[0] > before && well, "from {}: {text}", steps[0]);
        assert_eq!(steps, (steps[0]..=STEPS).collect::<Vec<u64>>());
    }
    image
}

#[test]
fn memory_of_another_part_is_refused_by_name() {
    let place = mine("sharepart");
    let file = place.world.0.join("handle").display().to_string();
    let _giver = part(&place, "gpu_stranger", &["give", &file]);
    let _taker = part(&place, "gpu_stranger", &["take", &file]);
    let said = stderr(&place.output(&["checkpoint", "j"]));
    assert!(said.contains("not of this part"), "{said}");
}
