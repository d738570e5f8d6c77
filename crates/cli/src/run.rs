//! `kedge run`.

use crate::Failure;
use crate::gpu;
use crate::size::Size;
use clap::Args;
use kedge_proxy::backend::GpuSpec;
use kedge_supervisor::jobs::JobName;
use kedge_supervisor::{JobSpec, Outcome, die_of};
use std::ffi::OsString;
use std::process::ExitCode;

const AFTER_HELP: &str = "\
Examples:
  kedge run -- ./program --its-own --arguments
  kedge run --gpu soft:2 --soft-memory 2G -- ./program
  CUDA_VISIBLE_DEVICES=1 kedge run --gpu local -- ./program   as without kedge
  kedge run --job nightly -- make check     every program that make starts runs on the device";

/// Run a program on virtual GPUs; exits as the program does
///
/// The program and all that it starts find kedge's driver through LD_LIBRARY_PATH. Its descriptors,
/// its terminal and its signals are its own; kedge writes to the job's log only (`kedge logs`).
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct RunArgs {
    /// Devices that the program sees: local for this machine's GPUs, local:I,J… for some of them,
    /// soft, or soft:N for N software devices [default: local where there are a driver and a GPU,
    /// else soft]
    #[arg(long, value_name = "SPEC")]
    gpu: Option<GpuSpec>,
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
pub(crate) fn run(args: RunArgs) -> Result<ExitCode, Failure> {
    let mut words = args.command.into_iter();
    let soft_only = args.soft_memory.map(|_| "--soft-memory");
    let gpu = gpu::resolve(args.gpu.as_ref(), soft_only);
    let spec = JobSpec {
        gpu: gpu.spec,
        gpu_default: gpu.default,
        soft_memory: args.soft_memory.map(|size| size.0),
        name: args.job,
        program: words.next().unwrap_or_default(),
        arguments: words.collect(),
    };
    match kedge_supervisor::run(&spec).map_err(|error| Failure::of_run(&error))? {
        Outcome::Exited(code) => Ok(ExitCode::from(code)),
        Outcome::Killed(signal) => die_of(signal),
    }
}
