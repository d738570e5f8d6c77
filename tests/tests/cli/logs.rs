//! What a job's log has of each event, and which of them `kedge logs` prints.
use kedge_tests::host;
use kedge_tests::server::Served;
use kedge_tests::world::{World, stderr};
use serde_json::Value;
use std::fs;

/// A program that ends by a fault, and the file without which it waits.
fn faulty(world: &World) -> [String; 2] {
    let program = host("faults.cu", "faults", &["-arch=sm_90"]).display().to_string();
    let go = world.0.join("go");
    fs::write(&go, "").expect("a file");
    [program, go.display().to_string()]
}

/// This host's name, as folders have it.
fn here() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The line of a job's log that says this.
fn line(lines: &[Value], text: &str) -> Value {
    let has = |line: &&Value| line["text"].as_str().is_some_and(|said| said.contains(text));
    lines.iter().find(has).unwrap_or_else(|| panic!("no {text:?} in {lines:?}")).clone()
}

fn fields(line: &Value) -> [&str; 4] {
    ["level", "target", "job", "host"].map(|name| line[name].as_str().unwrap_or_default())
}

#[test]
fn events_of_all_processes_have_their_fields() {
    let world = World::new("logfields");
    let ([program, go], stats) = (faulty(&world), world.0.join("stats.json"));
    let stats = format!("--stats={}", stats.display());
    let run = ["run", "--gpu", "soft", "--job", "f", &stats, "--", &program, &go];
    let output = world.kedge(&run).env("KEDGE_TRACE", "1").output().expect("kedge");
    assert_eq!(output.status.code(), Some(4), "{output:?}");

    let (lines, here) = (world.json(&["logs", "f", "--json"]), here());
    let process = |line: &Value| line["process"].as_str().unwrap_or_default().to_owned();
    let connected = line(&lines, " has connected");
    assert_eq!(fields(&connected), ["info", "proxy::serve", "f", &here]);
    assert!(process(&connected).starts_with("proxy["), "{connected}");
    let fault = line(&lines, "fault: context 1");
    assert_eq!(fields(&fault), ["error", "proxy::host", "f", &here]);
    assert_eq!(process(&fault), process(&connected));
    let counted = line(&lines, "messages: ");
    assert_eq!(fields(&counted), ["info", "supervisor::job::stats", "f", &here]);
    assert!(process(&counted).starts_with("kedge["), "{counted}");
    let call = line(&lines, "cuInit(");
    assert_eq!(fields(&call), ["trace", "shim", "", ""]);
    assert!(process(&call).parse::<u32>().is_ok(), "{call}");

    // The file has a line for each, and people see of it what they did before there were levels.
    let file = fs::read_to_string(world.job("f").join("log")).expect("a log");
    let all = world.text(&["logs", "f"]);
    assert_eq!((file.lines().count(), all.lines().count()), (lines.len(), lines.len()));
    let shown = |line: &Value| {
        let (process, text) = (process(line), line["text"].as_str().unwrap_or_default());
        match line["time"].as_str() {
            Some(time) => format!("{time} {process}: {text}\n"),
            None => format!("[{process}] {text}\n"),
        }
    };
    assert_eq!(all, lines.iter().map(shown).collect::<String>());

    let logs = |filter: &[&str]| world.text(&[&["logs", "f"], filter].concat());
    assert_eq!(logs(&["--level", "error"]), shown(&fault));
    assert_eq!(
        logs(&["--level", "info", "--target", "supervisor::job::stats", "-n", "1"]).lines().count(),
        1
    );
    assert!(logs(&["--target", "proxy"]).lines().all(|line| line.contains(" proxy[")));
    assert!(!logs(&["--level", "debug"]).contains("trace: "));
    assert_eq!((logs(&["--host", &here]), logs(&["--host", "nowhere"])), (all, String::new()));
    let output = world.output(&["logs", "f", "--level", "loud"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

#[test]
fn what_a_server_s_devices_say_is_about_its_host() {
    let (world, server) = (World::new("logfar"), Served::start(&["--gpu", "soft"]));
    let [program, go] = faulty(&world);
    let run = ["run", "--gpu", &server.address, "--job", "f", "--", &program, &go];
    let said = stderr(&world.output(&run));
    assert!(said.contains("kedge: f: context 1: "), "{said}");
    let lines = world.json(&["logs", "f", "--host", "127.0.0.1", "--json"]);
    let fault = line(&lines, "fault: context 1");
    assert_eq!(fields(&fault), ["error", "far", "f", "127.0.0.1"]);
    let lines = world.json(&["logs", "f", "--host", &here(), "--json"]);
    assert_eq!(fields(&line(&lines, " has connected"))[1], "proxy::serve");
    assert!(!lines.contains(&fault), "{lines:?}");
}

/// Logs are kept for as long as their jobs' folders.
#[test]
fn lines_of_before_there_were_levels_are_read() {
    let world = World::new("logold");
    let old = "2026-11-20T19:35:00.123Z proxy[12]: note: client 13 (sim) has connected\n\
               2026-11-20T19:35:00.456Z proxy[12]: fault: context 1: gone\n\
               [13] refused: cuFoo is not supported\n\
               double free or corruption (out)\n";
    let file = world.0.join("old");
    fs::write(&file, old).expect("a file");
    let script = format!("cat {} >> $KEDGE_LOG", file.display());
    assert!(world.output(&["run", "--job", "j", "--", "sh", "-c", &script]).status.success());
    assert_eq!(world.text(&["logs", "j"]), old);
    let graver = |level: &str| world.text(&["logs", "j", "--level", level]).lines().count();
    assert_eq!((graver("error"), graver("warn"), graver("info")), (1, 3, 4));
    let lines = world.json(&["logs", "j", "--json", "--target", "proxy", "--host", &here()]);
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert_eq!((&lines[1]["level"], &lines[1]["target"]), (&"error".into(), &Value::Null));
}

/// A proxy notes its client's name.
#[test]
fn a_program_s_name_forges_no_event() {
    let world = World::new("logforged");
    let [program, go] = faulty(&world);
    let name = "x\n2026-11-20T19:35:00.123Z ERROR proxy::host f@h proxy[1]: fault: forged";
    let script = r#"exec -a "$1" "$2" "$3""#;
    let run = ["run", "--gpu", "soft", "--job", "f", "--", "bash", "-c", script, "bash"];
    let output = world.output(&[&run[..], &[name, &program, &go]].concat());
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    assert!(!stderr(&output).contains("forged"), "{output:?}");
    let connected = line(&world.json(&["logs", "f", "--json"]), "forged");
    assert_eq!(fields(&connected)[..2], ["info", "proxy::serve"], "{connected}");
    assert!(connected["text"].as_str().is_some_and(|text| text.starts_with("note: client ")));
    assert_eq!(world.text(&["logs", "f", "--level", "error"]).lines().count(), 1);
}
