//! `kedge serve`.

use crate::Failure;
use crate::gpu;
use crate::size::Size;
use clap::Args;
use kedge_control::gpu::{DEFAULT_PORT, GpuSpec};
use kedge_keys::Keys;
use kedge_server::{ServeSpec, Server};
use kedge_supervisor::Parts;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};

const AFTER_HELP: &str = "\
It listens on this machine alone unless it is told otherwise, and there serves the user who \
started it. Whoever comes from another machine must have a key that is pinned here, and the \
connection is encrypted; `kedge keys --help` tells how. Once each side has pinned the other's \
certificate:

  gpuhost$ kedge serve --listen 0.0.0.0:7531
  here$    kedge run --gpu gpuhost/0 -- ./train

Examples:
  kedge serve                               this machine's GPUs, or a software device
  kedge serve --gpu local:0,1               two of them
  kedge serve --gpu soft:4 --listen 127.0.0.1:9000";

/// Lend this machine's devices to programs on others
///
/// Programs are started elsewhere by `kedge run --gpu HOST[:PORT][/I,J…]`. Each gets a proxy of its
/// own here, which ends with it.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ServeArgs {
    /// Devices that are lent: local, local:I,J…, soft or soft:N [default: local where there are a
    /// driver and a GPU, else soft]
    #[arg(long, value_name = "SPEC")]
    gpu: Option<GpuSpec>,
    /// Memory of each software device, such as 4G, for each program [default: half of this
    /// machine's, shared out]
    #[arg(long, value_name = "SIZE")]
    soft_memory: Option<Size>,
    /// Where to listen; with port 0, on a free port, which is told
    #[arg(long, value_name = "ADDRESS:PORT", default_value_t = default_address())]
    listen: SocketAddr,
}

fn default_address() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, DEFAULT_PORT).into()
}

/// Says what happens. A terminal that is gone is no reason to end.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "kedge: {line}");
}

pub(crate) fn run(args: &ServeArgs) -> Result<(), Failure> {
    let soft_memory = args.soft_memory.map(|size| size.0);
    let gpu = gpu::resolve(args.gpu.as_ref(), soft_memory.map(|_| "--soft-memory"))?.spec;
    let (listen, proxy) = (args.listen, Parts::find()?.proxy);
    let keys = if listen.ip().is_loopback() { None } else { Some(Keys::of_user()?) };
    let spec = ServeSpec { listen, gpu: gpu.clone(), soft_memory, keys, proxy };
    let server = Server::bind(spec, say).map_err(|error| Failure::new(error.to_string()))?;
    let address = server.address().map_err(|error| Failure::new(error.to_string()))?;
    say(&format!("{gpu} is lent at {address}"));
    server.serve()
}
