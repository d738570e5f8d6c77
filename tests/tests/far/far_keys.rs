//! Devices on another machine, with keys: `kedge serve` at an address that others reach, in a
//! network of the test's own. It takes root.
use kedge_tests::host;
use kedge_tests::job::Job;
use kedge_tests::network::{ADDRESS, Network, until};
use kedge_tests::world::stderr;
use serde_json::Value;
use std::process::Stdio;
use std::time::Duration;

#[test]
fn who_is_pinned_gets_devices_from_afar() {
    let Some(network) = Network::acquainted("keyfar") else { return };
    let server = network.serve();
    let (output, log) = network.run(&server, "j");
    assert!(output.status.success(), "{output:?} {log}");
    until("its end", || server.said().contains("its program has ended"));
    let said = server.said();
    assert!(said.contains(&format!("session of alice ({ADDRESS}:")), "{said}");
}

#[test]
fn a_sealed_line_that_is_cut_goes_on() {
    let Some(network) = Network::acquainted("keycut") else { return };
    let server = network.serve();
    let program = host("gpu_steps.cu", "gpu_steps", &["-O1", "-arch=sm_80"]).display().to_string();
    let run = ["run", "--gpu", &server.address, "--job", "j", "--", &program, "300", "5"];
    let mut child = network.kedge("alice", &run).stdout(Stdio::null()).spawn().expect("kedge");
    until("a session", || server.said().contains(" begins"));
    let port = server.address.rsplit_once(':').expect("a port").1;
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(400));
        let cut = ["ss", "-K", "-t", "-H", "dst", ADDRESS, "dport", "=", port];
        let cut = network.inside(&cut).output().expect("ss");
        assert!(!cut.stdout.is_empty(), "no connection was there to be cut: {cut:?}");
    }
    assert_eq!(child.wait().expect("it has ended").code(), Some(7));
    let log = network.text("alice", &["logs", "j"]);
    assert!(log.contains("is cut: trying to go on") && log.contains(" goes on after "), "{log}");
    assert!(!server.said().contains("refuse"), "{}", server.said());
}

/// The bytes of images cross as the line does: captured, incremental too, and read for a restart.
#[test]
fn images_cross_sealed() {
    const STEPS: &str = "120";
    let Some(network) = Network::acquainted("keyimage") else { return };
    let server = network.serve();
    let program =
        host("gpu_blocks.cu", "gpu_blocks", &["-O1", "-arch=sm_80"]).display().to_string();
    let piped = |arguments: &[&str]| {
        // As a job's command is elsewhere: the job is kedge's, which is the child of `timeout`.
        let parent = ["timeout", "--foreground", "--kill-after=5", "120"];
        let mut command = network.kedge_under(&parent, "alice", arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let run = ["run", "--gpu", &server.address, "--job", "j", "--incremental", "--", &program];
    let mut job = Job::start(piped(&[&run[..], &[STEPS, "20", "32", "1"]].concat()));
    let checkpoint = || {
        let report = network.text("alice", &["checkpoint", "j", "--json"]);
        let report: Value = serde_json::from_str(&report).expect("JSON");
        (report["image"].as_str().expect("a path").to_owned(), report["bytes"].as_u64())
    };
    job.read_to(3);
    let (_, whole) = checkpoint();
    job.read_to(job.step + 2);
    let (image, changed) = checkpoint();
    assert!(changed < whole, "{changed:?} {whole:?}: it does not build on the one before");
    job.read_to(job.step + 2);
    let nonce = job.nonce.clone();
    job.kill();
    for gpu in [&*server.address, "soft"] {
        let job = Job::restart(piped(&["restart", &image, "--gpu", gpu]), &nonce);
        assert_eq!(job.finish(120).code(), Some(7), "{gpu}");
    }
    assert!(!server.said().contains("refuse"), "{}", server.said());
}

#[test]
fn who_is_not_known_gets_nothing_and_hears_why() {
    let Some(network) = Network::new("keynone") else { return };
    let listen = format!("{ADDRESS}:0");
    let serve = ["serve", "--gpu", "soft", "--listen", &listen];
    let refused = network.kedge("lender", &serve).output().expect("kedge");
    assert_eq!(refused.status.code(), Some(125), "{refused:?}");
    assert!(stderr(&refused).contains("`kedge keys new` makes one"), "{refused:?}");

    network.text("lender", &["keys", "new"]);
    let server = network.serve();
    let tries = |job: &str, said: &str, server_said: &str| {
        let (output, log) = network.run(&server, job);
        assert!(!output.status.success(), "{job}: {output:?}");
        assert!(log.contains(said), "{job}: {log}");
        until(server_said, || server.said().contains(server_said));
    };
    tries("nokey", "`kedge keys new` makes one", "");
    network.text("alice", &["keys", "new"]);
    tries("unpinned", "nobody of that name is pinned here", "");
    network.pin("alice", ADDRESS, "lender");
    tries("unknown", "has not pinned your certificate", "a certificate that is not pinned here");
    network.pin("lender", "alice", "alice");
    let (output, log) = network.run(&server, "known");
    assert!(output.status.success(), "{output:?} {log}");
    // Without the server being told.
    network.text("lender", &["keys", "revoke", "alice"]);
    tries("revoked", "has been revoked there", "the certificate of alice has been revoked here");
    assert_eq!(server.said().matches(" begins").count(), 1, "{}", server.said());
}

/// An open session ends with its key, and the job hears why long before it gives a cut line up.
#[test]
fn a_revoked_key_ends_its_open_session() {
    let Some(network) = Network::acquainted("keyrevoked") else { return };
    let server = network.serve();
    let program = host("gpu_steps.cu", "gpu_steps", &["-O1", "-arch=sm_80"]).display().to_string();
    let run = ["run", "--gpu", &server.address, "--job", "j", "--", &program, "3000", "20"];
    let mut child = network.kedge("alice", &run).stdout(Stdio::null()).spawn().expect("kedge");
    until("a session", || server.said().contains(" begins"));
    // Its own name for somebody else's certificate does not keep it.
    network.text("lender", &["keys", "revoke", "alice"]);
    network.text("bob", &["keys", "new"]);
    network.pin("lender", "alice", "bob");
    until("the session's end", || server.said().contains("its key is not pinned here any more"));
    let mut status = None;
    until("the job's end", || {
        status = child.try_wait().expect("a child");
        status.is_some()
    });
    assert!(!status.expect("ended").success());
    let log = network.text("alice", &["logs", "j"]);
    assert!(log.contains("has been revoked there"), "{log}");
}

/// Neither a plain near end nor anything else gets an answer.
#[test]
fn nothing_plain_is_answered() {
    let Some(network) = Network::acquainted("keyplain") else { return };
    let server = network.serve();
    let (address, port) = server.address.rsplit_once(':').expect("a port");
    for bytes in ["GET / HTTP/1.0\\r\\n\\r\\n", "\\020\\0\\0\\0rafegdek\\001\\0\\0\\0"] {
        let send = format!(
            "exec 3<>/dev/tcp/{address}/{port} && printf '{bytes}' >&3 && timeout 15 cat <&3"
        );
        let answer = network.inside(&["bash", "-c", &send]).output().expect("bash");
        // At most TLS's own alert, of seven bytes.
        assert!(answer.stdout.len() <= 7, "{answer:?}");
    }
    assert!(!server.said().contains(" begins"), "{}", server.said());
}
