//! `kedge migrate --host`: a whole job goes to another host.
//!
//! Images that build on each other cross while it runs, the last one while it stands still. There
//! it is restarted from them up to where only it is left to run. Then the job's supervisor decides,
//! by one durable write, that it goes; ends it here; and only when nothing of it is left here it is
//! said that it may run there.

use super::{MAX_PAUSE, MigrateArgs};
use crate::Failure;
use crate::output;
use kedge_control::gpu::DEFAULT_PORT;
use kedge_control::job::Moved;
use kedge_control::size::Size;
use kedge_image::{ImageError, MANIFEST, Manifest};
use kedge_remote::{JobLine, JobLineError, ToTaker, draw_session_key};
use kedge_supervisor::control::{self, Content, DepartAskError, Order, Progress, Sending, Until};
use kedge_supervisor::jobs::Jobs;
use kedge_supervisor::{Departure, hold_move};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// How long the supervisor may have the last image in hand when it has said that the job has left.
const IN_HAND: Duration = Duration::from_secs(10);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(10);

/// How far it has come.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Event<'a> {
    /// So many bytes have crossed while the job ran.
    Round { round: u32, bytes: u64, seconds: f64 },
    /// It would have stood still for so long, and goes on where it is.
    Stays { bytes: u64, seconds: f64 },
    /// It stood still for so long, while so many bytes crossed.
    Pause { bytes: u64, seconds: f64 },
    /// It runs there.
    Done { host: &'a str, seconds: f64 },
}

/// Moves the job, and tells how far that is.
pub(super) fn run(args: &MigrateArgs, jobs: &Jobs, host: &str) -> Result<(), Failure> {
    if !jobs.running_parts(&args.job).is_empty() {
        return Err(Failure::new(format!(
            "{} has several parts: such jobs do not move to another host as a whole yet",
            args.job
        )));
    }
    let server = with_port(host);
    let (token, secret) = (draw_session_key()?, kedge_keys::new_psk()?);
    let line = JobLine::connect(&server, token)?;
    let tag = token.iter().take(4).map(|byte| format!("{byte:02x}")).collect::<String>();
    let moved = Moved { server, token, secret };
    let images = Vec::new();
    let mut going = Going { args, jobs, line, moved, tag: format!("m{tag}"), images, sent: 0 };
    let begin = Instant::now();
    let NotMoved { job, why } = match going.go() {
        Ok(pause) => {
            going.forget_images();
            // It has moved, whoever hears that.
            return pause.map_or(Ok(()), |pause| going.tell_end(pause, begin.elapsed()));
        }
        Err(not_moved) => not_moved,
    };
    match job {
        Whereabouts::Here => {
            going.say_it_stays();
            going.forget_images();
        }
        Whereabouts::HereIfAtAll => {
            going.say_it_stays();
            going.keep_images();
        }
        Whereabouts::Unknown => going.keep_images(),
    }
    Err(why)
}

/// A job that is on its way.
struct Going<'a> {
    args: &'a MigrateArgs,
    jobs: &'a Jobs,
    line: JobLine,
    moved: Moved,
    /// By which its images are called.
    tag: String,
    /// Those that there are here.
    images: Vec<PathBuf>,
    /// Bytes that have crossed of the one that crosses.
    sent: u64,
}

/// Where a job is whose move has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whereabouts {
    /// It goes on here.
    Here,
    /// It goes on here, or has lost its supervisor and is nowhere; it does not run there.
    HereIfAtAll,
    /// It may run there.
    Unknown,
}

/// Why a job has not moved, or is not known to have.
struct NotMoved {
    job: Whereabouts,
    why: Failure,
}

impl<E: Into<Failure>> From<E> for NotMoved {
    fn from(why: E) -> NotMoved {
        NotMoved { job: Whereabouts::Here, why: why.into() }
    }
}

impl Going<'_> {
    /// For how long the job stood still; `None` if it was only to be seen whether it could move.
    fn go(&mut self) -> Result<Option<Duration>, NotMoved> {
        let paths = self.args.paths.iter().map(|(old, new)| pair(old, new));
        let paths = paths.collect::<Result<Vec<_>, _>>()?;
        let (job, build) = (self.args.job.to_string(), env!("CARGO_PKG_VERSION"));
        self.line.ask(&ToTaker::hello(&job, build, &paths, self.moved.secret)?)?;
        hold_move("connected");
        self.rounds()?;
        if self.args.check {
            let (job, to) = (&self.args.job, &self.moved.server);
            self.line.ask(&ToTaker::Stay {})?;
            output::print(&format!("{job} can move to {to}\n"))?;
            return Ok(None);
        }
        self.depart().map(Some)
    }

    /// Tells that the job runs there.
    fn tell_end(&self, pause: Duration, all: Duration) -> Result<(), Failure> {
        let (host, seconds) = (&*self.moved.server, all.as_secs_f64());
        self.tell(&Event::Pause { bytes: self.sent, seconds: pause.as_secs_f64() })?;
        self.tell(&Event::Done { host, seconds })?;
        if !self.args.json {
            let (job, ms) = (&self.args.job, pause.as_secs_f64() * 1e3);
            output::print(&format!("{job} has moved to {host}: stood still {ms:.0} ms\n"))?;
        }
        Ok(())
    }

    /// Has the job's memory cross while it runs.
    fn rounds(&mut self) -> Result<(), NotMoved> {
        let max_pause = self.args.max_pause.as_ref().map_or(MAX_PAUSE, |time| time.0);
        let mut last = u64::MAX;
        for round in 1..=self.args.rounds.max(1) {
            let begin = Instant::now();
            let content = if round == 1 { Content::All } else { Content::Changes };
            let order = Order { ahead: true, ..self.order(content) };
            let mut image = None;
            let sending = Sending::default();
            control::checkpoint(
                self.jobs,
                &self.args.job,
                &order,
                Until::Durable,
                &sending,
                |progress| {
                    if let Progress::Durable { image: durable, .. } = progress {
                        image = Some(durable.clone());
                    }
                },
            )?;
            let image = image.ok_or_else(|| Failure::new("the job has made no image"))?;
            self.add(&image).map_err(Failure::new)?;
            let crosses = Instant::now();
            let bytes = self.send(&image)?;
            let rate = bytes as f64 / crosses.elapsed().as_secs_f64().max(1e-6);
            let seconds = begin.elapsed().as_secs_f64();
            self.tell(&Event::Round { round, bytes, seconds })?;
            if round == 1 {
                hold_move("round");
                self.line.ask(&ToTaker::check(&image)?)?;
                hold_move("checked");
            }
            if !self.args.check {
                self.line.ask(&ToTaker::standby(&image)?)?;
            }
            let fits = bytes as f64 <= rate * max_pause.as_secs_f64();
            if fits {
                return Ok(());
            }
            // What has changed meanwhile is no less: it changes as fast as it crosses.
            if bytes >= last || round == self.args.rounds.max(1) {
                let expected = bytes as f64 / rate;
                if self.args.max_pause.is_some() && !self.args.stop_and_copy {
                    self.tell(&Event::Stays { bytes, seconds: expected })?;
                    return Err(Failure::new(format!(
                        "{} stays where it is: it would stand still for {:.0} ms \
                         (--stop-and-copy moves it all the same)",
                        self.args.job,
                        expected * 1e3
                    ))
                    .into());
                }
                return Ok(());
            }
            // The first one is all of it, and says nothing of what changes.
            last = if round == 1 { u64::MAX } else { bytes };
        }
        Ok(())
    }

    /// Notes an image, which is to build on one that has crossed, or on none.
    fn add(&mut self, image: &Path) -> Result<(), String> {
        self.images.push(image.to_owned());
        let manifest = Manifest::read(image).map_err(|error| error.to_string())?;
        let Some(parent) = manifest.parent else { return Ok(()) };
        let name = Some(std::ffi::OsStr::new(&parent.name));
        match self.images.iter().any(|image| image.file_name() == name) && parent.whole.is_none() {
            true => Ok(()),
            false => Err(format!(
                "{} builds on {}, which is none of this move's: try again",
                image.display(),
                parent.name
            )),
        }
    }

    /// Has the last of it cross while it stands still, and the job run there: for how long it stood
    /// still.
    fn depart(&mut self) -> Result<Duration, NotMoved> {
        let (jobs, job) = (self.jobs, self.args.job.clone());
        let order = self.order(Content::Changes);
        let mut stood = Stood::default();
        let stands = std::cell::Cell::new(None);
        let departed = control::depart(
            jobs,
            &job,
            &order,
            |progress| {
                if let Progress::Captured { stall_seconds, .. } = progress {
                    stands.set(Some((Instant::now(), Duration::from_secs_f64(*stall_seconds))));
                }
            },
            |image| {
                self.add(image)?;
                self.arrive(image).map_err(|error| error.to_string())
            },
        );
        stood.since = stands.get();
        match departed {
            Ok(()) => {}
            Err(error @ DepartAskError::Undecided { .. }) => {
                let job = match jobs.settle_departure(&job, &self.moved) {
                    Departure::Left => None,
                    Departure::Stays => Some(Whereabouts::HereIfAtAll),
                    Departure::Unknown => Some(Whereabouts::Unknown),
                };
                if let Some(job) = job {
                    return Err(NotMoved { job, why: error.into() });
                }
            }
            Err(error) => return Err(error.into()),
        }
        hold_move("departed");
        let gone = |error: JobLineError| NotMoved {
            job: Whereabouts::Unknown,
            why: Failure::new(format!(
                "{job} has left, and it is not known whether it runs there ({error}): `kedge ps` \
                 there tells; if it does not, `kedge restart` brings it back, there from the last \
                 image in `{job}.{}-at-…` in its folder of images",
                self.tag
            )),
        };
        self.line.ask(&ToTaker::Go {}).map_err(gone)?;
        Ok(stood.time())
    }

    /// The job stands still: has its last image cross, and the job made there.
    fn arrive(&mut self, image: &Path) -> Result<Moved, JobLineError> {
        hold_move("standing");
        self.sent = self.send(image)?;
        hold_move("received");
        self.line.ask(&ToTaker::restart(image)?)?;
        hold_move("ready");
        Ok(self.moved.clone())
    }

    fn order(&self, content: Content) -> Order {
        Order { content, moves: Some(self.tag.clone()), ..Order::default() }
    }

    /// Sends an image, its manifest last: how many bytes it has.
    fn send(&mut self, image: &Path) -> Result<u64, JobLineError> {
        let failed = |error: ImageError| JobLineError::File {
            path: image.to_owned(),
            source: std::io::Error::other(error),
        };
        let manifest = Manifest::read(image).map_err(failed)?;
        self.line.ask(&ToTaker::image(image)?)?;
        let mut pace = Pace::new(self.args.rate.map(|rate| rate.0));
        let names = manifest.files.iter().map(|file| &*file.name).chain([MANIFEST]);
        let mut bytes = 0;
        for name in names {
            bytes += self.line.send(image, name, |piece| pace.sent(piece))?;
        }
        Ok(bytes)
    }

    /// Has what has come be removed there; nobody hears it where the line is lost.
    fn say_it_stays(&mut self) {
        let _ = self.line.ask(&ToTaker::Stay {});
    }

    /// Tells where the images are that the job may have to come back from.
    fn keep_images(&mut self) {
        if let Some(last) = self.images.drain(..).rfind(|image| image.exists()) {
            output::complain(&format!(
                "its last image is kept here, with those that it builds on: {}",
                last.display()
            ));
        }
    }

    /// Removes the images here: where the job goes on it has its own.
    fn forget_images(&mut self) {
        let there: Vec<PathBuf> = self.images.drain(..).filter(|image| image.exists()).collect();
        let begin = Instant::now();
        let removed = loop {
            match kedge_image::remove(&there) {
                // Who has made the last one may still have it in hand.
                Err(ImageError::Busy { .. }) if begin.elapsed() < IN_HAND => thread::sleep(LOOK),
                removed => break removed,
            }
        };
        if let Err(error) = removed {
            output::complain(&format!("what has crossed is still here: {error}"));
        }
    }

    fn tell(&self, event: &Event<'_>) -> Result<(), Failure> {
        if self.args.json {
            return Ok(output::print(&super::line(event))?);
        }
        if let Event::Round { round, bytes, seconds } = event {
            let (bytes, ms) = (Size(*bytes), seconds * 1e3);
            output::print(&format!("round {round}: {bytes} in {ms:.1} ms\n"))?;
        }
        Ok(())
    }
}

/// Since when a job stands still, and for how long it had by then.
#[derive(Default)]
struct Stood {
    since: Option<(Instant, Duration)>,
}

impl Stood {
    fn time(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |(captured, before)| captured.elapsed() + before)
    }
}

/// Has bytes cross no faster than they may.
struct Pace {
    rate: Option<u64>,
    begin: Instant,
    sent: u64,
}

impl Pace {
    fn new(rate: Option<u64>) -> Pace {
        Pace { rate, begin: Instant::now(), sent: 0 }
    }

    fn sent(&mut self, bytes: u64) {
        self.sent += bytes;
        let Some(rate) = self.rate.filter(|rate| *rate > 0) else { return };
        let due = Duration::from_secs_f64(self.sent as f64 / rate as f64);
        thread::sleep(due.saturating_sub(self.begin.elapsed()));
    }
}

fn pair(old: &Path, new: &Path) -> Result<String, Failure> {
    match (old.to_str(), new.to_str()) {
        (Some(old), Some(new)) => Ok(format!("{old}={new}")),
        _ => Err(Failure::new("--path-map: only names in UTF-8 can be said to another host")),
    }
}

/// A host without a port has the usual one.
fn with_port(host: &str) -> String {
    let has_port = match host.rsplit_once(':') {
        // Without brackets, an address of IPv6 has no port.
        Some((before, port)) => {
            port.parse::<u16>().is_ok() && (before.ends_with(']') || !before.contains(':'))
        }
        None => false,
    };
    match has_port {
        true => host.to_owned(),
        false if host.contains(':') && !host.starts_with('[') => format!("[{host}]:{DEFAULT_PORT}"),
        false => format!("{host}:{DEFAULT_PORT}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_a_port() {
        for (host, server) in [
            ("b", "b:7531"),
            ("b:9", "b:9"),
            ("10.0.0.2", "10.0.0.2:7531"),
            ("::1", "[::1]:7531"),
            ("[::1]", "[::1]:7531"),
            ("[::1]:9", "[::1]:9"),
        ] {
            assert_eq!(with_port(host), server);
        }
    }
}
