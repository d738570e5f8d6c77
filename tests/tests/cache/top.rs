//! `kedge cache top`, of real caches: printed, as JSON, and in a terminal with its keys.

use kedge_tests::back::wait_for;
use kedge_tests::cached::Cached;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};

/// Ends a process with the test.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns what a line of JSON says of that cache.
fn of<'a>(line: &'a Value, cached: &Cached) -> &'a Value {
    let under = cached.under.display().to_string();
    let caches = line["caches"].as_array().expect("a list");
    caches.iter().find(|cache| cache["under"] == *under).unwrap_or_else(|| panic!("{line}"))
}

/// A cache from which nothing gets below as long as the file is there.
fn held(name: &str) -> Option<(Cached, std::path::PathBuf)> {
    let mut cached = Cached::new(name, &["--tier", "ram:64M", "--fsync", "memory"])?;
    let held = cached.world.0.join("held");
    fs::write(&held, "").expect("a file");
    cached.fault = Some(format!("carried={}", held.display()));
    cached.begin();
    Some((cached, held))
}

#[test]
fn a_line_a_second_tells_how_much_is_written_and_waits() {
    let Some((cached, held)) = held("ctopjson") else { return };
    let mut top = cached.world.kedge(&["cache", "top", "--json"]);
    let mut top = Ends(top.stdout(Stdio::piped()).spawn().expect("kedge"));
    let lines = BufReader::new(top.0.stdout.take().expect("a pipe")).lines();
    let mut lines =
        lines.map(|line| serde_json::from_str::<Value>(&line.expect("a line")).expect("JSON"));
    let first = lines.next().expect("a line");
    assert!(of(&first, &cached)["in_bytes_per_second"].is_null(), "{first}");
    fs::write(cached.under.join("a"), vec![7; 3 << 20]).expect("absorbed");
    let wrote = |line: &Value| of(line, &cached)["in_bytes_per_second"].as_f64() > Some(1e5);
    let line = lines.by_ref().take(20).find(wrote).expect("it is told");
    assert_eq!(of(&line, &cached)["status"]["files"], 1, "{line}");
    let waits = |line: &Value| of(line, &cached)["status"]["oldest"].as_u64() >= Some(2);
    lines.by_ref().take(20).find(waits).expect("it waits");
    fs::remove_file(&held).expect("a file");
    let drained = |line: &Value| of(line, &cached)["status"]["dirty"] == 0;
    let line = lines.by_ref().take(30).find(drained).expect("it is drained");
    assert!(of(&line, &cached)["status"]["oldest"].is_null(), "{line}");
}

#[test]
fn it_is_printed_once_where_there_is_no_terminal() {
    let Some((cached, held)) = held("ctopone") else { return };
    fs::write(cached.under.join("a"), vec![7; 3 << 20]).expect("absorbed");
    let table = cached.world.text(&["cache", "top"]);
    let under = cached.under.display().to_string();
    let row = table.lines().find(|line| line.starts_with(&under)).expect("its line");
    assert!(table.starts_with("FOLDER") && row.contains("3M"), "{table}");
    assert!(table.contains("of  64M"), "{table}");
    fs::remove_file(held).expect("a file");
    cached.drain();
    cached.kill();
    let table = cached.world.text(&["cache", "top", "--once"]);
    assert!(table.contains("kedge cache recover"), "a killed one is told: {table}");
    cached.recover();
}

/// In a terminal, which `script` makes. d drains what would wait for long.
#[test]
fn a_key_drains() {
    let options = ["--tier", "ram:64M", "--fsync", "memory"];
    let Some(cached) = Cached::start("ctopkey", &options) else { return };
    let mut file = fs::File::create(cached.under.join("a")).expect("a file");
    let kedge = cached.world.kedge(&["cache", "top"]);
    let words = std::iter::once(kedge.get_program()).chain(kedge.get_args());
    let command: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    let mut script = std::process::Command::new("script");
    // A terminal that nobody has given a size has none.
    let top = format!("stty rows 24 cols 200; exec {}", command.join(" "));
    script.args(["--quiet", "--return", "--command"]).arg(top);
    script.arg("/dev/null").env("TERM", "xterm").stdin(Stdio::piped()).stdout(Stdio::piped());
    for (name, value) in kedge.get_envs().filter_map(|(name, value)| Some((name, value?))) {
        script.env(name, value);
    }
    let mut top = Ends(script.spawn().expect("script, from bsdutils"));
    let mut keys = top.0.stdin.take().expect("a pipe");
    let reads = top.0.stdout.take().expect("a pipe");
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for part in BufReader::new(reads).split(b'm').map_while(Result::ok) {
            // Nobody may look any more.
            let _ = tell.send(String::from_utf8_lossy(&part).into_owned());
        }
    });
    let mut seen = String::new();
    let under = cached.under.file_name().expect("a name").to_string_lossy().into_owned();
    wait_for("it is not on the screen", || {
        seen.extend(told.try_iter());
        seen.contains("FOLDER") && seen.contains(&under)
    });
    // As long as it is written, it is not drained by itself.
    file.write_all(&[7; 4096]).expect("absorbed");
    let before = cached.count("drained");
    wait_for("it is not drained", || {
        file.write_all(&[7; 4096]).expect("absorbed");
        keys.write_all(b"d").expect("a key");
        keys.flush().expect("a key");
        cached.count("drained") > before
    });
    keys.write_all(b"q").expect("a key");
    assert!(top.0.wait().expect("it ends").success());
}
