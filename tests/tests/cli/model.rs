//! What a program asks of its devices, counted (`kedge run --stats`), and what it is expected to
//! take elsewhere (`kedge model`).
use kedge_tests::host;
use kedge_tests::relay::Relay;
use kedge_tests::server::Served;
use kedge_tests::world::{World, stderr};
use serde_json::Value;
use std::fs;
use std::time::Duration;

/// 16 MiB, 50 steps, and a millisecond between them.
const SIZE: [&str; 3] = ["0", "50", "1"];

/// Runs a program that adds up on its device: what it said, and its figures.
fn counted(world: &World, options: &[&str]) -> (String, Value) {
    let program = host("gpu_sum.cu", "gpu_sum", &["-O1", "-arch=sm_80"]).display().to_string();
    let file = world.0.join("stats.json");
    let stats = format!("--stats={}", file.display());
    let run = ["run", "--gpu", "soft", "--job", "j", &stats];
    let output = world.output(&[&run, options, &["--", &program], &SIZE].concat());
    assert!(output.status.success(), "{output:?}");
    let text = fs::read_to_string(file).expect("figures");
    (stderr(&output), serde_json::from_str(&text).expect("JSON"))
}

#[test]
fn what_is_asked_of_devices_is_counted() {
    let world = World::new("stats");
    let (said, told) = counted(&world, &[]);
    let stats = &told["stats"];
    assert_eq!(
        (&told["format"], &told["gpu"], &told["job"]),
        (&1.into(), &"soft".into(), &"j".into())
    );
    let count = |kind: &str| stats["kinds"][kind].as_u64().unwrap_or(0);
    assert!(count("Launch") > 0 && count("ModuleLoad") == 1, "{told}");
    assert_eq!(stats["clients"], 1);
    let all: u64 =
        stats["kinds"].as_object().expect("kinds").values().filter_map(Value::as_u64).sum();
    let number = |name: &str| stats[name].as_u64().expect("a number");
    assert_eq!(all, number("posts") + number("calls"));
    // An entry of the ring has 16 bytes and its message.
    assert!(number("message_bytes") > 20 * all, "{told}");
    assert!(stats["regions"].as_object().is_some_and(|classes| !classes.is_empty()), "{told}");
    assert!(said.contains("kedge: j: messages: ") && said.contains(" were waited for"), "{said}");
    assert!(world.text(&["logs", "j"]).contains("note: messages: "));
}

#[test]
fn quiet_jobs_and_others_tell_no_figures() {
    let world = World::new("statsnone");
    let (said, _) = counted(&world, &["--quiet"]);
    assert_eq!(said, "");
    let program = host("gpu_sum.cu", "gpu_sum", &["-O1", "-arch=sm_80"]).display().to_string();
    let run = ["run", "--gpu", "soft", "--job", "k", "--", &program];
    let output = world.output(&[&run[..], &SIZE].concat());
    assert_eq!(stderr(&output), "");
    assert!(!world.text(&["logs", "k"]).contains("messages: "));
}

#[test]
fn a_model_is_fitted_and_predicts() {
    let world = World::new("model");
    let server = Served::start(&["--gpu", "soft"]);
    // No session there can begin sooner, whatever else this machine does.
    let line_begins = Duration::from_millis(200);
    let relay = Relay::start(&server.address, 0);
    relay.slow_down(line_begins);
    let (_, told) = counted(&world, &[]);
    let (stats, line) = (world.0.join("stats.json"), world.0.join("line.json"));
    let (stats, line) = (stats.display().to_string(), line.display().to_string());
    let fit = ["model", "fit", "--gpu", "soft", "--to", &relay.address, "--no-move", "-o", &line];
    let output = world.output(&fit);
    assert!(output.status.success(), "{output:?}");
    let model: Value =
        serde_json::from_str(&fs::read_to_string(&line).expect("a model")).expect("JSON");
    assert_eq!((&model["here"], &model["there"]), (&"soft".into(), &relay.address[..].into()));
    let seconds = |of: &Value, name: &str| of[name].as_f64().expect(name);
    let session = |side: &str| seconds(&model[side], "session");
    assert!(session("far") >= line_begins.as_secs_f64(), "{model}");
    assert!(["near", "far"].iter().all(|side| seconds(&model[side], "post") > 0.0), "{model}");
    assert_eq!(model["moving"], Value::Null);
    let output = world.output(&["model", "predict", "--json", "--model", &line, &stats]);
    assert!(output.status.success(), "{output:?}");
    let predicted: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let one = &predicted[0];
    assert_eq!((&one["job"], &one["here_seconds"]), (&"j".into(), &told["seconds"]));
    // One client begins there what it began here; the rest of the sum has its names.
    let longer = (session("far") - session("near")).max(0.0);
    assert!((seconds(one, "session") - longer).abs() < 1e-9, "{one}, of {model}");
    let parts = ["here_seconds", "session", "calls", "posts", "bytes"].map(|it| seconds(one, it));
    assert!((seconds(one, "there_seconds") - parts.iter().sum::<f64>()).abs() < 1e-9, "{one}");
    // The two files the wrong way round.
    let output = world.output(&["model", "predict", "--model", &stats, &line]);
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(stderr(&output).contains("not what `kedge model fit` writes"), "{output:?}");
}

#[test]
fn a_model_is_of_another_machine() {
    let world = World::new("modelnear");
    let output = world.output(&["model", "fit", "--to", "soft:2"]);
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(stderr(&output).contains("no other machine"), "{output:?}");
}
