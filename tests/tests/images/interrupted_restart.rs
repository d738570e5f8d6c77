//! `kedge restart` that is ended at random moments, beside files that matter: they are as they were
//! before it, or as the image has them with what was there put aside. The next one works.
use kedge_tests::job::{build, family, is_alive, kedge_as, kill_all_in, send};
use kedge_tests::place::Place;
use kedge_tests::random::fraction;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const HELD: usize = 1 << 20;
const KEPT: usize = 256 << 10;
const LOG: usize = 100;
/// How often a restart is ended.
const ROUNDS: usize = 60;
/// Far longer than anything here takes.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Name: contents and mode.
type Files = BTreeMap<String, (Vec<u8>, u32)>;

/// A job that was captured and killed, and the files that it had.
struct Lost {
    place: Place,
    image: PathBuf,
    nonce: String,
}

impl Lost {
    fn new(name: &str) -> Lost {
        let place = Place::mine(name);
        let work = place.world.home().join("work");
        fs::create_dir(&work).expect("a folder");
        let program = build(&place.world, "filed", &[]).display().to_string();
        let mut job = place.run(&[], &[&program, &work.display().to_string(), "100000"]);
        job.read_to(3);
        let image = place.checkpoint(&[]);
        let nonce = job.nonce.clone();
        job.kill();
        Lost { place, image, nonce }
    }

    fn work(&self) -> PathBuf {
        self.place.world.home().join("work")
    }

    /// As somebody has changed them after the checkpoint; what they are then.
    fn change(&self) -> Files {
        for name in self.files().keys().filter(|name| !["held", "kept"].contains(&name.as_str())) {
            fs::remove_file(self.work().join(name)).expect("removed");
        }
        write(&self.work().join("held"), &vec![b'H'; HELD + 5000]);
        write(&self.work().join("kept"), &vec![b'K'; KEPT]);
        fs::write(self.work().join("log"), "another log").expect("written");
        fs::write(self.work().join("beside"), "nobody's").expect("written");
        let mode = fs::Permissions::from_mode(0o600);
        fs::set_permissions(self.work().join("held"), mode).expect("mine");
        self.files()
    }

    fn files(&self) -> Files {
        let file = |entry: fs::DirEntry| {
            let found = entry.metadata().expect("a file");
            let name = entry.file_name().into_string().expect("a name");
            (name, (fs::read(entry.path()).expect("a file"), found.permissions().mode()))
        };
        fs::read_dir(self.work())
            .expect("a folder")
            .map(|entry| file(entry.expect("one")))
            .collect()
    }

    /// Whether the image's files are there, and what was `before` them as well, and nothing that
    /// kedge had for itself.
    fn is_restored(&self, before: &Files) -> bool {
        let now = self.files();
        let is = |name: &str, byte: u8, length: usize| {
            now.get(name).is_some_and(|(bytes, _)| *bytes == vec![byte; length])
        };
        let is_somewhere = |old: &[u8]| now.values().any(|(bytes, _)| bytes == old);
        is("held", b'h', HELD)
            && is("kept", b'k', KEPT)
            && is("log", b'l', LOG)
            && before.values().all(|(old, _)| is_somewhere(old))
            && now.keys().all(|name| !name.starts_with(".kedge"))
    }

    fn restart(&self) -> Child {
        let image = self.image.display().to_string();
        let mut kedge = kedge_as(&self.place.world, self.place.user, &["restart", &image]);
        kedge.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("kedge")
    }

    /// Restarts it, sees it take a step, and ends it: how long it took until then.
    fn works(&self, before: &Files, when: &str) -> Duration {
        let begin = Instant::now();
        let mut kedge = self.restart();
        let mut line = String::new();
        let output = kedge.stdout.take().expect("a pipe");
        BufReader::new(output).read_line(&mut line).expect("a line");
        let took = begin.elapsed();
        if !line.starts_with(&self.nonce) {
            panic!("{when}: {line:?}, {}", said(kedge));
        }
        self.end(&mut kedge);
        assert!(self.is_restored(before), "{when}: {:?}", names(&self.files()));
        took
    }

    /// Kills all that is left of it, and sees it gone.
    fn end(&self, kedge: &mut Child) {
        let begin = Instant::now();
        loop {
            let all = family(kedge.id());
            send("KILL", &all[..]);
            kill_all_in(&self.place.world.home());
            let ended = kedge.try_wait().expect("a child").is_some();
            if ended && all.iter().all(|pid| !is_alive(*pid)) {
                return;
            }
            assert!(begin.elapsed() < TIMEOUT, "it lives: {all:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn names(files: &Files) -> Vec<(&String, usize)> {
    files.iter().map(|(name, (bytes, _))| (name, bytes.len())).collect()
}

fn said(mut kedge: Child) -> String {
    let mut said = String::new();
    let _ = kedge.kill();
    kedge.stderr.take().map(|mut stderr| stderr.read_to_string(&mut said));
    said
}

/// In place.
fn write(path: &Path, bytes: &[u8]) {
    let file = File::options().write(true).create(true).truncate(false).open(path).expect("opened");
    file.set_len(bytes.len() as u64).and_then(|()| file.write_all_at(bytes, 0)).expect("written");
}

/// Waits for the only child of `timeout`, which is kedge or will be: it has no other process.
fn kedge_of(timeout: &Child) -> Vec<u32> {
    let begin = Instant::now();
    loop {
        let children = kedge_tests::job::children(timeout.id());
        if !children.is_empty() {
            return children;
        }
        assert!(begin.elapsed() < TIMEOUT, "`timeout` starts nothing");
        std::thread::sleep(Duration::from_micros(100));
    }
}

#[test]
fn a_restart_that_is_ended_at_any_moment_loses_nothing() {
    let lost = Lost::new("rsint");
    let before = lost.change();
    let mut whole = lost.works(&before, "undisturbed");
    let (mut old, mut new, mut halfway) = (0, 0, 0);
    for round in 0..ROUNDS {
        let before = lost.change();
        let signal = ["INT", "TERM", "KILL", "KILL"][round % 4];
        let mut kedge = lost.restart();
        let started = kedge_of(&kedge);
        let moment = whole.mul_f64(1.2 * fraction());
        std::thread::sleep(moment);
        let when = format!("round {round}, {signal} after {moment:?} of {whole:?}");
        assert!(kedge.try_wait().expect("a child").is_none(), "{when}: {}", said(kedge));
        match round % 4 {
            // All of it at once, as by a machine that fails.
            3 => send(signal, &family(kedge.id())),
            _ => send(signal, &started),
        }
        if signal != "KILL" {
            // It ends by itself, and leaves nothing to others.
            let begin = Instant::now();
            while kedge.try_wait().expect("a child").is_none() {
                assert!(begin.elapsed() < TIMEOUT, "{when}: it does not end");
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        lost.end(&mut kedge);
        let (is_old, is_new) = (lost.files() == before, lost.is_restored(&before));
        assert!(is_old || is_new || signal == "KILL", "{when}: {:?}", names(&lost.files()));
        (old, new) = (old + usize::from(is_old), new + usize::from(is_new));
        halfway += usize::from(!is_old && !is_new);
        // What was killed halfway is put right by the next one, which works.
        if !is_new {
            whole = (whole + lost.works(&before, &when)) / 2;
        }
    }
    println!("{old} as before, {new} restored, {halfway} put right by the next restart");
    assert!(old > 0 && new > 0, "{old}, {new}: the moments were not spread");
    let before = lost.change();
    lost.works(&before, "at last");
}
