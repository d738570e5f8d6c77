//! `kedge images`, `inspect`, `verify` and `rm` from outside, on images that the image crate wrote.
use kedge_image::{Choice, Claim, ImageWriter, Manifest, Part, encode};
use kedge_tests::world::{World, failure, has_fields};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// The image `number` of job `sim`: memory that compresses, memory that does not, and zeros.
fn image(dir: &Path, number: u64, parent: Option<&str>) -> PathBuf {
    let folder = dir.join(format!("sim-{number:04}"));
    fs::create_dir_all(&folder).expect("a folder");
    let writer = ImageWriter::create(&folder.join("7.kimg")).expect("a file");
    writer.section(1, b"state").expect("written");
    let mut state = number;
    let noise = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    });
    let noise: Vec<u8> = noise.take(64 << 10).collect();
    for (at, bytes) in [noise, vec![3; 64 << 10], vec![0; 64 << 10]].iter().enumerate() {
        let address = (at as u64 + 1) << 20;
        writer.memory(0, address, 64 << 10, &encode(bytes, Choice::Auto)).expect("written");
    }
    let command = vec!["./sim".into(), "\x1b[31m--red".into()];
    let mut manifest = Manifest::new("sim".into(), command, 1_700_000_000 + number);
    manifest.processes = vec![7];
    manifest.files.push(writer.finish().expect("finished"));
    manifest.parent = parent.map(|name| {
        let above = dir.join(name);
        Manifest::read(&above).expect("an image").as_parent(&above).expect("a name")
    });
    manifest.write(&folder).expect("written");
    folder
}

fn path(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn images_are_told_to_people_and_scripts() {
    let world = World::new("images");
    let dir = world.0.join("images");
    image(&dir, 1, None);
    image(&dir, 2, Some("sim-0001"));
    let claim = Claim::new(&dir, "sim").expect("a folder");
    fs::create_dir(dir.join("sim-0004")).expect("a folder");
    fs::create_dir(dir.join("something else")).expect("a folder");

    let rows = world.json(&["images", path(&dir), "--json"]);
    has_fields(&rows, &["image", "state", "job", "command", "captured", "bytes", "parent"]);
    let state = |at: usize| rows[at]["state"].as_str().expect("a word");
    assert_eq!(
        [state(0), state(1), state(2), state(3)],
        ["finished", "finished", "unfinished", "writing"]
    );
    assert_eq!((rows.len(), &rows[0]["parent"]), (4, &"sim-0001".into()));
    let text = world.text(&["images", path(&dir)]);
    assert!(text.contains("sim-0002") && text.contains("2023-11-14T22:13:22Z"), "{text}");
    assert!(!text.contains('\x1b'), "a command line gives the terminal orders");
    drop(claim);

    let report: Value =
        serde_json::from_str(&world.text(&["inspect", path(&dir), "--json"])).expect("JSON");
    assert_eq!((&report["job"], &report["captured"]), (&"sim".into(), &1_700_000_002_u64.into()));
    let file = &report["files"][0];
    assert_eq!(
        (&file["memory"], &file["zero"], &file["raw"]),
        (&196_608.into(), &65_536.into(), &65_541.into())
    );
    assert!(world.text(&["inspect", path(&dir.join("sim-0001"))]).contains("64 KiB"));
}

#[test]
fn images_lie_in_the_state_folder_by_default() {
    let world = World::new("state");
    let output = |arguments: &[&str]| {
        let mut command = world.kedge(arguments);
        command.env("XDG_STATE_HOME", &world.0).output().expect("kedge")
    };
    assert_eq!(output(&["images", "--json"]).stdout, b"[]\n");
    image(&world.0.join("kedge/images"), 1, None);
    assert!(String::from_utf8_lossy(&output(&["images"]).stdout).contains("sim-0001"));
    assert!(output(&["verify", "sim-0001"]).status.success());
    let said = failure(&output(&["verify", "sim-0009"]));
    assert!(said.contains("sim-0009"), "{said}");
    let homeless =
        world.kedge(&["images"]).env_remove("HOME").env_remove("XDG_STATE_HOME").output();
    let said = failure(&homeless.expect("kedge"));
    assert!(said.contains("XDG_STATE_HOME"), "{said}");
}

#[test]
fn damage_is_named_by_file_and_offset() {
    let world = World::new("verify");
    let dir = world.0.join("images");
    let (first, second) = (image(&dir, 1, None), image(&dir, 2, Some("sim-0001")));
    let good = world.json(&["verify", path(&dir), "--json"]);
    has_fields(&good, &["image", "good", "images", "files", "bytes", "errors"]);
    assert_eq!((good.len(), &good[0]["images"], &good[0]["good"]), (2, &2.into(), &true.into()));

    for name in ["7.kimg", "manifest.json"] {
        let path_of = first.join(name);
        let bytes = fs::read(&path_of).expect("the file");
        for at in [0, bytes.len() / 2, bytes.len() - 1] {
            let mut bad = bytes.clone();
            bad[at] ^= 0x20;
            fs::write(&path_of, bad).expect("written");
            // The image itself, and the one that builds on it.
            for image in [&first, &second] {
                let output = world.output(&["verify", path(image)]);
                let text = String::from_utf8_lossy(&output.stdout);
                assert_eq!(output.status.code(), Some(1), "{name} {at}: {text}");
                assert!(text.contains(path(&path_of)) && text.contains("offset"), "{text}");
            }
        }
        fs::write(&path_of, bytes).expect("written");
    }
    assert!(world.output(&["verify", path(&dir)]).status.success());
    let said = failure(&world.output(&["verify", path(&world.0)]));
    assert!(said.contains("no image here"), "{said}");
}

#[test]
fn only_images_that_nobody_needs_are_removed() {
    let world = World::new("rm");
    let dir = world.0.join("images");
    let (first, second) = (image(&dir, 1, None), image(&dir, 2, Some("sim-0001")));
    let said = failure(&world.output(&["rm", path(&first)]));
    assert!(said.contains("sim-0002"), "{said}");
    let claim = Claim::new(&dir, "sim").expect("a folder");
    let said = failure(&world.output(&["rm", path(&second), path(claim.folder())]));
    assert!(said.contains("being written"), "{said}");
    let said = failure(&world.output(&["rm", path(&second), path(&dir)]));
    assert!(said.contains("no image here") && second.exists(), "{said}");
    drop(claim);
    let removed = world.json(&["rm", path(&first), path(&second), "--json"]);
    assert_eq!(removed.len(), 2);
    assert!(!first.exists() && !second.exists() && dir.exists());
}

#[test]
fn old_images_are_pruned_and_what_is_needed_stays() {
    let world = World::new("prune");
    let dir = world.0.join("images");
    let images = [image(&dir, 1, None), image(&dir, 2, None), image(&dir, 3, Some("sim-0002"))];
    let claim = Claim::new(&dir, "sim").expect("a folder");
    fs::create_dir(dir.join("sim-0009")).expect("a folder");
    fs::write(dir.join("notes"), "a user's").expect("a file");

    let without_a_rule = world.output(&["prune", path(&dir)]);
    assert_eq!(without_a_rule.status.code(), Some(2), "{without_a_rule:?}");
    let told = world.text(&["prune", "--older", "1d", "--dry-run", path(&dir)]);
    assert!(told.contains("sim-0001") && told.contains("2 would be removed"), "{told}");
    assert!(images[0].exists());
    let gone = world.json(&["prune", "--older", "1d", "--json", path(&dir)]);
    has_fields(&gone, &["image", "job", "captured", "bytes"]);
    assert_eq!(gone.len(), 2, "the oldest, and the unfinished one");
    assert!(!images[0].exists() && !dir.join("sim-0009").exists());
    assert!(images[1].exists() && images[2].exists() && claim.folder().exists());
    assert!(dir.join("notes").exists());
    assert_eq!(world.text(&["prune", "--max-size", "0", path(&dir)]), "nothing to remove\n");
}

/// An image of a job of two parts, each of them what [`image`] makes.
fn whole(dir: &Path) -> PathBuf {
    let folder = dir.join("pair-0001");
    let mut manifest = Manifest::new("pair".into(), vec!["./pair".into()], 1_700_000_009);
    for number in 1..=2 {
        image(&folder, number, None);
        let name = format!("sim-{number:04}");
        let found = Manifest::read(&folder.join(&name)).expect("an image");
        manifest.parts.push(Part::of(&name, &found));
    }
    manifest.write(&folder).expect("written");
    folder
}

#[test]
fn images_of_several_parts_are_shown_verified_and_removed_as_one() {
    let world = World::new("whole");
    let dir = world.0.join("images");
    let whole = whole(&dir);
    let report = world.text(&["inspect", path(&whole), "--json"]);
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(report["parts"].as_array().map(Vec::len), Some(2), "{report}");
    assert_eq!(report["parts"][1]["processes"], 1, "{report}");
    assert!(report["parts"][1]["image"].as_str().expect("a path").ends_with("pair-0001/sim-0002"));
    let sum = |field: &str| {
        let of = |part: usize| report["parts"][part]["files"][0][field].as_u64().expect("a number");
        assert!(of(0) > 0 && of(1) > 0, "{report}");
        (of(0) + of(1), report["total"]["files"][field].as_u64().expect("a number"))
    };
    for field in ["bytes", "memory", "zero", "raw", "sections"] {
        let (parts, total) = sum(field);
        assert_eq!(parts, total, "{field}");
    }
    let text = world.text(&["inspect", path(&whole)]);
    assert!(text.contains("2 in all") && text.contains("sim-0002"), "{text}");
    assert_eq!(
        (text.matches("7.kimg").count(), text.matches("all parts").count()),
        (2, 1),
        "{text}"
    );
    // A part is an image, too, which can be looked at, but not taken away.
    let part = whole.join("sim-0001");
    assert!(world.text(&["inspect", path(&part)]).contains("7.kimg"));
    let said = failure(&world.output(&["rm", path(&part)]));
    assert!(said.contains("pair-0001"), "{said}");
    assert!(world.output(&["verify", path(&whole)]).status.success());
    let removed = world.json(&["rm", path(&part), path(&whole), "--json"]);
    assert_eq!((removed.len(), whole.exists(), dir.exists()), (2, false, true));
}

#[test]
fn a_part_that_is_gone_or_another_one_is_named() {
    let world = World::new("wholeg");
    let dir = world.0.join("images");
    let whole = whole(&dir);
    fs::remove_dir_all(whole.join("sim-0002")).expect("gone");
    let said = failure(&world.output(&["inspect", path(&whole)]));
    assert!(said.contains("sim-0002"), "{said}");
    assert_eq!(world.output(&["verify", path(&whole)]).status.code(), Some(1));
    image(&whole, 3, None);
    fs::rename(whole.join("sim-0003"), whole.join("sim-0002")).expect("another");
    let said = failure(&world.output(&["inspect", path(&whole)]));
    assert!(said.contains("another image"), "{said}");
    let removed = world.json(&["rm", path(&whole), "--json"]);
    assert_eq!((removed.len(), whole.exists()), (1, false));
}
