//! Restarts that begin with an image and take in those that build on it: what comes back is the job
//! of the last one, and clocks, descriptors and memory are as that says.

mod support;

use kedge_image::Manifest;
use kedge_process::plugins::PluginError;
use kedge_process::{Arrivals, Next, Options, RestartOptions, Tracker, restart};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use support::kernel::tells_writes;
use support::survive::{as_an_ordinary_user, counts_on};
use support::{
    Folder, Running, alone, bring_back, bring_back_by, build, capture_again_by, capture_by, kill,
};

/// Images that are there from the beginning.
#[derive(Debug, Default)]
struct There(Mutex<VecDeque<Next>>);

impl Arrivals for There {
    fn next(&self) -> Result<Next, PluginError> {
        let next = self.0.lock().unwrap().pop_front();
        next.ok_or_else(|| PluginError::Refused("no image comes any more".to_owned()))
    }
}

/// A restart from the last of `images`, which begins with the first.
fn standby(images: &[PathBuf]) -> RestartOptions {
    let [first, others @ .., last] = images else { panic!("{images:?}") };
    let others = others.iter().cloned().map(Next::Another);
    let all = others.chain([Next::Last(last.clone())]).collect();
    let arrivals = There(Mutex::new(all));
    RestartOptions { arrivals: Some(Arc::new(arrivals)), ..RestartOptions::new(first.clone()) }
}

fn capture(image: &Path, tracker: &Tracker) -> Manifest {
    let tracker = Some(tracker.clone());
    capture_by(Options { tracker, ..Options::new(image.to_owned()) })
}

/// Captures a job several times, that many steps apart, and kills it: what it said before, and its
/// images.
fn captured(folder: &Folder, command: &mut Command, apart: usize) -> (Vec<String>, Vec<PathBuf>) {
    let mut running = Running::start(command);
    let tracker = Tracker::default();
    let mut before = running.lines(1);
    let (mut images, mut last) = (Vec::new(), Vec::new());
    for number in 0..5 {
        before.extend(running.lines(apart + number * 2 % 5));
        images.push(folder.path(&format!("image-{number}")));
        last = capture(&images[number], &tracker).processes;
    }
    kill(running, &last);
    (before, images)
}

/// Captured several times, killed, and brought back by a standby that has taken in all images.
fn survives(folder: &Folder, command: &[&str], steps: usize) {
    let mut program = Command::new(command[0]);
    program.args(&command[1..]).arg(steps.to_string()).env("CHILDLESS", "1");
    let (before, images) = captured(folder, &mut program, 1);
    let (after, status) = bring_back_by(standby(&images), |restarted| {
        assert_eq!(restarted.image, images[4]);
    });
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}, {after:?}");
    counts_on(&before, &after, steps);
}

#[test]
fn memory_that_changes_in_every_way_comes_back() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("standby-changes");
    for program in ["changes.c", "guards.c"] {
        let program = build(&folder, program, &[]);
        survives(&folder, &[program.to_str().unwrap()], 300);
        (0..5).for_each(|number| {
            std::fs::remove_dir_all(folder.path(&format!("image-{number}"))).unwrap();
        });
    }
}

#[test]
fn trees_of_processes_come_back() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("standby-tree");
    let program = build(&folder, "changes.c", &[]);
    // They end with the shell, which becomes the program.
    let script =
        "for i in 1 2 3; do tail -f --pid=$$ /dev/null > /dev/null & done; exec \"$0\" \"$@\"";
    survives(&folder, &["/bin/bash", "-c", script, program.to_str().unwrap()], 300);
}

#[test]
fn descriptors_and_threads_come_with_the_last_image() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("standby-features");
    let program = build(&folder, "features.c", &["-pthread"]);
    survives(&folder, &[program.to_str().unwrap(), "under_way"], 300);
}

/// Which a standby could not give them again.
#[test]
fn memory_that_is_shared_by_a_fork_is_told() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("standby-forked");
    let program = build(&folder, "forked.c", &[]);
    let (_, images) = captured(&folder, Command::new(&program).args(["family", "300"]), 1);
    let error = restart(&standby(&images), |_| {}).unwrap_err().to_string();
    assert!(error.contains("share memory since a fork"), "{error}");
}

/// Clocks stand where they stood in the last image, and so they do in one that is made later.
#[test]
fn clocks_are_the_last_image_s() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("standby-clock");
    let program = build(&folder, "clock.c", &[]);
    // Seconds lie between the first image and the last one.
    let (_, images) = captured(&folder, Command::new(&program).arg("3000"), 200);
    let again = folder.path("again");
    let after = capture_again_by(standby(&images), &again);
    assert!(!after.is_empty() && !after.iter().any(|line| line.starts_with("wrong")), "{after:?}");
    let (after, status) = bring_back(&again);
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}, {:?}", after.last());
}

/// One that has begun and hears of no image any more leaves nothing.
#[test]
fn who_hears_of_no_other_image_is_gone() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("standby-gone");
    let program = build(&folder, "step.c", &[]);
    let (_, images) = captured(&folder, Command::new(&program).arg("3000"), 1);
    let arrivals = Some(Arc::new(There::default()) as Arc<dyn Arrivals>);
    let options = RestartOptions { arrivals, ..RestartOptions::new(images[0].clone()) };
    let error = restart(&options, |_| {}).unwrap_err().to_string();
    assert!(error.contains("no image comes any more"), "{error}");
}

/// A job that has other processes by then is not made so.
#[test]
fn other_processes_are_told() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("standby-others");
    let script = "echo begun; while read line; do :; done < /dev/null; sleep 0.3 & echo one; wait; \
                  sleep 30 & echo two; wait";
    let mut running = Running::start(Command::new("/bin/bash").args(["-c", script]));
    let tracker = Tracker::default();
    let images = [folder.path("image-0"), folder.path("image-1")];
    running.lines(2);
    capture(&images[0], &tracker);
    running.lines(1);
    let processes = capture(&images[1], &tracker).processes;
    kill(running, &processes);
    let error = restart(&standby(&images), |_| {}).unwrap_err().to_string();
    assert!(error.contains("its processes are others by now"), "{error}");
}

#[test]
fn ordinary_users_can_do_all_that() {
    as_an_ordinary_user();
}
