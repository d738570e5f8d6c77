//! `kedge devices`: what a program would see.

use crate::Failure;
use crate::child::{self, Place};
use crate::gpu::{self, Gpu};
use crate::output::{self, DIM, PLAIN, Table, styled};
use clap::Args;
use kedge_control::gpu::GpuSpec;
use kedge_control::size::Size;
use kedge_cuda_types::{attribute, uuid};
use kedge_probe::DeviceReport;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// How long the probe may take: starting a job takes some milliseconds, and more on a busy machine.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// Devices as `kedge run` would give them: local for this machine's GPUs, local:I,J… for some
    /// of them, soft, or soft:N for N software devices [default: as for `kedge run`]
    #[arg(long, value_name = "SPEC")]
    gpu: Option<GpuSpec>,
    /// This machine's own devices, as a program sees them without kedge
    #[arg(long, conflicts_with = "gpu")]
    native: bool,
    /// Memory of each software device, such as 4G [default: half of this machine's, shared out]
    #[arg(long, value_name = "SIZE")]
    soft_memory: Option<Size>,
    /// Print a JSON list of objects: index, name, uuid, pci_bus_id, compute_capability,
    /// total_memory (bytes), multiprocessors, driver_version, attributes (by their names in cuda.h)
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Device {
    index: usize,
    name: String,
    uuid: String,
    pci_bus_id: String,
    compute_capability: String,
    total_memory: u64,
    multiprocessors: i32,
    driver_version: String,
    attributes: BTreeMap<&'static str, i32>,
}

pub(crate) fn run(args: &DevicesArgs) -> Result<(), Failure> {
    let soft_only = args.soft_memory.map(|_| "--soft-memory");
    // Without kedge, nobody needs to know what a job would get.
    let gpu = match args.native {
        true => None,
        false => Some(gpu::resolve(args.gpu.as_ref(), soft_only)?),
    };
    let place = gpu.as_ref().map_or(Place::Native, |gpu| Place::Job {
        gpu: gpu.spec.clone(),
        soft_memory: args.soft_memory,
    });
    let mut reports = Vec::new();
    child::probe(place, &["devices".into()], PROBE_TIMEOUT, |line| {
        reports.extend(serde_json::from_str::<DeviceReport>(line));
    })
    .map_err(Failure::new)?;
    let devices: Vec<Device> =
        reports.iter().enumerate().map(|(index, report)| describe(index, report)).collect();
    if args.json {
        return Ok(output::json(&devices)?);
    }
    let headings = ["DEVICE", "NAME", "COMPUTE", "MEMORY", "CORES", "DRIVER", "UUID"];
    let mut table = Table::new(&headings, &[0, 2, 3, 4, 5]);
    for device in devices {
        table.row([
            (PLAIN, device.index.to_string()),
            (PLAIN, device.name),
            (PLAIN, device.compute_capability),
            (PLAIN, Size(device.total_memory).to_string()),
            (PLAIN, device.multiprocessors.to_string()),
            (PLAIN, device.driver_version),
            (PLAIN, device.uuid),
        ]);
    }
    let mut text = table.render();
    if let Some(Gpu { spec, default: Some(why) }) = gpu {
        let line = format!("--gpu {spec} is the default here: {why}");
        text.push_str(&format!("{}\n", styled(DIM, &line)));
    }
    Ok(output::print(&text)?)
}

fn describe(index: usize, report: &DeviceReport) -> Device {
    let value = |wanted| {
        let found = report.attributes.iter().find(|(attribute, _)| *attribute == wanted);
        found.map_or(0, |(_, value)| *value)
    };
    let (major, minor) =
        (value(attribute::COMPUTE_CAPABILITY_MAJOR), value(attribute::COMPUTE_CAPABILITY_MINOR));
    let named = |(id, value): &(u32, i32)| Some((attribute::name(*id)?, *value));
    let driver = report.driver_version;
    Device {
        index,
        name: report.name.clone(),
        uuid: uuid::text(&report.uuid),
        pci_bus_id: report.pci_bus_id.clone(),
        compute_capability: format!("{major}.{minor}"),
        total_memory: report.total_memory,
        multiprocessors: value(attribute::MULTIPROCESSOR_COUNT),
        driver_version: format!("{}.{}", driver / 1000, driver % 1000 / 10),
        attributes: report.attributes.iter().filter_map(named).collect(),
    }
}
