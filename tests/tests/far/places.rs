//! Devices of several places in one job: two servers' and this machine's.
use kedge_tests::host;
use kedge_tests::job::{children, send};
use kedge_tests::relay::Relay;
use kedge_tests::server::Served;
use kedge_tests::world::{World, stderr};
use std::io::{BufRead, BufReader, Read};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

fn program() -> String {
    host("gpu_places.cu", "gpu_places", &["-O1", "-arch=sm_80"]).display().to_string()
}

fn servers() -> [Served; 2] {
    [Served::start(&["--gpu", "soft:2"]), Served::start(&["--gpu", "soft:2"])]
}

/// Runs the program on `gpu`, whose devices are at `places`.
fn run(world: &World, gpu: &str, places: &str, what: &[&str]) -> Output {
    let program = program();
    let run = ["run", "--gpu", gpu, "--job", "j", "--", &program, places];
    world.output(&[&run[..], what].concat())
}

fn passes(world: &World, output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let log = || world.output(&["logs", "j"]);
    assert!(output.status.success() && said.ends_with("ok\n"), "{output:?} {:?}", log());
    said
}

/// The processes that serve a server's sessions are gone within a second.
fn nothing_is_left(servers: &[Served]) {
    let begin = Instant::now();
    while servers.iter().any(|server| !children(server.pid()).is_empty()) {
        assert!(begin.elapsed() < Duration::from_secs(1), "a session is still there");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn each_device_adds_up() {
    let world = World::new("pladd");
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    for (gpu, places) in [
        (format!("{a}/0,{b}/1"), "0,1"),
        (format!("soft,{a}/0"), "0,1"),
        (format!("{a}/1,{b}/0,{a}/0,soft:2,{b}/1"), "0,1,0,2,2,1"),
    ] {
        let said = passes(&world, &run(&world, &gpu, places, &[]));
        for device in 0..places.split(',').count() {
            assert!(said.contains(&format!("device {device} speaks\n")), "{gpu}: {said}");
        }
        nothing_is_left(&servers);
    }
}

#[test]
fn devices_of_several_places_work_for_each_other() {
    let world = World::new("plcross");
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    let gpu = format!("{a}/0,{b}/0,{a}/1,soft");
    for what in ["cross", "host"] {
        passes(&world, &run(&world, &gpu, "0,1,0,2", &[what]));
        nothing_is_left(&servers);
    }
}

#[test]
fn a_device_that_faults_holds_up_no_copies_of_others() {
    let world = World::new("plfault");
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    passes(&world, &run(&world, &format!("{a}/0,{b}/0,soft"), "0,1,2", &["fault"]));
    nothing_is_left(&servers);
}

/// Both lines are cut again and again.
#[test]
fn lines_that_are_cut_lose_nothing() {
    let world = World::new("plcut");
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| Relay::start(&server.address, 3 << 20));
    let gpu = format!("{}/0,{}/0", a.address, b.address);
    passes(&world, &run(&world, &gpu, "0,1", &["cross"]));
    assert!(a.cuts() > 0 && b.cuts() > 0, "{} {}", a.cuts(), b.cuts());
}

#[test]
fn a_program_chooses_among_all_places_devices() {
    let world = World::new("plsee");
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    let gpu = format!("{a}/0,{b}/0,soft,{a}/1");
    let program = program();
    let seen = |visible: &str, places: &str| {
        let run = ["run", "--gpu", &gpu, "--job", "j", "--", &program, places];
        world.kedge(&run).env("CUDA_VISIBLE_DEVICES", visible).output().expect("kedge")
    };
    passes(&world, &seen("3,2,0", "0,1,0"));
    passes(&world, &seen("1", "0"));
    assert!(!seen("4", "0").status.success());
    let log = world.text(&["logs", "j"]);
    assert!(log.contains("CUDA_VISIBLE_DEVICES=4 hides all 4 of the job's devices"), "{log}");
}

/// The program hears of a place that is lost on all its devices, within a second.
#[test]
fn a_place_that_is_lost_takes_all_devices_along() {
    let world = World::new("pllost");
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    let (gpu, program) = (format!("{a}/0,soft,{b}/0"), program());
    let run = ["run", "--gpu", &gpu, "--job", "j", "--", &program, "0,1,2", "wait", "/none"];
    let mut child = world.kedge(&run).stdout(Stdio::piped()).spawn().expect("kedge");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    lines.read_line(&mut line).expect("text");
    assert_eq!(line, "works\n");
    let begin = Instant::now();
    send("KILL", &children(servers[1].pid()));
    let mut rest = String::new();
    lines.read_to_string(&mut rest).expect("text");
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    assert_eq!(rest, "lost: cudaErrorDevicesUnavailable\nall of them\n");
    assert_eq!(child.wait().expect("it has ended").code(), Some(3));
    nothing_is_left(&servers);
    let log = world.text(&["logs", "j"]);
    assert!(log.contains(&format!("the devices of {b} are gone")), "{log}");
}

/// A client that is killed, and a near end, leave no session.
#[test]
fn what_is_killed_leaves_nothing() {
    let world = World::new("plkill");
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    let (gpu, program) = (format!("{a}/0,{b}/0"), program());
    let run = ["run", "--gpu", &gpu, "--job", "j", "--", &program, "0,1", "wait", "/none"];
    for near in [false, true] {
        let mut child = world.kedge(&run).stdout(Stdio::piped()).spawn().expect("kedge");
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
        out.read_line(&mut line).expect("text");
        assert_eq!(line, "works\n");
        if near {
            let noted = |pid: &u32| world.job("j").join(format!("session-{pid}-1")).exists();
            let family = kedge_tests::job::family(child.id());
            send("KILL", &[family.into_iter().find(noted).expect("a proxy with two sessions")]);
        } else {
            world.text(&["kill", "j", "--grace", "0"]);
        }
        nothing_is_left(&servers);
        assert!(!child.wait().expect("it has ended").success());
    }
}

/// What is not there as yet is refused by name, and the job goes on.
#[test]
fn what_several_places_cannot_is_refused() {
    let world = World::new("plnot");
    let servers = servers();
    let [a, b] = servers.each_ref().map(|server| &server.address);
    let (gpu, program, done) = (format!("{a}/0,{b}/0"), program(), world.0.join("done"));
    let file = done.display().to_string();
    let run = ["run", "--gpu", &gpu, "--job", "j", "--", &program, "0,1", "wait", &file];
    let mut child = world.kedge(&run).stdout(Stdio::piped()).spawn().expect("kedge");
    let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
    out.read_line(&mut String::new()).expect("text");
    let output = world.output(&["migrate", "j", "--to", "soft"]);
    assert!(!output.status.success(), "{output:?}");
    let said = stderr(&output);
    let refused = "moving a job is not supported as yet for devices of several places";
    assert!(said.contains(refused) && said.contains("give devices of one place"), "{said}");
    std::fs::write(done, "").expect("room");
    let mut rest = String::new();
    out.read_to_string(&mut rest).expect("text");
    assert!(child.wait().expect("it has ended").success() && rest == "ok\n", "{rest}");
    for option in ["--hold", "--warm", "--move-to=soft"] {
        let output = world.output(&["run", "--gpu", &gpu, option, "--", "true"]);
        assert_eq!(output.status.code(), Some(125), "{option}: {output:?}");
        let name = option.split('=').next().expect("a name");
        assert!(stderr(&output).contains(&format!("{name} is not supported as yet")), "{output:?}");
    }
    for (gpu, said) in [
        (format!("{a},{b}/0"), "does not say which of its devices"),
        (format!("{a}/0,{b}/0,{a}/0"), "is named twice"),
        (format!("{a}/0,soft:apart"), "managed memory apart is not supported"),
    ] {
        let output = world.output(&["run", "--gpu", &gpu, "--", "true"]);
        assert!(stderr(&output).contains(said), "{gpu}: {output:?}");
    }
    let output = world.output(&["serve", "--gpu", &format!("{a}/0,soft")]);
    assert!(stderr(&output).contains("is not supported as yet"), "{output:?}");
}
