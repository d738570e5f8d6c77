//! Errors that devices report: those of this machine's GPUs by NVIDIA's own command, of others in
//! a file that whoever watches them writes.

use super::places::overlap;
use crate::child::{self, Place};
use kedge_control::gpu::GpuSpec;
use kedge_control::told;
use kedge_cuda_types::uuid;
use kedge_probe::DeviceReport;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// NVIDIA's command, which knows GPUs by the library that jobs have kedge's own of.
const NVIDIA: &str = "nvidia-smi";
/// Asks for uncorrected errors of memory since the driver was loaded, by GPU.
const ASKS: [&str; 2] =
    ["--query-gpu=uuid,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader,nounits"];
/// Between two times that it is asked: it takes processor time, and some driver's locks.
const AGAIN: Duration = Duration::from_secs(30);
/// How long it may take to answer: a driver that has trouble takes long.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// For a program to begin on a GPU, and tell which it is.
const BEGINNING: Duration = Duration::from_secs(60);
/// Most lines of its output that are read: one for each GPU of a machine.
const MAX_LINES: usize = 256;
/// Most bytes of its output that are read.
const MAX_OUTPUT_LEN: u64 = 64 << 10;
/// Between two times that a place is asked which GPUs it has: a program starts there.
const LATER: Duration = Duration::from_secs(300);
/// Longest file that `--errors` may name, in bytes.
const MAX_FILE_LEN: u64 = 1 << 20;

/// Where errors are told.
#[derive(Debug, Default)]
pub(super) struct Errors {
    file: Option<PathBuf>,
    /// Places of GPUs here of which nobody knows as yet which they are, and when they were
    /// asked last.
    unknown: BTreeMap<usize, GpuSpec>,
    asked: Option<Instant>,
    /// GPUs of this machine, by place.
    gpus: BTreeMap<usize, Vec<String>>,
    /// When NVIDIA's command was asked last.
    had: Option<Instant>,
    /// What was told last of each GPU, and by the file.
    last: Reading,
    /// A command that has not answered, and has not ended either.
    hangs: Option<Child>,
    /// What was complained of last, by who is asked.
    said: BTreeMap<String, String>,
}

/// What is read: errors by devices.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Reading {
    /// By GPU, as NVIDIA names it.
    gpus: BTreeMap<String, u64>,
    /// By devices, as `--gpu` names them.
    listed: Vec<(GpuSpec, u64)>,
}

impl Errors {
    /// Of devices at these places.
    pub(super) fn new<'a>(
        file: Option<&Path>,
        places: impl Iterator<Item = &'a GpuSpec>,
    ) -> Errors {
        let is_local = |place: &&GpuSpec| matches!(place, GpuSpec::Local { .. });
        let local = places.enumerate().filter(|(_, place)| is_local(place));
        let unknown = local.map(|(at, place)| (at, place.clone())).collect();
        Errors { file: file.map(Path::to_owned), unknown, ..Errors::default() }
    }

    /// Reads what is told now. Who does not tell is complained of by `complain`, once for each
    /// reason, and has reported what was told last.
    pub(super) fn read(&mut self, mut complain: impl FnMut(&str)) -> Reading {
        let local = !(self.gpus.is_empty() && self.unknown.is_empty());
        if local && self.had.is_none_or(|at| at.elapsed() >= AGAIN) {
            let (text, how) = self.ask();
            let told = parse(&text);
            let tells = how.is_ok() || !told.is_empty();
            self.last.gpus.extend(told);
            self.heard(NVIDIA, how, &mut complain);
            if tells && self.asked.is_none_or(|at| at.elapsed() >= LATER) {
                self.learn(&mut complain);
                self.asked = Some(Instant::now());
            }
            self.had = Some(Instant::now());
        }
        if let Some(file) = self.file.clone() {
            let text = told::read(&file, MAX_FILE_LEN).map_err(|error| error.to_string());
            let listed = text.and_then(|text| list(&text)).map(|listed| self.last.listed = listed);
            let named = listed.map_err(|why| format!("{}: {why}", file.display()));
            self.heard("--errors", named, &mut complain);
        }
        self.last.clone()
    }

    /// Finds out which GPUs places have, by a program that runs on them once.
    fn learn(&mut self, complain: &mut impl FnMut(&str)) {
        for (at, place) in self.unknown.clone() {
            let found = gpus(&place).map(|gpus| {
                self.gpus.insert(at, gpus);
                self.unknown.remove(&at);
            });
            self.heard(&place.to_string(), found, complain);
        }
    }

    /// Returns what NVIDIA's command says of all GPUs, and why that may not be all. One that hangs
    /// in the driver is not asked
    /// again before it has ended.
    fn ask(&mut self) -> (String, Result<(), String>) {
        let hangs = |child: &mut Child| child.try_wait().is_ok_and(|status| status.is_none());
        if self.hangs.as_mut().is_some_and(hangs) {
            return (String::new(), Err("it does not end".to_owned()));
        }
        let mut command = Command::new(NVIDIA);
        command.args(ASKS).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut asked = match command.spawn() {
            Ok(asked) => asked,
            Err(error) => {
                let missing = error.kind() == io::ErrorKind::NotFound;
                let why =
                    if missing { "there is no such command".into() } else { error.to_string() };
                return (String::new(), Err(why));
            }
        };
        let (text, how) = answer(&mut asked, REPLY_TIMEOUT);
        if how.is_err() {
            let _ = asked.kill();
            self.hangs = Some(asked);
        }
        (text, how)
    }

    fn heard(&mut self, who: &str, how: Result<(), String>, say: &mut impl FnMut(&str)) {
        match how {
            Ok(()) => drop(self.said.remove(who)),
            Err(why) if self.said.get(who) == Some(&why) => {}
            Err(why) => {
                say(&format!("{who}: errors of devices are not known: {why}"));
                self.said.insert(who.to_owned(), why);
            }
        }
    }

    /// Returns what the devices of a place have reported together.
    pub(super) fn of(&self, at: usize, place: &GpuSpec, reading: &Reading) -> u64 {
        let gpus = self.gpus.get(&at).into_iter().flatten();
        let by_gpu = gpus.filter_map(|gpu| reading.gpus.get(gpu)).copied();
        let listed = reading.listed.iter().filter(|(devices, _)| overlap(devices, place));
        by_gpu.chain(listed.map(|(_, errors)| *errors)).fold(0, u64::saturating_add)
    }
}

/// The GPUs of a place, as NVIDIA names them.
fn gpus(place: &GpuSpec) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    child::probe(Place::job(place.clone()), &["devices".into()], BEGINNING, |line| {
        found.extend(serde_json::from_str::<DeviceReport>(line));
    })?;
    Ok(found.iter().map(|device| uuid::text(&device.uuid)).collect())
}

/// What a command prints within so long, and whether it ends well.
fn answer(asked: &mut Child, patience: Duration) -> (String, Result<(), String>) {
    let end = Instant::now() + patience;
    let lines = child::read_lines_within(asked, MAX_OUTPUT_LEN);
    let mut text = String::new();
    for _ in 0..MAX_LINES {
        match lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(line) => text.extend([&line, "\n"]),
            Err(_) => break,
        }
    }
    while Instant::now() < end {
        match asked.try_wait() {
            Ok(Some(status)) if status.success() => return (text, Ok(())),
            Ok(Some(status)) => return (text, Err(status.to_string())),
            Ok(None) => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => return (text, Err(error.to_string())),
        }
    }
    (text, Err(format!("no answer within {} s", patience.as_secs())))
}

/// Errors by GPU. What is no number (`[N/A]`, of a GPU that does not count) is not known.
fn parse(text: &str) -> BTreeMap<String, u64> {
    let one = |line: &str| {
        let (gpu, errors) = line.split_once(',')?;
        Some((gpu.trim().to_owned(), errors.trim().parse().ok()?))
    };
    text.lines().filter_map(one).collect()
}

/// Errors by devices: a JSON object.
fn list(text: &[u8]) -> Result<Vec<(GpuSpec, u64)>, String> {
    let listed: BTreeMap<String, u64> = serde_json::from_slice(text).map_err(|error| {
        format!("no JSON object of devices and numbers, as {{\"local:0\": 2}}: {error}")
    })?;
    let one = |(devices, errors): (String, u64)| {
        devices.parse().map(|spec| (spec, errors)).map_err(|bad| format!("{bad}"))
    };
    listed.into_iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What nvidia-smi prints where a GPU has had errors, one has none, one does not count, and
    /// one is lost.
    const RECORDED: &str = "\
GPU-8f1e6b3a-7a45-4ab5-9d0e-5b8a4f6b2c11, 3
GPU-1c2d3e4f-0000-1111-2222-333344445555, 0
GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee, [N/A]
GPU-deadbeef-bbbb-cccc-dddd-eeeeeeeeeeee, [GPU is lost]
Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error
";

    fn spec(text: &str) -> GpuSpec {
        text.parse().expect(text)
    }

    fn nobody() -> Errors {
        Errors::default()
    }

    #[test]
    fn what_nvidia_smi_says_is_told_by_place() {
        let reading = Reading { gpus: parse(RECORDED), listed: Vec::new() };
        let gpu = |at: usize| RECORDED.lines().nth(at).unwrap()[..40].to_owned();
        let gpus = BTreeMap::from([
            (0, vec![gpu(0)]),
            (1, vec![gpu(1), gpu(2), gpu(3)]),
            (3, vec![gpu(1), gpu(0)]),
        ]);
        let errors = Errors { gpus, ..nobody() };
        let found = [0, 1, 2, 3].map(|at| errors.of(at, &spec("local:0"), &reading));
        assert_eq!(found, [3, 0, 0, 3]);
    }

    #[test]
    fn a_command_that_hangs_or_fails_has_told_what_it_printed() {
        let run = |script: &str, patience| {
            let mut command = Command::new("sh");
            let command = command.args(["-c", script]).stdout(Stdio::piped());
            let mut child = command.spawn().expect("sh");
            let answer = answer(&mut child, patience);
            let _ = child.kill();
            child.wait().expect("its end");
            answer
        };
        assert_eq!(run("echo a; echo b", REPLY_TIMEOUT), ("a\nb\n".to_owned(), Ok(())));
        let (text, failed) = run("echo a; exit 3", REPLY_TIMEOUT);
        let failed = failed.expect_err("a failure");
        assert_eq!(text, "a\n");
        assert!(failed.contains('3'), "{failed}");
        let late = run("echo a; exec sleep 100", Duration::from_millis(900));
        assert_eq!(late, ("a\n".to_owned(), Err("no answer within 0 s".to_owned())));
        // Without an end of a line.
        let (text, endless) = run("exec cat /dev/zero", REPLY_TIMEOUT);
        assert!(text.len() as u64 <= MAX_OUTPUT_LEN + 1 && endless.is_err());
    }

    #[test]
    fn a_file_tells_of_any_devices() {
        let listed = list(br#"{"gpu7/0": 2, "gpu7/1": 5, "soft": 1}"#).expect("a list");
        let reading = Reading { listed, ..Reading::default() };
        for (place, errors) in [
            ("gpu7/0", 2),
            ("gpu7/0,1", 7),
            ("gpu7", 7),
            ("gpu7/2", 0),
            ("gpu8/0", 0),
            ("soft:2", 1),
            ("local", 0),
        ] {
            assert_eq!(nobody().of(0, &spec(place), &reading), errors, "{place}");
        }
        for bad in ["", "[]", "{\"soft\": -1}", "{\"soft\": \"1\"}", "{\"local:x\": 1}"] {
            assert!(list(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn who_does_not_tell_is_complained_of_once() {
        let folder = std::env::temp_dir().join(format!("kedge-errors-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let file = folder.join("errors.json");
        let mut errors = Errors { file: Some(file.clone()), ..nobody() };
        let mut said = Vec::new();
        let mut look = |errors: &mut Errors, text: Option<&str>| {
            if let Some(text) = text {
                std::fs::write(&file, text).unwrap();
            }
            let reading = errors.read(|line| said.push(line.to_owned()));
            (nobody().of(0, &spec("soft"), &reading), said.len())
        };
        let found = [None, None, Some("{"), Some("{"), Some("{\"soft\": 3}"), Some("{")]
            .map(|text| look(&mut errors, text));
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, [(0, 1), (0, 1), (0, 2), (0, 2), (3, 2), (3, 3)]);
        assert!(said[0].contains("errors.json"), "{said:?}");
    }
}
