//! What `kedge cache` promises: which bytes are where, when, and what survives.
use kedge_tests::cached::Cached;
use kedge_tests::world::{failure, stderr, wait_for};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
/// Errors as the kernel numbers them.
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// Bytes that differ from file to file and from place to place.
fn bytes(first: u8, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 4096 % 251) as u8 ^ first).collect()
}

fn is(path: &Path, expected: &[u8]) {
    let found = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(found == expected, "{}: {} bytes, or others", path.display(), found.len());
}

/// A file that is there until it is removed.
fn flag(cached: &Cached, name: &str) -> PathBuf {
    let path = cached.world.0.join(name);
    fs::write(&path, "").expect("a file");
    path
}

#[test]
fn writes_are_absorbed_read_back_and_drained() {
    let Some(cached) = Cached::start("cbasic", &["--tier", "ram:64M"]) else { return };
    let (file, data) = (cached.under.join("a"), bytes(1, 8 * MIB));
    fs::write(&file, &data).expect("absorbed");
    is(&file, &data);
    assert_eq!(fs::metadata(&file).expect("there").len(), data.len() as u64);
    let modified = fs::metadata(&file).expect("there").mtime_nsec();
    cached.drain();
    is(&cached.below().join("a"), &data);
    assert_eq!(fs::metadata(cached.below().join("a")).expect("there").mtime_nsec(), modified);
    let status = cached.status();
    assert_eq!((&status["dirty"], &status["tiers"][0]["used"]), (&0.into(), &0.into()));
    assert_eq!(status["absorbed"], data.len());
    cached.stop();
    is(&file, &data);
    assert!(failure(&cached.output("status")).contains("no cache runs"));
}

#[test]
fn status_and_metrics_tell_of_each_cache_of_the_user() {
    let Some(mut cached) = Cached::new("call", &["--tier", "ram:64M"]) else { return };
    let held = flag(&cached, "held");
    cached.fault = Some(format!("carried={}", held.display()));
    cached.begin();
    fs::write(cached.under.join("a"), bytes(1, MIB)).expect("absorbed");
    let under = cached.under.display().to_string();
    // Other tests' caches come and go meanwhile.
    let said = |words: &[&str]| cached.world.kedge(words).output().expect("kedge");
    let text = String::from_utf8(said(&["cache", "status", "--json"]).stdout).expect("text");
    let all: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let all = all.as_array().expect("a list");
    let mine = all.iter().find(|one| one["under"] == *under).expect("this one is among them");
    assert_eq!(mine["dirty"], MIB);
    let figures = String::from_utf8(said(&["metrics"]).stdout).expect("text");
    let row = format!("kedge_cache_undrained_bytes{{under=\"{under}\"}} {MIB}\n");
    assert!(figures.contains(&row), "{figures}");
    let row =
        format!("kedge_cache_written_bytes_total{{under=\"{under}\",way=\"absorbed\"}} {MIB}\n");
    assert!(figures.contains(&row), "{figures}");
    cached.kill();
    let told = said(&["cache", "status"]);
    let why = stderr(&told);
    assert!(!told.status.success() && why.contains(&under) && why.contains("recover"), "{why}");
}

#[test]
fn a_file_drains_by_itself_once_nobody_writes_it() {
    let Some(cached) = Cached::start("cidle", &["--tier", "ram:64M"]) else { return };
    fs::write(cached.under.join("a"), bytes(1, MIB)).expect("absorbed");
    wait_for("nothing drains", || cached.count("dirty") == 0);
    is(&cached.below().join("a"), &bytes(1, MIB));
}

#[test]
fn what_is_there_passes_through() {
    let Some(cached) = Cached::new("cpass", &["--tier", "ram:64M"]) else { return };
    fs::create_dir(cached.under.join("dir")).expect("a folder");
    fs::write(cached.under.join("dir/old"), bytes(3, 100)).expect("a file");
    std::os::unix::fs::symlink("dir/old", cached.under.join("link")).expect("a link");
    cached.begin();
    is(&cached.under.join("link"), &bytes(3, 100));
    assert_eq!(fs::read_link(cached.under.join("link")).expect("a link"), Path::new("dir/old"));
    assert_eq!(cached.sh("ls dir").trim(), "old");
    // The same file by another way: what others change below is seen.
    fs::write(cached.below().join("dir/new"), "x").expect("a file");
    assert_eq!(cached.sh("cat dir/new"), "x");
}

#[test]
fn fsync_drain_has_the_file_system_below_have_it() {
    let Some(cached) = Cached::start("cfsync", &["--tier", "ram:64M"]) else { return };
    let mut file = File::create(cached.under.join("a")).expect("a file");
    file.write_all(&bytes(1, MIB)).expect("absorbed");
    file.sync_all().expect("drained");
    is(&cached.below().join("a"), &bytes(1, MIB));
}

#[test]
fn a_read_past_the_kernels_pages_knows_where_a_file_ends_that_the_kernel_gathers() {
    let Some(cached) = Cached::start("cgdirect", &["--tier", "ram:64M", "--gather"]) else {
        return;
    };
    let path = cached.under.join("a");
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let file = File::create(&path).expect("a file");
    let reader = OpenOptions::new().read(true).custom_flags(direct).open(&path).expect("a file");
    file.write_all_at(b"end", 2 * MIB as u64).expect("gathered");
    let mut found = [1; 4096];
    assert_eq!(reader.read_at(&mut found, MIB as u64).expect("read"), found.len());
    assert_eq!(found, [0; 4096], "a hole");
    assert_eq!(reader.read_at(&mut found, 2 * MIB as u64).expect("read"), 3);
    assert_eq!(found[..3], *b"end");
}

#[test]
fn fsync_memory_returns_at_once_and_a_new_daemon_goes_on() {
    let options = ["--tier", "ram:64M", "--fsync", "memory"];
    let Some(mut cached) = Cached::new("cmemory", &options) else { return };
    let slow = format!("slow={MIB}");
    cached.fault = Some(slow);
    cached.begin();
    let start = Instant::now();
    let mut file = File::create(cached.under.join("a")).expect("a file");
    file.write_all(&bytes(1, 16 * MIB)).expect("absorbed");
    file.sync_all().expect("in memory");
    assert!(start.elapsed() < Duration::from_secs(8), "it waited for {:?}", start.elapsed());
    cached.kill();
    drop(file);
    let killed = failure(&cached.output("status"));
    assert!(killed.contains("was killed") && killed.contains("recover"), "{killed}");
    cached.fault = None;
    cached.begin();
    is(&cached.under.join("a"), &bytes(1, 16 * MIB));
    cached.drain();
    is(&cached.below().join("a"), &bytes(1, 16 * MIB));
}

#[test]
fn recover_writes_below_what_a_killed_daemon_held() {
    let options = ["--tier", "ram:64M", "--fsync", "memory"];
    let Some(cached) = Cached::start("crecover", &options) else { return };
    fs::create_dir(cached.under.join("d")).expect("a folder");
    fs::write(cached.under.join("d/a"), bytes(1, MIB)).expect("absorbed");
    fs::write(cached.under.join("gone"), bytes(2, MIB)).expect("absorbed");
    fs::rename(cached.under.join("d"), cached.under.join("e")).expect("renamed");
    fs::remove_file(cached.under.join("gone")).expect("removed");
    let mut file = OpenOptions::new().append(true).open(cached.under.join("e/a")).expect("there");
    file.write_all(b"end").expect("absorbed");
    cached.kill();
    let recovered = cached.recover();
    assert_eq!(
        (&recovered["files"], recovered["stuck"].as_array().map(Vec::len)),
        (&1.into(), Some(0))
    );
    is(&cached.under.join("e/a"), &[&bytes(1, MIB)[..], b"end"].concat());
    assert!(!cached.under.join("gone").exists());
    // Nothing is left to recover.
    assert_eq!(cached.recover()["files"], 0);
}

#[test]
fn a_kill_at_any_point_of_a_drain_loses_nothing() {
    for point in ["carried", "noted"] {
        let options = ["--tier", "ram:64M", "--fsync", "memory"];
        let Some(mut cached) = Cached::new(&format!("ckill{point}"), &options) else { return };
        let held = flag(&cached, "held");
        cached.fault = Some(format!("{point}={}", held.display()));
        cached.begin();
        let file = File::create(cached.under.join("a")).expect("a file");
        file.write_all_at(&bytes(1, 6 * MIB), 0).expect("absorbed");
        wait_for("nothing was drained", || {
            fs::metadata(cached.below().join("a")).is_ok_and(|meta| meta.len() > 0)
        });
        // Newer bytes of what is on its way, unless the file is locked by a drain at its end.
        if point == "carried" {
            file.write_all_at(&bytes(9, MIB), 0).expect("absorbed");
        }
        cached.kill();
        drop(file);
        cached.recover();
        let mut expected = bytes(1, 6 * MIB);
        if point == "carried" {
            expected[..MIB].copy_from_slice(&bytes(9, MIB));
        }
        is(&cached.under.join("a"), &expected);
    }
}

#[test]
fn a_full_tier_has_writers_wait_and_take_turns() {
    let options = ["--tier", "ram:16M", "--host-free", "64M"];
    let Some(mut cached) = Cached::new("cfull", &options) else { return };
    cached.fault = Some(format!("slow={}", 64 * MIB));
    cached.begin();
    let writers: Vec<_> = (0..4u8)
        .map(|index| {
            let path = cached.under.join(format!("w{index}"));
            let mut shell = Command::new("dd");
            shell.args(["if=/dev/zero", "bs=1M", "count=24", "conv=fsync"]);
            shell.arg(format!("of={}", path.display())).stderr(std::process::Stdio::piped());
            (path, Instant::now(), shell.spawn().expect("dd"))
        })
        .collect();
    let mut took = Vec::new();
    for (path, start, child) in writers {
        let output = child.wait_with_output().expect("dd");
        assert!(output.status.success(), "{}", stderr(&output));
        took.push(start.elapsed().as_secs_f64());
        assert_eq!(fs::metadata(path).expect("there").len(), 24 * MIB as u64);
    }
    assert!(cached.count("waited") > 0, "16 MiB hold all of 96");
    assert_eq!(cached.count("through"), 0, "{}", cached.status());
}

#[test]
fn data_of_a_failing_file_system_stays_and_is_told() {
    let Some(mut cached) = Cached::new("ceio", &["--tier", "ram:64M"]) else { return };
    let failing = flag(&cached, "failing");
    cached.fault = Some(format!("eio={}", failing.display()));
    cached.begin();
    let path = cached.under.join("a");
    let mut file = OpenOptions::new().write(true).create_new(true).open(&path).expect("a file");
    file.write_all(&bytes(1, MIB)).expect("absorbed");
    assert_eq!(file.sync_all().expect_err("fsync").raw_os_error(), Some(EIO));
    assert_eq!(file.write_all(b"x").expect_err("the next write").raw_os_error(), Some(EIO));
    file.write_all(b"x").expect("it was told");
    let closed = cached.sh("exec 3>>a; echo y >&3 || true; exec 3>&- && echo well || echo badly");
    assert!(!closed.is_empty());
    assert_eq!(cached.status()["stuck"][0]["path"], "a");
    let said = failure(&cached.output("drain"));
    assert!(said.contains("a: ") && said.contains("stays in its tier"), "{said}");
    assert!(!cached.output("stop").status.success(), "it would lose data");
    is(&path, &fs::read(&path).expect("readable"));
    fs::remove_file(failing).expect("a file");
    file.sync_all().expect("all is well again");
    let expected = fs::read(&path).expect("readable");
    assert!(expected.starts_with(&bytes(1, MIB)));
    is(&cached.below().join("a"), &expected);
    assert_eq!(cached.status()["stuck"].as_array().map(Vec::len), Some(0));
}

#[test]
fn a_write_for_which_there_is_no_space_below_fails_at_once() {
    let Some(cached) = Cached::on("cnospc", Some("16M"), &["--tier", "ram:64M"]) else { return };
    cached.begin();
    let mut file = File::create(cached.under.join("a")).expect("a file");
    let mut written = 0;
    let error = loop {
        match file.write(&bytes(1, MIB)) {
            Ok(more) => written += more,
            Err(error) => break error,
        }
        assert!(written <= 16 * MIB, "more was acknowledged than fits");
    };
    assert_eq!(error.raw_os_error(), Some(ENOSPC));
    file.sync_all().expect("what was acknowledged fits");
    drop(file);
    assert_eq!(fs::metadata(cached.below().join("a")).expect("there").len(), written as u64);
    let (one, whole) = (bytes(1, MIB), fs::read(cached.below().join("a")).expect("readable"));
    assert!(whole.chunks(MIB).all(|part| part == &one[..part.len()]));
}

#[test]
fn the_space_that_others_take_is_told_later_and_nothing_is_lost() {
    let Some(mut cached) = Cached::on("clate", Some("24M"), &["--tier", "ram:64M"]) else { return };
    let failing = flag(&cached, "failing");
    cached.fault = Some(format!("eio={}", failing.display()));
    cached.begin();
    let mut file = File::create(cached.under.join("a")).expect("a file");
    file.write_all(&bytes(1, 16 * MIB)).expect("absorbed and promised");
    // Another node takes the space.
    let thief = cached.below().join("thief");
    let _ = File::create(&thief).expect("a file").write_all(&vec![1; 24 * MIB]);
    fs::remove_file(failing).expect("a file");
    assert_eq!(file.sync_all().expect_err("no space").raw_os_error(), Some(ENOSPC));
    is(&cached.under.join("a"), &bytes(1, 16 * MIB));
    fs::remove_file(thief).expect("a file");
    // Tries that began before then may have failed since, one of each thread that drains; each
    // failure is told once.
    const THREADS: usize = 4;
    let mut failures = 0;
    while let Err(error) = file.sync_all() {
        assert_eq!(error.raw_os_error(), Some(ENOSPC));
        failures += 1;
        assert!(failures <= THREADS, "there is space again");
    }
    drop(file);
    is(&cached.below().join("a"), &bytes(1, 16 * MIB));
}

#[test]
fn other_users_have_no_more_rights_than_below() {
    let Some(cached) = Cached::start("crights", &["--tier", "ram:64M", "--fsync", "memory"]) else {
        return;
    };
    let mine = fs::Permissions::from_mode(0o755);
    fs::set_permissions(&cached.world.0, mine).expect("mine");
    fs::set_permissions(&cached.under, fs::Permissions::from_mode(0o1777)).expect("mine");
    fs::write(cached.under.join("secret"), "root's").expect("absorbed");
    fs::set_permissions(cached.under.join("secret"), fs::Permissions::from_mode(0o600)).expect("");
    let nobody = |command: &str| {
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).current_dir(&cached.under).uid(65534).gid(65534);
        shell.output().expect("sh")
    };
    assert!(!nobody("cat secret").status.success());
    assert!(!nobody("echo x >> secret").status.success());
    assert!(!nobody("rm secret").status.success(), "the folder is sticky");
    assert!(!nobody("ls -R /dev/shm/kedge-cache-0").status.success(), "tiers are private");
    assert!(nobody("echo theirs > own && cat own").status.success());
    let meta = fs::metadata(cached.below().join("own")).expect("there");
    assert_eq!((meta.uid(), meta.gid()), (65534, 65534));
    // A program with its owner's rights loses them when somebody else changes it.
    fs::write(cached.under.join("suid"), "x").expect("absorbed");
    fs::set_permissions(cached.under.join("suid"), fs::Permissions::from_mode(0o6777)).expect("");
    assert!(nobody("echo y >> suid").status.success());
    assert_eq!(fs::metadata(cached.under.join("suid")).expect("there").mode() & 0o6000, 0);
}

#[test]
fn links_out_of_the_folder_are_the_programs_to_follow() {
    let Some(cached) = Cached::start("clinks", &["--tier", "ram:64M"]) else { return };
    let outside = cached.world.0.join("outside");
    fs::write(&outside, "before").expect("a file");
    std::os::unix::fs::symlink(&outside, cached.under.join("link")).expect("a link");
    fs::write(cached.under.join("link"), "after").expect("the program's own right");
    assert_eq!(fs::read_to_string(&outside).expect("there"), "after");
    assert_eq!(cached.count("absorbed"), 0, "that file is not in the folder");
}

#[test]
fn a_second_daemon_and_bad_tiers_are_refused() {
    let Some(mut cached) = Cached::start("ctwice", &["--tier", "ram:64M"]) else { return };
    let refused = failure(&cached.try_begin());
    assert!(refused.contains("is cached already"), "{refused}");
    let refused = failure(&cached.output("recover"));
    assert!(refused.contains("is cached already"), "{refused}");
    cached.stop();
    // Where others can put a link in the place of a tier's folder.
    let open = cached.world.0.join("open");
    fs::create_dir(&open).expect("a folder");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).expect("mine");
    let tier = format!("nvme:{}:8M", open.display());
    let other = Cached::new("copen", &["--tier", &tier]).expect("as before");
    let refused = failure(&other.try_begin());
    assert!(refused.contains("other users can replace"), "{refused}");
    for (tier, why) in [
        ("ram:1M", "too small"),
        ("ram:100000G", "does not fit"),
        ("nvme:/nothing/there:1G", "cannot use"),
    ] {
        let name = format!("ctier{}", why.len());
        cached = Cached::new(&name, &["--tier", tier]).expect("as before");
        let refused = failure(&cached.try_begin());
        assert!(refused.contains(why), "{refused}");
    }
}

#[test]
fn appends_of_many_processes_are_whole() {
    let Some(cached) = Cached::start("cappend", &["--tier", "ram:64M"]) else { return };
    cached
        .sh("for i in 1 2 3 4; do (for j in $(seq 200); do echo $i-$j >> log; done) & done; wait");
    let mut text = String::new();
    let mut file = File::open(cached.under.join("log")).expect("there");
    file.rewind().expect("a file");
    file.read_to_string(&mut text).expect("text");
    let mut lines: Vec<_> = text.lines().collect();
    lines.sort_unstable();
    lines.dedup();
    assert_eq!(lines.len(), 800);
}

#[test]
fn a_removed_file_lives_until_it_is_closed() {
    let Some(cached) = Cached::start("cunlink", &["--tier", "ram:64M"]) else { return };
    let path = cached.under.join("a");
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).open(&path).expect("a file");
    file.write_all_at(&bytes(1, MIB), 0).expect("absorbed");
    fs::remove_file(&path).expect("removed");
    file.write_all_at(b"still", 0).expect("open");
    let mut start = [0; 5];
    file.read_exact_at(&mut start, 0).expect("open");
    assert_eq!(&start, b"still");
    drop(file);
    wait_for("its memory is kept", || cached.status()["tiers"][0]["used"] == 0);
    assert_eq!(fs::read_dir(cached.below()).expect("the folder").count(), 0);
}

#[test]
fn other_nodes_see_what_was_closed() {
    // As long as nobody asks for something else.
    let options = ["--tier", "ram:64M", "--close", "drain"];
    let Some(cached) = Cached::start("cclose", &options) else { return };
    fs::write(cached.under.join("a"), bytes(1, 4 * MIB)).expect("absorbed");
    is(&cached.below().join("a"), &bytes(1, 4 * MIB));
}

#[test]
fn one_user_leaves_room_to_others() {
    let options = ["--tier", "ram:64M", "--per-user", "8M"];
    let Some(mut cached) = Cached::new("cuser", &options) else { return };
    cached.fault = Some(format!("slow={}", 16 * MIB));
    cached.begin();
    cached.sh("dd if=/dev/zero of=a bs=1M count=24 2>&1");
    assert!(cached.count("waited") > 0);
    let users = cached.status()["users"].clone();
    let held = users[0][1].as_u64().unwrap_or(0);
    assert!(held <= 8 << 20, "{users}");
}

#[test]
fn a_close_that_cannot_drain_tells_it_and_keeps_the_data() {
    let options = ["--tier", "ram:64M", "--close", "drain"];
    let Some(mut cached) = Cached::new("ccloseeio", &options) else { return };
    let failing = flag(&cached, "failing");
    cached.fault = Some(format!("eio={}", failing.display()));
    cached.begin();
    let closed = cached.sh("dd if=/dev/zero of=a bs=64k count=1 2>&1 && echo well || true");
    assert!(closed.contains("Input/output error") && !closed.contains("well"), "{closed}");
    fs::remove_file(failing).expect("a file");
    cached.drain();
    is(&cached.below().join("a"), &[0; 65536]);
}

#[test]
fn a_daemon_that_is_told_to_end_drains_and_unmounts() {
    let Some(cached) = Cached::start("cterm", &["--tier", "ram:64M"]) else { return };
    fs::write(cached.under.join("a"), bytes(1, MIB)).expect("absorbed");
    // Whoever has a file open does not keep it from ending.
    let file = File::create(cached.under.join("b")).expect("a file");
    file.write_all_at(&bytes(2, MIB), 0).expect("absorbed");
    cached.terminate();
    is(&cached.under.join("a"), &bytes(1, MIB));
    is(&cached.under.join("b"), &bytes(2, MIB));
    assert!(file.write_all_at(b"x", 0).is_err(), "nobody is there to write it");
    assert!(failure(&cached.output("status")).contains("no cache runs"));
}

#[test]
fn what_cannot_be_drained_at_the_end_is_kept() {
    let Some(mut cached) = Cached::new("ctermeio", &["--tier", "ram:64M"]) else { return };
    let failing = flag(&cached, "failing");
    cached.fault = Some(format!("eio={}", failing.display()));
    cached.begin();
    fs::write(cached.under.join("a"), bytes(1, MIB)).expect("absorbed");
    cached.terminate();
    assert!(failure(&cached.output("status")).contains("recover"));
    assert_eq!(cached.recover()["files"], 1);
    is(&cached.under.join("a"), &bytes(1, MIB));
}

#[test]
fn a_damaged_description_loses_nothing() {
    let Some(cached) = Cached::start("cdamaged", &["--tier", "ram:64M"]) else { return };
    fs::write(cached.under.join("a"), bytes(1, MIB)).expect("absorbed");
    let tier = cached.status()["tiers"][0]["folder"].as_str().expect("a folder").to_owned();
    cached.kill();
    fs::write(Path::new(&tier).with_file_name("cache.json"), "{").expect("damaged");
    let refused = failure(&cached.output("recover"));
    assert!(refused.contains("damaged") && refused.contains("nothing was touched"), "{refused}");
    cached.begin();
    cached.drain();
    is(&cached.below().join("a"), &bytes(1, MIB));
}

#[test]
fn a_tier_is_where_whoever_starts_the_cache_says() {
    let Some(cached) = Cached::new("crelative", &["--tier", "nvme:disk:64M"]) else { return };
    fs::create_dir(cached.world.0.join("disk")).expect("a folder");
    cached.begin();
    fs::write(cached.under.join("a"), bytes(1, MIB)).expect("absorbed");
    assert!(fs::read_dir(cached.world.0.join("disk")).expect("a folder").next().is_some());
    cached.drain();
    is(&cached.below().join("a"), &bytes(1, MIB));
}

#[test]
fn data_whose_file_is_gone_is_kept_until_it_is_given_up() {
    let Some(cached) = Cached::start("cgone", &["--tier", "ram:64M"]) else { return };
    for name in ["gone", "there"] {
        fs::write(cached.under.join(name), bytes(1, MIB)).expect("absorbed");
    }
    cached.kill();
    fs::remove_file(cached.below().join("gone")).expect("another node may");
    for _ in 0..2 {
        let told = failure(&cached.output("recover"));
        assert!(told.contains("gone: ") && told.contains("kept in"), "{told}");
    }
    let given_up = cached.world.output(&[
        "cache",
        "recover",
        "--discard",
        "--json",
        "--under",
        cached.under.to_str().expect("text"),
    ]);
    assert!(given_up.status.success(), "{}", stderr(&given_up));
    let told: serde_json::Value = serde_json::from_slice(&given_up.stdout).expect("JSON");
    assert_eq!(told["discarded"][0]["path"], "gone");
    assert_eq!(cached.recover()["files"], 0);
    is(&cached.under.join("there"), &bytes(1, MIB));
}

#[test]
fn a_write_beyond_the_longest_file_below_fails_at_once() {
    // The tier is in memory, where files may be longer.
    let Some(cached) = Cached::start("cfbig", &["--tier", "ram:64M"]) else { return };
    let file = File::create(cached.under.join("a")).expect("a file");
    let error = file.write_all_at(b"x", 1 << 62).expect_err("its drain would fail for ever");
    assert_eq!(error.raw_os_error(), Some(27), "{error}");
    file.write_all_at(b"x", 3 << 30).expect("a long file");
    cached.drain();
    assert_eq!(fs::metadata(cached.below().join("a")).expect("there").len(), (3 << 30) + 1);
}

#[test]
fn a_file_that_replaces_another_is_below_before_its_name() {
    let Some(mut cached) = Cached::new("creplace", &["--tier", "ram:64M"]) else { return };
    let failing = flag(&cached, "failing");
    cached.fault = Some(format!("eio={}", failing.display()));
    cached.begin();
    fs::write(cached.below().join("a"), "old").expect("a file");
    let (new, name) = (cached.under.join("new"), cached.under.join("a"));
    fs::write(&new, bytes(1, MIB)).expect("absorbed");
    let refused = fs::rename(&new, &name).expect_err("nothing of it is below");
    assert_eq!(refused.raw_os_error(), Some(EIO));
    is(&cached.below().join("a"), b"old");
    fs::rename(&new, cached.under.join("b")).expect("there is nothing to lose");
    fs::rename(cached.under.join("b"), &new).expect("there is nothing to lose");
    fs::remove_file(failing).expect("a file");
    fs::rename(&new, &name).expect("replaced");
    is(&cached.below().join("a"), &bytes(1, MIB));
    assert!(!new.exists());
}

#[test]
fn a_cache_ends_with_what_cannot_be_drained_if_it_is_told_to() {
    let Some(mut cached) = Cached::new("cleave", &["--tier", "ram:64M"]) else { return };
    let failing = flag(&cached, "failing");
    cached.fault = Some(format!("eio={}", failing.display()));
    cached.begin();
    fs::write(cached.under.join("a"), bytes(1, MIB)).expect("absorbed");
    let refused = failure(&cached.output("stop"));
    assert!(refused.contains("a: ") && refused.contains("stays in its tier"), "{refused}");
    let under = cached.under.to_str().expect("text");
    let ended = cached.world.output(&["cache", "stop", "--leave", "--json", "--under", under]);
    assert!(ended.status.success(), "{}", stderr(&ended));
    let told: serde_json::Value = serde_json::from_slice(&ended.stdout).expect("JSON");
    assert!(told["left"].as_str().is_some_and(|left| left.contains("a: ")), "{told}");
    assert_eq!(fs::metadata(cached.under.join("a")).expect("there").len(), 0, "it is no mount");
    assert_eq!(cached.recover()["files"], 1);
    is(&cached.under.join("a"), &bytes(1, MIB));
}

#[test]
fn what_a_person_has_looked_at_can_be_given_up() {
    let Some(cached) = Cached::start("cgiveup", &["--tier", "ram:64M"]) else { return };
    fs::write(cached.under.join("a"), bytes(1, MIB)).expect("absorbed");
    let tier = cached.status()["tiers"][0]["folder"].as_str().expect("a folder").to_owned();
    cached.kill();
    for entry in fs::read_dir(tier).expect("the tier").flatten() {
        if entry.file_name().len() == 16 {
            File::options().write(true).open(entry.path()).expect("a shadow").set_len(1).expect("");
        }
    }
    let under = cached.under.to_str().expect("text");
    let recover = |how: &str| cached.world.output(&["cache", "recover", how, "--under", under]);
    let told = failure(&recover("--discard"));
    assert!(told.contains("lacks bytes"), "{told}");
    let given_up = recover("--discard=all");
    assert!(given_up.status.success(), "{}", stderr(&given_up));
    assert_eq!(cached.recover()["files"], 0);
}
