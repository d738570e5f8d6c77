//! NVIDIA's CUDA runtimes, unmodified, start under kedge and launch a kernel.
use kedge_tests::{host, kedge, root, run_command};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// (version, library) of every runtime that `scripts/setup --tests` fetched.
fn runtimes() -> Vec<(String, PathBuf)> {
    let list = root().join("scripts/cudart-versions.txt");
    let list = std::fs::read_to_string(&list).expect("the list of runtimes");
    let versions = list.lines().filter(|line| !line.starts_with('#'));
    versions
        .filter_map(|line| line.split_whitespace().next())
        .map(|version| {
            let folder = root().join(".tools/cudart").join(version);
            let entries = std::fs::read_dir(&folder)
                .unwrap_or_else(|_| panic!("no runtime {version}: run scripts/setup --tests"));
            let library = entries
                .filter_map(|entry| Some(entry.ok()?.path()))
                .find(|path| path.to_string_lossy().contains("libcudart.so"))
                .expect("a runtime in its folder");
            (version.to_owned(), library)
        })
        .collect()
}

fn start(threads: u32, libraries: &[&PathBuf]) {
    let fatbin = host("fill.cu", "fill.fatbin", &["-fatbin", "-arch=compute_75"]);
    let program = host("cudart_host.c", "cudart_host", &["-O1", "-ldl", "-lpthread"]);
    let mut command = Command::new(kedge());
    command.args(["run", "--gpu", "soft", "--"]).arg(program).arg(fatbin);
    command.arg(threads.to_string()).args(libraries);
    let outcome = run_command(command, Duration::from_secs(60));
    assert!(
        outcome.failure.is_none() && outcome.stdout.contains("ok "),
        "{libraries:?}: {:?}\n{}{}",
        outcome.failure,
        outcome.stdout,
        outcome.stderr
    );
}

#[test]
fn every_runtime_launches_a_kernel() {
    for (_, library) in &runtimes() {
        start(1, &[library]);
    }
}

#[test]
fn every_runtime_serves_several_threads() {
    for (_, library) in &runtimes() {
        start(4, &[library]);
    }
}

#[test]
fn two_runtimes_share_a_process() {
    let all = runtimes();
    for pair in all.windows(2) {
        start(2, &[&pair[0].1, &pair[1].1]);
    }
    start(1, &all.iter().map(|(_, library)| library).collect::<Vec<_>>());
}
