//! `kedge devices`: what a program would see.

use crate::Failure;
use crate::child::{self, Place};
use crate::output::{self, PLAIN, Table};
use crate::size::Size;
use clap::Args;
use kedge_cuda_types::attribute;
use kedge_probe::DeviceReport;
use kedge_proxy::backend::GpuSpec;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Starting a job takes some milliseconds; a busy machine more.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// Devices as `kedge run` would give them: soft, soft:N for N software
    /// devices, local for this machine's GPUs, or local:I,J… for some of them
    #[arg(long, value_name = "SPEC", default_value = "soft")]
    gpu: GpuSpec,
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
    let place = match args.native {
        true => Place::Native,
        false => Place::Job { gpu: args.gpu.clone(), soft_memory: args.soft_memory },
    };
    let mut reports = Vec::new();
    child::probe(place, &["devices".into()], PATIENCE, |line| {
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
    Ok(output::print(&table.render())?)
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
        uuid: uuid(&report.uuid),
        pci_bus_id: report.pci_bus_id.clone(),
        compute_capability: format!("{major}.{minor}"),
        total_memory: report.total_memory,
        multiprocessors: value(attribute::MULTIPROCESSOR_COUNT),
        driver_version: format!("{}.{}", driver / 1000, driver % 1000 / 10),
        attributes: report.attributes.iter().filter_map(named).collect(),
    }
}

/// As CUDA_VISIBLE_DEVICES takes it.
fn uuid(bytes: &[u8; 16]) -> String {
    let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let groups = [&hex[..4], &hex[4..6], &hex[6..8], &hex[8..10], &hex[10..]];
    format!("GPU-{}", groups.map(|group| group.concat()).join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_look_like_a_gpu_s() {
        let text = uuid(b"kedge-soft\0\0\0\0\0\x01");
        assert_eq!(text, "GPU-6b656467-652d-736f-6674-000000000001");
    }
}
