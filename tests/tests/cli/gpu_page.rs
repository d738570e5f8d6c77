//! The scripts that measure GPUs and make a page of it, as far as they go without one.

use kedge_tests::world::World;
use kedge_tests::{kedge, root};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn script(name: &str, arguments: &[&str]) -> Output {
    Command::new(root().join("scripts").join(name)).args(arguments).output().expect("python3")
}

fn said(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&both).into_owned()
}

/// Runs a part on a software device, with so many seconds left.
fn part(world: &World, name: &str, limit: &str) -> String {
    let mut command = Command::new(root().join("scripts/gpu-page"));
    command.args(["run", "--gpu", "soft", "--limit", limit, "--state"]).arg(world.0.join("state"));
    command.arg("--work").arg(world.0.join("work")).arg(name);
    command.env("KEDGE_BIN", kedge().parent().expect("a folder"));
    command.env("XDG_RUNTIME_DIR", &world.0);
    let output = command.output().expect("python3");
    assert!(output.status.success(), "{}", said(&output));
    said(&output)
}

#[test]
fn a_part_that_has_a_result_is_not_measured_again() {
    let world = World::new("page");
    let result = world.0.join("state/checkpoint-4.json");
    let left = part(&world, "checkpoint-4", "1");
    assert!(left.contains("left for the next call") && !result.exists(), "{left}");
    part(&world, "checkpoint-4", "9999");
    let text = fs::read_to_string(&result).expect("a result");
    let told: Value = serde_json::from_str(&text).expect("JSON");
    let figures = told["result"]["figures"].as_array().expect("figures");
    for what in [
        "the program's longest pause, 4 MiB",
        "as much on the host, 1 GiB at most: the program's longest pause, 4 MiB",
        "beats while it is drained, 4 MiB",
        "restart in a warm proxy until the program answers, 4 MiB",
    ] {
        let figure = figures.iter().find(|figure| figure["name"] == what);
        assert!(
            figure.is_some_and(|figure| figure["value"].as_f64() > Some(0.0)),
            "{what}: {text}"
        );
    }
    assert_eq!(told["machine"]["gpus"], 0);
    assert_eq!(part(&world, "checkpoint-4", "9999"), "");
    assert_eq!(fs::read_to_string(&result).expect("the result"), text);
}

/// A page, results of one part, and the scripts' arguments for them.
struct Pages<'a>(&'a Path);

impl Pages<'_> {
    fn put(&self, commit: &str, part: &str, date: &str, machine: &Value, result: &Value) {
        let folder = self.0.join("results/h200").join(commit);
        fs::create_dir_all(&folder).expect("a folder");
        let told = json!({"part": part, "date": date, "seconds": 9.5, "machine": machine, "result": result});
        fs::write(folder.join(format!("{part}.json")), told.to_string()).expect("a result");
    }

    fn report(&self, options: &[&str]) -> Output {
        let (results, page) = (self.0.join("results"), self.0.join("page.md"));
        let places = [
            "--results",
            results.to_str().expect("a path"),
            "--page",
            page.to_str().expect("a path"),
        ];
        script("gpu-report", &[options, &places].concat())
    }

    fn page(&self) -> String {
        fs::read_to_string(self.0.join("page.md")).expect("a page")
    }
}

fn machine(commit: &str, gpus: u32) -> Value {
    json!({"gpu": "NVIDIA H200", "gpus": gpus, "gpu_memory": "143771 MiB", "driver": "580.1", "kernel": "6.18",
        "cores": 16, "host_mib": 131072, "python": "PyTorch 2", "commit": commit})
}

fn latency(launch: f64) -> Value {
    let side = |value: f64| json!({"launch and synchronize": [value, value, value]});
    let times = json!([[0.001, 0.2], [0.001, 0.2]]);
    json!({"results": [{"what": "scrubbed, native then kedge", "good": true, "detail": ""}],
        "latency": {"native": side(10.0), "kedge": side(launch)}, "startup": {"native": times, "kedge": times}})
}

#[test]
fn the_page_says_what_the_newest_results_say_and_nothing_else() {
    let world = World::new("report");
    let pages = Pages(&world.0);
    let marks =
        "<!-- made by scripts/gpu-report: begin -->\n<!-- made by scripts/gpu-report: end -->";
    fs::write(world.0.join("page.md"), format!("before\n\n{marks}\n\nafter\n")).expect("a page");
    pages.put(
        "aaaaaaa",
        "near",
        "2026-01-01T00:00:00+00:00",
        &machine("aaaaaaa", 1),
        &latency(13.0),
    );
    assert!(!pages.report(&["--check"]).status.success());
    let made = pages.report(&[]);
    assert!(made.status.success(), "{}", said(&made));
    let page = pages.page();
    assert!(page.starts_with("before\n\n") && page.ends_with("\n\nafter\n"), "{page}");
    assert!(page.contains("Commit aaaaaaa, 2026-01-01"), "{page}");
    let row = "| launch and synchronize | 10.0 µs | 13.0 µs | 1.300 (1.300–1.300) | ≤ 1.05 | **missed** |";
    assert!(page.contains(row), "{page}");
    assert!(page.contains("| checkpoint-100 | not run yet |"), "{page}");
    assert!(page.contains("| peers | not run: needs two GPUs |"), "{page}");
    assert!(pages.report(&["--check"]).status.success());

    // A newer commit's take their place, whole.
    pages.put(
        "bbbbbbb",
        "near",
        "2026-01-02T00:00:00+00:00",
        &machine("bbbbbbb", 1),
        &latency(10.0),
    );
    assert!(!pages.report(&["--check"]).status.success());
    assert!(pages.report(&[]).status.success());
    let page = pages.page();
    assert!(page.contains("Commit bbbbbbb") && !page.contains("aaaaaaa"), "{page}");
    assert!(page.contains("1.000 (1.000–1.000) | ≤ 1.05 | met |"), "{page}");

    // What the newer one has not is shown as the older one's.
    let cost = json!([{"name": "a step", "value": 1.0, "unit": "", "target": null}]);
    let old = "2026-01-01T00:00:00+00:00";
    pages.put("aaaaaaa", "cost", old, &machine("aaaaaaa", 1), &cost);
    assert!(pages.report(&[]).status.success());
    let page = pages.page();
    let (new, older) = page.split_once("### H200, at aaaaaaa").expect("a section of its own");
    assert!(new.contains("### H200, at bbbbbbb") && new.contains("launch and synchronize"));
    assert!(older.contains("a step, in a job") && !older.contains("launch and synchronize"));
    assert!(!older.contains("| cost | not run yet |"), "{page}");

    // Neither figures of two commits in one place, nor of no GPU.
    for (other, why) in
        [(machine("aaaaaaa", 1), "aaaaaaa"), (machine("bbbbbbb", 0), "software device")]
    {
        pages.put("bbbbbbb", "cost", "2026-01-02T00:00:00+00:00", &other, &json!([]));
        let refused = pages.report(&[]);
        assert!(!refused.status.success() && said(&refused).contains(why), "{}", said(&refused));
    }
    assert_eq!(pages.page(), page);
}

#[test]
fn the_page_of_this_checkout_is_what_its_results_say() {
    let checked = script("gpu-report", &["--check"]);
    assert!(checked.status.success(), "{}", said(&checked));
}

#[test]
fn the_plots_of_this_checkout_are_what_its_figures_say() {
    let checked = script("plots", &["--check"]);
    assert!(checked.status.success(), "{}", said(&checked));
    let world = World::new("gpplots");
    let folder = world.0.display().to_string();
    let stale = script("plots", &["--check", "--plots", &folder]);
    assert!(!stale.status.success() && said(&stale).contains("pause.svg"), "{}", said(&stale));
    let drawn = script("plots", &["--plots", &folder]);
    assert!(drawn.status.success(), "{}", said(&drawn));
    let again = script("plots", &["--check", "--plots", &folder]);
    assert!(again.status.success(), "{}", said(&again));
}
