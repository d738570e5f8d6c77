//! `--kedge` of sbatch and srun: jobs of a real Slurm with kedge's plugin, whose scripts say
//! nothing of kedge.
use super::slurm::Site;
use kedge_tests::job::{User, steps_in};
use kedge_tests::slurm::Slurm;
use kedge_tests::world::stderr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Output;
use std::thread;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(60);
/// What the scripts end with.
const WELL: i32 = 7;

/// A batch script that does its steps itself, unchanged, whatever saves it.
fn script(steps: u64) -> String {
    format!(
        "#!/bin/bash
#SBATCH --requeue --open-mode=append
nonce=$RANDOM$RANDOM
for ((step = 1; step <= {steps}; step++)); do
    echo \"$nonce $step $1\"
    sleep 0.02
done
exit {WELL}
"
    )
}

/// Nodes with the plugin.
struct Nodes(Slurm);

impl Nodes {
    fn new(name: &str, nodes: usize) -> Option<Nodes> {
        Slurm::with_plugin(name, User::Nobody, nodes).map(Nodes)
    }

    fn home(&self) -> PathBuf {
        self.0.cluster.world.home()
    }

    /// A command of Slurm's, to its end.
    fn does(&self, words: &[&str]) -> Output {
        self.0.command(words).output().expect("nsenter")
    }

    /// The same by root.
    fn manages(&self, words: &[&str]) {
        let done = self.0.command_of(User::Same, words).output().expect("nsenter");
        assert!(done.status.success(), "{words:?}: {}", stderr(&done));
    }

    /// Submits the file `script` of this text, with --kedge and more; its output goes to `out.N`, N
    /// being the job's index in an array, or 0.
    fn submit(&self, kedge: &str, more: &[&str], text: &str) -> Output {
        fs::write(self.home().join("script"), text).expect("a file");
        let kedge = format!("--kedge={kedge}");
        let (to, errors) = (self.home().join("out.%a"), self.home().join("err"));
        let output = format!("--output={}", to.display());
        let array =
            if more.iter().any(|word| word.starts_with("--array")) { "" } else { "--array=0" };
        let errors = format!("--error={}", errors.display());
        let words = ["sbatch", &kedge, &output, &errors].into_iter().chain(more.iter().copied());
        let words: Vec<&str> = words.chain([array]).filter(|word| !word.is_empty()).collect();
        self.does(&[&words[..], &["script", "word"]].concat())
    }

    /// Submits a script of these lines that submits `next`, and waits for that one's end: what it
    /// has written.
    fn submit_next(&self, kedge: &str, lines: &str, next: &str) -> String {
        fs::write(self.home().join("next"), next).expect("a file");
        let lines = format!("#!/bin/sh\n{lines}sbatch --output=next.out next\n");
        let submitted = self.submit(kedge, &[], &lines);
        assert!(submitted.status.success(), "{}", stderr(&submitted));
        let next = || {
            let said = self.does(&["scontrol", "show", "job", "-o", "2"]);
            String::from_utf8_lossy(&said.stdout).into_owned()
        };
        self.wait("an end", || {
            next().contains(" JobState=COMPLETED ") || next().contains(" JobState=FAILED ")
        });
        let said = fs::read_to_string(self.home().join("next.out")).expect("a file");
        assert!(says(&next(), &format!("ExitCode={WELL}:0")), "{said}");
        said
    }

    /// What Slurm says of a task of the first array.
    fn job(&self, index: u32) -> String {
        let said = self.does(&["scontrol", "show", "job", "-o", &format!("1_{index}")]);
        String::from_utf8_lossy(&said.stdout).into_owned()
    }

    fn wait(&self, what: &str, is: impl Fn() -> bool) {
        let begin = Instant::now();
        while !is() {
            let said = || fs::read_to_string(self.home().join("err")).unwrap_or_default();
            let waits = begin.elapsed() < TIMEOUT;
            assert!(waits, "{what}: {} {} {}", self.job(0), said(), self.0.logs());
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn wait_for_lines(&self, part: usize, lines: usize) {
        self.wait("lines", || steps_in(&self.home(), part).len() >= lines);
    }

    fn images(&self) -> String {
        self.0.cluster.images()
    }

    /// All of the steps are there once, by one program.
    fn each_step_once(&self, part: usize, last: u64) {
        let steps = steps_in(&self.home(), part);
        let nonce = steps[0].split(' ').next().expect("a nonce").to_owned();
        let all = (1..=last).map(|step| format!("{nonce} {step} word"));
        let wrong = steps.iter().zip(all).find(|(there, right)| *there != right);
        assert!(wrong.is_none(), "{wrong:?}");
        assert_eq!(steps.len() as u64, last);
    }
}

/// Whether Slurm says so of a job, in a word of its own.
fn says(job: &str, word: &str) -> bool {
    job.split_whitespace().any(|said| said == word)
}

/// Told to end, a script is saved, queued again by its status, and goes on in the middle on another
/// node, where Slurm has its copy at another path. Its status in the end is the job's.
#[test]
fn a_script_goes_on_on_another_node() {
    const STEPS: u64 = 400;
    let Some(nodes) = Nodes::new("spanks", 2) else { return };
    let options = format!("interval=1s,keep=2,ckpt-dir={}", nodes.images());
    let submitted = nodes.submit(&options, &["-w", "a1"], &script(STEPS));
    assert!(submitted.status.success(), "{}", stderr(&submitted));
    nodes.wait_for_lines(0, 40);
    assert!(says(&nodes.job(0), "BatchHost=a1"), "{}", nodes.job(0));
    nodes.manages(&["scontrol", "update", "nodename=a1", "state=drain", "reason=test"]);
    let told = nodes.does(&["scancel", "--batch", "--signal=TERM", "1_0"]);
    assert!(told.status.success(), "{}", stderr(&told));
    nodes.wait("a requeue", || says(&nodes.job(0), "Restarts=1"));
    nodes.manages(&["scontrol", "update", "jobid=1_0", "reqnodelist="]);
    nodes.wait_for_lines(0, STEPS as usize);
    nodes.wait("an end", || says(&nodes.job(0), &format!("ExitCode={WELL}:0")));
    assert!(says(&nodes.job(0), "BatchHost=b1"), "{}", nodes.job(0));
    nodes.each_step_once(0, STEPS);
}

/// Each task of an array is a job of its own, with a name by its pattern.
#[test]
fn each_task_of_an_array_goes_on_by_itself() {
    const STEPS: u64 = 300;
    let Some(nodes) = Nodes::new("spanka", 2) else { return };
    let options = format!("job=sim-%a,ckpt-dir={}", nodes.images());
    let submitted = nodes.submit(&options, &["--array=0-1"], &script(STEPS));
    assert!(submitted.status.success(), "{}", stderr(&submitted));
    (0..2).for_each(|part| nodes.wait_for_lines(part, 20));
    let told = nodes.does(&["scancel", "--batch", "--signal=TERM", "1"]);
    assert!(told.status.success(), "{}", stderr(&told));
    for part in 0..2 {
        nodes.wait("a requeue", || says(&nodes.job(part), "Restarts=1"));
        nodes.wait_for_lines(part as usize, STEPS as usize);
        nodes.each_step_once(part as usize, STEPS);
        let image = PathBuf::from(nodes.images()).join(format!("sim-{part}-0001"));
        assert!(image.exists(), "{}", image.display());
    }
}

/// A step that is no rank, and whose processes are all told to end, is saved: SIGTERM is withheld
/// from them, as Slurm has no control groups here.
#[test]
fn a_step_whose_processes_are_all_told_goes_on() {
    const STEPS: u64 = 300;
    let Some(nodes) = Nodes::new("spankw", 2) else { return };
    let options = format!("on,ckpt-dir={}", nodes.images());
    let program = nodes.home().join("program");
    fs::write(&program, script(STEPS)).expect("a file");
    fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).expect("mine");
    let lines = "#!/bin/sh\n#SBATCH --requeue --open-mode=append\nsrun ./program word\n";
    let submitted = nodes.submit(&options, &[], lines);
    assert!(submitted.status.success(), "{}", stderr(&submitted));
    nodes.wait_for_lines(0, 20);
    let told = nodes.does(&["scancel", "--signal=TERM", "1_0"]);
    assert!(told.status.success(), "{}", stderr(&told));
    nodes.wait("a requeue", || says(&nodes.job(0), "Restarts=1"));
    nodes.wait("an end", || says(&nodes.job(0), &format!("ExitCode={WELL}:0")));
    nodes.each_step_once(0, STEPS);
}

/// Ranks of a script's step: what saves them is an option of sbatch alone.
#[test]
fn ranks_go_on_by_an_option_of_sbatch() {
    const STEPS: u64 = 300;
    let Some(slurm) = Slurm::with_plugin("spankm", User::Nobody, 2) else { return };
    let Some(site) = Site::on(slurm, "none", "spankm", STEPS) else { return };
    let program = site.program.join(" ");
    let option = format!("--kedge=interval=1s,keep=2,ckpt-dir={}", site.slurm.cluster.images());
    site.submit(
        &["--nodes=2", "--ntasks=2", &option],
        &format!("unset MPIR_CVAR_NOLOCAL UCX_TLS\nsrun --kill-on-bad-exit=1 --mpi=pmi2 {program}"),
    );
    for start in 1..=2 {
        site.wait_for_starts(start);
        let before = steps_in(&site.home(), 0).len();
        site.wait_for_lines(before + 20);
        if start == 1 {
            site.cancel("TERM");
        }
    }
    site.wait_for_lines(STEPS as usize);
    site.each_step_once(STEPS);
}

/// What Slurm gives a task, and takes from it, is what it was without kedge.
#[test]
fn a_task_is_started_as_without_kedge() {
    let Some(nodes) = Nodes::new("spankt", 2) else { return };
    let prolog = nodes.home().join("prolog");
    fs::write(&prolog, "#!/bin/sh\necho export SEEN=prolog\n").expect("a file");
    fs::set_permissions(&prolog, PermissionsExt::from_mode(0o755)).expect("mine");
    let prolog = format!("--task-prolog={}", prolog.display());
    let tells = "echo $SEEN $(ulimit -n) $SLURM_PROCID $KEDGE_JOB; env | grep -c -e SPANK -e KEDGE_SLURM_; exit 3";
    let srun = ["prlimit", "--nofile=500:4096", "srun", "-n", "1", &prolog];
    let of = |option: &str| {
        let done = nodes.does(&[&srun[..], &[option, "sh", "-c", tells]].concat());
        (String::from_utf8_lossy(&done.stdout).into_owned(), done.status.code(), stderr(&done))
    };
    let (said, status, errors) = of("--kedge=on");
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].starts_with("prolog 500 0 kedge-1-sh-"), "{said} {errors}");
    assert_eq!((lines[1], status), ("0", Some(3)), "{errors}");
    assert_eq!(of("--kedge=off").0, "prolog 500 0\n0\n");
}

/// A job that a saved script submits is another one, whose steps may be saved.
#[test]
fn what_a_saved_script_submits_is_another_job() {
    let Some(nodes) = Nodes::new("spankn", 2) else { return };
    let option = format!("on,ckpt-dir={}", nodes.images());
    let next = format!("#!/bin/sh\nsrun --kedge={option} true && srun true && exit {WELL}\n");
    let said = nodes.submit_next(&option, "", &next);
    assert!(!said.contains("kedge"), "{said}");
}

/// One that a script submits whose steps are saved has no option either, as srun has there.
#[test]
fn what_a_script_with_steps_submits_is_not_saved() {
    let Some(nodes) = Nodes::new("spankp", 2) else { return };
    let option = format!("on,ckpt-dir={}", nodes.images());
    let next = format!("#!/bin/sh\necho job=$KEDGE_JOB; exit {WELL}\n");
    let step = "srun sh -c 'test -n \"$KEDGE_JOB\"' || exit 1\n";
    assert_eq!(nodes.submit_next(&option, step, &next), "job=\n");
}

/// What cannot be is refused where it is asked for, in kedge's words, or by the task.
#[test]
fn what_cannot_be_is_refused() {
    let Some(nodes) = Nodes::new("spankr", 2) else { return };
    let refused = |done: Output, words: &str| {
        assert!(!done.status.success() && stderr(&done).contains(words), "{}", stderr(&done));
    };
    let mistyped = "`intervall=10m` is nothing that --kedge takes: did you mean interval?";
    refused(nodes.submit("intervall=10m", &[], &script(1)), mistyped);
    refused(nodes.does(&["srun", "--kedge=interval=10x", "true"]), "`10x` is no time");
    refused(nodes.does(&["srun", "--kedge=", "true"]), "nothing is said");
    refused(nodes.submit("", &[], &script(1)), "nothing is said");
    refused(nodes.submit(&"x".repeat(1025), &[], &script(1)), "longer than 1024 bytes");
    assert!(nodes.does(&["squeue", "-h"]).stdout.is_empty(), "nothing is queued");
    fs::write(nodes.home().join("programs"), "0 true\n1 true\n").expect("a file");
    for option in ["--multi-prog", "--mu"] {
        let several = ["srun", "--kedge=on", "-n", "2", "-O", option, "programs"];
        refused(nodes.does(&several), "--kedge does not go with --multi-prog");
    }
    let word = nodes.does(&["srun", "--kedge=on", "-n", "1", "echo", "--multi-prog"]);
    assert_eq!(word.stdout, b"--multi-prog\n", "{}", stderr(&word));
    // Within a script that is saved as one.
    let lines = "#!/bin/sh
srun --kedge=on true || echo refused >&2
srun --kedge=off true && srun true && exit 7
";
    let submitted = nodes.submit("script,no-requeue", &[], lines);
    assert!(submitted.status.success(), "{}", stderr(&submitted));
    let number = String::from_utf8_lossy(&submitted.stdout).trim().to_owned();
    let number = number.rsplit(' ').next().expect("a number").to_owned();
    let job = || {
        let said = nodes.does(&["scontrol", "show", "job", "-o", &number]);
        String::from_utf8_lossy(&said.stdout).into_owned()
    };
    nodes.wait("an end", || says(&job(), "ExitCode=7:0"));
    let said = fs::read_to_string(nodes.home().join("err")).expect("a file");
    assert!(said.contains("refused") && said.contains("is run by kedge already"), "{said}");
    assert!(said.contains("is saved as one job, which it cannot be while srun runs"), "{said}");
    // The nodes have no kedge.
    let (kedge, gone) = (nodes.0.kedge(), nodes.home().join("gone"));
    fs::remove_file(nodes.home().join("err")).expect("a file");
    let held = nodes.submit("on", &["--hold"], &script(1));
    assert!(held.status.success(), "{}", stderr(&held));
    fs::rename(&kedge, &gone).expect("moved");
    let number = String::from_utf8_lossy(&held.stdout).trim().to_owned();
    let number = number.rsplit(' ').next().expect("a number").to_owned();
    nodes.manages(&["scontrol", "release", &number]);
    let job = || {
        let said = nodes.does(&["scontrol", "show", "job", "-o", &number]);
        String::from_utf8_lossy(&said.stdout).into_owned()
    };
    nodes.wait("an end", || says(&job(), "ExitCode=127:0"));
    let said = fs::read_to_string(nodes.home().join("err")).expect("a file");
    assert!(said.contains("there is no such program on this node"), "{said}");
    assert!(steps_in(&nodes.home(), 0).is_empty(), "nothing runs without kedge");
    refused(nodes.does(&["srun", "--kedge=on", "true"]), "there is no such program on this host");
}
