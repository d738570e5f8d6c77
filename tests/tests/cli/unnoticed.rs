//! A checkpoint leaves no trace in the program: programs that watch everything that reaches them
//! say `wrong` when something does.
use kedge_tests::job::{Job, User, kedge_as};
use kedge_tests::place::Place;
use std::process::{Command, Stdio};

/// Has handlers for all signals, a child that a signal has stopped and whose stop was waited for,
/// one whose stop was not, and one that runs.
const WATCHER: &str = r#"
import os, signal, time
nonce = os.urandom(4).hex()
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())
seen = []
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    try: signal.signal(number, lambda number, frame: seen.append(number))
    except (OSError, ValueError): pass
def child(stop):
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        while True:
            if stop: os.kill(os.getpid(), stop)
            else: time.sleep(1)
    return pid
def stands(pid):
    # What has been let go of needs a moment to stop again.
    for _ in range(100):
        if open(f"/proc/{pid}/stat").read().rsplit(")")[-1].split()[0] in "Tt": return True
        time.sleep(0.001)
told, untold, busy = child(signal.SIGTSTP), child(signal.SIGSTOP), child(0)
os.waitid(os.P_PID, told, os.WSTOPPED)
os.waitid(os.P_PID, untold, os.WSTOPPED | os.WNOWAIT)
time.sleep(0.1)
seen.clear()
say("nonce", nonce)
for step in range(1, 2001):
    of = lambda pid, how: os.waitid(os.P_PID, pid, how | os.WCONTINUED | os.WEXITED | os.WNOHANG)
    found = [of(told, os.WSTOPPED), of(busy, os.WSTOPPED), of(untold, 0)]
    kept = os.waitid(os.P_PID, untold, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    states = [stands(told), stands(untold)]
    if seen or any(found) or not all(states) or not kept or kept.si_status != signal.SIGSTOP:
        say("wrong", seen, found, states, kept)
        os._exit(1)
    say(nonce, step)
    time.sleep(0.002)
for pid in (told, untold, busy): os.kill(pid, signal.SIGKILL)
say(nonce, "well")
os._exit(7)
"#;

/// A trap in a shell, which waits for a child.
const TRAPPER: &str = r#"
nonce=$$
for signal in HUP INT QUIT USR1 USR2 CONT TERM TSTP TTIN TTOU WINCH URG ALRM PIPE; do
    trap "echo wrong $signal" $signal
done
echo "nonce $nonce"
for ((step = 1; step <= 2000; step++)); do echo "$nonce $step"; sleep 0.002; done
exit 7
"#;

/// Debugs its child, and knows of every stop of it.
const DEBUGGER: &str = r#"
import ctypes, os, signal, time
libc = ctypes.CDLL(None, use_errno=True)
nonce = os.urandom(4).hex()
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())
TRACEME, CONT = 0, 7
pid = os.fork()
if pid == 0:
    libc.ptrace(TRACEME, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    while True: time.sleep(0.01)
os.waitpid(pid, 0)
libc.ptrace(CONT, pid, 0, 0)
say("nonce", nonce)
for step in range(1, 2001):
    found = os.waitpid(pid, os.WNOHANG)
    if found[0]:
        say("wrong", found)
        os._exit(1)
    say(nonce, step)
    time.sleep(0.002)
os.kill(pid, signal.SIGKILL)
os._exit(7)
"#;

/// Not even of one that ends the job and fails.
fn limited(place: &Place, program: &[&str]) -> Job {
    let run = [&["run", "--gpu", "none", "--job", "j", "--"], program].concat();
    let command = kedge_as(&place.world, place.user, &run);
    let mut prlimit = Command::new("prlimit");
    prlimit.arg("--fsize=200000").arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        prlimit.env(name, value.unwrap_or_default());
    }
    prlimit.current_dir(place.world.home()).stdin(Stdio::null());
    prlimit.stdout(Stdio::piped()).stderr(Stdio::piped());
    Job::start(prlimit)
}

fn notices_nothing(name: &str, program: &[&str]) {
    for (name, user) in [(name.to_owned(), User::Same), (format!("{name}u"), User::Nobody)] {
        let Some(place) = Place::new(&name, user) else { continue };
        let mut job = place.run(&[], program);
        for _ in 0..3 {
            job.read_to(job.step + 5);
            place.checkpoint(&[]);
        }
        job.read_to(job.step + 50);
        job.kill();
    }
}

#[test]
fn a_program_with_handlers_for_all_signals_notices_nothing() {
    notices_nothing("unpy", &["/usr/bin/python3", "-c", WATCHER]);
}

#[test]
fn traps_of_a_shell_do_not_fire() {
    notices_nothing("unsh", &["bash", "-c", TRAPPER]);
}

#[test]
fn a_checkpoint_that_was_to_end_the_job_and_fails_is_not_noticed() {
    for (name, program) in
        [("unfailpy", ["/usr/bin/python3", "-c", WATCHER]), ("unfailsh", ["bash", "-c", TRAPPER])]
    {
        let place = Place::mine(name);
        let mut job = limited(&place, &program);
        job.read_to(5);
        let said = place.failure(&["checkpoint", "j", "--stop", "--codec", "raw"]);
        assert!(said.contains("too large"), "{said}");
        job.read_to(job.step + 50);
        job.kill();
    }
}

#[test]
fn a_debugger_does_not_notice_that_its_program_is_refused() {
    for (name, user) in [("undbg", User::Same), ("undbgu", User::Nobody)] {
        let Some(place) = Place::new(name, user) else { continue };
        let mut job = place.run(&[], &["/usr/bin/python3", "-c", DEBUGGER]);
        for options in [&["checkpoint", "j"][..], &["checkpoint", "j", "--stop"]] {
            job.read_to(job.step + 5);
            let said = place.failure(options);
            assert!(said.contains("is traced by"), "{said}");
        }
        job.read_to(job.step + 50);
        job.kill();
    }
}
