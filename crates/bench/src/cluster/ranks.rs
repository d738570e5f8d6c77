//! Checkpoints of MPI ranks on all hosts, and restarts on others.

use super::hosts::{Hosts, as_root_too, quoted, write_key};
use super::{Sink, sized};
use crate::figures::{GIB, at};
use crate::process::job::Job;
use kedge_probe::Series;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const RANKS: &str = include_str!("ranks.c");
pub(super) const ROUNDS: usize = 5;
/// How many ranks there are; hosts at most.
const COUNTS: [usize; 2] = [4, 16];
const HOSTS: usize = 4;
/// Seconds of steps without a checkpoint.
const USUAL: &str = "beat 2";
/// Where the parts of a restarted job meet, on the first host.
const PORT: u16 = 7439;
/// Within which what has been told to end has ended.
const SOON: Duration = Duration::from_secs(20);

/// Waits, a minute or so, until no connection that was closed keeps a restart waiting for its port.
const NO_TIME_WAIT: &str = r#"for i in $(seq 70); do
    awk '$4 == "06" { found = 1 } END { exit !found }' /proc/net/tcp* || break; sleep 1; done"#;

const STALL: &str = "the job stands still";
const SEEN: &str = "its longest step beside a checkpoint";
const RESTART: &str = "restart on other hosts to a step of all";

pub(super) fn run(hosts: &Hosts, size: u64, rounds: usize, sink: Sink<'_>) -> Result<(), String> {
    let program = hosts.compiled("ranks", RANKS)?;
    if hosts.spares.is_empty() {
        crate::said::warn("no --spare: restarts on other hosts are left out");
    }
    COUNTS.iter().try_for_each(|ranks| {
        let bench = Bench { hosts, program: &program, ranks: *ranks, size, rounds };
        let image = bench.checkpoints(sink)?;
        bench.restarts(&image, sink)?;
        fs::remove_dir_all(&image).map_err(|error| format!("{}: {error}", image.display()))
    })
}

struct Bench<'a> {
    hosts: &'a Hosts,
    program: &'a Path,
    ranks: usize,
    size: u64,
    rounds: usize,
}

impl Bench<'_> {
    fn on(&self) -> &[String] {
        self.hosts.first(HOSTS)
    }

    fn named(&self, what: &str) -> String {
        let (ranks, hosts) = (self.ranks, self.on().len());
        format!("{ranks} ranks on {hosts} hosts: {}", sized(what, self.size))
    }

    /// Checkpoints it some times beside its steps, and at last to its end: that image.
    fn checkpoints(&self, sink: Sink<'_>) -> Result<PathBuf, String> {
        let name = self.hosts.job(&self.ranks.to_string());
        let mut command = self.hosts.as_a_job(&name);
        as_root_too(&mut command).args(self.hosts.mpirun(self.on(), self.ranks));
        command.arg(self.program).arg((self.size / self.ranks as u64).to_string());
        let mut job = Job::ready(command, name)?;
        let [mut usual, mut stalls, mut seen] = <[Vec<f64>; 3]>::default();
        // The first one tells how long the others may take.
        let mut seconds = self.checkpoint(&job)?.1;
        for _ in 0..self.rounds {
            usual.push(job.ask(USUAL)?);
            job.tell(&format!("beat {}", 1.0 + 1.5 * seconds))?;
            let (stall, durable) = self.checkpoint(&job)?;
            seen.push(job.answer()?);
            stalls.push(stall);
            seconds = durable;
        }
        let last = job.checkpoint(&["--stop"])?;
        job.end();
        let pause = at(self.size, &[(GIB, 0.15)]);
        sink(Series::lower(self.named("its longest step otherwise"), "s", usual));
        sink(Series::lower(self.named(STALL), "s", stalls).target(pause));
        sink(Series::lower(self.named(SEEN), "s", seen).target(pause));
        Ok(self.image(&last.image))
    }

    /// One whose image is not kept: seconds that it stood still, and until it was durable.
    fn checkpoint(&self, job: &Job) -> Result<(f64, f64), String> {
        let taken = job.checkpoint(&[])?;
        let image = self.image(&taken.image);
        fs::remove_dir_all(&image).map_err(|error| format!("{}: {error}", image.display()))?;
        Ok((taken.stall_seconds, taken.seconds.ok_or("the image did not become durable")?))
    }

    fn image(&self, told: &Path) -> PathBuf {
        self.hosts.dir.join(told)
    }

    /// From the commands' start on as many hosts as it was on to a step of all ranks.
    fn restarts(&self, image: &Path, sink: Sink<'_>) -> Result<(), String> {
        let spares = &self.hosts.spares;
        if spares.is_empty() {
            return Ok(());
        }
        let spares = &spares[..spares.len().min(self.on().len())];
        let key = self.hosts.dir.join("key");
        write_key(&key).map_err(|error| format!("{}: {error}", key.display()))?;
        let mut times = Vec::new();
        for _ in 0..self.rounds {
            let mut waiting = Waiting::start(self, spares, image, &key)?;
            let begin = Instant::now();
            waiting.go()?;
            times.push(waiting.answer()?.duration_since(begin).as_secs_f64());
            waiting.end()?;
        }
        sink(Series::lower(self.named(RESTART), "s", times).target(at(self.size, &[(GIB, 1.0)])));
        Ok(())
    }
}

/// Shells on the spare hosts that restart parts of the job as soon as they are told to.
struct Waiting {
    first: Job,
    others: Others,
}

/// Ended with this.
struct Others(Vec<Child>);

impl Drop for Others {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Waiting {
    fn start(
        bench: &Bench<'_>,
        spares: &[String],
        image: &Path,
        key: &Path,
    ) -> Result<Waiting, String> {
        let entries = fs::read_dir(image).map_err(|e| format!("{}: {e}", image.display()))?;
        let parts = entries.flatten().filter(|entry| entry.path().is_dir()).count();
        if parts < spares.len() {
            return Err(format!("the job has {parts} parts, fewer than there are --spare hosts"));
        }
        let shell = |number: usize| {
            let own = (0..parts).filter(|part| part % spares.len() == number);
            let own = own.map(|part| part.to_string()).collect::<Vec<_>>().join(",");
            let (image, key) = (image.display().to_string(), key.display().to_string());
            let at = format!("{}:{PORT}", spares[0]);
            let words = ["restart", &image, "--at", &at, "--join-key", &key, "--parts", &own];
            let restart = bench.hosts.kedge_line(&words);
            // What follows the word is the program's.
            let line = format!("{NO_TIME_WAIT}; echo ready; read -r go && exec env {restart}");
            bench.hosts.shell(&spares[number], &format!("exec sh -c {}", quoted(&line)))
        };
        let first = Job::ready(shell(0), bench.hosts.job(&bench.ranks.to_string()))?;
        let mut others = Others(Vec::new());
        for number in 1..spares.len() {
            let mut command = shell(number);
            let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
            others.0.push(command.spawn().map_err(|error| format!("ssh: {error}"))?);
        }
        others.0.iter_mut().try_for_each(is_ready)?;
        Ok(Waiting { first, others })
    }

    fn go(&mut self) -> Result<(), String> {
        for child in &mut self.others.0 {
            let input = child.stdin.as_mut().ok_or("no input")?;
            input.write_all(b"go\n").map_err(|error| error.to_string())?;
        }
        self.first.tell("go")
    }

    /// When all ranks have taken a step.
    fn answer(&mut self) -> Result<Instant, String> {
        self.first.ask("ping")?;
        Ok(Instant::now())
    }

    fn end(mut self) -> Result<(), String> {
        self.first.end();
        let begin = Instant::now();
        while begin.elapsed() < SOON {
            let ended = |child: &mut Child| child.try_wait().is_ok_and(|status| status.is_some());
            if self.others.0.iter_mut().all(ended) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Err("a part of the restarted job did not end with it".into())
    }
}

/// Until its shell is there.
fn is_ready(child: &mut Child) -> Result<(), String> {
    let mut word = [0; 6];
    let output = child.stdout.as_mut().ok_or("no output")?;
    output.read_exact(&mut word).map_err(|error| format!("ssh: {error}"))
}
