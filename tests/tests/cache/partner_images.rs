//! Images of kedge's on a folder that is cached, with a partner: the loss of the node takes none.

use crate::partner::{Partner, lose_node, recover, start};
use kedge_tests::cached::Cached;
use kedge_tests::job::{Job, User, build, kedge_as};
use kedge_tests::world::wait_for;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;

const STEPS: u64 = 400;

/// The job `j`, whose images go to the cached folder.
struct Checkpointed<'a> {
    cached: &'a Cached,
    images: String,
    job: Job,
}

impl Checkpointed<'_> {
    fn begin(cached: &Cached) -> Checkpointed<'_> {
        let program = build(&cached.world, "steps", &[]).display().to_string();
        let images = cached.under.join("images").display().to_string();
        let options = ["--gpu", "none", "--job", "j", "--ckpt-dir", &images, "--"];
        // Steps, milliseconds between two, threads, megabytes.
        let steps = STEPS.to_string();
        let words = [&["run"], &options[..], &[&program, &steps, "2", "2", "4"]].concat();
        let mut job = Job::start(kedge_as(&cached.world, User::Same, &words));
        job.read_to(STEPS / 5);
        Checkpointed { cached, images, job }
    }

    fn checkpoint(&self) -> PathBuf {
        let words = ["checkpoint", "j", "--json"];
        let output = kedge_as(&self.cached.world, User::Same, &words).output().expect("kedge");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        PathBuf::from(report["image"].as_str().expect("a path"))
    }
}

/// The only image in a folder: its state, and how much of it is not below and nowhere else.
fn only(cached: &Cached, images: &str) -> (String, Value, Value) {
    let all = cached.world.json(&["images", "--json", images]);
    assert_eq!(all.len(), 1, "{all:?}");
    let state = all[0]["state"].as_str().expect("a state").to_owned();
    (state, all[0]["undrained"].clone(), all[0]["alone"].clone())
}

#[test]
fn a_job_comes_back_from_its_image_at_the_partner_after_the_loss_of_the_node() {
    let partner = Partner::start("pimage");
    let Some((cached, _held)) = start("pimage", &partner) else { return };
    let mut run = Checkpointed::begin(&cached);
    let image = run.checkpoint();
    // The partner has all of it at that moment, and the file system below nothing.
    let (state, undrained, alone) = only(&cached, &run.images);
    assert_eq!((state.as_str(), alone), ("partner", 0.into()));
    let undrained = undrained.as_u64().expect("bytes");
    assert!(undrained > 4 << 20, "{undrained} bytes");
    let said = cached.status()["partner"].clone();
    let holds = said["holds"].as_u64().expect("bytes");
    assert!(holds >= undrained && said["drained"] == 0, "{said}");
    let manifest =
        "images".to_owned() + "/" + &image.file_name().expect("a name").to_string_lossy();
    let below = cached.below().join(manifest).join("manifest.json");
    assert_eq!(fs::metadata(&below).expect("its name is below").len(), 0);
    run.job.read_to(run.job.step + 5);
    let nonce = run.job.nonce.clone();
    run.job.kill();
    lose_node(&cached);
    assert_eq!(recover(&cached, &partner)["stuck"], Value::Array(Vec::new()));
    assert_eq!(only(&cached, &run.images), ("finished".to_owned(), Value::Null, Value::Null));
    cached.world.text(&["verify", &run.images]);
    // The folder of the images, and the newest in it.
    let words = ["restart", &run.images];
    let back = Job::restart(kedge_as(&cached.world, User::Same, &words), &nonce);
    assert!(back.step <= run.job.step, "it began anew or goes on elsewhere");
    assert_eq!(back.finish(STEPS).code(), Some(7), "it exits as the program does");
}

#[test]
fn an_image_is_lost_with_the_node_once_the_partner_is_gone() {
    let partner = Partner::start("pimgone");
    let Some((cached, held)) = start("pimgone", &partner) else { return };
    let run = Checkpointed::begin(&cached);
    run.checkpoint();
    assert_eq!(only(&cached, &run.images).0, "partner");
    drop(partner);
    wait_for("it is not seen", || only(&cached, &run.images).0 == "cached");
    let (_, undrained, alone) = only(&cached, &run.images);
    assert_eq!(undrained, alone);
    // What is below is no partner's business.
    fs::remove_file(&held).expect("it is there");
    cached.drain();
    assert_eq!(only(&cached, &run.images).0, "finished");
    drop(run);
    // The partner cannot be told: its end is not this test's.
    let mut end = cached.world.kedge(&["cache", "stop", "--leave", "--under"]);
    end.arg(&cached.under).output().expect("kedge");
    let mut recover = cached.world.kedge(&["cache", "recover", "--discard=all", "--under"]);
    assert!(recover.arg(&cached.under).output().expect("kedge").status.success());
}
