//! Files, directories, devices, pipes and streams come back as they were.

mod plugins_support;

use kedge_process::plugins::{
    Argument, FileContents, PathMap, RecreateOptions, Saved, Survey, SurveyOptions,
};
use plugins_support::{Scenario, as_an_ordinary_user};
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};

const SOURCE: &str = "plugins_files.c";

#[test]
fn offsets_come_back_shared_or_not() {
    Scenario::round_trip(SOURCE, "offsets");
}

#[test]
fn processes_share_what_they_shared() {
    Scenario::round_trip(SOURCE, "shared");
}

#[test]
fn appending_goes_on() {
    Scenario::round_trip(SOURCE, "append");
}

#[test]
fn files_without_a_name_come_back() {
    Scenario::round_trip(SOURCE, "unlinked");
}

#[test]
fn directories_paths_and_devices_come_back() {
    Scenario::round_trip(SOURCE, "paths");
}

#[test]
fn pipes_come_back_with_what_is_in_flight() {
    Scenario::round_trip(SOURCE, "pipes");
}

#[test]
fn fifos_come_back_with_what_is_in_flight() {
    Scenario::round_trip(SOURCE, "fifos");
}

#[test]
fn locks_come_back() {
    Scenario::round_trip(SOURCE, "locks");
}

#[test]
fn owners_of_signals_come_back() {
    Scenario::round_trip(SOURCE, "owner");
}

/// As after a restart.
#[test]
fn a_job_in_a_namespace_of_its_own_is_saved_with_the_ids_that_it_knows() {
    let unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"];
    let mut scenario = Scenario::start_under(&unshare, SOURCE, "owner");
    let outer = scenario.pids[0];
    let children = fs::read_to_string(format!("/proc/{outer}/task/{outer}/children")).unwrap();
    let pid = children.trim().parse().unwrap();
    let saved = Survey::of(&[pid], &scenario.options()).unwrap().save(&scenario.image()).unwrap();
    scenario.kill();
    assert!(saved.slots().iter().all(|slot| slot.pid == 1), "{:?}", saved.slots());
    let options = RecreateOptions { folder: scenario.image(), ..RecreateOptions::default() };
    let made = saved.recreate(&options).unwrap();
    // F_OWNER_PID and the id.
    let owner = Argument::Bytes([1i32.to_ne_bytes(), 1i32.to_ne_bytes()].concat());
    assert!(made.calls.iter().any(|call| call.arguments.contains(&owner)), "{:?}", made.calls);
}

#[test]
fn a_lease_is_refused_by_name() {
    let scenario = Scenario::start(SOURCE, "lease");
    let refusals = Survey::of(&scenario.pids, &scenario.options()).unwrap_err();
    assert_eq!(refusals[0].fd, Some(10));
    assert!(refusals[0].to_string().contains("LEASE"), "{}", refusals[0]);
}

#[test]
fn what_was_written_is_found_and_what_came_later_is_moved_aside() {
    let mut scenario = Scenario::start(SOURCE, "database");
    let saved = scenario.save();
    scenario.kill();
    let (base, journal) = (scenario.work().join("base"), scenario.work().join("base-journal"));
    fs::write(&base, "state two").unwrap();
    fs::write(&journal, "what leads back to state zero").unwrap();
    let inode = fs::metadata(&base).unwrap().ino();
    let mut made = scenario.check(&saved, PathMap::default());
    assert_eq!(made.notes.len(), 2, "{:?}", made.notes);
    let aside = scenario.work().join("base.kedge-aside-1");
    assert_eq!(fs::read_to_string(&aside).unwrap(), "state two");
    assert!(scenario.work().join("base-journal.kedge-aside-1").exists());
    made.commit().unwrap();
    drop(made);
    assert_eq!(fs::read_to_string(&base).unwrap(), "state one");
    // Programs know their files by inode: SQLite does.
    assert_eq!(fs::metadata(&base).unwrap().ino(), inode);
}

#[test]
fn a_file_that_somebody_writes_is_left_to_him() {
    let mut scenario = Scenario::start(SOURCE, "database");
    let saved = scenario.save();
    scenario.kill();
    let base = scenario.work().join("base");
    let writer = fs::File::options().write(true).open(&base).unwrap();
    writer.write_all_at(b"another", 0).unwrap();
    let mut made = scenario.check(&saved, PathMap::default());
    made.commit().unwrap();
    drop(made);
    writer.write_all_at(b"writes on", 0).unwrap();
    assert_eq!(fs::read_to_string(&base).unwrap(), "state one");
    let aside = scenario.work().join("base.kedge-aside-1");
    assert_eq!(fs::read_to_string(&aside).unwrap(), "writes on");
}

/// The folder is not the user's, the file is.
#[test]
fn what_is_overwritten_in_a_folder_of_somebody_else_s_is_kept() {
    if is_root() {
        // To root every folder is its own: `ordinary_users_can_do_all_that` does the same.
        return;
    }
    for fails in [true, false] {
        let mut scenario = Scenario::start(SOURCE, "database");
        let saved = scenario.save();
        scenario.kill();
        let base = scenario.work().join("base");
        fs::write(&base, "state two").unwrap();
        fs::set_permissions(scenario.work(), fs::Permissions::from_mode(0o555)).unwrap();
        let mut made = scenario.check(&saved, PathMap::default());
        let notes = made.notes.join(" ");
        let kept = notes.split_whitespace().find(|word| word.contains("kedge-aside")).unwrap();
        let kept = std::path::PathBuf::from(kept);
        assert_eq!(fs::read_to_string(&kept).unwrap(), "state two");
        if !fails {
            made.commit().unwrap();
        }
        drop(made);
        let expected = if fails { "state two" } else { "state one" };
        assert_eq!(fs::read_to_string(&base).unwrap(), expected);
        assert_eq!(kept.exists(), !fails);
        let _ = fs::remove_file(kept);
        fs::set_permissions(scenario.work(), fs::Permissions::from_mode(0o755)).unwrap();
    }
}

fn is_root() -> bool {
    // SAFETY: geteuid takes no arguments and only returns a number.
    unsafe { libc::geteuid() == 0 }
}

#[test]
fn a_restart_that_fails_leaves_nothing_behind() {
    let mut scenario = Scenario::start(SOURCE, "database");
    let saved = scenario.save();
    scenario.kill();
    let (base, journal) = (scenario.work().join("base"), scenario.work().join("base-journal"));
    fs::write(&base, "state two").unwrap();
    fs::write(&journal, "later").unwrap();
    let before = fs::metadata(&base).unwrap();
    drop(scenario.check(&saved, PathMap::default()));
    let after = fs::metadata(&base).unwrap();
    assert_eq!(
        (after.ino(), after.mode(), after.modified().unwrap()),
        (before.ino(), before.mode(), before.modified().unwrap())
    );
    assert_eq!(fs::read_to_string(&base).unwrap(), "state two");
    assert_eq!(fs::read_to_string(&journal).unwrap(), "later");
    assert_eq!(fs::read_dir(scenario.work()).unwrap().count(), 2);
}

#[test]
fn a_file_that_moved_is_found_by_the_path_map_and_a_missing_one_is_named() {
    let mut scenario = Scenario::start(SOURCE, "offsets");
    let saved = scenario.save();
    scenario.kill();
    let (old, new) = (scenario.work(), scenario.folder.0.join("moved"));
    fs::create_dir(&new).unwrap();
    fs::rename(old.join("read"), new.join("read")).unwrap();
    let options = RecreateOptions { folder: scenario.image(), ..RecreateOptions::default() };
    let error = saved.recreate(&options).unwrap_err().to_string();
    assert!(error.contains("/work/read is not there"), "{error}");
    scenario.check(&saved, PathMap::new([(old, new)]));
}

/// Whoever may write in the folder may have put it there after the checkpoint.
#[test]
fn a_link_that_another_user_has_planted_is_not_followed() {
    if !is_root() {
        return kedge_left_out::needs_root("a planted link", "only root can plant another's");
    }
    for scenario in ["offsets", "database"] {
        let mut scenario = Scenario::start(SOURCE, scenario);
        let saved = scenario.save();
        scenario.kill();
        let name = if scenario.name == "offsets" { "read" } else { "base" };
        let (path, secret) = (scenario.work().join(name), scenario.folder.0.join("secret"));
        fs::rename(&path, &secret).unwrap();
        let before = fs::read(&secret).unwrap();
        std::os::unix::fs::symlink(&secret, &path).unwrap();
        std::os::unix::fs::lchown(&path, Some(1234), Some(1234)).unwrap();
        let options = RecreateOptions { folder: scenario.image(), ..RecreateOptions::default() };
        let error = saved.recreate(&options).unwrap_err().to_string();
        assert!(error.contains("symbolic link of user 1234"), "{error}");
        assert_eq!(fs::read(&secret).unwrap(), before);
    }
}

/// What compilers hand on by temporary files is gone soon after.
#[test]
fn a_temporary_file_that_is_only_read_comes_back_where_it_is_gone() {
    for gone in [true, false] {
        let mut scenario = Scenario::start(SOURCE, "passing");
        let saved = scenario.save();
        scenario.kill();
        let path = std::path::PathBuf::from(format!("/tmp/kedge-passing-{}", scenario.pids[0]));
        if gone {
            fs::remove_file(&path).unwrap();
        } else {
            fs::write(&path, "abc34fghij, by another").unwrap();
        }
        let mut made = scenario.check(&saved, PathMap::default());
        made.commit().unwrap();
        drop(made);
        let found = fs::read_to_string(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(found, if gone { "0123456789" } else { "abc34fghij, by another" });
    }
}

#[test]
fn files_that_stay_are_taken_as_they_are() {
    let mut scenario = Scenario::start(SOURCE, "database");
    let options = SurveyOptions { contents: FileContents::Keep, ..scenario.options() };
    let saved = Survey::of(&scenario.pids, &options).unwrap().save(&scenario.image()).unwrap();
    scenario.kill();
    assert_eq!(saved.files().count(), 1, "no contents");
    fs::write(scenario.work().join("base"), "state one").unwrap();
    scenario.check(&saved, PathMap::default());
}

#[test]
fn what_cannot_be_saved_is_named_with_its_remedy() {
    let scenario = Scenario::start(SOURCE, "database");
    let options = SurveyOptions { limit: 1, ..scenario.options() };
    let refusals = Survey::of(&scenario.pids, &options).unwrap_err();
    assert_eq!(refusals.len(), 1, "{refusals:?}");
    let said = refusals[0].to_string();
    let begin =
        format!("process {}, descriptor 10: {}", scenario.pids[0], scenario.work().display());
    assert!(said.starts_with(&begin) && said.contains("raise it"), "{said}");
}

#[test]
fn the_table_tells_who_holds_what_under_which_number() {
    let scenario = Scenario::start(SOURCE, "pipes");
    let saved = scenario.save();
    let slot =
        |pid, fd| *saved.slots().iter().find(|slot| (slot.pid, slot.fd) == (pid, fd)).unwrap();
    let (first, second) = (scenario.pids[0], scenario.pids[1]);
    for fd in [0, 1, 20, 21, 31] {
        assert_eq!(slot(first, fd).description, slot(second, fd).description, "{fd}");
    }
    assert_ne!(slot(first, 20).description, slot(first, 30).description);
    assert!(saved.slots().iter().all(|slot| !slot.close_on_exec));
}

#[test]
fn a_saved_job_is_not_disturbed() {
    // Twice, and the second finds the same.
    let scenario = Scenario::start(SOURCE, "pipes");
    let first = scenario.save();
    for file in first.files() {
        fs::remove_file(scenario.image().join(file)).unwrap();
    }
    let second = scenario.save();
    assert_eq!(first, second);
    let mut scenario = scenario;
    scenario.kill();
    scenario.check(&second, PathMap::default());
}

#[test]
fn bytes_that_are_no_saved_job_are_refused() {
    for bytes in [&b""[..], b"{}", b"[1]", b"{\"version\":1}", &[0xff; 64]] {
        assert!(Saved::from_bytes(bytes).is_err());
    }
}

#[test]
fn ordinary_users_can_do_all_that() {
    as_an_ordinary_user();
}
