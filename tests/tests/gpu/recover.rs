//! Jobs on software devices lose a proxy, a supervisor, their disk or their image: they go on, go
//! back, or stop with one line that says why; and the last good image stays good.
use kedge_image::{ImageFile, ImageWriter, Manifest};
use kedge_tests::gpu_steps::{GpuSteps, STEPS};
use kedge_tests::job::{Job, User, children, family, send};
use kedge_tests::random;
use kedge_tests::world::{failure, stderr};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// The number of the section that tells what a proxy held.
const GPU_SECTION: u64 = 16;

/// The proxy is killed, of the job as it was started and of the one that has gone back, more often
/// than the job may.
fn go_back_twice(place: &GpuSteps) {
    let mut job = place.start(&["--recover=2"]);
    job.read_to(20);
    let image = place.checkpoint(&[]);
    for time in 1..=2 {
        job.read_to(job.step + 10);
        job.kill_the_proxy();
        while job.back.len() < time {
            job.read_to(job.step + 1);
            assert!(job.step < 200, "it goes on without its devices; {}", place.log());
        }
    }
    // How far it got until it was captured is the machine's affair.
    assert!(job.back[0] > 20 && job.back[0] == job.back[1], "{:?}", job.back);
    assert!(place.log().contains("for time 2 of 2 at most"), "{}", place.log());
    let rows = String::from_utf8_lossy(&place.output(&["ps"]).stdout).into_owned();
    assert!(rows.contains("running"), "{rows}");
    job.read_to(job.step + 10);
    job.kill_the_proxy();
    assert_eq!(job.drain().code(), Some(1), "it ends as the program does without its devices");
    assert!(job.others.iter().any(|line| line.contains("cuda")), "{:?}", job.others);
    assert!(place.log().contains("gone back 2 times, not again"), "{}", place.log());
    let nonce = job.nonce.clone();
    place.nothing_runs();
    place.is_good(&image);
    place.goes_on(&image, &nonce);
}

#[test]
fn a_job_whose_proxy_is_killed_goes_back_to_its_image() {
    for (name, user) in [("rcback", User::Same), ("rcbacku", User::Nobody)] {
        let Some(place) = GpuSteps::new(name, user) else { continue };
        go_back_twice(&place);
    }
}

#[test]
fn a_job_that_goes_back_ends_as_its_program_does() {
    let place = GpuSteps::mine("rcend");
    let file = place.world.0.join("events");
    let mut job = place.start(&["--recover", "--events", &file.display().to_string()]);
    job.read_to(10);
    place.checkpoint(&[]);
    job.read_to(30);
    job.kill_the_proxy();
    job.read_to(STEPS);
    assert_eq!(job.back.len(), 1);
    assert_eq!(job.end().code(), Some(7));
    place.nothing_runs();
    let rows = String::from_utf8_lossy(&place.output(&["ps", "--all"]).stdout).into_owned();
    assert!(rows.contains("exited 7"), "{rows}");
    let told = fs::read_to_string(&file).expect("events");
    let is = |name: &str, line: &str| line.contains(&format!("\"event\":\"{name}\""));
    let expected = ["goes_back", "restarting", "restarted", "ended"];
    assert_eq!(told.lines().count(), expected.len(), "{told}");
    told.lines().zip(expected).for_each(|(line, name)| assert!(is(name, line), "{told}"));
    assert!(told.ends_with("\"status\":7,\"signal\":null}\n"), "{told}");
}

/// As the kernel does where memory runs out: nothing is left of the process to say so. The proxy
/// ends by itself.
#[test]
fn a_job_whose_program_is_killed_goes_back_to_its_image() {
    for (name, user) in [("rcclient", User::Same), ("rcclientu", User::Nobody)] {
        let Some(place) = GpuSteps::new(name, user) else { continue };
        let mut job = place.start(&["--recover", "--hold"]);
        job.read_to(20);
        let image = place.checkpoint(&[]);
        for time in 1..=2 {
            place.goes_back(&mut job, |job| send("KILL", &place.clients(job)));
            assert_eq!(place.count("the program was killed"), time, "{}", place.log());
            assert_eq!(place.count("by what was held in memory"), time, "{}", place.log());
        }
        // Asked for by kedge, an end is an end.
        let nonce = job.nonce.clone();
        let taken = place.output(&["checkpoint", "j", "--stop"]);
        assert!(taken.status.success(), "{}", stderr(&taken));
        assert!(!job.drain().success(), "{}", place.log());
        assert_eq!(job.back.len(), 2);
        place.nothing_runs();
        place.is_good(&image);
        place.goes_on(Path::new(String::from_utf8_lossy(&taken.stdout).trim()), &nonce);
    }
}

#[test]
fn without_an_image_a_job_ends_and_the_log_says_why() {
    let place = GpuSteps::mine("rcnone");
    let mut job = place.start(&["--recover"]);
    job.read_to(10);
    job.kill_the_proxy();
    assert_eq!(job.drain().code(), Some(1));
    assert!(place.log().contains("no image yet to go back to"), "{}", place.log());
}

#[test]
fn without_recover_or_a_loss_a_job_does_not_go_back() {
    let place = GpuSteps::mine("rcno");
    let mut job = place.start(&[]);
    job.read_to(10);
    let image = place.checkpoint(&[]);
    job.kill_the_proxy();
    assert_eq!(job.drain().code(), Some(1));
    place.is_good(&image);
    let mut job = place.start(&["--recover"]);
    job.read_to(10);
    place.checkpoint(&[]);
    let program: Vec<u32> = children(job.supervisor());
    let program: Vec<u32> = program.into_iter().filter(|p| !job.proxies().contains(p)).collect();
    send("SEGV", &program);
    assert!(job.drain().code() != Some(7));
    assert_eq!(job.back, [] as [u64; 0], "its own end is no loss");
}

/// What the log says of a job that has gone back.
const BACK: &str = "restarted from";

#[test]
fn a_proxy_killed_in_any_phase_of_a_checkpoint_loses_no_good_image() {
    let place = GpuSteps::mine("rcphase");
    let mut job = place.start(&["--recover=20"]);
    job.read_to(5);
    place.checkpoint(&[]);
    for _ in 0..8 {
        job.read_to(job.step + 5);
        let goes_back = place.count(BACK) + 1;
        let mut asked = place.kedge(&["checkpoint", "j"]).spawn().expect("kedge");
        std::thread::sleep(Duration::from_millis(u64::from(random::number(90))));
        job.kill_the_proxy();
        // No step comes twice where the image is of the last one.
        while place.count(BACK) < goes_back {
            job.read_to(job.step + 1);
        }
        asked.wait().expect("kedge checkpoint ends");
    }
    job.read_to(STEPS);
    let nonce = job.nonce.clone();
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    place.nothing_runs();
    let images = place.world.home().join("kedge/images");
    assert!(place.output(&["verify", &images.display().to_string()]).status.success());
    place.goes_on(&images, &nonce);
}

#[test]
fn a_supervisor_killed_amid_a_checkpoint_opens_the_gates() {
    let place = GpuSteps::mine("rcsup");
    for round in 0..8 {
        let mut job = place.start(&[]);
        job.read_to(5);
        let image = place.checkpoint(&[]);
        let mut asked = place.kedge(&["checkpoint", "j"]).spawn().expect("kedge");
        std::thread::sleep(Duration::from_millis(u64::from(random::number(90))));
        send("KILL", &[job.supervisor()]);
        // Nobody holds it up.
        let until = job.step + 60;
        let begin = Instant::now();
        job.read_to(until);
        assert!(begin.elapsed() < Duration::from_secs(25), "round {round}");
        asked.wait().expect("kedge checkpoint ends");
        send("KILL", &pids_of(&place));
        job.drain();
        place.is_good(&image);
    }
}

/// Processes that work for this place's jobs.
fn pids_of(place: &GpuSteps) -> Vec<u32> {
    let mark = place.world.0.display().to_string();
    let all = fs::read_dir("/proc").expect("/proc").flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_string_lossy().parse().ok());
    let ours = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&mark)
    };
    pids.filter(ours).collect()
}

#[test]
fn a_full_disk_ends_a_checkpoint_and_no_more() {
    let place = GpuSteps::mine("rcfull");
    for (whose, file) in [("supervisor", ".kimg"), ("proxy", "gpu-")] {
        let mut job = place.start(&["--recover"]);
        job.read_to(10);
        // A limit on the size of files stands for the disk: it needs no rights. Later, because it
        // is one on shared memory too.
        let limited = match whose {
            "proxy" => job.proxies(),
            _ => vec![job.supervisor()],
        };
        for pid in limited {
            let limit = ["--fsize=20000", "--pid", &pid.to_string()];
            let status = Command::new("prlimit").args(limit).status();
            assert!(status.is_ok_and(|status| status.success()), "prlimit");
        }
        let output = place.output(&["checkpoint", "j"]);
        assert!(!output.status.success(), "{whose}: {output:?}");
        let said = failure(&output);
        assert!(said.contains("too large") && said.contains(file), "{said}");
        job.read_to(STEPS);
        assert_eq!(job.back, [] as [u64; 0]);
        assert_eq!(job.end().code(), Some(7), "{}", place.log());
        let images = fs::read_dir(place.world.home().join("kedge/images")).expect("a folder");
        assert_eq!(images.count(), 0, "what there was of it is gone");
    }
}

/// What a checkpoint has asked for, and what it said; all children of the proxies, which hold
/// memory for it, are killed as soon as there is one.
fn without_its_writer(place: &GpuSteps, job: &Job) -> Output {
    let proxies = job.proxies();
    let mut asked = place.kedge(&["checkpoint", "j"]).spawn().expect("kedge");
    while asked.try_wait().is_ok_and(|ended| ended.is_none()) {
        let holding: Vec<u32> = proxies.iter().flat_map(|proxy| children(*proxy)).collect();
        if !holding.is_empty() {
            send("KILL", &holding);
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    asked.wait_with_output().expect("it ends")
}

#[test]
fn a_checkpoint_whose_writer_is_killed_is_none_and_the_job_goes_on() {
    let place = GpuSteps::of("gpu_blocks", "rcwriter", User::Same).expect("the test's own user");
    let mut job = place.start(&[]);
    job.read_to(5);
    place.checkpoint(&[]);
    // On a loaded machine it may have been written before this is seen.
    let outputs = (0..20).map(|_| without_its_writer(&place, &job));
    let failed = outputs.into_iter().find(|output| !output.status.success()).expect("one fails");
    let said = failure(&failed);
    assert!(said.contains("memory cannot be") && said.contains("devices of process"), "{said}");
    place.ends_well(job);
}

/// An image of a job that was killed afterwards, and its nonce.
fn an_image(place: &GpuSteps) -> (PathBuf, String) {
    let mut job = place.start(&[]);
    job.read_to(10);
    let image = place.checkpoint(&[]);
    job.kill();
    (image, job.nonce.clone())
}

fn gpu_file(image: &Path) -> PathBuf {
    let all = fs::read_dir(image).expect("the image").flatten().map(|entry| entry.path());
    let name = |path: &PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    all.into_iter().find(|path| name(path).starts_with("gpu-")).expect("devices")
}

#[test]
fn damage_in_what_devices_held_is_named_and_nothing_is_left() {
    let place = GpuSteps::mine("rcbad");
    let (image, nonce) = an_image(&place);
    let file = gpu_file(&image);
    let good = fs::read(&file).expect("the file");
    for part in 1..8 {
        let at = good.len() * part / 8;
        let mut bad = good.clone();
        bad[at] ^= 1;
        for (bytes, offset) in [(bad, true), (good[..at].to_vec(), false)] {
            fs::write(&file, bytes).expect("written");
            let said = failure(&place.to_restart(&image, &[]).output().expect("kedge"));
            assert!(said.contains(&file.display().to_string()), "{said}");
            assert!(!offset || said.contains("offset"), "{said}");
            place.nothing_runs();
        }
    }
    fs::write(&file, &good).expect("written");
    place.is_good(&image);
    place.goes_on(&image, &nonce);
}

#[test]
fn devices_of_a_newer_kedge_are_refused_by_version() {
    let place = GpuSteps::mine("rcnew");
    let (image, nonce) = an_image(&place);
    let path = gpu_file(&image);
    let (manifest, good) = (fs::read(image.join("manifest.json")).expect("it"), fs::read(&path));
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut section =
        ImageFile::open(&path, None).and_then(|f| f.section(GPU_SECTION)).expect("it");
    section[0] = 99;
    fs::remove_file(&path).expect("removed");
    let writer = ImageWriter::create(&path).expect("a file");
    writer.section(GPU_SECTION, &section).expect("written");
    let entry = writer.finish().expect("written");
    let mut newer = Manifest::read(&image).expect("a manifest");
    newer.files.retain(|file| file.name != name);
    newer.files.push(entry);
    fs::remove_file(image.join("manifest.json")).expect("removed");
    newer.write(&image).expect("written");
    let said = failure(&place.to_restart(&image, &[]).output().expect("kedge"));
    assert!(said.contains("version 99"), "{said}");
    place.nothing_runs();
    fs::write(&path, good.expect("the file")).expect("written");
    fs::write(image.join("manifest.json"), manifest).expect("written");
    place.goes_on(&image, &nonce);
}

#[test]
fn what_a_restart_lacks_is_named_and_the_image_stays_good() {
    let place = GpuSteps::mine("rclack");
    let (image, nonce) = an_image(&place);
    let said = failure(&place.to_restart(&image, &["--gpu", "soft:2"]).output().expect("kedge"));
    assert!(said.contains("it has seen 1, here are") && said.contains("--gpu"), "{said}");
    place.nothing_runs();
    let proxy = place.world.0.join("bin/kedge-proxy");
    let away = place.world.0.join("away");
    fs::rename(&proxy, &away).expect("moved");
    let said = failure(&place.to_restart(&image, &[]).output().expect("kedge"));
    assert!(said.contains("kedge-proxy is not in"), "{said}");
    fs::rename(&away, &proxy).expect("moved");
    place.is_good(&image);
    // The same amid a job's life: it cannot go back, and says so.
    let mut job = Job::spawn_recovering(place.to_restart(&image, &["--recover"]), &nonce);
    job.read_to(30);
    fs::rename(&proxy, &away).expect("moved");
    job.kill_the_proxy();
    assert_eq!(job.drain().code(), Some(125));
    let mut said = String::new();
    let mut stderr = job.child.stderr.take().expect("a pipe");
    stderr.read_to_string(&mut said).expect("text");
    assert!(said.contains("kedge-proxy is not in") && said.lines().count() == 1, "{said}");
    place.nothing_runs();
    fs::rename(&away, &proxy).expect("moved");
    place.goes_on(&image, &nonce);
}

#[test]
fn a_device_with_less_memory_than_the_image_needs_is_told_in_one_line() {
    let place = GpuSteps::mine("rcsmall");
    let (image, nonce) = an_image(&place);
    let output = place.to_restart(&image, &["--soft-memory", "1M"]).output().expect("kedge");
    let said = failure(&output);
    assert!(said.contains("MiB on its devices") && said.contains("--gpu"), "{said}");
    place.nothing_runs();
    place.is_good(&image);
    place.goes_on(&image, &nonce);
}

/// A library that calls itself a driver and lacks nearly all of it.
fn old_driver(place: &GpuSteps) -> PathBuf {
    let (source, driver) = (place.world.0.join("old.c"), place.world.0.join("libold.so"));
    fs::write(&source, "int cuInit(unsigned flags) { return (int)flags; }\n").expect("written");
    let mut compiler = Command::new("cc");
    let built = compiler.args(["-shared", "-fPIC", "-o"]).arg(&driver).arg(&source).status();
    assert!(built.expect("cc").success());
    driver
}

#[test]
fn a_driver_that_is_too_old_is_told_in_one_line() {
    let place = GpuSteps::mine("rcold");
    let (image, nonce) = an_image(&place);
    let driver = old_driver(&place);
    let restart = || {
        let mut command = place.to_restart(&image, &["--gpu", "local"]);
        command.env("KEDGE_DRIVER", &driver);
        command.output().expect("kedge")
    };
    let said = failure(&restart());
    assert!(said.contains("the NVIDIA driver lacks cu") && said.contains("525"), "{said}");
    place.nothing_runs();
    place.is_good(&image);
    place.goes_on(&image, &nonce);
}

#[test]
fn a_damaged_newest_image_is_passed_over_on_the_way_back() {
    let place = GpuSteps::mine("rcolder");
    let mut job = place.start(&["--recover"]);
    job.read_to(10);
    place.checkpoint(&[]);
    job.read_to(160);
    let newest = gpu_file(&place.checkpoint(&[]));
    let mut bytes = fs::read(&newest).expect("the file");
    let half = bytes.len() / 2;
    bytes[half] ^= 1;
    fs::write(&newest, bytes).expect("written");
    job.read_to(170);
    job.kill_the_proxy();
    job.read_to(STEPS);
    assert!(job.back.len() == 1 && job.back[0] < 160, "{:?}", job.back);
    assert_eq!(job.end().code(), Some(7));
    assert!(place.log().contains(&newest.display().to_string()), "{}", place.log());
}

#[test]
fn a_killed_job_leaves_nothing() {
    for (name, user) in [("rckill", User::Same), ("rckillu", User::Nobody)] {
        let Some(place) = GpuSteps::new(name, user) else { continue };
        let mut job = place.start(&["--recover"]);
        job.read_to(10);
        let image = place.checkpoint(&[]);
        for signal in [&["kill", "j"][..], &["kill", "j", "--signal", "KILL"]] {
            let killed = place.output(signal);
            assert!(killed.status.success(), "{}; {}", stderr(&killed), place.log());
            assert_eq!(place.output(&["ps"]).stdout.iter().filter(|b| **b == b'\n').count(), 1);
            job.drain();
            assert_eq!(job.back.len(), usize::from(signal.len() > 2), "it does not go back");
            place.nothing_runs();
            job = Job::spawn_recovering(place.to_restart(&image, &["--recover"]), &job.nonce);
            job.read_to(20);
        }
        job.kill();
        let said = failure(&place.output(&["kill", "j"]));
        assert!(said.contains("has ended"), "{said}");
    }
}

#[test]
fn what_does_not_want_to_end_is_killed() {
    let place = GpuSteps::mine("rcstub");
    let script = "trap '' TERM; trap 'echo usr' USR1; (trap '' TERM USR1; setsid sleep 300 & wait) & \
        echo nonce x; while :; do sleep 0.1; done";
    let run = ["run", "--gpu", "none", "--job", "j", "--", "bash", "-c", script, place.mark()];
    let mut job = Job::start_recovering(place.kedge(&run));
    assert!(place.output(&["kill", "j", "--signal", "USR1"]).status.success());
    while job.line().is_some_and(|line| line != "usr") {}
    let before = family(job.supervisor()).len();
    assert!(before >= 4, "{before} processes");
    let all = family(job.supervisor());
    assert!(place.output(&["kill", "j", "--grace", "500ms"]).status.success());
    job.drain();
    let lives = |pid: &&u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        !stat.is_empty() && !stat.contains(") Z ")
    };
    assert_eq!(all.iter().filter(lives).collect::<Vec<_>>(), [] as [&u32; 0]);
}
