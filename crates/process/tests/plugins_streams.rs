//! The streams that a job was started with are bound to those of the restart, each to its own.

mod plugins_support;

use kedge_process::plugins::{RecreateOptions, Survey, SurveyOptions};
use plugins_support::Folder;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::fstat;
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn terminal() -> (OwnedFd, OwnedFd) {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = openpt(flags).unwrap();
    rustix::pty::unlockpt(&master).unwrap();
    let slave = ioctl_tiocgptpeer(&master, flags).unwrap();
    (master, slave)
}

/// A program with `stream` as all three of its streams, and once more as descriptor 10.
fn program(stream: &OwnedFd) -> Ended {
    let copy = || stream.try_clone().unwrap();
    let mut command = Command::new("sleep");
    command.arg("60").stdin(copy()).stdout(copy()).stderr(copy());
    // SAFETY: between fork and exec the closure makes one system call, dup2, which takes numbers.
    unsafe {
        command.pre_exec(|| match libc::dup2(1, 10) {
            10 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let program = Ended(command.spawn().unwrap());
    // While it is loaded, it opens and closes files.
    let sleeps = format!("{} ", libc::SYS_clock_nanosleep);
    let begin = Instant::now();
    let call = || std::fs::read_to_string(format!("/proc/{}/syscall", program.0.id()));
    while !call().is_ok_and(|call| call.starts_with(&sleeps)) {
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", call());
        std::thread::sleep(Duration::from_millis(1));
    }
    program
}

#[test]
fn a_terminal_that_was_all_three_streams_falls_apart() {
    let (_master, slave) = terminal();
    let program = program(&slave);
    let pid = program.0.id() as i32;
    let options = SurveyOptions { streams: [Some(slave.as_fd()); 3], ..SurveyOptions::default() };
    let folder = Folder::new();
    let saved = Survey::of(&[pid], &options).unwrap().save(&folder.0).unwrap();
    drop(program);

    let (input, other) = rustix::pipe::pipe().unwrap();
    let error = std::fs::File::create(folder.0.join("errors")).unwrap();
    let new = [input.as_fd(), other.as_fd(), error.as_fd()];
    let streams = new.map(Some);
    let folder = folder.0.clone();
    let options = RecreateOptions { folder, streams, ..RecreateOptions::default() };
    let made = saved.recreate(&options).unwrap();
    let at = |fd: i32| {
        let slot = saved.slots().iter().find(|slot| slot.fd == fd).unwrap();
        fstat(&made.descriptors[slot.description as usize]).unwrap().st_ino
    };
    for (fd, stream) in new.iter().enumerate() {
        assert_eq!(at(fd as i32), fstat(stream).unwrap().st_ino, "stream {fd}");
    }
    // What is no stream is the terminal, or nothing where the restart has none.
    assert!((0..3).all(|fd| at(10) != at(fd)));
}

#[test]
fn a_terminal_outside_that_was_no_stream_is_the_terminal_of_the_restart() {
    let (_master, slave) = terminal();
    let program = program(&slave);
    let folder = Folder::new();
    let survey = Survey::of(&[program.0.id() as i32], &SurveyOptions::default()).unwrap();
    let saved = survey.save(&folder.0).unwrap();
    let (_other, now) = terminal();
    let streams = [Some(now.as_fd()); 3];
    let folder = folder.0.clone();
    let options = RecreateOptions { folder, streams, ..RecreateOptions::default() };
    let made = saved.recreate(&options).unwrap();
    for slot in saved.slots().iter().filter(|slot| matches!(slot.fd, 0..3 | 10)) {
        let found = fstat(&made.descriptors[slot.description as usize]).unwrap();
        assert_eq!(found.st_rdev, fstat(&now).unwrap().st_rdev, "descriptor {}", slot.fd);
    }
}

#[test]
fn a_stream_that_is_not_there_any_more_is_nothing() {
    let (output, _input) = rustix::pipe::pipe().unwrap();
    let program = program(&output);
    let options =
        SurveyOptions { streams: [Some(output.as_fd()), None, None], ..SurveyOptions::default() };
    let folder = Folder::new();
    let survey = Survey::of(&[program.0.id() as i32], &options).unwrap();
    let saved = survey.save(&folder.0).unwrap();
    let options = RecreateOptions { folder: folder.0.clone(), ..RecreateOptions::default() };
    let made = saved.recreate(&options).unwrap();
    let slot = saved.slots().iter().find(|slot| slot.fd == 0).unwrap();
    let null = rustix::fs::stat("/dev/null").unwrap();
    assert_eq!(fstat(&made.descriptors[slot.description as usize]).unwrap().st_rdev, null.st_rdev);
}
