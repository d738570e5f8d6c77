//! `kedge trace`: what a program and its devices did, and when, is in one file.
use kedge_tests::host;
use kedge_tests::server::Served;
use kedge_tests::world::{World, stderr, wait_for};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Output, Stdio};

fn program() -> String {
    host("traced.cu", "traced", &["-O1", "-arch=sm_80"]).display().to_string()
}

/// Something of a trace; times in nanoseconds.
#[derive(Debug)]
struct Event {
    cat: String,
    name: String,
    pid: u64,
    tid: u64,
    begin: u64,
    end: u64,
    args: Value,
}

impl Event {
    fn of(event: &Value) -> Event {
        let nanos = |name: &str| {
            let micros = event[name].as_f64().unwrap_or_else(|| panic!("{name}: {event}"));
            (micros * 1000.0).round() as u64
        };
        let text = |name: &str| event[name].as_str().expect("text").to_owned();
        let number = |name: &str| event[name].as_u64().expect("a number");
        Event {
            cat: text("cat"),
            name: text("name"),
            pid: number("pid"),
            tid: number("tid"),
            begin: nanos("ts"),
            end: nanos("ts") + nanos("dur"),
            args: event["args"].clone(),
        }
    }
}

struct Trace {
    whole: Value,
    events: Vec<Event>,
}

impl Trace {
    fn read(file: &Path) -> Trace {
        let text = std::fs::read(file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
        let whole: Value = serde_json::from_slice(&text).expect("JSON");
        let all = whole["traceEvents"].as_array().expect("a list");
        let events = all.iter().filter(|event| event["ph"] == "X").map(Event::of).collect();
        Trace { whole, events }
    }

    fn of(&self, cat: &str) -> Vec<&Event> {
        self.events.iter().filter(|event| event.cat == cat).collect()
    }

    fn names(&self, cat: &str) -> Vec<&str> {
        self.of(cat).iter().map(|event| &*event.name).collect()
    }

    /// What is not a call, in the order of its begin.
    fn work(&self) -> Vec<&str> {
        let mut work: Vec<_> = self.events.iter().filter(|event| event.cat != "call").collect();
        work.sort_by_key(|event| event.begin);
        work.into_iter().map(|event| &*event.name).collect()
    }
}

/// Traces a case of traced.cu on a software device: how that ended, and its trace.
fn trace(case: &[&str], options: &[&str]) -> (Output, Trace) {
    let world = World::new(&format!("trace-{}", case[0]));
    let (program, file) = (program(), world.0.join("t.json"));
    let name = file.display().to_string();
    let words = [&["trace", "--gpu", "soft", "-o", &name], options, &["--", &program], case];
    let output = world.output(&words.concat());
    let trace = Trace::read(&file);
    (output, trace)
}

const WORK: [&str; 7] = [
    "copy to device",
    "first(int*)",
    "second(int*, int)",
    "memset",
    "copy from device",
    "graph",
    "graph",
];

#[test]
fn calls_and_work_are_there_by_name_and_in_order() {
    let (output, trace) = trace(&["work"], &[]);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.starts_with("kedge: trace: ") && said.contains(" of 1 process: "), "{said}");
    assert_eq!(trace.work(), WORK);
    let copies: Vec<_> = trace.of("copy").iter().map(|copy| copy.args["bytes"].as_u64()).collect();
    assert_eq!(copies, [Some(4 << 16), Some(1000), Some(4096)]);
    let calls = trace.names("call");
    for (name, least) in [("cuInit", 1), ("cuGraphLaunch", 2), ("cuStreamSynchronize", 2)] {
        let count = calls.iter().filter(|call| call.starts_with(name)).count();
        assert!(count >= least, "{name}: {count} times in {calls:?}");
    }
    // A call that launches begins before what it launches, and one that waits ends behind it.
    let call = |name: &str| {
        let of = trace.of("call").into_iter();
        of.filter(|call| call.name.starts_with(name)).collect::<Vec<_>>()
    };
    let kernels = trace.of("kernel");
    assert!(call("cuLaunchKernel")[0].begin < kernels[0].begin, "{kernels:?}");
    assert!(call("cuStreamSynchronize")[0].end > kernels[1].end, "{kernels:?}");
    for event in &trace.events {
        assert!(event.begin <= event.end, "{event:?}");
        assert!(event.cat != "call" || event.args["result"].is_u64(), "{event:?}");
    }
}

#[test]
fn nothing_overlaps_in_a_stream() {
    let (output, trace) = trace(&["two", "200"], &[]);
    assert!(output.status.success(), "{output:?}");
    let mut streams: BTreeMap<u64, Vec<&Event>> = BTreeMap::new();
    for kernel in trace.of("kernel") {
        streams.entry(kernel.tid).or_default().push(kernel);
    }
    let counts: Vec<_> = streams.values().map(Vec::len).collect();
    assert_eq!(counts, [200, 200]);
    for events in streams.values_mut() {
        events.sort_by_key(|event| event.begin);
        for pair in events.windows(2) {
            assert!(pair[0].end <= pair[1].begin, "{pair:?}");
            assert_eq!(pair[0].name, pair[1].name);
        }
    }
    let all = trace.whole["traceEvents"].as_array().expect("a list");
    let named = |event: &&Value| {
        event["name"] == "thread_name" && streams.contains_key(&event["tid"].as_u64().unwrap_or(0))
    };
    assert_eq!(all.iter().filter(named).count(), 2, "each stream has its name");
}

/// Nanoseconds of a time as tables have it.
fn nanos(number: &str, unit: &str) -> f64 {
    let unit = match unit {
        "ns" => 1.0,
        "µs" => 1e3,
        "ms" => 1e6,
        "s" => 1e9,
        other => panic!("{other} is no unit"),
    };
    number.parse::<f64>().expect("a number") * unit
}

#[test]
fn the_tables_are_the_traces_sums() {
    let (output, trace) = trace(&["many", "50"], &["--stats"]);
    let said = stderr(&output);
    assert!(output.status.success(), "{said}");
    let mut rows = 0;
    for cat in ["call", "kernel"] {
        let mut sums: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
        for event in trace.of(cat) {
            sums.entry(&event.name).or_default().push(event.end - event.begin);
        }
        let all: u64 = sums.values().flatten().sum();
        for (name, times) in sums {
            let row = said.lines().find(|line| line.split_whitespace().last() == Some(name));
            let row = row.unwrap_or_else(|| panic!("{name}: {said}"));
            let words: Vec<_> = row.split_whitespace().collect();
            let total: u64 = times.iter().sum();
            let count = times.len() as u64;
            assert_eq!(words[3], count.to_string(), "{row}");
            let told = [(1, total), (4, total / count)];
            let told = told.into_iter().chain(
                [(6, times.iter().min()), (8, times.iter().max())]
                    .map(|(at, time)| (at, *time.expect("one"))),
            );
            for (at, time) in told {
                let close = (nanos(words[at], words[at + 1]) - time as f64).abs();
                assert!(close <= time as f64 * 0.01 + 1.0, "{name}: {row}: {time} at {at}");
            }
            let share: f64 = words[0].trim_end_matches('%').parse().expect("a share");
            assert!((share - total as f64 * 100.0 / all as f64).abs() < 0.1, "{row}");
            rows += 1;
        }
    }
    assert!(rows > 5, "{said}");
    assert_eq!(trace.names("kernel"), ["first(int*)"; 50]);
}

#[test]
fn the_table_alone_makes_no_file() {
    let world = World::new("trace-table");
    let program = program();
    let mut command = world.kedge(&["trace", "--gpu", "soft", "--stats", "--", &program, "work"]);
    let output = command.current_dir(&world.0).output().expect("kedge");
    assert!(stderr(&output).contains("second(int*, int)"), "{output:?}");
    assert!(!world.0.join("trace.json").exists());
    let mut command = world.kedge(&["trace", "--gpu", "soft", "--", &program, "work"]);
    let output = command.current_dir(&world.0).output().expect("kedge");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(Trace::read(&world.0.join("trace.json")).work(), WORK);
}

#[test]
fn a_limit_is_kept_and_told() {
    let (output, whole) = trace(&["many", "1000"], &[]);
    assert!(!stderr(&output).contains("left out"), "{output:?}");
    let (output, part) = trace(&["many", "1000"], &["--limit", "40K"]);
    let said = stderr(&output);
    assert!(output.status.success(), "{said}");
    let left = part.whole["otherData"]["left_out"].as_u64().expect("a number");
    assert!(said.contains(&format!("trace: {left} events were left out: raise --limit")), "{said}");
    assert!((100..500).contains(&part.events.len()), "{} events", part.events.len());
    assert_eq!(part.events.len() as u64 + left, whole.events.len() as u64, "each is counted");
}

#[test]
fn what_a_killed_program_did_is_there() {
    let (output, trace) = trace(&["killed"], &[]);
    assert_eq!(output.status.signal(), Some(9), "{output:?}");
    assert_eq!(trace.work(), WORK);
    // The last thing that it called is there, too: nothing waits in the program.
    let last = trace.of("call").into_iter().max_by_key(|call| call.end).expect("calls");
    assert!(last.name.starts_with("cuMemFree"), "{last:?}");
}

#[test]
fn processes_are_told_apart() {
    let world = World::new("trace-several");
    let (program, file) = (program(), world.0.join("t.json"));
    let name = file.display().to_string();
    let script = format!("{program} work & {program} work & wait");
    let words = ["trace", "--gpu", "soft", "-o", &name, "--", "sh", "-c", &script];
    let output = world.output(&words);
    assert!(stderr(&output).contains(" of 2 processes: "), "{output:?}");
    let trace = Trace::read(&file);
    let mut kernels: BTreeMap<u64, Vec<&str>> = BTreeMap::new();
    for kernel in trace.of("kernel") {
        kernels.entry(kernel.pid).or_default().push(&kernel.name);
    }
    let each = vec!["first(int*)", "second(int*, int)"];
    assert_eq!(kernels.values().collect::<Vec<_>>(), [&each, &each]);
}

#[test]
fn of_a_far_device_the_calls_are_there() {
    let world = World::new("trace-far");
    let server = Served::start(&["--gpu", "soft"]);
    let (program, file) = (program(), world.0.join("t.json"));
    let name = file.display().to_string();
    let words = ["trace", "--gpu", &server.address, "-o", &name, "--", &program, "work"];
    let output = world.output(&words);
    assert!(output.status.success(), "{output:?}");
    let trace = Trace::read(&file);
    let launches = trace.names("call").into_iter().filter(|name| name.starts_with("cuLaunchK"));
    assert_eq!(launches.count(), 4, "two of them captured");
    assert_eq!(trace.work(), [""; 0], "its clock is another");
}

#[test]
fn the_pause_of_a_checkpoint_is_there() {
    let world = World::new("trace-pause");
    let (program, file) = (program(), world.0.join("t.json"));
    let name = file.display().to_string();
    let words = ["trace", "--gpu", "soft", "--job", "j", "-o", &name, "--", &program, "waits"];
    let mut command = world.kedge(&words);
    let (input, output) = (Stdio::piped(), Stdio::piped());
    let mut child = command.stdin(input).stdout(output).spawn().expect("kedge");
    let mut line = [0; 6];
    std::io::Read::read_exact(child.stdout.as_mut().expect("a pipe"), &mut line).expect("ready");
    let image = world.output(&["checkpoint", "j"]);
    assert!(image.status.success(), "{image:?}");
    child.stdin.take().expect("a pipe").write_all(b"\n").expect("it reads");
    assert!(child.wait().expect("it ends").success());
    let trace = Trace::read(&file);
    let expected = [&WORK[..], &["pause"], &WORK[..]].concat();
    assert_eq!(trace.work(), expected);
    let pause = trace.of("pause")[0];
    assert!(pause.end > pause.begin, "{pause:?}");
}

/// Whoever is not traced has no folder for it, and nothing is said.
#[test]
fn nothing_is_written_where_nobody_asks() {
    let world = World::new("trace-off");
    let program = program();
    let script = format!("{program} work; ls \"${{KEDGE_LOG%/log}}\"; env");
    let output = world.output(&["run", "--gpu", "soft", "--", "sh", "-c", &script]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said.contains("meta.json"), "{output:?}");
    assert!(!said.lines().any(|line| line == "trace") && !said.contains("KEDGE_TRACE"), "{said}");
    let name = world.0.join("t.json").display().to_string();
    let words = ["trace", "--gpu", "soft", "-o", &name, "--", "sh", "-c", &script];
    let output = world.output(&words);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.lines().any(|line| line == "trace"), "{said}");
    wait_for("the files are gone with the job", || {
        let jobs = std::fs::read_dir(world.job(".")).expect("a folder").flatten();
        jobs.into_iter().all(|job| !job.path().join("trace").exists())
    });
}

#[test]
fn what_cannot_be_traced_is_refused_before_the_program_runs() {
    let world = World::new("trace-no");
    let output = world.output(&["trace", "-o", "/no/such/t.json", "--", "echo", "ran"]);
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(stderr(&output).contains("/no/such/t.json") && output.stdout.is_empty(), "{output:?}");
    let output = world.output(&["trace", "--gpu", "none", "--stats", "--", "echo", "ran"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
}

/// Until there is a trace its file has what it had.
#[test]
fn a_mistyped_program_costs_no_earlier_trace() {
    let world = World::new("tracetypo");
    let [old, new, pipe] = ["old.json", "new.json", "pipe"].map(|name| world.0.join(name));
    std::fs::write(&old, "an earlier trace").expect("a file");
    let trace = |file: &Path| {
        let file = file.display().to_string();
        world.output(&["trace", "-o", &file, "--gpu", "soft", "--", "/no/such/program"])
    };
    for file in [&old, &new] {
        let output = trace(file);
        assert_eq!(output.status.code(), Some(127), "{output:?}");
    }
    assert_eq!(std::fs::read_to_string(&old).expect("the file"), "an earlier trace");
    assert!(!new.exists());
    // Nobody reads it: that is told, and not waited for.
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
    assert!(made.success());
    let output = trace(&pipe);
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(stderr(&output).contains(&pipe.display().to_string()), "{output:?}");
}
