//! The streams and the end of a job that has moved to another host as a whole: whoever has started
//! it sees no difference to one that runs where he is, also where the line is cut.

use crate::jobs::{Hosts, STEPS, WELL, stdout};
use kedge_tests::job::{children, is_alive, send};
use kedge_tests::network::until;
use kedge_tests::world::stderr;
use std::fs;
use std::io::Read;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// What connections to a server go through, which can be cut.
struct Line {
    address: String,
    all: Arc<Mutex<Vec<TcpStream>>>,
}

impl Line {
    fn to(server: &str) -> Line {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address").to_string();
        let (server, all) = (server.to_owned(), Arc::<Mutex<Vec<TcpStream>>>::default());
        let known = all.clone();
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let far = TcpStream::connect(&server).expect("the server");
                let ends = [near, far];
                let mut known = known.lock().expect("nobody has panicked");
                known.extend(ends.iter().map(|end| end.try_clone().expect("a descriptor")));
                for (from, to) in [(0, 1), (1, 0)] {
                    let mut ends =
                        [from, to].map(|end| ends[end].try_clone().expect("a descriptor"));
                    thread::spawn(move || {
                        let [from, to] = &mut ends;
                        let _ = std::io::copy(from, to);
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        Line { address, all }
    }

    /// How many connections there have been since the last cut.
    fn count(&self) -> usize {
        self.all.lock().expect("nobody has panicked").len() / 2
    }

    /// Cuts all connections: what is on its way is lost.
    fn cut(&self) {
        for end in self.all.lock().expect("nobody has panicked").drain(..) {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

fn shell(hosts: &Hosts, line: &str) -> Command {
    hosts.kedge("a", &["run", "--gpu", "none", "--job", "j", "--", "bash", "-c", line])
}

fn moves_by(hosts: &Hosts, line: &Line) {
    let output = hosts.kedge("a", &["migrate", "j", "--host", &line.address]).output();
    let output = output.expect("kedge");
    assert!(output.status.success(), "{output:?} {}", hosts.server.said());
}

/// Nothing that it says is lost or comes twice.
#[test]
fn a_line_that_is_cut_is_taken_up_again() {
    let hosts = Hosts::new("jmcut");
    let line = Line::to(&hosts.server.address);
    let mut job = hosts.start();
    job.read_to(5);
    moves_by(&hosts, &line);
    for _ in 0..3 {
        job.read_to(job.step + 5);
        line.cut();
    }
    assert_eq!(job.finish(STEPS).code(), Some(WELL));
    hosts.copy_is_right();
}

/// What the program leaves behind holds nobody up, and what that says comes to where it would have
/// come here.
#[test]
fn its_end_is_told_while_others_of_it_live() {
    let hosts = Hosts::new("jmleft");
    let waits = |file: &str| format!("while [ ! -e {file} ]; do sleep 0.05; done");
    let line = format!("{}; ({}; echo late) & echo said; exit 9", waits("go"), waits("more"));
    let mut job = shell(&hosts, &line).spawn().expect("kedge");
    until("the job", || hosts.state("a") == "running");
    let output = hosts.moved(&[]);
    assert!(output.status.success(), "{output:?} {}", hosts.server.said());
    let touch = |file: &str| fs::write(hosts.home().join(file), "").expect("a file");
    touch("go");
    assert_eq!(job.wait().expect("its end").code(), Some(9));
    // Longer than what ends with the program may have its streams.
    thread::sleep(Duration::from_secs(2));
    touch("more");
    let mut said = String::new();
    job.stdout.take().expect("a pipe").read_to_string(&mut said).expect("text");
    assert_eq!(said, "said\nlate\n");
    until("the end of all", || hosts.state("b") == "exited");
}

/// Also where the line is cut meanwhile.
#[test]
fn what_a_program_leaves_behind_is_heard_behind_a_cut() {
    let hosts = Hosts::new("jmrest");
    let line = Line::to(&hosts.server.address);
    let says = "(while [ ! -e more ]; do sleep 0.05; done; echo late) & \
                while [ ! -e go ]; do sleep 0.05; done; echo said; exit 9";
    let mut job = shell(&hosts, says).spawn().expect("kedge");
    until("the job", || hosts.state("a") == "running");
    moves_by(&hosts, &line);
    until("the streams", || line.count() > 1);
    let before = line.count();
    fs::write(hosts.home().join("go"), "").expect("a file");
    assert_eq!(job.wait().expect("its end").code(), Some(9));
    until("who passes the rest on", || line.count() > before);
    thread::sleep(Duration::from_secs(1));
    line.cut();
    fs::write(hosts.home().join("more"), "").expect("a file");
    let mut said = String::new();
    job.stdout.take().expect("a pipe").read_to_string(&mut said).expect("text");
    assert_eq!(said, "said\nlate\n");
    until("the end of all", || hosts.state("b") == "exited");
}

/// Who does not read what it says keeps nothing else from passing.
#[test]
fn a_line_is_taken_up_again_while_its_reader_waits() {
    const BYTES: usize = 300_000;
    let hosts = Hosts::new("jmslow");
    let line = Line::to(&hosts.server.address);
    let says = format!(
        "trap 'touch heard' USR1; while [ ! -e go ]; do sleep 0.05; done; \
         head -c {BYTES} /dev/zero; touch said; while [ ! -e heard ]; do sleep 0.05; done; exit 9"
    );
    let mut job = shell(&hosts, &says).spawn().expect("kedge");
    until("the job", || hosts.state("a") == "running");
    moves_by(&hosts, &line);
    let there = |name: &str| hosts.home().join(name).exists();
    fs::write(hosts.home().join("go"), "").expect("a file");
    until("all that it says", || there("said"));
    line.cut();
    until("the line", || line.count() > 0);
    send("USR1", &children(job.id()));
    until("the signal", || there("heard"));
    let mut said = Vec::new();
    job.stdout.take().expect("a pipe").read_to_end(&mut said).expect("bytes");
    assert_eq!((said.len(), job.wait().expect("its end").code()), (BYTES, Some(9)));
}

/// The end of the program's first process is told where it was, also where others of it could go.
#[test]
fn what_a_program_has_left_behind_does_not_move() {
    let hosts = Hosts::new("jmover");
    let file = hosts.home().join("held");
    let hold = format!("departs:{}", file.display());
    let line = "(while [ ! -e more ]; do sleep 0.05; done) & \
                while [ ! -e go ]; do sleep 0.05; done; exit 9";
    let mut command = shell(&hosts, line);
    command.env("KEDGE_HOLD_MOVE", hold);
    let mut job = command.spawn().expect("kedge");
    until("the job", || hosts.state("a") == "running");
    let mover = hosts.migrate(&[]).spawn().expect("kedge");
    until("its departure", || file.exists());
    let first = children(children(job.id())[0]);
    assert_eq!(first.len(), 1, "{first:?}");
    fs::write(hosts.home().join("go"), "").expect("a file");
    until("its end", || !is_alive(first[0]));
    fs::remove_file(&file).expect("the hold");
    let moved = mover.wait_with_output().expect("its end");
    assert!(stderr(&moved).contains("first process has ended"), "{moved:?}");
    assert_eq!(job.wait().expect("its end").code(), Some(9));
    assert_eq!(hosts.state("b"), "");
    fs::write(hosts.home().join("more"), "").expect("a file");
}

/// Who reads what it says has gone: so it finds there, too.
#[test]
fn a_reader_that_goes_is_found_gone_there() {
    let hosts = Hosts::new("jmpipe");
    let line = "trap '' PIPE; while echo line; do sleep 0.01; done 2>/dev/null; touch over; exit 8";
    let mut job = shell(&hosts, line).spawn().expect("kedge");
    until("the job", || hosts.state("a") == "running");
    let output = hosts.moved(&[]);
    assert!(output.status.success(), "{output:?} {}", hosts.server.said());
    assert!(!hosts.home().join("over").exists());
    drop(job.stdout.take());
    assert_eq!(job.wait().expect("its end").code(), Some(8), "{}", stdout(&output));
    assert!(hosts.home().join("over").exists());
}
