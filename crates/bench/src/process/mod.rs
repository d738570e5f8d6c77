//! `kedge bench process`: what a job of ordinary processes costs while it runs, at a checkpoint and
//! at a restart. Whatever can be compared is measured by turns with the same without kedge, and
//! with others that are installed (`peers`).

pub(crate) mod barriers;
pub(crate) mod job;
mod many;
mod peers;
mod plain;

use super::parts::Part;
use super::scratch::Scratch;
use crate::figures::{GIB, at};
use crate::said;
use job::{Job, Taken};
use kedge_control::size::Size;
use kedge_probe::{Reference, Series};
use kedge_supervisor::kedge_again;
use peers::{CRIU, DMTCP, Measured, Peer};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Pairs of each loop; the fourth-smallest and fourth-largest of 15 bound the median by 96.5 %.
const PAIRS: usize = 15;
const RANK: usize = 4;
/// Of these, with others beside: some take ten times as long.
const PEER_PAIRS: usize = 5;
/// Checkpoints and restarts of each kind.
const ROUNDS: usize = 3;
/// Between two that write to the disk.
const REST: Duration = Duration::from_secs(1);
const SIZES: [u64; 2] = [GIB, 4 * GIB];
/// Where there is room for none of those.
const SMALL: u64 = 256 << 20;

/// A loop that is timed.
struct Loop {
    /// As `kedge probe loop` knows it.
    name: &'static str,
    said: &'static str,
    /// For the limit.
    target: f64,
    /// What DMTCP makes of it.
    dmtcp: Option<f64>,
}

const LOOPS: [Loop; 6] = [
    Loop { name: "open", said: "open and close", target: 1.02, dmtcp: Some(8.5) },
    Loop { name: "malloc", said: "malloc and free", target: 1.02, dmtcp: Some(8.8) },
    Loop { name: "putc", said: "putc", target: 1.02, dmtcp: None },
    Loop { name: "pages", said: "write to pages", target: 1.02, dmtcp: None },
    Loop { name: "getppid", said: "getppid", target: 1.02, dmtcp: None },
    Loop { name: "fork", said: "fork and wait", target: 1.2, dmtcp: Some(9.0) },
];

pub(super) const LIMIT: &str = ": upper 95 % limit";
const STALL: &str = "the job stands still";
const SEEN: &str = "the longest pause that the program saw";
/// The whole of the memory is cloned, as CRUM and DMTCP fork.
const FORKED: &str = "forked capture, nothing written ahead: the job stands still";
const RESTART: &str = "restart to the first answer";
/// Who waits for the capture alone has memory cloned that is written afterwards, and not written
/// ahead.
const NOTHING_AHEAD: [&str; 2] = ["--wait", "captured"];
/// Seconds that a job may stand still, by its bytes.
const PAUSES: [(u64, f64); 1] = [(4 * GIB, 0.06)];

type Sink<'a> = dyn FnMut(Series) + 'a;

/// Measures and hands over each series as it is done.
pub(super) fn run(
    sizes: Vec<u64>,
    dir: Option<&Path>,
    parts: &[Part],
    sink: &mut Sink<'_>,
) -> Result<(), String> {
    let folder = Scratch::new(dir)?;
    if parts.contains(&Part::Many) {
        return many::measure(&folder.0, sink);
    }
    LOOPS.iter().try_for_each(|one| costs(one, sink))?;
    starts(sink)?;
    barriers::measure(&folder.0, sink)?;
    let room = plain::room(&folder.0);
    let usual = || SIZES.into_iter().filter(|size| *size <= room).collect();
    let sizes: Vec<u64> = if sizes.is_empty() { usual() } else { sizes };
    for size in if sizes.is_empty() { vec![SMALL] } else { sizes } {
        checkpoints(size, &folder.0, sink)?;
        changes(size, &folder.0, sink)?;
    }
    many::measure(&folder.0, sink)
}

fn own_path() -> String {
    kedge_again().get_program().to_string_lossy().into_owned()
}

/// Says that something that is installed cannot be compared with.
fn leave_out(said: &str) {
    said::warn(&format!("{said}; its figures are left out"));
}

/// What starts a program as a job.
fn as_a_job() -> Vec<String> {
    let kedge = own_path();
    [&kedge, "run", "--gpu", "none", "--"].map(str::to_owned).to_vec()
}

/// One loop, natively and as a job by turns.
fn costs(one: &Loop, sink: &mut Sink<'_>) -> Result<(), String> {
    let Loop { name, said, target, dmtcp } = *one;
    let job = as_a_job();
    let mut peers: Vec<_> = Peer::launchers().map(|peer| (peer, Vec::new())).collect();
    let mut ratios = Vec::new();
    for pair in 0..PAIRS {
        let mut times = [0.0; 2];
        // Whoever is second finds another machine than who is first.
        for turn in [pair % 2, 1 - pair % 2] {
            times[turn] = loop_of(name, if turn == 1 { &job } else { &[] })?;
        }
        ratios.push(times[1] / times[0]);
        if pair < PEER_PAIRS {
            peers.retain_mut(|((peer, launcher), ratios)| match loop_of(name, launcher) {
                Ok(time) => {
                    ratios.push(time / times[0]);
                    true
                }
                Err(error) => {
                    leave_out(&format!("{}: {said}: {error}", peer.name()));
                    false
                }
            });
        }
    }
    let mut sorted = ratios.clone();
    sorted.sort_by(f64::total_cmp);
    let (unit, limit) = ("× native", vec![sorted[PAIRS - RANK]]);
    let dmtcp = dmtcp.map(|ratio| Reference::new(ratio, "DMTCP", DMTCP));
    sink(Series::lower(said, unit, ratios).reference(dmtcp));
    sink(Series::lower(format!("{said}{LIMIT}"), unit, limit).target(target));
    for ((peer, _), ratios) in peers {
        sink(Series::lower(format!("{said} under {}", peer.name()), unit, ratios));
    }
    Ok(())
}

fn loop_of(name: &str, launcher: &[String]) -> Result<f64, String> {
    let mut command = launched(launcher, &own_path());
    let output = command.args(["probe", "loop", name]).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("cannot start kedge: {error}"))?;
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let complaint = || String::from_utf8_lossy(&output.stderr).trim().to_owned();
    said.parse().map_err(|_| complaint())
}

/// `program`, started by `launcher` if there is one.
fn launched(launcher: &[String], program: &str) -> Command {
    let mut words = launcher.iter().map(String::as_str).chain([program]);
    let mut command = Command::new(words.next().unwrap_or(program));
    command.args(words);
    command
}

fn starts(sink: &mut Sink<'_>) -> Result<(), String> {
    let timed = |launcher: &[String]| {
        let begin = Instant::now();
        let status = launched(launcher, "/bin/true").stdin(Stdio::null()).status();
        let taken = begin.elapsed().as_secs_f64() * 1e3;
        match status.map_err(|error| error.to_string())? {
            status if status.success() => Ok(taken),
            status => Err(format!("/bin/true: {status}")),
        }
    };
    let beyond = |launcher: &[String]| {
        let pair = |_| {
            let native = timed(&[])?;
            Ok(timed(launcher)? - native)
        };
        (0..PAIRS).map(pair).collect::<Result<Vec<f64>, String>>()
    };
    let row = Series::lower("start of /bin/true, beyond native", "ms", beyond(&as_a_job())?);
    sink(row.target(5.0).reference(Reference::new(27.0, "DMTCP", DMTCP)));
    for (peer, launcher) in Peer::launchers() {
        let name = format!("start of /bin/true under {}, beyond native", peer.name());
        match beyond(&launcher) {
            Ok(samples) => sink(Series::lower(name, "ms", samples)),
            Err(error) => leave_out(&format!("{}: {error}", peer.name())),
        }
    }
    Ok(())
}

/// Full checkpoints and restarts of a job that holds `size` bytes.
fn checkpoints(size: u64, dir: &Path, sink: &mut Sink<'_>) -> Result<(), String> {
    let named = |what: &str| format!("{what}, {}", Size(size));
    let [mut stalls, mut forked, mut gaps, mut cloned, mut lost] = [const { Vec::new() }; 5];
    let [mut durable, mut shares, mut fio_shares] = [const { Vec::new() }; 3];
    let [mut restarts, mut ratios, mut lazy] = [const { Vec::new() }; 3];
    let mut peers = Measured::none_yet();
    for round in 0..ROUNDS {
        let mut job = Job::start(size, dir, &[])?;
        let Written { taken, direct, fio } = write_by_turns(round, &job, size, dir)?;
        let seconds = taken.seconds.ok_or("the image did not become durable")?;
        stalls.push(taken.stall_seconds);
        durable.push(seconds);
        shares.push(direct / seconds);
        fio_shares.extend(fio.map(|fio| fio / seconds));
        job.tell(&format!("beat {}", 1.0 + 1.5 * seconds))?;
        let seen = job.checkpoint(&[])?;
        gaps.push(job.answer()?);
        plain::settle(&seen.image);
        let alone = job.checkpoint(&NOTHING_AHEAD)?;
        forked.push(alone.stall_seconds);
        plain::settle(&alone.image);
        job.tell("write 1")?;
        let seen = job.checkpoint(&NOTHING_AHEAD)?;
        cloned.push(job.answer()?);
        plain::settle(&seen.image);
        lost.push(lost_to_one(&mut job, size)?);
        job.end();
        let read = plain::read(&taken.image)?;
        let (restarted, seconds) = Job::restart(&taken.image, &[])?;
        restarts.push(seconds);
        ratios.push(seconds / read);
        restarted.end();
        // Others may not.
        if rustix::process::geteuid().is_root() {
            let (restarted, seconds) = Job::restart(&taken.image, &["--lazy"])?;
            lazy.push(seconds);
            restarted.end();
        }
        empty(dir)?;
        peers.retain_mut(|peer| match peer.round(size, dir) {
            Ok(()) => true,
            Err(said) => {
                leave_out(&said);
                false
            }
        });
    }
    let lower = |what: &str, samples| Series::lower(named(what), "s", samples);
    let by_dmtcp =
        || at(size, &[(4 * GIB, 0.26)]).map(|s| Reference::new(s, "DMTCP forked", DMTCP));
    let criu = at(size, &[(GIB, 0.46), (4 * GIB, 1.9)]).map(|s| Reference::new(s, "CRIU", CRIU));
    sink(lower(STALL, stalls).target(at(size, &PAUSES)).reference(by_dmtcp()));
    sink(lower(FORKED, forked).target(at(size, &PAUSES)).reference(by_dmtcp()));
    sink(lower(SEEN, gaps).target(at(size, &PAUSES)));
    sink(lower("the same where it only writes and is cloned", cloned));
    sink(lower("time lost to a checkpoint by a program that writes", lost));
    sink(lower("durable", durable));
    let share = |what: &str, unit, samples| Series::higher(named(what), unit, samples).target(0.9);
    sink(share("durable, as fast as direct writing", "of direct writing", shares));
    sink(share("durable, as fast as fio writes", "of fio's speed", fio_shares));
    sink(lower(RESTART, restarts).reference(criu));
    let beside = named("restart, beside two threads that read");
    sink(Series::lower(beside, "× reading", ratios).target(1.3));
    sink(lower("lazy restart to the first answer", lazy).target(0.1));
    for peer in peers {
        peer.series(&Size(size).to_string()).into_iter().for_each(&mut *sink);
    }
    Ok(())
}

/// A checkpoint, and what others need for as many bytes.
struct Written {
    taken: Taken,
    direct: f64,
    fio: Option<f64>,
}

/// Each is first in one round: disks are slower when they have just been written to.
fn write_by_turns(round: usize, job: &Job, size: u64, dir: &Path) -> Result<Written, String> {
    let (mut taken, mut direct, mut fio) = (None, f64::NAN, None);
    for turn in 0..3 {
        thread::sleep(REST);
        match (round + turn) % 3 {
            0 => taken = Some(job.checkpoint(&[])?),
            1 => direct = plain::write(dir, size)?,
            _ => {
                fio = peers::fio(dir, size).unwrap_or_else(|said| {
                    leave_out(&said);
                    None
                })
            }
        }
    }
    Ok(Written { taken: taken.ok_or("no checkpoint")?, direct, fio })
}

/// How much longer the same work takes if there is a checkpoint meanwhile.
fn lost_to_one(job: &mut Job, size: u64) -> Result<f64, String> {
    // Each page several times: about as long as the image needs.
    let order = format!("work {}", size / 4096 * 16);
    let alone = job.ask(&order)?;
    job.tell(&order)?;
    let taken = job.checkpoint(&[])?;
    let with = job.answer()?;
    let _ = fs::remove_dir_all(taken.image);
    Ok(with - alone)
}

/// Checkpoints of a job of which one page in a hundred has changed.
fn changes(size: u64, dir: &Path, sink: &mut Sink<'_>) -> Result<(), String> {
    let named = |what: &str| format!("{what}, {}", Size(size));
    let mut job = Job::start(size, dir, &["--incremental"])?;
    job.ask("dirty 1")?;
    let free = job.ask("dirty 1")?;
    let first = job.checkpoint(&[])?;
    let [mut stalls, mut durable, mut marks] = [const { Vec::new() }; 3];
    let pages = (size / 4096).max(100) as f64;
    for _ in 0..2 * ROUNDS {
        // The first write to each page finds it protected.
        marks.push((job.ask("dirty 1")? - free) / (pages / 100.0) * 1e6);
        let taken = job.checkpoint(&[])?;
        stalls.push(taken.stall_seconds);
        durable.push(taken.seconds.ok_or("the image did not become durable")?);
    }
    job.end();
    let lower = |what: &str, unit, samples| Series::lower(named(what), unit, samples);
    let first = vec![first.stall_seconds];
    sink(lower("first incremental checkpoint: the job stands still", "s", first));
    let stall = lower("1 % changed: the job stands still", "s", stalls);
    sink(stall.target(at(size, &[(4 * GIB, 0.03)])));
    let durable = lower("1 % changed: durable", "s", durable);
    sink(durable.target(at(size, &[(4 * GIB, 0.15)])));
    sink(lower("first write to a page after it", "µs more", marks));
    let newest = dir.to_owned();
    let (restarted, seconds) = Job::restart(&newest, &[])?;
    restarted.end();
    sink(lower("restart from a chain of 7, from the disk", "s", vec![seconds]));
    empty(dir)
}

/// Removes the images of a round; other files of the job's may lie beside them.
fn empty(dir: &Path) -> Result<(), String> {
    let entries = fs::read_dir(dir).map_err(|error| error.to_string())?;
    entries
        .flatten()
        .filter(|entry| entry.path().is_dir())
        .try_for_each(|entry| fs::remove_dir_all(entry.path()))
        .map_err(|e| e.to_string())
}
