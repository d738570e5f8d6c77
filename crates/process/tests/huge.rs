//! Huge pages come back as huge pages where a machine has them set aside, and as ordinary ones
//! where not. A program that has all that there are goes on with them while and after it is
//! captured.

mod support;

use kedge_left_out::{left_out, needs_root};
use kedge_process::{Options, RestartOptions};
use std::process::Command;
use support::alone::Alone;
use support::kernel::tells_writes;
use support::survive::continues;
use support::{Folder, Running, alone, bring_back_by, build, capture_by, kill};

const STEPS: usize = 120;
/// How often so many pages are asked for.
const TRIES: usize = 20;
const POOL: &str = "/proc/sys/vm/nr_hugepages";

/// Pages of 2 MiB that are set aside for a test, which has its turn meanwhile, and given back with
/// this.
struct Pool {
    before: usize,
    _turn: Option<Alone>,
}

impl Pool {
    /// So many, and no more that anybody could use.
    fn of(pages: usize) -> Option<Pool> {
        let turn = alone();
        // SAFETY: geteuid takes no arguments and only returns a number.
        if unsafe { libc::geteuid() } != 0 {
            needs_root("huge pages", "only root sets some aside");
            return None;
        }
        let Some(before) = number("HugePages_Total") else {
            left_out("huge pages", "this kernel has none");
            return None;
        };
        let free = number("HugePages_Free").unwrap_or(0) - number("HugePages_Rsvd").unwrap_or(0);
        let pool = Pool { before, _turn: Some(turn) };
        // What others have set aside and do not use would hide what is to be seen.
        if free > 0 || number("HugePages_Surp") != Some(0) {
            left_out("huge pages", &format!("{free} are set aside for others"));
            return None;
        }
        // The kernel may have to move what lies between free pages first.
        let all = Some(before + pages);
        let there = (0..TRIES).any(|_| {
            set(before + pages);
            number("HugePages_Total") == all
        });
        if !there {
            left_out("huge pages", &format!("no room for {pages}"));
            return None;
        }
        Some(pool)
    }

    fn give_back(&self) {
        set(self.before);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// A line of /proc/meminfo.
fn number(name: &str) -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

fn set(pages: usize) {
    std::fs::write(POOL, pages.to_string()).unwrap();
}

/// The program has `pages`; it comes back with them, or where they are gone without.
fn survives(kind: &str, pages: usize, gone: bool, options: impl FnOnce(Options) -> Options) {
    let Some(pool) = Pool::of(pages) else { return };
    let folder = Folder::new(&format!("huge-{kind}"));
    let program = build(&folder, "huge.c", &[]);
    let mut running = Running::start(Command::new(&program).args([kind, &STEPS.to_string()]));
    let before = running.lines(5);
    assert!(before.iter().all(|line| line.ends_with(" huge")), "{before:?}");
    let image = folder.path("image");
    let manifest = capture_by(options(Options::new(image.clone())));
    let on = running.lines(10);
    assert!(on.iter().all(|line| line.ends_with(" huge")), "{on:?}");
    kill(running, &manifest.processes);
    if gone {
        pool.give_back();
    }
    let mut notes = Vec::new();
    let (after, status) =
        bring_back_by(RestartOptions::new(image), |restarted| notes = restarted.notes.clone());
    continues(&before, &after, STEPS);
    let pages = if gone { " ordinary" } else { " huge" };
    // The program may have asked about its pages before it was captured, and print it only now.
    let asked_before = usize::from(gone);
    let other = after.iter().skip(asked_before).find(|line| !line.ends_with(pages));
    assert_eq!(other, None, "{kind}: {notes:?}");
    let told = notes.iter().any(|note| note.contains("ordinary pages"));
    assert_eq!(told, gone, "{kind}: {notes:?}");
    assert_eq!(libc::WEXITSTATUS(status), 7, "{kind}: status {status:#x}");
}

/// Kinds of memory, and the pages that the program needs for them.
const KINDS: [(&str, usize); 6] =
    [("private", 3), ("unreserved", 1), ("forked", 2), ("shared", 2), ("memfd", 4), ("segment", 2)];

#[test]
fn they_come_back() {
    for (kind, pages) in KINDS {
        survives(kind, pages, false, |options| options);
    }
}

#[test]
fn ordinary_ones_take_their_place() {
    for (kind, pages) in KINDS {
        survives(kind, pages, true, |options| options);
    }
}

/// The program has one page of a segment of eight, and the machine has two more.
#[test]
fn holes_of_a_segment_take_no_pages() {
    let Some(_pool) = Pool::of(3) else { return };
    let folder = Folder::new("huge-sparse");
    let program = build(&folder, "huge.c", &[]);
    let mut running = Running::start(Command::new(&program).args(["sparse", &STEPS.to_string()]));
    let before = running.lines(5);
    assert!(before.iter().all(|line| line.ends_with(" huge")), "{before:?}");
    assert_eq!(number("HugePages_Free"), Some(2));
    let manifest = capture_by(Options::new(folder.path("image")));
    assert_eq!(number("HugePages_Free"), Some(2));
    kill(running, &manifest.processes);
}

#[test]
fn they_come_back_beside_memory_that_is_written_ahead() {
    if !tells_writes() {
        return;
    }
    for (kind, pages) in KINDS {
        survives(kind, pages, false, |options| Options { ahead: Some(0), ..options });
    }
}
