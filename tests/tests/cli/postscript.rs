//! What `kedge run` and `kedge restart` say on standard error when a program has ended, and when
//! they say nothing.
use kedge_tests::gpu_steps::GpuSteps;
use kedge_tests::host;
use kedge_tests::world::{World, stderr};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Output, Stdio};

/// A program that ends by a fault once it may.
struct Faulty {
    world: World,
    words: [String; 2],
}

impl Faulty {
    fn new(name: &str) -> Faulty {
        let world = World::new(name);
        let program = host("faults.cu", "faults", &["-arch=sm_90"]).display().to_string();
        let go = world.0.join("go").display().to_string();
        Faulty { world, words: [program, go] }
    }

    fn may_go(&self) {
        fs::write(&self.words[1], "").expect("a file");
    }

    fn words<'a>(&'a self, options: &[&'a str]) -> Vec<&'a str> {
        let run = ["run", "--gpu", "soft", "--job", "f"];
        [&run, options, &["--", &self.words[0], &self.words[1]]].concat()
    }

    fn run(&self, options: &[&str]) -> Output {
        self.may_go();
        self.world.output(&self.words(options))
    }
}

#[test]
fn a_fault_is_told_after_the_program_s_own_words() {
    let faulty = Faulty::new("psfault");
    let output = faulty.run(&[]);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(4), "{said}");
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!((lines.len(), lines[0]), (2, "my own words"), "{said}");
    assert!(lines[1].starts_with("kedge: f: context 1: CUDA_ERROR_ILLEGAL_ADDRESS"), "{said}");
    assert!(lines[1].contains("outside") && lines[1].ends_with("(kedge logs f)"), "{said}");
}

#[test]
fn quiet_says_nothing() {
    let faulty = Faulty::new("psquiet");
    let output = faulty.run(&["--quiet"]);
    assert_eq!((output.status.code(), &*stderr(&output)), (Some(4), "my own words\n"));
    assert!(faulty.world.text(&["logs", "f"]).contains("fault: context 1"));
}

/// The first line of a job's output has been read.
fn ready(mut child: Child) -> Child {
    let mut line = String::new();
    let out = child.stdout.as_mut().expect("a pipe");
    BufReader::new(out).read_line(&mut line).expect("text");
    assert_eq!(line, "ready\n");
    child
}

#[test]
fn a_restarted_job_tells_too() {
    let faulty = Faulty::new("psback");
    let images = faulty.world.0.join("images").display().to_string();
    let mut command = faulty.world.kedge(&faulty.words(&["--ckpt-dir", &images]));
    let [out, err] = ["out", "err"].map(|name| faulty.world.0.join(name));
    let child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("kedge");
    let mut child = ready(child);
    let image = faulty.world.text(&["checkpoint", "f", "--stop"]);
    child.wait().expect("ended");
    faulty.may_go();
    for (quiet, lines) in [(&["--quiet"][..], 1), (&[], 2)] {
        let words = [&["restart", image.trim()], quiet].concat();
        let file = |path: &PathBuf| fs::File::create(path).expect("a file");
        let mut command = faulty.world.kedge(&words);
        let status = command.stdout(file(&out)).stderr(file(&err)).status().expect("kedge");
        let said = fs::read_to_string(&err).expect("text");
        assert_eq!((status.code(), said.lines().count()), (Some(4), lines), "{said}");
        assert_eq!(said.matches("kedge: f: context 1").count(), lines - 1, "{said}");
    }
}

#[test]
fn a_lost_proxy_is_told() {
    let place = GpuSteps::mine("pslost");
    let mut job = place.start(&[]);
    job.read_to(3);
    job.kill_the_proxy();
    let status = job.drain();
    assert!(!status.success(), "{status}");
    let mut said = String::new();
    job.child.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
    let told =
        |line: &str| line.starts_with("kedge: j: proxy ") && line.contains(" was lost (signal 9)");
    assert!(said.lines().any(told), "{said}; {}", place.log());
}

#[test]
fn missed_checkpoints_are_told_and_taken_ones_not() {
    let world = World::new("psmissed");
    let run = |folder: &str| {
        let words = ["run", "--gpu", "none", "--job", "i", "--interval", "1s", "--ckpt-dir"];
        let output = world.output(&[&words[..], &[folder, "--", "sleep", "2.6"]].concat());
        assert!(output.status.success(), "{output:?}");
        stderr(&output)
    };
    let said = run("/dev/null/nowhere");
    assert!(said.starts_with("kedge: i: no checkpoint for the last "), "{said}");
    assert!(said.contains("(2 failed): ") && said.contains("/dev/null/nowhere"), "{said}");
    assert!(said.ends_with("(kedge logs i)\n") && said.lines().count() == 1, "{said}");
    assert_eq!(run(&world.0.join("images").display().to_string()), "");
}
