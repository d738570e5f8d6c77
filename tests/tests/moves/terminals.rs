//! The terminal of a job that has moved to another host as a whole: its keys are the job's there,
//! at whatever moment they are pressed, and it is the shell's when it was.

use crate::jobs::Hosts;
use kedge_tests::job::{children, is_stopped, send};
use kedge_tests::network::until;
use std::fs;
use std::io::Write;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

/// A terminal in which something runs.
struct Terminal {
    child: Child,
}

impl Terminal {
    /// Has `command` run in one, with what `kedge` has in its environment.
    fn new(hosts: &Hosts, kedge: &Command, command: &str) -> Terminal {
        let mut terminal = Command::new("script");
        // In the place of the shell that `script` starts: some of them end by the signal, too.
        let command = format!("exec {command}");
        terminal.args(["--quiet", "--return", "--command", &command, "/dev/null"]);
        terminal.envs(kedge.get_envs().filter_map(|(name, value)| Some((name, value?))));
        terminal.current_dir(hosts.home()).stdin(Stdio::piped()).stdout(Stdio::piped());
        Terminal { child: terminal.spawn().expect("script, from bsdutils") }
    }

    fn types(&mut self, text: &str) {
        let input = self.child.stdin.as_mut().expect("a pipe");
        input.write_all(text.as_bytes()).expect("it is typed");
    }

    fn ended(self) -> Output {
        self.child.wait_with_output().expect("ended")
    }
}

/// A job of the shell commands in `text`, and how a shell would call it.
fn job(hosts: &Hosts, text: &str) -> (Command, String) {
    fs::write(hosts.home().join("program"), text).expect("a file");
    let kedge = hosts.kedge("a", &["run", "--gpu", "none", "--job", "j", "--", "bash", "program"]);
    let words = [kedge.get_program()].into_iter().chain(kedge.get_args());
    let words: Vec<String> =
        words.map(|word| format!("'{}'", word.to_string_lossy().replace('\'', "'\\''"))).collect();
    let line = words.join(" ");
    (kedge, line)
}

fn there(hosts: &Hosts, name: &str) -> bool {
    hosts.home().join(name).exists()
}

fn touch(hosts: &Hosts, name: &str) {
    fs::write(hosts.home().join(name), "").expect("a file");
}

fn moves(hosts: &Hosts) {
    let output = hosts.moved(&[]);
    assert!(output.status.success(), "{output:?} {}", hosts.server.said());
    hosts.has_moved("a", "b");
}

fn has_thread(pid: u32, name: &str) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut names = threads.filter_map(|one| fs::read_to_string(one.path().join("comm")).ok());
    names.any(|found| found.trim() == name)
}

/// What the job has said by lines of the file `said`, in whatever order.
fn said(hosts: &Hosts) -> Vec<String> {
    let said = fs::read_to_string(hosts.home().join("said")).expect("what was said");
    let mut said: Vec<String> = said.lines().map(str::to_owned).collect();
    said.sort_unstable();
    said
}

/// A terminal's keys reach all of the program's process group, as where it runs here.
#[test]
fn a_terminal_s_signals_reach_its_group_there() {
    let hosts = Hosts::new("jmterminal");
    let says = |name: &str, status: u32| {
        format!(
            "bash -c 'trap \"echo {name} >>said; exit {status}\" INT; \
             touch {name}; while :; do sleep 0.05; done'"
        )
    };
    let text =
        format!("trap 'echo zero >>said' INT; {} | {}; exit 5", says("one", 3), says("two", 4));
    let (kedge, line) = job(&hosts, &text);
    let mut terminal = Terminal::new(&hosts, &kedge, &line);
    until("all of it", || there(&hosts, "one") && there(&hosts, "two"));
    moves(&hosts);
    terminal.types("\x03");
    let output = terminal.ended();
    assert_eq!(output.status.code(), Some(5), "{output:?}");
    assert_eq!(said(&hosts), ["one", "two", "zero"], "each of them once");
}

/// Nothing of the job hears them any more where it was, and nobody passes them on as yet.
#[test]
fn signals_that_come_on_the_way_are_heard_there() {
    let hosts = Hosts::new("jmway");
    // Without children: a shell may take their end by the signal for another one.
    let text = "trap 'echo int >>said; touch int' INT; trap 'echo usr >>said; touch usr' USR1; \
                touch there; until [ -e int ] && [ -e usr ]; do :; done; exit 6";
    let (mut kedge, line) = job(&hosts, text);
    let file = hosts.home().join("held");
    kedge.env("KEDGE_HOLD_MOVE", format!("decided:{}", file.display()));
    let mut terminal = Terminal::new(&hosts, &kedge, &line);
    until("the job", || there(&hosts, "there"));
    let mover = hosts.migrate(&[]).spawn().expect("kedge");
    until("the decision", || file.exists());
    terminal.types("\x03");
    send("USR1", &children(children(terminal.child.id())[0]));
    thread::sleep(Duration::from_millis(500));
    fs::remove_file(&file).expect("the hold");
    let moved = mover.wait_with_output().expect("its end");
    assert!(moved.status.success(), "{moved:?} {}", hosts.server.said());
    let output = terminal.ended();
    assert_eq!(output.status.code(), Some(6), "{output:?}");
    // `timeout`, by which tests start kedge, has Ctrl-C and passes it on besides.
    let mut said = said(&hosts);
    said.dedup_by(|one, other| one == "int" && one == other);
    assert_eq!(said, ["int", "usr"]);
}

/// What is typed for the shell is not read by a job in its background, which goes on.
#[test]
fn a_job_in_the_background_leaves_the_terminal_alone() {
    let hosts = Hosts::new("jmback");
    let text = "touch there; while [ ! -e go ]; do sleep 0.05; done; touch asks; \
                read -r word; echo \"$word\" >>said; exit 3";
    let (kedge, line) = job(&hosts, text);
    let shell = format!(
        "set -m; {line} & echo $! >pid; while [ ! -e typed ]; do sleep 0.05; done; \
         fg >/dev/null; exit $?"
    );
    fs::write(hosts.home().join("shell"), shell).expect("a file");
    let mut terminal = Terminal::new(&hosts, &kedge, "bash shell");
    until("the job", || there(&hosts, "there"));
    moves(&hosts);
    touch(&hosts, "go");
    until("what it asks", || there(&hosts, "asks"));
    terminal.types("word\n");
    thread::sleep(Duration::from_secs(1));
    let pid = fs::read_to_string(hosts.home().join("pid")).expect("an id");
    assert!(!is_stopped(pid.trim().parse().expect("a number")));
    assert!(!there(&hosts, "said"));
    touch(&hosts, "typed");
    let output = terminal.ended();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert_eq!(said(&hosts), ["word"]);
}

/// Ctrl-Z stops it there, and it goes on there with what has it go on here.
#[test]
fn a_job_is_stopped_there_and_goes_on() {
    let hosts = Hosts::new("jmstop");
    let text = "n=0; until [ -e over ]; do echo $((n += 1)) >count; touch there; sleep 0.05; done; \
                exit 4";
    let (kedge, line) = job(&hosts, text);
    let shell = format!(
        "set -m; {line}; echo $? >stopped; while [ ! -e on ]; do sleep 0.05; done; \
         fg >/dev/null; exit $?"
    );
    fs::write(hosts.home().join("shell"), shell).expect("a file");
    let mut terminal = Terminal::new(&hosts, &kedge, "bash shell");
    until("the job", || there(&hosts, "there"));
    moves(&hosts);
    // In the shell, and in what bounds its time.
    let kedge = children(children(children(terminal.child.id())[0])[0])[0];
    until("who takes its signals", || has_thread(kedge, "signals"));
    terminal.types("\x1a");
    until("the shell", || there(&hosts, "stopped"));
    let count = || fs::read_to_string(hosts.home().join("count")).expect("a number");
    until("that it stops", || {
        let before = count();
        thread::sleep(Duration::from_secs(1));
        count() == before
    });
    touch(&hosts, "on");
    let before = count();
    until("that it goes on", || count() != before);
    touch(&hosts, "over");
    let output = terminal.ended();
    assert_eq!(output.status.code(), Some(4), "{output:?}");
}
