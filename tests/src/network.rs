//! A network of a test's own with two users, who lends and who borrows. It takes root.

use crate::server::Served;
use crate::world::{World, is_root};
use crate::{host, kedge};
use kedge_left_out::left_out;
use std::path::PathBuf;
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

/// An address that is not loopback.
pub const ADDRESS: &str = "192.0.2.1";

/// A network with two users: who lends, and who borrows.
#[derive(Debug)]
pub struct Network {
    pub world: World,
    holder: Child,
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// Waits until something is so.
///
/// # Panics
/// It is not within 20 s.
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !so() {
        assert!(begin.elapsed() < Duration::from_secs(20), "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl Network {
    /// Makes one; `None`, which is told, where this is not root.
    ///
    /// # Panics
    /// It cannot be made.
    pub fn new(name: &str) -> Option<Network> {
        if !is_root() {
            left_out(name, "only root can make a network of its own");
            return None;
        }
        let holder = Command::new("unshare").args(["-n", "sleep", "200"]).spawn();
        let network = Network { world: World::new(name), holder: holder.expect("unshare") };
        let of = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).ok();
        let pid = network.holder.id().to_string();
        until("a network", || of(&pid).is_some_and(|it| Some(it) != of("self")));
        for words in
            [&["ip", "link", "set", "lo", "up"][..], &["ip", "addr", "add", ADDRESS, "dev", "lo"]]
        {
            let done = network.inside(words).output().expect("nsenter");
            assert!(done.status.success(), "{words:?}: {done:?}");
        }
        Some(network)
    }

    /// Returns a process that is in the network.
    pub fn process(&self) -> u32 {
        self.holder.id()
    }

    /// A command in the network.
    pub fn inside(&self, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-n", "-t", &self.holder.id().to_string(), "--"]).args(words);
        command
    }

    /// Where a user has his keys.
    pub fn config(&self, user: &str) -> PathBuf {
        self.world.0.join(user)
    }

    /// kedge, as one of the users.
    pub fn kedge(&self, user: &str, arguments: &[&str]) -> Command {
        self.kedge_under(&[], user, arguments)
    }

    /// The same as a child of `parent`.
    pub fn kedge_under(&self, parent: &[&str], user: &str, arguments: &[&str]) -> Command {
        let mut command =
            self.inside(&[parent, &["env", "--default-signal=HUP,INT,QUIT"]].concat());
        command.arg(kedge()).args(arguments).env("XDG_CONFIG_HOME", self.config(user));
        command.env("XDG_RUNTIME_DIR", self.world.runtime());
        command.env("XDG_STATE_HOME", self.world.runtime());
        command
    }

    /// What kedge prints as one of the users.
    ///
    /// # Panics
    /// It fails.
    pub fn text(&self, user: &str, arguments: &[&str]) -> String {
        let output = self.kedge(user, arguments).output().expect("kedge: build it first");
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// Has one user pin what the other shows.
    ///
    /// # Panics
    /// He cannot.
    pub fn pin(&self, at: &str, name: &str, of: &str) {
        let file = self.world.0.join(format!("{of}.pem"));
        std::fs::write(&file, self.text(of, &["keys", "show"])).expect("a file");
        self.text(at, &["keys", "add", name, &file.display().to_string()]);
    }

    /// Both have keys, and have pinned each other.
    pub fn acquainted(name: &str) -> Option<Network> {
        let network = Network::new(name)?;
        for user in ["lender", "alice"] {
            network.text(user, &["keys", "new"]);
        }
        network.pin("lender", "alice", "alice");
        network.pin("alice", ADDRESS, "lender");
        Some(network)
    }

    /// A server of the lender's, of a software device.
    pub fn serve(&self) -> Served {
        let listen = format!("{ADDRESS}:0");
        Served::started(self.kedge("lender", &["serve", "--gpu", "soft", "--listen", &listen]))
    }

    /// What comes of a program of alice's on the server's devices, and what the job's log says.
    pub fn run(&self, server: &Served, job: &str) -> (Output, String) {
        let program = host("gpu_sum.cu", "gpu_sum", &["-O1", "-arch=sm_80"]).display().to_string();
        let run = ["run", "--gpu", &server.address, "--job", job, "--", &program, "0", "2", "1"];
        let output = self.kedge("alice", &run).output().expect("kedge");
        (output, self.text("alice", &["logs", job]))
    }
}
