//! Barriers of very many members.

use super::Sink;
use super::hosts::{Hosts, write_key};
use crate::said;
use kedge_coordinator::Series as Barriers;
use kedge_coordinator::{Client, Far, JobKey, Leader, Link, Member, Place, Simulated, Who};
use kedge_probe::Series;
use kedge_supervisor::kedge_again;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{self, BufRead, BufReader, PipeReader, PipeWriter, pipe};
use std::net::TcpListener;
use std::path::Path;
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

pub(super) const ROUNDS: usize = 50;
const MEMBERS: u32 = 1000;
const SIMULATED: u32 = 10_000;
const JOB: &str = "bench";
/// Started at a time: those that have not shown the key yet are bounded.
const WAVE: u32 = 32;
/// Descriptors beside the members'.
const OTHERS: u64 = 100;
/// Nothing takes longer than this unless a machine has stopped.
const TIMEOUT: Duration = Duration::from_secs(60);
/// What a member says that has joined.
const JOINED: &str = "joined";

const TIME: &str = "barrier over TCP of 1,000 processes on one host";
const SIMULATION: &str = "barrier of 10,000 members, simulated";

pub(super) fn run(hosts: &Hosts, rounds: usize, sink: Sink<'_>) -> Result<(), String> {
    let rounds = u32::try_from(rounds).map_err(|_| "--rounds: too many")?;
    real(hosts, rounds, sink)?;
    let broken = |error| format!("a simulated member: {error}");
    let mut job = Simulated::new(SIMULATED).map_err(broken)?;
    let [mut times, mut messages] = <[Vec<f64>; 2]>::default();
    for _ in 0..rounds {
        let begin = Instant::now();
        let said = job.barrier().map_err(broken)?;
        times.push(begin.elapsed().as_secs_f64() * 1e3);
        messages.push(said as f64 / f64::from(SIMULATED));
    }
    sink(Series::lower(format!("{SIMULATION}: the coordinator's time"), "ms", times));
    sink(messages_of(SIMULATION, messages));
    Ok(())
}

fn real(hosts: &Hosts, rounds: u32, sink: Sink<'_>) -> Result<(), String> {
    let said = |error: io::Error| format!("barriers: {error}");
    more_descriptors()?;
    let (folder, key) = (hosts.dir.join("meet"), hosts.dir.join("meet.key"));
    std::fs::create_dir_all(&folder).map_err(said)?;
    write_key(&key).map_err(said)?;
    let address = free_address(&hosts.all[0]).map_err(said)?;
    let place = Place { folder, far: Some(far(&address, &key)?) };
    let (_link, leader) = place.reach(JOB).map_err(said)?;
    let Leader::This(server) = leader else {
        return Err("barriers: somebody else coordinates".into());
    };
    let mut members = Members::start(&address, &key, rounds)?;
    let before = server.messages();
    // The end of their input.
    drop(members.gate.take());
    let times = members.line()?;
    members.end()?;
    // The step at which all assemble is one more.
    let each = (server.messages() - before) as f64 / f64::from(MEMBERS) / f64::from(rounds + 1);
    let times = serde_json::from_str(&times).map_err(|_| format!("a member said `{times}`"))?;
    sink(Series::lower(TIME, "ms", times).target(40.0));
    sink(messages_of(TIME, vec![each]));
    Ok(())
}

/// How many messages each member took: all have come only when the last one has, so two.
fn messages_of(barrier: &str, samples: Vec<f64>) -> Series {
    Series::lower(format!("{barrier}: messages a member"), "messages", samples).target(2.0)
}

/// Has this process have a connection of each member.
fn more_descriptors() -> Result<(), String> {
    let (limit, wanted) = (getrlimit(Resource::Nofile), u64::from(MEMBERS) + OTHERS);
    if limit.maximum.is_some_and(|most| most < wanted) {
        return Err(format!("barriers: {wanted} descriptors are needed: `ulimit -Hn {wanted}`"));
    }
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        .map_err(|error| format!("barriers: descriptors: {error}"))
}

fn far(address: &str, key: &Path) -> Result<Far, String> {
    let far = JobKey::read(key).and_then(|key| Far::new(address, key));
    far.map_err(|error| error.to_string())
}

/// A port of this host's that nobody has, as far as one can tell.
fn free_address(host: &str) -> io::Result<String> {
    Ok(TcpListener::bind((host, 0))?.local_addr()?.to_string())
}

/// Processes that end with this.
struct Members {
    children: Vec<Child>,
    /// What they say.
    lines: Receiver<String>,
    /// Held until they are to begin.
    gate: Option<PipeWriter>,
}

impl Drop for Members {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Members {
    /// Returns when all have joined.
    fn start(address: &str, key: &Path, rounds: u32) -> Result<Members, String> {
        let said = |error: io::Error| format!("barriers: {error}");
        let ((input, gate), (output, end)) = (pipe().map_err(said)?, pipe().map_err(said)?);
        let (children, gate) = (Vec::new(), Some(gate));
        let mut members = Members { children, lines: lines_of(output), gate };
        for index in 0..MEMBERS {
            let mut command = kedge_again();
            command.args(["probe", "far-member", address]).arg(key);
            command.args([index, MEMBERS, rounds].map(|number| number.to_string()));
            command.stdin(input.try_clone().map_err(said)?);
            command.stdout(end.try_clone().map_err(said)?);
            members.children.push(command.spawn().map_err(said)?);
            let wave = index % WAVE + 1;
            if wave == WAVE || index + 1 == MEMBERS {
                (0..wave).try_for_each(|_| members.has_joined())?;
            }
        }
        Ok(members)
    }

    fn has_joined(&self) -> Result<(), String> {
        let line = self.line()?;
        if line == JOINED { Ok(()) } else { Err(format!("barriers: a member said `{line}`")) }
    }

    fn line(&self) -> Result<String, String> {
        self.lines.recv_timeout(TIMEOUT).map_err(|_| "barriers: a member is silent".into())
    }

    /// Waits for the end of all.
    fn end(&mut self) -> Result<(), String> {
        let well = |child: &mut Child| child.wait().is_ok_and(|status| status.success());
        let failed = self.children.iter_mut().filter_map(|child| (!well(child)).then_some(()));
        match failed.count() {
            0 => Ok(()),
            failed => Err(format!("barriers: {failed} members have failed")),
        }
    }
}

fn lines_of(output: PipeReader) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

/// One of the processes, which begins at the end of its input: the times, in milliseconds, from one
/// barrier to the next, if it is the first of them.
///
/// # Errors
/// A barrier was not passed, and why.
pub fn member(
    address: &str,
    key: &Path,
    [index, members, rounds]: [u32; 3],
) -> Result<Option<Vec<f64>>, String> {
    let far = far(address, key)?;
    let name = index.to_string();
    let member = Member { job: JOB.into(), name, node: "bench".into(), part: true };
    let find = Box::new(move || far.connect().map(Link::Remote));
    let mut client = Client::join(&member, find).map_err(|error| error.to_string())?;
    said::tell(&format!("{JOINED}\n"))?;
    io::copy(&mut io::stdin(), &mut io::sink()).map_err(|error| error.to_string())?;
    let (series, who) = (Barriers::of_job("rounds"), Who::Count { members });
    let mut arrive = |step: u32| {
        let arrived = client.arrive(&series, step.into(), who, TIMEOUT);
        arrived.map_err(|error| error.to_string())
    };
    arrive(0)?;
    let mut samples = Vec::new();
    let mut begin = Instant::now();
    for step in 1..=rounds {
        arrive(step)?;
        samples.push(begin.elapsed().as_secs_f64() * 1e3);
        begin = Instant::now();
    }
    Ok((index == 0).then_some(samples))
}
