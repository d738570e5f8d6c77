//! The ids of a job are its own at a restart, whatever kedge makes beside it there.

mod support;

use kedge_image::Manifest;
use kedge_process::plugins::{Capture, Claim, Found, Job, Plugin, PluginError, World};
use kedge_process::{Options, Rebuilt, RestartOptions, Roots, checkpoint, restart};
use serde_json::Value;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::survive::as_an_ordinary_user;
use support::{Folder, Running, alone, bring_back_by, build, reap, step};

const STEPS: usize = 600;
const LAST: &str = "/proc/sys/kernel/ns_last_pid";

/// Has the init start threads, as what opens devices does.
#[derive(Debug)]
struct Busy {
    threads: usize,
    lasting: Duration,
    /// Whether they get the smallest ids all the same.
    first_ids: bool,
}

impl Plugin for Busy {
    fn name(&self) -> &'static str {
        "busy"
    }

    fn claim(&self, _: &Found, _: &Job) -> Claim {
        Claim::No
    }

    fn checkpoint(&self, _: &mut Capture, _: &[usize]) -> Result<Option<Value>, PluginError> {
        Ok(Some(Value::Null))
    }

    fn restart(&self, _: Value, _: &mut World) -> Result<(), PluginError> {
        if self.first_ids {
            std::fs::write(LAST, "1").unwrap();
        }
        for _ in 0..self.threads {
            let lasting = self.lasting;
            let busy = std::thread::Builder::new().name("busy".into());
            busy.spawn(move || std::thread::sleep(lasting)).unwrap();
        }
        Ok(())
    }
}

const BUSY: Busy = Busy { threads: 64, lasting: Duration::from_secs(5), first_ids: false };

/// An image of the program with threads that have the smallest ids that there are, as the first
/// ones in a container have.
fn image(folder: &Folder) -> PathBuf {
    let program = build(folder, "ids.c", &["-pthread"]);
    let mut running = Running::start(Command::new(program).arg(STEPS.to_string()));
    running.lines(5);
    let (first, image) = (folder.path("first"), folder.path("image"));
    running.capture_and_kill(&first);
    std::fs::create_dir(&image).unwrap();
    let capture = |job: &mut Rebuilt| {
        std::fs::write(LAST, "1").map_err(|error| error.to_string())?;
        // SAFETY: kill takes no pointers; the process is the init's own child.
        unsafe { libc::kill(job.root(), libc::SIGUSR1) };
        let (begin, threads) = (Instant::now(), format!("/proc/{}/task", job.root()));
        while std::fs::read_dir(&threads).map_or(0, Iterator::count) < 17 {
            if begin.elapsed() > Duration::from_secs(20) {
                return Err("it makes no threads".into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let roots = Roots::ChildrenOf { parent: 1, except: Vec::new() };
        let options = Options { plugins: vec![Arc::new(BUSY)], ..Options::new(image.clone()) };
        let captured = checkpoint(&roots, options);
        let finished = captured.and_then(|it| it.finish(Manifest::new("test".into(), vec![], 1)));
        finished.map_err(|error| error.to_string())
    };
    // The job is killed when this returns.
    let serve = |job: &mut Rebuilt| {
        if let Err(error) = capture(job) {
            let _ = std::fs::write(image.join("error"), error);
        }
    };
    let null =
        || Some(OwnedFd::from(std::fs::File::options().write(true).open("/dev/null").unwrap()));
    let options = RestartOptions { streams: [None, null(), None], ..RestartOptions::new(first) };
    let ended = restart(&options, serve).unwrap().wait().unwrap_err().to_string();
    assert!(ended.contains("the job was killed"), "{ended}");
    reap();
    let error = std::fs::read_to_string(image.join("error"));
    assert!(error.is_err(), "{error:?}");
    image
}

fn with(image: &Path, busy: Busy) -> RestartOptions {
    RestartOptions { plugins: vec![Arc::new(busy)], ..RestartOptions::new(image.into()) }
}

fn goes_on(image: &Path, busy: Busy) {
    let (said, status) = bring_back_by(with(image, busy), |_| {});
    assert_eq!(said.last().map(|line| step(line)), Some(STEPS));
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}");
}

#[test]
fn nobody_else_gets_an_id_of_the_job() {
    let _alone = alone();
    let folder = Folder::new("ids");
    goes_on(&image(&folder), BUSY);
}

#[test]
fn ids_that_are_about_to_be_free_are_waited_for() {
    let brief = Busy { lasting: Duration::from_millis(200), first_ids: true, ..BUSY };
    let lasting = Busy { first_ids: true, ..BUSY };
    let _alone = alone();
    let folder = Folder::new("ids-brief");
    let image = image(&folder);
    let error = restart(&with(&image, lasting), |job| job.reap_all()).unwrap_err().to_string();
    assert!(error.contains("cannot have its old id, which busy of process 1 has"), "{error}");
    reap();
    goes_on(&image, brief);
}

#[test]
fn ordinary_users_have_their_ids() {
    as_an_ordinary_user();
}
