//! Jobs that go on before their memory is there.

mod support;

use kedge_image::Manifest;
use kedge_left_out::needs_root;
use kedge_process::{EngineError, Options, RestartOptions, Roots, Tracker, checkpoint, restart};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use support::{Folder, Running, alone, bring_back_by, build, step};

const LAZY: &str = "a lazy restart";
const TAKES: &str = "it takes root";

fn is_root() -> bool {
    // SAFETY: geteuid takes no arguments and only returns a number.
    unsafe { libc::geteuid() == 0 }
}

fn lazily(image: &Path) -> RestartOptions {
    RestartOptions { lazy: true, ..RestartOptions::new(image.into()) }
}

fn rounds() -> usize {
    std::env::var("KEDGE_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(3)
}

/// An image of a program that looks at all of its memory with every step.
fn image(folder: &Folder, name: &str, source: &str, steps: usize) -> (std::path::PathBuf, usize) {
    let program = build(folder, source, &["-pthread"]);
    let mut running = Running::start(Command::new(program).arg(steps.to_string()));
    let before = running.lines(7).len();
    let image = folder.path(name);
    running.capture_and_kill(&image);
    (image, before)
}

#[test]
fn memory_comes_when_it_is_used() {
    let _alone = alone();
    if !is_root() {
        return needs_root(LAZY, TAKES);
    }
    let folder = Folder::new("lazy");
    for (source, steps) in [("changes.c", 200), ("threads.c", 200), ("tree.c", 400)] {
        for round in 0..rounds() {
            let name = format!("image-{source}-{round}");
            let (image, before) = image(&folder, &name, source, steps);
            // An image that is removed meanwhile is still open.
            let (after, status) = bring_back_by(lazily(&image), |_| {
                std::fs::remove_dir_all(&image).unwrap();
            });
            assert_eq!(libc::WEXITSTATUS(status), 7, "{source}: {status:#x}, {after:?}");
            let numbers: Vec<usize> = after.iter().map(|line| step(line)).collect();
            assert!(numbers[0] > before);
            assert_eq!(numbers, (numbers[0]..=steps).collect::<Vec<_>>());
        }
    }
}

/// What is captured of a job whose memory is still to come is all of it.
#[test]
fn a_job_is_captured_while_its_memory_comes() {
    let _alone = alone();
    if !is_root() {
        return needs_root(LAZY, TAKES);
    }
    let folder = Folder::new("lazy-again");
    let (first, _) = image(&folder, "image-0", "changes.c", 200);
    let second = folder.path("image-1");
    std::fs::create_dir(&second).unwrap();
    let target = second.clone();
    let serve = move |_: &mut kedge_process::Rebuilt| {
        let roots = Roots::ChildrenOf { parent: 1, except: Vec::new() };
        let options = Options { tracker: Some(Tracker::default()), ..Options::new(target.clone()) };
        let taken = checkpoint(&roots, options)
            .and_then(|captured| captured.finish(Manifest::new("test".into(), vec![], 1)));
        if let Err(error) = taken {
            let _ = std::fs::write(target.join("error"), error.to_string());
        }
    };
    let (output, theirs) = std::io::pipe().unwrap();
    let options = RestartOptions { streams: [None, Some(theirs.into()), None], ..lazily(&first) };
    let restarted = restart(&options, serve).unwrap();
    drop(options);
    drop(std::io::read_to_string(output));
    let _ = restarted.wait();
    drop(restarted);
    support::reap();
    let error = std::fs::read_to_string(second.join("error"));
    assert!(error.is_err(), "{error:?}");
    let (after, status) = bring_back_by(lazily(&second), |_| {});
    assert_eq!(libc::WEXITSTATUS(status), 7, "{status:#x}, {after:?}");
}

/// Damage that is only found when the memory is needed ends the job, and is told.
#[test]
fn a_damaged_image_ends_the_job_and_says_so() {
    let _alone = alone();
    if !is_root() {
        return needs_root(LAZY, TAKES);
    }
    let folder = Folder::new("lazy-damaged");
    // One that drops memory may drop what is damaged, and then nobody needs it.
    let (image, _) = image(&folder, "image", "keeps.c", 2000);
    let manifest = Manifest::read(&image).unwrap();
    let path = image.join(format!("{}.kimg", manifest.processes[0]));
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let middle = file.metadata().unwrap().len() / 2;
    let mut bytes = [0; 64];
    file.read_exact_at(&mut bytes, middle).unwrap();
    file.write_all_at(&bytes.map(|byte| byte ^ 0x55), middle).unwrap();
    let said = folder.path("said");
    let target = said.clone();
    let (output, theirs) = std::io::pipe().unwrap();
    let options = RestartOptions { streams: [None, Some(theirs.into()), None], ..lazily(&image) };
    let serve = move |job: &mut kedge_process::Rebuilt| {
        job.reap_all();
        std::fs::write(target, job.failure().unwrap_or_default()).unwrap();
    };
    // It may be found before the job runs at all.
    let error = match restart(&options, serve) {
        Err(error) => error.to_string(),
        Ok(restarted) => {
            drop(options);
            drop(std::io::read_to_string(output));
            let _ = restarted.wait();
            drop(restarted);
            support::reap();
            std::fs::read_to_string(said).unwrap()
        }
    };
    assert!(error.contains("offset") && error.contains("checksum"), "{error}");
}

#[test]
fn an_ordinary_user_is_told_what_it_takes() {
    let _alone = alone();
    if is_root() {
        let mut tests = Command::new("setpriv");
        tests.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps=-all"]);
        tests.arg(std::env::current_exe().unwrap()).env("TMPDIR", "/tmp");
        assert!(tests.arg("what_it_takes").status().unwrap().success());
        return;
    }
    let folder = Folder::new("lazy-user");
    let (image, _) = image(&folder, "image", "step.c", 100);
    let error = restart(&lazily(&image), |_| {}).unwrap_err();
    // Also where an administrator lends userfaultfd: forks are told to nobody else.
    let named = matches!(&error, EngineError::Init(said) if said.contains("CAP_SYS_PTRACE"));
    assert!(named, "{error}");
}
