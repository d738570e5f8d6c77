//! Checkpoints of what devices hold, which build on each other: `kedge run --incremental` with a
//! device.
use kedge_tests::job::User;
use kedge_tests::place::Place;
use kedge_tests::world::stderr;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

const STEPS: u64 = 100;
const MIB: u64 = 1 << 20;

/// Bytes of the file of what the devices held, of their memory and of what of it the parent has.
fn devices(place: &Place, image: &Path) -> (u64, u64, u64) {
    let shown = place.json(&["inspect", "--json", image.to_str().expect("UTF-8")]);
    let files = shown["files"].as_array().expect("a list");
    let is_gpu = |file: &&Value| file["name"].as_str().is_some_and(|n| n.starts_with("gpu-"));
    let file = files.iter().find(is_gpu).expect("a file of the devices");
    let number = |what: &str| file[what].as_u64().expect("a number");
    let of_kinds = shown["devices"][0]["memory"].as_array().expect("a list").iter();
    let of_kinds: u64 = of_kinds.filter_map(|kind| kind["parent"].as_u64()).sum();
    assert_eq!(of_kinds, number("parent"), "{shown}");
    assert!(shown["devices"][0]["made"]["modules"].as_u64() >= Some(1), "{shown}");
    (number("bytes"), number("memory"), number("parent"))
}

/// How many of each kind a restart makes anew: what the proxy's record holds.
fn made(place: &Place, image: &Path) -> BTreeMap<String, u64> {
    let shown = place.json(&["inspect", "--json", image.to_str().expect("UTF-8")]);
    let made = shown["devices"][0]["made"].as_object().expect("what is made anew");
    let count =
        |(what, count): (&String, &Value)| (what.clone(), count.as_u64().expect("a number"));
    made.iter().map(count).collect()
}

/// A chain of images: each holds what has changed, and any of them brings the job back.
fn chain(place: &Place) {
    let steps = STEPS.to_string();
    let mut job = place.with_device("gpu_blocks", &["--incremental"], &[&steps, "40", "32", "1"]);
    let nonce = job.nonce.clone();
    job.read_to(3);
    let first = place.checkpoint(&[]);
    let (bytes, _, parent) = devices(place, &first);
    assert!(bytes > 32 * MIB && parent == 0, "{bytes} {parent}");
    for _ in 0..3 {
        job.read_to(job.step + 2);
        let image = place.checkpoint(&[]);
        let (bytes, memory, parent) = devices(place, &image);
        assert!(parent > 4 * MIB && bytes < memory - parent + MIB, "{bytes} {memory} {parent}");
    }
    let full = place.checkpoint(&["--full"]);
    assert_eq!(devices(place, &full).2, 0);
    job.read_to(job.step + 1);
    let last = place.checkpoint(&[]);
    let (bytes, _, parent) = devices(place, &last);
    assert!(bytes < 28 * MIB && parent > 4 * MIB, "{bytes} {parent}");
    job.read_to(job.step + 2);
    job.kill();
    let again = place.restart(&last, &nonce);
    assert_eq!(again.finish(STEPS).code(), Some(7));
    // One from the middle of the first chain.
    let third = first.with_file_name("j-0003");
    assert_eq!(place.restart(&third, &nonce).finish(STEPS).code(), Some(7));
    // Nothing of a chain can be spared, and that is said by name.
    std::fs::remove_dir_all(&first).expect("the first image removed");
    let third = third.to_str().expect("UTF-8");
    let output = place.output(&["restart", third]);
    assert!(!output.status.success() && stderr(&output).contains("j-0001"), "{output:?}");
}

#[test]
fn devices_are_saved_by_what_has_changed() {
    chain(&Place::mine("ginc"));
}

#[test]
fn an_ordinary_user_has_them_too() {
    if let Some(place) = Place::new("gincu", User::Nobody) {
        chain(&place);
    }
}

/// Memory of its own and descriptors of a process, now. What it shares with its proxy has its full
/// size from the beginning, and is resident as far as messages have gone round in it.
fn holds(pid: u32) -> (u64, usize) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap_or("0");
    let kib = line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0);
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    (kib << 10, fds)
}

/// One run, checkpointed again and again while modules come and go: `KEDGE_CHECKPOINTS`, else 30 of
/// them.
#[test]
fn many_checkpoints_of_one_run_let_nothing_grow() {
    let rounds = std::env::var("KEDGE_CHECKPOINTS").ok().and_then(|n| n.parse().ok()).unwrap_or(30);
    let place = Place::mine("gincmany");
    let mut job = place.with_device(
        "gpu_blocks",
        &["--incremental", "--keep", "2"],
        &["1000000", "1", "4", "1"],
    );
    let supervisor = job.supervisor();
    let all = || {
        let family = kedge_tests::job::family(supervisor);
        let sum = |(m, f): (u64, usize), pid: u32| (m + holds(pid).0, f + holds(pid).1);
        family.into_iter().fold(holds(supervisor), sum)
    };
    let mut at = Vec::new();
    let (mut sizes, mut records) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        job.read_to(job.step + 2);
        let image = place.checkpoint(&[]);
        // A full one at the same place of the chain.
        if round % 10 == 0 {
            sizes.push(devices(&place, &image).0);
            records.push(made(&place, &image));
            at.push(all());
        }
    }
    println!("memory and descriptors: {at:?}; images: {sizes:?}; records: {records:?}");
    // The first rounds warm up.
    let (second, last) = (1.min(at.len() - 1), at.len() - 1);
    let (early, late) = (at[second], at[last]);
    // Each step loads a module and unloads it: an image may find one of them loaded. A record that
    // kept those that have ended would have twenty more after ten checkpoints, which are a few KiB.
    for (what, count) in &records[last] {
        let before = records[second].get(what).copied().unwrap_or(0);
        assert!(*count <= before + 1, "the record grows by {what}: {records:?}");
    }
    assert!(late.0 < early.0 + 16 * MIB, "memory grows: {at:?}");
    assert!(late.1 <= early.1 + 4, "descriptors grow: {at:?}");
    let (first, last) = (sizes[0], sizes[sizes.len() - 1]);
    assert!(last < first + first / 4 + MIB, "images grow: {sizes:?}");
    let images = place.json(&["images", "--json"]);
    assert!(images.as_array().is_some_and(|images| images.len() <= 24), "{images}");
    job.kill();
}
