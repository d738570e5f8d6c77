//! What is measured, and what of it can be asked for alone.

use clap::ValueEnum;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// What driver calls cost the program, in microseconds
    Calls,
    /// Copies to, from and on the device, beside this machine's memcpy
    Copy,
    /// Instructions that each core of the device executes, from kernels that need no compiler
    Soft,
    /// How fast memory becomes a durable image and how large that is, by codec: the tables of the
    /// CRUM paper. Random floats; then the arrays of a multigrid and of a sparse solver. Forked:
    /// how long a job with that memory stands still
    Codecs,
    /// How long 256 processes of one job wait for each other at a barrier
    Barriers,
    /// What programs see of a folder that `kedge cache` absorbs the writes of, by turns with tmpfs
    /// and with the file system below. Takes root, and 1.5 GiB of memory and disk
    Cache,
    /// What `bench cache` starts
    #[value(hide = true)]
    Writers,
    /// What jobs of processes cost: while they run, at checkpoints, at restarts; each beside the
    /// same without kedge, by turns, and beside DMTCP, CRIU (as root) and fio where PATH leads to
    /// them. Takes some minutes
    Process,
    /// What checkpoints of a job that uses a device cost the program, by its own clock; the second
    /// where 5 % of the memory has changed; what another program on the device notices; the
    /// driver's own checkpoint beside it. Takes a minute or more for each size
    Checkpoint,
    /// What being a job that can be checkpointed costs a program that uses a GPU, while it is not:
    /// by turns with the same program on the machine's own driver
    Cost,
    /// What it costs that a program's devices are on another machine: by turns with devices of this
    /// one (--gpu) and with the line itself, over a connection of its own with the same encryption
    Far,
    /// How long a program stands still while its devices move, by its own clock, and how long a
    /// move takes; between software devices of this machine, and to those of a server over loopback
    /// and back (--to: another server), beside what that line carries; what being able to move
    /// costs a call; an iterative program that comes home after a part of its steps
    Migrate,
    /// What managed memory costs a program that holds much of it, by turns with the same program
    /// without: launches, first touches by the host, and a dot product of twice what the device may
    /// have, with the pause of its checkpoint. Takes a minute or more
    Managed,
    /// What jobs over several hosts cost (--host): an MPI program while it runs, checkpoints of
    /// ranks and restarts on other hosts (--spare), files by scp and through remote shells, the
    /// move of a whole job, barriers of 1,000 processes over TCP. By turns with the same without
    /// kedge. `scripts/bench-cluster DIR` makes hosts of namespaces for it. Takes 40 minutes
    Cluster,
}

impl What {
    /// Returns its name, as people give it.
    pub fn name(self) -> String {
        name(self)
    }
}

/// A part of the figures of `bench process`, `bench far`, `bench migrate` or `bench cluster`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// process: how long jobs of many processes or threads stand still, and restarts of such
    Many,
    /// far: calls that wait, and posted ones
    Calls,
    /// far: many small kernels, and a wait
    Kernels,
    /// far: copies of 64 MiB, beside what one connection of TCP carries
    Copies,
    /// far: 200 launches and one value read back
    Steps,
    /// far: from the program's start to its first launch
    Connect,
    /// far: processor time of both proxies
    Processors,
    /// migrate: how long a program stands still, and what it does meanwhile
    Pauses,
    /// migrate: all of a program's memory, beside what the line carries
    Whole,
    /// migrate: many small regions beside a large one
    Regions,
    /// migrate: what it costs a call that a move or a restart can repeat it
    Record,
    /// migrate: an iterative program that is moved home after a quarter, a half and three quarters
    /// of its steps, beside the same program here and there: figure 13 of the mrCUDA paper
    Iterations,
    /// cluster: what an MPI program over hosts loses by being a job
    Mpi,
    /// cluster: checkpoints of MPI ranks on all hosts, and restarts on others
    Ranks,
    /// cluster: files to another host
    Scp,
    /// cluster: the move of a whole job
    Jobs,
    /// cluster: barriers of 1,000 processes over TCP, and of 10,000 members simulated
    Barriers,
}

impl Part {
    fn of(self) -> What {
        match self {
            Part::Many => What::Process,
            Part::Calls | Part::Kernels | Part::Copies => What::Far,
            Part::Steps | Part::Connect | Part::Processors => What::Far,
            Part::Pauses | Part::Whole | Part::Regions => What::Migrate,
            Part::Record | Part::Iterations => What::Migrate,
            Part::Mpi | Part::Ranks | Part::Scp | Part::Jobs | Part::Barriers => What::Cluster,
        }
    }

    /// Says which of them, if any, is no part of `what`.
    pub(crate) fn check(parts: &[Part], what: What) -> Result<(), String> {
        let Some(wrong) = parts.iter().find(|part| part.of() != what) else { return Ok(()) };
        let (name, of) = (name(*wrong), wrong.of().name());
        Err(format!("--parts {name}: that is a part of `kedge bench {of}`"))
    }
}

fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Whether `part` is asked for, where none means all.
pub(crate) fn wanted(parts: &[Part], part: Part) -> bool {
    parts.is_empty() || parts.contains(&part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_another_bench_is_named() {
        assert_eq!(Part::check(&[], What::Calls), Ok(()));
        assert_eq!(Part::check(&[Part::Calls, Part::Steps], What::Far), Ok(()));
        let said = Part::check(&[Part::Whole, Part::Steps], What::Migrate).unwrap_err();
        assert!(said.contains("--parts steps") && said.contains("bench far"), "{said}");
    }

    #[test]
    fn all_parts_are_wanted_where_none_is_named() {
        assert!(wanted(&[], Part::Record));
        assert!(wanted(&[Part::Record], Part::Record) && !wanted(&[Part::Record], Part::Whole));
    }
}
