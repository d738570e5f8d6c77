//! Completions in real shells: words come from the script, names of jobs and images from `kedge`.
use kedge_left_out::left_out;
use kedge_tests::kedge;
use kedge_tests::world::{World, wait_for};
use std::path::Path;
use std::process::{Command, Stdio};

/// Does what bash does when a word is completed.
const BASH: &str = r#"
. "$SCRIPT"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_kedge_with_names kedge "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\n' "${COMPREPLY[@]}"
"#;

/// What a shell offers for the last of `words`, behind `kedge`.
fn offered(world: &World, shell: &str, words: &[&str]) -> Vec<String> {
    let script = world.0.join(shell);
    std::fs::write(&script, world.text(&["completions", shell])).expect("a file");
    let folder = kedge().parent().map(Path::to_owned).expect("a folder");
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new(shell);
    match shell {
        "bash" => command.args(["-c", BASH, "bash", "kedge"]).args(words),
        _ => {
            let line = format!("source $SCRIPT; complete -C 'kedge {}'", words.join(" "));
            command.args(["--no-config", "-c", &line])
        }
    };
    command.envs(
        world.kedge(&[]).get_envs().filter_map(|(name, value)| Some((name.to_owned(), value?))),
    );
    command.env("PATH", format!("{}:{path}", folder.display()));
    command.env("SCRIPT", &script);
    let output = command.stdin(Stdio::null()).output().expect("the shell");
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let word = |line: &str| line.split('\t').next().unwrap_or_default().to_owned();
    said.lines().map(word).collect()
}

#[test]
fn shells_complete_names_of_jobs_and_images() {
    let world = World::new("complete");
    let words = ["run", "--gpu", "none", "--job", "runs", "--", "sleep", "100"];
    let null = Stdio::null;
    let mut running = world.kedge(&words);
    let running = running.stdin(null()).stdout(null()).stderr(null()).spawn();
    let mut running = running.expect("kedge");
    wait_for("the job runs", || world.job("runs").join("control").exists());
    assert!(
        world.output(&["run", "--gpu", "none", "--job", "ended", "--", "true"]).status.success()
    );
    assert!(world.output(&["checkpoint", "runs"]).status.success());
    // Of a folder where others may write: nothing that a shell would run.
    let images = world.runtime().join("kedge/images");
    std::fs::create_dir(images.join("$(touch x)")).expect("a folder");
    assert_eq!(world.text(&["names", "images"]), "runs-0001\n");
    let shells = ["bash", "fish"];
    for shell in shells {
        if Command::new(shell).arg("--version").output().is_err() {
            left_out(&format!("completions in {shell}"), "it is not installed (apt install fish)");
            continue;
        }
        let offered = |words: &[&str]| offered(&world, shell, words);
        assert_eq!(offered(&["checkpoint", "r"]), ["runs"], "{shell}");
        assert_eq!(offered(&["swap", "out", "r"]), ["runs"], "{shell}");
        assert_eq!(offered(&["logs", "e"]), ["ended"], "{shell}");
        assert_eq!(offered(&["restart", "run"]), ["runs", "runs-0001"], "{shell}");
        assert_eq!(offered(&["verify", "run"]), ["runs-0001"], "{shell}");
        assert_eq!(offered(&["images", "--release", "r"]), ["runs"], "{shell}");
        assert_eq!(offered(&["checkpoint", "--wait", "d"]), ["durable"], "{shell}");
    }
    let _ = world.output(&["kill", "runs"]);
    let _ = running.wait();
}
