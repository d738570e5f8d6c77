//! Images that are read back before anything relies on them: a job is not ended for one that is
//! damaged.
use kedge_tests::job::{AHEAD, User, build};
use kedge_tests::place::Place;
use kedge_tests::world::{is_root, stderr};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

const STEPS: u64 = AHEAD + 100;

/// Changes a byte of the next image in `images` between its being written and its being read back.
struct Damage {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
}

impl Damage {
    fn of_the_next_image(place: &Place, images: &Path) -> Damage {
        let program = build(&place.world, "damage", &[]);
        let mut child = Command::new(program)
            .arg(images)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let said = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut damage = Damage { child, said };
        assert_eq!(damage.line(), "ready", "fanotify takes root (CAP_SYS_ADMIN)");
        damage
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    /// The file that it has damaged.
    fn done(mut self) -> String {
        let line = self.line();
        assert!(self.child.wait().expect("ended").success());
        line.strip_prefix("damaged ").expect("it has damaged a file").to_owned()
    }
}

#[test]
fn a_job_lives_on_whose_image_does_not_verify() {
    assert!(is_root(), "holding up who opens a file (fanotify) takes root: run this test as root");
    for (name, user) in [("verbad", User::Same), ("verbadu", User::Nobody)] {
        let Some(place) = Place::new(name, user) else { continue };
        let mut job = place.steps([STEPS, 3, 2, 8]);
        job.read_to(10);
        let first = place.checkpoint(&[]);
        for options in [&["--stop"][..], &["--verify"], &["--stop", "--incremental"]] {
            let damage = Damage::of_the_next_image(&place, &place.images());
            let said = place.failure(&[&["checkpoint", "j"], options].concat());
            let file = damage.done();
            assert!(
                said.contains(&file) && said.contains("the job goes on"),
                "{options:?}: {said}"
            );
            // The bad image is gone, the one before it is the newest.
            assert!(!Path::new(&file).exists(), "{file}");
            assert_eq!(place.names(), [first.file_name().expect("a name").to_str().expect("text")]);
            job.read_to(job.step + 20);
        }
        // Without looking, nobody knows: the job ends, and the image is bad.
        let damage = Damage::of_the_next_image(&place, &place.images());
        let bad = place.checkpoint(&["--stop", "--no-verify"]);
        damage.done();
        job.drain();
        assert!(!place.output(&["verify", &bad.display().to_string()]).status.success());
        // A restart passes it over.
        let nonce = job.nonce.clone();
        let mut job = place.restart(&place.images(), &nonce);
        assert!(job.step > 10, "{}", job.step);
        job.kill();
    }
}

#[test]
fn what_was_verified_is_told() {
    for (name, user) in [("vergood", User::Same), ("vergoodu", User::Nobody)] {
        let Some(place) = Place::new(name, user) else { continue };
        let mut job = place.steps([STEPS, 3, 2, 8]);
        job.read_to(10);
        let told = |options: &[&str]| {
            let report = place.json(&[&["checkpoint", "j", "--json"], options].concat());
            (report["verified"].as_str().map(str::to_owned), report["image"].clone())
        };
        assert_eq!(told(&[]).0, None);
        let places = ["device", "dropped cache", "memory"];
        let verified = told(&["--verify"]).0.expect("it was read back");
        assert!(places.contains(&verified.as_str()), "{verified}");
        assert!(place.log().contains("read back from"), "{}", place.log());
        let (stopped, image) = told(&["--stop"]);
        assert_eq!(stopped, Some(verified), "it is the default before the job ends");
        job.drain();
        let nonce = job.nonce.clone();
        let image = Path::new(image.as_str().expect("a path")).to_owned();
        let restarted = place.restart(&image, &nonce);
        assert_eq!(restarted.finish(STEPS).code(), Some(7));
    }
}

/// The last image before a program ends by SIGTERM is read back afterwards.
#[test]
fn the_last_image_on_sigterm_is_read_back() {
    let place = Place::mine("verterm");
    let mut job = place.steps_with(&["--on-term", "checkpoint,30s"], [STEPS, 3, 2, 8]);
    job.read_to(10);
    job.signal("TERM");
    job.drain();
    job.wait();
    assert!(place.log().contains("read back from"), "{}", place.log());
    let output = place.output(&["verify", &place.images().display().to_string()]);
    assert!(output.status.success(), "{}", stderr(&output));
}
