//! Programs that ask for their own checkpoints and moves: in C by include/kedge.h, in Python by
//! python/kedge.py.
use kedge_tests::job::{User, family, kedge_as, send};
use kedge_tests::world::{World, is_root};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A program that is told when to go on.
struct Asking {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Asking {
    fn start(mut command: Command) -> Asking {
        let mut child = command.stdin(Stdio::piped()).spawn().expect("timeout, from coreutils");
        let stdin = child.stdin.take().expect("a pipe");
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        Asking { child, stdin, stdout }
    }

    /// Which turn, and what came of it.
    fn says(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    fn go_on(&mut self) {
        self.stdin.write_all(b"go\n").expect("it reads");
    }

    fn kill(mut self) {
        send("KILL", &family(self.child.id()));
        let _ = self.child.wait();
    }

    fn ends(mut self) -> Option<i32> {
        drop(self.stdin);
        self.child.wait().expect("ended").code()
    }
}

fn world(name: &str, user: User) -> Option<World> {
    if user == User::Nobody && !is_root() {
        println!("not root: every other test is this one");
        return None;
    }
    let world = World::new(name);
    let _ = world.home();
    if user == User::Nobody {
        world.give_home_away();
    }
    Some(world)
}

fn in_c(world: &World) -> Vec<String> {
    built(world, "asks")
}

fn built(world: &World, name: &str) -> Vec<String> {
    let program = world.parts().with_file_name(name);
    let include = kedge_tests::root().join("include");
    let source = kedge_tests::root().join(format!("tests/hosts/{name}.c"));
    let mut compiler = Command::new("cc");
    compiler.args(["-std=gnu99", "-Wall", "-Wextra", "-Werror", "-O1", "-I"]).arg(include);
    assert!(
        compiler.arg("-o").arg(&program).arg(source).arg("-ldl").status().expect("cc").success()
    );
    vec![program.display().to_string()]
}

fn in_python(world: &World) -> Vec<String> {
    with_python(world, "asks")
}

fn with_python(world: &World, name: &str) -> Vec<String> {
    let at = world.parts().with_file_name(format!("{name}.py"));
    let copy = |from: &str, to: &Path| {
        std::fs::copy(kedge_tests::root().join(from), to).expect("a copy");
    };
    copy("python/kedge.py", &at.with_file_name("kedge.py"));
    copy(&format!("tests/hosts/{name}.py"), &at);
    // No file beside the module: the user may not write there.
    ["python3", "-B", &at.display().to_string()].map(str::to_owned).to_vec()
}

/// Asks, is killed, is restarted under another name from what it asked for, and asks again there.
fn goes_on_and_comes_back(name: &str, user: User, until: &str, program: fn(&World) -> Vec<String>) {
    let Some(world) = world(name, user) else { return };
    let program = program(&world);
    let words: Vec<&str> = program.iter().map(String::as_str).chain([until]).collect();
    let run = [&["run", "--gpu", "none", "--job", "j", "--"], &words[..]].concat();
    let mut job = Asking::start(kedge_as(&world, user, &run));
    assert_eq!(job.says(), "1 0");
    let image = world.home().join("kedge/images/j-0001");
    settle(&image);
    job.go_on();
    assert_eq!(job.says(), "2 0");
    job.kill();
    let path = image.display().to_string();
    let mut job = Asking::start(kedge_as(&world, user, &["restart", &path, "--job", "other"]));
    assert_eq!(job.says(), "1 1");
    job.go_on();
    // This one is of the new life.
    assert_eq!(job.says(), "2 0");
    settle(&world.home().join("kedge/images/other-0001"));
    job.go_on();
    assert_eq!(job.says(), "3 0");
    job.go_on();
    assert_eq!(job.ends(), Some(6));
    assert!(
        world.home().join("kedge/images/other-0002").join("manifest.json").exists()
            || until == "captured"
    );
}

/// Waits until the image counts.
fn settle(image: &Path) {
    for _ in 0..2000 {
        if image.join("manifest.json").exists() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("{} was never finished", image.display());
}

#[test]
fn a_c_program() {
    goes_on_and_comes_back("asksc", User::Same, "durable", in_c);
}

#[test]
fn a_c_program_of_an_ordinary_user_that_does_not_wait() {
    goes_on_and_comes_back("asksn", User::Nobody, "captured", in_c);
}

#[test]
fn a_python_program_of_an_ordinary_user() {
    goes_on_and_comes_back("asksp", User::Nobody, "durable", in_python);
}

#[test]
fn a_python_program_that_does_not_wait() {
    goes_on_and_comes_back("askspc", User::Same, "captured", in_python);
}

#[test]
fn without_kedge_and_with_nowhere_to_write_it_is_told() {
    let world = world("asksw", User::Same).expect("the test's own user");
    let (c, python) = (in_c(&world), in_python(&world));
    for program in [&c, &python] {
        let mut command = Command::new(&program[0]);
        command.args(&program[1..]).arg("durable").env_remove("KEDGE_CONTROL");
        let said = command.stdin(Stdio::null()).output().expect("the program");
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        assert_eq!(said.lines().next(), Some("1 -1 the program was not started by kedge"));
        let words: Vec<&str> = program.iter().map(String::as_str).chain(["durable"]).collect();
        let run = ["run", "--gpu", "none", "--ckpt-dir", "/proc/nowhere", "--"];
        let mut job = Asking::start(kedge_as(&world, User::Same, &[&run, &words[..]].concat()));
        let said = job.says();
        assert!(said.starts_with("1 -1 ") && said.contains("/proc/nowhere"), "{said}");
        job.kill();
    }
}

/// A program's devices move because it asks for that, twice, and stay where that cannot be.
fn moves_itself(program: &[String], user: User, world: &World) {
    let words: Vec<&str> = program.iter().map(String::as_str).collect();
    let places = ["soft", "soft", "127.0.0.1:1", "so\"ft"];
    let run = ["run", "--gpu", "soft", "--soft-memory", "64M", "--job", "j", "--"];
    let mut job = Asking::start(kedge_as(world, user, &[&run, &words[..], &places].concat()));
    assert_eq!([job.says(), job.says()], ["0 same", "0 same"]);
    let said = job.says();
    assert!(said.starts_with("-1 same ") && said.contains("127.0.0.1:1"), "{said}");
    let said = job.says();
    assert!(said.starts_with("-1 same "), "{said}");
    assert_eq!(job.ends(), Some(6));
    let without = [&["run", "--gpu", "none", "--"], &words[..], &["soft"]].concat();
    let said = Asking::start(kedge_as(world, user, &without)).says();
    assert!(said.starts_with("-1 none ") && said.contains("no devices"), "{said}");
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).arg("soft").env_remove("KEDGE_CONTROL").stdout(Stdio::piped());
    let said = Asking::start(command).says();
    assert_eq!(said, "-1 none the program was not started by kedge");
}

#[test]
fn a_c_program_that_moves_itself() {
    let world = world("asksmc", User::Same).expect("the test's own user");
    moves_itself(&built(&world, "moves"), User::Same, &world);
}

#[test]
fn a_python_program_that_moves_itself() {
    let Some(world) = world("asksmp", User::Nobody) else { return };
    moves_itself(&with_python(&world, "moves"), User::Nobody, &world);
}
