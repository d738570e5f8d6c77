//! Starting programs, capturing and killing them, and bringing them back.
#![allow(unreachable_pub, dead_code, reason = "each test program uses its part of it")]

pub mod alone;
pub mod chain;
pub mod kernel;
pub mod launchers;
pub mod survive;

pub use alone::{alone, alone_for, reap};
use kedge_image::Manifest;
use kedge_process::{Options, Rebuilt, RestartOptions, Restarted, Roots, checkpoint, restart};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

pub struct Folder(PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path =
            std::env::temp_dir().join(format!("kedge-restart-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        Folder(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn build(folder: &Folder, source: &str, flags: &[&str]) -> PathBuf {
    let program = folder.path(source.trim_end_matches(".c").trim_end_matches(".cc"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source);
    let compiler = if source.extension().is_some_and(|kind| kind == "cc") { "c++" } else { "cc" };
    let mut compiler = Command::new(compiler);
    compiler.args(["-O1", "-D_GNU_SOURCE"]).arg("-o").arg(&program).arg(source).args(flags);
    assert!(compiler.status().expect("cc").success());
    program
}

pub struct Running {
    pub child: Child,
    output: BufReader<ChildStdout>,
}

impl Running {
    pub fn start(command: &mut Command) -> Running {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        // What the test's own parent has left open is none of the program's.
        // SAFETY: between fork and exec the closure makes one system call, close_range, which takes
        // numbers.
        unsafe {
            command.pre_exec(|| {
                libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
                Ok(())
            })
        };
        let mut child = command.spawn().unwrap();
        let output = child.stdout.take().unwrap();
        let pipe = std::os::fd::AsRawFd::as_raw_fd(&output);
        // However long a capture takes, the program waits for who reads it, and does not get to its
        // end.
        // SAFETY: `pipe` is open as long as `output` is, and F_SETPIPE_SZ takes a number.
        assert!(unsafe { libc::fcntl(pipe, libc::F_SETPIPE_SZ, 4096) } >= 4096);
        Running { child, output: BufReader::with_capacity(128, output) }
    }

    pub fn lines(&mut self, count: usize) -> Vec<String> {
        let lines = self.lines_or_end(count);
        assert_eq!(lines.len(), count, "it ended early");
        lines
    }

    /// Its next lines, fewer if it ends.
    pub fn lines_or_end(&mut self, count: usize) -> Vec<String> {
        self.output.by_ref().lines().take(count).map(Result::unwrap).collect()
    }

    /// The most lines of so many bytes that it has said and nobody has read.
    pub fn waiting(&self, shortest: usize) -> usize {
        let mut bytes: libc::c_int = 0;
        let pipe = std::os::fd::AsRawFd::as_raw_fd(self.output.get_ref());
        // SAFETY: the kernel stores a number.
        assert_eq!(unsafe { libc::ioctl(pipe, libc::FIONREAD, &raw mut bytes) }, 0);
        (bytes as usize + self.output.buffer().len()) / shortest
    }

    /// Captures it into `image` and kills every process of it.
    pub fn capture_and_kill(mut self, image: &Path) {
        // Orphans included.
        std::fs::create_dir(image).unwrap();
        let options = Options::new(image.into());
        let captured = checkpoint(&roots(), options).unwrap();
        let processes = captured.processes().to_vec();
        captured.finish(Manifest::new("test".into(), vec![], 1)).unwrap();
        for pid in &processes {
            // SAFETY: kill takes no pointers; the processes descend from a child that has not been
            // waited for.
            unsafe { libc::kill(*pid, libc::SIGKILL) };
        }
        self.child.wait().unwrap();
        reap();
        for pid in processes {
            assert!(!std::fs::exists(format!("/proc/{pid}")).unwrap(), "{pid} still lives");
        }
    }
}

/// All processes of this one.
pub fn roots() -> Roots {
    Roots::ChildrenOf { parent: std::process::id() as i32, except: Vec::new() }
}

/// Captures the job into a new image, as the options are; its manifest.
pub fn capture_by(options: Options) -> Manifest {
    std::fs::create_dir(&options.folder).unwrap();
    // As a supervisor does it: what it traces is let go when the thread ends.
    let taken = std::thread::spawn(move || {
        let captured = checkpoint(&roots(), options)?;
        assert!(captured.warnings.is_empty(), "{:?}", captured.warnings);
        captured.finish(Manifest::new("test".into(), vec![], 1))
    });
    taken.join().unwrap().unwrap_or_else(|error| {
        let mut status = 0;
        // SAFETY: waitpid stores the status.
        let ended = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG | libc::__WALL) };
        panic!("{error:?}; ended meanwhile: {ended}, status {status:#x}");
    })
}

/// Ends the processes and waits for them.
pub fn kill(mut running: Running, processes: &[i32]) {
    for pid in processes {
        // SAFETY: kill takes no pointers; the processes descend from a child that has not been
        // waited for.
        unsafe { libc::kill(*pid, libc::SIGKILL) };
    }
    running.child.wait().unwrap();
    reap();
}

/// Brings the job back: its output from there on, and its status.
pub fn bring_back(image: &Path) -> (Vec<String>, i32) {
    bring_back_by(RestartOptions::new(image.into()), |_| {})
}

/// The same; `meanwhile` is done when it runs again.
pub fn bring_back_by(
    options: RestartOptions,
    meanwhile: impl FnOnce(&Restarted),
) -> (Vec<String>, i32) {
    let (output, theirs) = std::io::pipe().unwrap();
    let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let streams = [Some(null()), Some(OwnedFd::from(theirs)), None];
    let options = RestartOptions { streams, ..options };
    let restarted = restart(&options, serve).unwrap();
    drop(options);
    meanwhile(&restarted);
    let deadline = Deadline::of(restarted.keeper());
    let mut lines = Vec::new();
    for line in BufReader::new(output).lines() {
        let line = line.unwrap();
        let wrong = line.starts_with("wrong");
        lines.push(line);
        if wrong {
            // The others may wait for it for ever.
            deadline.end_now();
            panic!("after {} lines: {:?}", lines.len() - 1, lines.last());
        }
    }
    let status = restarted.wait().expect("it hung and was killed");
    (lines, status)
}

/// What kedge does in the init of a job, but for checkpoints.
fn serve(job: &mut Rebuilt) {
    while job.collect(|_| true) {
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Brings the job back, has its init capture it again a moment later, and ends it: what it said in
/// between.
pub fn capture_again(image: &Path, next: &Path) -> Vec<String> {
    capture_again_by(RestartOptions::new(image.into()), next)
}

/// The same, of a job that is brought back so.
pub fn capture_again_by(options: RestartOptions, next: &Path) -> Vec<String> {
    let (output, theirs) = std::io::pipe().unwrap();
    let streams = [None, Some(OwnedFd::from(theirs)), None];
    let options = RestartOptions { streams, ..options };
    std::fs::create_dir(next).unwrap();
    let capture = |job: &Rebuilt| {
        std::thread::sleep(Duration::from_millis(60));
        let roots = Roots::ChildrenOf { parent: 1, except: Vec::new() };
        let options = Options { restored: job.restored(), ..Options::new(next.into()) };
        let captured = checkpoint(&roots, options)?;
        captured.finish(Manifest::new("test".into(), vec![], 1))
    };
    // The job is killed when this returns.
    let serve = |job: &mut Rebuilt| {
        if let Err(error) = capture(job) {
            let _ = std::fs::write(next.join("error"), error.to_string());
        }
    };
    let restarted = restart(&options, serve).unwrap();
    drop(options);
    let lines: Vec<String> = BufReader::new(output).lines().map(Result::unwrap).collect();
    drop(restarted);
    reap();
    let error = std::fs::read_to_string(next.join("error"));
    assert!(error.is_err(), "{error:?} after {:?}", lines.last());
    lines
}

/// Kills a restarted job that takes too long.
struct Deadline {
    /// Its end is the timer's.
    _ended: std::sync::mpsc::Sender<()>,
    keeper: i32,
}

impl Deadline {
    fn of(keeper: i32) -> Deadline {
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        std::thread::spawn(move || {
            let late = std::sync::mpsc::RecvTimeoutError::Timeout;
            if receiver.recv_timeout(Duration::from_secs(150)) == Err(late) {
                // SAFETY: kill takes no pointers; the keeper is a child that has not been waited
                // for.
                unsafe { libc::kill(keeper, libc::SIGKILL) };
            }
        });
        Deadline { _ended: sender, keeper }
    }

    fn end_now(&self) {
        // SAFETY: kill takes no pointers; the keeper is a child that has not been waited for.
        unsafe { libc::kill(self.keeper, libc::SIGKILL) };
    }
}

pub fn step(line: &str) -> usize {
    line.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{line}"))
}
