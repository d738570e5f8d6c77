//! As whom a server's proxies run, and its log for programs.
use kedge_tests::host;
use kedge_tests::job::{User, children, kedge_as};
use kedge_tests::network::{ADDRESS, Network, until};
use kedge_tests::server::Served;
use kedge_tests::world::{World, is_root, stderr};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// A job that holds a device until its input ends.
struct Holds(Child);

impl Holds {
    fn start(network: &Network, user: &str, gpu: &str, job: &str) -> Holds {
        let program = host("gpu_quota.cu", "gpu_quota", &["-O1", "-arch=sm_80"]);
        let program = program.display().to_string();
        let run = ["run", "--gpu", gpu, "--job", job, "--", &program, "100"];
        let mut command = network.kedge(user, &run);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("kedge");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        assert!(line.starts_with("devices 1 "), "{line} {}", network.text(user, &["logs", job]));
        Holds(child)
    }
}

impl Drop for Holds {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// The numbers in a line of a process's status.
fn status(pid: u32, line: &str) -> Vec<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
    let found = status.lines().find_map(|it| it.strip_prefix(line)).expect("such a line");
    found.split_whitespace().map(str::to_owned).collect()
}

/// Whether a user, without any rights, can do something.
fn can(user: &str, words: &[&str]) -> bool {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", user, "--regid", user, "--clear-groups", "--inh-caps=-all"]);
    command.args(words).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().expect("setpriv").success()
}

/// A server whose proxies run as users of the keys, from a place that these can read.
fn serve(network: &Network, users: &str) -> (Served, PathBuf) {
    serve_keys(network, users, "lender")
}

/// The same, with the keys of another of the network.
fn serve_keys(network: &Network, users: &str, of: &str) -> (Served, PathBuf) {
    let homes = network.world.0.join("homes");
    let listen = format!("{ADDRESS}:0");
    let kedge = network.world.parts().display().to_string();
    let words = [&*kedge, "serve", "--gpu", "soft", "--soft-memory", "256M", "--listen", &listen];
    let mut command = network.inside(&words);
    command.args(["--users", users, "--homes"]).arg(&homes);
    command.arg("--claims").arg(network.world.0.join("users"));
    command.env("XDG_CONFIG_HOME", network.config(of)).env("A_SECRET", "of the server's");
    (Served::started(command), homes)
}

/// A proxy has no terminal, log and descriptors of its server's.
fn has_nothing_of_the_server(server: &Served, pid: u32) {
    let stat = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("stat");
    let numbers: Vec<i64> = stat(pid)
        .rsplit_once(')')
        .into_iter()
        .flat_map(|(_, rest)| rest.split_whitespace().filter_map(|word| word.parse().ok()))
        .collect();
    // Behind the state: its parent, its group, its session, its terminal.
    assert_eq!(numbers[2..4], [i64::from(pid), 0], "a session of its own without a terminal");
    let links = |pid: u32| -> Vec<PathBuf> {
        let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors");
        fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok()).collect()
    };
    let of_its_own = |link: &PathBuf| link.to_string_lossy().contains("anon_inode");
    let servers: Vec<PathBuf> = links(server.pid());
    let both = links(pid).into_iter().filter(|it| servers.contains(it) && !of_its_own(it));
    // Its account is the server's too, and /dev/null is everybody's.
    let both = both.filter(|it| !it.to_string_lossy().contains("kedge-account"));
    let both: Vec<PathBuf> = both.filter(|it| it != &PathBuf::from("/dev/null")).collect();
    assert!(both.is_empty(), "{both:?}");
}

#[test]
fn each_key_s_proxies_run_as_a_user_of_its_own() {
    let Some(network) = Network::acquainted("tuusers") else { return };
    network.text("bob", &["keys", "new"]);
    network.pin("lender", "bob", "bob");
    network.pin("bob", ADDRESS, "lender");
    let (server, homes) = serve(&network, "70000-70001");
    let first = Holds::start(&network, "alice", &server.address, "first");
    let alices = children(server.pid());
    let bobs_job = Holds::start(&network, "bob", &server.address, "bobs");
    let bobs: Vec<u32> =
        children(server.pid()).into_iter().filter(|pid| !alices.contains(pid)).collect();
    let (&[alice], &[bob]) = (&alices[..], &bobs[..]) else { panic!("{alices:?} {bobs:?}") };
    for (pid, user) in [(alice, "70000"), (bob, "70001")] {
        assert_eq!(status(pid, "Uid:"), [user; 4], "all of its users");
        assert_eq!(status(pid, "Gid:"), [user; 4]);
        assert!(status(pid, "Groups:").is_empty());
        for rights in ["CapEff:", "CapPrm:", "CapInh:", "CapAmb:"] {
            assert_eq!(status(pid, rights), ["0000000000000000"], "{rights}");
        }
        assert_eq!(status(pid, "NoNewPrivs:"), ["1"]);
        let home = homes.join(user);
        let found = std::fs::metadata(&home).expect("a home");
        assert_eq!((found.uid().to_string(), found.mode() & 0o7777), (user.to_owned(), 0o700));
        let own = std::fs::read(format!("/proc/{pid}/environ")).expect("its environment");
        let own: Vec<_> = own.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
        assert!(own.contains(&format!("HOME={}", home.display()).into()), "{own:?}");
        for other in ["XDG_", "A_SECRET"] {
            assert!(!own.iter().any(|it| it.starts_with(other)), "{own:?}");
        }
        has_nothing_of_the_server(&server, pid);
    }
    // Neither reaches the other, nor the keys of who lends.
    let (pid, memory) = (alice.to_string(), format!("/proc/{alice}/mem"));
    let home = homes.join("70000").display().to_string();
    let keys = network.config("lender").display().to_string();
    let keys = format!("{keys}/kedge/keys/own.pem");
    assert!(can("70000", &["kill", "-0", &pid]) && can("70000", &["ls", &home]));
    for words in [&["kill", "-0", &*pid][..], &["ls", &home], &["head", "-c1", &memory]] {
        assert!(!can("70001", words), "{words:?}");
    }
    assert!(!can("70000", &["cat", &keys]));
    // Whoever comes back has the same user, also after another server.
    drop(first);
    until("its end", || children(server.pid()) == [bob]);
    let _again = Holds::start(&network, "alice", &server.address, "again");
    let again = children(server.pid()).into_iter().find(|pid| *pid != bob).expect("a proxy");
    assert_eq!(status(again, "Uid:")[0], "70000");
    // There are no more.
    network.text("carol", &["keys", "new"]);
    network.pin("lender", "carol", "carol");
    network.pin("carol", ADDRESS, "lender");
    let program = host("gpu_sum.cu", "gpu_sum", &["-O1", "-arch=sm_80"]).display().to_string();
    let run = ["run", "--gpu", &server.address, "--job", "carols", "--", &program, "0", "1", "1"];
    assert!(!network.kedge("carol", &run).output().expect("kedge").status.success());
    let log = network.text("carol", &["logs", "carols"]);
    assert!(log.contains("it has no user for your key"), "{log}");
    assert!(server.said().contains("all users from 70000 to 70001 are keys' already"));
    drop(bobs_job);
}

/// Two servers, each with keys of its own, give no two keys one user.
#[test]
fn servers_with_other_keys_give_other_users() {
    let Some(network) = Network::acquainted("tuclaims") else { return };
    for name in ["second", "bob"] {
        network.text(name, &["keys", "new"]);
    }
    network.pin("second", "bob", "bob");
    let (first, homes) = serve(&network, "70000-70002");
    let (second, _) = serve_keys(&network, "70000-70002", "second");
    network.pin("bob", &second.address, "second");
    let _hers = Holds::start(&network, "alice", &first.address, "hers");
    let _his = Holds::start(&network, "bob", &second.address, "his");
    let [hers, his] = [&first, &second].map(|server| children(server.pid()));
    assert_eq!(
        (status(hers[0], "Uid:")[0].as_str(), homes.join("70000").exists()),
        ("70000", true)
    );
    assert_eq!(status(his[0], "Uid:")[0], "70001");
}

#[test]
fn an_ordinary_user_cannot_have_users() {
    let world = World::new("tunobody");
    let serve = ["serve", "--gpu", "soft", "--listen", "127.0.0.1:0", "--users", "70000-70001"];
    let user = if is_root() { User::Nobody } else { User::Same };
    if user == User::Nobody {
        world.give_home_away();
    }
    let output = kedge_as(&world, user, &serve).output().expect("kedge");
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(stderr(&output).contains("--users takes root"), "{output:?}");
    for bad in ["70000", "5-x", "-3"] {
        let users = format!("--users={bad}");
        let output = world.output(&["serve", "--gpu", "soft", &users]);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
    }
    if is_root() {
        let output = world.output(&["serve", "--gpu", "soft", "--users", "0-5"]);
        assert!(stderr(&output).contains("numbers of users that nobody is"), "{output:?}");
    }
}

#[test]
fn what_happens_is_told_to_programs() {
    let Some(network) = Network::acquainted("tujson") else { return };
    let listen = format!("{ADDRESS}:0");
    let serve = ["serve", "--gpu", "soft", "--listen", &listen, "--log-format", "json"];
    let server = Served::started(network.kedge("lender", &serve));
    let (output, log) = network.run(&server, "j");
    assert!(output.status.success(), "{output:?} {log}");
    let lines = || -> Vec<Value> {
        let said = server.said();
        said.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    let of = |event: &str| lines().into_iter().find(|line| line["event"] == event);
    until("the session's end", || of("ends").is_some());
    for event in ["begins", "ends"] {
        let line = of(event).expect("such a line");
        assert_eq!((&line["key"], &line["gpu"]), (&"alice".into(), &"soft".into()), "{line}");
        assert!(line["from"].as_str().expect("where").starts_with(ADDRESS), "{line}");
        assert!(line["proxy"].as_u64().expect("a process") > 1, "{line}");
        assert!(line["time"].as_f64().expect("a time") > 1.6e9, "{line}");
    }
    network.text("lender", &["keys", "limit", "alice", "--sessions", "0"]);
    assert!(!network.run(&server, "more").0.status.success());
    until("a refusal", || of("refused").is_some_and(|line| line["key"] == "alice"));
}
