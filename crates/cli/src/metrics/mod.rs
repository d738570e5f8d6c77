//! `kedge metrics`: the user's jobs as figures for Prometheus.

mod figures;

use crate::http::{self, Page};
use crate::readiness;
use crate::time::Time;
use crate::{Failure, output};
use clap::Args;
use kedge_supervisor::jobs::Jobs;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const AFTER_HELP: &str = "\
The figures are those of your own jobs and caches on this machine; root sees root's. docs/metrics.md lists \
them, and docs/grafana.json is a dashboard. No command lines are told: they may hold secrets.

Examples:
  kedge metrics                                        print them once
  kedge metrics --listen 127.0.0.1:9717                answer http://127.0.0.1:9717/metrics
  kedge metrics --textfile /var/lib/node_exporter/kedge.prom --every 15s
                                                       for node_exporter's textfile collector";

/// Tell how jobs and their checkpoints fare, as figures for Prometheus
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct MetricsArgs {
    /// Answer at this address until interrupted; whoever reaches it may ask
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with_all = ["textfile", "every"])]
    listen: Option<SocketAddr>,
    /// Write them to this file, which is replaced as a whole
    #[arg(long, value_name = "FILE")]
    textfile: Option<PathBuf>,
    /// Write them again and again, so much time apart, until interrupted
    #[arg(long, value_name = "TIME", requires = "textfile")]
    every: Option<Time>,
}

/// Shortest time between two writes of a file.
const MIN_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) fn run(args: &MetricsArgs) -> Result<(), Failure> {
    if args.every.is_some_and(|Time(every)| every < MIN_INTERVAL) {
        return Err(Failure::of_usage("--every: give 1s or more"));
    }
    let jobs = Jobs::open()?;
    let text = || figures::of(&jobs).map(|figures| figures.render());
    if let Some(address) = args.listen {
        let listener = http::listen(address)?;
        output::print(&format!("http://{}/metrics\n", listener.local_addr()?))?;
        readiness::ready("answering");
        http::serve(&listener, &|path| (path == "/metrics").then(|| text().map(Page::Figures)));
    }
    let Some(file) = &args.textfile else {
        return Ok(output::print(&text()?)?);
    };
    loop {
        replace(file, &text()?)
            .map_err(|error| Failure::new(format!("{}: {error}", file.display())))?;
        let Some(Time(every)) = args.every else { return Ok(()) };
        thread::sleep(every);
    }
}

/// Replaces `file` as a whole: a collector may read it at any moment.
fn replace(file: &Path, text: &str) -> std::io::Result<()> {
    // Collectors take what ends in `.prom`. Nobody else's file or link is taken for it.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let fresh = file.with_extension(format!("{}-{now:x}.new", std::process::id()));
    let mut new = OpenOptions::new().write(true).create_new(true).open(&fresh)?;
    let done = new.write_all(text.as_bytes()).and_then(|()| fs::rename(&fresh, file));
    if done.is_err() {
        let _ = fs::remove_file(&fresh);
    }
    done
}
