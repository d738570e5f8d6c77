//! `kedge keys`: keys are made, handed over, pinned and revoked, and kept from others.
use kedge_tests::world::{World, failure, has_fields, is_root, stderr};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// A user's keys on a machine of his own.
struct Machine<'a> {
    world: &'a World,
    config: PathBuf,
}

impl Machine<'_> {
    fn new<'a>(world: &'a World, name: &str) -> Machine<'a> {
        Machine { world, config: world.0.join(name) }
    }

    fn folder(&self) -> PathBuf {
        self.config.join("kedge/keys")
    }

    fn kedge(&self, arguments: &[&str]) -> Command {
        let mut command = self.world.kedge(&["keys"]);
        command.args(arguments).env("XDG_CONFIG_HOME", &self.config);
        command
    }

    fn output(&self, arguments: &[&str]) -> Output {
        self.kedge(arguments).output().expect("kedge: build it first (cargo build --release)")
    }

    fn text(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// Why it fails.
    fn refused(&self, arguments: &[&str]) -> String {
        failure(&self.output(arguments))
    }

    fn list(&self) -> Vec<Value> {
        let text = self.text(&["list", "--json"]);
        serde_json::from_str(&text).expect("a JSON list")
    }

    /// Pins what comes by stdin.
    fn add(&self, name: &str, certificate: &str) -> Output {
        let mut command = self.kedge(&["add", name, "-"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("kedge");
        let mut stdin = child.stdin.take().expect("a pipe");
        // It reads no more than it may need.
        let _ = stdin.write_all(certificate.as_bytes());
        drop(stdin);
        child.wait_with_output().expect("kedge")
    }
}

#[test]
fn two_machines_get_to_know_each_other() {
    let world = World::new("keystwo");
    let [server, client] = ["server", "client"].map(|name| Machine::new(&world, name));
    assert!(server.list().is_empty());
    assert!(server.refused(&["show"]).contains("`kedge keys new` makes one"));
    let said = server.text(&["new", "--name", "lender"]);
    let fingerprint = said.lines().nth(1).expect("its fingerprint").to_owned();
    assert!(fingerprint.starts_with("SHA256:"), "{said}");
    client.text(&["new", "--days", "3"]);
    assert!(server.refused(&["new"]).contains("--replace"));

    // By stdin one way, by a file the other.
    let added = server.add("alice", &client.text(&["show"]));
    assert!(added.status.success(), "{added:?}");
    let file = world.0.join("server.pem");
    fs::write(&file, server.text(&["show"])).expect("a file");
    let said = client.text(&["add", "gpuhost", file.to_str().expect("ASCII")]);
    assert!(said.contains("gpuhost is pinned") && said.contains(&fingerprint), "{said}");

    let keys = client.list();
    let fields =
        ["name", "state", "subject", "fingerprint", "valid_from", "valid_until", "expired"];
    has_fields(&keys, &fields);
    let states: Vec<&str> = keys.iter().filter_map(|key| key["state"].as_str()).collect();
    assert_eq!(states, ["own", "pinned"]);
    assert!(keys[0]["name"].is_null() && keys[1]["name"] == "gpuhost");
    assert_eq!((&keys[1]["subject"], &keys[1]["expired"]), (&"CN=lender".into(), &false.into()));
    assert_eq!(keys[1]["fingerprint"], fingerprint.as_str());
    let lasts = |key: &Value| {
        let second = |field: &str| key[field].as_u64().expect("a number");
        (second("valid_until") - second("valid_from")) / (24 * 3600)
    };
    // With a day for clocks that differ.
    assert_eq!((lasts(&keys[0]), lasts(&keys[1])), (4, 731));

    let table = server.text(&["list"]);
    assert!(table.contains("alice") && table.contains(&fingerprint), "{table}");
    let certificate = client.text(&["show"]);
    server.text(&["revoke", "alice"]);
    assert_eq!(server.list()[1]["state"], "revoked");
    let again = failure(&server.add("bob", &certificate));
    assert!(again.contains("of alice, has been revoked"), "{again}");
    // With another key she may come back.
    client.text(&["new", "--replace"]);
    assert!(server.add("alice", &client.text(&["show"])).status.success());
}

#[test]
fn nobody_else_gets_at_keys() {
    let world = World::new("keysmode");
    let machine = Machine::new(&world, "config");
    // Whatever the user lets others do with what he makes.
    let mut command = Command::new("sh");
    let made = command.args(["-c", "umask 0; exec \"$0\" keys new"]).arg(kedge_tests::kedge());
    let made = made.env("XDG_CONFIG_HOME", &machine.config).output().expect("sh");
    assert!(made.status.success(), "{made:?}");
    let (folder, own) = (machine.folder(), machine.folder().join("own.pem"));
    let mode = |path| fs::metadata(path).expect("it is there").permissions().mode() & 0o7777;
    assert_eq!((mode(&folder), mode(&own)), (0o700, 0o600));
    let secret = fs::read_to_string(&own).expect("one's own");
    let begin = secret.find("-----BEGIN PRIVATE KEY").expect("a key");
    for arguments in [&["show"][..], &["list"], &["list", "--json"]] {
        let text = machine.text(arguments);
        assert!(!text.contains("PRIVATE"), "{text}");
        assert!(secret[begin..].lines().all(|line| line.len() < 20 || !text.contains(line)));
    }
    for (path, open, closed) in [(&own, 0o644, 0o600), (&folder, 0o750, 0o700)] {
        fs::set_permissions(path, Permissions::from_mode(open)).expect("one's own");
        let said = machine.refused(&["show"]);
        assert!(said.contains("open to others") && said.contains("chmod go="), "{said}");
        fs::set_permissions(path, Permissions::from_mode(closed)).expect("one's own");
    }
    // Nor is anything believed that lies elsewhere.
    let moved = world.0.join("moved");
    fs::rename(&own, &moved).expect("one's own");
    symlink(&moved, &own).expect("one's own");
    assert!(machine.refused(&["show"]).contains("a link"));
    fs::remove_file(&own).and_then(|()| fs::rename(&moved, &own)).expect("one's own");
    fs::rename(&folder, &moved).and_then(|()| symlink(&moved, &folder)).expect("one's own");
    assert!(machine.refused(&["show"]).contains("a link"));
    fs::remove_file(&folder).and_then(|()| fs::rename(&moved, &folder)).expect("one's own");
    machine.text(&["show"]);
    if is_root() {
        // As where `sudo` leaves root the HOME of the user who calls it.
        std::os::unix::fs::chown(&folder, Some(65534), None).expect("root");
        assert!(machine.refused(&["show"]).contains("another user's"));
        assert!(machine.refused(&["new", "--replace"]).contains("another user's"));
    }
}

#[test]
fn what_is_no_certificate_is_refused() {
    let world = World::new("keysbad");
    let machine = Machine::new(&world, "config");
    machine.text(&["new"]);
    let own = fs::read_to_string(machine.folder().join("own.pem")).expect("one's own");
    let certificate = machine.text(&["show"]);
    for (text, said) in [
        (own.as_str(), "a private key"),
        ("", "no certificate in it"),
        ("Permission denied (publickey).\n", "no certificate in it"),
        (&certificate.repeat(2), "more than one"),
        (&certificate.replace("MI", "IM"), "no certificate"),
        (&"A".repeat(1 << 20), "longer than 65536 bytes"),
        (&(certificate.clone() + &"\n".repeat(1 << 20)), "longer than 65536 bytes"),
    ] {
        let output = machine.add("x", text);
        let refused = stderr(&output);
        assert_eq!(output.status.code(), Some(125), "{refused}");
        assert!(refused.contains(said), "{refused}");
    }
    let missing = machine.refused(&["add", "x", "/nonexistent/file"]);
    assert!(missing.contains("/nonexistent/file"), "{missing}");
    assert!(machine.refused(&["revoke", "x"]).contains("no key of the name x"));
    // Names that lead elsewhere are none.
    for name in ["../x", "a/b", ".hidden", "-", "a b", ""] {
        let output = machine.output(&["add", "--", name, "-"]);
        assert_eq!(output.status.code(), Some(2), "{name}: {output:?}");
    }
    assert_eq!(machine.list().len(), 1);
    // A damaged file is named, and nothing else of the folder is used meanwhile.
    assert!(machine.add("me", &certificate).status.success());
    fs::write(machine.folder().join("me.pinned"), "nonsense").expect("one's own");
    let said = machine.refused(&["list"]);
    assert!(said.contains("me.pinned is damaged"), "{said}");
}
