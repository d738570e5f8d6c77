//! A program that watches itself is stopped and cloned again and again, and must not notice.

use kedge_process::{FrozenClone, Thread};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

struct Survivor {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
    counter: u64,
    program: PathBuf,
}

impl Survivor {
    fn start(name: &str, arguments: &[&str]) -> Survivor {
        let program =
            std::env::temp_dir().join(format!("kedge-survivor-{name}-{}", std::process::id()));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/survivor.c");
        let built = Command::new("cc")
            .args(["-O1", "-pthread", "-D_GNU_SOURCE", "-o"])
            .arg(&program)
            .arg(source)
            .status();
        assert!(built.expect("cc").success());
        let mut command = Command::new(&program);
        let mut child = command.args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let counter = line.trim().strip_prefix("ready 0x").expect("a first line");
        let counter = u64::from_str_radix(counter, 16).unwrap();
        Survivor { child, output, counter, program }
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Every thread. The leader last: from when it is traced, signals that the program ignores
    /// (SIGCHLD) are queued all the same, and would end other threads' calls.
    fn stop(&self) -> BTreeMap<i32, Thread> {
        let mut stopped = BTreeMap::new();
        self.stop_workers(&mut stopped);
        stopped.insert(self.pid(), Thread::stop(self.pid()).unwrap());
        // What the leader had made meanwhile.
        self.stop_workers(&mut stopped);
        stopped
    }

    /// A stopped thread makes no others, so a pass that finds none is the last.
    fn stop_workers(&self, stopped: &mut BTreeMap<i32, Thread>) {
        loop {
            let before = stopped.len();
            let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
            let tids = tasks.flatten().map(|task| task.file_name().to_str().unwrap().parse());
            for tid in tids.map(Result::<i32, _>::unwrap).filter(|tid| *tid != self.pid()) {
                stopped.entry(tid).or_insert_with(|| Thread::stop(tid).unwrap());
            }
            if stopped.len() == before {
                return;
            }
        }
    }

    /// Waits until no thread is on its way: such a one blocks all signals, until shortly before it
    /// is home.
    fn wait_until_home(&self) {
        const ALL: &str = "SigBlk:\tfffffffffffbfeff";
        let status = |tid: std::fs::DirEntry| std::fs::read_to_string(tid.path().join("status"));
        let away = || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap().flatten();
            tasks.flat_map(status).any(|status| status.contains(ALL))
        };
        let begin = Instant::now();
        while away() {
            assert!(begin.elapsed() < Duration::from_secs(60), "a thread does not come home");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(50));
    }

    /// Asks it to end, and tells what it said.
    fn finish(mut self) -> String {
        let pid = self.pid().to_string();
        assert!(Command::new("kill").args(["-USR1", &pid]).status().unwrap().success());
        let mut said = String::new();
        self.output.read_to_string(&mut said).unwrap();
        assert!(self.child.wait().unwrap().success(), "{said}");
        said
    }
}

impl Drop for Survivor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.program);
    }
}

fn counter_in(clone: &FrozenClone, address: u64) -> u64 {
    let mut bytes = [0; 8];
    assert_eq!(clone.read(address, &mut bytes).unwrap(), 8);
    u64::from_le_bytes(bytes)
}

/// Orphaned clones become this process's, as they become the supervisor's.
fn become_subreaper() {
    // SAFETY: PR_SET_CHILD_SUBREAPER takes a number, and changes only whose children orphans
    // become.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }, 0);
}

fn survives(name: &str, threads: u32, rounds: u32) {
    become_subreaper();
    let survivor = Survivor::start(name, &[&threads.to_string()]);
    let mut counts = Vec::new();
    for _ in 0..rounds {
        let mut stopped = survivor.stop();
        assert_eq!(stopped.len(), threads as usize + 1);
        let begin = Instant::now();
        let clone = FrozenClone::of(stopped.get_mut(&survivor.pid()).unwrap()).unwrap();
        let frozen = counter_in(&clone, survivor.counter);
        eprintln!("cloned in {:?}", begin.elapsed());
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", clone.pid())).unwrap();
        assert_eq!(descriptors.count(), 0, "the clone holds descriptors");
        drop(stopped);
        // The program goes on; the clone does not.
        while threads > 3 && counter_now(&survivor) == frozen {
            std::thread::yield_now();
        }
        assert_eq!(counter_in(&clone, survivor.counter), frozen);
        counts.push(frozen);
    }
    assert!(counts.is_sorted(), "{counts:?}");
    let said = survivor.finish();
    assert!(said.starts_with("well"), "{said}");
}

fn counter_now(survivor: &Survivor) -> u64 {
    use std::os::unix::fs::FileExt;
    let memory = std::fs::File::open(format!("/proc/{}/mem", survivor.pid())).unwrap();
    let mut bytes = [0; 8];
    memory.read_exact_at(&mut bytes, survivor.counter).unwrap();
    u64::from_le_bytes(bytes)
}

#[test]
fn a_program_of_one_thread_does_not_notice() {
    survives("one", 0, 20);
}

#[test]
fn a_program_of_64_threads_does_not_notice() {
    survives("many", 64, 20);
}

/// Stops and clones the program again and again, in a process of its own: its id.
fn forked_tracer(survivor: &Survivor) -> i32 {
    // SAFETY: the child shares nothing with this process and never returns from here.
    let child = unsafe { libc::fork() };
    if child == 0 {
        loop {
            let mut stopped = survivor.stop();
            drop(FrozenClone::of(stopped.get_mut(&survivor.pid()).unwrap()));
        }
    }
    assert!(child > 0);
    child
}

#[test]
fn a_tracer_that_is_killed_harms_no_thread() {
    become_subreaper();
    let survivor = Survivor::start("killed", &["8", "interrupted"]);
    for round in 0..60 {
        let tracer = forked_tracer(&survivor);
        // Prime, so that the moments spread over the pauses.
        std::thread::sleep(Duration::from_micros(3000 + round * 379 % 2003));
        let mut status = 0;
        // SAFETY: the tracer is a child that has not been waited for; waitpid stores its status.
        unsafe {
            libc::kill(tracer, libc::SIGKILL);
            assert_eq!(libc::waitpid(tracer, &mut status, 0), tracer);
        }
        assert!(libc::WIFSIGNALED(status), "the tracer failed: {status:x}");
        // The next one must not write its way over a thread that is still on this one's. A job
        // whose supervisor was killed gets no other, so the engine need not look for that.
        survivor.wait_until_home();
    }
    let said = survivor.finish();
    assert!(said.starts_with("well"), "{said}");
}
