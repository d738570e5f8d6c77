//! `kedge cache recover`.

use crate::Failure;
use crate::output;
use clap::{Args, ValueEnum};
use kedge_cache::daemon::{self, Discard};
use kedge_cache::spec;
use kedge_control::size::Size;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(super) struct RecoverArgs {
    /// The folder that was cached
    #[arg(long, value_name = "DIR")]
    under: PathBuf,
    /// The folder of a tier on a local disk; needed after a reboot
    #[arg(long, value_name = "DIR")]
    disk: Vec<PathBuf>,
    /// Recover what this node, as a partner, has of another one's cache: the folder of its key and
    /// node, DIR/KEY/NODE
    #[arg(long, value_name = "DIR", conflicts_with = "disk")]
    partner: Option<PathBuf>,
    /// Give up data whose file is not below any more, once all the rest is written; with `=all`
    /// also that of files which cannot be found, opened or written, or whose tier lacks a part
    #[arg(long, value_enum, value_name = "WHAT", num_args = 0..=1, require_equals = true,
        default_missing_value = "gone")]
    discard: Option<GiveUp>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum GiveUp {
    Gone,
    All,
}

pub(super) fn recover(args: &RecoverArgs) -> Result<(), Failure> {
    let disks: Result<Vec<_>, _> = args.disk.iter().map(std::path::absolute).collect();
    let discard = args.discard.map(|what| match what {
        GiveUp::Gone => Discard::Gone,
        GiveUp::All => Discard::All,
    });
    let under = spec::full_path(&args.under)?;
    let recovered = match &args.partner {
        Some(folder) => daemon::recover_partner(&under, &std::path::absolute(folder)?, discard)?,
        None => daemon::recover(&under, &disks?, discard)?,
    };
    if let Some(why) = &recovered.at_partner {
        output::complain(&output::harmless(why));
    }
    if args.json {
        output::json(&recovered)?;
    } else {
        let (bytes, files) = (Size(recovered.bytes), recovered.files);
        output::print(&format!("{bytes} of {files} files were written below\n"))?;
        for gone in &recovered.discarded {
            let (path, bytes) = (output::harmless(&gone.path), Size(gone.bytes));
            output::print(&format!("{bytes} of {path} were given up\n"))?;
        }
    }
    if let Some(first) = recovered.lost.first() {
        return Err(Failure::new(format!(
            "a device has lost data of {} files: {}: {} {}",
            recovered.lost.len(),
            output::harmless(&first.path),
            Size(first.bytes),
            first.why
        )));
    }
    if let Some(first) = recovered.stuck.first() {
        return Err(Failure::new(format!(
            "{} files could not be written below: {}: {}",
            recovered.stuck.len(),
            output::harmless(&first.path),
            first.why
        )));
    }
    // What was to be given up is.
    if recovered.at_partner.is_some() && discard != Some(Discard::All) {
        return Err(Failure::new(
            "all is below, and its partner does not know it (`--discard=all` gives that up)",
        ));
    }
    Ok(())
}
