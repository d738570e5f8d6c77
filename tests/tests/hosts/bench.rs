//! `kedge bench cluster` on hosts that are namespaces, on a small scale.

use kedge_left_out::left_out;
use kedge_tests::cluster::Cluster;
use kedge_tests::job::User;
use kedge_tests::remote::Remote;
use kedge_tests::world::{World, stderr};
use serde_json::Value;
use std::path::Path;

#[test]
fn it_says_what_it_needs() {
    let world = World::new("benchnone");
    let said = world.output(&["bench", "cluster"]);
    assert!(!said.status.success() && said.stdout.is_empty(), "{said:?}");
    let said = stderr(&said);
    for word in ["--host A,B,C,D", "ssh HOST", "Open MPI", "scripts/bench-cluster"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    let elsewhere = ["bench", "cluster", "--host", "192.0.2.7,192.0.2.8"];
    let said = stderr(&world.output(&elsewhere));
    assert!(said.contains("192.0.2.7: the first one is to be this host"), "{said}");
}

/// Ranks are checkpointed and come back on other hosts, a thousand processes meet.
#[test]
fn its_figures_are_those_of_jobs_over_hosts() {
    const NAME: &str = "benchc";
    if !Path::new("/usr/bin/mpicc.openmpi").exists() {
        return left_out(NAME, "no Open MPI: scripts/setup --tests");
    }
    let Some(cluster) = Cluster::of_sites(NAME, User::Same, &[4]) else { return };
    let Some(remote) = Remote::new(NAME, &cluster, &[0, 1, 2, 3]) else { return };
    for host in &cluster.hosts {
        assert!(host.does("sysctl -qw net.ipv4.tcp_max_tw_buckets=0"));
    }
    let home = cluster.world.home().display().to_string();
    let bench = ["bench", "cluster", "--host", "10.79.1.1,10.79.1.2"];
    let rest = ["--spare", "10.79.1.3,10.79.1.4", "--parts", "ranks,barriers", "--size", "4M"];
    let more = ["--rounds", "1", "--json", "--dir", &home];
    let mut command = cluster.kedge(0, &[&bench[..], &rest, &more].concat());
    let output = command.env("PATH", remote.path()).output().expect("nsenter");
    assert!(output.status.success(), "{}", stderr(&output));
    let figures: Vec<Value> = serde_json::from_slice(&output.stdout).expect("figures");
    let value = |name: &str| {
        let found = figures.iter().find(|figure| figure["name"] == name);
        let figure = found.unwrap_or_else(|| panic!("{name}: {figures:?}"));
        (figure["value"].as_f64().expect("a number"), figure["target"].as_f64())
    };
    for ranks in [4, 16] {
        let of = |what: &str| value(&format!("{ranks} ranks on 2 hosts: {what}, 4 MiB"));
        let (seen, still) =
            (of("its longest step beside a checkpoint").0, of("the job stands still").0);
        assert!(seen > 0.0 && still > 0.0, "{figures:?}");
        assert!(of("restart on other hosts to a step of all").0 > 0.0, "{figures:?}");
    }
    let barrier = "barrier over TCP of 1,000 processes on one host";
    assert_eq!(value(barrier).1, Some(40.0));
    for barrier in [barrier, "barrier of 10,000 members, simulated"] {
        assert_eq!(value(&format!("{barrier}: messages a member")), (2.0, Some(2.0)));
    }
}
