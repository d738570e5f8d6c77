//! What processes share by ids, keys and names: System V IPC, POSIX shared memory, semaphores and
//! message queues.

mod support;

use std::ffi::CString;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::Command;
use support::survive::{as_an_ordinary_user, continues, random, remove_left_behind, rounds};
use support::{Folder, Running, alone, bring_back, build};

const STEPS: usize = 200;

/// `between` is done when the job is dead and not yet brought back, `after` when it has ended; both
/// know its nonce.
fn shared_survives(name: &str, source: &str, between: impl Fn(&str), after: impl Fn(&str)) {
    let _alone = alone();
    let folder = Folder::new(name);
    let program = build(&folder, source, &["-pthread", "-lrt"]);
    for round in 0..rounds() {
        let mut running = Running::start(Command::new(&program).arg(STEPS.to_string()));
        let before = running.lines(1 + random() % 100);
        assert!(!before[0].starts_with("wrong"), "{}", before[0]);
        let image = folder.path(&format!("image-{round}"));
        running.capture_and_kill(&image);
        let nonce = &before[0][..16];
        between(nonce);
        let (said, status) = bring_back(&image);
        continues(&before, &said, STEPS);
        assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}");
        after(nonce);
    }
}

#[test]
fn system_v_ipc_comes_back_under_its_ids() {
    remove_left_behind();
    shared_survives("sysv", "sysv.c", |_| remove_left_behind(), |_| {});
}

fn memory(nonce: &str) -> PathBuf {
    format!("/dev/shm/kedge-test-memory-{nonce}").into()
}

/// The queue is gone, a semaphore too, and the memory's name is somebody else's now. Where its
/// image took long to write, the program has removed them all itself, at its end.
fn replace_names(nonce: &str) {
    let queue = CString::new(format!("/kedge-test-queue-{nonce}")).unwrap();
    // SAFETY: the name lives through the call.
    let gone = unsafe { libc::mq_unlink(queue.as_ptr()) } == 0;
    assert!(gone || std::io::Error::last_os_error().kind() == ErrorKind::NotFound);
    let semaphore = std::fs::remove_file(format!("/dev/shm/sem.kedge-test-go-{nonce}"));
    assert!(semaphore.is_ok_and(|()| gone) || !gone);
    let other = memory("other");
    std::fs::write(&other, "another program's").unwrap();
    std::fs::rename(other, memory(nonce)).unwrap();
}

fn the_others_memory_is_aside(nonce: &str) {
    let aside = memory(&format!("{nonce}.kedge-aside-1"));
    assert_eq!(std::fs::read(&aside).unwrap(), b"another program's");
    std::fs::remove_file(aside).unwrap();
    let names = std::fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = names.filter(|name| name.to_string_lossy().contains(nonce)).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn what_posix_names_comes_back() {
    shared_survives("posix", "posix_ipc.c", replace_names, the_others_memory_is_aside);
}

#[test]
fn ordinary_users_can_do_all_that() {
    as_an_ordinary_user();
}
