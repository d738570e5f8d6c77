//! `kedge cache` with a partner: what fsync acknowledged is there when the node is not.
use kedge_tests::cached::Cached;
use kedge_tests::network::{ADDRESS, Network, until};
use kedge_tests::world::{World, stderr, wait_for};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

const MIB: usize = 1 << 20;

/// A partner on this machine, until the end.
pub(crate) struct Partner {
    process: Child,
    address: String,
    folder: PathBuf,
    /// In which it has its folder.
    _world: World,
    /// As whom it knows the caches of these tests.
    key: &'static str,
}

impl Partner {
    pub(crate) fn start(name: &str) -> Partner {
        let world = World::new(&format!("{name}p"));
        let command = world.kedge(&["cache", "partner"]);
        Partner::started(world, command, "127.0.0.1", "_here")
    }

    /// One that a network's lender runs for alice, who shows her key.
    fn with_keys(name: &str, network: &Network) -> Partner {
        let command = network.kedge("lender", &["cache", "partner"]);
        Partner::started(World::new(&format!("{name}p")), command, ADDRESS, "alice")
    }

    fn started(world: World, mut command: Command, host: &str, key: &'static str) -> Partner {
        let folder = world.0.join("kept");
        command.args(["--listen", &format!("{host}:0"), "--dir"]);
        command.arg(format!("{}:64M", folder.display())).stderr(Stdio::piped());
        let mut process = command.spawn().expect("kedge");
        let mut said = BufReader::new(process.stderr.take().expect("it says where"));
        let mut line = String::new();
        said.read_line(&mut line).expect("a line");
        // Nobody reads what else it says, and it is not to wait for that.
        std::thread::spawn(move || said.lines().map_while(Result::ok).count());
        let address = line.split(' ').find(|word| word.starts_with(&format!("{host}:")));
        let address = address.unwrap_or_else(|| panic!("{line}")).to_owned();
        Partner { process, address, folder, _world: world, key }
    }

    /// The folder of this node.
    fn of_node(&self) -> PathBuf {
        let node = fs::read_to_string("/proc/sys/kernel/hostname").expect("a name");
        self.folder.join(self.key).join(node.trim())
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A cached folder with that partner; parts stay where they are as long as the file is there.
pub(crate) fn start(name: &str, partner: &Partner) -> Option<(Cached, PathBuf)> {
    let options = ["--tier", "ram:64M", "--fsync", "partner", "--partner", &partner.address];
    begin(Cached::new(name, &options)?)
}

fn begin(mut cached: Cached) -> Option<(Cached, PathBuf)> {
    let held = cached.world.0.join("held");
    fs::write(&held, "").expect("a file");
    // Nothing of what is drained counts, and nothing gets below.
    cached.fault = Some(format!("eio={}", held.display()));
    cached.begin();
    Some((cached, held))
}

/// Ends the daemon, and takes away what it had in memory, as the loss of the node does.
pub(crate) fn lose_node(cached: &Cached) {
    let told = cached.status()["tiers"][0]["folder"].as_str().map(PathBuf::from);
    let memory = told.expect("a folder");
    cached.kill();
    let home = memory.parent().expect("the home of the cache");
    assert!(home.starts_with("/dev/shm/"), "{}", home.display());
    fs::remove_dir_all(home).expect("it is there");
}

pub(crate) fn recover(cached: &Cached, partner: &Partner) -> serde_json::Value {
    let mut value = serde_json::Value::Null;
    // The partner sees a moment later that the daemon is gone.
    wait_for("nothing is recovered", || {
        let mut command = cached.world.kedge(&["cache", "recover", "--json", "--under"]);
        let output = command.arg(&cached.under).arg("--partner").arg(partner.of_node()).output();
        let output = output.expect("kedge");
        if stderr(&output).contains("is connected") {
            return false;
        }
        assert!(output.status.success(), "{}", stderr(&output));
        value = serde_json::from_slice(&output.stdout).expect("JSON");
        true
    });
    value
}

#[test]
fn what_fsync_acknowledged_survives_the_loss_of_the_node() {
    let partner = Partner::start("ppart");
    let Some((cached, _held)) = start("ppart", &partner) else { return };
    let data: Vec<u8> = (0..6 * MIB).map(|at| (at / 4096 % 251) as u8).collect();
    let mut file = File::create(cached.under.join("a")).expect("a file");
    file.write_all(&data).expect("absorbed");
    file.sync_all().expect("the partner has it");
    fs::rename(cached.under.join("a"), cached.under.join("b")).expect("renamed");
    let said = cached.status();
    assert_eq!(
        (&said["partner"]["connected"], &said["partner"]["drained"]),
        (&true.into(), &0.into())
    );
    assert_eq!(fs::metadata(cached.below().join("b")).expect("there").len(), 0);
    drop(file);
    lose_node(&cached);
    assert_eq!(recover(&cached, &partner)["files"], 1);
    assert!(fs::read(cached.under.join("b")).expect("there") == data);
    assert!(!partner.of_node().exists(), "nothing is left");
}

#[test]
fn a_partner_that_goes_has_fsync_drain_and_what_is_drained_is_given_up() {
    let partner = Partner::start("pgone");
    let Some((cached, held)) = start("pgone", &partner) else { return };
    let (kept, here) = (cached.under.join("kept"), cached.below().join("kept"));
    let mut file = File::create(&kept).expect("a file");
    file.write_all(b"at the partner").expect("absorbed");
    file.sync_all().expect("the partner has it");
    fs::remove_file(&held).expect("it is there");
    cached.drain();
    wait_for("the partner keeps it", || cached.status()["partner"]["holds"] == 0);
    assert_eq!(fs::read(&here).expect("there"), b"at the partner");
    drop(file);
    drop(partner);
    let mut file = File::create(cached.under.join("b")).expect("a file");
    file.write_all(b"below").expect("absorbed");
    file.sync_all().expect("drained");
    assert_eq!(fs::read(cached.below().join("b")).expect("there"), b"below");
    wait_for("it is not told", || cached.status()["partner"]["connected"] == false);
    drop(file);
    // All is below, and a recovery at the partner must not be tried before it knows that.
    let stopped = cached.output("stop");
    let said = stderr(&stopped);
    assert!(!stopped.status.success() && said.contains("may keep"), "{said}");
    let untold = cached.output("recover");
    let said = stderr(&untold);
    assert!(!untold.status.success() && said.contains("its partner does not know it"), "{said}");
    let mut command = cached.world.kedge(&["cache", "recover", "--discard=all", "--under"]);
    let given_up = command.arg(&cached.under).output().expect("kedge");
    assert!(given_up.status.success(), "{}", stderr(&given_up));
}

/// Keys and TLS, as between two machines; a key that is revoked has no partner any more.
#[test]
fn a_partner_with_keys_has_what_fsync_acknowledged() {
    let Some(network) = Network::acquainted("pkeys") else { return };
    let partner = Partner::with_keys("pkeys", &network);
    let options = ["--tier", "ram:64M", "--fsync", "partner", "--partner", &partner.address];
    let Some(mut cached) = Cached::new("pkeysc", &options) else { return };
    cached.network = Some((network.process(), network.config("alice")));
    let Some((cached, _held)) = begin(cached) else { return };
    let data: Vec<u8> = (0..3 * MIB).map(|at| (at / 512 % 253) as u8).collect();
    let write = |name: &str| {
        let mut file = File::create(cached.under.join(name)).expect("a file");
        file.write_all(&data).expect("absorbed");
        file.sync_all()
    };
    write("a").expect("the partner has it");
    let said = cached.status()["partner"].clone();
    assert_eq!((&said["connected"], &said["drained"]), (&true.into(), &0.into()), "{said}");
    network.text("lender", &["keys", "revoke", "alice"]);
    until("it is refused", || cached.status()["partner"]["connected"] == false);
    write("b").expect_err("nothing gets below, and no partner has it");
    lose_node(&cached);
    assert_eq!(recover(&cached, &partner)["files"], 1);
    assert!(fs::read(cached.under.join("a")).expect("there") == data);
}

/// Nothing is left of a cache whose partner is not there, and the command says why.
#[test]
fn a_partner_that_is_mistyped_leaves_no_cache() {
    let options = ["--tier", "ram:16M", "--fsync", "partner", "--partner", "127.0.0.1:1"];
    let Some(cached) = Cached::new("pnone", &options) else { return };
    let output = cached.try_begin();
    let said = stderr(&output);
    assert!(!output.status.success() && said.contains("the partner 127.0.0.1:1"), "{said}");
    let recovered = cached.recover();
    assert_eq!(
        (&recovered["files"], &recovered["at_partner"]),
        (&0.into(), &serde_json::Value::Null)
    );
}

#[test]
fn python_syncs_to_the_partner() {
    let partner = Partner::start("pprog");
    let Some((cached, _held)) = start("pprog", &partner) else { return };
    let program = "import os\nfor n in range(20):\n f=open(f'f{n}','wb')\n f.write(bytes([n])*70000)\n \
                   f.flush()\n os.fsync(f.fileno())\n f.close()";
    let mut python = Command::new("python3");
    let output = python.args(["-c", program]).current_dir(&cached.under).output().expect("python3");
    assert!(output.status.success(), "{}", stderr(&output));
    lose_node(&cached);
    assert_eq!(recover(&cached, &partner)["files"], 20);
    for n in 0..20u8 {
        let found = fs::read(cached.under.join(format!("f{n}"))).expect("there");
        assert!(found == vec![n; 70000], "f{n}");
    }
}
