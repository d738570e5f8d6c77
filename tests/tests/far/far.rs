//! Programs whose devices are served: `kedge serve` and `kedge run --gpu HOST`.
use kedge_tests::job::{User, family, send};
use kedge_tests::relay::Relay;
use kedge_tests::server::Served;
use kedge_tests::world::{World, stderr};
use kedge_tests::{host, kedge};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A program that adds up on its device and tells the sum.
fn sum() -> PathBuf {
    host("gpu_sum.cu", "gpu_sum", &["-O1", "-arch=sm_80"])
}

fn until(what: &str, mut so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !so() {
        assert!(begin.elapsed() < Duration::from_secs(20), "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The processes that a server has started and that are there.
fn children(server: &Served) -> usize {
    let path = format!("/proc/{0}/task/{0}/children", server.pid());
    std::fs::read_to_string(path).expect("a living server").split_whitespace().count()
}

#[test]
fn a_device_that_is_not_there_is_told() {
    let world = World::new("farnone");
    let server = Served::start(&["--gpu", "soft:2"]);
    let program = sum().display().to_string();
    let gpu = format!("{}/2", server.address);
    let output = world.output(&["run", "--gpu", &gpu, "--job", "j", "--", &program]);
    assert!(!output.status.success(), "{output:?}");
    let log = world.text(&["logs", "j"]);
    assert!(log.contains("there is no device 2: it has 0 to 1"), "{log}");
    for (gpu, said) in [
        ("127.0.0.1:1", "is `kedge serve` running there?"),
        ("no-such-host.invalid", "no such host"),
    ] {
        let output = world.output(&["run", "--gpu", gpu, "--", &program]);
        assert_eq!(output.status.code(), Some(125), "{gpu}: {output:?}");
        assert!(stderr(&output).contains(said), "{gpu}: {output:?}");
    }
}

/// Its device's memory is the proxy's, which ends within a second.
#[test]
fn a_killed_client_leaves_nothing() {
    let world = World::new("farkill");
    let server = Served::start(&["--gpu", "soft"]);
    let program = steps().display().to_string();
    let run = ["run", "--gpu", &server.address, "--job", "j", "--", &program, "1000000"];
    let mut child = world.kedge(&run).stdout(Stdio::null()).spawn().expect("kedge");
    until("a session", || children(&server) == 1);
    world.text(&["kill", "j", "--grace", "0"]);
    let begin = Instant::now();
    until("the session's end", || children(&server) == 0);
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    child.wait().expect("it has ended");
}

/// The far end does not know that its near end is gone; the job's supervisor says so.
#[test]
fn a_killed_near_end_leaves_nothing() {
    let world = World::new("farnear");
    let server = Served::start(&["--gpu", "soft"]);
    let program = steps().display().to_string();
    let run = ["run", "--gpu", &server.address, "--job", "j", "--", &program, "1000000"];
    let mut child = world.kedge(&run).stdout(Stdio::null()).spawn().expect("kedge");
    until("a session", || children(&server) == 1);
    // The job's proxies: one answers for NVML, and one has said which session it has.
    let noted = |pid: &u32| world.job("j").join(format!("session-{pid}")).exists();
    let near = family(child.id()).into_iter().find(noted).expect("a proxy with a session");
    let begin = Instant::now();
    send("KILL", &[near]);
    until("the session's end", || children(&server) == 0);
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    assert!(!child.wait().expect("it has ended").success());
}

/// What is not kedge, or is of another user, does not reach a proxy.
#[test]
fn strangers_get_nothing() {
    use std::io::{Read, Write};
    let server = Served::start(&["--gpu", "soft"]);
    for bytes in
        [&b"GET / HTTP/1.0\r\n\r\n"[..], &[0xff; 64], &[8, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]]
    {
        let mut stream = std::net::TcpStream::connect(&server.address).expect("it listens");
        stream.write_all(bytes).expect("room in the socket");
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty(), "{answer:?}");
    }
    assert_eq!(children(&server), 0);
    if !rustix::process::geteuid().is_root() {
        return kedge_left_out::needs_root("a server of another user", "this test becomes one");
    }
    // A server of an ordinary user refuses another one.
    let world = World::new("farother");
    let as_user = |user: User| {
        let id = user.id().to_string();
        let home = world.0.join(&id);
        std::fs::create_dir_all(&home).expect("a folder");
        std::os::unix::fs::chown(&home, Some(user.id()), Some(user.id())).expect("root");
        let mut command = Command::new("setpriv");
        command.args(["--reuid", &id, "--regid", &id, "--clear-groups"]).arg(world.parts());
        for folder in ["HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"] {
            command.env(folder, &home);
        }
        command
    };
    let mut command = as_user(User::Nobody);
    command.args(["serve", "--listen", "127.0.0.1:0", "--gpu", "soft"]);
    let server = Served::started(command);
    let mut other = as_user(User::Other);
    let run = other.args(["run", "--gpu", &server.address, "--"]).arg(sum());
    let output = run.output().expect("setpriv");
    assert!(!output.status.success(), "{output:?}");
    until("its word", || server.said().contains("another user: refused"));
}

#[test]
fn a_server_without_keys_listens_on_this_machine_alone() {
    let world = World::new("farkeys");
    let mut command = Command::new(kedge());
    command.args(["serve", "--gpu", "soft", "--listen", "0.0.0.0:0"]);
    let output = command.env("XDG_CONFIG_HOME", &world.0).output().expect("kedge");
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(stderr(&output).contains("takes keys"), "{output:?}");
}

/// A program that takes some seconds, and compares each step with what the host computes.
fn steps() -> PathBuf {
    host("gpu_steps.cu", "gpu_steps", &["-O1", "-arch=sm_80"])
}

/// The line is away for two seconds in the middle of a program.
#[test]
fn a_program_goes_on_where_its_line_was_cut() {
    let world = World::new("farcut");
    let server = Served::start(&["--gpu", "soft"]);
    let relay = Relay::start(&server.address, 0);
    let program = steps().display().to_string();
    let run = ["run", "--gpu", &relay.address, "--job", "j", "--", &program, "300", "5"];
    let mut child = world.kedge(&run).stdout(Stdio::null()).spawn().expect("kedge");
    until("a session", || children(&server) == 1);
    std::thread::sleep(Duration::from_millis(500));
    relay.cut(true);
    std::thread::sleep(Duration::from_secs(2));
    relay.cut(false);
    assert_eq!(child.wait().expect("it has ended").code(), Some(7));
    let log = world.text(&["logs", "j"]);
    assert!(log.contains("is cut: trying to go on") && log.contains(" goes on after "), "{log}");
    until("the session's end", || children(&server) == 0);
}

/// After the time that was asked for, the program hears of it.
#[test]
fn a_line_that_stays_away_is_an_error_in_time() {
    let world = World::new("faraway");
    let server = Served::start(&["--gpu", "soft"]);
    let relay = Relay::start(&server.address, 0);
    let program = steps().display().to_string();
    let more = ["--reconnect", "1s", "--", &program, "100000", "5"];
    let run = [&["run", "--gpu", &relay.address, "--job", "j"], &more[..]].concat();
    let mut child = world.kedge(&run).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let child = child.as_mut().expect("kedge");
    until("a session", || children(&server) == 1);
    std::thread::sleep(Duration::from_millis(300));
    let begin = Instant::now();
    relay.cut(true);
    assert!(!child.wait().expect("it has ended").success());
    let after = begin.elapsed();
    assert!(after > Duration::from_millis(900) && after < Duration::from_secs(3), "{after:?}");
    let log = world.text(&["logs", "j"]);
    assert!(log.contains("are gone: "), "{log}");
}

/// What the program has on its devices does not hang on the server's own process.
#[test]
fn a_server_that_is_killed_takes_no_session_with_it() {
    let world = World::new("farserver");
    let server = Served::start(&["--gpu", "soft"]);
    let program = steps().display().to_string();
    let run = ["run", "--gpu", &server.address, "--job", "j", "--", &program, "200", "5"];
    let mut child = world.kedge(&run).stdout(Stdio::null()).spawn().expect("kedge");
    until("a session", || children(&server) == 1);
    // It hands both connections over before.
    std::thread::sleep(Duration::from_millis(500));
    drop(server);
    assert_eq!(child.wait().expect("it has ended").code(), Some(7));
}

/// The session's memory is lost, and the program is told at once rather than after a minute.
#[test]
fn a_server_that_has_lost_the_session_says_so() {
    let world = World::new("farlost");
    let (first, second) = (Served::start(&["--gpu", "soft"]), Served::start(&["--gpu", "soft"]));
    let relay = Relay::start(&first.address, 0);
    let program = steps().display().to_string();
    let run = ["run", "--gpu", &relay.address, "--job", "j", "--", &program, "100000", "5"];
    let mut child = world.kedge(&run).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let child = child.as_mut().expect("kedge");
    until("a session", || children(&first) == 1);
    std::thread::sleep(Duration::from_millis(300));
    let begin = Instant::now();
    relay.lead_to(&second.address);
    assert!(!child.wait().expect("it has ended").success());
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    let log = world.text(&["logs", "j"]);
    assert!(log.contains("no such session"), "{log}");
}

/// Whoever wants devices back ends a session's proxy by SIGTERM.
#[test]
fn a_session_s_proxy_heeds_sigterm() {
    let world = World::new("farterm");
    let server = Served::start(&["--gpu", "soft"]);
    let program = steps().display().to_string();
    let run = ["run", "--gpu", &server.address, "--job", "j", "--", &program, "100000", "5"];
    let mut child = world.kedge(&run).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let child = child.as_mut().expect("kedge");
    // Before, its near end would have another one; and the server others, which answer what a
    // session asks at its start.
    let mut said = BufReader::new(child.stdout.take().expect("a pipe"));
    // The program's nonce, which it has before it asks for a device, and a step.
    for _ in 0..2 {
        said.read_line(&mut String::new()).expect("a line");
    }
    until("the session alone", || children(&server) == 1);
    let path = format!("/proc/{0}/task/{0}/children", server.pid());
    let proxy = std::fs::read_to_string(path).expect("a living server");
    let killed = Command::new("kill").args(["-s", "TERM", proxy.trim()]).status();
    assert!(killed.expect("kill").success());
    until("the session's end", || children(&server) == 0);
    assert!(!child.wait().expect("it has ended").success());
}

/// A server with a folder of its own for what it keeps.
fn with_caches(caches: &Path) -> Served {
    let mut command = Command::new(kedge());
    command.args(["serve", "--gpu", "soft", "--listen", "127.0.0.1:0"]);
    command.env("XDG_CACHE_HOME", caches);
    Served::started(command)
}

/// Runs a program whose module is long: the bytes that have passed.
fn with_a_long_module(world: &World, relay: &Relay, job: &str) -> u64 {
    let before = relay.passed();
    let program = host("gpu_table.cu", "gpu_table", &["-O1", "-arch=sm_80", "--no-compress"]);
    let program = program.display().to_string();
    let output = world.output(&["run", "--gpu", &relay.address, "--job", job, "--", &program]);
    assert!(output.status.success(), "{job}: {output:?}");
    relay.passed() - before
}

/// A module is sent once, and what has been damaged since is not believed.
#[test]
fn a_module_is_sent_once() {
    let world = World::new("farmodule");
    let caches = world.0.join("lender");
    let server = with_caches(&caches);
    let relay = Relay::start(&server.address, 0);
    let first = with_a_long_module(&world, &relay, "first");
    let folder = caches.join("kedge/modules");
    let kept = || {
        let files = std::fs::read_dir(&folder).expect("a folder").flatten();
        let files: Vec<_> = files.filter(|file| file.file_name().len() == 64).collect();
        assert_eq!(files.len(), 1, "{files:?}");
        files[0].path()
    };
    let image = std::fs::read(kept()).expect("an image");
    assert!(first > image.len() as u64 && image.len() > 64 << 10, "{first} {}", image.len());
    let second = with_a_long_module(&world, &relay, "second");
    assert!(second + image.len() as u64 / 2 < first, "{first} {second}");
    let mut damaged = image.clone();
    let last = damaged.len() - 1;
    damaged[last] ^= 1;
    std::fs::write(kept(), damaged).expect("my file");
    let third = with_a_long_module(&world, &relay, "third");
    assert!(third > image.len() as u64, "{third}");
    assert!(std::fs::read(kept()).expect("an image") == image);
}

/// Nowhere to keep a module costs time alone, and is told.
#[test]
fn a_module_that_cannot_be_kept_is_loaded() {
    let world = World::new("farfull");
    let server = with_caches(Path::new("/dev/full"));
    let relay = Relay::start(&server.address, 0);
    let first = with_a_long_module(&world, &relay, "first");
    let second = with_a_long_module(&world, &relay, "second");
    assert!(first.min(second) > 64 << 10, "{first} {second}");
    assert!(world.text(&["logs", "second"]).contains("the server keeps no modules"));
}

/// NVML's answers about a job's devices are those of the server, of the devices that the job has; a
/// connection to it that was cut is opened anew.
#[test]
fn management_tells_of_the_server_s_devices() {
    let world = World::new("farnvml");
    let program = host("gpu_management.cu", "gpu_management", &["-O1", "-arch=sm_80"]);
    let program = program.display().to_string();
    let facts = |gpu: &str| world.text(&["run", "--gpu", gpu, "--", &program, "facts"]);
    let server = Served::start(&["--gpu", "soft:3"]);
    let said = facts(&format!("{}/0,2", server.address));
    assert_eq!(said.matches("kedge software device").count(), 2, "{said}");
    assert_eq!(said, facts("soft:2"));
    let relay = Relay::start(&server.address, 20_000);
    assert_eq!(facts(&format!("{}/0,2", relay.address)), said);
    until("all sessions' ends", || children(&server) == 0);
}
