//! What is installed, removed again and packed, as far as it takes no long build: `make
//! package-test` tries whole packages.
use kedge_left_out::left_out;
use kedge_tests::root;
use kedge_tests::world::{World, stderr};
use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const RECORD: &str = "lib/kedge/installed";

fn script(name: &str) -> Command {
    Command::new(root().join("scripts").join(name))
}

fn text(mut command: Command) -> String {
    let output = command.output().expect("a script of this repository");
    assert!(output.status.success(), "{command:?}: {}", stderr(&output));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Stand-ins for the programs: installing and packing copy them and look at nothing but the
/// command's pages and completions.
fn built(world: &World) -> PathBuf {
    let built = world.0.join("built");
    fs::create_dir_all(&built).expect("a folder");
    let libraries = ["cuda", "nvml", "cache_client", "cache_preload"];
    let libraries = libraries.map(|name| format!("libkedge_{name}.so"));
    for part in ["kedge-proxy", "kedge-k8s"].map(str::to_owned).iter().chain(&libraries) {
        fs::write(built.join(part), part).expect("a file");
    }
    // Small: a wheel of the real one would take half a minute.
    let command = format!("#!/bin/sh\nexec '{}' \"$@\"\n", kedge_tests::kedge().display());
    fs::write(built.join("kedge"), command).expect("a file");
    fs::set_permissions(built.join("kedge"), Permissions::from_mode(0o755)).expect("its mode");
    built
}

fn install(world: &World, prefix: &Path, arguments: &[&str]) -> Output {
    let mut command = script("install");
    command.arg("--built").arg(built(world)).args(arguments).arg(prefix);
    command.output().expect("scripts/install")
}

fn installed(world: &World, prefix: &Path, arguments: &[&str]) {
    let output = install(world, prefix, arguments);
    assert!(output.status.success(), "{}", stderr(&output));
}

/// The files below a folder, and with `folders` the folders, each relative to it.
fn below(folder: &Path, folders: bool) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut todo = vec![folder.to_owned()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(&dir).expect("a folder").map(|entry| entry.expect("an entry")) {
            let is_folder = entry.file_type().expect("its type").is_dir();
            if folders || !is_folder {
                let path = entry.path();
                let name = path.strip_prefix(folder).expect("below it").display().to_string();
                found.insert(name);
            }
            if is_folder {
                todo.push(entry.path());
            }
        }
    }
    found
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("a file").permissions().mode() & 0o7777
}

#[test]
fn the_list_is_what_is_installed() {
    let world = World::new("pklist");
    let (prefix, packed) = (world.0.join("prefix"), world.0.join("packed"));
    let mut list = script("install");
    list.arg("--list").arg("--built").arg(built(&world));
    let listed: BTreeSet<String> = text(list).lines().map(str::to_owned).collect();
    for file in ["bin/kedge", "lib/kedge/kedge-proxy", "share/man/man1/kedge-run.1.gz"] {
        assert!(listed.contains(file), "{file}: {listed:?}");
    }
    installed(&world, &packed, &["--unrecorded"]);
    assert_eq!(below(&packed, false), listed);
    installed(&world, &prefix, &[]);
    let mut with_record = listed.clone();
    with_record.insert(RECORD.into());
    assert_eq!(below(&prefix, false), with_record);
    for file in &listed {
        let part = file.starts_with("lib/kedge/kedge-");
        let program = file.starts_with("bin/") || part;
        let expected = if program || file.ends_with(".so") { 0o755 } else { 0o644 };
        assert_eq!(mode(&prefix.join(file)), expected, "{file}");
    }
}

#[test]
fn the_site_has_every_page_and_command() {
    let world = World::new("pksite");
    let sources = world.0.join("sources");
    let mut docs = script("docs");
    docs.arg("--sources").arg(&sources).arg("--kedge").arg(kedge_tests::kedge());
    text(docs);
    let summary = fs::read_to_string(sources.join("SUMMARY.md")).expect("the summary");
    for page in ["commands/cache-start.md", "docs/checkpoint.md", "docs/design/0002-spine.md"] {
        assert!(summary.contains(&format!("({page})")), "{page}: {summary}");
        assert!(sources.join(page).exists(), "{page}");
    }
    assert!(!summary.contains("commands/probe"), "what is hidden shows");
    assert!(sources.join("include/kedge.h").exists(), "what pages lead to is there");
}

#[test]
fn services_are_good_and_run_the_installed_command() {
    let world = World::new("pkunits");
    let prefix = world.0.join("a prefix");
    installed(&world, &prefix, &[]);
    let folder = prefix.join("share/systemd/user");
    let units = below(&folder, false);
    assert_eq!(units.len(), 4, "{units:?}");
    let command = format!("ExecStart=\"{}/bin/kedge\" ", prefix.display());
    for unit in &units {
        let text = fs::read_to_string(folder.join(unit)).expect("a unit");
        assert!(text.contains(&command), "{unit}: {text}");
    }
    let mut verify = Command::new("systemd-analyze");
    verify.args(["verify", "--user", "--man=no"]).env("XDG_RUNTIME_DIR", &world.0);
    // A template is verified as one of its instances.
    verify.args(units.iter().map(|unit| folder.join(unit.replace('@', "@tmp-x"))));
    let cached = folder.join("kedge-cache@tmp-x.service");
    std::os::unix::fs::symlink("kedge-cache@.service", cached).expect("a link");
    match verify.output() {
        Err(_) => left_out("the units' syntax", "systemd-analyze is missing (apt install systemd)"),
        Ok(output) => {
            assert!(output.status.success(), "{output:?}");
            assert_eq!(stderr(&output), "", "it warns");
        }
    }
}

#[test]
fn removing_takes_what_was_installed_and_nothing_else() {
    let world = World::new("pkgone");
    let prefix = world.0.join("a prefix");
    // Of others: one beside kedge's, one in a folder of kedge's own, an empty folder.
    fs::create_dir_all(prefix.join("share/man/man1")).expect("a folder");
    fs::create_dir_all(prefix.join("share/empty")).expect("a folder");
    fs::write(prefix.join("share/man/man1/kedgerow.1"), "a page").expect("a file");
    let mut theirs = below(&prefix, true);
    installed(&world, &prefix, &[]);
    fs::write(prefix.join("lib/kedge/notes"), "a user's").expect("a file");
    theirs.extend(["lib", "lib/kedge", "lib/kedge/notes"].map(String::from));

    // Again, as a newer one would be: what the older had put there and the newer has not goes,
    // and the folders are still known as kedge's.
    let record = prefix.join(RECORD);
    let noted = fs::read_to_string(&record).expect("the record");
    fs::write(prefix.join("bin/kedge-old"), "of an older one").expect("a file");
    fs::write(&record, format!("bin/kedge-old\n{noted}")).expect("the record");
    installed(&world, &prefix, &[]);
    assert!(!prefix.join("bin/kedge-old").exists());

    installed(&world, &prefix, &["--remove"]);
    assert_eq!(below(&prefix, true), theirs);
    let again = install(&world, &prefix, &["--remove"]);
    assert!(!again.status.success() && stderr(&again).contains("is missing"), "{again:?}");
}

#[test]
fn a_record_that_leads_elsewhere_is_not_followed() {
    let world = World::new("pkout");
    let prefix = world.0.join("prefix");
    let outside = world.0.join("outside");
    fs::write(&outside, "a user's").expect("a file");
    for line in ["../outside".to_owned(), outside.display().to_string()] {
        installed(&world, &prefix, &[]);
        let noted = fs::read_to_string(prefix.join(RECORD)).expect("the record");
        fs::write(prefix.join(RECORD), format!("{noted}{line}\n")).expect("the record");
        let output = install(&world, &prefix, &["--remove"]);
        assert!(!output.status.success() && outside.exists(), "{line}: {output:?}");
        assert!(prefix.join("bin/kedge").exists(), "{line}: half removed");
        fs::write(prefix.join(RECORD), noted).expect("the record");
    }
}

#[test]
fn a_wheel_is_one_that_others_can_read() {
    let world = World::new("pkwheel");
    let (tree, out) = (world.0.join("tree"), world.0.join("out"));
    installed(&world, &tree, &["--unrecorded"]);
    let version = env!("CARGO_PKG_VERSION");
    let mut wheel = script("wheel");
    wheel.arg("--tree").arg(&tree).args(["--version", version, "--glibc", "2.34", "--out"]);
    wheel.arg(&out).env("SOURCE_DATE_EPOCH", "1000000000");
    let path = text(wheel);
    let name = format!("kedge-{version}-py3-none-manylinux_2_34_x86_64.whl");
    assert_eq!(path.trim_end(), out.join(&name).display().to_string());
    // Python's own reader, and hashes of what it reads, against the RECORD; then the command.
    let mut check = Command::new("python3");
    check.args(["-c", READ]).arg(out.join(&name)).arg(version).arg(world.0.join("unpacked"));
    let read = text(check);
    let files = read.trim_end().parse::<usize>().expect("a number of files");
    // All of the tree, and five of the wheel's own beside the RECORD.
    assert_eq!(files, below(&tree, false).len() + 5);
}

/// Reads a wheel, compares it with its RECORD, prints how many files that lists, and runs the
/// command as pip's script does.
const READ: &str = r#"
import base64, csv, hashlib, os, subprocess, sys, zipfile
path, version, folder = sys.argv[1:]
wheel = zipfile.ZipFile(path)
assert wheel.testzip() is None
info = "kedge-%s.dist-info/" % version
rows = list(csv.reader(wheel.read(info + "RECORD").decode().splitlines()))
assert rows.pop() == [info + "RECORD", "", ""]
assert sorted([row[0] for row in rows] + [info + "RECORD"]) == sorted(wheel.namelist())
for name, digest, size in rows:
    content = wheel.read(name)
    kind, value = digest.split("=", 1)
    made = base64.urlsafe_b64encode(hashlib.new(kind, content).digest()).decode().rstrip("=")
    assert (made, len(content)) == (value, int(size)), name
assert ("\nVersion: %s\n" % version) in wheel.read(info + "METADATA").decode()
assert b"\nTag: py3-none-manylinux_2_34_x86_64\n" in wheel.read(info + "WHEEL")
assert wheel.read(info + "entry_points.txt") == b"[console_scripts]\nkedge = kedge_command:main\n"
for entry in wheel.infolist():
    mode = entry.external_attr >> 16
    program = "/bin/" in entry.filename or entry.filename.endswith((".so", "-proxy", "-k8s"))
    assert mode == (0o100755 if program else 0o100644), (entry.filename, oct(mode))
    os.chmod(wheel.extract(entry, folder), mode & 0o777)
said = subprocess.check_output([sys.executable, "-m", "kedge_command", "--version"], cwd=folder)
assert said.decode() == "kedge %s\n" % version, said
print(len(rows))
"#;

#[test]
fn every_linked_crate_has_its_licence_told() {
    let mut list = script("licences");
    list.arg("--crates");
    let crates = text(list);
    let texts = text(script("licences"));
    // Of the command, of the proxy, C sources, and one that only tests use.
    for name in ["clap ", "rustls ", "zstd-sys "] {
        assert!(crates.lines().any(|line| line.starts_with(name)), "{name}: {crates}");
    }
    assert!(!crates.contains("proptest"), "{crates}");
    for line in crates.lines() {
        let mut words = line.splitn(3, ' ');
        let (name, version) = (words.next().expect("a name"), words.next().expect("a version"));
        let licence = words.next().unwrap_or_default();
        assert!(!licence.is_empty() && licence != "None", "{line}: no licence");
        let user = format!("{name} {version}");
        // In the list, and above a text.
        let heads = texts.lines().filter(|line| line.ends_with(':') && line.contains(&user));
        assert!(heads.count() > 0, "{user} has no text");
    }
    // Zstandard's own text, which lies in a folder of the crate.
    assert!(texts.contains("Zstandard"), "zstd's C sources");
}
