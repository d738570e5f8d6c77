//! The figures of a user's jobs and caches.

use crate::Failure;
use crate::prometheus::Figures;
use crate::usage::Processes;
use kedge_cache::control::{self, DeviceStatus, Status};
use kedge_cache::partner::PartnerStatus;
use kedge_supervisor::jobs::{JobName, Jobs, Meta, State};

/// Returns the figures of this moment.
///
/// # Errors
/// The jobs cannot be listed.
pub(super) fn of(jobs: &Jobs) -> Result<Figures, Failure> {
    let metas = jobs.list()?;
    let mut figures = Figures::default();
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
            add_job(&mut figures, jobs, meta, &name);
            add_usage(&mut figures, meta, &processes);
        }
    }
    // Of one whose daemon was killed nothing can be told.
    control::all().into_iter().flatten().for_each(|cache| add_cache(&mut figures, &cache));
    Ok(figures)
}

fn add_job(figures: &mut Figures, jobs: &Jobs, meta: &Meta, name: &JobName) {
    let job = || ("job", meta.name.clone());
    let info = vec![job(), ("gpu", meta.gpu.clone()), ("state", meta.state.name().to_owned())];
    figures.add("kedge_job_info", "gauge", "A job that runs, and its devices.", (info, 1.0));
    let help = "When the job began or came back, seconds since 1970.";
    let started = (vec![job()], meta.started as f64);
    figures.add("kedge_job_started_timestamp_seconds", "gauge", help, started);
    if let Some(next) = jobs.next_checkpoint(name) {
        let help = "Time between two checkpoints that nobody asks for.";
        let interval = (vec![job()], next.every.as_secs_f64());
        figures.add("kedge_job_checkpoint_interval_seconds", "gauge", help, interval);
    }
    let counts = jobs.checkpoints(name);
    for (result, count) in [("durable", counts.durable), ("failed", counts.failed)] {
        let labels = vec![job(), ("result", result.to_owned())];
        let help = "Checkpoints since the job began or came back.";
        figures.add("kedge_job_checkpoints_total", "counter", help, (labels, count as f64));
    }
    if let Some(failure) = counts.last_failure {
        let help = "When the latest checkpoint failed that did, seconds since 1970.";
        let at = (vec![job()], failure.at as f64);
        figures.add("kedge_job_checkpoint_failure_timestamp_seconds", "gauge", help, at);
    }
    if let Some(image) = jobs.last_image(name) {
        let help = "When the latest durable image was captured, seconds since 1970.";
        let captured = (vec![job()], image.captured as f64);
        figures.add("kedge_job_image_captured_timestamp_seconds", "gauge", help, captured);
        let help = "Size of the latest durable image.";
        figures.add("kedge_job_image_bytes", "gauge", help, (vec![job()], image.bytes as f64));
        let help = "How long the job stood still for the latest durable image.";
        let stall = (vec![job()], image.stall_seconds);
        figures.add("kedge_job_image_stall_seconds", "gauge", help, stall);
    }
    if let Some(held) = jobs.held(name) {
        for (place, bytes) in [("devices", held.on_devices), ("memory", held.in_memory)] {
            let labels = vec![job(), ("place", place.to_owned())];
            let help = "What of an image is in memory, too.";
            figures.add("kedge_job_held_bytes", "gauge", help, (labels, bytes as f64));
        }
    }
}

fn add_cache(figures: &mut Figures, cache: &Status) {
    let under = || ("under", cache.under.display().to_string());
    for tier in &cache.tiers {
        let labels = || {
            let folder = tier.folder.display().to_string();
            vec![under(), ("tier", tier.medium.name().to_owned()), ("folder", folder)]
        };
        let help = "What a tier of a write-back cache holds.";
        figures.add("kedge_cache_tier_bytes", "gauge", help, (labels(), tier.used as f64));
        let help = "What a tier of a write-back cache may hold now.";
        figures.add("kedge_cache_tier_limit_bytes", "gauge", help, (labels(), tier.limit as f64));
    }
    let gauges = [
        ("kedge_cache_undrained_bytes", "What is not below yet.", cache.dirty),
        ("kedge_cache_undrained_files", "Files with bytes that are not below yet.", cache.files),
        ("kedge_cache_stuck_files", "Files that cannot be drained.", cache.stuck_files),
        ("kedge_cache_waiting_writes", "Writes that wait for room.", cache.waiting),
    ];
    for (name, help, value) in gauges {
        figures.add(name, "gauge", help, (vec![under()], value as f64));
    }
    let written = "What programs have written into tiers, and below at once, since the start.";
    for (way, bytes) in [("absorbed", cache.absorbed), ("through", cache.through)] {
        let labels = vec![under(), ("way", way.to_owned())];
        figures.add("kedge_cache_written_bytes_total", "counter", written, (labels, bytes as f64));
    }
    let drained = (vec![under()], cache.drained as f64);
    figures.add("kedge_cache_drained_bytes_total", "counter", "What was drained.", drained);
    let moved = (vec![under()], cache.moved as f64);
    let help = "What moved from host memory to a device.";
    figures.add("kedge_cache_moved_bytes_total", "counter", help, moved);
    let back = (vec![under()], cache.back as f64);
    let help = "What moved from a device back to host memory.";
    figures.add("kedge_cache_moved_back_bytes_total", "counter", help, back);
    if let Some(device) = &cache.device {
        add_cache_device(figures, under(), device);
    }
    if let Some(partner) = &cache.partner {
        add_cache_partner(figures, &under, partner);
    }
    let waited = (vec![under()], cache.waited as f64);
    let help = "Writes that had to wait for room.";
    figures.add("kedge_cache_waits_total", "counter", help, waited);
}

fn add_cache_partner(
    figures: &mut Figures,
    under: &impl Fn() -> (&'static str, String),
    partner: &PartnerStatus,
) {
    let up = u64::from(partner.connected);
    let all = [
        ("kedge_cache_partner_up", "gauge", "Whether a cache's partner is connected.", up),
        (
            "kedge_cache_partner_held_bytes",
            "gauge",
            "What a cache's partner has and is not below.",
            partner.holds,
        ),
        (
            "kedge_cache_partner_sent_bytes_total",
            "counter",
            "What was sent to a cache's partner.",
            partner.sent,
        ),
        (
            "kedge_cache_partner_drained_fsyncs_total",
            "counter",
            "Fsyncs that drained because the partner could not have the data.",
            partner.drained,
        ),
    ];
    for (name, kind, help, value) in all {
        figures.add(name, kind, help, (vec![under()], value as f64));
    }
}

fn add_cache_device(figures: &mut Figures, under: (&'static str, String), device: &DeviceStatus) {
    let gauges = [
        (
            "kedge_cache_device_up",
            "Whether the process that holds a cache's device memory is there.",
            Some(u64::from(!device.gone)),
        ),
        ("kedge_cache_device_free_bytes", "Free memory of a cache's device.", device.free),
        (
            "kedge_cache_device_keep_bytes",
            "Memory of a cache's device that is to stay free.",
            Some(device.keep),
        ),
        (
            "kedge_cache_device_wanted_bytes",
            "Memory of a cache's device that programs wait for.",
            Some(device.wanted),
        ),
        (
            "kedge_cache_device_late_orders",
            "Orders to the holder of a cache's device memory that were not answered in time.",
            Some(device.late),
        ),
    ];
    for (name, help, value) in gauges {
        let Some(value) = value else { continue };
        figures.add(name, "gauge", help, (vec![under.clone()], value as f64));
    }
}

fn add_usage(figures: &mut Figures, meta: &Meta, processes: &Processes) {
    let usage = processes.of(meta.supervisor);
    for (part, usage) in [("program", usage.program), ("kedge", usage.kedge)] {
        let labels = || vec![("job", meta.name.clone()), ("part", part.to_owned())];
        let help = "Processes of the program, and kedge's own of the job.";
        let count = (labels(), usage.processes as f64);
        figures.add("kedge_job_processes", "gauge", help, count);
        let help = "Resident memory; software devices' is kedge's. What is shared counts twice.";
        let resident = (labels(), usage.resident as f64);
        figures.add("kedge_job_resident_bytes", "gauge", help, resident);
        let help = "Processor time of the processes that live.";
        let processor = (labels(), usage.processor.as_secs_f64());
        figures.add("kedge_job_processor_seconds", "gauge", help, processor);
    }
}
