//! Checkpoints as this user takes them, here: a job that counts is checkpointed, killed and brought
//! back, and must go on where it was.

use super::{Check, Status};
use crate::child::{end, last_words, read_lines, read_stderr, reason};
use kedge_bench::{Scratch, Taken};
use kedge_control::gpu::GpuSpec;
use kedge_process::kernel;
use kedge_supervisor::kedge_again;
use kedge_supervisor::policy::JobGpu;
use rustix::process::geteuid;
use rustix::thread::{CapabilitySet, capabilities};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

const GROUP: &str = "checkpoints";
/// How long the program may take to answer: a driver may have to start.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// The rights that checkpoints and restarts use here, and one of each kind of job. Devices are
/// tried where a kernel `works` on them.
pub(super) fn checks(gpu: &GpuSpec, works: bool) -> Vec<Check> {
    let mut checks = rights();
    checks.push(tried("a process", &JobGpu::None));
    if works {
        checks.push(tried(&format!("on {gpu}"), &JobGpu::Devices(gpu.clone())));
    }
    checks
}

fn check(name: impl Into<String>, status: Status, value: impl Into<String>) -> Check {
    Check::new(GROUP, name, status, value.into())
}

/// Something that an administrator may have turned off, by a file that holds a number.
struct Switch {
    file: &'static str,
    off: &'static str,
    mend: &'static str,
}

const USER_NAMESPACES: [Switch; 3] = [
    Switch {
        file: "/proc/sys/user/max_user_namespaces",
        off: "0",
        mend: "sudo sysctl user.max_user_namespaces=10000",
    },
    Switch {
        file: "/proc/sys/kernel/unprivileged_userns_clone",
        off: "0",
        mend: "sudo sysctl kernel.unprivileged_userns_clone=1",
    },
    Switch {
        file: "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        off: "1",
        mend: "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    },
];

/// What this user may, as far as it decides how a restart goes.
fn rights() -> Vec<Check> {
    let mut checks = Vec::new();
    let all = capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective);
    if geteuid().is_root() && all.contains(CapabilitySet::SYS_ADMIN) {
        checks.push(check("rights", Status::Ok, "root's: other users' jobs come back too"));
    } else {
        let who = if geteuid().is_root() { "root without CAP_SYS_ADMIN" } else { "a user's" };
        let value = format!("{who}: restarts take user namespaces; a job has one user and group");
        checks.push(check("rights", Status::Ok, value));
        checks.extend(USER_NAMESPACES.iter().filter_map(|switch| {
            let text = fs::read_to_string(switch.file).ok()?;
            let value = format!("{} is {}", switch.file, switch.off);
            let off = text.trim() == switch.off;
            off.then(|| check("user namespaces", Status::Note, value).mend(switch.mend))
        }));
    }
    if !all.contains(CapabilitySet::SYS_PTRACE) {
        let value = "no CAP_SYS_PTRACE: `kedge restart --lazy` is refused";
        checks.push(check("rights", Status::Note, value));
    }
    if geteuid().is_root() && !all.contains(CapabilitySet::SYS_RESOURCE) {
        let value = "no CAP_SYS_RESOURCE: limits above this process's own do not come back";
        checks.push(check("rights", Status::Note, value));
    }
    checks
}

/// Whether a job with these devices comes back.
fn tried(name: &str, gpu: &JobGpu) -> Check {
    match round_trip(gpu) {
        Ok(told) => check(name, Status::Ok, told),
        Err(said) => check(name, Status::Missing, said)
            .mend_as_said("docs/containers.md, docs/checkpoint.md"),
    }
}

fn round_trip(gpu: &JobGpu) -> Result<String, String> {
    kernel::require(kernel::Stops::Checkpoints)
        .and_then(|()| kernel::require(kernel::Stops::Restarts))
        .map_err(|error| error.to_string())?;
    let folder = Scratch::new(None)?;
    let mut counter = Counter::run(gpu, &folder.0)?;
    let first = counter.hear()?;
    let counted = counter.count()?;
    if counted != first + 1 {
        return Err(format!("it counts from {first} to {counted}"));
    }
    let taken: Taken = serde_json::from_str(&counter.order("checkpoint", &["--json"])?)
        .map_err(|error| format!("`kedge checkpoint --json` told something else: {error}"))?;
    // It is further than its image when it ends.
    counter.count()?;
    counter.order("kill", &["--grace", "0"])?;
    drop(counter);
    let begin = Instant::now();
    let mut back = Counter::restart(&taken.image)?;
    let told = back.count()?;
    let restarted = begin.elapsed().as_secs_f64() * 1e3;
    if told != counted + 1 {
        return Err(format!("it was at {counted} and comes back at {}", told.wrapping_sub(1)));
    }
    let stalled = taken.stall_seconds * 1e3;
    Ok(format!("checkpointed (stood still {stalled:.0} ms), killed, back in {restarted:.0} ms"))
}

/// A job that counts.
struct Counter {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    complaints: Receiver<String>,
    name: String,
}

impl Counter {
    fn run(gpu: &JobGpu, images: &Path) -> Result<Counter, String> {
        let mut command = kedge_again();
        command.args(["run", "--quiet", "--gpu", &gpu.to_string()]);
        command.arg("--ckpt-dir").arg(images);
        Counter::start(command, |command| {
            command.arg("--").arg(kedge_again().get_program()).args(["probe", "count"]);
            command.args((!matches!(gpu, JobGpu::None)).then_some("--on-device"));
        })
    }

    fn restart(image: &Path) -> Result<Counter, String> {
        let mut command = kedge_again();
        command.arg("restart").arg(image).arg("--quiet");
        Counter::start(command, |_| {})
    }

    fn start(mut command: Command, finish: impl FnOnce(&mut Command)) -> Result<Counter, String> {
        let name = format!("kedge-doctor-{}", std::process::id());
        command.args(["--job", &name]);
        finish(&mut command);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("cannot start kedge: {error}"))?;
        let (lines, complaints) = (read_lines(&mut child), read_stderr(&mut child));
        let input = child.stdin.take();
        Ok(Counter { child, input, lines, complaints, name })
    }

    /// Has it count one more: the number.
    fn count(&mut self) -> Result<u64, String> {
        // One that has ended says why; see below.
        let _ = self.input.as_mut().map(|input| writeln!(input).and_then(|()| input.flush()));
        self.hear()
    }

    fn hear(&mut self) -> Result<u64, String> {
        match self.lines.recv_timeout(REPLY_TIMEOUT) {
            Ok(line) => line.trim().parse().map_err(|_| format!("it said `{line}`")),
            Err(_) => Err(self.failure()),
        }
    }

    /// Why it says nothing.
    fn failure(&mut self) -> String {
        drop(self.input.take());
        end(&mut self.child);
        let Ok(status) = self.child.wait() else { return "it says nothing".to_owned() };
        let log = self.name.parse().map(last_words).unwrap_or_default();
        let said = self.complaints.recv_timeout(REPLY_TIMEOUT).unwrap_or_default();
        reason(&said, &log, status)
    }

    /// What an order about the job prints.
    fn order(&self, order: &str, options: &[&str]) -> Result<String, String> {
        let output = kedge_again().args([order, &self.name]).args(options).output();
        let output = output.map_err(|error| format!("cannot start kedge: {error}"))?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().last().unwrap_or_default().trim();
        Err(last.strip_prefix("kedge: ").unwrap_or(last).to_owned())
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        // The end of its input ends it.
        drop(self.input.take());
        if self.lines.recv_timeout(Duration::from_secs(2)).is_err() {
            end(&mut self.child);
        }
        let _ = self.child.wait();
        if let Ok(name) = self.name.parse() {
            last_words(name);
        }
    }
}
