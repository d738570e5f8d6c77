//! `kedge run`.

use crate::size::Size;
use clap::Args;
use kedge_proxy::backend::GpuSpec;
use kedge_supervisor::jobs::JobName;
use kedge_supervisor::{JobSpec, Outcome, RunError, die_of};
use std::ffi::OsString;
use std::process::ExitCode;

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Devices that the program sees: soft, or soft:N for N software devices
    #[arg(long, value_name = "SPEC", default_value = "soft")]
    gpu: GpuSpec,
    /// Memory of each software device, such as 4G [default: half of this machine's, shared out]
    #[arg(long, value_name = "SIZE")]
    soft_memory: Option<Size>,
    /// The job's name, for `kedge ps` and `kedge logs` [default: made from the program's]
    #[arg(long, value_name = "NAME")]
    job: Option<JobName>,
    /// The program and its arguments
    #[arg(
        value_name = "CMD",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<OsString>,
}

/// Runs the job. Does not return where a signal ended the program: that ends this process too.
pub(crate) fn run(args: RunArgs) -> Result<ExitCode, RunError> {
    let mut words = args.command.into_iter();
    let spec = JobSpec {
        gpu: args.gpu,
        soft_memory: args.soft_memory.map(|size| size.0),
        name: args.job,
        program: words.next().unwrap_or_default(),
        arguments: words.collect(),
    };
    match kedge_supervisor::run(&spec)? {
        Outcome::Exited(code) => Ok(ExitCode::from(code)),
        Outcome::Killed(signal) => die_of(signal),
    }
}
