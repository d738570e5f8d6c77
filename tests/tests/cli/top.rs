//! `kedge top`: printed beside a real job, and in a terminal, with its keys.
use kedge_tests::job::{Job, send};
use kedge_tests::place::Place;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Termios, Winsize, tcgetattr, tcsetwinsize};
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// More steps than any of these tests has time for.
const STEPS: &str = "100000";
/// Longer than anything here takes, even on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(40);

/// A job `j` on two software devices, which launches some kernels each step.
fn steps(place: &Place, options: &[&str]) -> Job {
    let options = [&["--soft-memory", "256M"], options].concat();
    let mut job = place.on("soft:2", "gpu_steps", &options, &[STEPS, "5"]);
    job.read_to(3);
    job
}

/// Reads what the job prints, so that it goes on, until that is dropped.
struct Reading(Arc<Mutex<Option<Job>>>);

impl Reading {
    fn of(job: Job) -> Reading {
        let job = Arc::new(Mutex::new(Some(job)));
        let reads = job.clone();
        thread::spawn(move || {
            loop {
                let mut held = reads.lock().unwrap_or_else(PoisonError::into_inner);
                let Some(job) = held.as_mut() else { return };
                let next = job.step + 1;
                job.read_to(next);
            }
        });
        Reading(job)
    }

    /// The job, as it is.
    fn stop(&self) -> Job {
        let taken = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        taken.expect("it was not stopped before")
    }
}

/// The only job's row.
fn row(place: &Place) -> Value {
    let rows = place.json(&["top", "--once", "--json"]);
    let rows = rows.as_array().expect("a list");
    assert_eq!(rows.len(), 1, "{rows:?}");
    rows[0].clone()
}

#[test]
fn a_job_is_told_with_what_its_devices_do() {
    let place = Place::mine("topjson");
    let reading = Reading::of(steps(&place, &["--interval", "1h"]));
    place.checkpoint(&[]);
    let told = row(&place);
    let number = |field: &str| told[field].as_f64().unwrap_or_else(|| panic!("{field}: {told}"));
    assert_eq!((&told["name"], &told["state"]), (&"j".into(), &"running".into()));
    assert!(told["silent_seconds"].is_null(), "{told}");
    assert!(number("launches_per_second") > 1.0, "{told}");
    assert!(number("copies_per_second") >= 0.0, "{told}");
    assert!(number("device_memory_bytes") > 1e6, "{told}");
    assert_eq!(number("device_memory_size"), f64::from(2 * (256 << 20)));
    assert_eq!((&told["clients"], &told["clients_silent"]), (&1.into(), &0.into()));
    let devices = told["devices"].as_array().expect("a list");
    assert_eq!((devices.len(), &devices[0]["place"]), (2, &"software".into()), "{told}");
    let program = |one: &&Value| one["kedge"] == false && one["name"] == "gpu_steps";
    assert!(told["processes"].as_array().expect("a list").iter().any(|one| program(&one)));
    let next = number("next_checkpoint") - number("started");
    assert!((3500.0..3700.0).contains(&next), "{told}");
    assert_eq!(
        told["image"]["image"].as_str(),
        Some(&*place.images().join("j-0001").display().to_string())
    );

    let table = place.output(&["top"]);
    let table = String::from_utf8(table.stdout).expect("UTF-8");
    assert_eq!(table.lines().count(), 2, "no terminal: it is printed once: {table}");
    assert!(
        table.starts_with("JOB") && table.contains("j-0001") && table.contains("/512M"),
        "{table}"
    );
    reading.stop().kill();
    assert_eq!(place.json(&["top", "--json"]), Value::Array(Vec::new()));
    let all = place.json(&["top", "--json", "--all"]);
    assert_eq!(all[0]["state"], "killed");
    assert!(all[0]["next_checkpoint"].is_null(), "{all}");
}

/// What a restart brings back is counted anew, at the same place.
#[test]
fn a_restarted_job_is_told_too() {
    let place = Place::mine("topback");
    let mut job = steps(&place, &[]);
    let image = place.checkpoint(&[]);
    let nonce = job.nonce.clone();
    job.kill();
    let reading = Reading::of(place.restart(&image, &nonce));
    let told = row(&place);
    assert!(told["launches_per_second"].as_f64().is_some_and(|rate| rate > 1.0), "{told}");
    assert!(told["device_memory_bytes"].as_f64().is_some_and(|bytes| bytes > 1e6), "{told}");
    reading.stop().kill();
}

#[test]
fn a_supervisor_that_stands_still_holds_nothing_up() {
    let place = Place::mine("topsilent");
    let reading = Reading::of(steps(&place, &[]));
    let supervisor = row(&place)["supervisor"].as_u64().expect("a number") as u32;
    send("STOP", &[supervisor]);
    let begin = Instant::now();
    let told = row(&place);
    let took = begin.elapsed();
    send("CONT", &[supervisor]);
    assert!(told["silent_seconds"].as_f64().is_some_and(|time| time > 0.4), "{told}");
    assert!(told["launches_per_second"].as_f64().is_some_and(|rate| rate > 1.0), "{told}");
    assert!(took < Duration::from_secs(20), "{took:?}");
    let answers = || row(&place)["silent_seconds"].is_null();
    until("it answers again", answers);
    reading.stop().kill();
}

fn until(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// What a terminal shows: as much of one as `kedge top` needs.
#[derive(Debug, Default)]
struct Shown {
    cells: Vec<Vec<char>>,
    at: (usize, usize),
    /// An escape sequence that is not over.
    sequence: Option<String>,
    /// All sequences that set a mode, such as `?1049h`.
    modes: Vec<String>,
}

impl Shown {
    fn take(&mut self, text: &str) {
        for c in text.chars() {
            match (self.sequence.take(), c) {
                (None, '\x1b') => self.sequence = Some(String::new()),
                (None, '\r') => self.at.1 = 0,
                (None, '\n') => self.at.0 += 1,
                (None, c) => self.put(c),
                (Some(begun), c) => {
                    let begun = begun + &c.to_string();
                    // A parameter or the bracket: there is more to come.
                    match begun == "[" || !c.is_ascii_alphabetic() {
                        true => self.sequence = Some(begun),
                        false => self.obey(&begun),
                    }
                }
            }
        }
    }

    fn put(&mut self, c: char) {
        let (row, column) = self.at;
        if self.cells.len() <= row {
            self.cells.resize(row + 1, Vec::new());
        }
        let line = &mut self.cells[row];
        if line.len() <= column {
            line.resize(column + 1, ' ');
        }
        line[column] = c;
        self.at.1 += 1;
    }

    fn obey(&mut self, sequence: &str) {
        let numbers: Vec<usize> = sequence
            .trim_matches(|c: char| !c.is_ascii_digit())
            .split(';')
            .map(|number| number.parse().unwrap_or(1))
            .collect();
        match sequence.chars().last() {
            Some('H') => {
                let number = |at: usize| numbers.get(at).copied().unwrap_or(1).max(1) - 1;
                self.at = (number(0), number(1));
            }
            Some('J') => self.cells.clear(),
            Some('h' | 'l') => self.modes.push(sequence[1..].to_owned()),
            _ => {}
        }
    }

    fn text(&self) -> String {
        let lines = self.cells.iter().map(|line| line.iter().collect::<String>());
        lines.map(|line| line.trim_end().to_owned() + "\n").collect()
    }
}

/// `kedge top` in a terminal of its own.
struct Terminal {
    child: Child,
    keyboard: File,
    shown: Arc<Mutex<Shown>>,
    /// As the terminal was before.
    before: Termios,
}

fn window(columns: u16, rows: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

impl Terminal {
    fn start(place: &Place, options: &[&str]) -> Terminal {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
        grantpt(&master).expect("rights to it");
        unlockpt(&master).expect("it is unlocked");
        let name = ptsname(&master, Vec::new()).expect("its name").into_string().expect("UTF-8");
        tcsetwinsize(&master, window(80, 24)).expect("its size");
        let before = tcgetattr(&master).expect("its settings");
        let open = || OpenOptions::new().read(true).write(true).open(&name).expect("its other end");
        // The process that is started becomes kedge.
        let mut command = Command::new("setsid");
        command.args(["--ctty", "env", "--default-signal=HUP,INT,QUIT,TERM"]);
        command.arg(place.world.parts()).args([&["top"], options].concat());
        let home = place.world.home();
        command.env("XDG_RUNTIME_DIR", &home).env("XDG_STATE_HOME", &home).env("HOME", &home);
        command.env("KEDGE_CONFIG", "").env("TERM", "xterm-256color").env_remove("NO_COLOR");
        command.current_dir(&home).stdin(open()).stdout(open()).stderr(open());
        let child = command.spawn().expect("setsid, from util-linux");
        let keyboard = File::from(master);
        let shown = Arc::new(Mutex::new(Shown::default()));
        let (mut screen, takes) = (keyboard.try_clone().expect("a descriptor"), shown.clone());
        thread::spawn(move || {
            let (mut some, mut left) = ([0; 4096], Vec::new());
            while let Ok(count @ 1..) = screen.read(&mut some) {
                left.extend_from_slice(&some[..count]);
                let whole = match std::str::from_utf8(&left) {
                    Ok(text) => text.len(),
                    Err(error) => error.valid_up_to(),
                };
                let rest = left.split_off(whole);
                let text = String::from_utf8(std::mem::replace(&mut left, rest)).expect("UTF-8");
                takes.lock().expect("nobody has panicked").take(&text);
            }
        });
        Terminal { child, keyboard, shown, before }
    }

    fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).expect("they are typed");
    }

    fn text(&self) -> String {
        self.shown.lock().expect("nobody has panicked").text()
    }

    fn shows(&self, text: &str) {
        let begin = Instant::now();
        while !self.text().contains(text) {
            assert!(begin.elapsed() < TIMEOUT, "{text:?} is not shown:\n{}", self.text());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits for its end. The terminal is as it was before.
    fn ends(mut self) -> ExitStatus {
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                break status;
            }
            assert!(begin.elapsed() < TIMEOUT, "it does not end:\n{}", self.text());
            thread::sleep(Duration::from_millis(20));
        };
        let after = tcgetattr(&self.keyboard).expect("its settings");
        assert!(
            after.local_modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
        );
        assert_eq!(after.local_modes, self.before.local_modes);
        assert_eq!(after.input_modes, self.before.input_modes);
        assert_eq!(after.output_modes, self.before.output_modes);
        let modes = || self.shown.lock().expect("nobody has panicked").modes.clone();
        let last = |on: &str, off: &str| {
            let its = modes().into_iter().rev().find(|mode| mode == on || mode == off);
            its.is_some_and(|mode| mode == off)
        };
        until("its other screen is left", || last("?1049h", "?1049l"));
        until("the cursor is shown", || last("?25l", "?25h"));
        status
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn keys_checkpoint_and_swap_a_job_and_leave_the_terminal_as_it_was() {
    let place = Place::mine("topkeys");
    let reading = Reading::of(steps(&place, &[]));
    let mut terminal = Terminal::start(&place, &["--interval", "200ms"]);
    terminal.shows("1 running");
    terminal.shows("gpu_steps");
    terminal.shows("kedge software device");
    terminal.press("c");
    terminal.shows("durable in");
    assert_eq!(place.states(), [("j-0001".to_owned(), "finished".to_owned())]);
    terminal.shows("j-0001, ");
    terminal.press("s");
    terminal.shows("are off the devices");
    terminal.press("?");
    terminal.shows("checkpoint the job");
    terminal.press("x");
    tcsetwinsize(&terminal.keyboard, window(120, 30)).expect("its size");
    terminal.shows("LAST IMAGE");
    terminal.press("q");
    assert!(terminal.ends().success());
    let mut job = reading.stop();
    let step = job.step;
    job.read_to(step + 3);
    job.kill();
}

#[test]
fn a_job_is_ended_by_a_key_that_asks_first() {
    let place = Place::mine("topend");
    let reading = Reading::of(steps(&place, &[]));
    let mut terminal = Terminal::start(&place, &["--interval", "200ms"]);
    terminal.shows("1 running");
    terminal.press("x");
    terminal.shows("End j, all of its");
    terminal.press("n");
    terminal.shows("q quit");
    assert_eq!(row(&place)["state"], "running");
    // It has nothing more to say to who reads it.
    let job = reading.stop();
    terminal.press("x");
    terminal.shows("End j, all of its");
    terminal.press("y");
    terminal.shows("j: has ended");
    terminal.shows("no job runs");
    assert_eq!(place.json(&["top", "--json"]), Value::Array(Vec::new()));
    drop(job);
    // Ctrl-C is a key.
    terminal.press("\x03");
    assert!(terminal.ends().success());
}

#[test]
fn signals_that_end_it_give_the_terminal_back() {
    let place = Place::mine("topsignal");
    for (name, number) in [("TERM", 15), ("INT", 2), ("HUP", 1)] {
        let terminal = Terminal::start(&place, &[]);
        terminal.shows("no job runs");
        send(name, &[terminal.child.id()]);
        assert_eq!(terminal.ends().signal(), Some(number), "{name}");
    }
}
