//! `kedge cache status`.

use super::ask;
use crate::Failure;
use crate::output::{self, BAD, DIM, PLAIN, Table};
use clap::Args;
use kedge_cache::control::{self, Answer, Ask, DeviceStatus, Status};
use kedge_cache::partner::PartnerStatus;
use kedge_control::size::Size;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(super) struct StatusArgs {
    /// The folder that is cached [default: each of yours]
    #[arg(long, value_name = "DIR")]
    under: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn status(args: &StatusArgs) -> Result<(), Failure> {
    let Some(under) = &args.under else { return status_of_all(args.json) };
    let Answer::Status(status) = ask(under, Ask::Status)? else {
        return Err(Failure::new("the daemon did not answer the question"));
    };
    if args.json {
        output::json(&status)?;
    } else {
        output::print(&told(&status))?;
    }
    Ok(())
}

/// Tells how each of the user's caches stands. One that cannot be asked fails the command, once the
/// others are told.
fn status_of_all(json: bool) -> Result<(), Failure> {
    let (mut told_of, mut failed) = (Vec::new(), Vec::new());
    for one in control::all() {
        match one {
            Ok(status) => told_of.push(status),
            Err(error) => failed.push(error.to_string()),
        }
    }
    if json {
        output::json(&told_of)?;
    } else {
        for status in &told_of {
            let under = output::harmless(&status.under.display().to_string());
            output::print(&format!("{under}\n{}\n", told(status)))?;
        }
        if told_of.is_empty() && failed.is_empty() {
            output::tell("you have no cache on this machine: `kedge cache start` starts one");
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(Failure::new(failed.join("; "))) }
}

/// How a cache stands, for people.
fn told(status: &Status) -> String {
    let mut table = Table::new(&["TIER", "HOLDS", "OF", "WHERE"], &[1, 2]);
    for tier in &status.tiers {
        table.row([
            (PLAIN, tier.medium.name().to_owned()),
            (PLAIN, Size(tier.used).to_string()),
            (PLAIN, Size(tier.limit).to_string()),
            (DIM, tier.folder.display().to_string()),
        ]);
    }
    let mut text = table.render();
    text += &format!(
        "to drain    {} of {} files\nabsorbed    {}\ndrained     {}\nwritten through  {}\n",
        Size(status.dirty),
        status.files,
        Size(status.absorbed),
        Size(status.drained),
        Size(status.through)
    );
    if status.leased > 0 {
        text += &format!("by leases   {} of what was absorbed\n", Size(status.leased));
    }
    if status.moved > 0 {
        text += &format!("to devices  {}, {} back\n", Size(status.moved), Size(status.back));
    }
    if let Some(device) = &status.device {
        text += &told_of_device(device);
    }
    if let Some(partner) = &status.partner {
        text += &told_of_partner(partner);
    }
    if status.waited > 0 {
        text += &format!("waits       {} writes, {} now\n", status.waited, status.waiting);
    }
    if status.below > 0 {
        text += &format!("wait below  {} requests\n", status.below);
    }
    for stuck in &status.stuck {
        let line = format!("{} ({}): {}", stuck.path, Size(stuck.bytes), stuck.why);
        text += &format!("{}\n", output::styled(BAD, &output::harmless(&line)));
    }
    let more = status.stuck_files.saturating_sub(status.stuck.len() as u64);
    if more > 0 {
        text += &format!("and {more} more files\n");
    }
    text
}

fn told_of_partner(partner: &PartnerStatus) -> String {
    let address = output::harmless(&partner.address);
    let mut text = match partner.connected {
        true => format!("partner     {address} holds {}\n", Size(partner.holds)),
        false => {
            let line = format!("partner     {address} is not there: fsync drains");
            format!("{}\n", output::styled(BAD, &line))
        }
    };
    if partner.drained > 0 {
        text += &format!("            {} fsyncs drained instead\n", partner.drained);
    }
    if let Some(why) = &partner.why {
        text += &format!("            {}\n", output::harmless(why));
    }
    text
}

fn told_of_device(device: &DeviceStatus) -> String {
    let mut text = String::new();
    if device.gone {
        text += "device      its holder has ended\n";
    } else if let Some(free) = device.free {
        text += &format!("device      {} free, {} to stay so\n", Size(free), Size(device.keep));
    }
    if device.wanted > 0 {
        text += &format!("programs    wait for {} of the device\n", Size(device.wanted));
    }
    if device.late > 0 {
        text += &format!("unanswered  {} orders to the device's holder\n", device.late);
    }
    text
}
