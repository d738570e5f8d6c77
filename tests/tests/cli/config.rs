//! Options from configuration files: which file counts, and what is refused.
use kedge_tests::gpu_steps::GpuSteps;
use kedge_tests::job::{Job, User, kedge_as};
use kedge_tests::world::{World, has_fields, is_root, stderr};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;
use std::process::{Command, Output};

/// A world whose user has a configuration file.
struct Configured {
    world: World,
    file: PathBuf,
}

impl Configured {
    fn new(name: &str, text: &str) -> Configured {
        let world = World::new(name);
        let file = world.0.join("config/kedge/config.toml");
        fs::create_dir_all(file.parent().expect("a folder")).expect("its folders");
        fs::write(&file, text).expect("a file");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).expect("its mode");
        Configured { world, file }
    }

    fn kedge(&self, arguments: &[&str]) -> Output {
        let mut command = self.world.kedge(arguments);
        command.env_remove("KEDGE_CONFIG").env("XDG_CONFIG_HOME", self.world.0.join("config"));
        command.output().expect("kedge")
    }

    fn refused(&self, code: i32) -> String {
        let output = self.kedge(&["run", "true"]);
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        let said = stderr(&output);
        assert!(said.contains(&self.file.display().to_string()), "{said}");
        said
    }

    /// The devices of the latest job.
    fn gpu(&self) -> Value {
        self.world.json(&["ps", "--all", "--json"])[0]["gpu"].clone()
    }
}

#[test]
fn options_that_are_not_given_are_those_of_the_file() {
    let configured = Configured::new("cfrun", "[run]\ngpu = \"none\"\njob = \"filed\"\n");
    let output = configured.kedge(&["run", "--", "true"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(configured.gpu(), "none");
    assert!(configured.kedge(&["logs", "filed"]).status.success());
    // What the command line says counts more, and a program's own arguments are its own.
    let output = configured.kedge(&["run", "--gpu", "soft:1", "--", "echo", "--gpu", "x"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "--gpu x\n");
    assert_ne!(configured.gpu(), "none");
}

#[test]
fn the_files_and_what_they_set_are_listed() {
    let configured = Configured::new("cflist", "[run]\nkeep = 3\nincremental = true\n");
    let output = configured.kedge(&["config", "--json"]);
    let listing: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let files = listing["files"].as_array().expect("a list");
    has_fields(files, &["path", "read"]);
    assert_eq!(files.last().expect("the user's")["path"], configured.file.display().to_string());
    let settings = listing["settings"].as_array().expect("a list");
    has_fields(settings, &["command", "option", "values", "path"]);
    let keep = settings.iter().find(|row| row["option"] == "keep").expect("keep");
    assert_eq!((&keep["command"], &keep["values"]), (&json!("run"), &json!(["3"])));
    let text = configured.kedge(&["config"]).stdout;
    let text = String::from_utf8_lossy(&text);
    assert!(text.contains("--keep=3") && text.contains("--incremental"), "{text}");
}

#[test]
fn what_is_no_option_or_no_value_stops_the_command() {
    let said = Configured::new("cfopt", "[run]\ngup = \"none\"\n").refused(125);
    assert!(said.contains("did you mean gpu?"), "{said}");
    let said = Configured::new("cfval", "[run]\nkeep = 0\n").refused(2);
    assert!(said.contains("run.keep"), "{said}");
    Configured::new("cftoml", "[run\n").refused(125);
}

#[test]
fn a_file_that_others_can_change_is_refused() {
    let configured = Configured::new("cfopen", "[run]\ngpu = \"none\"\n");
    fs::set_permissions(&configured.file, fs::Permissions::from_mode(0o666)).expect("its mode");
    assert!(configured.refused(125).contains("chmod"), "what helps");
    if is_root() {
        fs::set_permissions(&configured.file, fs::Permissions::from_mode(0o644)).expect("its mode");
        chown(&configured.file, Some(65534), None).expect("another owner");
        let output = configured.kedge(&["run", "--gpu", "none", "--", "true"]);
        assert!(output.status.success(), "{output:?}");
        assert!(stderr(&output).contains("neither yours nor root's"), "{output:?}");
    }
}

#[test]
fn a_fifo_is_no_configuration() {
    let configured = Configured::new("cffifo", "");
    fs::remove_file(&configured.file).expect("its end");
    let made = Command::new("mkfifo").arg(&configured.file).status().expect("mkfifo");
    assert!(made.success());
    assert!(configured.refused(125).contains("not a file"));
}

/// As root's file in a folder that others may not enter.
#[test]
fn a_file_that_the_caller_may_not_look_at_is_passed_over() {
    if !is_root() {
        return kedge_left_out::needs_root("another user", "this test becomes one");
    }
    let configured = Configured::new("cfclosed", "[run]\ngup = \"wrong\"\n");
    configured.world.give_home_away();
    configured.world.parts();
    let folder = configured.file.parent().expect("its folder");
    fs::set_permissions(folder, fs::Permissions::from_mode(0o700)).expect("its mode");
    let mut command =
        kedge_as(&configured.world, User::Nobody, &["run", "--gpu", "none", "--", "true"]);
    command.env_remove("KEDGE_CONFIG").env("XDG_CONFIG_HOME", configured.world.0.join("config"));
    let output = command.output().expect("kedge");
    assert!(output.status.success(), "{output:?}");
    assert!(stderr(&output).contains("not read: permission denied"), "{output:?}");
}

/// kedge starts itself to go back. What a file says by then is for the next command of a person.
#[test]
fn a_job_goes_back_whatever_a_file_says_by_then() {
    let place = GpuSteps::mine("cfback");
    let folder = place.world.0.join("config");
    let mut command = place.to_run(&["--recover"]);
    command.env_remove("KEDGE_CONFIG").env("XDG_CONFIG_HOME", &folder);
    let mut job = Job::start_recovering(command);
    job.read_to(10);
    place.checkpoint(&[]);
    fs::create_dir_all(folder.join("kedge")).expect("a folder");
    fs::write(folder.join("kedge/config.toml"), "[restart]\nno-such-option = 1\n").expect("a file");
    place.goes_back(&mut job, |job| {
        job.read_to(job.step + 5);
        job.kill_the_proxy();
    });
    place.ends_well(job);
}

#[test]
fn a_variable_names_another_file_or_none() {
    let configured = Configured::new("cfvar", "[run]\ngup = \"wrong\"\n");
    let kedge = |value: &str| {
        let mut command = configured.world.kedge(&["run", "--gpu", "none", "--", "true"]);
        command.env("XDG_CONFIG_HOME", configured.world.0.join("config"));
        command.env("KEDGE_CONFIG", value).output().expect("kedge")
    };
    assert!(kedge("").status.success(), "no file is read");
    let other = configured.world.0.join("other.toml");
    fs::write(&other, "").expect("a file");
    assert!(kedge(&other.display().to_string()).status.success());
    let output = kedge("/nowhere.toml");
    assert!(stderr(&output).contains("/nowhere.toml"), "{output:?}");
}
