//! What a server tells of itself to who watches it.

use crate::Failure;
use crate::http::{self, Page};
use crate::prometheus::{self, Sample};
use kedge_control::joblog::JobLog;
use kedge_server::{Event, Figures, Said, TenantFigures, Watch};
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

/// As whom this machine's own sessions are told. No key has such a name.
const HERE: &str = "(this machine)";

/// Tells a server's figures to whoever asks at `address`, until the process ends.
///
/// # Errors
/// Nothing can listen there.
pub(super) fn tell(address: SocketAddr, watch: Watch, log: &JobLog) -> Result<(), Failure> {
    let listener = http::listen(address)?;
    let at = format!("its figures are at http://{}/metrics", listener.local_addr()?);
    Said::new(Event::Serves, at).log(log);
    let answer = move || {
        http::serve(&listener, &|path| match path {
            "/metrics" => Some(Ok(Page::Figures(render(&watch.figures())))),
            "/healthz" if watch.is_ending() => {
                Some(Ok(Page::Unwell("it is about to end, and begins no more sessions\n".into())))
            }
            "/healthz" => Some(Ok(Page::Text("it serves\n".into()))),
            _ => None,
        })
    };
    thread::Builder::new().name("metrics".into()).spawn(answer)?;
    Ok(())
}

/// Of the server as a whole.
fn render(figures: &Figures) -> String {
    let mut out = prometheus::Figures::default();
    let version = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
    out.add("kedge_build_info", "gauge", "The version of kedge.", (version, 1.0));
    let of = |value: f64| -> Sample { (vec![], value) };
    let info = (vec![("gpu", figures.gpu.clone())], 1.0);
    out.add("kedge_server_info", "gauge", "What is lent, as --gpu has it.", info);
    let help = "Devices that are lent.";
    out.add("kedge_server_devices", "gauge", help, of(figures.devices as f64));
    let help = "Since the server began.";
    out.add("kedge_server_uptime_seconds", "gauge", help, of(figures.uptime.as_secs_f64()));
    let help = "1: it is about to end, and begins no more sessions.";
    out.add("kedge_server_ending", "gauge", help, of(f64::from(u8::from(figures.ending))));
    let help = "Connections that have not said what they are for.";
    out.add("kedge_server_opening_connections", "gauge", help, of(figures.opening as f64));
    let help = "Connections that came to nothing before it was known whose they are.";
    out.add("kedge_server_strangers_total", "counter", help, of(figures.strangers as f64));
    for tenant in &figures.tenants {
        add_tenant(&mut out, tenant);
    }
    out.render()
}

fn add_tenant(out: &mut prometheus::Figures, tenant: &TenantFigures) {
    let name = tenant.name.as_deref().unwrap_or(HERE);
    let mut add = |figure, kind, help, value: f64| {
        out.add(figure, kind, help, (vec![("key", name.to_owned())], value));
    };
    let help = "Sessions that are open, one for each process of a job.";
    add("kedge_server_sessions", "gauge", help, tenant.sessions as f64);
    let help = "Sessions since the server began.";
    add("kedge_server_sessions_total", "counter", help, tenant.begun as f64);
    let help = "Jobs whose questions to NVML are answered.";
    add("kedge_server_nvml_connections", "gauge", help, tenant.management as f64);
    let help = "Different devices that the key's sessions are on.";
    add("kedge_server_key_devices", "gauge", help, tenant.devices as f64);
    let help = "Device memory that its sessions have.";
    add("kedge_server_device_memory_bytes", "gauge", help, tenant.counts.memory as f64);
    let help = "Bytes that sessions have received from their near ends.";
    add("kedge_server_received_bytes_total", "counter", help, tenant.counts.received as f64);
    let help = "Bytes that sessions have sent to their near ends.";
    add("kedge_server_sent_bytes_total", "counter", help, tenant.counts.sent as f64);
    let help = "Seconds for which a session has read nothing, because of its key's limit.";
    let paused = Duration::from_nanos(tenant.counts.paused).as_secs_f64();
    add("kedge_server_paused_seconds_total", "counter", help, paused);
    if let Some(bandwidth) = tenant.bandwidth {
        let help = "Bytes a second that the key may have, both ways.";
        add("kedge_server_bandwidth_limit_bytes", "gauge", help, bandwidth as f64);
    }
    let help = "What the key was refused.";
    add("kedge_server_refusals_total", "counter", help, tenant.refused as f64);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_has_its_figures_and_this_machine_its_own() {
        let counts = kedge_control::account::Counts {
            memory: 5,
            received: 6,
            sent: 7,
            paused: 1_500_000_000,
        };
        let tenant = |name: Option<&str>, sessions| TenantFigures {
            name: name.map(str::to_owned),
            sessions,
            management: 1,
            devices: 2,
            counts,
            bandwidth: name.map(|_| 1000),
            begun: 9,
            refused: 3,
        };
        let text = render(&Figures {
            gpu: "soft:2".into(),
            devices: 2,
            uptime: Duration::from_millis(1500),
            ending: false,
            opening: 4,
            strangers: 8,
            tenants: vec![tenant(None, 0), tenant(Some("alice"), 1)],
        });
        for line in [
            "kedge_server_info{gpu=\"soft:2\"} 1",
            "kedge_server_uptime_seconds{} 1.5",
            "kedge_server_ending{} 0",
            "kedge_server_strangers_total{} 8",
            "kedge_server_sessions{key=\"(this machine)\"} 0",
            "kedge_server_sessions{key=\"alice\"} 1",
            "kedge_server_device_memory_bytes{key=\"alice\"} 5",
            "kedge_server_received_bytes_total{key=\"alice\"} 6",
            "kedge_server_sent_bytes_total{key=\"alice\"} 7",
            "kedge_server_refusals_total{key=\"alice\"} 3",
            "kedge_server_paused_seconds_total{key=\"alice\"} 1.5",
            "kedge_server_bandwidth_limit_bytes{key=\"alice\"} 1000",
        ] {
            assert!(text.lines().any(|it| it == line), "{line} is not in {text}");
        }
        let unlimited = "kedge_server_bandwidth_limit_bytes{key=\"(this machine)\"}";
        assert!(!text.contains(unlimited), "{text}");
    }
}
