//! `kedge explain` says what runs where of programs that stock nvcc has made.
use kedge_tests::world::World;
use kedge_tests::{host, root};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// The program with two kernels, made with these of nvcc's arguments.
fn program(output: &str, arguments: &[&str]) -> PathBuf {
    host("explained.cu", output, &[&["-std=c++17"], arguments].concat())
}

fn explain(world: &World, arguments: &[&str]) -> Value {
    let text = world.text(&[&["explain", "--json"], arguments].concat());
    serde_json::from_str(&text).expect("JSON")
}

/// The only file of a report, and its modules' fates.
fn only(report: &Value) -> (&Value, [u64; 4]) {
    let files = report["files"].as_array().expect("a list");
    assert_eq!(files.len(), 1, "{report}");
    let count = |name: &str| files[0]["software"][name].as_u64().expect(name);
    (&files[0], ["runs", "newer", "machine_code", "link_time_code"].map(count))
}

fn shown(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn ptx_runs_and_machine_code_alone_does_not() {
    let world = World::new("exptx");
    let both = program("explain_both", &["-gencode=arch=compute_75,code=[compute_75,sm_75]"]);
    let report = explain(&world, &[shown(&both)]);
    let (file, fates) = only(&report);
    assert_eq!(fates, [1, 0, 0, 0]);
    assert_eq!(file["gpus"][0], 75);
    assert!(file["gpus"].as_array().expect("a list").contains(&json!(120)));
    assert_eq!(report["advice"], json!([]));

    let machine = program("explain_machine", &["-gencode=arch=compute_80,code=sm_80"]);
    let report = explain(&world, &[shown(&machine)]);
    let (file, fates) = only(&report);
    assert_eq!(fates, [0, 0, 1, 0]);
    assert_eq!(file["gpus"], json!([80, 86, 87, 88, 89]));
    assert!(report["advice"][0].as_str().expect("advice").contains("compute_90"));
    let text = world.text(&["explain", shown(&machine)]);
    assert!(text.contains("machine code only") && text.contains("8.0–8.9"), "{text}");
    // What was said is so.
    assert_ne!(
        world.output(&["run", "--gpu", "soft", "--", shown(&machine)]).status.code(),
        Some(0)
    );
}

#[test]
fn newer_ptx_is_tried_and_link_time_code_is_told() {
    let world = World::new("exnewer");
    let newer = program("explain_newer", &["-gencode=arch=compute_100,code=compute_100"]);
    assert_eq!(only(&explain(&world, &[shown(&newer)])).1, [0, 1, 0, 0]);
    let link =
        program("explain_link", &["-rdc=true", "-gencode=arch=compute_80,code=lto_80", "-c"]);
    let report = explain(&world, &[shown(&link)]);
    assert_eq!(only(&report).1, [0, 0, 0, 1]);
    assert!(report["advice"][0].as_str().expect("advice").contains("nvJitLink"), "{report}");
}

#[test]
fn what_nvcc_links_is_one_module_with_its_parts() {
    let world = World::new("exlinked");
    let linked = program(
        "explain_linked",
        &["-rdc=true", "-gencode=arch=compute_80,code=[compute_80,sm_80]"],
    );
    let report = explain(&world, &["--kernels", shown(&linked)]);
    let (file, fates) = only(&report);
    assert_eq!((fates, &file["modules"]), ([1, 0, 0, 0], &json!(1)), "{file}");
    assert!(world.output(&["run", "--gpu", "soft", "--", shown(&linked)]).status.success());
}

#[test]
fn kernels_are_listed_with_their_forms() {
    let world = World::new("exkernels");
    let both = program("explain_both", &["-gencode=arch=compute_75,code=[compute_75,sm_75]"]);
    let report = explain(&world, &["--kernels", shown(&both)]);
    let kernels = only(&report).0["kernels"].as_array().expect("a list");
    assert_eq!(kernels.len(), 2, "{report}");
    for kernel in kernels {
        assert_eq!((&kernel["ptx"], &kernel["machine_code"]), (&json!(["75"]), &json!(["75"])));
    }
    let text = world.text(&["explain", "--kernels", shown(&both)]);
    assert!(
        text.contains("fill(int*)") && text.contains("clear<float>"),
        "names are as in the source: {text}"
    );
}

#[test]
fn a_folder_is_looked_through_and_a_program_s_libraries_too() {
    let world = World::new("exfolder");
    let folder = world.0.join("packages/deep");
    fs::create_dir_all(&folder).expect("a folder");
    let cubin = program("explain_cubin.cubin", &["-cubin", "-arch=sm_90"]);
    fs::copy(&cubin, folder.join("kernel.cubin")).expect("a copy");
    fs::write(folder.join("text"), "no code").expect("a file");
    let comment = format!("/* {} */\n", "long ".repeat(2000));
    fs::write(folder.join("header.h"), comment.clone() + "#include <x.h>\n").expect("a file");
    fs::write(folder.join("kernel.ptx"), comment + ".version 8.0\n.target sm_90\n")
        .expect("a file");
    // An ELF file's beginning, and nothing behind it.
    fs::write(folder.join("cut.so"), &fs::read(&cubin).expect("a cubin")[..200]).expect("a file");
    let report = explain(&world, &[shown(&world.0.join("packages"))]);
    let files = report["files"].as_array().expect("a list");
    assert_eq!(files.len(), 2, "{report}");
    assert_eq!(
        (&files[0]["gpus"], &files[0]["software"]["machine_code"]),
        (&json!([90]), &json!(1))
    );
    assert_eq!(files[1]["software"]["runs"], 1);
    let unread = report["unread"].as_array().expect("a list");
    assert_eq!(unread.len(), 1, "{report}");
    assert!(unread[0]["path"].as_str().expect("a path").ends_with("cut.so"));

    let tools = root().join(".tools/cu13/lib");
    let library = format!("-L{}", tools.display());
    let needs =
        program("explain_needs", &["-arch=sm_90", "-Xlinker=--no-as-needed", "-lnvrtc", &library]);
    let report = explain(&world, &[shown(&needs)]);
    assert_eq!(report["missing"][0]["needed_by"], needs.display().to_string());
    let name = report["missing"][0]["library"].as_str().expect("a name");
    assert!(name.starts_with("libnvrtc.so"), "{report}");
    let mut there = world.kedge(&["explain", "--json", shown(&needs)]);
    let output = there.env("LD_LIBRARY_PATH", &tools).output().expect("kedge");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["missing"], json!([]));
}

#[test]
fn nothing_there_is_said() {
    let world = World::new("exnothing");
    let text = world.text(&["explain", "/bin/true"]);
    assert!(text.contains("no device code"), "{text}");
    let output = world.output(&["explain", "/nowhere/at/all"]);
    assert_eq!(output.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/nowhere/at/all"));
}
