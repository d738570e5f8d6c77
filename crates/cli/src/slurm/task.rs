//! A task of Slurm's that has become kedge: the plugin has it start this program in the place of
//! its own, and says by three variables what that was. It becomes `kedge run`, or the batch script
//! where the steps are what is saved.

use super::options::{Given, Options, Unit};
use super::script;
use crate::{Failure, config};
use kedge_supervisor::jobs::JobName;
use kedge_supervisor::{CONFIG, is_one_of_ranks, kedge_again, resume};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Process, job and step (`script`: the batch script) of the task. Of another process it
/// is nobody's: what a task starts inherits it.
const TASK: &str = "KEDGE_SLURM_TASK";
/// The value of `--kedge`.
const OPTIONS: &str = "KEDGE_SLURM_OPTIONS";
/// The program that the task was to become.
const PROGRAM: &str = "KEDGE_SLURM_PROGRAM";
/// What is saved, `script` or `step`, and the job's number, for srun in it: the plugin refuses to
/// have it saved twice.
const INSIDE: &str = "KEDGE_SLURM";
/// Job and second since which the images of a script's steps count.
const SINCE: &str = "KEDGE_SLURM_SINCE";
/// What Slurm's commands take the option from (spank(7)).
const BY_USER: &str = "SLURM_SPANK__SLURM_SPANK_OPTION_kedge_kedge";
/// Has MPICH's ranks reach each other by what can be saved.
const MPICH: [(&str, &str); 2] = [("MPIR_CVAR_NOLOCAL", "1"), ("UCX_TLS", "tcp,self")];
/// What tells of GPUs that Slurm has given a job or a step.
const GPUS: [&str; 3] = ["SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"];

/// Becomes what the task is to be, if this process is a task that has become kedge. Returns only
/// where that fails.
pub(crate) fn called() -> Option<ExitCode> {
    let task = Task::of(std::process::id(), variable)?;
    let failure = task.and_then(|task| task.start());
    failure.err().map(|failure| failure.report())
}

fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

/// A task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Task {
    job: u32,
    /// Of the step; `None`: the batch script.
    step: Option<u32>,
    /// Whether Slurm has started the job before.
    again: bool,
    cluster: String,
    /// The index in an array of jobs.
    index: Option<u32>,
    /// The task's number in its step, where that has several which are no ranks.
    number: Option<u32>,
    given: Given,
}

impl Task {
    /// The one that these variables tell the process `own` of.
    fn of(own: u32, variable: impl Fn(&str) -> Option<OsString>) -> Option<Result<Task, Failure>> {
        let told = variable(TASK)?;
        let mut words = told.to_str()?.split(' ');
        if words.next()?.parse() != Ok(own) {
            return None;
        }
        let number = |name: &str| variable(name)?.to_str()?.parse::<u32>().ok();
        let mut read = || {
            let job = words.next()?.parse().ok()?;
            let step = match words.next()? {
                "script" => None,
                step => Some(step.parse().ok()?),
            };
            let index = match words.next()? {
                "-" => None,
                index => Some(index.parse().ok()?),
            };
            let several = step.is_some() && number("SLURM_STEP_NUM_TASKS").is_some_and(|n| n > 1);
            Some(Task {
                job,
                step,
                again: number("SLURM_RESTART_COUNT").is_some_and(|count| count > 0),
                cluster: named(variable("SLURM_CLUSTER_NAME").unwrap_or_default()),
                index,
                number: number("SLURM_PROCID").filter(|_| several && !is_one_of_ranks()),
                given: Given {
                    has_gpus: GPUS.iter().any(|name| {
                        variable(name).is_some_and(|value| !value.is_empty() && value != "0")
                    }),
                    tells_all: !is_in_group(&read_groups(), job),
                },
            })
        };
        Some(read().ok_or_else(|| {
            let told = told.to_string_lossy();
            Failure::new(format!("{TASK}={told}: Slurm's plugin is of another version of kedge"))
        }))
    }

    /// One to check options with.
    pub(super) fn example() -> Task {
        let (job, again) = (1, false);
        let (step, index, number) = (None, Some(0), None);
        let cluster = "cluster".to_owned();
        Task { job, step, again, cluster, index, number, given: Given::default() }
    }

    /// Becomes what the options say.
    fn start(&self) -> Result<(), Failure> {
        if variable("SLURM_HET_SIZE").is_some() {
            let words = "--kedge: a heterogeneous job is not saved: submit it without, or off";
            return Err(Failure::new(words));
        }
        let missing = |name: &str| Failure::new(format!("{TASK} is set, and {name} is not"));
        let text = variable(OPTIONS).ok_or_else(|| missing(OPTIONS))?;
        let text = text.to_string_lossy();
        let wrong =
            |error: &dyn std::fmt::Display| Failure::of_usage(format!("--kedge={text}: {error}"));
        let options: Options = text.parse().map_err(|error| wrong(&error))?;
        let program = PathBuf::from(variable(PROGRAM).ok_or_else(|| missing(PROGRAM))?);
        let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
        let script = match self.step {
            None => Some(
                script::read(&program)
                    .map_err(|error| Failure::new(format!("{}: {error}", program.display())))?,
            ),
            Some(_) => None,
        };
        let steps = |text: &Vec<u8>| match options.unit {
            Unit::Told => script::has_steps(text),
            unit => unit == Unit::Steps,
        };
        if options.off || script.as_ref().is_some_and(steps) {
            return Err(self.become_script(&program, &arguments, &text));
        }
        let name = self.job_name(&options, &program, &arguments).map_err(|error| wrong(&error))?;
        let words = options.words(&name, self.given);
        let dir = images(&words)?;
        if let (Some(dir), Some(since), None) = (&dir, self.since(), options.value("job")) {
            forget(dir, &name, since)?;
        }
        let program = match (&script, &dir) {
            (Some(text), Some(dir)) => script::keep(dir, &name, text).map_err(|error| {
                Failure::new(format!("{}: the script cannot be kept: {error}", dir.display()))
            })?,
            _ => program,
        };
        let mut run = again();
        run.arg("run").args(words).arg("--").arg(program).args(arguments);
        let saved = if script.is_some() { "script" } else { "step" };
        run.env(INSIDE, format!("{saved} {}", self.job));
        if is_one_of_ranks() {
            let unset = MPICH.iter().filter(|(name, _)| variable(name).is_none());
            run.envs(unset.copied());
        }
        Err(Failure::new(format!("cannot start kedge: {}", run.exec())))
    }

    /// Becomes the batch script, whose steps have the option from their environment.
    fn become_script(&self, program: &Path, arguments: &[OsString], options: &str) -> Failure {
        let mut script = Command::new(program);
        script.args(arguments);
        for name in [TASK, OPTIONS, PROGRAM, INSIDE] {
            script.env_remove(name);
        }
        script.env(BY_USER, options);
        match self.since() {
            Some(since) => script.env(SINCE, format!("{} {since}", self.job)),
            None => script.env_remove(SINCE),
        };
        Failure::new(format!("{}: {}", program.display(), script.exec()))
    }

    /// The job's name: the same line of a job that is requeued has the same.
    ///
    /// # Errors
    /// Says what is wrong with the name that is given.
    pub(super) fn job_name(
        &self,
        options: &Options,
        program: &Path,
        arguments: &[OsString],
    ) -> Result<String, String> {
        let mut name = match (options.value("job"), self.step) {
            (Some(pattern), _) => self.expanded(pattern)?,
            (None, None) => format!("{}-{}", self.cluster, self.job),
            (None, Some(_)) => {
                let base = program.file_name().unwrap_or_default();
                let of_program =
                    format!("{}-{:08x}", named(base.to_owned()), line(program, arguments));
                format!("{}-{}-{of_program}", self.cluster, self.job)
            }
        };
        let is_told = options.value("job").is_some_and(|pattern| pattern.contains("%t"));
        if let (Some(number), false) = (self.number, is_told) {
            name.push_str(&format!("-{number}"));
        }
        let checked: Result<JobName, _> = name.parse();
        checked.map(|_| name).map_err(|error| error.to_string())
    }

    /// A name with what its patterns stand for.
    fn expanded(&self, pattern: &str) -> Result<String, String> {
        let mut name = String::new();
        let mut rest = pattern.chars();
        while let Some(c) = rest.next() {
            match (c, if c == '%' { rest.next() } else { None }) {
                ('%', Some('j')) => name.push_str(&self.job.to_string()),
                ('%', Some('t')) => name.push_str(&self.number.unwrap_or(0).to_string()),
                ('%', Some('a')) => match self.index {
                    Some(index) => name.push_str(&index.to_string()),
                    None => return Err("job=: %a is of arrays, which this job is none of".into()),
                },
                ('%', other) => {
                    let other = other.map(String::from).unwrap_or_default();
                    return Err(format!("job=: %{other} stands for nothing: %j, %a and %t do"));
                }
                (c, _) => name.push(c),
            }
        }
        Ok(name)
    }

    /// Since when images count, in seconds since 1970: a job that Slurm starts for the first time
    /// has none, whatever job of another time had its number. `None`: all of them.
    fn since(&self) -> Option<u64> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        // An image counts that is newer.
        let now = now.saturating_sub(1);
        match self.step {
            None => (!self.again).then_some(now),
            Some(step) => {
                let told = variable(SINCE).and_then(|told| told.into_string().ok());
                let (job, since) = told.as_deref().and_then(|told| told.split_once(' ')).unzip();
                match job.is_some_and(|job| job.parse() == Ok(self.job)) {
                    true => since.and_then(|since| since.parse().ok()),
                    // No script has told: the first step of an allocation.
                    false if step == 0 && !self.again => Some(now),
                    false => None,
                }
            }
        }
    }
}

/// This process's control groups (cgroups(7)).
fn read_groups() -> String {
    std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default()
}

/// Whether Slurm has put the job's processes into a control group, by which it knows them: it
/// signals the first process of a task alone then. Otherwise it finds them by their parents or
/// their process group, and signals all of them (`ProctrackType` in slurm.conf(5)).
fn is_in_group(groups: &str, job: u32) -> bool {
    let folder = format!("job_{job}");
    groups.lines().any(|line| line.split('/').any(|part| part == folder))
}

/// Up to sixteen letters and digits that stand for `name` in a job's name.
fn named(name: OsString) -> String {
    let name = name.to_string_lossy();
    let name: String = name.chars().filter(char::is_ascii_alphanumeric).take(16).collect();
    if name.is_empty() { "slurm".to_owned() } else { name }
}

/// Tells a command line in its folder from others, today and by later versions (FNV-1a, folded).
fn line(program: &Path, arguments: &[OsString]) -> u32 {
    let folder = std::env::current_dir().unwrap_or_default();
    let words = [folder.as_os_str(), program.as_os_str()];
    let words = words.into_iter().chain(arguments.iter().map(OsString::as_os_str));
    let bytes = words.flat_map(|word: &OsStr| word.as_bytes().iter().chain(&[0]));
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    });
    (hash ^ (hash >> 32)) as u32
}

/// Where the images go of a job that is started by these words.
fn images(words: &[String]) -> Result<Option<PathBuf>, Failure> {
    let all = ["kedge", "run"].into_iter().chain(words.iter().map(String::as_str));
    let all = all.chain(["--", "true"]).map(OsString::from).collect();
    match config::check(all)?.command {
        crate::Command::Run(args) => args.images(),
        _ => Ok(None),
    }
}

/// Has images of the job not count that are older.
fn forget(dir: &Path, name: &str, since: u64) -> Result<(), Failure> {
    let job: JobName = name.parse().map_err(|error| Failure::new(format!("{error}")))?;
    let since = UNIX_EPOCH + Duration::from_secs(since);
    let forgotten = resume::forget_before(dir, &job, since);
    forgotten.map_err(|error| Failure::new(format!("{}: {error}", dir.display())))
}

/// This program, without what was said to this process alone.
fn again() -> Command {
    let mut again = kedge_again();
    match variable(CONFIG) {
        Some(file) => again.env(CONFIG, file),
        None => again.env_remove(CONFIG),
    };
    for name in [TASK, OPTIONS, PROGRAM, SINCE, BY_USER] {
        again.env_remove(name);
    }
    again.arg0("kedge");
    again
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(own: u32, variables: &[(&str, &str)]) -> Option<Result<Task, Failure>> {
        Task::of(own, |name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.into())
        })
    }

    #[test]
    fn the_variables_are_one_process_s() {
        let count = ("SLURM_RESTART_COUNT", "1");
        let told = [(TASK, "7 120 script -"), ("SLURM_CLUSTER_NAME", "alps"), count];
        assert!(of(8, &told).is_none() && of(7, &[]).is_none());
        let task = of(7, &told).expect("a task").expect("read");
        assert_eq!((task.job, task.step, task.again), (120, None, true));
        // Of another job, which has submitted this one.
        let inherited = [("SLURM_ARRAY_TASK_ID", "5"), (TASK, "7 120 script -")];
        let index = |told: &[(&str, &str)]| of(7, told).expect("a task").expect("read").index;
        assert_eq!((index(&inherited), index(&[(TASK, "7 120 script 4")])), (None, Some(4)));
        let step = [(TASK, "7 120 3 -"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_PROCID", "1")];
        let task = of(7, &step).expect("a task").expect("read");
        assert_eq!((task.step, task.number, task.again), (Some(3), Some(1), false));
        for bad in ["7", "7 x 3", "7 1 batch", "7 1", "7 1 -2", "7 1 0", "7 1 0 x"] {
            assert!(of(7, &[(TASK, bad)]).expect("told").is_err(), "{bad}");
        }
    }

    #[test]
    fn devices_are_what_slurm_has_given() {
        let with = |name, value| {
            let task = of(7, &[(TASK, "7 1 0 -"), (name, value)]);
            task.expect("a task").expect("read").given.has_gpus
        };
        assert!(with("SLURM_JOB_GPUS", "0,1") && with("SLURM_GPUS_ON_NODE", "2"));
        assert!(!with("SLURM_GPUS_ON_NODE", "0") && !with("CUDA_VISIBLE_DEVICES", "0"));
    }

    #[test]
    fn slurm_s_control_groups_are_known() {
        for there in [
            "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n",
            "4:freezer:/slurm/uid_1000/job_7/step_batch\n1:name=systemd:/system.slice\n",
        ] {
            assert!(is_in_group(there, 7) && !is_in_group(there, 70), "{there}");
        }
        assert!(!is_in_group("0::/system.slice/slurmd.service\n", 7) && !is_in_group("", 7));
    }

    #[test]
    fn names_are_the_line_s() {
        let of = |step, number, options: &str, words: &[&str]| {
            let task = Task { step, number, index: None, ..Task::example() };
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            task.job_name(&options.parse().expect("options"), "bin/my sim".as_ref(), &words)
        };
        assert_eq!(of(None, None, "on", &[]).unwrap(), "cluster-1");
        let first = of(Some(0), None, "on", &["1"]).unwrap();
        assert!(first.starts_with("cluster-1-mysim-"), "{first}");
        assert_eq!(of(Some(4), None, "on", &["1"]).unwrap(), first);
        assert_eq!(of(Some(4), Some(3), "on", &["1"]).unwrap(), format!("{first}-3"));
        let others = [of(Some(0), None, "on", &["1", ""]), of(Some(0), None, "on", &["2"])];
        assert!(others.iter().all(|other| other.as_ref().unwrap() != &first));
        assert_eq!(of(Some(0), Some(3), "job=a-%j", &[]).unwrap(), "a-1-3");
        assert_eq!(of(Some(0), Some(3), "job=a-%t-b", &[]).unwrap(), "a-3-b");
        for bad in ["job=a/b", "job=%a", "job=%x", "job=%"] {
            assert!(of(None, None, bad, &[]).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_longest_name_is_one() {
        let (job, number) = (u32::MAX, Some(u32::MAX));
        let cluster = named("c".repeat(40).into());
        let task = Task { job, step: Some(1), number, cluster, ..Task::example() };
        let long = "p".repeat(300);
        assert!(task.job_name(&Options::default(), long.as_ref(), &[]).is_ok());
    }
}
