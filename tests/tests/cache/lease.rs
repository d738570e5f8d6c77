//! Programs that write into the cache's memory by themselves: libkedge_cache_preload.so and
//! libkedge_cache.so.
use kedge_left_out::left_out;
use kedge_tests::cached::Cached;
use kedge_tests::host;
use kedge_tests::world::{stderr, wait_for};
use kedge_tests::{kedge, root};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const MIB: u64 = 1 << 20;
const BLOCK: usize = 4096;

fn preload() -> PathBuf {
    kedge().with_file_name("libkedge_cache_preload.so")
}

/// The program that writes in many ways: tests/hosts/cache_writes.c.
fn writes() -> PathBuf {
    host("cache_writes.c", "cache_writes", &["-O1", "-pthread"])
}

fn cached(name: &str) -> Option<Cached> {
    Cached::start(name, &["--tier", "ram:256M", "--host-free", "64M"])
}

/// A command that writes by itself.
fn direct(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", preload());
    command
}

fn said(command: &mut Command) -> String {
    let output = command.output().expect("it runs");
    assert!(output.status.success(), "{command:?}: {:?} {}", output.status, stderr(&output));
    String::from_utf8(output.stdout).expect("text")
}

/// What a program does to `name` in a cached folder by itself, and says, is what it does and says
/// elsewhere; and so it stays when all is drained.
fn same(cached: &Cached, words: &[&str], name: &str, more: &[&str]) {
    let plain = cached.world.0.join(format!("plain-{name}"));
    let path = cached.under.join(name);
    let expected = said(Command::new(writes()).args(words).arg(&plain).args(more));
    let found = said(direct(&writes()).args(words).arg(&path).args(more));
    assert_eq!(found, expected, "{words:?} {more:?}");
    let plain = fs::read(plain).expect("a file");
    assert!(fs::read(&path).expect("a file") == plain, "{words:?} {more:?}: other bytes");
    cached.drain();
    let below = fs::read(cached.below().join(name)).expect("a file");
    assert!(below == plain, "{words:?} {more:?}: other bytes below");
}

#[test]
fn files_are_what_they_are_elsewhere_however_they_are_written() {
    let Some(cached) = cached("lmix") else { return };
    for seed in 1..=8 {
        same(&cached, &["mix"], "m", &[&seed.to_string(), "400"]);
    }
    assert!(cached.count("leased") > 8 * MIB, "{} bytes by leases", cached.count("leased"));
}

#[test]
fn limits_bad_memory_and_closed_descriptors_are_what_they_are_elsewhere() {
    let Some(cached) = cached("lodd") else { return };
    for what in ["limit", "odd"] {
        let before = cached.count("leased");
        same(&cached, &[what], what, &[]);
        assert!(cached.count("leased") > before, "{what}: none was used");
    }
}

#[test]
fn threads_and_processes_share_a_position() {
    let Some(cached) = cached("lshare") else { return };
    let path = cached.under.join("s");
    let said = said(direct(&writes()).arg("share").arg(&path).arg("6"));
    assert_eq!(said, "all there\n");
    assert!(cached.count("leased") > 0);
    let found = fs::read(&path).expect("a file");
    cached.drain();
    assert!(fs::read(cached.below().join("s")).expect("a file") == found, "other bytes below");
}

/// A program that writes blocks, and how many it has said to have written so far.
struct Blocks {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
    written: u64,
}

impl Blocks {
    fn start(path: &Path) -> Blocks {
        let mut command = direct(&writes());
        command.arg("blocks").arg(path).args(["1000000", "20000"]).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it runs");
        let said = BufReader::new(child.stdout.take().expect("a pipe"));
        Blocks { child, said, written: 0 }
    }

    fn until(&mut self, written: u64) {
        while self.written < written {
            assert!(self.line(), "it ended after {} blocks", self.written);
        }
    }

    fn line(&mut self) -> bool {
        let mut line = String::new();
        let length = self.said.read_line(&mut line).expect("text");
        if length > 0 && line.ends_with('\n') {
            self.written = line.trim().parse().expect("a number");
        }
        length > 0
    }

    /// Reads the rest of what it said, and returns how many blocks those were.
    fn end(mut self) -> u64 {
        while self.line() {}
        self.child.wait().expect("it has ended");
        self.written
    }
}

/// Checks that a file has so many blocks at least, each as it was written.
fn has_blocks(path: &Path, acknowledged: u64) {
    let bytes = fs::read(path).expect("a file");
    assert!((bytes.len() / BLOCK) as u64 >= acknowledged, "{} bytes", bytes.len());
    for (number, block) in bytes.chunks_exact(BLOCK).enumerate() {
        assert!(block.iter().all(|byte| *byte == (number % 251) as u8), "block {number}");
    }
}

#[test]
fn what_a_killed_program_has_written_is_there() {
    let Some(cached) = cached("lkill") else { return };
    for round in 0..5 {
        let path = cached.under.join(format!("k{round}"));
        let mut blocks = Blocks::start(&path);
        blocks.until(300 + 500 * round);
        blocks.child.kill().expect("it runs");
        let acknowledged = blocks.end();
        has_blocks(&path, acknowledged);
        cached.drain();
        has_blocks(&cached.below().join(format!("k{round}")), acknowledged);
    }
    assert!(cached.count("leased") > MIB);
}

#[test]
fn what_was_written_before_and_after_a_daemon_was_killed_is_there() {
    let Some(cached) = cached("lcrash") else { return };
    let path = cached.under.join("a");
    let mut blocks = Blocks::start(&path);
    blocks.until(2000);
    assert!(cached.count("leased") > MIB);
    cached.kill();
    // It goes on with the lease that it has, as far as that is.
    let acknowledged = blocks.end();
    assert!(acknowledged >= 2000);
    cached.begin();
    has_blocks(&path, acknowledged);
    cached.drain();
    has_blocks(&cached.below().join("a"), acknowledged);
}

#[test]
fn a_new_daemon_ends_the_lease_of_a_program_that_goes_on() {
    let Some(cached) = cached("lgoes") else { return };
    let path = cached.under.join("a");
    let mut blocks = Blocks::start(&path);
    blocks.until(500);
    cached.kill();
    cached.begin();
    // Its descriptor is of the old mount. What it writes is refused once it asks there.
    let acknowledged = blocks.end();
    has_blocks(&path, acknowledged);
    cached.drain();
    has_blocks(&cached.below().join("a"), acknowledged);
}

const PYTHON: &str = r#"
import mmap, os, shutil, subprocess, sys, tempfile
block = bytes(range(256)) * 256
with open("p", "wb") as f:
    for i in range(200):
        f.write(block)
    f.seek(100); f.write(b"inside"); f.seek(0, 2)
    for i in range(100):
        f.write(block[:1000])
    assert f.tell() == 200 * 65536 + 100000, f.tell()
assert os.path.getsize("p") == 200 * 65536 + 100000
fd = os.open("q", os.O_RDWR | os.O_CREAT)
for i in range(300):
    assert os.pwrite(fd, block[:5000], i * 5000) == 5000
    assert i % 50 or os.pread(fd, 5000, i * 5000) == block[:5000]
    assert i % 70 or os.fstat(fd).st_size == (i + 1) * 5000
with mmap.mmap(fd, 300 * 5000) as m:
    assert m[299 * 5000:] == block[:5000]
    # More than is mapped, and what is mapped.
    for i in range(300, 400):
        os.pwrite(fd, block[:5000], i * 5000)
    m.resize(400 * 5000)
    assert m[399 * 5000:] == block[:5000]
log = open("log", "ab")
for i in range(1000):
    log.write(block[:700])
assert log.tell() == 700000
log.close()
with tempfile.TemporaryFile(dir=".") as t:
    for i in range(100):
        t.write(block)
    t.flush()
    assert os.sendfile(os.open("sent", os.O_WRONLY | os.O_CREAT), t.fileno(), 0, 6553600) == 6553600
assert os.path.getsize("sent") == 6553600
# Other processes see each byte at once.
for i in range(20):
    os.write(os.open("seen", os.O_WRONLY | os.O_CREAT | os.O_APPEND), block)
    f = open("seen2", "ab" if i else "wb"); f.write(block); f.flush()
    assert subprocess.check_output(["stat", "-c", "%s", "seen", "seen2"]).split() == [b"%d" % ((i + 1) * 65536)] * 2
shutil.copyfile("p", "copied")
try:
    import numpy
    numpy.arange(2000000.0).tofile("n")
    numpy.save("n.npy", numpy.arange(500000))
    assert (numpy.fromfile("n") == numpy.arange(2000000.0)).all()
except ImportError:
    print("no numpy", file=sys.stderr)
try:
    import h5py
    with h5py.File("t.h5", "w") as f:
        d = f.create_dataset("x", (0, 1000), maxshape=(None, 1000), chunks=(10, 1000))
        for i in range(200):
            d.resize(i + 1, 0); d[i] = i
            if i % 50 == 0: f.flush()
    with h5py.File("t.h5", "r") as f:
        assert (f["x"][:, 5] == list(range(200))).all()
except ImportError:
    print("no h5py", file=sys.stderr)
print("ok")
"#;

#[test]
fn python_and_tools_write_what_they_write_elsewhere() {
    let Some(cached) = cached("lprog") else { return };
    let python = std::env::var("KEDGE_PYTHON").unwrap_or_else(|_| "/usr/bin/python3".into());
    let plain = cached.world.0.join("plain");
    fs::create_dir(&plain).expect("a folder");
    fs::write(cached.world.0.join("t.py"), PYTHON).expect("a file");
    let tools = "dd if=copied of=d bs=3000 2>/dev/null; dd if=copied of=d bs=1M seek=20 2>/dev/null
        dd if=copied of=d bs=4k count=9 conv=notrunc 2>/dev/null
        cp p c; cat p q p > cat; head -c 3000000 p | tee t1 t2 > /dev/null
        seq 300000 > s; sort -r s -o s; tar --mtime=@0 -cf all.tar p q log s; gzip -kn s
        for i in 1 2 3; do echo $i; head -c 100000 p; done > loop; cp -r . ../copy-$1";
    let sum = "find . -type f ! -name '*.h5' | sort | xargs md5sum";
    if !Path::new(&python).exists() {
        left_out(&python, "it is not installed");
        return;
    }
    let run = |folder: &Path, name: &str, preload: bool| {
        let mut shell = if preload { direct(Path::new("sh")) } else { Command::new("sh") };
        let script = format!("\"$2\" ../t.py >&2; {tools}; {sum}");
        said(shell.args(["-euc", &script, "sh", name, &python]).current_dir(folder))
    };
    let expected = run(&plain, "plain", false);
    assert_eq!(run(&cached.under, "direct", true), expected);
    assert!(cached.count("leased") > 30 * MIB, "{} bytes by leases", cached.count("leased"));
    cached.drain();
    let mut sums = Command::new("sh");
    assert_eq!(said(sums.args(["-euc", sum]).current_dir(cached.below())), expected);
}

#[test]
fn c_programs_call_the_library() {
    let Some(cached) = cached("lclib") else { return };
    let library = kedge().with_file_name("libkedge_cache_client.so");
    let include = format!("-I{}", root().join("include").display());
    let folder = library.parent().expect("a folder").display();
    let words = [
        include,
        format!("-L{folder}"),
        "-l:libkedge_cache_client.so".to_owned(),
        "-Wall".to_owned(),
        "-Werror".to_owned(),
    ];
    // As it is called where it is installed.
    fs::copy(&library, cached.world.0.join("libkedge_cache.so")).expect("a copy");
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut calls = Command::new(host("cache_calls.c", "cache_calls", &words));
    calls.env("LD_LIBRARY_PATH", &cached.world.0);
    assert_eq!(said(calls.arg(cached.under.join("c"))), "ok\n");
    assert!(cached.count("leased") > 3 * MIB, "{} bytes by leases", cached.count("leased"));
}

#[test]
fn a_job_on_a_cached_folder_writes_by_itself() {
    let Some(cached) = cached("ljob") else { return };
    let folder = cached.under.display().to_string();
    let script = format!("dd if=/dev/zero of={folder}/a bs=64k count=128; echo $LD_PRELOAD");
    let run = |options: &[&str]| {
        let run = [&["run", "--gpu", "none", "--cache", &folder], options].concat();
        cached.world.text(&[&run[..], &["--", "sh", "-c", &script]].concat())
    };
    assert_eq!(run(&["--no-direct"]).trim(), "");
    assert_eq!(cached.count("leased"), 0);
    assert!(run(&[]).contains("libkedge_cache_preload.so"));
    assert!(cached.count("leased") > 4 * MIB);
}

#[test]
fn a_job_that_comes_back_writes_on() {
    comes_back("lback", &[]);
}

#[test]
fn so_does_one_whose_images_have_what_has_changed() {
    comes_back("lbackinc", &["--incremental"]);
}

/// Has a job come back from the second of two checkpoints.
fn comes_back(name: &str, options: &[&str]) {
    let Some(cached) = cached(name) else { return };
    let path = cached.under.join("a");
    let images = cached.world.0.join("images").display().to_string();
    let mut run = cached.world.kedge(&["run", "--gpu", "none", "--job", "j"]);
    run.args(options).args(["--ckpt-dir", &images, "--"]);
    run.arg(writes()).arg("blocks").arg(&path);
    run.args(["20000", "100000"]).env("LD_PRELOAD", preload()).stdout(Stdio::null());
    let mut job = run.spawn().expect("kedge");
    wait_for("it writes nothing by itself", || cached.count("leased") > MIB);
    cached.world.text(&["checkpoint", "j"]);
    let first = fs::metadata(&path).expect("a file").len();
    wait_for("it does not go on", || fs::metadata(&path).is_ok_and(|is| is.len() > first + MIB));
    cached.world.text(&["checkpoint", "j"]);
    let saved = fs::metadata(&path).expect("a file").len();
    wait_for("it does not go on", || fs::metadata(&path).is_ok_and(|is| is.len() > saved + MIB));
    cached.world.text(&["kill", "j"]);
    job.wait().expect("it has ended");
    let before = cached.count("leased");
    let back = cached.world.output(&["restart", &images]);
    assert!(back.status.success(), "{}", stderr(&back));
    assert!(cached.count("leased") > before + MIB, "it writes nothing by itself any more");
    assert_eq!(fs::metadata(&path).expect("a file").len(), 20000 * BLOCK as u64);
    has_blocks(&path, 20000);
    cached.drain();
    has_blocks(&cached.below().join("a"), 20000);
}
