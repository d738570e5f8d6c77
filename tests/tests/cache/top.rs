//! `kedge cache top`, of real caches: printed, as JSON, and in a terminal with its keys.

use kedge_left_out::left_out;
use kedge_tests::cached::Cached;
use kedge_tests::world::{World, wait_for};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// Somebody who has no caches of their own.
const OTHER: u32 = 64_999;

/// Ends a process with the test.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns what a line of JSON says of that cache.
fn of<'a>(line: &'a Value, cached: &Cached) -> &'a Value {
    let under = cached.under.display().to_string();
    let caches = line["caches"].as_array().expect("a list");
    caches.iter().find(|cache| cache["under"] == *under).unwrap_or_else(|| panic!("{line}"))
}

/// A cache from which nothing gets below as long as the file is there.
fn held(name: &str) -> Option<(Cached, PathBuf)> {
    let mut cached = Cached::new(name, &["--tier", "ram:64M", "--fsync", "memory"])?;
    let held = cached.world.0.join("held");
    fs::write(&held, "").expect("a file");
    cached.fault = Some(format!("carried={}", held.display()));
    cached.begin();
    Some((cached, held))
}

#[test]
fn a_line_a_second_tells_how_much_is_written_and_waits() {
    let Some((cached, held)) = held("ctopjson") else { return };
    let mut top = cached.world.kedge(&["cache", "top", "--json"]);
    let mut top = Ends(top.stdout(Stdio::piped()).spawn().expect("kedge"));
    let lines = BufReader::new(top.0.stdout.take().expect("a pipe")).lines();
    let mut lines =
        lines.map(|line| serde_json::from_str::<Value>(&line.expect("a line")).expect("JSON"));
    let first = lines.next().expect("a line");
    assert!(of(&first, &cached)["in_bytes_per_second"].is_null(), "{first}");
    fs::write(cached.under.join("a"), vec![7; 3 << 20]).expect("absorbed");
    let wrote = |line: &Value| of(line, &cached)["in_bytes_per_second"].as_f64() > Some(1e5);
    let line = lines.by_ref().take(20).find(wrote).expect("it is told");
    assert_eq!(of(&line, &cached)["status"]["files"], 1, "{line}");
    let waits = |line: &Value| of(line, &cached)["status"]["oldest"].as_u64() >= Some(2);
    lines.by_ref().take(20).find(waits).expect("it waits");
    fs::remove_file(&held).expect("a file");
    let drained = |line: &Value| of(line, &cached)["status"]["dirty"] == 0;
    let line = lines.by_ref().take(30).find(drained).expect("it is drained");
    assert!(of(&line, &cached)["status"]["oldest"].is_null(), "{line}");
}

#[test]
fn it_is_printed_once_where_there_is_no_terminal() {
    let Some((cached, held)) = held("ctopone") else { return };
    fs::write(cached.under.join("a"), vec![7; 3 << 20]).expect("absorbed");
    let table = cached.world.text(&["cache", "top"]);
    let under = cached.under.display().to_string();
    let row = table.lines().find(|line| line.starts_with(&under)).expect("its line");
    assert!(table.starts_with("FOLDER") && row.contains("3M"), "{table}");
    assert!(table.contains("of  64M"), "{table}");
    fs::remove_file(held).expect("a file");
    cached.drain();
    cached.kill();
    let table = cached.world.text(&["cache", "top", "--once"]);
    assert!(table.contains("kedge cache recover"), "a killed one is told: {table}");
    cached.recover();
}

/// In a terminal, which `script` makes. d drains what would wait for long.
#[test]
fn a_key_drains() {
    let options = ["--tier", "ram:64M", "--fsync", "memory"];
    let Some(cached) = Cached::start("ctopkey", &options) else { return };
    let mut file = fs::File::create(cached.under.join("a")).expect("a file");
    let kedge = cached.world.kedge(&["cache", "top"]);
    let words = std::iter::once(kedge.get_program()).chain(kedge.get_args());
    let command: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    let mut script = Command::new("script");
    // A terminal that nobody has given a size has none.
    let top = format!("stty rows 24 cols 200; exec {}", command.join(" "));
    script.args(["--quiet", "--return", "--command"]).arg(top);
    script.arg("/dev/null").env("TERM", "xterm").stdin(Stdio::piped()).stdout(Stdio::piped());
    for (name, value) in kedge.get_envs().filter_map(|(name, value)| Some((name, value?))) {
        script.env(name, value);
    }
    let mut top = Ends(script.spawn().expect("script, from bsdutils"));
    let mut keys = top.0.stdin.take().expect("a pipe");
    let reads = top.0.stdout.take().expect("a pipe");
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for part in BufReader::new(reads).split(b'm').map_while(Result::ok) {
            // Nobody may look any more.
            let _ = tell.send(String::from_utf8_lossy(&part).into_owned());
        }
    });
    let mut seen = String::new();
    let under = cached.under.file_name().expect("a name").to_string_lossy().into_owned();
    wait_for("it is not on the screen", || {
        seen.extend(told.try_iter());
        seen.contains("FOLDER") && seen.contains(&under)
    });
    // As long as it is written, it is not drained by itself.
    file.write_all(&[7; 4096]).expect("absorbed");
    let before = cached.count("drained");
    wait_for("it is not drained", || {
        file.write_all(&[7; 4096]).expect("absorbed");
        keys.write_all(b"d").expect("a key");
        keys.flush().expect("a key");
        cached.count("drained") > before
    });
    keys.write_all(b"q").expect("a key");
    assert!(top.0.wait().expect("it ends").success());
}

/// A home of somebody else's cache, as root finds it.
struct Home(PathBuf);

impl Home {
    fn new(name: &str) -> Home {
        let around = PathBuf::from(format!("/dev/shm/kedge-cache-{OTHER}"));
        let home = around.join(format!("{name}-{}", std::process::id()));
        for folder in [&around, &home] {
            fs::create_dir_all(folder).expect("a folder");
            chown(folder, Some(OTHER), Some(OTHER)).expect("root's right");
            fs::set_permissions(folder, fs::Permissions::from_mode(0o700)).expect("root's right");
        }
        Home(home)
    }

    /// Returns why its cache cannot be asked, or that nobody looks there.
    fn error(&self, world: &World) -> Option<String> {
        let line: Value = serde_json::from_str(&world.text(&["cache", "top", "--once", "--json"]))
            .expect("a line of JSON");
        let under = self.0.display().to_string();
        let caches = line["caches"].as_array().expect("a list");
        let own = caches.iter().find(|cache| cache["under"] == *under)?;
        assert_eq!(own["user"], OTHER);
        Some(own["error"].as_str().expect("it cannot be asked").to_owned())
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
        // Where it has no other home.
        let _ = fs::remove_dir(self.0.parent().expect("a folder"));
    }
}

#[test]
fn root_sees_caches_of_others_and_is_led_to_nobody_else() {
    if !rustix::process::geteuid().is_root() {
        left_out("root among other users' caches", "it takes root");
        return;
    }
    let world = World::new("ctopothers");
    let home = Home::new("ctop");
    let socket = home.0.join("control");
    assert!(home.error(&world).expect("root looks there").contains("cannot ask the cache"));
    // Its owner has the name lead to a daemon of root's.
    let roots = world.0.join("roots");
    let listener = UnixListener::bind(&roots).expect("a socket");
    symlink(&roots, &socket).expect("a link");
    let error = home.error(&world).expect("root looks there");
    assert!(error.contains("another user answers there"), "{error}");
    let mut said = String::new();
    let (mut end, _) = listener.accept().expect("it was connected");
    end.read_to_string(&mut said).expect("it has ended");
    assert_eq!(said, "", "root says nothing to it");
    // A process of the owner's is asked, and is no terminal's master.
    fs::remove_file(&socket).expect("a link");
    // One that only looks whether it listens has no answer.
    let answers = "import socket, sys\n\
        s = socket.socket(socket.AF_UNIX)\n\
        s.bind(sys.argv[1])\n\
        s.listen()\n\
        while True:\n\
        \x20   c = s.accept()[0]\n\
        \x20   if c.recv(100):\n\
        \x20       c.sendall(b'{\"failed\": \"\\\\u001b[2Jno\"}\\n')\n\
        \x20   c.close()\n";
    let mut python = Command::new("python3");
    python.args(["-c", answers]).arg(&socket).current_dir("/").uid(OTHER).gid(OTHER);
    let _ends = Ends(python.spawn().expect("python3"));
    wait_for("it does not listen", || UnixStream::connect(&socket).is_ok());
    let error = home.error(&world).expect("root looks there");
    assert!(error.contains("\u{1b}[2Jno"), "it was asked: {error}");
    let table = world.text(&["cache", "top", "--once"]);
    assert!(table.contains("\\u{1b}[2Jno") && !table.contains('\u{1b}'), "{table}");
    // What others could have changed is nobody's.
    let around = home.0.parent().expect("a folder");
    fs::set_permissions(around, fs::Permissions::from_mode(0o755)).expect("root's right");
    assert_eq!(home.error(&world), None);
}
