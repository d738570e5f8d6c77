//! Remote shells of a job: what `ssh` starts on another host is a part of the job, with its
//! streams, its exit status and its signals, and comes back with it on other hosts.
use kedge_left_out::left_out;
use kedge_tests::cluster::Cluster;
use kedge_tests::job::{
    User, allow, build, family, is_right, name as name_of, send, steps_in, wait_for_steps,
};
use kedge_tests::remote::Remote;
use kedge_tests::world::stderr;

use kedge_tests::mpi::with_device;
use kedge_tests::{host, root};
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output};
use std::thread;
use std::time::{Duration, Instant};

/// What the programs end with when all of their steps were right.
const WELL: i32 = 7;
const TIMEOUT: Duration = Duration::from_secs(40);

/// A cluster of which some hosts let the test in.
struct Site {
    // Ended first.
    started: Vec<Child>,
    remote: Remote,
    cluster: Cluster,
    /// The devices of the job's parts.
    gpu: &'static str,
}

impl Site {
    /// Sites of so many hosts; `None` where there can be none, or no sshd.
    fn new(name: &str, sites: &[usize]) -> Option<Site> {
        Site::of(name, User::Same, sites)
    }

    /// The same for a user.
    fn of(name: &str, user: User, sites: &[usize]) -> Option<Site> {
        let cluster = Cluster::of_sites(name, user, sites)?;
        if user == User::Nobody {
            cluster.world.give_home_away();
        }
        let all: Vec<usize> = (0..cluster.hosts.len()).collect();
        let remote = Remote::new(name, &cluster, &all)?;
        Some(Site { started: Vec::new(), remote, cluster, gpu: "none" })
    }

    /// kedge on a host, whose programs find ssh.
    fn kedge(&self, host: usize, words: &[&str]) -> Command {
        let mut command = self.cluster.kedge(host, words);
        command.env("PATH", self.remote.path());
        command
    }

    /// Runs a program on the first host as the job `j`.
    fn run(&self, program: &[&str]) -> Command {
        self.run_as(&[], program)
    }

    /// The same with further options.
    fn run_as(&self, options: &[&str], program: &[&str]) -> Command {
        let images = self.cluster.images();
        let run = ["run", "--gpu", self.gpu, "--job", "j", "--ckpt-dir", &images];
        self.kedge(0, &[&run[..], options, &["--"], program].concat())
    }

    /// What lines of shell on the first host come to.
    fn shell(&self, lines: &str) -> Output {
        self.run(&["sh", "-c", lines]).output().expect("nsenter")
    }

    /// Starts a program on the first host, which writes its steps to `out.0`.
    fn start(&mut self, program: &[&str]) {
        let home = self.cluster.world.home();
        let mut command = self.run(program);
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        command.stdout(File::create(home.join("out.0")).expect("a file"));
        command.stderr(File::create(home.join("err.0")).expect("a file"));
        self.started.push(command.spawn().expect("nsenter"));
    }

    fn log(&self) -> String {
        let said = self.cluster.output(0, &["logs", "j"]);
        String::from_utf8_lossy(&said.stdout).into_owned()
    }

    /// Saves and ends the job: its image.
    fn stop(&self) -> String {
        let saved = self.cluster.output(0, &["checkpoint", "j", "--stop"]);
        assert!(saved.status.success(), "{} {}", stderr(&saved), self.log());
        String::from_utf8_lossy(&saved.stdout).trim().to_owned()
    }

    /// How many parts an image has.
    fn parts(&self, image: &str) -> usize {
        let folder = Path::new(&self.cluster.images()).join(image);
        let entries = fs::read_dir(folder).expect("an image").flatten();
        entries.filter(|entry| entry.path().is_dir()).count()
    }

    /// Restarts the parts on so many hosts in turn, from host `first` on; `out` gets what the first
    /// part prints. How they end, by host.
    fn restart(&self, image: &str, first: usize, hosts: usize, out: &Path) -> Vec<Option<i32>> {
        let (at, parts) = (self.cluster.at(2), self.parts(image));
        let start = |host: usize| {
            let numbers = (0..parts).filter(|part| part % hosts == host);
            let numbers = numbers.map(|part| part.to_string()).collect::<Vec<_>>().join(",");
            let mut command =
                self.kedge(first + host, &["restart", image, "--at", &at, "--parts", &numbers]);
            if host == 0 {
                let file = File::options().append(true).open(out).expect("a file");
                command.stdout(file);
            }
            command.spawn().expect("nsenter")
        };
        let running: Vec<Child> = (0..hosts).map(start).collect();
        let ended = running.into_iter().map(|child| child.wait_with_output().expect("ended"));
        let code = |ended: Output| {
            println!("{}", stderr(&ended));
            ended.status.code()
        };
        ended.map(code).collect()
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

#[test]
fn a_remote_shell_has_the_streams_and_the_status_of_its_command() {
    let Some(site) = Site::new("sshs", &[2]) else { return };
    let script = "
        ssh 10.79.1.2 'hostname; echo $KEDGE_JOB; echo aside >&2; exit 5'; echo $?
        head -c 3000000 /dev/zero | ssh 10.79.1.2 wc -c
        ssh 10.79.1.2 head -c 3000000 /dev/zero | wc -c
        ssh 10.79.1.2 yes | head -n 1
        ssh 10.79.1.2 'seq 9999; seq 9999 >&2' 2>&1 | (sleep 0.3; wc -c)
        ssh -n 10.79.1.2 cat; echo $?
        ssh 10.79.1.2 'kill -KILL $$'; echo $?
        ssh 10.79.1.2 'ssh 10.79.1.1 \"hostname; exit 3\"'; echo $?
        ssh -p 1 10.79.1.2 true 2>/dev/null; echo $?";
    let said = site.shell(script);
    let lines = "b1\nj.1\n5\n3000000\n3000000\ny\n97776\n0\n255\na1\n3\n255\n";
    let text = String::from_utf8_lossy(&said.stdout);
    assert_eq!(text, lines, "{} {}", stderr(&said), site.log());
    assert_eq!(stderr(&said), "aside\n");
}

#[test]
fn remote_shells_come_back_by_themselves() {
    let Some(mut site) = Site::new("sshb", &[2]) else { return };
    let home = site.cluster.world.home();
    let steps = build(&site.cluster.world, "steps", &[]);
    allow(&home, 20);
    let far = format!("exec {} 60 20 2 1 {}/go", steps.display(), home.display());
    let script = format!(
        "ssh -n 10.79.1.2 '{far}'; s=$?; echo $s > {}/status; test $s -eq {WELL}",
        home.display()
    );
    let mut command = site.run_as(&["--recover"], &["sh", "-c", &script]);
    command.stdout(File::create(home.join("out.0")).expect("a file"));
    command.stderr(File::create(home.join("err.0")).expect("a file"));
    site.started.push(command.spawn().expect("nsenter"));
    wait_for_steps(&home, 0, 10);
    let saved = site.cluster.output(0, &["checkpoint", "j"]);
    assert!(saved.status.success(), "{} {}", stderr(&saved), site.log());
    // What the parts agree on are events of this host's.
    for (host, count) in [("a1", 1), ("b1", 0)] {
        let of = ["logs", "j", "--target", "coordinator", "--host", host];
        let said = site.cluster.output(0, &of);
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        assert_eq!(said.matches("it starts a remote shell").count(), count, "{host}: {said}");
    }
    wait_for_steps(&home, 0, 15);
    let network = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    let there = network(&site.cluster.hosts[1].id().to_string());
    let all = fs::read_dir("/proc").expect("/proc").flatten();
    let all = all.filter_map(|entry| entry.file_name().to_str().map(str::to_owned));
    let all = all.filter(|pid| network(pid) == there).filter_map(|pid| pid.parse().ok());
    let words = |pid: u32| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    // The part's first process.
    let is_end = |pid: &u32| words(*pid).split(|byte| *byte == 0).any(|word| word == b"--end");
    let far: Vec<u32> = all.filter(is_end).collect();
    assert!(!far.is_empty());
    send("KILL", &far);
    allow(&home, 60);
    let ended = site.started[0].wait().expect("ended");
    let told = fs::read_to_string(home.join("err.0")).unwrap_or_default();
    let far = site.cluster.output(1, &["logs", "j.1"]);
    let far = String::from_utf8_lossy(&far.stdout);
    assert!(ended.success(), "{ended:?} {told} {} {far}", site.log());
    // What was printed since the image is printed again.
    let lines = steps_in(&home, 0);
    let nonce = lines[0].strip_prefix("nonce ").expect("a nonce");
    let (last, steps) = lines[1..].split_last().expect("lines");
    let number = |line: &String| line.strip_prefix(nonce).and_then(|rest| rest.trim().parse().ok());
    let steps: Vec<u64> = steps.iter().map(|line| number(line).expect("a step")).collect();
    let back = steps.windows(2).filter(|pair| pair[1] != pair[0] + 1).count();
    assert!(back == 1 && steps.last() == Some(&60), "{steps:?}");
    assert_eq!(*last, format!("{nonce} well"));
    let status = fs::read_to_string(home.join("status")).expect("a status");
    assert_eq!(status.trim(), WELL.to_string(), "{told}");
}

#[test]
fn what_a_remote_shell_cannot_carry_is_left_to_ssh() {
    let Some(site) = Site::new("sshp", &[2]) else { return };
    let script = "
        ssh -A 10.79.1.2 'echo ${KEDGE_JOB:-none}'
        echo 'echo ${KEDGE_JOB:-none}' | ssh 10.79.1.2
        KEDGE_SSH=plain ssh 10.79.1.2 'echo ${KEDGE_JOB:-none}'
        scp -q -S ssh -O 10.79.1.2:/etc/hostname copied && cmp copied /etc/hostname && echo same";
    let said = site.shell(script);
    let text = String::from_utf8_lossy(&said.stdout);
    assert_eq!(text, "none\nnone\nnone\nsame\n", "{}", stderr(&said));
    let log = site.log();
    for why in ["-A", "an interactive shell", "a transfer (scp)"] {
        let line = format!("{why}: what this ssh starts is not a part of the job");
        assert!(log.contains(&line), "{why}: {log}");
    }
    assert!(!log.contains("it starts a remote shell"), "{log}");
}

#[test]
fn a_signal_to_a_remote_shell_reaches_its_command() {
    let Some(mut site) = Site::new("sshk", &[2]) else { return };
    let home = site.cluster.world.home();
    let at = home.display();
    let far = format!(
        "trap \"echo over > {at}/over; exit 3\" TERM; echo here > {at}/here; \
         while :; do sleep 0.05; done"
    );
    site.start(&["ssh", "10.79.1.2", &far]);
    waits_for(&home.join("here"));
    let all = family(site.started[0].id());
    let shells: Vec<u32> = all.into_iter().filter(|pid| name_of(*pid) == "ssh").collect();
    assert_eq!(shells.len(), 1, "{shells:?}");
    send("TERM", &shells);
    waits_for(&home.join("over"));
    // As ssh itself ends.
    let ended = site.started[0].wait().expect("ended");
    assert_eq!(ended.signal(), Some(15), "{ended:?}");
}

/// What a command does not read of its input holds up neither signals nor what it says.
#[test]
fn a_signal_reaches_a_command_that_does_not_read_its_input() {
    let Some(mut site) = Site::new("sshf", &[2]) else { return };
    let home = site.cluster.world.home();
    let (here, over) = (home.join("here"), home.join("over"));
    let far = format!(
        "trap \"echo over > {}; exit 3\" TERM; head -c 1; echo here > {}; \
         while :; do sleep 0.05; done",
        over.display(),
        here.display()
    );
    site.start(&["sh", "-c", &format!("yes | ssh 10.79.1.2 '{far}'")]);
    waits_for(&here);
    // Until nothing more is taken.
    thread::sleep(Duration::from_millis(500));
    let all = family(site.started[0].id());
    let shells: Vec<u32> = all.into_iter().filter(|pid| name_of(*pid) == "ssh").collect();
    assert_eq!(shells.len(), 1, "{shells:?}");
    send("TERM", &shells);
    waits_for(&over);
}

#[test]
fn a_signal_that_is_ignored_ends_no_remote_shell() {
    let Some(site) = Site::new("sshi", &[2]) else { return };
    let here = site.cluster.world.home().join("here");
    let script = format!(
        "(trap '' HUP TERM; exec ssh 10.79.1.2 'echo > {here}; sleep 1; echo over') &
         until [ -e {here} ]; do sleep 0.05; done
         kill -HUP $!; kill -TERM $!; wait $!; echo $?",
        here = here.display()
    );
    let said = site.shell(&script);
    let text = String::from_utf8_lossy(&said.stdout);
    assert_eq!(text, "over\n0\n", "{} {}", stderr(&said), site.log());
}

#[test]
fn what_a_command_leaves_behind_is_collected_when_it_ends() {
    let Some(site) = Site::new("sshz", &[2]) else { return };
    // Children of the command's parent: the command alone, and no dead ones.
    let script = "ssh 10.79.1.2 'for i in 1 2 3; do (sleep 0.1 &); done; sleep 1
                                 cat /proc/$PPID/task/*/children | wc -w'";
    let said = site.shell(script);
    assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), "1", "{}", stderr(&said));
}

#[test]
fn a_host_without_kedge_is_left_to_ssh() {
    let Some(site) = Site::new("sshw", &[2]) else { return };
    let script = "echo in | KEDGE_REMOTE=/no/kedge ssh 10.79.1.2 \
                  'echo ${KEDGE_JOB:-none}; cat; exit 4'; echo $?";
    let said = site.shell(script);
    assert_eq!(String::from_utf8_lossy(&said.stdout), "none\nin\n4\n", "{}", stderr(&said));
    assert!(stderr(&said).contains("10.79.1.2 has no /no/kedge"), "{}", stderr(&said));
    assert!(site.log().contains("what this ssh starts is not a part of the job"));
}

/// Until the file is there.
fn waits_for(file: &Path) {
    let begin = Instant::now();
    while !file.exists() {
        assert!(begin.elapsed() < TIMEOUT, "{}", file.display());
        thread::sleep(Duration::from_millis(10));
    }
}

/// What a remote program prints while the job is saved and ended comes on elsewhere, all of it, and
/// a remote shell that the job starts then is a part, too.
#[test]
fn streams_go_on_after_a_restart_on_other_hosts() {
    const STEPS: u64 = 120;
    let Some(mut site) = Site::new("sshr", &[2, 2]) else { return };
    let home = site.cluster.world.home();
    build(&site.cluster.world, "steps", &[]);
    allow(&home, STEPS / 2);
    let line = format!(
        "ssh 10.79.1.2 'cd {} && exec ./steps {STEPS} 10 2 1 go'; code=$?; \
         ssh 10.79.2.2 'hostname; echo $KEDGE_JOB' > shell; exit $code",
        home.display()
    );
    site.start(&["sh", "-c", &line]);
    wait_for_steps(&home, 0, 20);
    let image = site.stop();
    allow(&home, STEPS);
    let codes = site.restart(&image, 2, 2, &home.join("out.0"));
    let said = fs::read_to_string(home.join("err.0")).unwrap_or_default();
    assert_eq!(codes, [Some(WELL); 2], "{said}");
    is_right(&home, 0, STEPS);
    let shell = fs::read_to_string(home.join("shell")).expect("a file");
    // The number of the part that has ended is free.
    assert!(shell == "b2\nj.1\n" || shell == "b2\nj.2\n", "{shell}");
}

/// The line that has started the job goes on with it, all of its parts on this host.
#[test]
fn a_job_with_remote_shells_is_resumed_on_one_host() {
    const STEPS: u64 = 120;
    let Some(mut site) = Site::new("sshu", &[2]) else { return };
    let home = site.cluster.world.home();
    build(&site.cluster.world, "steps", &[]);
    allow(&home, STEPS / 2);
    let line = format!("ssh 10.79.1.2 'cd {} && exec ./steps {STEPS} 10 2 1 go'", home.display());
    site.start(&["sh", "-c", &line]);
    wait_for_steps(&home, 0, 20);
    site.stop();
    site.started[0].wait().expect("ended");
    allow(&home, STEPS);
    let out = File::options().append(true).open(home.join("out.0")).expect("a file");
    let mut again = site.run_as(&["--resume"], &["sh", "-c", &line]);
    let ended = again.stdout(out).output().expect("nsenter");
    assert_eq!(ended.status.code(), Some(WELL), "{} {}", stderr(&ended), site.log());
    is_right(&home, 0, STEPS);
}

/// Each line is the step after the one before, of one run; up to the last.
fn are_right(lines: &[String], steps: u64) {
    let field = |line: &str, index: usize| line.split(' ').nth(index).unwrap_or("").to_owned();
    let expected = (1..=steps).map(|step| (field(&lines[0], 0), step.to_string()));
    // What the launcher says at the end is not the program's.
    let said = lines.iter().take_while(|line| !line.starts_with('-') && !line.is_empty());
    let said = said.map(|line| (field(line, 0), field(line, 1)));
    assert_eq!(said.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
}

/// Whether there is such a compiler, which is counted: the program is `mpi` then, of ranks that use
/// devices if the job has some.
fn compiled(name: &str, site: &Site, compiler: &str) -> bool {
    let program = site.cluster.world.home().join("mpi");
    let mut command = Command::new(compiler);
    command.arg("-O1").arg("-o").arg(&program);
    match site.gpu {
        "none" => command.arg(root().join("crates/process/tests/mpi.c")),
        _ => command.args(with_device(&program)),
    };
    match command.status() {
        Err(error) => {
            left_out(name, &format!("{compiler}: {error}: scripts/setup --tests"));
            false
        }
        Ok(status) => {
            assert!(status.success(), "{compiler}");
            true
        }
    }
}

/// A launcher's own command line, unchanged, on so many hosts; saved, and brought back on others.
fn mpi_comes_back(name: &str, user: User, compiler: &str, hosts: usize, launcher: &[&str]) {
    mpi_comes_back_with("none", name, user, compiler, hosts, launcher);
}

/// The same of ranks with such devices.
fn mpi_comes_back_with(
    gpu: &'static str,
    name: &str,
    user: User,
    compiler: &str,
    hosts: usize,
    launcher: &[&str],
) {
    const STEPS: u64 = 300;
    let Some(mut site) = Site::of(name, user, &[hosts, hosts]) else { return };
    site.gpu = gpu;
    let home = site.cluster.world.home();
    if !compiled(name, &site, compiler) {
        return;
    }
    let steps = STEPS.to_string();
    site.start(&[launcher, &["./mpi", &steps]].concat());
    wait_for_steps(&home, 0, 20);
    let image = site.stop();
    let before = steps_in(&home, 0).len();
    thread::sleep(Duration::from_millis(200));
    assert_eq!(steps_in(&home, 0).len(), before, "nothing goes on before it is told to");
    let codes = site.restart(&image, hosts, hosts, &home.join("out.0"));
    // The launcher ends as its program, and what it has started elsewhere well.
    let well = std::iter::once(WELL).chain(std::iter::repeat_n(0, hosts - 1)).map(Some);
    assert_eq!(codes, well.collect::<Vec<_>>());
    are_right(&steps_in(&home, 0), STEPS);
}

const OPEN_MPI: [&str; 10] = [
    "mpirun.openmpi",
    "--mca",
    "btl_tcp_if_include",
    "10.79.0.0/16",
    "--mca",
    "mpi_yield_when_idle",
    "1",
    "--bind-to",
    "none",
    "--host",
];

#[test]
fn open_mpi_on_two_hosts_comes_back_on_two_others() {
    let hosts = ["10.79.1.1,10.79.1.2"];
    let launcher = [&OPEN_MPI[..], &hosts].concat();
    mpi_comes_back("ssho2", User::Same, "mpicc.openmpi", 2, &launcher);
}

/// An image holds the devices of all ranks at one moment, and what was on its way between hosts.
#[test]
fn open_mpi_s_ranks_with_devices_come_back_on_two_others() {
    let hosts = ["10.79.1.1,10.79.1.2"];
    let launcher = [&OPEN_MPI[..], &hosts].concat();
    mpi_comes_back_with("soft", "sshog", User::Same, "mpicc.openmpi", 2, &launcher);
}

#[test]
fn so_it_does_for_an_ordinary_user() {
    let hosts = ["10.79.1.1,10.79.1.2"];
    let launcher = [&OPEN_MPI[..], &hosts].concat();
    mpi_comes_back("ssho2n", User::Nobody, "mpicc.openmpi", 2, &launcher);
}

#[test]
fn open_mpi_on_four_hosts_comes_back_on_four_others() {
    let hosts = ["10.79.1.1,10.79.1.2,10.79.1.3,10.79.1.4"];
    let launcher = [&OPEN_MPI[..], &hosts].concat();
    mpi_comes_back("ssho4", User::Same, "mpicc.openmpi", 4, &launcher);
}

/// Which of the hosts its launcher takes for the one that it is on is its own affair: it may start
/// a remote shell on its own host as well. Hosts that are namespaces share what UCX takes for a
/// sign of one machine, and what tells it of devices.
#[test]
fn mpich_on_two_hosts_comes_back_on_two_others() {
    let devices = std::env::temp_dir().join(format!("kedge-sshm2-{}", std::process::id()));
    fs::create_dir(&devices).expect("a folder");
    for device in ["ka", "kb"] {
        // As sysfs has them.
        symlink("/nowhere", devices.join(device)).expect("a link");
    }
    let own = host("own_devices.c", "own_devices.so", &["-shared", "-fPIC"]);
    let (devices, own) = (devices.display().to_string(), own.display().to_string());
    let launcher = [
        &["mpiexec.mpich", "-genv", "UCX_TLS", "tcp,self", "-genv", "LD_PRELOAD", &own][..],
        &["-genv", "KEDGE_DEVICES", &devices, "-hosts", "10.79.1.1,10.79.1.2", "-n", "2"],
    ];
    mpi_comes_back("sshm2", User::Same, "mpicc.mpich", 2, &launcher.concat());
    fs::remove_dir_all(devices).expect("its own");
}
