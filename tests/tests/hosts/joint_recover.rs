//! Jobs of several parts that are brought back by themselves (`--recover`), whatever of them is
//! killed or cut off: each part's steps are those of an undisturbed run, and no part runs twice at
//! one time.
use kedge_tests::cluster::Cluster;
use kedge_tests::job::{
    User, allow, build, children, is_alive, is_right, name, send, steps_in, wait_for_steps,
    writers_of,
};
use kedge_tests::world::stderr;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const STEPS: u64 = 120;
/// Nobody gets further until it is said.
const HALF: u64 = STEPS / 2;
/// What the program ends with when all of its steps were right.
const WELL: i32 = 7;
const TIMEOUT: Duration = Duration::from_secs(50);
/// After which a part that is cut off has been stopped, and is brought back.
const GONE: Duration = Duration::from_secs(25);

/// A job with a part on each of some hosts.
struct Job {
    cluster: Cluster,
    parts: Vec<Child>,
}

impl Job {
    /// `None` where there can be no such hosts.
    fn start(name: &str, on: &[usize], options: &[&str]) -> Option<Job> {
        let cluster = Cluster::new(name, User::Same, 1)?;
        build(&cluster.world, "steps", &[]);
        allow(&cluster.world.home(), HALF);
        let mut job = Job { cluster, parts: Vec::new() };
        for (part, host) in on.iter().enumerate() {
            let line = format!("exec ./steps {STEPS} 20 2 1 go > out.{part}");
            let (at, images) = (job.cluster.at(1), job.cluster.images());
            let run = ["run", "--gpu", "none", "--join", "pair", "--ckpt-dir", &images];
            // One host needs no address.
            let far = if on.contains(&1) { vec!["--at", &at] } else { Vec::new() };
            let words = [&run[..], &far, options, &["--", "sh", "-c", &line]].concat();
            let mut command = job.cluster.kedge(*host, &words);
            command.stdout(Stdio::null());
            job.parts.push(command.spawn().expect("nsenter"));
            job.wait_for(part, 1);
        }
        Some(job)
    }

    fn home(&self) -> PathBuf {
        self.cluster.world.home()
    }

    fn wait_for(&self, part: usize, lines: usize) {
        wait_for_steps(&self.home(), part, lines);
    }

    fn output(&self, host: usize, words: &[&str]) -> Output {
        self.cluster.output(host, words)
    }

    /// Saves it, and has its parts do some steps more.
    fn save(&self) {
        (0..self.parts.len()).for_each(|part| self.wait_for(part, 10));
        let saved = self.output(0, &["checkpoint", "pair"]);
        assert!(saved.status.success(), "{}", stderr(&saved));
        let before: Vec<_> = (0..self.parts.len()).map(|part| self.lines(part)).collect();
        before.iter().enumerate().for_each(|(part, lines)| self.wait_for(part, lines + 5));
    }

    fn lines(&self, part: usize) -> usize {
        steps_in(&self.home(), part).len()
    }

    /// The processes of that part.
    fn writers(&self, part: usize) -> BTreeSet<u32> {
        writers_of(&self.home().join(format!("out.{part}"))).into_iter().collect()
    }

    /// The supervisor of that part: timeout's only child.
    fn supervisor(&self, part: usize) -> u32 {
        children(self.parts[part].id())[0]
    }

    /// Kills that part's program, once it runs: what makes it anew has another name.
    fn kill_program(&self, part: usize) {
        let begin = Instant::now();
        loop {
            let steps = self.writers(part).into_iter().find(|pid| name(*pid) == "steps");
            if let Some(steps) = steps {
                return send("KILL", &[steps]);
            }
            assert!(begin.elapsed() < TIMEOUT, "{}", self.told());
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until each part runs in other processes than `before`, and sees that none does so
    /// before all of those have ended.
    fn comes_back(&self, before: &[BTreeSet<u32>], within: Duration) {
        let begin = Instant::now();
        let all = |part: usize| {
            let now: Vec<u32> =
                self.writers(part).into_iter().filter(|pid| is_alive(*pid)).collect();
            let new = now.iter().filter(|pid| !before[part].contains(pid)).count();
            // Of one moment: those that are seen later are looked at again.
            let old: Vec<u32> = before[part].iter().copied().filter(|pid| is_alive(*pid)).collect();
            assert!(new == 0 || old.is_empty(), "part {part} runs twice: {old:?} and {now:?}");
            new > 0
        };
        // Each is looked at, whether or not the one before it is back.
        while (0..before.len()).filter(|part| all(*part)).count() < before.len() {
            assert!(begin.elapsed() < within, "{}", self.told());
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn ends(&self) {
        allow(&self.home(), STEPS);
        for part in 0..self.parts.len() {
            self.wait_for(part, STEPS as usize + 2);
            is_right(&self.home(), part, STEPS);
        }
    }

    fn status(&mut self, part: usize) -> ExitStatus {
        self.parts[part].wait().expect("ended")
    }

    /// The wardens that live.
    fn wardens(&self) -> Vec<u32> {
        let all = fs::read_dir("/proc").expect("/proc").flatten();
        let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let here = |pid: &u32| {
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let is_warden = words.split(|byte| *byte == 0).nth(1) == Some(b"warden");
            let cwd = fs::read_link(format!("/proc/{pid}/cwd"));
            is_warden && cwd.is_ok_and(|cwd| cwd.starts_with(self.home()))
        };
        pids.filter(here).collect()
    }

    /// The warden of that part.
    fn warden(&self, part: usize) -> u32 {
        let supervisor = format!("\"supervisor\":{},", self.supervisor(part));
        let of_part = |pid: &u32| {
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&words).contains(&supervisor)
        };
        let wardens: Vec<u32> = self.wardens().into_iter().filter(of_part).collect();
        assert_eq!(wardens.len(), 1);
        wardens[0]
    }

    /// What the logs say.
    fn told(&self) -> String {
        let hosts = self.cluster.hosts.len();
        let log = |host| {
            let one = |part: usize| {
                let log = self.output(host, &["logs", &format!("pair.{part}")]);
                format!("host {host}, part {part}: {}\n", String::from_utf8_lossy(&log.stdout))
            };
            (0..self.parts.len()).map(one).collect::<String>()
        };
        (0..hosts).map(log).collect()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for part in &mut self.parts {
            send("KILL", &kedge_tests::job::family(part.id()));
            let _ = part.wait();
        }
    }
}

/// What `lose` does to the job costs it nothing but the steps since its image.
fn recovers(name: &str, on: &[usize], within: Duration, lose: impl Fn(&Job)) -> Option<Job> {
    let job = Job::start(name, on, &["--recover"])?;
    job.save();
    let before: Vec<_> = (0..on.len()).map(|part| job.writers(part)).collect();
    lose(&job);
    job.comes_back(&before, within);
    job.ends();
    Some(job)
}

#[test]
fn parts_of_one_host_come_back_when_a_supervisor_is_killed() {
    let lose = |job: &Job| send("KILL", &[job.supervisor(1)]);
    let Some(mut job) = recovers("recs", &[0, 0], TIMEOUT, lose) else { return };
    // Whoever waits for the other part waits until it has come to its end.
    assert_eq!(job.status(0).code(), Some(WELL));
}

#[test]
fn parts_of_two_hosts_come_back_when_the_coordinator_s_supervisor_is_killed() {
    let lose = |job: &Job| send("KILL", &[job.supervisor(0)]);
    let Some(mut job) = recovers("recc", &[0, 1], TIMEOUT, lose) else { return };
    assert_eq!(job.status(1).code(), Some(WELL));
}

#[test]
fn parts_come_back_when_a_program_is_killed() {
    let lose = |job: &Job| job.kill_program(1);
    let Some(mut job) = recovers("recp", &[0, 1], TIMEOUT, lose) else { return };
    assert_eq!([0, 1].map(|part| job.status(part).code()), [Some(WELL); 2]);
}

#[test]
fn a_part_that_is_cut_off_is_stopped_before_the_others_come_back() {
    let lose = |job: &Job| {
        assert!(job.cluster.hosts[1].does("ip link set kb down"));
        let begin = Instant::now();
        // It stops by itself.
        while job.writers(1).into_iter().any(is_alive) {
            assert!(begin.elapsed() < GONE, "{}", job.told());
            thread::sleep(Duration::from_millis(20));
        }
    };
    let Some(mut job) = recovers("recf", &[0, 1], TIMEOUT, lose) else { return };
    assert_eq!(job.status(0).code(), Some(WELL));
    // Whoever waits there hears of it.
    assert!(job.cluster.hosts[1].does("ip link set kb up"));
    let ended = job.parts.remove(1).wait_with_output().expect("ended");
    assert!(!ended.status.success());
    assert!(stderr(&ended).contains("pair.1 does not come back"), "{ended:?}");
}

#[test]
fn a_part_of_a_lost_host_comes_back_on_another() {
    let lose = |job: &Job| {
        let network = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        let holder = job.cluster.hosts[1].id();
        let there = network(&holder.to_string());
        let all = fs::read_dir("/proc").expect("/proc").flatten();
        let all = all.filter_map(|entry| entry.file_name().to_str().map(str::to_owned));
        let all = all.filter(|pid| network(pid) == there).filter_map(|pid| pid.parse().ok());
        let all: Vec<u32> = all.filter(|pid| *pid != holder).collect();
        assert!(all.len() > 3, "{all:?}");
        send("KILL", &all);
    };
    let Some(mut job) = recovers("rech", &[0, 1], TIMEOUT, lose) else { return };
    assert_eq!(job.status(0).code(), Some(WELL));
}

#[test]
fn a_part_whose_warden_is_killed_ends_and_comes_back() {
    let lose = |job: &Job| send("KILL", &[job.warden(1)]);
    let Some(mut job) = recovers("recw", &[0, 1], TIMEOUT, lose) else { return };
    assert_eq!(job.status(0).code(), Some(WELL));
}

#[test]
fn a_part_whose_warden_stands_still_ends_before_it_comes_back() {
    let stopped = Cell::new(0);
    let lose = |job: &Job| {
        stopped.set(job.warden(1));
        send("STOP", &[stopped.get()]);
    };
    let Some(mut job) = recovers("recz", &[0, 1], TIMEOUT, lose) else { return };
    assert_eq!(job.status(0).code(), Some(WELL));
    // It has the streams.
    send("KILL", &[stopped.get()]);
    let ended = job.parts.remove(1).wait_with_output().expect("ended");
    assert!(stderr(&ended).contains("its warden has stood still"), "{ended:?}");
}

#[test]
fn a_job_goes_back_again_and_leaves_nothing() {
    let Some(mut job) = Job::start("rect", &[0, 1], &["--recover=2"]) else { return };
    job.save();
    for part in [0, 1] {
        let before: Vec<_> = (0..2).map(|part| job.writers(part)).collect();
        job.kill_program(part);
        job.comes_back(&before, TIMEOUT);
        thread::sleep(Duration::from_millis(300));
    }
    job.ends();
    assert_eq!([0, 1].map(|part| job.status(part).code()), [Some(WELL); 2]);
    let begin = Instant::now();
    while !job.wardens().is_empty() {
        assert!(begin.elapsed() < TIMEOUT, "{:?}", job.wardens());
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_job_that_has_gone_back_often_enough_ends() {
    let Some(mut job) = Job::start("reco", &[0, 0], &["--recover=1"]) else { return };
    job.save();
    let before: Vec<_> = (0..2).map(|part| job.writers(part)).collect();
    job.kill_program(1);
    job.comes_back(&before, TIMEOUT);
    job.kill_program(1);
    let ended = job.parts.remove(0).wait_with_output().expect("ended");
    assert_eq!(ended.status.signal(), Some(9), "{ended:?}");
    assert!(stderr(&ended).contains("it has gone back 1 times, not again"), "{}", stderr(&ended));
}

#[test]
fn a_part_that_has_ended_holds_nobody_up_and_does_not_run_again() {
    let Some(mut job) = Job::start("rece", &[0, 1], &["--recover"]) else { return };
    job.save();
    // The other host's coordinator stays where the first part was.
    send("TERM", &[job.supervisor(0)]);
    assert!(!job.status(0).success());
    thread::sleep(GONE + Duration::from_secs(5));
    assert!(job.writers(1).into_iter().any(is_alive), "{}", job.told());
    job.kill_program(1);
    let ended = job.parts.remove(1).wait_with_output().expect("ended");
    assert!(stderr(&ended).contains("part 0 has ended"), "{} {}", stderr(&ended), job.told());
    assert!(job.writers(0).is_empty() && job.writers(1).is_empty());
}

#[test]
fn a_job_without_an_image_says_so_and_ends() {
    let Some(mut job) = Job::start("reci", &[0, 0], &["--recover"]) else { return };
    send("KILL", &[job.supervisor(1)]);
    let ended = job.parts.remove(0).wait_with_output().expect("ended");
    assert_eq!(ended.status.signal(), Some(9), "{ended:?}");
    assert!(stderr(&ended).contains("there is no image yet to go back to"), "{}", stderr(&ended));
}
