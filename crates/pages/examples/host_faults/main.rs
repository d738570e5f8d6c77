//! Measures who may serve a host's faults on managed memory, and what each way costs:
//! `cargo run --release -p kedge-pages --example host_faults`.
//!
//! Each way gets the same memory: a sparse file in memory, mapped twice. The program's view has no
//! pages; a served fault copies a page from elsewhere through the alias, as a fetch from a device
//! does, and then opens it in the view. What needs a right that is not there is left out by name.

mod fuse;
mod memory;
mod uffd;

use memory::{Memory, PAGE, pin};
use std::time::Instant;

/// Pages that are touched one by one.
const SINGLE: usize = 2000;
/// Pages that are read in a row: 64 MiB.
const ROW: usize = 16 << 10;
/// Largest read-ahead: 2 MiB.
const AHEAD: usize = 512;

/// A way to serve faults, set up for a memory.
trait Way {
    fn name(&self) -> String;
    fn memory(&self) -> &Memory;
    /// Makes the next faults fetch this many pages for each that is touched in order, doubling.
    fn read_ahead(&self, most: usize);
    /// Takes pages away from the view.
    fn invalidate(&self, first: usize, count: usize);
}

/// Sets a way up, or says why that cannot be.
type Make = fn() -> Result<Box<dyn Way>, String>;

fn main() {
    pin(0);
    println!("memcpy of 64 MiB: {:.2} GB/s", copy_speed());
    println!("{:<34} {:>9} {:>9} {:>10}  write(fd, page)", "way", "one page", "revoke", "64 MiB");
    let ways: [Make; 7] = [
        memory::segv,
        uffd::in_thread,
        || uffd::thread("sleeping, same core", Some(0), false, false),
        || uffd::thread("sleeping, other core", Some(1), false, false),
        || uffd::thread("spinning, other core", Some(1), true, false),
        || uffd::thread("sleeping, other core, kernel too", Some(1), false, true),
        fuse::way,
    ];
    for make in ways {
        match make() {
            Ok(way) => report(&*way),
            Err(why) => println!("left out: {why}"),
        }
    }
    revoke_scattered();
}

fn report(way: &dyn Way) {
    let memory = way.memory();
    way.read_ahead(1);
    // A stride that is prime to the number of pages: no order that anybody could foresee.
    let mut touches: Vec<f64> = (0..SINGLE)
        .map(|index| (index * 7919) % ROW)
        .map(|page| timed(|| memory.check(page)))
        .collect();
    touches.sort_by(f64::total_cmp);
    let revoke = timed(|| (0..SINGLE).for_each(|page| way.invalidate(page, 1))) / SINGLE as f64;
    way.invalidate(0, ROW);
    way.read_ahead(AHEAD);
    let row = timed(|| (0..ROW).for_each(|page| memory.check(page)));
    way.invalidate(0, ROW);
    way.read_ahead(1);
    println!(
        "{:<34} {:>6.2} µs {:>6.2} µs {:>5.2} GB/s  {}",
        way.name(),
        touches[SINGLE / 2],
        revoke,
        (ROW * PAGE) as f64 / row / 1e3,
        memory.written(3),
    );
}

/// Revoking 1 % of 4 GiB, a page here and there, from a view whose pages are there.
fn revoke_scattered() {
    let pages = 1 << 20;
    let memory = Memory::new(pages);
    let some = || (0..pages).step_by(100);
    let touch = || some().for_each(|page| memory.fill(page));
    touch();
    some().for_each(|page| memory.touch(page));
    let madvise = timed(|| some().for_each(|page| memory.drop_pages(page, 1)));
    println!("1 % of 4 GiB, {} pages: madvise(DONTNEED) {:.1} ms", some().count(), madvise / 1e3);
    some().for_each(|page| memory.touch(page));
    println!("  one madvise of all {:.1} ms", timed(|| memory.drop_pages(0, pages)) / 1e3);
    some().for_each(|page| memory.touch(page));
    let mut refused = None;
    let mprotect = timed(|| {
        refused = some().find(|&page| !memory.protect(page, 1, libc::PROT_READ));
    });
    match refused {
        Some(page) => println!("  mprotect: refused after {} pages", page / 100),
        None => println!("  mprotect {:.1} ms", mprotect / 1e3),
    }
}

fn copy_speed() -> f64 {
    let from = vec![7u8; ROW * PAGE];
    let mut to = vec![1u8; ROW * PAGE];
    let micros = timed(|| to.copy_from_slice(&from));
    assert_eq!(to[ROW * PAGE - 1], 7);
    (ROW * PAGE) as f64 / micros / 1e3
}

/// Microseconds that something takes.
fn timed(what: impl FnOnce()) -> f64 {
    let begin = Instant::now();
    what();
    begin.elapsed().as_secs_f64() * 1e6
}
