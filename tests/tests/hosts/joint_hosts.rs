//! Jobs whose parts are on several hosts: network namespaces with runtime folders of their own, and
//! a folder of images that they share.
use kedge_left_out::left_out;
use kedge_tests::job::{
    User, allow, build, children, family, is_right, kedge_as, kill_all_in, send, steps_in,
    wait_for_steps, writers_of,
};
use kedge_tests::world::{World, is_root, stderr};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const STEPS: u64 = 120;
/// Nobody gets further until it is said: so no part has ended when it is to be saved.
const HALF: u64 = STEPS / 2;
/// What the program ends with when all of its steps were right.
const WELL: i32 = 7;
const TIMEOUT: Duration = Duration::from_secs(40);
const AT: &str = "10.78.1.1:7431";
const KEY: &str = "a key that these tests alone have";

/// A network namespace, for as long as this lives.
struct Host {
    holder: Child,
    runtime: PathBuf,
}

impl Host {
    fn new(world: &World, user: User, name: &str) -> Host {
        let runtime = world.home().join(name);
        fs::create_dir(&runtime).expect("a folder");
        fs::set_permissions(&runtime, fs::Permissions::from_mode(0o700)).expect("mine");
        if user == User::Nobody {
            chown(&runtime, Some(65534), Some(65534)).expect("root");
        }
        let holder = Command::new("unshare").args(["-n", "sleep", "200"]).spawn();
        Host { holder: holder.expect("unshare"), runtime }
    }

    /// Whether it is another host already than the one that all are on.
    fn is_there(&self) -> bool {
        let network = |of: &str| fs::read_link(format!("/proc/{of}/ns/net")).ok();
        let own = network(&self.holder.id().to_string());
        own.is_some() && own != network("self")
    }

    fn inside(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-n", "-t", &self.holder.id().to_string(), "--"]);
        command
    }

    /// Whether the command, on this host, does what it is to do.
    fn does(&self, words: &str) -> bool {
        let done = self.inside().args(words.split(' ')).output();
        done.is_ok_and(|done| done.status.success())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// A job with a part on each of two hosts.
struct Job {
    world: World,
    user: User,
    hosts: Vec<Host>,
    parts: Vec<Child>,
}

impl Job {
    /// `None` where there can be no such hosts.
    fn start(name: &str, user: User) -> Option<Job> {
        let mut job = Job::hosts(name, user)?;
        allow(&job.world.home(), HALF);
        for part in 0..2 {
            let line = format!("exec ./steps {STEPS} 20 2 1 go > out.{part}");
            let run = ["run", "--gpu", "none", "--join", "pair", "--at", AT, "--ckpt-dir"];
            let images = job.images();
            let mut command =
                job.kedge(part, &[&run[..], &[&images, "--", "sh", "-c", &line]].concat());
            command.stdout(Stdio::null()).stderr(Stdio::null());
            job.parts.push(command.spawn().expect("nsenter"));
            job.wait_for(part, 1);
        }
        Some(job)
    }

    fn hosts(name: &str, user: User) -> Option<Job> {
        if !is_root() {
            left_out(name, "only root can make hosts of its own");
            return None;
        }
        let world = World::new(name);
        build(&world, "steps", &[]);
        if user == User::Nobody {
            world.give_home_away();
        }
        let hosts = vec![Host::new(&world, user, "a"), Host::new(&world, user, "b")];
        let other = hosts[1].holder.id();
        let wire = format!("ip link add ka type veth peer name kb netns {other}");
        let begin = Instant::now();
        while !(hosts.iter().all(Host::is_there) && hosts[0].does(&wire)) {
            if begin.elapsed() > Duration::from_secs(5) {
                left_out(name, "no network namespaces, or no `ip`");
                return None;
            }
            thread::sleep(Duration::from_millis(20));
        }
        for (host, (device, address)) in
            hosts.iter().zip([("ka", "10.78.1.1/24"), ("kb", "10.78.1.2/24")])
        {
            assert!(host.does(&format!("ip addr add {address} dev {device}")));
            assert!(host.does("ip link set lo up"));
            assert!(host.does(&format!("ip link set {device} up")));
        }
        Some(Job { world, user, hosts, parts: Vec::new() })
    }

    fn images(&self) -> String {
        self.world.home().join("images").display().to_string()
    }

    /// kedge on that host.
    fn kedge(&self, host: usize, arguments: &[&str]) -> Command {
        let kedge = kedge_as(&self.world, self.user, arguments);
        let mut command = self.hosts[host].inside();
        command.arg(kedge.get_program()).args(kedge.get_args()).current_dir(self.world.home());
        let set = kedge.get_envs().filter_map(|(name, value)| Some((name, value?)));
        command.envs(set).env("XDG_RUNTIME_DIR", &self.hosts[host].runtime);
        command.env("XDG_STATE_HOME", &self.hosts[host].runtime);
        command.env("KEDGE_JOIN_KEY", KEY).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn output(&self, host: usize, arguments: &[&str]) -> Output {
        self.kedge(host, arguments).output().expect("nsenter")
    }

    fn steps(&self, part: usize) -> Vec<String> {
        steps_in(&self.world.home(), part)
    }

    fn may_end(&self) {
        allow(&self.world.home(), STEPS);
    }

    fn wait_for(&self, part: usize, lines: usize) {
        wait_for_steps(&self.world.home(), part, lines);
    }

    fn checkpoint(&self, host: usize) -> String {
        let output = self.output(host, &["checkpoint", "pair", "--json"]);
        assert!(output.status.success(), "{}", stderr(&output));
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(report["processes"], 2, "{report}");
        report["image"].as_str().expect("a path").to_owned()
    }

    fn kill(&mut self) {
        for part in &mut self.parts {
            send("KILL", &family(part.id()));
            let _ = part.wait();
        }
    }

    fn is_right(&self, part: usize) {
        is_right(&self.world.home(), part, STEPS);
    }

    /// Restarts those parts, each list on the host that it is for.
    fn restart(&self, image: &str, parts: [&str; 2]) -> Vec<Output> {
        let start = |(host, parts): (usize, &&str)| {
            let restart = ["restart", image, "--at", AT, "--parts", parts];
            self.kedge(host, &restart).spawn().expect("nsenter")
        };
        let running: Vec<Child> = parts.iter().enumerate().map(start).collect();
        running.into_iter().map(|child| child.wait_with_output().expect("ended")).collect()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.kill();
        kill_all_in(&self.world.home());
    }
}

fn comes_back(name: &str, user: User) {
    let Some(mut job) = Job::start(name, user) else { return };
    (0..2).for_each(|part| job.wait_for(part, 10));
    // Asked on the host that has no coordinator.
    let image = job.checkpoint(1);
    let before = [0, 1].map(|part| job.steps(part).len());
    job.may_end();
    (0..2).for_each(|part| job.wait_for(part, before[part] + 3));
    job.kill();
    for ended in job.restart(&image, ["0", "1"]) {
        assert_eq!(ended.status.code(), Some(WELL), "{}", stderr(&ended));
    }
    (0..2).for_each(|part| job.is_right(part));
}

#[test]
fn parts_on_two_hosts_come_back_on_two_hosts() {
    comes_back("hosts", User::Same);
}

#[test]
fn so_they_do_for_an_ordinary_user() {
    comes_back("hostsn", User::Nobody);
}

#[test]
fn when_the_coordinator_is_lost_the_other_host_goes_on_and_comes_back_on_one() {
    let Some(mut job) = Job::start("hostsl", User::Same) else { return };
    (0..2).for_each(|part| job.wait_for(part, 5));
    let image = job.checkpoint(0);
    // timeout's only child, which coordinates; with it, all that the first host has.
    let supervisor = children(job.parts[0].id());
    send("KILL", &supervisor);
    let begin = Instant::now();
    let refused = job.output(1, &["checkpoint", "pair"]);
    assert!(!refused.status.success() && !stderr(&refused).is_empty());
    assert!(begin.elapsed() < TIMEOUT, "{:?}", begin.elapsed());
    job.may_end();
    // Two lines more than its steps: it goes on to its end.
    job.wait_for(1, STEPS as usize + 2);
    job.kill();
    thread::sleep(Duration::from_millis(50));
    // What the first supervisor has left behind.
    send("KILL", &writers_of(&job.world.home().join("out.0")));
    let ended = job.output(1, &["restart", &image]);
    assert_eq!(ended.status.code(), Some(WELL), "{}", stderr(&ended));
    (0..2).for_each(|part| job.is_right(part));
}

#[test]
fn another_key_and_a_part_that_two_hosts_restart_are_refused() {
    let Some(mut job) = Job::start("hostsr", User::Same) else { return };
    let join = ["run", "--gpu", "none", "--join", "pair", "--at", AT, "--", "true"];
    let mut stranger = job.kedge(1, &join);
    let refused = stranger.env("KEDGE_JOIN_KEY", "quite another key").output().expect("nsenter");
    assert_eq!(refused.status.code(), Some(125));
    assert!(stderr(&refused).contains("does not take this key"), "{}", stderr(&refused));
    let unsaid = job.kedge(1, &join).env_remove("KEDGE_JOIN_KEY").output().expect("nsenter");
    assert!(stderr(&unsaid).contains("key"), "{}", stderr(&unsaid));
    let image = job.checkpoint(0);
    job.kill();
    let before = (job.steps(0), job.steps(1));
    let both = job.restart(&image, ["0", "0"]);
    let refused = |ended: &Output| ended.status.code() == Some(125) && !stderr(ended).is_empty();
    assert!(both.iter().all(refused), "{both:?}");
    let named = |ended: &&Output| stderr(ended).contains("pair.0 is being restarted already");
    assert!(both.iter().any(|ended| named(&ended)), "{both:?}");
    let none = job.output(0, &["restart", &image, "--at", AT, "--parts", "7"]);
    assert!(stderr(&none).contains("no part 7"), "{}", stderr(&none));
    // Nothing has gone on, and what the programs had written is as it was.
    assert_eq!((job.steps(0), job.steps(1)), before);
}
