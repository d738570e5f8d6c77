//! Parts of a bench that can be asked for alone.

use super::What;
use clap::ValueEnum;

/// A part of the figures of `bench process`, `bench far`, `bench migrate` or `bench cluster`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Part {
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
    pub(super) fn check(parts: &[Part], what: What) -> Result<(), String> {
        let Some(wrong) = parts.iter().find(|part| part.of() != what) else { return Ok(()) };
        let name = wrong.to_possible_value().map(|value| value.get_name().to_owned());
        let (name, of) = (name.unwrap_or_default(), wrong.of().name());
        Err(format!("--parts {name}: that is a part of `kedge bench {of}`"))
    }
}

/// Whether `part` is asked for, where none means all.
pub(super) fn wanted(parts: &[Part], part: Part) -> bool {
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
