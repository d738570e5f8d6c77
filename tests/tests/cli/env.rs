//! Building for the CUDA driver on a machine that has none: `kedge env`, and the lines of
//! docs/ci.md.
use kedge_tests::root;
use kedge_tests::world::{World, failure, stderr};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Asks the driver for its devices, and takes a kernel of another file along.
const MAIN: &str = r#"
#include <stdio.h>
int cuInit(unsigned), cuDeviceGetCount(int *);
int run(void);
int main(void) {
    int count = 0, status = cuInit(0) || cuDeviceGetCount(&count) || run();
    printf("%d devices, status %d\n", count, status);
    return status ? 1 : 40 + count;
}
"#;

const KERNEL: &str = r#"
__global__ void saxpy(int n, float a, const float *x, float *y) {
    int i = threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
extern "C" int run(void) {
    enum { N = 64 };
    float host[N], *x, *y;
    for (int i = 0; i < N; i++) host[i] = i;
    if (cudaMalloc(&x, sizeof host) || cudaMalloc(&y, sizeof host)) return 1;
    cudaMemcpy(x, host, sizeof host, cudaMemcpyHostToDevice);
    cudaMemcpy(y, host, sizeof host, cudaMemcpyHostToDevice);
    saxpy<<<1, N>>>(N, 2, x, y);
    if (cudaMemcpy(host, y, sizeof host, cudaMemcpyDeviceToHost)) return 2;
    for (int i = 0; i < N; i++) if (host[i] != 3 * i) return 3;
    return 0;
}
"#;

const MAKEFILE: &str = "saxpy: main.c kernel.cu\n\tcc -c main.c\n\tnvcc -c kernel.cu\n\t\
                        nvcc main.o kernel.o -o saxpy -lcuda\n";

/// A project of these files in a folder whose name needs quotes.
fn project(world: &World) -> PathBuf {
    let folder = world.0.join("it's a project");
    fs::create_dir(&folder).expect("a folder");
    for (name, text) in [("main.c", MAIN), ("kernel.cu", KERNEL), ("Makefile", MAKEFILE)] {
        fs::write(folder.join(name), text).expect("a file");
    }
    folder
}

/// `script` run in `folder` by `shell`, as in this world, where kedge and nvcc are commands.
fn run(world: &World, folder: &Path, shell: &[&str], script: &str) -> Output {
    let kedge = world.parts();
    let toolkit = root().join(".tools/cu13/bin");
    let path = std::env::var("PATH").expect("PATH");
    let path = format!("{}:{}:{path}", kedge.parent().expect("bin").display(), toolkit.display());
    // World::kedge has the variables; the shell stands where kedge would.
    let of_world = world.kedge(&[]);
    let mut command = Command::new(shell[0]);
    for (name, value) in of_world.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.env("PATH", path).env_remove("LIBRARY_PATH").env_remove("CMAKE_LIBRARY_PATH");
    command.env("XDG_CACHE_HOME", folder.join("caches"));
    command.args(&shell[1..]).arg(script).current_dir(folder).output().expect("a shell")
}

fn sh(world: &World, folder: &Path, script: &str) -> Output {
    run(world, folder, &["sh", "-c"], script)
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_program_is_linked_without_a_driver() {
    let world = World::new("envlink");
    let folder = project(&world);
    // Twice: the second finds all of it there.
    let built = sh(&world, &folder, "set -e; eval \"$(kedge env)\"; eval \"$(kedge env)\"; make");
    assert!(built.status.success(), "{built:?}");
    let needed = sh(&world, &folder, "readelf -d saxpy");
    assert!(text(&needed).contains("[libcuda.so.1]"), "{needed:?}");
    let ran = sh(&world, &folder, "kedge run --gpu soft:2 -- ./saxpy");
    assert_eq!((ran.status.code(), text(&ran).as_str()), (Some(42), "2 devices, status 0\n"));
}

#[test]
fn cmake_finds_the_driver() {
    let world = World::new("envcmake");
    let folder = project(&world);
    let script = "cmake_minimum_required(VERSION 3.20)\n\
                  find_library(CUDA cuda REQUIRED)\nmessage(STATUS \"found ${CUDA}\")\n";
    fs::write(folder.join("find.cmake"), script).expect("a file");
    let found = sh(&world, &folder, "eval \"$(kedge env)\"; cmake -P find.cmake");
    let link = folder.join("caches/kedge/link/libcuda.so");
    let told = format!("found {}", link.display());
    assert!(found.status.success() && text(&found).contains(&told), "{found:?}");
}

/// The page's first block, line by line, as it stands there.
#[test]
fn the_lines_of_the_page_do_what_it_says() {
    let world = World::new("envpage");
    let folder = project(&world);
    let page = fs::read_to_string(root().join("docs/ci.md")).expect("the page");
    let lines = page.split("```").nth(1).and_then(|block| block.strip_prefix("sh\n"));
    let lines: Vec<&str> = lines.expect("a block of sh").lines().collect();
    assert_eq!(lines.len(), 5, "{lines:?}");
    // Each with its exit status, in one shell.
    let script: String = lines.iter().map(|line| format!("{line}\necho \"= $?\"\n")).collect();
    let done = sh(&world, &folder, &script);
    let statuses: Vec<String> =
        text(&done).lines().filter(|line| line.starts_with("= ")).map(str::to_owned).collect();
    // With one device the program ends with 41, which is its own and so both commands'.
    assert_eq!(statuses, ["= 0", "= 0", "= 0", "= 41", "= 41"], "{done:?}");
    assert!(text(&done).contains("saxpy"), "{done:?}");
    let findings = fs::read_to_string(folder.join("findings.json")).expect("findings");
    assert!(serde_json::from_str::<serde_json::Value>(&findings).is_ok(), "{findings}");
}

#[test]
fn every_form_says_the_same() {
    let world = World::new("envforms");
    let folder = project(&world);
    let wanted = format!("{}:/usr/lib", folder.join("caches/kedge/link").display());
    let before = "export LIBRARY_PATH=/usr/lib CMAKE_LIBRARY_PATH=/usr/lib;";
    let told = |script: &str| {
        let output = sh(&world, &folder, &format!("{before} {script}"));
        assert!(output.status.success(), "{}", stderr(&output));
        text(&output)
    };
    assert_eq!(told("eval \"$(kedge env)\"; echo \"$LIBRARY_PATH\"").trim_end(), wanted);
    let plain = format!("LIBRARY_PATH={wanted}\nCMAKE_LIBRARY_PATH={wanted}\n");
    assert_eq!(told("kedge env --format plain"), plain);
    let json: serde_json::Value = serde_json::from_str(&told("kedge env --json")).expect("JSON");
    assert_eq!(json["variables"]["LIBRARY_PATH"], wanted.as_str());
    assert_eq!(json["folder"], folder.join("caches/kedge/link").display().to_string().as_str());
}

#[test]
fn a_folder_that_cannot_be_used_is_named() {
    let world = World::new("envbad");
    let folder = project(&world);
    let listed = sh(&world, &folder, "XDG_CACHE_HOME=\"$PWD/a:b\" kedge env");
    assert!(failure(&listed).contains("set XDG_CACHE_HOME"), "{listed:?}");
    assert!(listed.stdout.is_empty());
    // One that others can write to could lead a linker anywhere.
    let open = folder.join("caches/kedge/link");
    fs::create_dir_all(&open).expect("a folder");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).expect("its mode");
    let refused = sh(&world, &folder, "kedge env");
    assert!(failure(&refused).contains("others cannot enter"), "{refused:?}");
    assert!(!open.join("libcuda.so").exists());
}
