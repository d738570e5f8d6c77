//! Ranks that Slurm starts, on real nodes of Slurm's: saved as one job, and brought back by steps
//! of other allocations.
use kedge_image::Manifest;
use kedge_left_out::left_out;
use kedge_tests::job::{User, send, steps_in, wait_for_steps};
use kedge_tests::mpi::with_device;
use kedge_tests::slurm::Slurm;
use kedge_tests::world::stderr;
use kedge_tests::{host, root};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// What the programs end with when all of their steps were right.
const WELL: i32 = 7;
const TIMEOUT: Duration = Duration::from_secs(60);

/// Nodes, and a job of two ranks on them.
pub(super) struct Site {
    pub(super) slurm: Slurm,
    /// What the ranks run.
    pub(super) program: Vec<String>,
    /// Their devices.
    gpu: &'static str,
}

impl Site {
    /// So many nodes, for a user's program of MPICH's that does so many steps; `None` where there
    /// can be none, which is counted.
    fn of_mpich(name: &str, user: User, nodes: usize, steps: u64) -> Option<Site> {
        Site::with("none", name, user, nodes, steps)
    }

    /// The same for one whose ranks use such devices.
    fn with(gpu: &'static str, name: &str, user: User, nodes: usize, steps: u64) -> Option<Site> {
        Site::on(Slurm::new(name, user, nodes)?, gpu, name, steps)
    }

    /// The same on nodes that there are.
    pub(super) fn on(slurm: Slurm, gpu: &'static str, name: &str, steps: u64) -> Option<Site> {
        let home = slurm.cluster.world.home();
        let mut compiler = Command::new("mpicc.mpich");
        compiler.arg("-O1").arg("-o").arg(home.join("mpi"));
        match gpu {
            "none" => compiler.arg(root().join("crates/process/tests/mpi.c")),
            _ => compiler.args(with_device(&home.join("mpi"))),
        };
        match compiler.status() {
            Err(error) => {
                left_out(name, &format!("mpicc.mpich: {error}: scripts/setup --tests"));
                return None;
            }
            Ok(status) => assert!(status.success(), "mpicc.mpich"),
        }
        // Hosts that are namespaces share what tells UCX of devices.
        let own = home.join("own_devices.so");
        let built = host("own_devices.c", "own_devices.so", &["-shared", "-fPIC"]);
        fs::copy(built, &own).expect("a file");
        let devices = home.join("devices");
        fs::create_dir(&devices).expect("a folder");
        for device in ["ka", "kb"] {
            symlink("/nowhere", devices.join(device)).expect("a link");
        }
        let (own, devices) = (own.display(), devices.display());
        let set = [format!("LD_PRELOAD={own}"), format!("KEDGE_DEVICES={devices}")];
        let program = ["env".to_owned()].into_iter().chain(set);
        let program = program.chain(["./mpi".to_owned(), steps.to_string()]).collect();
        Some(Site { slurm, program, gpu })
    }

    pub(super) fn home(&self) -> PathBuf {
        self.slurm.cluster.world.home()
    }

    /// kedge as `ranks` ranks of a step on these nodes.
    fn srun(&self, nodes: &[usize], ranks: usize, words: &[&str]) -> Command {
        let names: Vec<String> = nodes.iter().map(|node| Slurm::node(*node)).collect();
        let (names, count, ranks) = (names.join(","), nodes.len().to_string(), ranks.to_string());
        let kedge = self.slurm.kedge().display().to_string();
        let srun = ["srun", "--mpi=pmi2", "-J", "sim", "-O", "-w", &names, "-N", &count, "-n"];
        let mut command = self.slurm.command(&[&srun[..], &[&ranks, &kedge], words].concat());
        // Ranks on one node reach each other as others do.
        command.env("MPIR_CVAR_NOLOCAL", "1").env("UCX_TLS", "tcp,self");
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Starts the job on two nodes, which writes its steps to `out.0`.
    fn start(&self, options: &[&str], nodes: [usize; 2]) -> Child {
        let images = self.slurm.cluster.images();
        let run = ["run", "--gpu", self.gpu, "--job", "sim", "--ckpt-dir", &images];
        let program: Vec<&str> = self.program.iter().map(String::as_str).collect();
        let mut command = self.srun(&nodes, 2, &[&run[..], options, &["--"], &program].concat());
        command.stdout(File::create(self.home().join("out.0")).expect("a file"));
        command.spawn().expect("nsenter")
    }

    /// Restarts it, with its steps to `out.PART`.
    fn restart(&self, nodes: &[usize], part: usize) -> Child {
        let mut command = self.srun(nodes, 2, &["restart", &self.slurm.cluster.images()]);
        command.stdout(File::create(self.home().join(format!("out.{part}"))).expect("a file"));
        command.spawn().expect("nsenter")
    }

    fn checkpoint(&self, node: usize, more: &[&str]) {
        let saved = self.slurm.cluster.output(node, &[&["checkpoint", "sim"][..], more].concat());
        assert!(saved.status.success(), "{} {}", stderr(&saved), self.logs(node));
    }

    fn logs(&self, node: usize) -> String {
        let logs = ["sim.0", "sim.1"].map(|part| self.slurm.cluster.output(node, &["logs", part]));
        logs.map(|said| String::from_utf8_lossy(&said.stdout).into_owned()).concat()
    }

    /// Sends a signal to all tasks.
    pub(super) fn cancel(&self, signal: &str) {
        let cancelled = self.slurm.command(&["scancel", "-n", "sim", "--signal", signal]).output();
        let cancelled = cancelled.expect("nsenter");
        assert!(cancelled.status.success(), "{}", stderr(&cancelled));
    }

    /// Its steps in `out.PART`, `nonce step sum value` each, go on from one of those in the file
    /// before it, as those of an undisturbed run would, up to `last`.
    fn goes_on(&self, part: usize, last: u64) {
        let (before, after) = (steps_in(&self.home(), part - 1), steps_in(&self.home(), part));
        let number = |line: &str| line.split(' ').nth(1).and_then(|text| text.parse::<u64>().ok());
        let nonce = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
        let first = number(&after[0]).expect("a step");
        let reached = before.last().and_then(|line| number(line)).expect("a step");
        assert!(first > 1 && first <= reached + 1, "{:?}, {:?}", before.last(), after.first());
        for (expected, line) in (first..).zip(&after) {
            assert_eq!((nonce(line), number(line)), (nonce(&before[0]), Some(expected)));
            // What was done twice was done alike.
            let twice = before.iter().find(|line| number(line) == Some(expected));
            assert!(twice.is_none_or(|twice| twice == line), "{twice:?}, {line:?}");
        }
        assert_eq!(number(&after[after.len() - 1]), Some(last));
    }
}

/// What two ranks need.
const TWO: [&str; 2] = ["--nodes=2", "--ntasks=2"];

/// Jobs of a batch script.
impl Site {
    /// The line that starts the two ranks, or goes on with them.
    fn line(&self, options: &[&str]) -> String {
        format!(
            "srun --mpi=pmi2 {} run --gpu none --resume {} --job sim --ckpt-dir {} -- {}",
            self.slurm.kedge().display(),
            options.join(" "),
            self.slurm.cluster.images(),
            self.program.join(" ")
        )
    }

    /// Its steps go to `out.0`.
    pub(super) fn submit(&self, options: &[&str], lines: &str) {
        let script = format!(
            "#!/bin/sh
#SBATCH --job-name=sim
#SBATCH {options}
#SBATCH --requeue --open-mode=append
#SBATCH --output={home}/out.0 --error={home}/err.0
export MPIR_CVAR_NOLOCAL=1 UCX_TLS=tcp,self
echo start >&2
{lines}
",
            options = options.join(" "),
            home = self.home().display()
        );
        fs::write(self.home().join("script"), script).expect("a file");
        let submitted = self.slurm.command(&["sbatch", "script"]).output().expect("nsenter");
        assert!(submitted.status.success(), "{}", stderr(&submitted));
    }

    pub(super) fn said(&self) -> String {
        fs::read_to_string(self.home().join("err.0")).unwrap_or_default()
    }

    pub(super) fn wait(&self, is: impl Fn() -> bool) {
        let begin = Instant::now();
        while !is() {
            assert!(begin.elapsed() < TIMEOUT, "{} {}", self.said(), self.slurm.logs());
            thread::sleep(Duration::from_millis(50));
        }
    }

    pub(super) fn wait_for_lines(&self, lines: usize) {
        self.wait(|| steps_in(&self.home(), 0).len() >= lines);
    }

    /// Waits until the script has been started so often.
    pub(super) fn wait_for_starts(&self, starts: usize) {
        self.wait(|| self.said().lines().filter(|line| *line == "start").count() >= starts);
    }

    fn image(&self, number: u32) -> PathBuf {
        PathBuf::from(self.slurm.cluster.images()).join(format!("sim-{number:04}"))
    }

    /// All steps are in `out.0`; those that were done twice, by one program, alike.
    fn each_step_alike(&self, last: u64) {
        let mut steps = steps_in(&self.home(), 0);
        let backs = steps.windows(2).filter(|pair| number(&pair[1]) != number(&pair[0]) + 1);
        assert_eq!(backs.count(), 2, "{}", self.said());
        steps.sort_by_key(|line| number(line));
        steps.dedup();
        let numbers: Vec<u64> = steps.iter().map(|line| number(line)).collect();
        assert_eq!(numbers, (1..=last).collect::<Vec<_>>(), "{}", self.said());
    }

    /// All steps are in `out.0`, one after the other, by one program.
    pub(super) fn each_step_once(&self, last: u64) {
        let steps = steps_in(&self.home(), 0);
        let fields = |line: &String| line.split(' ').take(2).map(str::to_owned).collect::<Vec<_>>();
        let nonce = fields(&steps[0]).swap_remove(0);
        let of_another = steps
            .iter()
            .zip(1..)
            .find(|(line, number)| fields(line) != [nonce.clone(), u64::to_string(number)]);
        assert!(of_another.is_none(), "{of_another:?} {}", self.said());
        assert_eq!(steps.len() as u64, last);
    }
}

fn ended(child: Child) -> Output {
    child.wait_with_output().expect("ended")
}

/// Killed on two nodes, it comes back on two others; stopped there, on one.
#[test]
fn mpich_s_ranks_come_back_on_other_nodes_and_on_one() {
    const STEPS: u64 = 400;
    let Some(site) = Site::of_mpich("slurmm", User::Same, 4, STEPS) else { return };
    let first = site.start(&[], [0, 1]);
    wait_for_steps(&site.home(), 0, 20);
    site.checkpoint(1, &[]);
    site.cancel("KILL");
    ended(first);
    // Each rank restarts one part.
    let other = ended(
        site.srun(&[2], 3, &["restart", &site.slurm.cluster.images()]).spawn().expect("nsenter"),
    );
    let refusal = "the image has 2 parts and the step 3 ranks: give srun -n 2";
    assert!(stderr(&other).contains(refusal), "{}", stderr(&other));
    let second = site.restart(&[2, 3], 1);
    wait_for_steps(&site.home(), 1, 100);
    site.checkpoint(2, &["--stop"]);
    let reached = steps_in(&site.home(), 1).len();
    ended(second);
    assert_eq!(steps_in(&site.home(), 1).len(), reached, "nothing goes on before it is told to");
    let third = ended(site.restart(&[3], 2));
    assert_eq!(third.status.code(), Some(WELL), "{} {}", stderr(&third), site.logs(3));
    let all = steps_in(&site.home(), 1);
    let last = all.last().and_then(|line| line.split(' ').nth(1)?.parse().ok());
    site.goes_on(1, last.expect("a step"));
    site.goes_on(2, STEPS);
}

/// Ranks of one node, where nobody has told MPICH to use TCP: after a restart they would wait for
/// each other in memory that is not shared any more.
#[test]
fn ranks_that_share_memory_are_refused_by_name_and_go_on() {
    const STEPS: u64 = 200;
    let Some(site) = Site::of_mpich("slurmmem", User::Same, 2, STEPS) else { return };
    let images = site.slurm.cluster.images();
    let program: Vec<&str> = site.program.iter().map(String::as_str).collect();
    let run = ["run", "--gpu", "none", "--job", "sim", "--ckpt-dir", &images, "--"];
    let mut command = site.srun(&[0], 2, &[&run[..], &program].concat());
    command.env_remove("MPIR_CVAR_NOLOCAL").env_remove("UCX_TLS");
    command.stdout(File::create(site.home().join("out.0")).expect("a file"));
    let ranks = command.spawn().expect("nsenter");
    wait_for_steps(&site.home(), 0, 20);
    let refused = site.slurm.cluster.output(0, &["checkpoint", "sim"]);
    let said = stderr(&refused);
    assert!(!refused.status.success() && said.contains("shares memory"), "{said}");
    assert!(said.contains("MPIR_CVAR_NOLOCAL"), "{said}");
    let ended = ended(ranks);
    assert_eq!(ended.status.code(), Some(WELL), "{} {}", stderr(&ended), site.logs(0));
}

/// Ranks with a device each, and messages in the memory that devices copy from and to. Killed, they
/// come back on two other nodes; told to end there, once more.
#[test]
fn ranks_with_devices_come_back_on_other_nodes() {
    const STEPS: u64 = 200;
    let Some(site) = Site::with("soft", "slurmg", User::Nobody, 4, STEPS) else { return };
    let first = site.start(&LAST_WORD, [0, 1]);
    wait_for_steps(&site.home(), 0, 20);
    site.checkpoint(1, &[]);
    site.cancel("KILL");
    ended(first);
    let second = site.restart(&[2, 3], 1);
    wait_for_steps(&site.home(), 1, 50);
    // A rank's image counts as well if that cannot be noted.
    let hosts = site.home().join(Slurm::node(3)).join("kedge/hosts");
    let host = fs::read_dir(&hosts).expect("a folder").next().expect("one").expect("an entry");
    let in_the_way = host.path().join("jobs/sim.1/last.json");
    assert!(!in_the_way.exists(), "no image has been made in this step");
    fs::create_dir(&in_the_way).expect("a folder");
    site.cancel("TERM");
    let second = ended(second);
    assert!(site.logs(3).contains("last.json: "), "{}", site.logs(3));
    fs::remove_dir(&in_the_way).expect("a folder");
    assert_eq!(second.status.code(), Some(85), "{} {}", stderr(&second), site.logs(3));
    let third = ended(site.restart(&[2, 3], 2));
    assert_eq!(third.status.code(), Some(WELL), "{} {}", stderr(&third), site.logs(3));
    site.goes_on(2, STEPS);
}

/// A batch script whose next step goes on within the allocation, on other nodes: a rank's kedge is
/// killed, and then a node is lost.
#[test]
fn ranks_that_are_lost_go_back_in_another_step() {
    const STEPS: u64 = 600;
    let Some(site) = Site::of_mpich("slurml", User::Nobody, 6, STEPS) else { return };
    let line = site.line(&["--interval", "1s", "--keep", "2"]);
    let line = ends_at_once(&line).replacen("srun", "srun -N 2 -n 2 -w $nodes", 1);
    let lines = format!(
        "for nodes in a1,b1 c1,d1 e1,f1; do
    {line}
    echo start >&2
done"
    );
    site.submit(&["--nodes=6", "--ntasks=6", "--no-kill"], &lines);
    let wait_for_image = |step: usize| {
        site.wait_for_starts(step);
        let before = steps_in(&site.home(), 0).len();
        site.wait_for_lines(before + 20);
        let newest = || kedge_image::list(site.slurm.cluster.images().as_ref()).unwrap_or_default();
        let identity = || newest().first().map(|(_, manifest)| manifest.identity());
        let first = identity();
        site.wait(|| identity() != first);
    };
    wait_for_image(1);
    let parts = site.slurm.cluster.output(1, &["ps", "--json"]).stdout;
    let parts: Vec<Value> = serde_json::from_slice(&parts).expect("a list");
    send("KILL", &[parts[0]["supervisor"].as_u64().expect("a process") as u32]);
    wait_for_image(2);
    // Root alone can say so, and Slurm itself says it of who is silent for SlurmdTimeout.
    let lost = ["scontrol", "update", "nodename=d1", "state=down", "reason=lost"];
    let said = site.slurm.command_of(User::Same, &lost).output().expect("nsenter");
    assert!(said.status.success(), "{}", stderr(&said));
    site.wait_for_starts(4);
    site.each_step_alike(STEPS);
}

/// An ordinary user's batch script, at whose time limit its shell alone is told.
#[test]
fn a_script_that_is_requeued_goes_on_with_its_ranks() {
    const STEPS: u64 = 300;
    let Some(site) = Site::of_mpich("slurmq", User::Nobody, 2, STEPS) else { return };
    let (home, kedge) = (site.home(), site.slurm.kedge());
    let run = site.line(&["--incremental"]);
    site.submit(
        &TWO,
        &format!(
            "saved=
trap '{kedge} checkpoint sim --stop >&2 && saved=yes' TERM
{run} &
wait $!
status=$?
[ -z \"$saved\" ] || {{ wait; exit 85; }}
exit $status",
            kedge = kedge.display(),
        ),
    );
    wait_for_steps(&home, 0, 20);
    site.checkpoint(0, &[]);
    let words = ["scancel", "-n", "sim", "--batch", "--signal=TERM"];
    let told = site.slurm.command(&words).output().expect("nsenter");
    assert!(told.status.success(), "{}", stderr(&told));
    site.wait_for_lines(STEPS as usize);
    // What has changed since the first image, which both ranks go on from.
    let image = site.image(2);
    assert_eq!(fs::metadata(&image).expect("an image").uid(), User::Nobody.id());
    let second = Manifest::read(&image).expect("an image");
    assert!(second.parent.is_some_and(|parent| parent.name == "sim-0001"));
    site.each_step_once(STEPS);
}

/// A batch script of one line. SIGTERM reaches all processes of the step twice, and then one rank.
#[test]
fn ranks_that_are_told_to_end_are_saved_once_and_requeued() {
    const STEPS: u64 = 300;
    let Some(site) = Site::of_mpich("slurmt", User::Nobody, 2, STEPS) else { return };
    site.submit(&TWO, &ends_at_once(&site.line(&LAST_WORD)));
    site.wait_for_lines(20);
    site.cancel("TERM");
    site.cancel("TERM");
    site.wait_for_starts(2);
    let reached = steps_in(&site.home(), 0).len();
    site.wait_for_lines(reached + 20);
    let images = || fs::read_dir(site.slurm.cluster.images()).expect("images");
    let count = || images().filter(|it| !hidden(it.as_ref().expect("an entry"))).count();
    assert_eq!(count(), 1, "{}", site.said());
    // The second rank of the step that has gone on.
    let parts = site.slurm.cluster.output(1, &["ps", "--json"]).stdout;
    let parts: Vec<Value> = serde_json::from_slice(&parts).expect("a list");
    let second = parts.iter().find(|part| part["state"] == "running").expect("a job");
    assert_eq!(second["name"], "sim.1");
    send("TERM", &[second["supervisor"].as_u64().expect("a process") as u32]);
    site.wait_for_starts(3);
    site.wait_for_lines(STEPS as usize);
    assert_eq!(count(), 2, "{}", site.said());
    site.each_step_once(STEPS);
}

/// Ranks that are told while the job is checkpointed besides: no rank is late to end, which would
/// have it killed.
#[test]
fn ranks_end_together_whatever_is_asked_of_them_besides() {
    const STEPS: u64 = 120;
    let Some(site) = Site::of_mpich("slurmb", User::Nobody, 2, STEPS) else { return };
    let options = [&LAST_WORD[..], &["--interval", "1s", "--keep", "2"]].concat();
    site.submit(&TWO, &ends_at_once(&site.line(&options)));
    for start in 1..=2 {
        site.wait_for_starts(start);
        let before = steps_in(&site.home(), 0).len();
        site.wait_for_lines(before + 10);
        thread::sleep(Duration::from_millis(150 * start as u64));
        site.cancel("TERM");
    }
    site.wait_for_starts(3);
    site.wait_for_lines(STEPS as usize);
    site.each_step_once(STEPS);
}

/// What has ranks saved before they end.
const LAST_WORD: [&str; 4] = ["--on-term", "checkpoint,30s", "--requeue-exit", "85"];

/// A line of srun's that kills the ranks that are left when one ends with another status than 0.
fn ends_at_once(line: &str) -> String {
    line.replacen("srun", "srun --kill-on-bad-exit=1", 1)
}

/// The number of a step.
fn number(line: &str) -> u64 {
    line.split(' ').nth(1).and_then(|text| text.parse().ok()).expect("a step")
}

fn hidden(entry: &fs::DirEntry) -> bool {
    entry.file_name().to_string_lossy().starts_with('.')
}
