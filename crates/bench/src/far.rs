//! `kedge bench far`: what it costs that a program's devices are on another machine, beside devices
//! of this one and beside the line itself, by turns.

use super::parts::{Part, wanted};
use super::process::job::Job;
use kedge_control::gpu::GpuSpec;
use kedge_probe::Series;
use kedge_remote::Measuring;
use kedge_supervisor::kedge_again;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::Instant;

/// Rounds of each figure; of those that start programs.
const ROUNDS: usize = 9;
const STARTS: usize = 5;
/// Launches whose cost is each one's; kernels in a row; what processor time is counted for.
const POSTS: usize = 64;
const KERNELS: usize = 100_000;
const RECORDS: usize = 100_000;
/// Seconds that calls which wait, and copies, may take in one round, about.
const BRIEF: f64 = 0.3;
/// Bytes of a copy.
const COPY: u64 = 64 << 20;
/// Shortest round trip of a line, in seconds, on which round trips are counted.
const MIN_ROUND_TRIP: f64 = 1e-3;
/// What a connection may take besides round trips, seconds.
const STARTING: f64 = 0.1;

/// What is compared.
pub(super) struct Bench<'a> {
    near: &'a GpuSpec,
    far: GpuSpec,
    parts: &'a [Part],
    /// Of the server.
    _server: Option<Server>,
}

/// `kedge serve`, until this is dropped.
pub(super) struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

type Sink<'a> = &'a mut dyn FnMut(Series);

impl<'a> Bench<'a> {
    /// Compares with the devices of a server, or of one that is started here for it.
    pub(super) fn new(
        near: &'a GpuSpec,
        to: Option<&GpuSpec>,
        parts: &'a [Part],
    ) -> Result<Bench<'a>, String> {
        let (far, _server) = match to {
            Some(far @ GpuSpec::Remote { .. }) => (far.clone(), None),
            Some(other) => return Err(format!("--to {other}: give HOST[:PORT] of a server")),
            None => serve(near).map(|(far, server)| (far, Some(server)))?,
        };
        Ok(Bench { near, far, parts, _server })
    }

    pub(super) fn run(&self, sink: Sink<'_>) -> Result<(), String> {
        let wanted = |part| wanted(self.parts, part);
        if wanted(Part::Connect) {
            self.connect(sink)?;
        }
        let (mut near, mut far) = (Job::far(self.near, "near")?, Job::far(&self.far, "far")?);
        near.ask("connect")?;
        far.ask("connect")?;
        let mut turns = Turns { near, far, to: self.far.clone(), line: self.line()? };
        for (part, measure) in [
            (Part::Calls, Turns::calls as fn(&mut Turns, Sink<'_>) -> Result<(), String>),
            (Part::Kernels, Turns::kernels),
            (Part::Steps, Turns::steps),
            (Part::Processors, Turns::processors),
            (Part::Copies, Turns::copies),
        ] {
            if wanted(part) {
                measure(&mut turns, sink)?;
            }
        }
        Ok(())
    }

    fn line(&self) -> Result<Measuring, String> {
        line_to(&self.far)
    }

    /// From cuInit to the end of a first launch, of programs that start anew each time.
    fn connect(&self, sink: Sink<'_>) -> Result<(), String> {
        let mut line = self.line()?;
        let [mut times, mut beyond, mut trips] = <[Vec<f64>; 3]>::default();
        let mut nears = Vec::new();
        for _ in 0..STARTS {
            let start = |gpu| Job::far(gpu, "starts").and_then(|mut job| job.ask("connect"));
            let (near, far) = (start(self.near)?, start(&self.far)?);
            let trip = round_trip(&mut line)?;
            nears.push(near);
            times.push(far);
            beyond.push(far - near);
            if trip >= MIN_ROUND_TRIP {
                trips.push((far - near - STARTING).max(0.0) / trip);
            }
        }
        sink(Series::lower("cuInit to first launch, near", "s", nears));
        sink(Series::lower("cuInit to first launch, far", "s", times));
        sink(Series::lower("cuInit to first launch, beyond near", "s", beyond));
        sink(Series::lower(CONNECT, "round trips", trips).target(5.0));
        Ok(())
    }
}

const CONNECT: &str = "cuInit to first launch, beyond near + 0.1 s, with TCP's and TLS's two";
const CALL: &str = "waiting call (cuMemGetInfo), beyond the line";
const POST: &str = "post a launch, far";
const LAUNCHES: &str = "100,000 kernels and a wait, far without a round trip";
const STEP: &str = "200 launches and one value, beyond near";
const RECORD: &str = "processor time of both proxies: an event recorded";
const WAIT: &str = "processor time of both proxies: a call that waits";

/// The programs that are compared, and the line between them.
struct Turns {
    near: Job,
    far: Job,
    /// The devices of `far`.
    to: GpuSpec,
    line: Measuring,
}

impl Turns {
    /// Has both do the same, in another order every other round: seconds near and far.
    fn both(&mut self, order: &str, round: usize) -> Result<[f64; 2], String> {
        let mut seconds = [0.0; 2];
        for which in [round % 2, 1 - round % 2] {
            let job = if which == 0 { &mut self.near } else { &mut self.far };
            seconds[which] = job.ask(order)?;
        }
        Ok(seconds)
    }

    fn calls(&mut self, sink: Sink<'_>) -> Result<(), String> {
        let [mut line, mut nears, mut fars, mut beyond] = <[Vec<f64>; 4]>::default();
        let [mut posts_near, mut posts_far] = <[Vec<f64>; 2]>::default();
        let trip = round_trip(&mut self.line)?;
        let calls = format!("calls {}", (BRIEF / trip).clamp(7.0, 500.0) as usize);
        for round in 0..ROUNDS {
            let trip = round_trip(&mut self.line)?;
            let [near, far] = self.both(&calls, round)?;
            line.push(trip * 1e6);
            nears.push(near * 1e6);
            fars.push(far * 1e6);
            beyond.push((far - trip) * 1e6);
            let [near, far] = self.both(&format!("post {POSTS}"), round)?;
            posts_near.push(near * 1e6);
            posts_far.push(far * 1e6);
        }
        sink(Series::lower("the line: 64 bytes there and back", "µs", line));
        sink(Series::lower("waiting call (cuMemGetInfo), near", "µs", nears));
        sink(Series::lower("waiting call (cuMemGetInfo), far", "µs", fars));
        sink(Series::lower(CALL, "µs", beyond).target(call_target()));
        sink(Series::lower("post a launch, near", "µs", posts_near));
        sink(Series::lower(POST, "µs", posts_far).target(0.3));
        Ok(())
    }

    fn kernels(&mut self, sink: Sink<'_>) -> Result<(), String> {
        let [mut nears, mut fars, mut ratios] = <[Vec<f64>; 3]>::default();
        for round in 0..ROUNDS {
            let trip = round_trip(&mut self.line)?;
            let [near, far] = self.both(&format!("kernels {KERNELS}"), round)?;
            nears.push(near);
            fars.push(far);
            ratios.push((far - trip) / near);
        }
        sink(Series::lower("100,000 kernels and a wait, near", "s", nears));
        sink(Series::lower("100,000 kernels and a wait, far", "s", fars));
        sink(Series::lower(LAUNCHES, "× near", ratios).target(1.05));
        Ok(())
    }

    fn steps(&mut self, sink: Sink<'_>) -> Result<(), String> {
        let [mut nears, mut fars, mut trips] = <[Vec<f64>; 3]>::default();
        for round in 0..ROUNDS {
            let trip = round_trip(&mut self.line)?;
            let [near, far] = self.both("step 5", round)?;
            nears.push(near * 1e3);
            fars.push(far * 1e3);
            trips.push((far - near) / trip);
        }
        sink(Series::lower("200 launches and one value, near", "ms", nears));
        sink(Series::lower("200 launches and one value, far", "ms", fars));
        sink(Series::lower(STEP, "round trips", trips).target(1.0));
        Ok(())
    }

    fn processors(&mut self, sink: Sink<'_>) -> Result<(), String> {
        let trip = round_trip(&mut self.line)?;
        let calls = (BRIEF / trip).clamp(50.0, 2000.0) as usize;
        for (name, order, count, target) in
            [(RECORD, "records", RECORDS, 1.5), (WAIT, "calls", calls, 12.0)]
        {
            let [mut near, mut far, mut all] = <[Vec<f64>; 3]>::default();
            for _ in 0..ROUNDS {
                let before = self.processor_times()?;
                self.far.ask(&format!("{order} {count}"))?;
                let after = self.processor_times()?;
                let used = |which: usize| (after[which] - before[which]) / count as f64 * 1e6;
                near.push(used(0));
                far.push(used(1));
                all.push(used(0) + used(1));
            }
            sink(Series::lower(format!("{name}, the near one"), "µs", near));
            sink(Series::lower(format!("{name}, the far one"), "µs", far));
            sink(Series::lower(name, "µs", all).target(target));
        }
        Ok(())
    }

    /// Seconds that the far program's near and far proxies have run.
    fn processor_times(&mut self) -> Result<[f64; 2], String> {
        let far = self.line.processor_time().map_err(|error| error.to_string())?;
        Ok([self.far.ask("proxies")?, far.as_secs_f64()])
    }

    /// Connections as many as a session has for bulk bytes.
    fn as_many_lines(&self) -> Result<Vec<Measuring>, String> {
        (0..kedge_remote::lanes()).map(|_| line_to(&self.to)).collect()
    }

    fn copies(&mut self, sink: Sink<'_>) -> Result<(), String> {
        for way in ["to device", "to host"] {
            for memory in ["pinned", "pageable"] {
                self.copy(way, memory, sink)?;
            }
        }
        Ok(())
    }

    fn copy(&mut self, way: &str, memory: &str, sink: Sink<'_>) -> Result<(), String> {
        let inwards = way == "to device";
        let order = format!("{}-{memory} {COPY}", if inwards { "in" } else { "out" });
        let gigabytes = COPY as f64 / 1e9;
        let [mut lines, mut nears, mut fars, mut ratios] = <[Vec<f64>; 4]>::default();
        let mut all = self.as_many_lines()?;
        // The first touches its memory.
        self.both(&order, 0)?;
        for round in 0..ROUNDS {
            let line = by_all(&mut all, inwards)?;
            let [near, far] = self.both(&order, round)?;
            lines.push(gigabytes / line);
            nears.push(gigabytes / near);
            fars.push(gigabytes / far);
            ratios.push(line / far);
        }
        let what = format!("{way}, {memory} 64 MiB");
        sink(Series::higher(format!("{what}: the line by itself"), "GB/s", lines));
        sink(Series::higher(format!("{what}, near"), "GB/s", nears));
        sink(Series::higher(format!("{what}, far"), "GB/s", fars));
        sink(Series::higher(what, "of the line's", ratios).target(0.95));
        Ok(())
    }
}

/// Has a copy's bytes cross by these connections at once: the seconds.
fn by_all(lines: &mut [Measuring], inwards: bool) -> Result<f64, String> {
    let (begin, each) = (Instant::now(), COPY / lines.len() as u64);
    std::thread::scope(|scope| {
        let one = |line: &mut Measuring| if inwards { line.send(each) } else { line.receive(each) };
        let all: Vec<_> =
            lines.iter_mut().map(|line| scope.spawn(move || one(line).map(drop))).collect();
        all.into_iter().try_for_each(|it| match it.join() {
            Ok(ended) => ended.map_err(|error| error.to_string()),
            Err(_) => Err("it has panicked".to_owned()),
        })
    })?;
    Ok(begin.elapsed().as_secs_f64())
}

/// The median of some round trips of the line by itself, in seconds.
fn round_trip(line: &mut Measuring) -> Result<f64, String> {
    let mut once = |count| line.round_trips(count).map_err(|error| error.to_string());
    let first = once(2)?.pop().unwrap_or(MIN_ROUND_TRIP);
    let mut seconds = once((BRIEF / 3.0 / first).clamp(5.0, 500.0) as u32)?;
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[seconds.len() / 2])
}

/// Microseconds that a call which waits may take beyond the line: more where the processes have
/// less than two cores each.
fn call_target() -> f64 {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if cores >= 4 { 8.0 } else { 20.0 }
}

/// A connection that measures the line to the server of these devices.
pub(super) fn line_to(far: &GpuSpec) -> Result<Measuring, String> {
    let GpuSpec::Remote { server, .. } = far else { return Err("no server".into()) };
    Measuring::open(&server.to_string()).map_err(|error| error.to_string())
}

/// Lends this machine's devices over loopback.
pub(super) fn serve(near: &GpuSpec) -> Result<(GpuSpec, Server), String> {
    let mut command = kedge_again();
    command.args(["serve", "--gpu", &near.to_string(), "--listen", "127.0.0.1:0"]);
    command.stdin(Stdio::null()).stderr(Stdio::piped());
    let mut server = Server(command.spawn().map_err(|error| error.to_string())?);
    let mut lines = BufReader::new(server.0.stderr.take().ok_or("no output")?).lines();
    let first = lines.next().and_then(Result::ok).unwrap_or_default();
    let (_, address) = first.split_once(" is lent at ").ok_or(first.clone())?;
    let far = address.parse::<GpuSpec>().map_err(|error| error.to_string())?;
    std::thread::spawn(move || lines.for_each(drop));
    Ok((far, server))
}
