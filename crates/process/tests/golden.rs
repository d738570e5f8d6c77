//! Images of the first forms come back, whatever has been added to images since.
//!
//! No image of an older kedge lies here: it would hold the features of one processor and the vDSO
//! of one kernel, and name files of one machine, so that it came back there alone. So the test
//! makes one. It captures a program, and writes what was captured by code of its own: byte for byte
//! as the first form was, with the fields of `golden/fields.txt` and no others. What breaks older
//! images fails here: a changed layout, a number that means something else, a field without a
//! default.

mod support;

use kedge_image::layout::Kind;
use kedge_image::{Choice, Codec, Extent, FileEntry, ImageFile, Manifest, checksum, verify};
use kedge_process::{Options, check};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use support::kernel::tells_writes;
use support::survive::{as_an_ordinary_user, continues};
use support::{Folder, Running, alone, bring_back, build, capture_by, kill};

const STEPS: usize = 200;
const PAGE: usize = 4096;

fn fields() -> BTreeSet<&'static str> {
    let lines = include_str!("golden/fields.txt").lines().filter(|line| !line.starts_with('#'));
    lines.flat_map(str::split_whitespace).collect()
}

/// Takes out what the first form has not; what that was is added to `gone`.
fn strip(value: &mut Value, fields: &BTreeSet<&str>, gone: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            let names: Vec<String> = object.keys().cloned().collect();
            for name in names.into_iter().filter(|name| !fields.contains(name.as_str())) {
                object.remove(&name);
                gone.insert(name);
            }
            object.values_mut().for_each(|value| strip(value, fields, gone));
        }
        Value::Array(values) => values.iter_mut().for_each(|value| strip(value, fields, gone)),
        _ => {}
    }
}

/// What the first form stores of an extent, and the number of its codec.
fn payload(file: &ImageFile, extent: &Extent, gone: &mut BTreeSet<String>) -> (u8, Vec<u8>) {
    match extent.codec {
        Codec::Zero => return (0, Vec::new()),
        Codec::Parent => return (5, Vec::new()),
        Codec::Process => panic!("the program has one process"),
        _ => {}
    }
    let mut bytes = vec![0; extent.decoded as usize];
    file.read(extent, &mut Vec::new(), &mut bytes).unwrap();
    if extent.kind == Kind::Section {
        let mut value: Value = serde_json::from_slice(&bytes).unwrap();
        // Descriptors have a version of their own, and so has what each plugin saves.
        if value.get("slots").is_some() {
            assert_eq!(value["version"], 1);
        } else {
            strip(&mut value, &fields(), gone);
            bytes = serde_json::to_vec(&value).unwrap();
        }
    }
    (1, bytes)
}

/// Writes what `file` has to `path`, as the first form is.
fn write_first(file: &ImageFile, path: &Path, gone: &mut BTreeSet<String>) -> FileEntry {
    let mut bytes = [b"KEDGEIMG".as_slice(), &1u32.to_le_bytes(), &[0; 4]].concat();
    let mut table = Vec::new();
    for extent in file.extents() {
        let (codec, stored) = payload(file, extent, gone);
        if extent.kind == Kind::Memory && codec == 1 {
            bytes.resize(bytes.len().next_multiple_of(PAGE), 0);
        }
        let decoded = if codec == 1 { stored.len() as u64 } else { extent.decoded };
        table.extend([u8::from(extent.kind == Kind::Section), codec, 0, 0]);
        table.extend((stored.len() as u32).to_le_bytes());
        let offset = bytes.len() as u64;
        let words = [decoded, extent.address, offset, checksum(&stored), extent.object];
        table.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        bytes.extend(stored);
    }
    let mut footer = [b"KEDGEEND".as_slice(), &1u32.to_le_bytes(), &[0; 4]].concat();
    let words = [bytes.len() as u64, table.len() as u64 / 48, checksum(&table)];
    footer.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    footer.extend(checksum(&footer).to_le_bytes());
    let name = path.file_name().unwrap().to_str().unwrap().to_owned();
    bytes.extend(table);
    bytes.extend(&footer);
    fs::write(path, &bytes).unwrap();
    FileEntry { name, bytes: bytes.len() as u64, checksum: checksum(&footer) }
}

/// Makes `first` what `image` is, in the form of that version; the fields that it had not.
fn make_first(image: &Path, manifest: &Manifest, first: &Path, version: u32) -> BTreeSet<String> {
    fs::create_dir(first).unwrap();
    let (mut files, mut gone) = (Vec::new(), BTreeSet::new());
    for entry in fs::read_dir(image).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let (from, to) = (image.join(&name), first.join(&name));
        match manifest.file(&name) {
            Some(entry) if name.ends_with(".kimg") => {
                let file = ImageFile::open(&from, Some(entry)).unwrap();
                files.push(write_first(&file, &to, &mut gone));
            }
            // The bytes of files and pipes, as they are.
            Some(entry) => {
                fs::copy(from, to).unwrap();
                files.push(entry.clone());
            }
            None => assert_eq!(name, "manifest.json"),
        }
    }
    let entry = |FileEntry { name, bytes, checksum }: FileEntry| json!({ "name": name, "bytes": bytes, "checksum": checksum });
    let files: Vec<Value> = files.into_iter().map(entry).collect();
    let manifest = json!({
        "version": version,
        "job": "golden",
        "command": ["step"],
        "captured": 1_700_000_000,
        "processes": manifest.processes,
        "files": files,
    });
    let text = format!("{manifest:#}\n");
    let text = format!("{text}xxh3 {:016x}\n", checksum(text.as_bytes()));
    fs::write(first.join("manifest.json"), text).unwrap();
    gone
}

fn comes_back(name: &str, version: u32, ahead: Option<u64>) {
    let _alone = alone();
    let folder = Folder::new(name);
    let program = build(&folder, "step.c", &["-static"]);
    let mut running = Running::start(Command::new(&program).arg(STEPS.to_string()));
    let before = running.lines(5);
    let (image, first) = (folder.path("image"), folder.path("first"));
    let manifest = capture_by(Options { ahead, codec: Choice::Lz4, ..Options::new(image.clone()) });
    kill(running, &manifest.processes);
    let gone = make_first(&image, &manifest, &first, version);
    // It is another form than that of today.
    for added in ["attributes", "vdsos", "stop_signal", "securebits", "aio"] {
        assert!(gone.contains(added), "{added}: {gone:?}");
    }
    fs::remove_dir_all(&image).unwrap();
    assert_eq!(Manifest::read(&first).unwrap().version, version);
    verify(&first, 2).unwrap();
    check(&first).unwrap();
    let (after, status) = bring_back(&first);
    continues(&before, &after, STEPS);
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}");
}

#[test]
fn the_first_form_comes_back() {
    comes_back("golden-1", 1, None);
}

/// Memory that was written ahead, in a file of its own.
#[test]
fn the_second_form_comes_back() {
    if tells_writes() {
        comes_back("golden-2", 2, Some(0));
    }
}

#[test]
fn an_ordinary_user_can_do_the_same() {
    as_an_ordinary_user();
}
