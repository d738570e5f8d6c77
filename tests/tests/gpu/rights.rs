//! Proxies that may not, or cannot, reach the images: they write and read by descriptors that the
//! supervisor gives them, and no name leads them anywhere.

use kedge_left_out::needs_root;
use kedge_tests::job::{Job, family, is_proxy};
use kedge_tests::place::Place;
use kedge_tests::server::Served;
use kedge_tests::world::{is_root, jobs_in};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

const STEPS: u64 = 100;
/// Bits of CapEff in /proc/PID/status: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
const ANY_FILE: u64 = 1 << 1 | 1 << 2;

/// Has a place's proxies be what `how` makes of them: a line of shell, which gets their own as
/// arguments. Returns the folder that only another user may enter, where the images are to go.
fn with_proxies(place: &Place, how: impl Fn(&Path) -> String) -> PathBuf {
    let images = place.world.0.join("theirs");
    fs::create_dir(&images).expect("a folder");
    fs::set_permissions(&images, Permissions::from_mode(0o700)).expect("mine");
    chown(&images, Some(65534), Some(65534)).expect("root");
    let (proxy, kept) =
        (place.world.parts().with_file_name("kedge-proxy"), place.world.0.join("kept"));
    fs::create_dir(&kept).expect("a folder");
    let kept = kept.join("kedge-proxy");
    fs::rename(&proxy, &kept).expect("renamed");
    let script = format!("#!/bin/sh\nset -- {} \"$@\"\n{}\n", kept.display(), how(&images));
    fs::write(&proxy, script).expect("written");
    fs::set_permissions(&proxy, Permissions::from_mode(0o755)).expect("mine");
    images
}

/// Root without the rights by which root is asked nothing.
fn without_rights(_: &Path) -> String {
    "exec setpriv --bounding-set=-dac_override,-dac_read_search \"$@\"".to_owned()
}

/// In another namespace, where nothing is at the images' place.
fn elsewhere(images: &Path) -> String {
    let hide = format!("mount -t tmpfs none {} && exec \"$@\"", images.display());
    format!("exec unshare --mount sh -c '{hide}' sh \"$@\"")
}

/// The job's proxies, each of which `is` what it was made.
fn check(job: &Job, is: impl Fn(u32) -> bool) {
    let proxies: Vec<u32> =
        family(job.supervisor()).into_iter().filter(|pid| is_proxy(*pid)).collect();
    assert!(!proxies.is_empty() && proxies.iter().all(|pid| is(*pid)), "{proxies:?}");
}

fn has_no_rights(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let rights = status.lines().find_map(|line| line.strip_prefix("CapEff:")).expect("its rights");
    u64::from_str_radix(rights.trim(), 16).expect("a number") & ANY_FILE == 0
}

/// The job is checkpointed, killed and brought back, twice, by images that build on each other.
fn goes_on(place: &Place, images: &Path, mut job: Job, is: impl Fn(u32) -> bool) {
    let (dir, nonce) = (images.to_str().expect("UTF-8"), job.nonce.clone());
    for _ in 0..2 {
        job.read_to(job.step + 2);
        check(&job, &is);
        place.checkpoint(&["--dir", dir, "--incremental"]);
        job.read_to(job.step + 2);
        let image = place.checkpoint(&["--dir", dir, "--incremental"]);
        assert_eq!(fs::metadata(&image).expect("an image").uid(), 0);
        let before = job.step;
        job.read_to(job.step + 2);
        job.kill();
        let printed = job.step;
        job = place.restart(&image, &nonce);
        assert!((before + 1..=printed + 1).contains(&job.step), "went on at step {}", job.step);
    }
    job.read_to(job.step + 1);
    check(&job, &is);
    assert_eq!(job.finish(STEPS).code(), Some(7));
}

fn root_alone() -> bool {
    if !is_root() {
        needs_root("a proxy without rights", "who has none cannot take any from it");
    }
    is_root()
}

#[test]
fn a_proxy_without_rights_to_the_images_folder_writes_and_reads() {
    if !root_alone() {
        return;
    }
    let place = Place::mine("grights");
    let images = with_proxies(&place, without_rights);
    goes_on(&place, &images, blocks(&place), has_no_rights);
}

#[test]
fn a_proxy_that_sees_another_folder_there_writes_and_reads() {
    if !root_alone() {
        return;
    }
    let place = Place::mine("gelsewhere");
    let images = with_proxies(&place, elsewhere);
    let there = images.clone();
    goes_on(&place, &images, blocks(&place), move |pid| is_empty(&there, pid));
}

/// A job with 8 MiB on its device, which loads and unloads a module at every step.
fn blocks(place: &Place) -> Job {
    let steps = STEPS.to_string();
    place.with_device("gpu_blocks", &["--incremental"], &[&steps, "40", "8", "1"])
}

/// Whether a process sees nothing in the folder.
fn is_empty(folder: &Path, pid: u32) -> bool {
    let seen = format!("/proc/{pid}/root{}", folder.display());
    fs::read_dir(seen).expect("a folder").next().is_none()
}

/// Of several places, whose files lie beside the client's.
#[test]
fn so_does_one_whose_devices_are_of_several_places() {
    if !root_alone() {
        return;
    }
    let place = Place::mine("gplcrights");
    let server = Served::start(&["--gpu", "soft"]);
    let images = with_proxies(&place, without_rights);
    let gpu = format!("{}/0,soft", server.address);
    let job = place.on(&gpu, "gpu_round", &["--incremental"], &[&STEPS.to_string(), "20"]);
    goes_on(&place, &images, job, has_no_rights);
}

/// What the job `j` answers on its control socket.
fn ask(place: &Place, ask: &str) -> Value {
    let asked = format!(r#"{{"version":1,"ask":{ask}}}"#);
    let control = jobs_in(&place.world.home()).join("j/control");
    let mut stream = UnixStream::connect(control).expect("connected");
    let length = (asked.len() as u32).to_le_bytes();
    stream.write_all(&[&length[..], asked.as_bytes()].concat()).expect("written");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer");
    serde_json::from_slice(&answer[4..]).expect("JSON")
}

/// As `kedge bench checkpoint` does it: there is nothing that looks like an image, and what the job
/// saves before and after is whole.
#[test]
fn a_drain_that_is_measured_leaves_no_image() {
    let place = Place::mine("gmeasured");
    let mut job = blocks(&place);
    let nonce = job.nonce.clone();
    job.read_to(2);
    for codec in ["raw", "auto"] {
        let said = ask(&place, &format!(r#"{{"measure":{{"codec":"{codec}"}}}}"#));
        let bytes = said["measured"]["bytes"].as_u64().unwrap_or_else(|| panic!("{said}"));
        assert!(bytes > 4 << 20 && said["measured"]["seconds"].as_f64() > Some(0.0), "{said}");
        assert!(!place.images().exists(), "there is an image");
        job.read_to(job.step + 2);
    }
    let said = ask(&place, r#"{"measure":{"codec":"none"}}"#);
    assert_eq!(said["failed"]["kind"], "failed", "{said}");
    place.checkpoint(&[]);
    ask(&place, r#"{"measure":{"codec":"raw"}}"#);
    job.read_to(job.step + 2);
    let image = place.checkpoint(&[]);
    job.read_to(job.step + 2);
    job.kill();
    assert!(place.output(&["verify", &image.display().to_string()]).status.success());
    assert_eq!(place.restart(&image, &nonce).finish(STEPS).code(), Some(7));
}
