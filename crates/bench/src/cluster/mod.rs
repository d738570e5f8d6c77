//! `kedge bench cluster`: what jobs over several hosts cost, by turns with the same without kedge.
//! It runs on the first host and enters the others by ssh, as MPI does; `scripts/bench-cluster`
//! makes hosts of namespaces.
//!
//! What each part counts, and the least work of it:
//!
//! - **mpi**: the seconds that NAS CG and LU tell of their own timed parts, under `kedge run --
//!   mpirun` and under `mpirun`, each first in every other pair. The least is nothing: no call of
//!   the programs is wrapped.
//! - **ranks**: a checkpoint of MPI ranks on all hosts, as `kedge checkpoint` tells how long the
//!   job stood still, and as the longest step of the program beside that. The least is a stop of
//!   each process, a clone of its page tables, and the coordinator's five barriers around them.
//!   Then restarts on other hosts, from the commands' start (ssh is there already) to a step in
//!   which every rank has taken part. The least is to read the image into fresh memory.
//! - **scp**: a file by `scp`, to nowhere, and through a remote shell, beside plain OpenSSH. The
//!   least of the first is the same, as what it starts is OpenSSH; of the second, its encryption.
//! - **jobs**: a move of a job of one process by `kedge migrate --host`: the longest gap that the
//!   program saw between two of its writes, by the time of day, in which the hosts have to agree.
//!   The least is what has changed within the last round, once over the line; a restart comes with
//!   it.
//! - **barriers**: processes on this host that meet at the coordinator by TCP, from one barrier to
//!   the next, and how many messages it read and wrote for each. The least is two messages a
//!   member: all have come only when the last one has.

pub(crate) mod barriers;
mod hosts;
mod jobs;
mod mpi;
mod ranks;
mod scp;

use super::parts::{Part, wanted};
use super::scratch::Scratch;
use hosts::Hosts;
use kedge_control::size::Size;
use kedge_probe::Series;
use std::path::Path;

/// Bytes of the ranks' memory in all, of the job that moves, and of the file.
const SIZES: [u64; 3] = [1 << 30, 4 << 30, 1 << 30];

type Sink<'a> = &'a mut dyn FnMut(Series);

/// What is asked for.
#[derive(Debug)]
pub(super) struct Asked<'a> {
    /// The first one is this host.
    pub(super) hosts: &'a [String],
    /// Where jobs are restarted.
    pub(super) spares: &'a [String],
    pub(super) sizes: &'a [u64],
    pub(super) rounds: Option<usize>,
    pub(super) dir: Option<&'a Path>,
    pub(super) parts: &'a [Part],
}

impl Asked<'_> {
    /// The bytes of one of three; one size stands for all.
    fn size(&self, which: usize) -> Result<u64, String> {
        match self.sizes {
            [] => Ok(SIZES[which]),
            [all] => Ok(*all),
            three @ [_, _, _] => Ok(three[which]),
            _ => Err("--size: give one size, or three: of the ranks, the job that moves, and the \
                      file"
                .into()),
        }
    }

    fn rounds(&self, usual: usize) -> usize {
        self.rounds.unwrap_or(usual).max(1)
    }
}

/// Measures and hands over each series as it is done.
pub(super) fn run(asked: &Asked<'_>, sink: Sink<'_>) -> Result<(), String> {
    let wanted = |part| wanted(asked.parts, part);
    let folder = Scratch::new(asked.dir)?;
    let hosts = Hosts::new(asked, &folder.0)?;
    if wanted(Part::Scp) {
        scp::run(&hosts, asked.size(2)?, asked.rounds(scp::PAIRS), sink)?;
    }
    if wanted(Part::Ranks) {
        ranks::run(&hosts, asked.size(0)?, asked.rounds(ranks::ROUNDS), sink)?;
    }
    if wanted(Part::Mpi) {
        mpi::run(&hosts, asked.rounds(mpi::PAIRS), sink)?;
    }
    if wanted(Part::Jobs) {
        jobs::run(&hosts, asked.size(1)?, asked.rounds(jobs::ROUNDS), sink)?;
    }
    if wanted(Part::Barriers) {
        barriers::run(&hosts, asked.rounds(barriers::ROUNDS), sink)?;
    }
    Ok(())
}

/// Has both do the same, in another order every other round: what came of each.
fn by_turns(
    round: usize,
    mut one: impl FnMut(usize) -> Result<f64, String>,
) -> Result<[f64; 2], String> {
    let mut seconds = [0.0; 2];
    for which in [round % 2, 1 - round % 2] {
        seconds[which] = one(which)?;
    }
    Ok(seconds)
}

/// The sample that bounds the median from above by 95 % or more, both sides together; `None` of
/// less than six.
fn upper_limit(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let count = sorted.len();
    // Of so many tosses of a coin, the chance of `heads` heads.
    let mut chance = 0.5f64.powi(i32::try_from(count).ok()?);
    let (mut below, mut rank) = (0.0, 0);
    while rank < count {
        below += chance;
        if below > 0.025 {
            break;
        }
        chance *= (count - rank) as f64 / (rank + 1) as f64;
        rank += 1;
    }
    rank.checked_sub(1).and_then(|rank| sorted.get(count - 1 - rank)).copied()
}

/// A name with its size.
fn sized(what: &str, size: u64) -> String {
    format!("{what}, {}", Size(size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_upper_limit_is_that_of_the_binomial_table() {
        let samples = |count: u32| (1..=count).map(f64::from).collect::<Vec<_>>();
        assert_eq!(upper_limit(&[]), None);
        assert_eq!(upper_limit(&samples(5)), None);
        // The sixth-largest of 20, the fourth-largest of 15, the largest of 6.
        for (count, limit) in [(20, 15.0), (15, 12.0), (6, 6.0)] {
            assert_eq!(upper_limit(&samples(count)), Some(limit), "{count}");
        }
    }

    #[test]
    fn one_size_stands_for_all() {
        let asked =
            |sizes| Asked { hosts: &[], spares: &[], sizes, rounds: None, dir: None, parts: &[] };
        assert_eq!(asked(&[]).size(1), Ok(4 << 30));
        assert_eq!(asked(&[7]).size(2), Ok(7));
        assert_eq!(asked(&[7, 8, 9]).size(1), Ok(8));
        assert!(asked(&[7, 8]).size(0).unwrap_err().contains("--size"));
    }
}
