//! What others make of the same, by turns with kedge: DMTCP and CRIU where they are installed, and
//! fio for the disk.
//!
//! Their program's standard streams are FIFOs, which both can bring back.

use kedge_probe::Series;
use kedge_supervisor::kedge_again;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Where their figures were measured that stand beside kedge's, whether they are installed or not.
pub(super) const DMTCP: &str = "DMTCP 5.0 tree, measured 2026-11-20 on 2 cores, not paired";
pub(super) const CRIU: &str = "CRIU 4.2, measured 2026-11-20 on 2 cores, not paired";

/// How long anything that they do may take.
const TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    /// Without compression, which is its fastest. Built with --enable-forked-checkpointing, a fork
    /// of the program writes.
    Dmtcp,
    /// For root alone.
    Criu,
}

impl Peer {
    const ALL: [Peer; 2] = [Peer::Dmtcp, Peer::Criu];

    pub(super) fn name(self) -> &'static str {
        match self {
            Peer::Dmtcp => "DMTCP",
            Peer::Criu => "CRIU",
        }
    }

    fn program(self) -> &'static str {
        match self {
            Peer::Dmtcp => "dmtcp_launch",
            Peer::Criu => "criu",
        }
    }

    /// What is found in PATH and may be used.
    pub(super) fn installed() -> Vec<Peer> {
        let root = rustix::process::geteuid().is_root();
        let usable = |peer: &Peer| on_path(peer.program()) && (root || *peer != Peer::Criu);
        Peer::ALL.into_iter().filter(usable).collect()
    }

    /// What starts a program under it; nothing where that is not needed.
    fn launcher(self) -> &'static [&'static str] {
        match self {
            Peer::Dmtcp => &["dmtcp_launch", "-q", "-q", "--new-coordinator", "--coord-port", "0"],
            Peer::Criu => &[],
        }
    }

    /// Those of which a program that is never checkpointed notices something, and what starts it.
    pub(super) fn launchers() -> impl Iterator<Item = (Peer, Vec<String>)> {
        let resident = Peer::installed().into_iter().filter(|peer| !peer.launcher().is_empty());
        resident.map(|peer| (peer, peer.launcher().iter().copied().map(str::to_owned).collect()))
    }

    /// One of its programs, with its settings.
    fn command(self, program: &str, folder: &Path) -> Command {
        let mut command = Command::new(program);
        if self == Peer::Dmtcp {
            command.env("DMTCP_GZIP", "0").env("DMTCP_TMPDIR", folder);
        }
        command
    }

    /// Its figures for a program that holds `size` bytes: the longest pause that the program saw,
    /// and seconds from a restart to the first answer.
    pub(super) fn round(self, size: u64, dir: &Path) -> Result<(f64, f64), String> {
        let said = |error: String| format!("{}: {error}", self.name());
        let folder = dir.join("peer");
        fs::create_dir(&folder).map_err(|error| said(error.to_string()))?;
        let result = Running::start(self, size, &folder).and_then(Running::measure);
        let _ = fs::remove_dir_all(&folder);
        result.map_err(said)
    }
}

fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// A program that holds memory, under one of them.
struct Running<'a> {
    peer: Peer,
    folder: &'a Path,
    child: Child,
    /// Of the program, which sees their end when this process ends.
    input: File,
    output: File,
    answers: Receiver<String>,
}

impl<'a> Running<'a> {
    fn start(peer: Peer, size: u64, folder: &'a Path) -> Result<Running<'a>, String> {
        let failed = |error: std::io::Error| error.to_string();
        let [input, output] = ["in", "out"].map(|name| pipe(&folder.join(name)));
        let (input, output) = (input.map_err(failed)?, output.map_err(failed)?);
        fs::create_dir(folder.join("images")).map_err(failed)?;
        let mut command = peer.command("setsid", folder);
        command.args(peer.launcher());
        if peer == Peer::Dmtcp {
            command.arg("--port-file").arg(folder.join("port"));
            command.arg("--ckptdir").arg(folder.join("images"));
        }
        command.arg(kedge_again().get_program()).args(["probe", "memory", &size.to_string()]);
        let child = on_pipes(&mut command, folder).and_then(Command::spawn).map_err(failed)?;
        let answers = lines(output.try_clone().map_err(failed)?);
        let mut running = Running { peer, folder, child, input, output, answers };
        match running.first_line()?.as_str() {
            "ready" => Ok(running),
            other => Err(format!("its program said `{other}`")),
        }
    }

    fn measure(mut self) -> Result<(f64, f64), String> {
        let begin = Instant::now();
        let image = self.checkpoint("first")?;
        let taken = begin.elapsed().as_secs_f64();
        self.tell(&format!("beat {}", 1.0 + 1.5 * taken))?;
        let second = self.checkpoint("second")?;
        let line = self.line()?;
        let pause = line.parse().map_err(|_| format!("its program said `{line}`"))?;
        let _ = fs::remove_dir_all(second);
        self.kill();
        // As for kedge, the image is in the page cache.
        super::plain::read(&image)?;
        let begin = Instant::now();
        let restarted = self.restart(&image)?;
        self.tell("ping")?;
        let answer = self.line();
        let seconds = begin.elapsed().as_secs_f64();
        self.end(restarted);
        answer.map(|_| (pause, seconds))
    }

    fn tell(&mut self, order: &str) -> Result<(), String> {
        writeln!(self.input, "{order}").map_err(|error| error.to_string())
    }

    /// As [`Running::line`], of a program that may not even have been started.
    fn first_line(&mut self) -> Result<String, String> {
        let begin = Instant::now();
        while begin.elapsed() < TIMEOUT {
            if let Ok(line) = self.answers.recv_timeout(Duration::from_millis(100)) {
                return Ok(line);
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("{} ended early: {status}", self.peer.program()));
            }
        }
        self.line()
    }

    fn line(&self) -> Result<String, String> {
        self.answers.recv_timeout(TIMEOUT).map_err(|_| "its program does not answer".into())
    }

    /// Takes an image into a folder of that name.
    fn checkpoint(&self, name: &str) -> Result<PathBuf, String> {
        let image = self.folder.join(name);
        fs::create_dir(&image).map_err(|error| error.to_string())?;
        if self.peer == Peer::Dmtcp {
            done(Command::new("dmtcp_command").args(["-p", &self.port()?, "--bcheckpoint"]))?;
            // A fork of it writes on, and gives the file its name at the end.
            let written = self.dmtcp_image()?;
            let to = image.join(written.file_name().unwrap_or_default());
            fs::rename(&written, to).map_err(|error| error.to_string())?;
        } else {
            let pid = self.child.id().to_string();
            let mut command = Command::new("criu");
            done(command.args(["dump", "--leave-running", "-t", &pid, "-D"]).arg(&image))?;
        }
        Ok(image)
    }

    fn port(&self) -> Result<String, String> {
        let text = fs::read_to_string(self.folder.join("port"));
        text.map(|port| port.trim().to_owned()).map_err(|error| format!("no port: {error}"))
    }

    fn dmtcp_image(&self) -> Result<PathBuf, String> {
        let is_whole = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "dmtcp");
        let begin = Instant::now();
        while begin.elapsed() < TIMEOUT {
            let found = fs::read_dir(self.folder.join("images")).map_err(|e| e.to_string())?;
            if let Some(path) = found.flatten().map(|entry| entry.path()).find(is_whole) {
                return Ok(path);
            }
            thread::sleep(Duration::from_millis(10));
        }
        Err("no image comes".into())
    }

    fn kill(&mut self) {
        if self.peer == Peer::Dmtcp {
            let _ = self
                .port()
                .map(|port| done(Command::new("dmtcp_command").args(["-p", &port, "--quit"])));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Starts the image: DMTCP's process is the program then.
    fn restart(&self, image: &Path) -> Result<Option<Child>, String> {
        if self.peer == Peer::Criu {
            let mut command = Command::new("criu");
            return done(command.args(["restore", "-d", "-D"]).arg(image)).map(|()| None);
        }
        let failed = |error: std::io::Error| error.to_string();
        let mut files = fs::read_dir(image).map_err(failed)?;
        let file = files.next().and_then(Result::ok).ok_or("no image")?;
        let mut command = self.peer.command("dmtcp_restart", self.folder);
        command.args(["-q", "-q", "--new-coordinator", "--coord-port", "0", "--port-file"]);
        command.arg(self.folder.join("port")).arg(file.path());
        on_pipes(&mut command, self.folder).and_then(Command::spawn).map(Some).map_err(failed)
    }

    /// Ends what has been restarted.
    fn end(&mut self, restarted: Option<Child>) {
        match restarted {
            Some(mut child) => {
                self.kill();
                let _ = child.kill();
                let _ = child.wait();
            }
            None => {
                // CRIU's has the old number.
                let pid = Pid::from_raw(self.child.id().cast_signed());
                let _ = pid.map(|pid| kill_process(pid, Signal::KILL));
            }
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.kill();
        // Who reads the answers learns that nobody wants them.
        let _ = writeln!(self.output);
    }
}

/// Gives a program its ends of the FIFOs of `folder`, which are held open here.
fn on_pipes<'c>(command: &'c mut Command, folder: &Path) -> std::io::Result<&'c mut Command> {
    command.stdin(File::open(folder.join("in"))?).stderr(Stdio::null());
    Ok(command.stdout(File::options().write(true).open(folder.join("out"))?))
}

/// A FIFO, held open at both ends.
fn pipe(path: &Path) -> std::io::Result<File> {
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0)?;
    File::options().read(true).write(true).open(path)
}

fn lines(output: File) -> Receiver<String> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
    });
    receiver
}

/// Runs a command to its end.
fn done(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut bounded = Command::new("timeout");
    bounded.arg(TIMEOUT.as_secs().to_string()).arg(&program).args(command.get_args());
    let output = bounded.stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().last().unwrap_or("it says nothing");
    Err(format!("{program}: {}: {last}", output.status))
}

/// Seconds in which fio writes `size` bytes past the page cache; `None` where it is not installed.
pub(super) fn fio(dir: &Path, size: u64) -> Result<Option<f64>, String> {
    if !on_path("fio") {
        return Ok(None);
    }
    let path = dir.join("fio");
    let mut command = Command::new("fio");
    command.args(["--name=kedge", "--rw=write", "--bs=4M", "--direct=1", "--ioengine=io_uring"]);
    command.args(["--iodepth=4", "--end_fsync=1", "--output-format=json"]);
    command.arg(format!("--size={size}")).arg(format!("--filename={}", path.display()));
    let output = command.stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    let _ = fs::remove_file(&path);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    match report["jobs"][0]["write"]["runtime"].as_f64() {
        Some(milliseconds) if output.status.success() && milliseconds > 0.0 => {
            Ok(Some(milliseconds / 1e3))
        }
        _ => Err(format!("fio: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

/// What has been measured of one of them.
pub(super) struct Measured {
    pub(super) peer: Peer,
    pauses: Vec<f64>,
    restarts: Vec<f64>,
}

impl Measured {
    pub(super) fn none_yet() -> Vec<Measured> {
        let new = |peer| Measured { peer, pauses: Vec::new(), restarts: Vec::new() };
        Peer::installed().into_iter().map(new).collect()
    }

    pub(super) fn round(&mut self, size: u64, dir: &Path) -> Result<(), String> {
        let (pause, restart) = self.peer.round(size, dir)?;
        self.pauses.push(pause);
        self.restarts.push(restart);
        Ok(())
    }

    pub(super) fn series(self, size: &str) -> [Series; 2] {
        let Measured { peer, pauses, restarts } = self;
        [(super::SEEN, pauses), (super::RESTART, restarts)].map(|(what, samples)| {
            Series::lower(format!("{}: {what}, {size}", peer.name()), "s", samples)
        })
    }
}
