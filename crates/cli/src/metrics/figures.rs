//! The figures, and Prometheus' text format of them.

use crate::Failure;
use crate::usage::Processes;
use kedge_cache::control::{self, Status};
use kedge_supervisor::jobs::{JobName, Jobs, Meta, State};
use std::fmt::Write as _;

/// Labels of one value, and the value.
type Sample = (Vec<(&'static str, String)>, f64);

/// One figure: its name, kind and meaning, and its values.
struct Family {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    samples: Vec<Sample>,
}

/// All figures of one moment.
pub(super) struct Figures(Vec<Family>);

impl Figures {
    /// # Errors
    /// Where the jobs cannot be listed.
    pub(super) fn of(jobs: &Jobs) -> Result<Figures, Failure> {
        let metas = jobs.list()?;
        let mut figures = Figures(Vec::new());
        let version = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
        figures.add("kedge_build_info", "gauge", "The version of kedge.", (version, 1.0));
        for state in State::NAMES {
            let count = metas.iter().filter(|meta| meta.state.name() == state).count();
            let labels = vec![("state", state.to_owned())];
            let help = "Jobs by state; of those that have ended the latest 50 are kept.";
            figures.add("kedge_jobs", "gauge", help, (labels, count as f64));
        }
        let processes = Processes::now();
        let goes_on = [State::Running, State::Unsupervised];
        for meta in metas.iter().filter(|meta| goes_on.contains(&meta.state)) {
            if let Ok(name) = meta.name.parse() {
                figures.add_job(jobs, meta, &name);
                figures.add_usage(meta, &processes);
            }
        }
        // Of one whose daemon was killed nothing can be told.
        control::all().into_iter().flatten().for_each(|cache| figures.add_cache(&cache));
        Ok(figures)
    }

    fn add(&mut self, name: &'static str, kind: &'static str, help: &'static str, sample: Sample) {
        match self.0.iter_mut().find(|family| family.name == name) {
            Some(family) => family.samples.push(sample),
            None => self.0.push(Family { name, kind, help, samples: vec![sample] }),
        }
    }

    fn add_job(&mut self, jobs: &Jobs, meta: &Meta, name: &JobName) {
        let job = || ("job", meta.name.clone());
        let info = vec![job(), ("gpu", meta.gpu.clone()), ("state", meta.state.name().to_owned())];
        self.add("kedge_job_info", "gauge", "A job that runs, and its devices.", (info, 1.0));
        let help = "When the job began or came back, seconds since 1970.";
        let started = (vec![job()], meta.started as f64);
        self.add("kedge_job_started_timestamp_seconds", "gauge", help, started);
        if let Some(interval) = meta.policy.as_ref().and_then(|policy| policy.interval) {
            let help = "Time between two checkpoints that nobody asks for.";
            let interval = (vec![job()], interval.as_secs_f64());
            self.add("kedge_job_checkpoint_interval_seconds", "gauge", help, interval);
        }
        let counts = jobs.checkpoints(name);
        for (result, count) in [("durable", counts.durable), ("failed", counts.failed)] {
            let labels = vec![job(), ("result", result.to_owned())];
            let help = "Checkpoints since the job began or came back.";
            self.add("kedge_job_checkpoints_total", "counter", help, (labels, count as f64));
        }
        if let Some(failure) = counts.last_failure {
            let help = "When the latest checkpoint failed that did, seconds since 1970.";
            let at = (vec![job()], failure.at as f64);
            self.add("kedge_job_checkpoint_failure_timestamp_seconds", "gauge", help, at);
        }
        if let Some(image) = jobs.last_image(name) {
            let help = "When the latest durable image was captured, seconds since 1970.";
            let captured = (vec![job()], image.captured as f64);
            self.add("kedge_job_image_captured_timestamp_seconds", "gauge", help, captured);
            let help = "Size of the latest durable image.";
            self.add("kedge_job_image_bytes", "gauge", help, (vec![job()], image.bytes as f64));
            let help = "How long the job stood still for the latest durable image.";
            let stall = (vec![job()], image.stall_seconds);
            self.add("kedge_job_image_stall_seconds", "gauge", help, stall);
        }
        if let Some(held) = jobs.held(name) {
            for (place, bytes) in [("devices", held.on_devices), ("memory", held.in_memory)] {
                let labels = vec![job(), ("place", place.to_owned())];
                let help = "What of an image is in memory, too.";
                self.add("kedge_job_held_bytes", "gauge", help, (labels, bytes as f64));
            }
        }
    }

    fn add_cache(&mut self, cache: &Status) {
        let under = || ("under", cache.under.display().to_string());
        for tier in &cache.tiers {
            let labels = || {
                let folder = tier.folder.display().to_string();
                vec![under(), ("tier", tier.medium.name().to_owned()), ("folder", folder)]
            };
            let help = "What a tier of a write-back cache holds.";
            self.add("kedge_cache_tier_bytes", "gauge", help, (labels(), tier.used as f64));
            let help = "What a tier of a write-back cache may hold now.";
            self.add("kedge_cache_tier_limit_bytes", "gauge", help, (labels(), tier.limit as f64));
        }
        let gauges = [
            ("kedge_cache_undrained_bytes", "What is not below yet.", cache.dirty),
            (
                "kedge_cache_undrained_files",
                "Files with bytes that are not below yet.",
                cache.files,
            ),
            ("kedge_cache_stuck_files", "Files that cannot be drained.", cache.stuck_files),
            ("kedge_cache_waiting_writes", "Writes that wait for room.", cache.waiting),
        ];
        for (name, help, value) in gauges {
            self.add(name, "gauge", help, (vec![under()], value as f64));
        }
        let written = "What programs have written into tiers, and below at once, since the start.";
        for (way, bytes) in [("absorbed", cache.absorbed), ("through", cache.through)] {
            let labels = vec![under(), ("way", way.to_owned())];
            self.add("kedge_cache_written_bytes_total", "counter", written, (labels, bytes as f64));
        }
        let drained = (vec![under()], cache.drained as f64);
        self.add("kedge_cache_drained_bytes_total", "counter", "What was drained.", drained);
        let waited = (vec![under()], cache.waited as f64);
        let help = "Writes that had to wait for room.";
        self.add("kedge_cache_waits_total", "counter", help, waited);
    }

    fn add_usage(&mut self, meta: &Meta, processes: &Processes) {
        let usage = processes.of(meta.supervisor);
        for (part, usage) in [("program", usage.program), ("kedge", usage.kedge)] {
            let labels = || vec![("job", meta.name.clone()), ("part", part.to_owned())];
            let help = "Processes of the program, and kedge's own of the job.";
            let count = (labels(), usage.processes as f64);
            self.add("kedge_job_processes", "gauge", help, count);
            let help =
                "Resident memory; software devices' is kedge's. What is shared counts twice.";
            let resident = (labels(), usage.resident as f64);
            self.add("kedge_job_resident_bytes", "gauge", help, resident);
            let help = "Processor time of the processes that live.";
            let processor = (labels(), usage.processor.as_secs_f64());
            self.add("kedge_job_processor_seconds", "gauge", help, processor);
        }
    }

    /// The text format, version 0.0.4.
    pub(super) fn render(&self) -> String {
        let mut text = String::new();
        for family in &self.0 {
            let Family { name, kind, help, samples } = family;
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (labels, value) in samples {
                let labels = labels.iter().map(|(name, value)| {
                    let value = value.replace('\\', r"\\").replace('"', "\\\"");
                    format!("{name}=\"{}\"", value.replace('\n', r"\n"))
                });
                let labels = labels.collect::<Vec<_>>().join(",");
                let _ = writeln!(text, "{name}{{{labels}}} {value}");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_s_values_stand_together_and_labels_are_quoted() {
        let mut figures = Figures(Vec::new());
        figures.add("a", "gauge", "A.", (vec![("x", "1\"\\\n".into())], 1.5));
        figures.add("b", "counter", "B.", (vec![], 2.0));
        figures.add("a", "gauge", "A.", (vec![("x", "2".into()), ("y", "3".into())], 1e12));
        let text = figures.render();
        let want = "# HELP a A.\n# TYPE a gauge\na{x=\"1\\\"\\\\\\n\"} 1.5\n\
                    a{x=\"2\",y=\"3\"} 1000000000000\n# HELP b B.\n# TYPE b counter\nb{} 2\n";
        assert_eq!(text, want);
    }
}
