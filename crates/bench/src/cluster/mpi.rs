//! What an MPI program over hosts loses by being a job.

use super::hosts::{Hosts, as_root_too, said};
use super::{Sink, by_turns, upper_limit};
use crate::process::LIMIT;
use kedge_probe::Series;
use std::process::Command;
use std::time::Instant;

/// Pairs of each; the sixth-largest of 20 bounds the median.
pub(super) const PAIRS: usize = 20;

/// A program of the NAS Parallel Benchmarks.
struct Program {
    name: &'static str,
    source: &'static str,
    /// Ranks, hosts, the problem and how often it is solved: some seconds on two cores.
    shapes: &'static [(usize, usize, [&'static str; 2])],
}

const PROGRAMS: [Program; 2] = [
    Program {
        name: "CG",
        source: include_str!("cg.c"),
        shapes: &[(2, 2, ["A", "3"]), (4, 4, ["A", "2"]), (16, 4, ["W", "1"])],
    },
    // Each rank has two rows of the grid at least, and waits for its neighbour's at each plane.
    Program {
        name: "LU",
        source: include_str!("lu.c"),
        shapes: &[(2, 2, ["W", "1"]), (4, 4, ["W", "1"])],
    },
];

pub(super) fn run(hosts: &Hosts, pairs: usize, sink: Sink<'_>) -> Result<(), String> {
    hosts.written("nas.h", include_str!("nas.h"))?;
    for Program { name, source, shapes } in PROGRAMS {
        let program = hosts.compiled(&name.to_lowercase(), source)?;
        for (ranks, most, work) in shapes {
            let on = hosts.first(*most);
            // With fewer hosts the same shape comes twice.
            if on.len() < *most {
                continue;
            }
            let mut words = hosts.mpirun(on, *ranks);
            words.push(program.display().to_string());
            words.extend(work.map(str::to_owned));
            let name = format!("NAS {name}, {ranks} ranks on {most} hosts");
            compare(hosts, &name, pairs, &words, sink)?;
        }
    }
    Ok(())
}

fn compare(
    hosts: &Hosts,
    name: &str,
    pairs: usize,
    words: &[String],
    sink: Sink<'_>,
) -> Result<(), String> {
    let [mut natives, mut ratios, mut beyond] = <[Vec<f64>; 3]>::default();
    for pair in 0..pairs {
        let mut whole = [0.0; 2];
        let times = by_turns(pair, |which| {
            let job = (which == 1).then(|| hosts.as_a_job(&hosts.job("nas")));
            let begin = Instant::now();
            let told = solve(job, words)?;
            whole[which] = begin.elapsed().as_secs_f64();
            Ok(told)
        })?;
        natives.push(times[0]);
        ratios.push(times[1] / times[0]);
        beyond.push(whole[1] - whole[0]);
    }
    sink(Series::lower(format!("{name}, natively"), "s", natives));
    let limit = upper_limit(&ratios).into_iter().collect();
    sink(Series::lower(name, "× native", ratios));
    sink(Series::lower(format!("{name}{LIMIT}"), "× native", limit).target(1.02));
    sink(Series::lower(format!("{name}: the whole command, beyond native"), "s", beyond));
    Ok(())
}

/// The seconds that the program tells of itself.
fn solve(job: Option<Command>, words: &[String]) -> Result<f64, String> {
    let mut words = words.iter();
    let first = words.next().ok_or("no command")?;
    let mut command = match job {
        Some(mut job) => {
            job.arg(first);
            job
        }
        None => Command::new(first),
    };
    let text = said(as_root_too(&mut command).args(words))?;
    text.parse().map_err(|_| format!("the program said `{text}`"))
}
