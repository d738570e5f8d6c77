//! A whole job moves to another host, its processes too, and nobody notices but by a pause: its
//! terminal, its exit status and its signals stay where it was started. Whatever is killed at
//! whatever moment leaves it on one of the two hosts. Hosts are state folders of their own here,
//! and in the last test a network with keys.

use kedge_tests::host;
use kedge_tests::job::{Job, User, build, children, kedge_as, kill_all_in, name, send};
use kedge_tests::network::{ADDRESS, Network, until};
use kedge_tests::server::Served;
use kedge_tests::world::{World, stderr};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

pub(crate) const STEPS: u64 = 150;
/// What the program ends with when all of its steps were right.
pub(crate) const WELL: i32 = 7;

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Two hosts, of which the second one takes jobs.
pub(crate) struct Hosts {
    pub(crate) world: World,
    pub(crate) server: Served,
}

impl Hosts {
    pub(crate) fn new(name: &str) -> Hosts {
        Hosts::with(name, &["--take-jobs"], &[])
    }

    pub(crate) fn with(name: &str, options: &[&str], environment: &[(&str, &Path)]) -> Hosts {
        let world = World::new(name);
        build(&world, "steps", &[]);
        for host in ["a", "b"] {
            fs::create_dir(world.home().join(host)).expect("a folder");
        }
        let serve = ["serve", "--gpu", "soft", "--listen", "127.0.0.1:0"];
        let mut command = Command::new(world.parts());
        command.args(serve).args(options).current_dir("/").env("KEDGE_CONFIG", "");
        command.env("XDG_STATE_HOME", world.home().join("b")).envs(environment.iter().copied());
        Hosts { server: Served::started(command), world }
    }

    pub(crate) fn kedge(&self, host: &str, arguments: &[&str]) -> Command {
        let mut command = kedge_as(&self.world, User::Same, arguments);
        command.env("XDG_STATE_HOME", self.home().join(host));
        command
    }

    pub(crate) fn home(&self) -> PathBuf {
        self.world.home()
    }

    /// A job on the first host: a shell, a program that counts, and what copies that to a file.
    pub(crate) fn start(&self) -> Job {
        self.start_with(&[])
    }

    pub(crate) fn start_with(&self, environment: &[(&str, &str)]) -> Job {
        self.start_of(STEPS, environment)
    }

    /// One of so many steps.
    fn start_of(&self, steps: u64, environment: &[(&str, &str)]) -> Job {
        let line = format!("set -o pipefail; ./steps {steps} 20 2 8 | tee copy");
        let run = ["run", "--gpu", "none", "--job", "j", "--", "bash", "-c", &line];
        let mut command = self.kedge("a", &run);
        command.envs(environment.iter().copied());
        Job::start(command)
    }

    pub(crate) fn migrate(&self, options: &[&str]) -> Command {
        let migrate = ["migrate", "j", "--host", &self.server.address];
        self.kedge("a", &[&migrate[..], options].concat())
    }

    pub(crate) fn moved(&self, options: &[&str]) -> Output {
        self.migrate(options).output().expect("kedge")
    }

    /// A move that is held at `phase` until the file is gone.
    pub(crate) fn held(&self, phase: &str) -> (Child, PathBuf) {
        let file = self.home().join("held");
        let mut command = self.migrate(&[]);
        command.env("KEDGE_HOLD_MOVE", format!("{phase}:{}", file.display()));
        let child = command.spawn().expect("kedge");
        until(phase, || file.exists());
        (child, file)
    }

    /// The state of the job on a host; nothing where it has never been.
    pub(crate) fn state(&self, host: &str) -> String {
        let rows = self.kedge(host, &["ps", "-a", "--json"]).output().expect("kedge").stdout;
        let rows: Value = serde_json::from_slice(&rows).expect("rows");
        rows[0]["state"].as_str().unwrap_or_default().to_owned()
    }

    /// It runs on one host, and the other one knows, where its supervisor has seen its end.
    pub(crate) fn has_moved(&self, from: &str, to: &str) {
        assert_eq!(self.state(to), "running");
        until("the word that it has moved", || self.state(from) == "moved");
    }

    /// All steps were done once, as the file has it that the job writes.
    pub(crate) fn copy_is_right(&self) {
        self.copy_has(STEPS);
    }

    /// The same of so many steps.
    fn copy_has(&self, steps: u64) {
        let copy = fs::read_to_string(self.home().join("copy")).expect("the copy");
        let lines: Vec<&str> = copy.lines().collect();
        let nonce = lines[0].strip_prefix("nonce ").expect("a nonce");
        let steps = (1..=steps).map(|step| format!("{nonce} {step}"));
        let all = steps.chain([format!("{nonce} well")]).collect::<Vec<_>>();
        assert_eq!(lines[1..], all);
    }

    pub(crate) fn images(&self, host: &str) -> usize {
        let images = fs::read_dir(self.home().join(host).join("kedge/images"));
        images.map_or(0, |images| images.flatten().count())
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        kill_all_in(&self.world.home());
    }
}

#[test]
fn a_job_goes_there_and_its_streams_stay() {
    let hosts = Hosts::new("jmgoes");
    let mut job = hosts.start();
    job.read_to(10);
    let output = hosts.moved(&["--json"]);
    assert!(output.status.success(), "{output:?} {}", hosts.server.said());
    // Its processes were there before its last image.
    assert!(!hosts.server.said().contains("made"), "{}", hosts.server.said());
    let said = stdout(&output);
    let events: Vec<Value> =
        said.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let names: Vec<&str> = events.iter().filter_map(|event| event["event"].as_str()).collect();
    assert!(names.starts_with(&["round"]) && names.ends_with(&["pause", "done"]), "{said}");
    assert!(events[names.len() - 2]["seconds"].as_f64().is_some_and(|pause| pause > 0.0));
    job.read_to(job.step + 10);
    hosts.has_moved("a", "b");
    assert_eq!(hosts.images("a"), 0, "its images are where it is: {}", stderr(&output));
    assert_eq!(job.finish(STEPS).code(), Some(WELL));
    hosts.copy_is_right();
    until("its end there", || hosts.state("b") == "exited");
}

/// Memory that processes share since a fork comes with the last image alone.
#[test]
fn a_job_that_is_not_made_before_goes_all_the_same() {
    let hosts = Hosts::new("jmforked");
    let line = format!("set -o pipefail; (./steps {STEPS} 20 2 8; exit $?) | tee copy");
    let run = ["run", "--gpu", "none", "--job", "j", "--", "bash", "-c", &line];
    let mut job = Job::start(hosts.kedge("a", &run));
    job.read_to(10);
    let output = hosts.moved(&[]);
    assert!(output.status.success(), "{output:?} {}", hosts.server.said());
    let said = hosts.server.said();
    assert!(said.contains("not made before it stands still") && said.contains("a fork"), "{said}");
    job.read_to(job.step + 10);
    hosts.has_moved("a", "b");
    assert_eq!(job.finish(STEPS).code(), Some(WELL));
    hosts.copy_is_right();
}

/// A restarted job's images are taken by its init: it moves as well, and the name that it has left
/// is free.
#[test]
fn a_job_comes_back_and_goes_again() {
    let hosts = Hosts::new("jmback");
    let mut serve = Command::new(hosts.world.parts());
    serve.args(["serve", "--gpu", "soft", "--take-jobs", "--listen", "127.0.0.1:0"]);
    serve.env("XDG_STATE_HOME", hosts.home().join("a")).env("KEDGE_CONFIG", "").current_dir("/");
    let back = Served::started(serve);
    let mut job = hosts.start();
    job.read_to(5);
    assert!(hosts.moved(&[]).status.success());
    job.read_to(job.step + 5);
    let migrate = ["migrate", "j", "--host", &back.address];
    let output = hosts.kedge("b", &migrate).output().expect("kedge");
    assert!(output.status.success(), "{output:?} {}", back.said());
    job.read_to(job.step + 5);
    hosts.has_moved("b", "a");
    assert_eq!(job.finish(STEPS).code(), Some(WELL));
    hosts.copy_is_right();
}

/// Software devices come out of the image; those of a third host stay where they are.
#[test]
fn its_devices_go_along_or_stay() {
    let third = Served::start(&["--gpu", "soft"]);
    let program = host("gpu_steps.cu", "gpu_steps", &["-O1", "-arch=sm_80"]).display().to_string();
    for gpu in ["soft", &*third.address] {
        let hosts = Hosts::new("jmdevices");
        let steps = STEPS.to_string();
        let run = ["run", "--gpu", gpu, "--job", "j", "--", &program, &steps, "40"];
        let mut job = Job::start(hosts.kedge("a", &run));
        job.read_to(10);
        let output = hosts.moved(&[]);
        assert!(output.status.success(), "{gpu}: {output:?} {}", hosts.server.said());
        job.read_to(job.step + 10);
        assert_eq!(children(third.pid()).len(), usize::from(gpu != "soft"), "{gpu}");
        hosts.has_moved("a", "b");
        assert_eq!(job.finish(STEPS).code(), Some(WELL), "{gpu}");
    }
}

#[test]
fn signals_reach_it_there() {
    let hosts = Hosts::new("jmsignal");
    let line = "trap 'echo caught; exit 9' TERM; while :; do sleep 0.05; done";
    let run = ["run", "--gpu", "none", "--job", "j", "--", "bash", "-c", line];
    let mut command = hosts.kedge("a", &run);
    let job = command.spawn().expect("kedge");
    until("the job", || hosts.state("a") == "running");
    let output = hosts.moved(&[]);
    assert!(output.status.success(), "{output:?}");
    send("TERM", &children(job.id()));
    let output = job.wait_with_output().expect("its end");
    assert_eq!((output.status.code(), stdout(&output)), (Some(9), "caught\n".to_owned()));
}

/// Whoever moves it is killed: before all is decided it goes on where it was.
#[test]
fn a_mover_that_is_killed_before_the_decision_moves_nothing() {
    for phase in ["connected", "round", "checked", "standing", "received", "ready"] {
        let hosts = Hosts::new(&format!("jm{phase}"));
        let mut job = hosts.start();
        job.read_to(5);
        let (mut mover, _) = hosts.held(phase);
        send("KILL", &children(mover.id()));
        let _ = mover.wait();
        job.read_to(job.step + 10);
        assert_eq!(hosts.state("a"), "running", "{phase}");
        assert_eq!(job.finish(STEPS).code(), Some(WELL), "{phase}");
        hosts.copy_is_right();
    }
}

/// And after it, it runs there all the same: who has its streams says that it may.
#[test]
fn a_mover_that_is_killed_after_the_decision_has_moved_it() {
    let hosts = Hosts::new("jmdeparted");
    let mut job = hosts.start();
    job.read_to(5);
    let (mut mover, _) = hosts.held("departed");
    send("KILL", &children(mover.id()));
    let _ = mover.wait();
    job.read_to(job.step + 10);
    hosts.has_moved("a", "b");
    assert_eq!(job.finish(STEPS).code(), Some(WELL));
    hosts.copy_is_right();
}

/// Who has its streams has it run there; it may have ended before whoever moves it asks.
#[test]
fn a_mover_that_asks_late_hears_that_the_job_ran() {
    let hosts = Hosts::new("jmlate");
    let mut job = hosts.start();
    job.read_to(5);
    let (mover, file) = hosts.held("departed");
    assert_eq!(job.finish(STEPS).code(), Some(WELL));
    fs::remove_file(&file).expect("the hold");
    let output = mover.wait_with_output().expect("its end");
    assert!(output.status.success(), "{output:?} {}", hosts.server.said());
    assert_eq!(hosts.images("a"), 0, "its images are where it was");
    hosts.copy_is_right();
}

/// Nobody reads what the command says at the end: the job has moved all the same.
#[test]
fn a_mover_that_nobody_reads_has_moved_the_job() {
    let hosts = Hosts::new("jmunread");
    let mut job = hosts.start();
    job.read_to(5);
    let file = hosts.home().join("held");
    let mut command = hosts.migrate(&["--json"]);
    command.env("KEDGE_HOLD_MOVE", format!("departed:{}", file.display()));
    let mut mover = command.stdout(Stdio::piped()).spawn().expect("kedge");
    until("departed", || file.exists());
    drop(mover.stdout.take());
    fs::remove_file(&file).expect("the hold");
    let _ = mover.wait();
    job.read_to(job.step + 10);
    hosts.has_moved("a", "b");
    assert_eq!(job.finish(STEPS).code(), Some(WELL));
    hosts.copy_is_right();
}

/// Its processes have not been killed yet: they go on, and nothing does there.
#[test]
fn a_supervisor_that_is_killed_at_the_decision_leaves_it_here() {
    let hosts = Hosts::new("jmdecided");
    let file = hosts.home().join("held");
    let hold = format!("decided:{}", file.display());
    let mut job = hosts.start_with(&[("KEDGE_HOLD_MOVE", &hold)]);
    job.read_to(5);
    let mover = hosts.migrate(&[]).spawn().expect("kedge");
    until("the decision", || file.exists());
    send("KILL", &[job.supervisor()]);
    let output = mover.wait_with_output().expect("its end");
    assert!(!output.status.success(), "{output:?}");
    job.drain();
    until("all steps", || {
        fs::read_to_string(hosts.home().join("copy")).is_ok_and(|copy| copy.ends_with("well\n"))
    });
    hosts.copy_is_right();
    assert_ne!(hosts.state("b"), "running");
}

/// What takes a restarted job's images is its init: killed after the decision it takes the job with
/// it, which then runs there, and nowhere but there.
#[test]
fn an_init_that_is_killed_at_the_decision_has_moved_the_job() {
    let world = World::new("jminitheld");
    let file = world.0.join("held");
    let hold = PathBuf::from(format!("decided:{}", file.display()));
    let hosts = Hosts::with("jminit", &["--take-jobs"], &[("KEDGE_HOLD_MOVE", &hold)]);
    let mut serve = Command::new(hosts.world.parts());
    serve.args(["serve", "--gpu", "soft", "--take-jobs", "--listen", "127.0.0.1:0"]);
    serve.env("XDG_STATE_HOME", hosts.home().join("a")).env("KEDGE_CONFIG", "").current_dir("/");
    let back = Served::started(serve);
    let mut job = hosts.start();
    job.read_to(5);
    assert!(hosts.moved(&[]).status.success());
    job.read_to(job.step + 5);
    let migrate = ["migrate", "j", "--host", &back.address];
    let mover = hosts.kedge("b", &migrate).spawn().expect("kedge");
    until("the decision", || file.exists());
    let restarts: Vec<u32> = children(hosts.server.pid()).into_iter().flat_map(children).collect();
    let inits: Vec<u32> = restarts.iter().copied().flat_map(children).collect();
    assert!(!inits.is_empty(), "{restarts:?}");
    send("KILL", &inits);
    let output = mover.wait_with_output().expect("its end");
    assert!(output.status.success(), "{output:?} {}", back.said());
    job.read_to(job.step + 5);
    hosts.has_moved("b", "a");
    assert_eq!(job.finish(STEPS).code(), Some(WELL));
    hosts.copy_is_right();
}

/// The other host dies after the decision: what is left is the image here.
#[test]
fn an_image_is_kept_until_it_is_known_that_the_job_runs() {
    let hosts = Hosts::new("jmkept");
    let mut job = hosts.start();
    job.read_to(5);
    let (mover, file) = hosts.held("departed");
    let takers = children(hosts.server.pid());
    assert!(!takers.is_empty());
    send("KILL", &takers);
    fs::remove_file(&file).expect("the hold");
    let output = mover.wait_with_output().expect("its end");
    let said = stderr(&output);
    assert!(!output.status.success() && said.contains("is kept here"), "{output:?}");
    assert!(hosts.images("a") >= 2, "{said}");
    job.drain();
}

/// Who ends it while it stands still ends it, and it does not come back there.
#[test]
fn a_job_that_is_ended_while_it_stands_still_does_not_move() {
    let hosts = Hosts::new("jmkilled");
    let mut job = hosts.start();
    job.read_to(5);
    let (mover, file) = hosts.held("ready");
    let kill = hosts.kedge("a", &["kill", "j", "--grace", "0s"]).spawn().expect("kedge");
    // It is asked for within this time.
    std::thread::sleep(std::time::Duration::from_millis(500));
    fs::remove_file(&file).expect("the hold");
    let output = kill.wait_with_output().expect("its end");
    assert!(output.status.success(), "{output:?}");
    let moved = mover.wait_with_output().expect("its end");
    assert!(!moved.status.success(), "{moved:?}");
    job.drain();
    assert_ne!(job.wait().code(), Some(WELL));
    assert!(hosts.state("a") != "moved" && hosts.state("a") != "running");
    assert_eq!(hosts.state("b"), "");
}

/// A signal to a job that stands still is in no image: the job stays and takes it.
#[test]
fn a_signal_while_it_stands_still_is_not_lost() {
    let hosts = Hosts::new("jmstopped");
    let line = "trap 'echo caught; exit 9' TERM; while :; do sleep 0.05; done";
    let run = ["run", "--gpu", "none", "--job", "j", "--", "bash", "-c", line];
    let job = hosts.kedge("a", &run).spawn().expect("kedge");
    until("the job", || hosts.state("a") == "running");
    let (mover, file) = hosts.held("ready");
    send("TERM", &children(job.id()));
    // Signals are passed on within this time.
    std::thread::sleep(std::time::Duration::from_millis(300));
    fs::remove_file(&file).expect("the hold");
    let moved = mover.wait_with_output().expect("its end");
    assert!(stderr(&moved).contains("was sent signal 15"), "{moved:?}");
    let output = job.wait_with_output().expect("its end");
    assert_eq!((output.status.code(), stdout(&output)), (Some(9), "caught\n".to_owned()));
    assert_ne!(hosts.state("b"), "running");
}

/// Both hosts have one folder of images, as with a home on a shared file system.
#[test]
fn hosts_may_share_the_folder_of_images() {
    let hosts = Hosts::new("jmshared");
    for host in ["a", "b"] {
        fs::create_dir_all(hosts.home().join(host).join("kedge")).expect("a folder");
    }
    fs::create_dir(hosts.home().join("images")).expect("a folder");
    for host in ["a", "b"] {
        let link = hosts.home().join(host).join("kedge/images");
        std::os::unix::fs::symlink(hosts.home().join("images"), link).expect("a link");
    }
    let mut job = hosts.start();
    job.read_to(5);
    let output = hosts.moved(&[]);
    assert!(output.status.success(), "{output:?} {}", hosts.server.said());
    assert_eq!(hosts.images("a"), 1, "that by which it came");
    job.read_to(job.step + 5);
    assert_eq!(job.finish(STEPS).code(), Some(WELL));
    hosts.copy_is_right();
}

/// A checkpoint of the job's own between two rounds is none that a move's images build on.
#[test]
fn checkpoints_between_its_rounds_do_no_harm() {
    let hosts = Hosts::new("jmbetween");
    let line = format!("./steps {STEPS} 20 2 8 | tee copy; exit {WELL}");
    let run = ["run", "--gpu", "none", "--job", "j", "--incremental", "--", "bash", "-c", &line];
    let mut job = Job::start(hosts.kedge("a", &run));
    job.read_to(5);
    let checkpoint = |host: &str| {
        let output = hosts.kedge(host, &["checkpoint", "j"]).output().expect("kedge");
        assert!(output.status.success(), "{output:?}");
    };
    checkpoint("a");
    let (mover, file) = hosts.held("checked");
    checkpoint("a");
    fs::remove_file(&file).expect("the hold");
    let output = mover.wait_with_output().expect("its end");
    assert!(output.status.success(), "{output:?} {}", hosts.server.said());
    job.read_to(job.step + 5);
    // Those of the job's own are whole without what the move has taken away.
    let images = hosts.home().join("a/kedge/images");
    let own = fs::read_dir(&images).expect("images").flatten().map(|image| image.path());
    let own: Vec<String> = own.map(|image| image.display().to_string()).collect();
    assert_eq!(own.len(), 2, "{own:?}");
    for image in own {
        let output = hosts.kedge("a", &["verify", &image]).output().expect("kedge");
        assert!(output.status.success(), "{output:?}");
    }
    assert_eq!(job.finish(STEPS).code(), Some(WELL));
}

/// What takes it is killed when all has arrived: it goes on where it was, and the command says why.
#[test]
fn a_target_that_vanishes_leaves_it_where_it_is() {
    let world = World::new("jmheldthere");
    let file = world.0.join("held");
    let hold = PathBuf::from(format!("made:{}", file.display()));
    let hosts = Hosts::with("jmvanish", &["--take-jobs"], &[("KEDGE_HOLD_MOVE", &hold)]);
    let mut job = hosts.start();
    job.read_to(5);
    let mover = hosts.migrate(&[]).spawn().expect("kedge");
    until("all of it there", || file.exists());
    let takers = children(hosts.server.pid());
    assert!(!takers.is_empty() && takers.iter().all(|pid| name(*pid) == "kedge"));
    send("KILL", &takers);
    let output = mover.wait_with_output().expect("its end");
    assert!(stderr(&output).contains("is lost"), "{output:?}");
    job.read_to(job.step + 10);
    assert_eq!(job.finish(STEPS).code(), Some(WELL));
    hosts.copy_is_right();
    assert_ne!(hosts.state("b"), "running");
    assert_eq!(hosts.images("a"), 0);
}

/// What takes it is killed at any moment before the decision: it goes on where it was, nothing of
/// it runs there, and what is left there goes with the next job that comes.
#[test]
fn what_a_killed_taker_leaves_is_swept() {
    // More than fit into its pipe: however slow the machine, it waits for its reader.
    const LONG: u64 = 500;
    let hosts = Hosts::new("jmswept");
    let mut job = hosts.start_of(LONG, &[]);
    job.read_to(2);
    for phase in ["round", "checked", "standing", "received"] {
        let (mover, file) = hosts.held(phase);
        let takers = children(hosts.server.pid());
        assert!(!takers.is_empty(), "{phase}");
        send("KILL", &takers);
        fs::remove_file(&file).expect("the hold");
        let output = mover.wait_with_output().expect("its end");
        assert!(!output.status.success(), "{phase}: {output:?}");
        job.read_to(job.step + 2);
        assert_eq!((hosts.state("a"), hosts.state("b")), ("running".to_owned(), String::new()));
        assert_eq!((hosts.images("a"), hosts.images("b")), (0, 1), "{phase}: {}", stderr(&output));
        assert!(children(hosts.server.pid()).is_empty(), "{phase}");
    }
    let output = hosts.moved(&[]);
    assert!(output.status.success(), "{output:?} {}", hosts.server.said());
    assert_eq!(hosts.images("b"), 1, "that by which it came");
    assert_eq!(job.finish(LONG).code(), Some(WELL));
    hosts.copy_has(LONG);
}

#[test]
fn a_server_takes_jobs_only_if_it_is_told_so() {
    let hosts = Hosts::with("jmnone", &[], &[]);
    let mut job = hosts.start();
    job.read_to(5);
    let output = hosts.moved(&[]);
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(stderr(&output).contains("`kedge serve --take-jobs`"), "{output:?}");
    assert_eq!(job.finish(STEPS).code(), Some(WELL));
}

/// A file that is not there is told of while the job runs; one that lies elsewhere is found.
#[test]
fn files_are_looked_for_before_it_stands_still() {
    let hosts = Hosts::new("jmfiles");
    let at = |name: &str| hosts.home().join(name).display().to_string();
    for (folder, text) in [("here", "of here\n"), ("there", "elsewhere\n"), ("short", "x")] {
        fs::create_dir(at(folder)).expect("a folder");
        let text = if text.len() > 1 { format!("{text:-<12}") } else { text.to_owned() };
        fs::write(at(&format!("{folder}/data")), text).expect("a file");
    }
    let line = format!("exec 3<here/data; ./steps {STEPS} 20 1 1; cat <&3 >got; exit {WELL}");
    let run = ["run", "--gpu", "none", "--job", "j", "--", "bash", "-c", &line];
    let mut job = Job::start(hosts.kedge("a", &run));
    job.read_to(5);
    for (to, why) in [("nowhere", "cannot be opened there"), ("short", "has 1 bytes there")] {
        let map = format!("{}={}", at("here"), at(to));
        let output = hosts.moved(&["--json", "--path-map", &map]);
        assert_eq!(output.status.code(), Some(125), "{output:?}");
        let said = stderr(&output);
        assert!(said.contains(why) && said.contains("/data"), "{to}: {output:?}");
        assert!(!stdout(&output).contains("pause"), "{output:?}");
        job.read_to(job.step + 2);
        assert_eq!((hosts.images("a"), hosts.images("b")), (0, 0), "nothing is left");
    }
    let map = format!("{}={}", at("here"), at("there"));
    let output = hosts.moved(&["--path-map", &map]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(job.finish(STEPS).code(), Some(WELL));
    let got = fs::read_to_string(at("got")).expect("what was read");
    assert!(got.starts_with("elsewhere"), "{got:?}");
}

/// By keys, from one user's folder to another's, as a user without rights; who is not pinned moves
/// nothing, and root's server takes nothing from other machines.
#[test]
fn keys_and_users() {
    let Some(network) = Network::acquainted("jmkeys") else { return };
    let listen = format!("{ADDRESS}:0");
    let serve = ["serve", "--gpu", "soft", "--take-jobs", "--listen", &listen];
    let refused = network.kedge("lender", &serve).output().expect("kedge");
    assert!(stderr(&refused).contains("--take-jobs"), "{refused:?}");

    let world = &network.world;
    build(world, "steps", &[]);
    let kedge = world.parts().display().to_string();
    let base = world.0.display().to_string();
    for host in ["a", "b"] {
        fs::create_dir(world.0.join(host)).expect("a folder");
    }
    let id = User::Nobody.id().to_string();
    // But for kedge's programs: these are links to those that others use.
    let (owner, programs) = (format!("{id}:{id}"), format!("{base}/bin"));
    let but_for = [&*base, "-path", &programs, "-prune", "-o", "-exec", "chown", &owner, "{}", "+"];
    let given = Command::new("find").args(but_for).status();
    assert!(given.expect("find").success());
    let by = |user: &str, host: &str, words: &[&str]| {
        let become_user = ["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups", &kedge];
        let mut command = network.inside(&[&become_user[..], words].concat());
        command.env("XDG_CONFIG_HOME", network.config(user)).env("KEDGE_CONFIG", "");
        command.env("XDG_STATE_HOME", world.0.join(host)).env("HOME", &base);
        command.env("XDG_RUNTIME_DIR", world.0.join(host)).current_dir(world.home());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let server = Served::started(by("lender", "b", &serve));
    let steps = STEPS.to_string();
    let run = ["run", "--gpu", "none", "--job", "j", "--", "./steps", &steps, "20", "2", "8"];
    let mut job = Job::start(by("alice", "a", &run));
    job.read_to(5);
    let migrate = ["migrate", "j", "--host", &server.address];
    // Of bob nobody there knows anything.
    for user in ["bob", "alice"] {
        let output = by(user, "a", &migrate).output().expect("kedge");
        assert_eq!(output.status.success(), user == "alice", "{output:?} {}", server.said());
        job.read_to(job.step + 5);
    }
    assert_eq!(job.finish(STEPS).code(), Some(WELL), "{}", server.said());
    kill_all_in(&world.home());
}
