//! `kedge k8s`: the device plugin for Kubernetes. It is a program of its own, so that the command
//! links nothing of gRPC.

use crate::Failure;
use crate::cdi::{self, DevicesArgs, Kind, Spec};
use clap::{Args, Subcommand};
use kedge_supervisor::Parts;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

const AFTER_HELP: &str = "\
Pods ask for devices by resources.limits, such as kedge.dev/gpu: 1. The kubelet asks the plugin \
what a container gets with them: kedge's files, read-only, and variables. The plugin runs until \
SIGTERM, registers anew when the kubelet restarts, and says what happens on standard error. It \
takes a kubelet of Kubernetes 1.26 or later.

Examples:
  kedge k8s plugin --gpu soft:8
  kedge k8s plugin --gpu soft --share 4 --prefix /opt/kedge    in a container (examples/kubernetes)";

/// Offer this node's devices to Kubernetes
#[derive(Debug, Args)]
pub(crate) struct K8sArgs {
    #[command(subcommand)]
    command: K8sCommand,
}

#[derive(Debug, Subcommand)]
enum K8sCommand {
    /// Tell the kubelet of software devices, as a device plugin
    #[command(after_help = AFTER_HELP)]
    Plugin(PluginArgs),
}

#[derive(Debug, Args)]
struct PluginArgs {
    #[command(flatten)]
    devices: DevicesArgs,
    /// What pods ask for, DOMAIN/NAME
    #[arg(long, value_name = "NAME", default_value = "kedge.dev/gpu")]
    resource: Kind,
    /// Give each device to as many containers at a time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    share: u32,
    /// Name devices by a CDI specification, which is written into --cdi-folder, instead of telling
    /// mounts and variables: for Kubernetes 1.29 or later with containerd 1.7 or CRI-O
    #[arg(long)]
    cdi: bool,
    /// Where the specification is written, a folder in which the container runtime looks
    #[arg(long, value_name = "DIR", requires = "cdi", default_value = "/var/run/cdi")]
    cdi_folder: PathBuf,
    /// The kubelet's folder of device plugins
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet/device-plugins")]
    kubelet: PathBuf,
}

/// Becomes the plugin.
pub(crate) fn run(args: &K8sArgs) -> Result<(), Failure> {
    let K8sCommand::Plugin(args) = &args.command;
    let plugin = Parts::plugin()?;
    let tree = args.devices.tree()?;
    let mut command = Command::new(&plugin);
    command.arg("--folder").arg(&args.kubelet);
    command.args(["--resource", args.resource.name(), "--share", &args.share.to_string()]);
    command.args(["--devices", &args.devices.count().to_string()]);
    for (host, container) in tree.mounts() {
        command.args(["--mount", &format!("{host}={container}")]);
    }
    tree.check()?;
    if args.cdi {
        let spec = Spec::new(&args.resource, args.devices.count(), &tree);
        cdi::write(&spec, &args.resource, &args.cdi_folder)?;
        command.args(["--cdi", args.resource.name()]);
    } else {
        for (name, value) in tree.environment() {
            command.args(["--env", &format!("{name}={value}")]);
        }
    }
    let source = command.exec();
    Err(Failure::new(format!("{}: cannot be started: {source}", plugin.display())))
}
