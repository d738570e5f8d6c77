//! Jobs whose devices are of several places: checkpointed, killed, and restarted on the same
//! places, on fewer and on others.
use kedge_tests::gpu_steps::GpuSteps;
use kedge_tests::job::{Job, User, children, kedge_as, send};
use kedge_tests::place::Place;
use kedge_tests::relay::Relay;
use kedge_tests::server::Served;
use kedge_tests::world::wait_for;
use kedge_tests::{host, kedge};
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::time::Duration;

const STEPS: u64 = 250;

fn servers() -> [Served; 2] {
    [Served::start(&["--gpu", "soft:2"]), Served::start(&["--gpu", "soft:2"])]
}

fn start(place: &Place, gpu: &str) -> Job {
    place.on(gpu, "gpu_round", &[], &[&STEPS.to_string(), "5"])
}

/// The job is checkpointed, killed, and goes on where each of `places` says (`None`: where it was);
/// then it comes to its end.
fn moves(place: &Place, mut job: Job, places: &[Option<&str>]) {
    let nonce = job.nonce.clone();
    job.read_to(5);
    for to in places {
        let before = job.step;
        let image = place.checkpoint(&[]);
        job.read_to(job.step + 3);
        job.kill();
        let printed = job.step;
        let options = to.map_or(vec![], |gpu| vec!["--gpu", gpu]);
        job = place.restart_with(&image, &options, &nonce);
        assert!((before + 1..=printed + 1).contains(&job.step), "went on at step {}", job.step);
        job.read_to(job.step + 10);
        let shown = image.display().to_string();
        assert!(place.output(&["verify", &shown]).status.success(), "{shown}");
    }
    assert_eq!(job.finish(STEPS).code(), Some(7));
}

#[test]
fn devices_of_two_servers_come_back() {
    let place = Place::mine("plcsame");
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    let job = start(&place, &format!("{a}/0,{b}/0"));
    moves(&place, job, &[None, None]);
}

/// A place of the image goes whole to one of those that there are.
#[test]
fn places_come_back_on_fewer_and_on_others() {
    let place = Place::mine("plcfew");
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    let job = start(&place, &format!("{a}/0,soft,{b}/0,{a}/1"));
    // Devices 0 and 3 are of one place; 1 and 2 may be of any.
    let [here, turned, one] =
        ["soft:4".to_owned(), format!("{b}/1,{a}/0,soft,{b}/0"), format!("soft,{a}/1,0,soft")];
    moves(&place, job, &[None, Some(&one), Some(&here), Some(&turned), None]);
}

/// What cannot go on there is refused by name, and goes on elsewhere.
#[test]
fn a_place_is_not_divided() {
    let place = Place::mine("plcnot");
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    let mut job = start(&place, &format!("{a}/0,{a}/1,{b}/0"));
    job.read_to(5);
    let image = place.checkpoint(&[]);
    job.kill();
    let shown = image.display().to_string();
    for (gpu, why) in [
        (format!("{a}/0,{b}/0,1"), "its devices 0, 1 were of one place, and here are of several"),
        (format!("{a}/0,{b}/0"), "it has seen 3 devices, here are 2"),
        ("soft".to_owned(), "it has seen 3 devices, here are 1"),
        (format!("{a}/0,1,7,soft"), "it has seen 3 devices, here are 4"),
        (format!("{a}/0,1,127.0.0.1:1/0"), "its devices at 127.0.0.1:1/0: "),
        (format!("{a}/0,1,{b}/7"), &format!("its devices at {b}/7: ")),
    ] {
        let said = place.failure(&["restart", &shown, "--gpu", &gpu]);
        assert!(said.contains(why), "{gpu}: {said}");
    }
    let job = place.restart_with(&image, &["--gpu", &format!("soft,soft,{b}/1")], &job.nonce);
    assert_eq!(job.finish(STEPS).code(), Some(7));
}

/// What a program has chosen of a list's devices it chooses again.
#[test]
fn devices_that_were_chosen_come_back() {
    let place = Place::mine("plcsee");
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    let program = host("gpu_round.cu", "gpu_round", &["-O1", "-arch=sm_80"]);
    let (program, steps) = (program.display().to_string(), STEPS.to_string());
    let gpu = format!("{a}/0,soft,{b}/0,{a}/1");
    let run = ["run", "--gpu", &gpu, "--job", "j", "--", &program, &steps, "5"];
    let mut command = kedge_as(&place.world, place.user, &run);
    command.env("CUDA_VISIBLE_DEVICES", "3,2");
    let job = Job::start_paced(command);
    let all = Served::start(&["--gpu", "soft:4"]);
    moves(&place, job, &[None, Some("soft:4"), Some(&all.address)]);
}

/// Bytes of memory that a server's only session has, KiB.
fn resident(server: &Served) -> u64 {
    let proxies = children(server.pid());
    let [proxy] = proxies[..] else { panic!("{proxies:?}") };
    let text = std::fs::read_to_string(format!("/proc/{proxy}/smaps_rollup")).expect("a proxy");
    let rss = text.lines().find_map(|line| line.strip_prefix("Rss:")).expect("a number");
    rss.trim().trim_end_matches(" kB").parse().expect("KiB")
}

/// The memory of all places leaves their devices, and comes back with what is asked of them.
#[test]
fn memory_leaves_all_places_and_comes_back() {
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    let place = rounds("plcswap");
    let mut job = recovers(&place, &format!("{a}/0,{b}/0,soft"), "64");
    job.read_to(5);
    send("STOP", &place.clients(&job));
    let swap = |way: &str| {
        let output = place.output(&["swap", way, "j"]);
        assert!(output.status.success(), "{output:?}; {}", place.log());
    };
    let all = || servers.each_ref().map(resident);
    let before = all();
    swap("out");
    let gone = all();
    assert!(gone.iter().zip(before).all(|(gone, before)| gone + (32 << 10) < before), "{gone:?}");
    swap("in");
    let back = all();
    assert!(back.iter().zip(before).all(|(back, before)| back + (8 << 10) > before), "{back:?}");
    swap("out");
    send("CONT", &place.clients(&job));
    job.read_to(job.step + 3);
    swap("out");
    let image = place.checkpoint(&[]);
    let nonce = job.nonce.clone();
    job.read_to(place.steps);
    assert_eq!(job.end().code(), Some(7));
    place.goes_on(&image, &nonce);
}

/// With a device as GPUs are, beside others, there is no image as yet; the job goes on.
#[test]
fn a_gpu_among_places_is_refused() {
    let mut serve = Command::new(kedge());
    serve.args(["serve", "--listen", "127.0.0.1:0", "--gpu", "soft"]);
    serve.env("KEDGE_SOFT_LIKE_GPU", "1");
    let gpu = Served::started(serve);
    let place = Place::mine("plcgpu");
    let program = host("gpu_places.cu", "gpu_places", &["-O1", "-arch=sm_80"]);
    let (program, done) = (program.display().to_string(), place.world.0.join("done"));
    let (list, file) = (format!("{}/0,soft", gpu.address), done.display().to_string());
    let run = ["run", "--gpu", &list, "--job", "j", "--", &program, "0,1", "wait", &file];
    let mut command = kedge_as(&place.world, place.user, &run);
    let mut child = command.stdout(Stdio::piped()).spawn().expect("kedge");
    let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
    out.read_line(&mut String::new()).expect("text");
    let said = place.failure(&["checkpoint", "j"]);
    assert!(said.contains("a checkpoint of a GPU beside other places' devices is not"), "{said}");
    std::fs::write(done, "").expect("room");
    let mut rest = String::new();
    out.read_to_string(&mut rest).expect("text");
    assert!(child.wait().expect("it has ended").success() && rest == "ok\n", "{rest}");
    assert_eq!(place.names(), [""; 0]);

    let server = Served::start(&["--gpu", "soft"]);
    for (was, why) in [
        ("soft:2".to_owned(), "its devices were of one place"),
        (format!("{}/0,soft", server.address), "with a GPU among them"),
    ] {
        let mut job = start(&place, &was);
        job.read_to(2);
        let image = place.checkpoint(&["--stop"]).display().to_string();
        drop(job);
        let said = place.failure(&["restart", &image, "--gpu", &list]);
        assert!(said.contains(why), "{was}: {said}");
    }
}

/// The image's files are shown, and each place's builds on its own.
#[test]
fn images_build_on_each_other() {
    let place = Place::mine("plcinc");
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    let steps = STEPS.to_string();
    let gpu = format!("{a}/0,{b}/0,soft");
    let mut job = place.on(&gpu, "gpu_round", &["--incremental"], &[&steps, "5", "24"]);
    let nonce = job.nonce.clone();
    job.read_to(3);
    let bytes = |image: &std::path::Path| {
        let shown = place.json(&["inspect", "--json", &image.display().to_string()]);
        let files = shown["files"].as_array().expect("a list").clone();
        let of_place = |file: &&serde_json::Value| {
            file["name"].as_str().is_some_and(|name| name.contains("-place-"))
        };
        let numbers = files.iter().filter(of_place).map(|file| {
            let number = |what: &str| file[what].as_u64().expect("a number");
            [number("memory"), number("parent")]
        });
        numbers.collect::<Vec<_>>()
    };
    let first = place.checkpoint(&["--hold=60s"]);
    let log = String::from_utf8_lossy(&place.output(&["logs", "j"]).stdout).into_owned();
    assert!(log.contains("its devices are of several places"), "{log}");
    // The client is one, with all that its places have.
    let shown = place.json(&["inspect", "--json", &first.display().to_string()]);
    let devices = shown["devices"].as_array().expect("a list");
    let memory = devices[0]["memory"].as_array().expect("a list");
    let memory: u64 = memory.iter().filter_map(|kind| kind["bytes"].as_u64()).sum();
    assert!(devices.len() == 1 && devices[0]["gpu"] == gpu && memory > 3 * (24 << 20), "{shown}");
    let all = bytes(&first);
    assert!(
        all.len() == 3 && all.iter().all(|[memory, parent]| *memory > 24 << 20 && *parent == 0)
    );
    job.read_to(job.step + 2);
    let second = place.checkpoint(&[]);
    let all = bytes(&second);
    assert!(all.iter().all(|[_, parent]| *parent > 20 << 20), "{all:?}");
    job.read_to(job.step + 2);
    job.kill();
    let mut job = place.restart(&second, &nonce);
    // The first of a new life builds on none.
    let third = place.checkpoint(&[]);
    assert!(bytes(&third).iter().all(|[_, parent]| *parent == 0));
    job.read_to(job.step + 2);
    job.kill();
    assert_eq!(place.restart(&third, &nonce).finish(STEPS).code(), Some(7));
}

/// Lines that are cut again and again delay an image and a restart.
#[test]
fn lines_that_are_cut_lose_no_image() {
    let place = Place::mine("plccut");
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| Relay::start(&server.address, 3 << 20));
    let (gpu, steps) = (format!("{}/0,soft,{}/0", a.address, b.address), STEPS.to_string());
    let job = place.on(&gpu, "gpu_round", &[], &[&steps, "5", "16"]);
    moves(&place, job, &[None, None]);
    assert!(a.cuts() > 5 && b.cuts() > 5, "{} {}", a.cuts(), b.cuts());
}

/// Of a program whose steps take several devices.
fn rounds(name: &str) -> GpuSteps {
    let place = GpuSteps::of("gpu_round", name, User::Same).expect("the test's own user");
    // A step crosses all places, and takes several times as long as one of a device's own.
    GpuSteps { steps: 200, ..place }
}

fn recovers(place: &GpuSteps, gpu: &str, mib: &str) -> Job {
    Job::start_recovering(recovering(place, gpu, mib))
}

fn recovering(place: &GpuSteps, gpu: &str, mib: &str) -> Command {
    let (program, steps) = (place.program.display().to_string(), place.steps.to_string());
    let run = ["run", "--gpu", gpu, "--job", "j", "--recover=99", "--", &program, &steps, "10"];
    place.kedge(&[&run[..], &[mib]].concat())
}

/// How many images of a place's are finished.
fn finished(place: &GpuSteps) -> usize {
    let output = place.output(&["images", "--json"]);
    let images: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let images = images.as_array().expect("a list");
    images.iter().filter(|image| image["state"] == "finished").count()
}

/// Whoever is lost, and whenever: the image is whole or none, and the job goes back to one that is.
#[test]
fn whoever_is_lost_while_an_image_is_made_loses_no_other() {
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    let place = rounds("plcwhen");
    let hold = place.world.0.join("hold");
    std::fs::create_dir(&hold).expect("mine");
    let mut run = recovering(&place, &format!("{a}/0,{b}/0,soft"), "24");
    run.env("KEDGE_HOLD_CHECKPOINT", &hold);
    let mut job = Job::start_recovering(run);
    job.read_to(5);
    place.checkpoint(&[]);
    let mut images = 1;
    for phase in ["resting", "captured", "written"] {
        for who in 0..3 {
            place.goes_back(&mut job, |job| {
                std::fs::write(hold.join(phase), "").expect("room");
                let held = hold.join(format!("{phase}.held"));
                std::thread::scope(|scope| {
                    let image = scope.spawn(|| place.output(&["checkpoint", "j"]));
                    wait_for("the checkpoint does not come so far", || held.exists());
                    match servers.get(who) {
                        Some(server) => send("KILL", &children(server.pid())),
                        None => job.kill_the_proxy(),
                    }
                    // A near end is about to hear that a far one is lost.
                    wait_for("its proxy does not end", || place.proxies().is_empty());
                    std::fs::remove_file(held).expect("it is there");
                    let image = image.join().expect("kedge checkpoint has an end");
                    assert!(phase == "written" || !image.status.success(), "{phase}: {image:?}");
                });
            });
            images += usize::from(phase == "written");
            assert_eq!(finished(&place), images, "{phase}; {}", place.log());
        }
    }
    place.ends_well(job);
    assert!(servers.iter().all(|server| children(server.pid()).is_empty()));
}

/// Programs that work on two devices, and others, are checkpointed anywhere.
#[test]
fn programs_are_interrupted() {
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    for (gpu, programs) in [
        (format!("{a}/0,{b}/0"), &["peer_copy", "driver_contexts", "streams_events"][..]),
        (format!("{b}/1,soft"), &["peer_copy", "graph_memory", "pinned", "device_printf"]),
    ] {
        let mut command = Command::new(kedge().with_file_name("conformance"));
        command.args(["--interrupt", "--jobs", "2", "--gpu", &gpu]).args(programs);
        let output = command.stdin(Stdio::null()).output().expect("conformance: build it first");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

/// Copies, events, host functions and faults between places, wherever the program stops.
#[test]
fn programs_that_cross_places_are_interrupted() {
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    let gpu = format!("{a}/0,{b}/0,{a}/1,soft");
    let place = Place::mine("plccross");
    let program = host("gpu_places.cu", "gpu_places", &["-O1", "-arch=sm_80"]);
    let program = program.display().to_string();
    let mut met = 0;
    for (round, what) in (0..).zip(["cross", "host", "cross", "add", "cross", "cross"]) {
        let run = ["run", "--gpu", &gpu, "--job", "j", "--", &program, "0,1,0,2", what];
        std::thread::scope(|scope| {
            let runs = scope.spawn(|| place.output(&run));
            std::thread::sleep(Duration::from_millis(150 + 250 * round));
            let image = place.output(&["checkpoint", "j", "--stop"]);
            let mut output = runs.join().expect("kedge run has an end");
            if image.status.success() {
                let path = String::from_utf8(image.stdout).expect("text");
                output = place.output(&["restart", path.trim()]);
                met += 1;
            }
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(said.ends_with("ok\n"), "{what}: {output:?}; {}", place.log());
        });
    }
    assert!(met > 0, "all had ended by then");
}

/// A place that is lost while its devices come back has the restart fail, and leaves no session.
#[test]
fn whoever_is_lost_in_a_restart_loses_no_image() {
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    let place = Place::mine("plclate");
    let (gpu, steps) = (format!("{a}/0,{b}/0,soft"), STEPS.to_string());
    let mut job = place.on(&gpu, "gpu_round", &[], &[&steps, "5", "48"]);
    job.read_to(5);
    let nonce = job.nonce.clone();
    let image = place.checkpoint(&["--stop"]);
    // Killed at its end, its proxy might not say goodbye to all servers.
    job.drain();
    job.wait();
    let shown = image.display().to_string();
    let mut failed = 0;
    for ms in [0, 20, 60, 120, 200] {
        for server in &servers {
            let output = std::thread::scope(|scope| {
                let restart = scope.spawn(|| place.output(&["restart", &shown]));
                // However slow this machine is, all have begun then.
                wait_for("not all sessions begin", || {
                    servers.iter().all(|server| !children(server.pid()).is_empty())
                });
                std::thread::sleep(Duration::from_millis(ms));
                send("KILL", &children(server.pid()));
                restart.join().expect("kedge restart has an end")
            });
            // It may have come back before, and been lost then.
            failed += u32::from(output.status.code() == Some(125));
            wait_for("a session is still there", || {
                servers.iter().all(|server| children(server.pid()).is_empty())
            });
        }
    }
    assert!(failed > 0, "nobody was lost in time");
    assert_eq!(place.restart(&image, &nonce).finish(STEPS).code(), Some(7));
}

/// A far end, all of them, the near end: whichever is lost, the job goes back to its image.
#[test]
fn a_job_goes_back_when_a_place_is_lost() {
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    let gpu = format!("{a}/0,{b}/0,soft");
    let place = rounds("plcback");
    let mut job = recovers(&place, &gpu, "0");
    job.read_to(10);
    place.checkpoint(&[]);
    let near = |job: &mut Job| job.kill_the_proxy();
    for server in &servers {
        place.goes_back(&mut job, |_| send("KILL", &children(server.pid())));
    }
    place.goes_back(&mut job, near);
    let all = servers.iter().flat_map(|server| children(server.pid())).collect::<Vec<_>>();
    assert_eq!(all.len(), 2, "a session that nobody has: {all:?}");
    place.goes_back(&mut job, |_| send("KILL", &all));
    place.ends_well(job);
}

/// On devices of one place that proxies were made ready with.
#[test]
fn a_proxy_that_was_ready_brings_places_back() {
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    let place = rounds("plcwarm");
    let mut job = recovers(&place, &format!("{a}/0,{b}/0"), "0");
    job.read_to(10);
    let (image, nonce) = (place.checkpoint(&[]), job.nonce.clone());
    job.kill();
    let options = ["--gpu", "soft:2", "--warm", "--recover=9"];
    let mut job = Job::spawn_recovering(place.to_restart(&image, &options), &nonce);
    job.read_to(20);
    place.goes_back(&mut job, |_| send("KILL", &place.proxies()));
    assert!(place.log().contains("in a warm proxy"), "{}", place.log());
    place.ends_well(job);
}
