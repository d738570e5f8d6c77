//! The hosts: who they are, and whether they are what the figures need.

use super::Asked;
use kedge_coordinator::JobKey;
use kedge_supervisor::kedge_again;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::net::{TcpListener, ToSocketAddrs};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Where there are no hosts.
const NEEDED: &str = "--host A,B,C,D names the hosts, this one first. Each is entered by `ssh HOST` \
    without a password, has kedge and Open MPI where this one has them, and shares the folder of \
    --dir; --spare E,F,G,H are those on which jobs are restarted. `scripts/bench-cluster DIR` \
    makes such hosts of namespaces and runs all of it there";

/// What runs a program on ranks.
const MPIRUN: &str = "mpirun";

/// Hosts that have been looked at.
#[derive(Debug)]
pub(super) struct Hosts {
    pub(super) all: Vec<String>,
    pub(super) spares: Vec<String>,
    /// A folder of this run, which they share.
    pub(super) dir: PathBuf,
    kedge: String,
}

impl Hosts {
    /// Looks at each of them, and says which is not as it has to be.
    pub(super) fn new(asked: &Asked<'_>, dir: &Path) -> Result<Hosts, String> {
        let [this, others @ ..] = asked.hosts else { return Err(NEEDED.into()) };
        if others.is_empty() {
            return Err(format!("--host {this}: one is none beside it. {NEEDED}"));
        }
        if !asked.spares.is_empty() && asked.spares.len() < 2 {
            return Err("--spare: give two hosts or more, or none".into());
        }
        is_this_host(this)?;
        let kedge = kedge_again().get_program().to_string_lossy().into_owned();
        let (all, spares) = (asked.hosts.to_vec(), asked.spares.to_vec());
        let hosts = Hosts { all, spares, dir: dir.to_owned(), kedge };
        hosts.all.iter().chain(&hosts.spares).try_for_each(|host| hosts.look_at(host))?;
        Ok(hosts)
    }

    /// Whether it can be entered, and has kedge and the folder.
    fn look_at(&self, host: &str) -> Result<(), String> {
        let own = said(Command::new(&self.kedge).arg("--version"))?;
        let line = format!(
            "test -d {} || echo the folder {} is not there; {} --version",
            quoted(&self.dir.display().to_string()),
            self.dir.display(),
            quoted(&self.kedge)
        );
        let there = said(&mut self.shell(host, &line))
            .map_err(|why| format!("{host}: `ssh {host}` and kedge there: {why}. {NEEDED}"))?;
        if there == own { Ok(()) } else { Err(format!("{host}: {there}. {NEEDED}")) }
    }

    /// A line of shell on a host.
    pub(super) fn shell(&self, host: &str, line: &str) -> Command {
        let mut command = Command::new("ssh");
        command.args(["-o", "BatchMode=yes", host, line]);
        command
    }

    /// kedge as a line of shell.
    pub(super) fn kedge_line(&self, words: &[&str]) -> String {
        let words = [&[self.kedge.as_str()], words].concat();
        let words: Vec<String> = words.into_iter().map(quoted).collect();
        format!("{}= {}", kedge_supervisor::CONFIG, words.join(" "))
    }

    /// What starts a program as a job of this run.
    pub(super) fn as_a_job(&self, name: &str) -> Command {
        let mut command = kedge_again();
        command.args(["run", "--quiet", "--gpu", "none", "--job", name, "--ckpt-dir"]);
        command.arg(&self.dir).arg("--");
        command
    }

    /// Returns a job's name that no other run of this user has.
    pub(super) fn job(&self, tag: &str) -> String {
        format!("kedge-bench-{}-{tag}", std::process::id())
    }

    /// The first of `most` hosts, as many as there are.
    pub(super) fn first(&self, most: usize) -> &[String] {
        &self.all[..most.min(self.all.len())]
    }

    /// The words that run so many ranks on these hosts: cores may be fewer than ranks.
    pub(super) fn mpirun(&self, hosts: &[String], ranks: usize) -> Vec<String> {
        let slots = ranks.div_ceil(hosts.len().max(1));
        let hosts: Vec<String> = hosts.iter().map(|host| format!("{host}:{slots}")).collect();
        let words = [MPIRUN, "--mca", "mpi_yield_when_idle", "1", "--bind-to", "none", "--host"];
        let rest = [hosts.join(","), "-np".into(), ranks.to_string()];
        words.map(str::to_owned).into_iter().chain(rest).collect()
    }

    /// Writes a text beside those of the programs, and returns where it is.
    pub(super) fn written(&self, name: &str, text: &str) -> Result<PathBuf, String> {
        let file = self.dir.join(name);
        std::fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()))?;
        Ok(file)
    }

    /// Compiles an MPI program.
    pub(super) fn compiled(&self, name: &str, source: &str) -> Result<PathBuf, String> {
        let version = said(Command::new(MPIRUN).arg("--version"))?;
        if !version.contains("Open MPI") {
            return Err(format!("{MPIRUN} is not Open MPI's, whose options are used: {version}"));
        }
        let (text, program) = (self.written(&format!("{name}.c"), source)?, self.dir.join(name));
        let mut compiler = Command::new("mpicc");
        said(compiler.arg("-O2").arg("-o").arg(&program).arg(&text).arg("-lm"))?;
        Ok(program)
    }
}

/// Writes a new key of a job's parts, which its owner alone may read.
pub(super) fn write_key(path: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(JobKey::generate()?.text())
}

/// As one word of any shell.
pub(super) fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Open MPI refuses root unless it is told twice.
pub(super) fn as_root_too(command: &mut Command) -> &mut Command {
    let both = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"];
    command.envs(both.map(|name| (name, "1")))
}

/// What a command says that ends well.
pub(super) fn said(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let Output { status, stdout, stderr } = output.map_err(|error| format!("{name}: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    match (status.success(), text(&stderr)) {
        (true, _) => Ok(text(&stdout)),
        (false, complaint) if complaint.is_empty() => Err(format!("{name}: {status}")),
        (false, complaint) => Err(format!("{name}: {complaint}")),
    }
}

/// Whether `host` has an address of this one.
fn is_this_host(host: &str) -> Result<(), String> {
    let addresses = (host, 0).to_socket_addrs().map_err(|error| format!("{host}: {error}"))?;
    let own = |address| TcpListener::bind(address).is_ok();
    match addresses.into_iter().any(own) {
        true => Ok(()),
        false => Err(format!("--host {host}: the first one is to be this host")),
    }
}
