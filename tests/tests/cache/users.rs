//! What `kedge cache` lets several users do: their rights, their limits, and not to hold up each
//! other.
use kedge_left_out::left_out;
use kedge_tests::cached::Cached;
use kedge_tests::world::{stderr, wait_for};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const MIB: usize = 1 << 20;
const NOBODY: u32 = 65534;
const ENFILE: &str = "Too many open files";

/// Has anybody reach the folder, and write there.
fn share(cached: &Cached) {
    let all = |mode| fs::Permissions::from_mode(mode);
    fs::set_permissions(&cached.world.0, all(0o755)).expect("mine");
    fs::set_permissions(&cached.under, all(0o1777)).expect("mine");
}

/// A shell's command of somebody who has no rights, in the folder.
fn nobody(cached: &Cached, command: &str) -> Command {
    let mut shell = Command::new("bash");
    shell.args(["-c", command]).current_dir(&cached.under).uid(NOBODY).gid(NOBODY);
    shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    shell
}

fn said(cached: &Cached, command: &str) -> Output {
    nobody(cached, command).output().expect("bash")
}

fn well(cached: &Cached, command: &str) -> bool {
    said(cached, command).status.success()
}

/// An ACL as the kernel has it in an extended attribute: tag, rights and number of each entry.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, rights, number) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(rights.to_le_bytes());
        bytes.extend(number.to_le_bytes());
    }
    bytes
}

/// What the owner may, that user, the group, and others; of which a mask allows all.
fn acl_of(owner: u16, user: u16, group: u16, others: u16) -> Vec<u8> {
    const NONE: u32 = u32::MAX;
    let rest = [(4, group, NONE), (16, 7, NONE), (32, others, NONE)];
    acl(&[[(1, owner, NONE), (2, user, NOBODY)].as_slice(), &rest].concat())
}

fn set(path: &Path, name: &str, acl: &[u8]) {
    rustix::fs::setxattr(path, name, acl, rustix::fs::XattrFlags::empty()).expect("an ACL");
}

#[test]
fn acls_of_the_folder_below_are_heeded() {
    let Some(cached) = Cached::new("uacl", &["--tier", "ram:64M"]) else { return };
    share(&cached);
    for name in ["open", "closed"] {
        fs::create_dir(cached.under.join(name)).expect("a folder");
        fs::write(cached.under.join(name).join("file"), "x").expect("a file");
    }
    let access = "system.posix_acl_access";
    // By its bits, nobody may enter the one, and anybody the other.
    fs::set_permissions(cached.under.join("open"), fs::Permissions::from_mode(0o700)).expect("");
    set(&cached.under.join("open"), access, &acl_of(7, 5, 0, 0));
    set(&cached.under.join("closed"), access, &acl_of(7, 0, 5, 5));
    cached.begin();
    assert!(well(&cached, "cat open/file"), "the ACL lets them in");
    assert!(!well(&cached, "stat closed/file"), "the ACL keeps them out");
    // One that is set here counts as well.
    fs::write(cached.under.join("secret"), "x").expect("absorbed");
    fs::set_permissions(cached.under.join("secret"), fs::Permissions::from_mode(0o600)).expect("");
    assert!(!well(&cached, "cat secret"));
    set(&cached.under.join("secret"), access, &acl_of(6, 4, 0, 0));
    assert!(well(&cached, "cat secret") && !well(&cached, "echo x >> secret"));
    // A default ACL counts for what is made, in place of the umask.
    set(&cached.under.join("open"), "system.posix_acl_default", &acl_of(7, 6, 0, 0));
    cached.sh("umask 077; echo x > open/new; mkdir open/folder; echo x > plain");
    assert!(well(&cached, "cat open/new && echo y >> open/new"));
    let mode = |name: &str| fs::metadata(cached.below().join(name)).expect("there").mode() & 0o777;
    assert_eq!((mode("open/new"), mode("open/folder"), mode("plain")), (0o660, 0o770, 0o600));
}

#[test]
fn members_of_a_group_keep_its_bit() {
    let Some(cached) = Cached::start("ugroup", &["--tier", "ram:64M"]) else { return };
    share(&cached);
    fs::write(cached.under.join("a"), "x").expect("absorbed");
    chown(cached.under.join("a"), Some(NOBODY), Some(4242)).expect("root may");
    let mut chmod = Command::new("setpriv");
    chmod.args(["--reuid=65534", "--regid=65534", "--groups=4242", "chmod", "2755", "a"]);
    assert!(chmod.current_dir(&cached.under).status().expect("setpriv").success());
    assert_eq!(fs::metadata(cached.below().join("a")).expect("there").mode() & 0o7777, 0o2755);
    // Whoever is not a member does not get it.
    assert!(well(&cached, "chmod 2755 a"));
    assert_eq!(fs::metadata(cached.below().join("a")).expect("there").mode() & 0o7777, 0o755);
}

/// A file system below of which a half is root's alone. `None` where this machine makes none.
fn with_reserve(name: &str, options: &[&str]) -> Option<Cached> {
    let mut cached = Cached::new(name, options)?;
    let image = cached.world.0.join("image");
    File::create(&image).and_then(|file| file.set_len(16 << 20)).expect("a file");
    let make = Command::new("mkfs.ext4").args(["-q", "-m", "50"]).arg(&image).status();
    let mount =
        || Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&cached.under).status();
    if !make.is_ok_and(|made| made.success()) || !mount().is_ok_and(|done| done.success()) {
        left_out("a reserve of root's below", "it takes mkfs.ext4 and loop devices");
        return None;
    }
    cached.mounted_below();
    share(&cached);
    Some(cached)
}

#[test]
fn what_users_write_is_written_below_as_their_own() {
    let options = ["--tier", "ram:64M", "--close", "drain"];
    let Some(cached) = with_reserve("ureserve", &options) else { return };
    cached.begin();
    let written = said(&cached, "dd if=/dev/zero of=a bs=64k count=192");
    assert!(stderr(&written).contains("No space left"), "root's reserve was used");
    let free = rustix::fs::statvfs(cached.below()).expect("a file system");
    let reserve = (free.f_bfree - free.f_bavail) * free.f_frsize;
    assert!(reserve > 4 << 20, "{reserve} bytes of root's are left");
    assert!(!well(&cached, "rm a; fallocate -l 12M b"), "root's reserve was set aside");
}

#[test]
fn nobody_waits_for_another_users_slow_files() {
    let options = ["--tier", "ram:64M", "--drain-threads", "24"];
    let Some(mut cached) = Cached::new("uslow", &options) else { return };
    share(&cached);
    let held = cached.world.0.join("held");
    fs::write(&held, "").expect("a file");
    cached.fault = Some(format!("carried={}", held.display()));
    cached.begin();
    // Each file has a part on its way below that does not land, and somebody who waits for that.
    assert!(well(&cached, "for i in $(seq 24); do echo x > f$i; done"));
    let there = |number| fs::metadata(cached.below().join(format!("f{number}")));
    wait_for("not all is on its way", || {
        (1..25).all(|number| there(number).is_ok_and(|meta| meta.len() == 2))
    });
    let command = "for i in $(seq 24); do truncate -s 0 f$i & done; wait";
    let mut theirs = nobody(&cached, command).spawn().expect("bash");
    wait_for("nothing waits for that", || cached.count("below") >= 24);
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create_new(true);
    let file = options.open(cached.under.join("mine")).expect("a file");
    file.write_all_at(&[7; MIB], 0).expect("absorbed");
    let mut byte = [0];
    file.read_exact_at(&mut byte, 0).expect("readable");
    file.set_len(4096).expect("shorter");
    fs::rename(cached.under.join("mine"), cached.under.join("other")).expect("renamed");
    assert_eq!(fs::metadata(cached.under.join("other")).expect("there").len(), 4096);
    assert!(cached.count("files") > 0);
    assert!(theirs.try_wait().expect("bash").is_none(), "they were to wait");
    fs::remove_file(held).expect("a file");
    assert!(theirs.wait().expect("bash").success());
}

#[test]
fn one_users_open_files_leave_descriptors_to_others() {
    let Some(mut cached) = Cached::new("ufiles", &["--tier", "ram:64M"]) else { return };
    share(&cached);
    cached.fault = Some("descriptors=400".into());
    cached.begin();
    fs::write(cached.under.join("a"), "x").expect("absorbed");
    let opened = said(&cached, "for i in $(seq 200); do exec {f}<a; done");
    assert!(stderr(&opened).contains(ENFILE), "{}", stderr(&opened));
    // What ended has given them back.
    let some = "for i in $(seq 50); do exec {f}<a; done; cat a";
    wait_for("the user's descriptors are not free again", || well(&cached, some));
    // Of folders as well; and the daemon has some left for others meanwhile.
    let held = "for i in $(seq 90); do exec {f}<.; done; touch ready; sleep 1000";
    let mut theirs = nobody(&cached, held).spawn().expect("bash");
    wait_for("nothing was opened", || cached.under.join("ready").exists());
    let files: Vec<_> = (0..60).map(|_| File::open(cached.under.join("a"))).collect();
    assert!(files.iter().all(Result::is_ok));
    theirs.kill().expect("bash");
    theirs.wait().expect("bash");
}

#[test]
fn files_that_the_kernel_remembers_do_not_use_up_descriptors() {
    let Some(mut cached) = Cached::new("unodes", &["--tier", "ram:64M"]) else { return };
    for number in 0..1500 {
        fs::write(cached.under.join(format!("f{number}")), "x").expect("a file");
    }
    cached.fault = Some("descriptors=2000".into());
    cached.begin();
    let kept = File::open(cached.under.join("f0")).expect("there");
    assert_eq!(cached.sh("stat -c %s f* | sort | uniq -c | tr -d ' '").trim(), "15001");
    let descriptors = format!("/proc/{}/fd", cached.count("pid"));
    wait_for("the kernel still knows all", || {
        fs::read_dir(&descriptors).expect("the daemon").count() < 1100
    });
    let mut byte = [0];
    kept.read_exact_at(&mut byte, 0).expect("it is open");
    assert_eq!(cached.sh("cat f0 f1499"), "xx");
}

#[test]
fn large_folders_are_listed_as_they_are() {
    let Some(cached) = Cached::new("ularge", &["--tier", "ram:64M"]) else { return };
    for number in 0..3000 {
        fs::write(cached.under.join(format!("file-{number}")), "").expect("a file");
    }
    cached.begin();
    let names = |dir: &Path| {
        let entries = fs::read_dir(dir).expect("a folder");
        let mut names: Vec<_> = entries.map(|entry| entry.expect("a name").file_name()).collect();
        names.sort();
        names
    };
    assert!(names(&cached.under) == names(&cached.below()));
    assert_eq!(cached.sh("rm file-*; ls | wc -l").trim(), "0");
}

#[test]
fn appending_is_what_the_descriptor_says_by_now() {
    let Some(cached) = Cached::start("uappend", &["--tier", "ram:64M"]) else { return };
    let file = OpenOptions::new().append(true).create(true).open(cached.under.join("a"));
    let file = file.expect("a file");
    file.write_all_at(b"12345678", 0).expect("absorbed");
    rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::empty()).expect("an open file");
    file.write_all_at(b"abcd", 0).expect("absorbed");
    rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::APPEND).expect("an open file");
    file.write_all_at(b"end", 0).expect("absorbed");
    assert_eq!(fs::read(cached.under.join("a")).expect("there"), b"abcd5678end");
}
