//! An Open MPI job over two hosts: its launcher reaches the other one by ssh, and starts its daemon
//! there as a part of the same job. Stopped, and brought back on two other hosts.
use kedge_left_out::left_out;
use kedge_tests::cluster::Cluster;
use kedge_tests::job::{User, family, send, steps_in, wait_for_steps};
use kedge_tests::root;
use kedge_tests::world::stderr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// What the program ends with when all of its steps were right.
const WELL: i32 = 7;
/// Enough for it to run while it is looked for.
const STEPS: u64 = 600;
const TIMEOUT: Duration = Duration::from_secs(40);

fn script(path: &Path, lines: &str) {
    fs::write(path, format!("#!/bin/sh\n{lines}\n")).expect("a file");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("mine");
}

/// A cluster in whose first site ssh leads from host to host.
struct Site {
    cluster: Cluster,
    started: Vec<Child>,
}

impl Site {
    /// `None` where there is no Open MPI, no sshd or no such hosts.
    fn new(name: &str) -> Option<Site> {
        for program in ["/usr/sbin/sshd", "/usr/bin/mpicc.openmpi"] {
            if !Path::new(program).exists() {
                left_out(name, &format!("no {program}: scripts/setup --tests"));
                return None;
            }
        }
        let cluster = Cluster::new(name, User::Same, 2)?;
        let home = cluster.world.home();
        let source = root().join("crates/process/tests/mpi.c");
        let mut compiler = Command::new("mpicc.openmpi");
        let compiled = compiler.arg("-O1").arg("-o").arg(home.join("mpi")).arg(source).status();
        assert!(compiled.expect("mpicc").success());
        let mut site = Site { cluster, started: Vec::new() };
        site.let_in();
        Some(site)
    }

    /// Starts sshd on the second host, for a key of the test's own.
    fn let_in(&mut self) {
        let home = self.cluster.world.home();
        let at = home.display();
        for key in ["host", "key"] {
            let mut make = Command::new("ssh-keygen");
            let made =
                make.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(home.join(key)).status();
            assert!(made.expect("ssh-keygen").success());
        }
        let config = format!(
            "HostKey {at}/host\nAuthorizedKeysFile {at}/key.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
        );
        fs::write(home.join("sshd"), config).expect("a file");
        // Where the distribution's service makes it.
        fs::create_dir_all("/run/sshd").expect("a folder");
        let mut sshd = self.cluster.hosts[1].inside();
        sshd.args(["/usr/sbin/sshd", "-D", "-e", "-f"]).arg(home.join("sshd"));
        sshd.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.started.push(sshd.spawn().expect("nsenter"));
        let set = self.cluster.variables(1).into_iter();
        let set: Vec<String> =
            set.map(|(name, value)| format!("export {name}='{value}'")).collect();
        let run = self.run().join(" ");
        let kedge = self.cluster.world.parts();
        let part = format!(
            "cd {at}; {}\nsetsid {} {run} -- \"$@\" </dev/null >part.out 2>&1 &",
            set.join("; "),
            kedge.display()
        );
        script(&home.join("part"), &part);
        let agent = format!(
            "host=$1; shift\nexec ssh -i {at}/key -o BatchMode=yes -o StrictHostKeyChecking=no \
             -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR $host {at}/part \"$@\""
        );
        script(&home.join("agent"), &agent);
    }

    fn run(&self) -> Vec<String> {
        let (at, images) = (self.cluster.at(1), self.cluster.images());
        let words = ["run", "--gpu", "none", "--join", "mpi", "--at", &at, "--ckpt-dir", &images];
        words.map(str::to_owned).to_vec()
    }

    /// Starts `ranks` ranks on each of the two hosts.
    fn start(&mut self, ranks: usize) {
        let agent = self.cluster.world.home().join("agent").display().to_string();
        let hosts = format!("10.79.1.1:{ranks},10.79.1.2:{ranks}");
        let (all, steps) = ((2 * ranks).to_string(), STEPS.to_string());
        let mpi = [
            "--",
            "mpirun.openmpi",
            "--mca",
            "plm_rsh_agent",
            &agent,
            "--mca",
            "btl_tcp_if_include",
            "10.79.0.0/16",
            "--mca",
            "mpi_yield_when_idle",
            "1",
            "--bind-to",
            "none",
            "--host",
            &hosts,
            "-np",
            &all,
            "sh",
            "-c",
            &format!("exec ./mpi {steps} >> out.$OMPI_COMM_WORLD_RANK"),
        ];
        let run = self.run();
        let words: Vec<&str> = run.iter().map(String::as_str).chain(mpi).collect();
        let mut command = self.cluster.kedge(0, &words);
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        command.stdout(Stdio::null()).stderr(Stdio::null());
        self.started.push(command.spawn().expect("nsenter"));
        wait_for_steps(&self.cluster.world.home(), 0, 20);
    }

    fn steps(&self) -> Vec<String> {
        steps_in(&self.cluster.world.home(), 0)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for child in &mut self.started {
            send("KILL", &family(child.id()));
            let _ = child.wait();
        }
    }
}

/// Each line is the step after the one before, of one run; up to the last.
fn are_right(lines: &[String]) {
    let field = |line: &str, index: usize| line.split(' ').nth(index).unwrap_or("").to_owned();
    let expected = (1..=STEPS).map(|step| (field(&lines[0], 0), step.to_string()));
    let said = lines.iter().map(|line| (field(line, 0), field(line, 1)));
    assert_eq!(said.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
}

fn comes_back_elsewhere(name: &str, ranks: usize) {
    let Some(mut site) = Site::new(name) else { return };
    site.start(ranks);
    let saved = site.cluster.output(0, &["checkpoint", "mpi", "--stop"]);
    assert!(saved.status.success(), "{}", stderr(&saved));
    let image = String::from_utf8_lossy(&saved.stdout).trim().to_owned();
    let begin = Instant::now();
    // Nothing goes on before it is told to.
    let before = site.steps().len();
    thread::sleep(Duration::from_millis(200));
    assert_eq!(site.steps().len(), before);
    let at = site.cluster.at(2);
    let restart = |host: usize, part: &str| {
        let restart = ["restart", &image, "--at", &at, "--parts", part];
        site.cluster.kedge(host, &restart).spawn().expect("nsenter")
    };
    let running = [restart(2, "0"), restart(3, "1")];
    for (part, child) in running.into_iter().enumerate() {
        let ended = child.wait_with_output().expect("ended");
        // The daemon of the second host has done its work.
        let code = if part == 0 { WELL } else { 0 };
        assert_eq!(ended.status.code(), Some(code), "part {part}: {}", stderr(&ended));
    }
    assert!(begin.elapsed() < TIMEOUT + Duration::from_millis(20 * STEPS));
    are_right(&site.steps());
}

#[test]
fn two_ranks_of_open_mpi_come_back_on_two_other_hosts() {
    comes_back_elsewhere("hostsm2", 1);
}

#[test]
fn four_ranks_of_open_mpi_come_back_on_two_other_hosts() {
    comes_back_elsewhere("hostsm4", 2);
}
