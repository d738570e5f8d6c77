//! What goes wrong is named, harms no running job and leaves nothing behind.

mod support;

use kedge_image::ImageError;
use kedge_process::{EngineError, Options, RestartOptions, Roots, checkpoint, restart};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use support::{Folder, Running, alone, bring_back, build, reap, step};

fn options(folder: &Folder) -> Options {
    let image = folder.path("image");
    let _ = std::fs::remove_dir_all(&image);
    std::fs::create_dir(&image).unwrap();
    Options::new(image)
}

fn end(mut running: Running) {
    running.child.kill().unwrap();
    running.child.wait().unwrap();
    reap();
}

#[test]
fn a_debugger_is_named_and_the_job_goes_on() {
    let _alone = alone();
    let folder = Folder::new("traced");
    let program = build(&folder, "traced.c", &[]);
    let mut running = Running::start(&mut Command::new(&program));
    running.lines(2);
    let tracer = running.child.id() as i32;
    for _ in 0..3 {
        let error = checkpoint(&Roots::These(vec![tracer]), options(&folder)).unwrap_err();
        let named = matches!(error, EngineError::Traced { tracer: by, .. } if by == tracer);
        assert!(named, "{error}");
        // What was in flight and more.
        running.lines(20);
    }
    end(running);
}

#[test]
fn a_checkpoint_that_cannot_be_written_harms_nobody() {
    let _alone = alone();
    let folder = Folder::new("unwritten");
    let program = build(&folder, "threads.c", &["-pthread"]);
    let mut running = Running::start(Command::new(&program).arg("200"));
    let first = running.lines(2);
    let roots = Roots::These(vec![running.child.id() as i32]);
    for round in 0..5 {
        let options = options(&folder);
        // Something lies in the way of the process's file, or of the descriptors'.
        let name = if round % 2 == 0 { "descriptors.data" } else { "job.kimg" };
        std::fs::create_dir(options.folder.join(name)).unwrap();
        let error = checkpoint(&roots, options).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    let rest = running.lines(198);
    assert_eq!(step(rest.last().unwrap()), 200);
    assert!(rest.iter().all(|line| line[..16] == first[0][..16]));
    assert_eq!(running.child.wait().unwrap().code(), Some(7));
}

/// Offsets to damage: everywhere in what is small, here and there in what is large.
fn offsets(length: u64) -> impl Iterator<Item = u64> {
    (0..length).step_by((length / 24).max(1) as usize).chain([length - 1])
}

fn flip(path: &Path, at: u64) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x20], at).unwrap();
}

#[test]
fn a_damaged_image_is_refused_and_leaves_nothing() {
    let _alone = alone();
    let folder = Folder::new("damaged");
    let program = build(&folder, "step.c", &["-static"]);
    let mut running = Running::start(Command::new(&program).arg("20"));
    running.lines(5);
    let image = folder.path("image");
    running.capture_and_kill(&image);
    for entry in std::fs::read_dir(&image).unwrap() {
        let path = entry.unwrap().path();
        let length = path.metadata().unwrap().len();
        if length == 0 {
            continue;
        }
        let mut refused = 0;
        for at in offsets(length) {
            flip(&path, at);
            match restart(&RestartOptions::new(image.clone()), |job| job.reap_all()) {
                Err(error) => {
                    refused += 1;
                    let name = path.file_name().unwrap().to_str().unwrap();
                    let image = matches!(error, EngineError::Image(ImageError::Damaged { .. }));
                    assert!(image || error.to_string().contains(name), "{name} {at}: {error}");
                }
                // Between payloads lies what nobody reads.
                Ok(restarted) => drop(restarted.wait().unwrap()),
            }
            flip(&path, at);
        }
        assert!(refused > 5, "{}: only {refused} were found", path.display());
    }
    // Every restart that failed has ended all that it had begun.
    reap();
    let (after, status) = bring_back(&image);
    assert_eq!(step(after.last().unwrap()), 20);
    assert_eq!(libc::WEXITSTATUS(status), 7);
}

#[test]
fn a_job_ends_with_its_keeper() {
    let _alone = alone();
    let folder = Folder::new("keeper");
    let program = build(&folder, "tree.c", &["-pthread"]);
    let mut running = Running::start(Command::new(&program).arg("100000"));
    running.lines(5);
    let image = folder.path("image");
    running.capture_and_kill(&image);
    let (output, theirs) = std::io::pipe().unwrap();
    let streams = [None, Some(theirs.into()), None];
    let options = RestartOptions { streams, ..RestartOptions::new(image) };
    let restarted = restart(&options, |job| job.reap_all()).unwrap();
    drop(options);
    let mut lines = BufReader::new(output).lines();
    lines.next().unwrap().unwrap();
    // SAFETY: a plain call; the keeper is a child that has not been waited for.
    unsafe { libc::kill(restarted.keeper(), libc::SIGKILL) };
    // Its output ends when the last of its processes does.
    assert!(lines.take(50_000).count() < 50_000);
    assert!(restarted.wait().is_err());
}

#[test]
fn a_file_that_changed_is_named() {
    let _alone = alone();
    let folder = Folder::new("changed");
    let program = build(&folder, "step.c", &[]);
    let mut running = Running::start(Command::new(&program).arg("20"));
    running.lines(5);
    let image = folder.path("image");
    running.capture_and_kill(&image);
    std::fs::File::options().append(true).open(&program).unwrap().write_all_at(b"x", 0).unwrap();
    let error = restart(&RestartOptions::new(image), |job| job.reap_all()).unwrap_err();
    assert!(error.to_string().contains(program.to_str().unwrap()), "{error}");
    reap();
}
