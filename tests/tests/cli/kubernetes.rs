//! Devices of containers, without a container tool: what `kedge cdi` and `kedge k8s plugin` tell
//! such a tool is done here by hand, and the commands of examples/kubernetes are run on two "nodes"
//! that have files of their own. The plugin itself is tried in crates/k8s.
use kedge_left_out::left_out;
use kedge_tests::job::Job;
use kedge_tests::world::{World, failure, is_root, stderr};
use kedge_tests::{copy_program, host, kedge, root};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A program that knows nothing of kedge: it tells its devices, and whether it has children that it
/// has not started.
const PROGRAM: &str = r#"
#include <errno.h>
#include <stdio.h>
#include <sys/wait.h>
int cuInit(unsigned), cuDeviceGetCount(int *), cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *), cuMemAlloc_v2(unsigned long long *, unsigned long);
int cuMemsetD32_v2(unsigned long long, unsigned, unsigned long);
int cuMemcpyDtoH_v2(void *, unsigned long long, unsigned long);
int main(void) {
    int count = 0, status = cuInit(0), read = 0;
    if (status) { printf("cuInit: %d\n", status); return 1; }
    void *context;
    unsigned long long memory;
    status = cuDeviceGetCount(&count) || cuDevicePrimaryCtxRetain(&context, count - 1)
        || cuCtxSetCurrent(context) || cuMemAlloc_v2(&memory, 64)
        || cuMemsetD32_v2(memory, 42, 16) || cuMemcpyDtoH_v2(&read, memory, 4);
    int child = wait(NULL);
    printf("%d devices, status %d, %d, %s\n", count, status, read,
           child == -1 && errno == ECHILD ? "no children" : "children");
    return status;
}
"#;

fn program(world: &World) -> PathBuf {
    let (source, program) = (world.0.join("program.c"), world.0.join("program"));
    fs::write(&source, PROGRAM).expect("a file");
    let mut compiler = Command::new("cc");
    compiler.arg(&source).arg("-o").arg(&program);
    let built = compiler.arg(kedge().with_file_name("libkedge_cuda.so")).status();
    assert!(built.expect("cc").success());
    program
}

fn specification(world: &World, devices: &str) -> Value {
    serde_json::from_str(&world.text(&["cdi", "--gpu", devices])).expect("JSON")
}

fn words(value: &Value) -> Vec<&str> {
    value.as_array().into_iter().flatten().map(|word| word.as_str().expect("a word")).collect()
}

/// `program` as a container that has these devices runs it: with the variables of the
/// specification, and the files that it mounts below a folder instead of a root. The loader is told
/// of the folder, which a container's has as its own.
fn contained(world: &World, spec: &Value, devices: &[usize], program: &Path) -> Command {
    let root = world.0.join("container");
    for mount in spec["containerEdits"]["mounts"].as_array().expect("mounts") {
        let path = mount["containerPath"].as_str().expect("a path");
        let place = root.join(path.trim_start_matches('/'));
        fs::create_dir_all(place.parent().expect("a folder")).expect("folders");
        if !place.exists() {
            symlink(mount["hostPath"].as_str().expect("a path"), place).expect("a link");
        }
    }
    let mut command = Command::new(program);
    command.env_clear().env("LD_LIBRARY_PATH", root.join("usr/lib64"));
    let own = devices.iter().flat_map(|it| words(&spec["devices"][*it]["containerEdits"]["env"]));
    for variable in words(&spec["containerEdits"]["env"]).into_iter().chain(own) {
        let (name, value) = variable.split_once('=').expect("NAME=value");
        // The one value that is a path.
        let inside = root.join(value.trim_start_matches('/')).display().to_string();
        command.env(name, if value.starts_with('/') { &*inside } else { value });
    }
    command.stderr(Stdio::inherit());
    command
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
}

#[test]
fn a_program_finds_the_devices_of_its_container() {
    let world = World::new("cdi");
    let program = program(&world);
    let spec = specification(&world, "soft:4");
    for (devices, count) in [(&[2][..], 1), (&[0, 3], 2), (&[0, 1, 2, 3], 4)] {
        let output = contained(&world, &spec, devices, &program).output().expect("the program");
        let expected = format!("{count} devices, status 0, 42, no children");
        assert_eq!(told(&output), expected, "{output:?}");
    }
    // Without a device, and with one and no proxy: CUDA_ERROR_NO_DEVICE, and why.
    let log = world.0.join("log");
    let mut without = contained(&world, &spec, &[], &program);
    let output = without.env("KEDGE_LOG", &log).output().expect("the program");
    assert_eq!(told(&output), "cuInit: 100");
    let mut broken = contained(&world, &spec, &[0], &program);
    broken.env("KEDGE_LOG", &log).env("KEDGE_LIB_DIR", "/nonexistent");
    assert_eq!(told(&broken.output().expect("the program")), "cuInit: 100");
    let log = fs::read_to_string(&log).expect("a log");
    assert!(log.contains("start the program with `kedge run`"), "{log}");
    assert!(log.contains("cannot start /nonexistent/kedge-proxy"), "{log}");
}

#[test]
fn a_proxy_without_a_supervisor_ends_with_its_program() {
    let world = World::new("cdiend");
    // In the world's folder, whose name its processes are found by.
    let parts = world.parts();
    let spec = specification(&world, "soft");
    let source = PROGRAM.replace(
        "int child = wait(NULL);",
        "int child = -1; puts(\"up\"); \
                                  fflush(stdout); getchar(); errno = ECHILD;",
    );
    let (file, program) = (world.0.join("waits.c"), world.0.join("waits"));
    fs::write(&file, source).expect("a file");
    let mut compiler = Command::new("cc");
    compiler.arg(&file).arg("-o").arg(&program);
    assert!(compiler.arg(parts.with_file_name("libkedge_cuda.so")).status().expect("cc").success());
    let mut command = contained(&world, &spec, &[0], &program);
    command.env("KEDGE_LIB_DIR", parts.parent().expect("a folder"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("the program");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    assert_eq!(line, "up\n");
    let proxies = || {
        let all = world.processes();
        all.into_iter().filter(|line| line.contains("kedge-proxy")).count()
    };
    assert_eq!(proxies(), 1);
    child.kill().expect("a process");
    child.wait().expect("a child");
    for _ in 0..600 {
        if proxies() == 0 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    panic!("the proxy outlives its program: {:?}", world.processes());
}

#[test]
fn kedge_run_has_the_devices_of_its_container() {
    let world = World::new("cdirun");
    let program = program(&world).display().to_string();
    let mut command = world.kedge(&["run", "--", &program]);
    command.env("KEDGE_DEVICE_SOFT1", "soft").env("KEDGE_DEVICE_SOFT2", "soft");
    let output = command.output().expect("kedge");
    assert_eq!(told(&output), "2 devices, status 0, 42, no children", "{}", stderr(&output));
    let mut command = world.kedge(&["run", "--gpu", "soft:3", "--", &program]);
    let output = command.env("KEDGE_DEVICE_SOFT1", "soft").output().expect("kedge");
    assert_eq!(told(&output), "3 devices, status 0, 42, no children", "{}", stderr(&output));
}

#[test]
fn a_specification_is_written_as_a_whole() {
    let world = World::new("cdiwrite");
    let folder = world.0.join("etc/cdi");
    let name = folder.display().to_string();
    for devices in ["soft:2", "soft:3"] {
        let file = world.text(&["cdi", "--gpu", devices, "--write", "--folder", &name]);
        assert_eq!(file.trim_end(), folder.join("kedge.dev-gpu.json").to_str().expect("UTF-8"));
    }
    assert_eq!(fs::read_dir(&folder).expect("a folder").count(), 1);
    let text = fs::read_to_string(folder.join("kedge.dev-gpu.json")).expect("a file");
    let spec: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(spec, specification(&world, "soft:3"));
    for mount in spec["containerEdits"]["mounts"].as_array().expect("mounts") {
        let path = Path::new(mount["hostPath"].as_str().expect("a path"));
        assert!(path.is_absolute() && path.is_file(), "{}", path.display());
    }
    fs::write(world.0.join("file"), "").expect("a file");
    let inside = world.0.join("file/cdi").display().to_string();
    let refused = world.output(&["cdi", "--write", "--folder", &inside]);
    assert!(failure(&refused).contains("file/cdi/kedge.dev-gpu.json"), "{refused:?}");
}

#[test]
fn the_plugin_waits_for_a_kubelet_and_ends_when_it_is_told() {
    let world = World::new("k8s");
    let (kubelet, cdi) = (world.0.join("plugins"), world.0.join("cdi"));
    fs::create_dir(&kubelet).expect("a folder");
    let names = [&kubelet, &cdi].map(|path| path.display().to_string());
    let mut command = world.kedge(&["k8s", "plugin", "--gpu", "soft:2", "--cdi"]);
    command.args(["--kubelet", &names[0], "--cdi-folder", &names[1]]).stderr(Stdio::piped());
    let mut plugin = command.spawn().expect("kedge");
    let mut line = String::new();
    BufReader::new(plugin.stderr.take().expect("a pipe")).read_line(&mut line).expect("a line");
    assert!(line.contains("waits for a kubelet"), "{line}");
    assert!(cdi.join("kedge.dev-gpu.json").is_file());
    kedge_tests::job::send("TERM", &[plugin.id()]);
    assert_eq!(plugin.wait().expect("ended").code(), Some(0));
}

/// The command of examples/kubernetes/job.yaml.
fn command_of_the_example() -> Vec<String> {
    let file = root().join("examples/kubernetes/job.yaml");
    let text = fs::read_to_string(file).expect("the example");
    let line = text.lines().find_map(|line| line.trim().strip_prefix("command: "));
    serde_json::from_str(line.expect("a command")).expect("a list of words")
}

/// Becomes a node's container: a host name, the node's own /opt, and kedge in PATH.
const NODE: &str = r#"
hostname "$1"; mount --bind "$2" /opt; export PATH=/opt/bin:$PATH; shift 2
for fd in /proc/$$/fd/*; do
    fd=${fd##*/}
    case $fd in 0|1|2|255) ;; *) eval "exec $fd>&-" ;; esac
done
exec env --default-signal=HUP,INT,QUIT "$@""#;

/// Copies a program with its time of change, as the layers of an image keep it: a restart compares
/// that with the file that the program had.
fn unpack(from: &Path, to: &Path) {
    copy_program(from, to);
    let time = fs::metadata(from).and_then(|found| found.modified()).expect("its time");
    let file = fs::File::options().append(true).open(to).expect("the copy");
    file.set_modified(time).expect("mine");
}

/// What the example's pod runs, on the node of this name, whose files are copies of its own.
fn on_node(world: &World, name: &str, state: &Path) -> Command {
    let opt = world.0.join(name);
    fs::create_dir_all(opt.join("bin")).expect("a folder");
    for part in ["kedge", "kedge-proxy", "libkedge_cuda.so", "libkedge_nvml.so"] {
        unpack(&kedge().with_file_name(part), &opt.join("bin").join(part));
    }
    let built = host("gpu_steps.cu", "gpu_steps", &["-O1", "-arch=sm_80"]);
    unpack(&built, &opt.join("sim"));
    let mut command = Command::new("timeout");
    command.args(["--foreground", "--kill-after=5", "300"]);
    command.args(["unshare", "--uts", "--mount", "bash", "-euc", NODE, "bash", name]).arg(opt);
    command.args(command_of_the_example()).args(["100000", "5"]);
    command.env("XDG_STATE_HOME", state).env("XDG_RUNTIME_DIR", world.runtime());
    command.env("KEDGE_CONFIG", "").env("KEDGE_DEVICE_SOFT0", "soft").current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn the_example_s_pod_goes_on_on_another_node() {
    if !is_root() {
        left_out("a pod on two nodes", "making a node takes root");
        return;
    }
    let world = World::new("k8spod");
    let state = world.0.join("state");
    fs::create_dir(&state).expect("a folder");
    let mut job = Job::start_paced(on_node(&world, "node-a", &state));
    job.read_to(20);
    let nonce = job.nonce.clone();
    job.signal("TERM");
    job.drain();
    assert_eq!(job.wait().code(), Some(85));
    let saved = job.step;
    // The first node is gone, with its files.
    fs::remove_dir_all(world.0.join("node-a")).expect("a folder");
    let mut job = Job::restart(on_node(&world, "node-b", &state), &nonce);
    assert!(job.step > 20 && job.step <= saved + 1, "{} after {saved}", job.step);
    let before = job.step;
    job.read_to(before + 10);
    job.kill();
}
