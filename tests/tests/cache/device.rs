//! A cache's tier of device memory, on a software device: what moves there, and what survives.
use kedge_tests::cached::Cached;
use kedge_tests::host;
use kedge_tests::world::{failure, stderr, wait_for};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const MIB: usize = 1 << 20;
const TIERS: [&str; 6] = ["--tier", "ram:16M", "--tier", "gpu:64M", "--gpu", "soft"];
const EIO: i32 = 5;

fn bytes(first: u8, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 4096 % 251) as u8 ^ first).collect()
}

fn is(path: &Path, expected: &[u8]) {
    let found = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let differs = found.iter().zip(expected).position(|(a, b)| a != b);
    assert_eq!((found.len(), differs), (expected.len(), None), "{}", path.display());
}

/// A cache over a file system that is slow, so that what is held is not drained at once.
fn slow(name: &str, options: &[&str], speed: usize) -> Option<Cached> {
    let mut cached = Cached::new(name, &[&TIERS, options].concat())?;
    cached.fault = Some(format!("slow={speed}"));
    Some(cached)
}

/// What the tier of device memory holds.
fn on_device(cached: &Cached) -> u64 {
    let status = cached.status();
    assert_eq!(status["tiers"][1]["medium"], "gpu");
    status["tiers"][1]["used"].as_u64().expect("a number")
}

/// Where the holder's socket is.
fn socket(cached: &Cached) -> PathBuf {
    let status = cached.status();
    Path::new(status["tiers"][1]["folder"].as_str().expect("a folder")).join("holder")
}

/// The process that holds memory for a socket.
fn holder(socket: &Path) -> Option<rustix::process::Pid> {
    let line = UnixStream::connect(socket).ok()?;
    Some(rustix::net::sockopt::socket_peercred(&line).expect("a peer").pid)
}

fn kill(pid: rustix::process::Pid, socket: &Path) {
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it runs");
    wait_for("the holder is still there", || holder(socket).is_none());
}

#[test]
fn a_burst_that_host_memory_cannot_hold_goes_to_the_device() {
    let Some(cached) = slow("dburst", &["--host-free", "64M"], 4 * MIB) else { return };
    cached.begin();
    let (path, mut data) = (cached.under.join("a"), bytes(1, 40 * MIB));
    let mut file = OpenOptions::new().create_new(true).write(true).open(&path).expect("a file");
    file.write_all(&data).expect("absorbed");
    assert_eq!(cached.count("through"), 0, "nothing went below at once");
    assert!(on_device(&cached) >= 8 * MIB as u64, "{}", cached.status());
    is(&path, &data);
    // What lies there is written anew, in part.
    file.write_all_at(&bytes(7, 3 * MIB), 17 * MIB as u64 + 5).expect("absorbed");
    data[17 * MIB + 5..20 * MIB + 5].copy_from_slice(&bytes(7, 3 * MIB));
    is(&path, &data);
    drop(file);
    let moved = cached.count("moved");
    assert!(moved >= 8 * MIB as u64, "{moved}");
    let figures = cached.world.kedge(&["metrics"]).output().expect("kedge").stdout;
    let figures = String::from_utf8(figures).expect("text");
    assert!(figures.contains("kedge_cache_moved_bytes_total") && figures.contains("tier=\"gpu\""));
    let socket = socket(&cached);
    assert!(holder(&socket).is_some());
    cached.drain();
    is(&cached.below().join("a"), &data);
    assert_eq!(on_device(&cached), 0);
    cached.stop();
    is(&path, &data);
    wait_for("the holder is still there", || holder(&socket).is_none());
}

#[test]
fn device_memory_alone_brings_host_memory_with_it() {
    let tiers = ["--tier", "gpu:64M", "--gpu", "soft"];
    let Some(cached) = Cached::new("dalone", &tiers) else { return };
    let said = stderr(&cached.try_begin());
    assert!(said.contains("for tests alone"), "{said}");
    let status = cached.status();
    let tiers: Vec<_> = status["tiers"].as_array().expect("tiers").iter().collect();
    let of = |index: usize| (tiers[index]["medium"].as_str(), tiers[index]["limit"].as_u64());
    assert_eq!((of(1), tiers.len()), ((Some("gpu"), Some(64 << 20)), 2));
    assert_eq!(of(0).0, Some("ram"));
    cached.stop();
    for (options, why) in [
        (["--tier", "gpu:64M", "--gpu", "soft:2"], "one device"),
        (["--tier", "gpu:64M", "--gpu", "local"], "one device"),
        (["--tier", "gpu:1M", "--gpu", "soft"], "too small"),
        (["--tier", "gpu:64M", "--tier", "gpu:64M"], "one tier of device memory"),
    ] {
        let refused = Cached::new("drefused", &options).expect("mounts");
        let said = failure(&refused.try_begin());
        assert!(said.contains(why), "{said}");
    }
}

#[test]
fn a_device_that_cannot_be_had_is_told_and_leaves_nothing() {
    // As many devices are nowhere.
    let tiers = ["--tier", "gpu:64M", "--gpu", "local:63"];
    let Some(cached) = Cached::new("dnone", &tiers) else { return };
    let said = failure(&cached.try_begin());
    assert!(said.contains("device memory of local:63"), "{said}");
    assert_eq!(cached.recover()["files"], 0, "nothing was held");
}

#[test]
fn a_kill_at_any_point_of_a_move_loses_nothing() {
    for (point, recover) in [("put", false), ("placed", false), ("placed", true), ("none", true)] {
        let name = format!("dkill{point}{recover}");
        let options = ["--host-free", "64M", "--fsync", "drain"];
        let Some(mut cached) = slow(&name, &options, 2 * MIB) else { return };
        let held = cached.world.0.join("held");
        let fault = cached.fault.take().expect("a fault");
        cached.fault = Some(format!("{fault},{point}={}", held.display()));
        cached.begin();
        let file = File::create(cached.under.join("a")).expect("a file");
        let expected = bytes(3, 28 * MIB);
        let half = expected.len() / 2;
        file.write_all_at(&expected[..half], 0).expect("absorbed");
        file.write_all_at(&expected[half..], half as u64).expect("absorbed");
        wait_for("nothing moves", || cached.count("moved") > 0);
        // From now on every move is held; at `placed` with the file's lock.
        fs::write(&held, "").expect("a file");
        std::thread::sleep(std::time::Duration::from_millis(300));
        cached.kill();
        drop(file);
        let _ = fs::remove_file(&held);
        cached.fault = None;
        match recover {
            true => {
                let recovered = cached.recover();
                assert_eq!(recovered["stuck"].as_array().map(Vec::len), Some(0), "{recovered}");
                assert_eq!(recovered["lost"].as_array().map(Vec::len), Some(0), "{recovered}");
            }
            false => {
                cached.begin();
                is(&cached.under.join("a"), &expected);
                cached.drain();
            }
        }
        is(&cached.below().join("a"), &expected);
    }
}

#[test]
fn what_fsync_memory_acknowledged_outlives_the_holder() {
    let options = ["--host-free", "64M", "--fsync", "memory"];
    let Some(mut cached) = slow("dacked", &options, 8 * MIB) else { return };
    cached.begin();
    let mut file = File::create(cached.under.join("a")).expect("a file");
    file.write_all(&bytes(1, 24 * MIB)).expect("absorbed");
    wait_for("nothing moves", || cached.count("moved") > 0);
    file.sync_all().expect("in memory, or below");
    let socket = socket(&cached);
    kill(holder(&socket).expect("a holder"), &socket);
    wait_for("nobody has seen it", || cached.status()["tiers"][1]["limit"] == 0);
    is(&cached.under.join("a"), &bytes(1, 24 * MIB));
    // The cache goes on without it, and so does the next daemon, with another holder.
    file.write_all(b"more").expect("absorbed");
    cached.kill();
    drop(file);
    cached.fault = None;
    cached.begin();
    let expected = [&bytes(1, 24 * MIB)[..], b"more"].concat();
    is(&cached.under.join("a"), &expected);
    assert_eq!(cached.count("stuck_files"), 0);
    assert!(cached.status()["tiers"][1]["limit"] == 64 * MIB);
    cached.drain();
    is(&cached.below().join("a"), &expected);
}

#[test]
fn what_a_holder_takes_with_it_is_named_and_told() {
    let Some(mut cached) = slow("dgone", &["--host-free", "64M"], MIB) else { return };
    cached.begin();
    let path = cached.under.join("a");
    let mut file = File::create(&path).expect("a file");
    file.write_all(&bytes(1, 24 * MIB)).expect("absorbed");
    fs::write(cached.under.join("b"), "well").expect("absorbed");
    wait_for("nothing moves", || on_device(&cached) > 0);
    let device = socket(&cached);
    kill(holder(&device).expect("a holder"), &device);
    wait_for("nobody has seen it", || cached.count("stuck_files") > 0);
    let stuck = cached.status()["stuck"][0].clone();
    assert_eq!(stuck["path"], "a");
    assert!(stuck["why"].as_str().expect("why").contains("lost"), "{stuck}");
    assert_eq!(file.sync_all().expect_err("bytes are lost").raw_os_error(), Some(EIO));
    // A drain from there may have failed with it.
    wait_for("it was told, and the rest is below", || file.sync_all().is_ok());
    is(&cached.under.join("b"), b"well");
    // A daemon that finds another holder names it, too.
    drop(file);
    cached.stop();
    cached.begin();
    let path = cached.under.join("c");
    // Its end is no whole part, and stays in host memory.
    fs::write(&path, bytes(5, 26 * MIB)).expect("absorbed");
    wait_for("nothing moves anew", || on_device(&cached) > 0);
    cached.kill();
    kill(holder(&device).expect("a holder"), &device);
    cached.fault = None;
    cached.begin();
    assert_eq!(cached.status()["stuck"][0]["path"], "c");
    let read = || fs::read(&path).map(|bytes| bytes.len());
    assert_eq!(read().expect_err("bytes are lost").raw_os_error(), Some(EIO));
    File::open(&path).and_then(|file| file.sync_all()).expect_err("bytes are lost");
    assert_eq!(read().expect("fsync has told it"), 26 * MIB);
    cached.drain();
}

#[test]
fn a_daemon_names_what_was_lost_under_one_that_was_killed() {
    let Some(cached) = slow("dword", &["--host-free", "64M"], MIB) else { return };
    cached.begin();
    let path = cached.under.join("a");
    fs::write(&path, bytes(1, 24 * MIB)).expect("absorbed");
    wait_for("nothing moves", || on_device(&cached) > 0);
    let device = socket(&cached);
    kill(holder(&device).expect("a holder"), &device);
    wait_for("nobody has seen it", || cached.count("stuck_files") > 0);
    let read = || fs::read(&path).map(|bytes| bytes.len());
    for _ in 0..2 {
        cached.kill();
        cached.begin();
        assert_eq!(cached.status()["stuck"][0]["path"], "a");
        assert_eq!(fs::metadata(&path).expect("there").len(), 24 * MIB as u64);
        assert_eq!(read().expect_err("bytes are lost").raw_os_error(), Some(EIO));
    }
    cached.kill();
    let output = cached.output("recover");
    let said = failure(&output);
    assert!(said.contains("lost data of 1 files: a"), "{said}");
    assert!(cached.recover()["lost"].as_array().is_some_and(Vec::is_empty), "it is told once");
}

#[test]
fn a_recovery_names_what_a_holder_took_with_it() {
    let Some(cached) = slow("dlost", &["--host-free", "64M"], MIB) else { return };
    cached.begin();
    fs::write(cached.under.join("a"), bytes(1, 24 * MIB)).expect("absorbed");
    fs::write(cached.under.join("b"), "well").expect("absorbed");
    wait_for("nothing moves", || on_device(&cached) > 0);
    let device = socket(&cached);
    cached.kill();
    kill(holder(&device).expect("a holder"), &device);
    let output = cached.output("recover");
    let said = failure(&output);
    assert!(said.contains("lost data of 1 files: a"), "{said}");
    let recovered: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(recovered["lost"][0]["path"], "a");
    assert_eq!(fs::read(cached.under.join("b")).expect("below"), b"well");
    assert!(cached.recover()["lost"].as_array().is_some_and(Vec::is_empty), "it is told once");
}

/// What the device has that a cache shares with jobs.
const DEVICE: usize = 64 * MIB;

/// A cache whose device is shared with jobs.
fn shared(name: &str, options: &[&str], fault: &str) -> Option<Cached> {
    let mut cached = Cached::new(name, options)?;
    let ledger = cached.world.0.join("ledger");
    fs::create_dir(&ledger).expect("a folder");
    fs::write(ledger.join("bytes"), DEVICE.to_string()).expect("a file");
    (cached.ledger, cached.fault) = (Some(ledger), Some(fault.to_owned()));
    Some(cached)
}

/// A job that takes so many MiB of the device.
fn job(cached: &Cached, mib: usize) -> Command {
    let program = host("gpu_room.cu", "gpu_room", &["-arch=compute_75"]);
    let mut run = cached.world.kedge(&["run", "--gpu", "soft", "--"]);
    run.arg(program).arg(mib.to_string());
    run.env("KEDGE_SOFT_LEDGER", cached.ledger.as_ref().expect("a ledger"));
    run.stdout(Stdio::piped()).stderr(Stdio::piped());
    run
}

/// What a job printed.
fn said(output: std::io::Result<Output>) -> String {
    let output = output.expect("kedge");
    format!("{}{}", String::from_utf8_lossy(&output.stdout), stderr(&output))
}

#[test]
fn a_job_has_device_memory_that_the_cache_holds() {
    let tiers = ["--tier", "ram:64M", "--tier", "gpu:64M", "--gpu", "soft", "--gpu-free", "4M"];
    let options = [&tiers[..], &["--host-free", "64M"]].concat();
    let Some(cached) = shared("droom", &options, &format!("slow={}", 2 * MIB)) else { return };
    cached.begin();
    let expected = bytes(1, 48 * MIB);
    fs::write(cached.under.join("a"), &expected).expect("absorbed");
    wait_for("nothing moves", || on_device(&cached) >= 24 * MIB as u64);
    let said = said(job(&cached, 48).output());
    assert!(said.contains("has 3"), "{said}; {}", cached.status());
    assert!(cached.count("back") > 0, "{}", cached.status());
    is(&cached.under.join("a"), &expected);
    cached.drain();
    is(&cached.below().join("a"), &expected);
    assert_eq!(cached.count("stuck_files"), 0);
    // What can never be had is refused.
    let much = job(&cached, 80).output();
    let said = String::from_utf8(much.expect("kedge").stdout).expect("text");
    assert!(said.contains("cudaErrorMemoryAllocation after"), "{said}");
}

#[test]
fn other_programs_device_memory_is_not_touched() {
    let tiers = ["--tier", "ram:64M", "--tier", "gpu:64M", "--gpu", "soft", "--gpu-free", "40M"];
    let options = [&tiers[..], &["--host-free", "64M"]].concat();
    let Some(cached) = shared("dfree", &options, &format!("slow={}", 2 * MIB)) else { return };
    cached.begin();
    let expected = bytes(1, 56 * MIB);
    fs::write(cached.under.join("a"), &expected).expect("absorbed");
    wait_for("nothing moves", || on_device(&cached) > 0);
    wait_for("it does not rest", || {
        let device = &cached.status()["device"];
        device["keep"] == 40 * MIB && device["free"].as_u64() < Some(44 * MIB as u64)
    });
    let free = cached.status()["device"]["free"].as_u64().expect("a number");
    assert!(free >= 40 * MIB as u64, "{}", cached.status());
    assert!(on_device(&cached) <= (DEVICE - 40 * MIB) as u64);
    assert!(cached.status()["tiers"][1]["limit"].as_u64() <= Some((DEVICE - 40 * MIB) as u64));
    // A program that asks nobody takes of what is free: as much is free again.
    let ledger = cached.ledger.as_ref().expect("a ledger");
    // Of one that nobody has locked, others say that its process has ended.
    let file = File::create(ledger.join("other")).expect("a file");
    file.lock().expect("a lock");
    file.write_all_at(&(12 * MIB as u64).to_le_bytes(), 0).expect("a file");
    fs::rename(ledger.join("other"), ledger.join("of-other")).expect("a file");
    wait_for("it does not give way", || on_device(&cached) <= (DEVICE - 52 * MIB) as u64);
    wait_for("as much is free again", || {
        cached.status()["device"]["free"].as_u64() >= Some(40 * MIB as u64)
    });
    let figures = cached.world.kedge(&["metrics"]).output().expect("kedge").stdout;
    let figures = String::from_utf8(figures).expect("text");
    assert!(figures.contains("kedge_cache_device_free_bytes"), "{figures}");
    is(&cached.under.join("a"), &expected);
    drop(file);
}

#[test]
fn a_kill_while_the_cache_gives_way_loses_nothing_that_was_acknowledged() {
    for (name, of_holder) in [("dwayheld", true), ("dwaykilled", false)] {
        let tiers = ["--tier", "ram:64M", "--tier", "gpu:64M", "--gpu", "soft", "--gpu-free", "4M"];
        let options = [&tiers[..], &["--host-free", "64M", "--fsync", "memory"]].concat();
        let Some(mut cached) = shared(name, &options, "") else { return };
        let held = cached.world.0.join("held");
        cached.fault = Some(format!("slow={},back={}", 2 * MIB, held.display()));
        cached.begin();
        let (kept, lost) = (bytes(1, 20 * MIB), bytes(2, 40 * MIB));
        let acknowledged = File::create(cached.under.join("kept")).expect("a file");
        acknowledged.write_all_at(&kept, 0).expect("absorbed");
        acknowledged.sync_all().expect("in memory");
        // From now on every move back is held; fsync itself moves parts back.
        fs::write(&held, "").expect("a file");
        let file = File::create(cached.under.join("lost")).expect("a file");
        file.write_all_at(&lost, 0).expect("absorbed");
        wait_for("nothing moves", || on_device(&cached) >= 16 * MIB as u64);
        let device = socket(&cached);
        let holder = holder(&device).expect("a holder");
        let job = job(&cached, 48).spawn().expect("kedge");
        wait_for("nobody waits", || cached.status()["device"]["wanted"] != 0);
        // A part is on its way back.
        std::thread::sleep(std::time::Duration::from_millis(300));
        match of_holder {
            true => kill(holder, &device),
            false => cached.kill(),
        }
        fs::remove_file(&held).expect("a file");
        let said = said(job.wait_with_output());
        // What the holder had is the job's with its end.
        assert!(said.contains("has 3") || !of_holder, "{said}");
        match of_holder {
            true => {
                wait_for("nobody has seen it", || cached.count("stuck_files") > 0);
                assert_eq!(cached.status()["stuck"][0]["path"], "lost");
                file.sync_all().expect_err("bytes are lost");
                wait_for("it was told, and the rest is below", || file.sync_all().is_ok());
            }
            false => {
                cached.fault = None;
                drop((acknowledged, file));
                cached.begin();
                is(&cached.under.join("lost"), &lost);
                assert_eq!(cached.count("stuck_files"), 0);
            }
        }
        is(&cached.under.join("kept"), &kept);
        cached.drain();
        is(&cached.below().join("kept"), &kept);
    }
}
