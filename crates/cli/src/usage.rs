//! What jobs' processes use now, as /proc tells.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

/// All processes of this machine that the user may look at, at one moment.
#[derive(Debug, Default)]
pub(crate) struct Processes(BTreeMap<u32, Process>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Process {
    parent: u32,
    /// As the kernel keeps it: 15 bytes at most.
    name: String,
    resident: u64,
    processor: Duration,
}

/// A process of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) pid: u32,
    /// As the kernel keeps it: 15 bytes at most.
    pub(crate) name: String,
    /// Whether it is kedge's own.
    pub(crate) own: bool,
    /// Bytes; what several share is counted for each.
    pub(crate) resident: u64,
    pub(crate) processor: Duration,
}

/// What some processes use together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) processes: usize,
    /// Bytes; what several share is counted for each.
    pub(crate) resident: u64,
    /// Of those that live.
    pub(crate) processor: Duration,
}

/// What a job uses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct JobUsage {
    pub(crate) program: Usage,
    /// kedge's own processes of the job: software devices' memory is theirs.
    pub(crate) kedge: Usage,
}

impl Processes {
    pub(crate) fn now() -> Processes {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let read = |pid: u32| {
            // A process that has ended since is none.
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            Some((pid, Process::parse(&stat)?))
        };
        Processes(ids.filter_map(read).collect())
    }

    /// What descends from the supervisor of a job uses, and itself.
    pub(crate) fn of(&self, supervisor: u32) -> JobUsage {
        let mut usage = JobUsage::default();
        for member in self.members(supervisor) {
            let part = if member.own { &mut usage.kedge } else { &mut usage.program };
            part.processes += 1;
            part.resident += member.resident;
            part.processor += member.processor;
        }
        usage
    }

    /// What descends from the supervisor of a job, and itself, by process id.
    pub(crate) fn members(&self, supervisor: u32) -> Vec<Member> {
        let mut children = BTreeMap::<u32, Vec<u32>>::new();
        for (pid, process) in &self.0 {
            children.entry(process.parent).or_default().push(*pid);
        }
        let mut members = Vec::new();
        let mut waiting = vec![supervisor];
        while let Some(pid) = waiting.pop() {
            // Taken out: ids that are given anew while /proc is read could make a circle.
            waiting.extend(children.remove(&pid).unwrap_or_default());
            let Some(process) = self.0.get(&pid) else { continue };
            members.push(Member {
                pid,
                name: process.name.clone(),
                own: pid == supervisor || process.name.starts_with("kedge"),
                resident: process.resident,
                processor: process.processor,
            });
        }
        members.sort_by_key(|member| member.pid);
        members
    }
}

impl Process {
    /// Of /proc/PID/stat; None where it is not as proc(5) says.
    fn parse(stat: &str) -> Option<Process> {
        // The name may hold anything, parentheses too.
        let (start, rest) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let number = |place: usize| fields.get(place)?.parse::<u64>().ok();
        let ticks = number(11)? + number(12)?;
        let second = rustix::param::clock_ticks_per_second();
        Some(Process {
            parent: u32::try_from(number(1)?).ok()?,
            name: start.split_once('(')?.1.to_owned(),
            resident: number(21)? * rustix::param::page_size() as u64,
            processor: Duration::from_millis(ticks * 1000 / second),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(parent: u32, name: &str) -> Process {
        Process { parent, name: name.into(), resident: 10, processor: Duration::from_secs(1) }
    }

    #[test]
    fn a_job_is_what_descends_from_its_supervisor() {
        let all = [
            (1, process(0, "init")),
            (10, process(1, "kedge")),
            (11, process(10, "train")),
            (12, process(10, "kedge-proxy")),
            (13, process(11, "worker")),
            (14, process(1, "other")),
        ];
        let usage = Processes(all.into()).of(10);
        assert_eq!((usage.program.processes, usage.kedge.processes), (2, 2));
        assert_eq!(usage.program.resident, 20);
        assert_eq!(usage.kedge.processor, Duration::from_secs(2));
        assert_eq!(Processes::default().of(10), JobUsage::default());
    }

    #[test]
    fn a_circle_of_parents_ends() {
        let all = [(10, process(11, "kedge")), (11, process(10, "a"))];
        assert_eq!(Processes(all.into()).of(10).program.processes, 1);
    }

    #[test]
    fn names_may_hold_parentheses() {
        let stat = "7 (a) (b) S 3 7 7 0 -1 0 0 0 0 0 200 100 0 0 20 0 1 0 5 4096 3 0";
        let process = Process::parse(stat).expect("a process");
        assert_eq!((process.parent, process.name.as_str()), (3, "a) (b"));
        assert_eq!(process.resident, 3 * rustix::param::page_size() as u64);
        assert_eq!(Process::parse("7 (a"), None);
    }

    #[test]
    fn this_process_is_seen() {
        let usage = Processes::now().of(std::process::id());
        assert!(usage.kedge.processes >= 1 && usage.kedge.resident > 0, "{usage:?}");
    }
}
