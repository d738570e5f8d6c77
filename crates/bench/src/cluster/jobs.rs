//! The move of a whole job to another host, by its own clock.

use super::hosts::{Hosts, quoted, said};
use super::{Sink, sized};
use crate::figures::{GIB, at};
use crate::process::job::Job;
use kedge_probe::Series;
use kedge_supervisor::kedge_again;
use serde::Deserialize;
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Instant;

pub(super) const ROUNDS: usize = 5;
/// Attempts to have the program write for as long as a move takes.
const ATTEMPTS: usize = 3;
/// Seconds that it writes before the move, and at least after it.
const BESIDE: f64 = 1.0;
/// Where `kedge serve` says its address.
const LENT_AT: &str = " is lent at ";

/// What the other host's state is, images too, in this run's folder.
const STATE: &str = "state";

const SEEN: &str = "move of a job that changes by 1 % a second: its longest gap";

/// What `kedge migrate --json` tells of the pause.
#[derive(Debug, Deserialize)]
struct Event {
    event: String,
    seconds: Option<f64>,
}

/// A move: seconds.
struct Moved {
    gap: f64,
    pause: f64,
    whole: f64,
}

pub(super) fn run(hosts: &Hosts, size: u64, rounds: usize, sink: Sink<'_>) -> Result<(), String> {
    if rustix::process::geteuid().is_root() {
        crate::said::warn(
            "root's `kedge serve` takes jobs from its own host alone: moves are left out",
        );
        return Ok(());
    }
    let there = &hosts.all[1];
    let [own, theirs] = acquainted(hosts, there)?;
    let server = Server::start(hosts, there, &theirs)?;
    let bench = Bench { hosts, size, address: &server.address, config: &own };
    let [mut gaps, mut pauses, mut wholes] = <[Vec<f64>; 3]>::default();
    // The first one tells how long the others may take.
    let mut seconds = bench.once(0.0)?.whole;
    for _ in 0..rounds {
        let moved = bench.moved(seconds)?;
        seconds = moved.whole;
        gaps.push(moved.gap);
        pauses.push(moved.pause);
        wholes.push(moved.whole);
    }
    sink(Series::lower(sized(SEEN, size), "s", gaps).target(at(size, &[(4 * GIB, 0.1)])));
    sink(Series::lower(sized("the same as the command tells it", size), "s", pauses));
    sink(Series::lower(sized("the whole move", size), "s", wholes));
    Ok(())
}

struct Bench<'a> {
    hosts: &'a Hosts,
    size: u64,
    address: &'a str,
    config: &'a Path,
}

impl Bench<'_> {
    /// A move during all of which the program wrote: the last one took `seconds`.
    fn moved(&self, mut seconds: f64) -> Result<Moved, String> {
        for _ in 0..ATTEMPTS {
            let moved = self.once(2.0 * BESIDE + 1.5 * seconds)?;
            if moved.gap.is_finite() {
                return Ok(moved);
            }
            seconds = moved.whole;
        }
        Err("each move took half as long again as the one before".into())
    }

    /// A new job that writes for `writes` seconds and is moved meanwhile; no gap where that was not
    /// for long enough.
    fn once(&self, writes: f64) -> Result<Moved, String> {
        let name = self.hosts.job("move");
        let mut command = self.hosts.as_a_job(&name);
        command.arg(kedge_again().get_program()).args(["probe", "memory", &self.size.to_string()]);
        command.env("XDG_CONFIG_HOME", self.config);
        let mut job = Job::ready(command, name)?;
        job.ask("change 0.1")?;
        let begin = Instant::now();
        job.tell(&format!("change {writes}"))?;
        std::thread::sleep(std::time::Duration::from_secs_f64(BESIDE));
        let (pause, whole) = self.migrate(job.name())?;
        let in_time = begin.elapsed().as_secs_f64() + BESIDE / 2.0 < writes;
        let gap = job.answer()?;
        job.end();
        self.forget_images()?;
        Ok(Moved { gap: if in_time { gap } else { f64::NAN }, pause, whole })
    }

    /// Removes the images by which it came there: they are as large as it is.
    fn forget_images(&self) -> Result<(), String> {
        let images = self.hosts.dir.join(STATE).join("kedge/images");
        match fs::remove_dir_all(&images) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(format!("{}: {error}", images.display()))
            }
            _ => Ok(()),
        }
    }

    /// Moves it as users do: how long it stood still, and all of it took.
    fn migrate(&self, name: &str) -> Result<(f64, f64), String> {
        let mut command = kedge_again();
        command.args(["migrate", name, "--json", "--host", self.address]);
        let begin = Instant::now();
        let told = said(command.env("XDG_CONFIG_HOME", self.config))?;
        let whole = begin.elapsed().as_secs_f64();
        let events = told.lines().filter_map(|line| serde_json::from_str::<Event>(line).ok());
        let pause = events.filter(|event| event.event == "pause").find_map(|event| event.seconds);
        Ok((pause.ok_or_else(|| format!("`kedge migrate` told of no pause: {told}"))?, whole))
    }
}

/// `kedge serve --take-jobs` on another host, until this is dropped.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(hosts: &Hosts, there: &str, config: &Path) -> Result<Server, String> {
        let folder = |path: &Path| quoted(&path.display().to_string());
        let listen = format!("{there}:0");
        let serve = ["serve", "--gpu", "soft", "--take-jobs", "--listen", &listen];
        // The end of its input ends it.
        let line = format!(
            "export XDG_CONFIG_HOME={} XDG_STATE_HOME={}; env {} 2>&1 & cat > /dev/null; kill $!",
            folder(config),
            folder(&hosts.dir.join(STATE)),
            hosts.kedge_line(&serve)
        );
        let mut command = hosts.shell(there, &line);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("ssh: {error}"))?;
        let output = child.stdout.take();
        let mut server = Server { child, address: String::new() };
        let mut lines = BufReader::new(output.ok_or("no output")?).lines();
        let mut all = String::new();
        for line in lines.by_ref().map_while(Result::ok) {
            if let Some((_, address)) = line.split_once(LENT_AT) {
                address.clone_into(&mut server.address);
                break;
            }
            all += &line;
        }
        if server.address.is_empty() {
            return Err(format!("kedge serve on {there}: {all}"));
        }
        std::thread::spawn(move || lines.for_each(drop));
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Folders of keys, of this host's user and of the other's, who have pinned each other's.
fn acquainted(hosts: &Hosts, there: &str) -> Result<[PathBuf; 2], String> {
    let folders = ["config-here", "config-there"].map(|name| hosts.dir.join(name));
    let keys = |folder: &Path, words: &[&str]| {
        said(kedge_again().arg("keys").args(words).env("XDG_CONFIG_HOME", folder))
    };
    for folder in &folders {
        fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        keys(folder, &["new"])?;
    }
    let [own, theirs] = &folders;
    for (at, name, of) in [(own, there, theirs), (theirs, "bench", own)] {
        let file = of.join("certificate.pem");
        let text = keys(of, &["show"])?;
        fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()))?;
        keys(at, &["add", name, &file.display().to_string()])?;
    }
    Ok(folders)
}
