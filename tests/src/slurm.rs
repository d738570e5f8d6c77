//! Real Slurm on hosts of a cluster: a controller on the first one, a node on each, with munge's
//! daemon and a configuration of the test's own.

use crate::cluster::Cluster;
use crate::job::{User, kill_all_in, send};
use crate::root;
use kedge_left_out::left_out;
use std::fmt::Write;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// What the daemons and the commands are, by the packages slurm-wlm and munge.
const PROGRAMS: [&str; 4] =
    ["/usr/sbin/munged", "/usr/sbin/slurmctld", "/usr/sbin/slurmd", "/usr/bin/srun"];
/// What plugins are built by, by the package libslurm-dev.
const HEADER: &str = "/usr/include/slurm/spank.h";
/// How long the nodes may take to be idle.
const SOON: Duration = Duration::from_secs(20);

/// A cluster of one site with Slurm on it, for as long as this lives.
#[derive(Debug)]
pub struct Slurm {
    // Ended first.
    daemons: Vec<Child>,
    folder: PathBuf,
    pub cluster: Cluster,
    _alone: MutexGuard<'static, ()>,
}

/// One at a time: its daemons kill what takes seconds longer than they allow.
static ALONE: Mutex<()> = Mutex::new(());

impl Slurm {
    /// So many nodes, called a1, b1, …; `None` where there can be none, which is counted.
    pub fn new(name: &str, user: User, nodes: usize) -> Option<Slurm> {
        Slurm::begin(name, user, nodes, false)
    }

    /// The same with kedge's plugin.
    pub fn with_plugin(name: &str, user: User, nodes: usize) -> Option<Slurm> {
        if !Path::new(HEADER).exists() {
            left_out(name, &format!("no {HEADER}: scripts/setup --tests"));
            return None;
        }
        Slurm::begin(name, user, nodes, true)
    }

    fn begin(name: &str, user: User, nodes: usize, plugin: bool) -> Option<Slurm> {
        if let Some(missing) = PROGRAMS.iter().find(|path| !Path::new(path).exists()) {
            left_out(name, &format!("no {missing}: scripts/setup --tests"));
            return None;
        }
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let cluster = Cluster::of_sites(name, user, &[nodes])?;
        if user == User::Nobody {
            cluster.world.give_home_away();
        }
        // Munge's socket is everybody's.
        let folder = cluster.world.0.join("slurm");
        for part in ["state", "spool", "log"] {
            fs::create_dir_all(folder.join(part)).expect("a folder");
        }
        let mut slurm = Slurm { daemons: Vec::new(), folder, cluster, _alone: alone };
        slurm.configure(nodes);
        if plugin {
            slurm.build_plugin();
        }
        slurm.start(nodes);
        Some(slurm)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// What Slurm calls the host.
    pub fn node(host: usize) -> String {
        // As the cluster calls it.
        format!("{}1", ["a", "b", "c", "d", "e", "f", "g", "h"][host])
    }

    fn configure(&self, nodes: usize) {
        let mut key = [0; 1024];
        File::open("/dev/urandom").and_then(|mut from| from.read_exact(&mut key)).expect("bytes");
        fs::write(self.at("munge.key"), key).expect("a file");
        fs::set_permissions(self.at("munge.key"), PermissionsExt::from_mode(0o400)).expect("mine");
        let at = self.folder.display();
        // A requeued job starts within seconds so.
        let mut text = format!(
            "ClusterName=kedge\n\
             SlurmctldHost=a1(10.79.1.1)\n\
             SlurmUser=root\n\
             AuthType=auth/munge\n\
             AuthInfo=socket={at}/munge.sock,cred_expire=5\n\
             MailProg=/bin/true\n\
             ProctrackType=proctrack/linuxproc\n\
             TaskPlugin=task/none\n\
             SelectType=select/cons_tres\n\
             SelectTypeParameters=CR_Core\n\
             SlurmctldPidFile={at}/slurmctld.pid\n\
             SlurmdPidFile={at}/slurmd-%n.pid\n\
             SlurmdSpoolDir={at}/spool/%n\n\
             StateSaveLocation={at}/state\n\
             SlurmctldLogFile={at}/log/slurmctld\n\
             SlurmdLogFile={at}/log/%n\n\
             SlurmdParameters=config_overrides\n\
             SchedulerType=sched/builtin\n\
             SchedulerParameters=sched_interval=1\n\
             KillWait=5\n\
             RequeueExit=85\n\
             ReturnToService=2\n\
             PartitionName=all Nodes=ALL Default=YES OverSubscribe=YES\n"
        );
        for host in 0..nodes {
            let (node, number) = (Slurm::node(host), host + 1);
            let line = format!("NodeName={node} NodeAddr=10.79.1.{number} CPUs=2 RealMemory=1000");
            writeln!(text, "{line}").expect("memory");
            fs::create_dir(self.at("spool").join(node)).expect("a folder");
        }
        fs::write(self.at("slurm.conf"), text).expect("a file");
    }

    /// Builds the plugin by the header of this Slurm, and has it loaded.
    fn build_plugin(&self) {
        let (source, plugin) = (root().join("slurm/kedge-spank.c"), self.at("kedge_spank.so"));
        let mut compiler = Command::new("cc");
        compiler.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-O2"]);
        let built = compiler.arg("-o").arg(&plugin).arg(source).status().expect("cc");
        assert!(built.success(), "the plugin is not built");
        let line = format!("required {} kedge={}\n", plugin.display(), self.kedge().display());
        fs::write(self.at("plugstack.conf"), line).expect("a file");
        let mut text = fs::read_to_string(self.at("slurm.conf")).expect("its configuration");
        writeln!(text, "PlugStackConfig={}/plugstack.conf", self.folder.display()).expect("memory");
        fs::write(self.at("slurm.conf"), text).expect("a file");
    }

    fn start(&mut self, nodes: usize) {
        let at = self.folder.display().to_string();
        let mut munged = Command::new("/usr/sbin/munged");
        munged.args(["--foreground", "--force", &format!("--key-file={at}/munge.key")]);
        munged.arg(format!("--socket={at}/munge.sock")).arg(format!("--log-file={at}/log/munge"));
        munged.arg(format!("--pid-file={at}/munge.pid")).arg(format!("--seed-file={at}/seed"));
        self.daemon(munged);
        let begin = Instant::now();
        while !self.at("munge.sock").exists() {
            assert!(begin.elapsed() < SOON, "munged does not listen: {}", self.logs());
            thread::sleep(Duration::from_millis(10));
        }
        let mut controller = self.cluster.hosts[0].inside();
        controller.args(["/usr/sbin/slurmctld", "-D"]);
        self.daemon(controller);
        for host in 0..nodes {
            let mut daemon = self.cluster.hosts[host].inside();
            daemon.args(["/usr/sbin/slurmd", "-D", "-N", &Slurm::node(host)]);
            self.daemon(daemon);
        }
        let begin = Instant::now();
        let idle = || self.command(&["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"]).output();
        while idle().expect("nsenter").stdout.iter().filter(|byte| **byte == b'\n').count() < nodes
        {
            assert!(begin.elapsed() < SOON, "not all nodes are idle: {}", self.logs());
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn daemon(&mut self, mut command: Command) {
        // What it leaves behind is known by its folder.
        command.env("SLURM_CONF", self.at("slurm.conf")).current_dir(&self.folder);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.daemons.push(command.spawn().expect("a daemon of Slurm"));
    }

    /// A command of Slurm's on the first node.
    pub fn command(&self, words: &[&str]) -> Command {
        self.command_of(self.cluster.user, words)
    }

    /// The same by another user.
    pub fn command_of(&self, user: User, words: &[&str]) -> Command {
        let mut command = self.cluster.hosts[0].inside();
        command.args(["timeout", "--kill-after=5", "100"]);
        if user != User::Same {
            let id = user.id().to_string();
            command.args(["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups"]);
        }
        command
            .args(words)
            .envs(self.cluster.variables(0))
            .env("SLURM_CONF", self.at("slurm.conf"));
        command.current_dir(self.cluster.world.home()).stdin(Stdio::null());
        command
    }

    /// A script that is kedge on whichever node it is run.
    pub fn kedge(&self) -> PathBuf {
        let path = self.at("kedge");
        if !path.exists() {
            let (home, kedge) = (self.cluster.world.home(), self.cluster.world.parts());
            let text = format!(
                "#!/bin/sh\nexport XDG_RUNTIME_DIR={home}/$SLURMD_NODENAME \
                 XDG_STATE_HOME={home}/$SLURMD_NODENAME\nexec {} \"$@\"\n",
                kedge.display(),
                home = home.display()
            );
            fs::write(&path, text).expect("a file");
            fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).expect("mine");
        }
        path
    }

    /// What the daemons say.
    pub fn logs(&self) -> String {
        let all = fs::read_dir(self.at("log")).into_iter().flatten().flatten();
        let read = |file: fs::DirEntry| fs::read_to_string(file.path()).unwrap_or_default();
        all.map(read).collect()
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        let all: Vec<u32> = self.daemons.iter().map(Child::id).collect();
        send("KILL", &all);
        self.daemons.iter_mut().for_each(|daemon| drop(daemon.wait()));
        // The daemons of steps.
        kill_all_in(&self.cluster.world.0);
    }
}
