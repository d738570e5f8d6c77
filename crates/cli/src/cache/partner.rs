//! `kedge cache partner`.

use crate::Failure;
use crate::readiness;
use clap::Args;
use kedge_cache::partner::{self, Partner, PartnerSpec};
use kedge_cache::spec;
use kedge_control::size::Size;
use kedge_keys::Keys;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

#[derive(Debug, Args)]
pub(super) struct PartnerArgs {
    /// Where to listen; other machines need a key that is pinned here. With port 0, on a free port,
    /// which is told
    #[arg(long, value_name = "ADDRESS:PORT", default_value_t = partner_address())]
    listen: SocketAddr,
    /// The folder for what is sent, and how much each key may have of it
    #[arg(long, value_name = "DIR[:SIZE]")]
    dir: Kept,
}

fn partner_address() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, spec::PARTNER_PORT).into()
}

/// A partner's folder as it is written on the command line.
#[derive(Debug, Clone, PartialEq)]
struct Kept {
    folder: PathBuf,
    quota: Option<u64>,
}

impl FromStr for Kept {
    type Err = String;
    fn from_str(text: &str) -> Result<Kept, String> {
        let sized = text.rsplit_once(':').and_then(|(folder, size)| {
            let size: Size = size.parse().ok()?;
            Some((folder, size.0))
        });
        let (folder, quota) = match sized {
            Some((folder, size)) => (folder, Some(size)),
            None => (text, None),
        };
        let folder = std::path::absolute(folder).map_err(|error| error.to_string())?;
        Ok(Kept { folder, quota })
    }
}

/// Keeps what other nodes' caches send, until the process ends.
pub(super) fn keep_for_others(args: &PartnerArgs) -> Result<(), Failure> {
    let (listen, Kept { folder, quota }) = (args.listen, args.dir.clone());
    let keys = if listen.ip().is_loopback() { None } else { Some(Keys::of_user()?) };
    let partner = Partner::bind(PartnerSpec { listen, folder, quota, keys })?;
    let text = format!("what caches send to {} is kept", partner.address()?);
    readiness::ready(&text);
    partner::say(&text);
    partner.serve(partner::say);
    Ok(())
}
