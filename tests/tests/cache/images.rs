//! Images of kedge's on a folder that a write-back cache absorbs, and programs that run on one.
use kedge_left_out::left_out;
use kedge_tests::cached::Cached;
use kedge_tests::world::{World, is_root, stderr, wait_for};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

/// A job that is killed at the end, with its program.
struct Job<'a>(Child, &'a World);

impl Drop for Job<'_> {
    fn drop(&mut self) {
        self.1.output(&["kill", "j"]);
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The states of the images in a folder, the newest first.
fn states(cached: &Cached, images: &str) -> Vec<String> {
    let all = cached.world.json(&["images", "--json", images]);
    all.iter().map(|image| image["state"].as_str().expect("a state").to_owned()).collect()
}

#[test]
fn an_image_is_cached_and_then_durable() {
    let options = ["--tier", "ram:256M", "--fsync", "memory"];
    let Some(mut cached) = Cached::new("cimages", &options) else { return };
    let held = cached.world.0.join("held");
    fs::write(&held, "").expect("a file");
    cached.fault = Some(format!("carried={}", held.display()));
    cached.begin();
    let images = cached.under.join("images").display().to_string();
    let run = ["run", "--gpu", "none", "--job", "j", "--ckpt-dir", &images, "--keep", "1", "--"];
    let mut job = cached.world.kedge(&[&run[..], &["sleep", "1000"]].concat());
    job.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let _job = Job(job.spawn().expect("kedge"), &cached.world);
    wait_for("the job does not run", || cached.world.output(&["checkpoint", "j"]).status.success());
    assert_eq!(states(&cached, &images), ["cached"]);
    // It replaces none that is lost with the node.
    cached.world.text(&["checkpoint", "j"]);
    assert_eq!(states(&cached, &images), ["cached", "cached"]);
    cached.world.text(&["verify", &images]);
    // Its manifest is no more below than the rest.
    let below = cached.below().join("images");
    let lengths = |name: &str| {
        let folders = fs::read_dir(&below).expect("images").flatten();
        folders
            .map(|it| fs::metadata(it.path().join(name)).map_or(0, |meta| meta.len()))
            .sum::<u64>()
    };
    assert_eq!(lengths("manifest.json"), 0);
    fs::remove_file(held).expect("a file");
    wait_for("it is not drained", || states(&cached, &images) == ["finished", "finished"]);
    assert!(lengths("manifest.json") > 0);
    cached.world.text(&["checkpoint", "j"]);
    wait_for("it is not drained", || cached.count("dirty") == 0);
    cached.world.text(&["checkpoint", "j"]);
    assert!(states(&cached, &images).len() <= 3, "old ones stay");
}

#[test]
fn a_program_runs_on_a_folder_that_is_cached_for_it() {
    if !is_root() || !Path::new("/dev/fuse").exists() {
        left_out("a cached folder", "it takes root and /dev/fuse");
        return;
    }
    let Some(cached) = Cached::new("crun", &[]) else { return };
    let folder = cached.under.display().to_string();
    let script = "mount | grep -c \"$PWD \" >&2; head -c 1000000 /dev/zero > a; stat -f -c %T .";
    let mut run = cached.world.kedge(&["run", "--gpu", "none", "--cache", &folder, "--"]);
    let output =
        run.args(["sh", "-c", &format!("cd {folder} && {script}")]).output().expect("kedge");
    assert!(output.status.success(), "{}", stderr(&output));
    let kind = String::from_utf8_lossy(&output.stdout);
    assert!(kind.contains("fuse"), "it ran on {kind}");
    assert_eq!(fs::metadata(cached.below().join("a")).expect("there").len(), 1_000_000);
    let mounts = fs::read_to_string("/proc/mounts").expect("/proc");
    assert!(!mounts.contains(&format!(" {folder} ")), "it is cached still");
    // One that is cached stays so.
    cached.begin();
    let script = format!("head -c 1000 /dev/zero > {folder}/b");
    cached.world.text(&["run", "--gpu", "none", "--cache", &folder, "--", "sh", "-c", &script]);
    assert_eq!(fs::metadata(cached.below().join("b")).expect("there").len(), 1000);
    assert_eq!(cached.count("dirty"), 0);
    let missing: PathBuf = cached.world.0.join("nothing");
    let missing = missing.display().to_string();
    let refused = cached.world.output(&["run", "--gpu", "none", "--cache", &missing, "--", "true"]);
    assert!(!refused.status.success() && stderr(&refused).contains("nothing"));
}
