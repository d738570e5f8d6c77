//! Hosts that are namespaces, each with a network, a name and a runtime folder of its own, and a
//! folder of images that they share.

use crate::job::{User, kedge_as, kill_all_in};
use crate::world::{World, is_root};
use kedge_left_out::left_out;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// What all parts of a test's job know.
const KEY: &str = "a key that these tests alone have";
/// How long a namespace may take to be there.
const SOON: Duration = Duration::from_secs(5);

/// A namespace, for as long as this lives.
#[derive(Debug)]
pub struct Host {
    holder: Child,
    runtime: PathBuf,
    name: String,
}

impl Host {
    fn new(world: &World, user: User, name: &str) -> Host {
        let runtime = world.home().join(name);
        fs::create_dir(&runtime).expect("a folder");
        fs::set_permissions(&runtime, fs::Permissions::from_mode(0o700)).expect("mine");
        if user == User::Nobody {
            chown(&runtime, Some(65534), Some(65534)).expect("root");
        }
        let holder = Command::new("unshare").args(["-nu", "sleep", "300"]).spawn();
        Host { holder: holder.expect("unshare"), runtime, name: name.to_owned() }
    }

    /// Whether it is another host already than the one that all are on.
    fn is_there(&self) -> bool {
        let network = |of: &str| fs::read_link(format!("/proc/{of}/ns/net")).ok();
        let own = network(&self.holder.id().to_string());
        own.is_some() && own != network("self") && self.does(&format!("hostname {}", self.name))
    }

    /// The process that keeps it.
    pub fn id(&self) -> u32 {
        self.holder.id()
    }

    /// A command on this host, whose program and arguments are still to come.
    pub fn inside(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-n", "-u", "-t", &self.holder.id().to_string(), "--"]);
        command
    }

    /// Whether the kernel says of a device that it carries: up to a second after it is up.
    fn carries(&self, device: &str) -> bool {
        let shown = self.inside().args(["ip", "link", "show", device]).output();
        shown.is_ok_and(|shown| String::from_utf8_lossy(&shown.stdout).contains("state UP"))
    }

    /// Does the command on this host; whether it succeeded.
    pub fn does(&self, words: &str) -> bool {
        let done = self.inside().args(words.split(' ')).output();
        done.is_ok_and(|done| done.status.success())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// Sites of some hosts each: those of site S have the addresses 10.79.S.1, .2 …, fd79:S::1, ::2 …
#[derive(Debug)]
pub struct Cluster {
    pub world: World,
    pub user: User,
    pub hosts: Vec<Host>,
}

impl Cluster {
    /// Sites of two hosts each; `None` where there can be no such hosts.
    pub fn new(name: &str, user: User, sites: usize) -> Option<Cluster> {
        Cluster::of_sites(name, user, &vec![2; sites])
    }

    /// Sites of so many hosts each, two at least; `None` where there can be no such hosts.
    pub fn of_sites(name: &str, user: User, sites: &[usize]) -> Option<Cluster> {
        if !is_root() {
            left_out(name, "only root can make hosts of its own");
            return None;
        }
        let world = World::new(name);
        let mut cluster = Cluster { world, user, hosts: Vec::new() };
        for (site, hosts) in sites.iter().enumerate() {
            if !cluster.site(site + 1, *hosts) {
                left_out(name, "no network namespaces, or no `ip`");
                return None;
            }
        }
        Some(cluster)
    }

    /// Wires two hosts to each other, and more of them to the first one, which has a bridge.
    fn site(&mut self, site: usize, hosts: usize) -> bool {
        let letters = ["a", "b", "c", "d", "e", "f", "g", "h"];
        let name = |letter: &&str| format!("{letter}{site}");
        let names: Vec<String> = letters.iter().take(hosts).map(name).collect();
        let all: Vec<Host> =
            names.iter().map(|name| Host::new(&self.world, self.user, name)).collect();
        let begin = Instant::now();
        let first = match &all[..] {
            [_, two] => format!("ip link add ka type veth peer name kb netns {}", two.holder.id()),
            _ => "ip link add ka type bridge".to_owned(),
        };
        while !all.iter().all(Host::is_there) || !all[0].does(&first) {
            if begin.elapsed() > SOON {
                return false;
            }
            thread::sleep(Duration::from_millis(20));
        }
        for (number, host) in all.iter().enumerate().skip(1).filter(|_| hosts > 2) {
            let (wire, other) = (format!("w{number}"), host.holder.id());
            let made = format!("ip link add {wire} type veth peer name kb netns {other}");
            if !all[0].does(&made) {
                return false;
            }
            assert!(all[0].does(&format!("ip link set {wire} master ka up")));
        }
        for (number, host) in all.iter().enumerate() {
            let device = if number == 0 { "ka" } else { "kb" };
            let number = number + 1;
            assert!(host.does("ip link set lo up"));
            assert!(host.does(&format!("ip addr add 10.79.{site}.{number}/24 dev {device}")));
            assert!(host.does(&format!("ip addr add fd79:{site}::{number}/64 dev {device} nodad")));
            assert!(host.does(&format!("ip link set {device} up")));
        }
        // Before, UCX takes a device for one that is not there.
        let devices = std::iter::once("ka").chain(std::iter::repeat("kb"));
        for (host, device) in all.iter().zip(devices) {
            let begin = Instant::now();
            while !host.carries(device) {
                assert!(begin.elapsed() < SOON, "{device} carries nothing");
                thread::sleep(Duration::from_millis(10));
            }
        }
        self.hosts.extend(all);
        true
    }

    /// The first host of a site, where the coordinator is to be.
    pub fn at(&self, site: usize) -> String {
        format!("10.79.{site}.1:7431")
    }

    /// The folder of images.
    pub fn images(&self) -> String {
        self.world.home().join("images").display().to_string()
    }

    /// kedge on that host.
    pub fn kedge(&self, host: usize, arguments: &[&str]) -> Command {
        let kedge = kedge_as(&self.world, self.user, arguments);
        let mut command = self.hosts[host].inside();
        command.arg(kedge.get_program()).args(kedge.get_args()).current_dir(self.world.home());
        command.envs(self.variables(host)).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// What kedge on that host has in its environment.
    pub fn variables(&self, host: usize) -> Vec<(String, String)> {
        let kedge = kedge_as(&self.world, self.user, &[]);
        let text = |text: &OsStr| text.to_string_lossy().into_owned();
        let set = kedge.get_envs().filter_map(|(name, value)| Some((text(name), text(value?))));
        let runtime = self.hosts[host].runtime.display().to_string();
        let own =
            ["XDG_RUNTIME_DIR", "XDG_STATE_HOME"].map(|name| (name.to_owned(), runtime.clone()));
        let key = ("KEDGE_JOIN_KEY".to_owned(), KEY.to_owned());
        set.chain(own).chain([key]).collect()
    }

    /// What kedge says on that host, once it is done.
    pub fn output(&self, host: usize, arguments: &[&str]) -> Output {
        self.kedge(host, arguments).output().expect("nsenter")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        kill_all_in(&self.world.home());
    }
}
