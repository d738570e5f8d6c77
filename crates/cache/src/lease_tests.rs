use super::*;
use crate::adopt;
use crate::engine::tests::{Scratch, open, write};
use crate::spec::{Fsync, Medium};
use kedge_cache_lease::{GRAIN, Page};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

const RAM: [(&str, Medium); 1] = [("ram", Medium::Ram)];

fn own() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// A program with a lease.
struct Program {
    lease: Lease,
    page: Page,
    shadow: File,
    used: u32,
}

impl Program {
    fn new(engine: &Arc<Engine>, handle: &Arc<Handle>, start: u64) -> io::Result<Program> {
        let lease = engine.lease(own(), handle, &Ask { start, length: 1 })?;
        let page = Page::open(&lease.folder)?;
        let shadow = File::options().write(true).open(lease.shadow_path())?;
        Ok(Program { lease, page, shadow, used: 0 })
    }

    fn slot(&self) -> &Slot {
        &self.page.slots()[self.lease.slot as usize]
    }

    fn begun(&self) -> Begun {
        Begun { epoch: self.lease.epoch }
    }

    /// Writes what comes next, and returns whether that counts.
    fn write(&mut self, data: &[u8]) -> bool {
        let at = self.lease.start + u64::from(self.used);
        assert!(u64::from(self.used) + data.len() as u64 <= self.lease.length);
        if !self.slot().stands_at(self.begun(), self.used) {
            return false;
        }
        self.shadow.write_all_at(data, at).expect("memory");
        let counts = self.slot().advance(self.begun(), self.used, data.len() as u32);
        self.used += if counts { data.len() as u32 } else { 0 };
        counts
    }
}

fn read(engine: &Engine, handle: &Handle) -> Vec<u8> {
    let mut bytes = vec![0; 1 << 20];
    let length = engine.read(handle, 0, &mut bytes).expect("it can be read");
    bytes.truncate(length);
    bytes
}

fn errno(result: io::Result<Program>) -> Option<Errno> {
    result.err().and_then(|error| Errno::from_io_error(&error))
}

/// What the tier and the promises of space below stand at.
fn taken(engine: &Engine) -> (u64, u64) {
    (engine.scheduler().limits.used(), engine.below.promised())
}

#[test]
fn what_a_program_writes_by_itself_is_read_and_drained() {
    let scratch = Scratch::new("lease");
    let engine = scratch.engine(&RAM, Fsync::Memory);
    let handle = open(&engine, &scratch.below("a"));
    let mut all = vec![b'm'; 4096];
    write(&engine, &handle, 0, &all);
    all.extend(b"by itself");
    let mut program = Program::new(&engine, &handle, 4096).expect("a lease");
    assert!(program.lease.length > MIN_LENGTH && taken(&engine).0 > MIN_LENGTH);
    assert!(!engine.leases_grew());
    assert!(program.write(b"by ") && program.write(b"itself"));
    assert!(engine.leases_grew() && !engine.leases_grew());
    assert_eq!(read(&engine, &handle), all);
    assert!(!program.write(b"late"), "whoever reads ends the lease");
    assert_eq!(taken(&engine), (8192, 4105), "what was not used is given back");
    assert_eq!(engine.status().leased, 9);
    engine.drain_file(&handle.file).expect("drained");
    assert_eq!(taken(&engine), (0, 0));
    assert_eq!(fs::read(scratch.below("a")).expect("a"), all);
}

#[test]
fn a_lease_that_nobody_uses_is_as_if_it_had_not_been() {
    let scratch = Scratch::new("leaseunused");
    let engine = scratch.engine(&RAM, Fsync::Memory);
    let handle = open(&engine, &scratch.below("a"));
    Program::new(&engine, &handle, 1 << 40).expect("a lease");
    assert!(!engine.end_leases(Duration::from_secs(60)) && taken(&engine).0 > 0);
    assert!(engine.end_leases(Duration::ZERO) && !engine.end_leases(Duration::ZERO));
    assert_eq!((taken(&engine), read(&engine, &handle).len()), ((0, 0), 0));
    assert_eq!(lock(&engine.leases).free.len(), SLOTS);
}

#[test]
fn the_next_daemon_finds_what_was_acknowledged() {
    let scratch = Scratch::new("leasekilled");
    let engine = scratch.engine(&RAM, Fsync::Memory);
    let (a, b) = (open(&engine, &scratch.below("a")), open(&engine, &scratch.below("b")));
    write(&engine, &a, 0, &[b'o'; 4096]);
    let (mut of_a, mut of_b) =
        (Program::new(&engine, &a, 4096).expect("a"), Program::new(&engine, &b, 4096).expect("b"));
    assert!(of_a.write(b" and new") && of_b.write(b"x"));
    // The daemon is killed, and ends nothing.
    std::mem::forget((a, b, engine));
    assert!(of_a.write(b"er"), "nobody has told it");
    let engine = scratch.engine(&RAM, Fsync::Memory);
    assert!(!of_a.write(b"!") && !of_b.write(b"!"));
    assert!(adopt::drain(&engine).stuck.is_empty());
    let expected = [&[b'o'; 4096], &b" and newer"[..]].concat();
    assert_eq!(fs::read(scratch.below("a")).expect("a"), expected);
    assert_eq!(fs::read(scratch.below("b")).expect("b"), [&[0; 4096], &b"x"[..]].concat());
    assert_eq!(taken(&engine), (0, 0));
}

#[test]
fn what_ended_before_a_kill_is_there_once() {
    let scratch = Scratch::new("leaseended");
    let engine = scratch.engine(&RAM, Fsync::Memory);
    let handle = open(&engine, &scratch.below("a"));
    let mut program = Program::new(&engine, &handle, 0).expect("a lease");
    assert!(program.write(b"first, second"));
    write(&engine, &handle, 0, b"FIRST");
    // The same slot, of another file.
    let other = open(&engine, &scratch.below("b"));
    let mut next = Program::new(&engine, &other, 0).expect("a lease");
    assert!(next.lease.slot == program.lease.slot && next.write(b"other"));
    engine.rewrite_journals().expect("journals");
    std::mem::forget((handle, other, engine));
    let engine = scratch.engine(&RAM, Fsync::Memory);
    assert!(adopt::drain(&engine).stuck.is_empty());
    assert_eq!(fs::read(scratch.below("a")).expect("a"), b"FIRST, second");
    assert_eq!(fs::read(scratch.below("b")).expect("b"), b"other");
}

#[test]
fn leases_are_for_the_ends_of_own_files() {
    let scratch = Scratch::new("leaserefused");
    let engine = scratch.engine(&RAM, Fsync::Memory);
    let handle = open(&engine, &scratch.below("a"));
    let ask = Ask { start: 0, length: 1 };
    let refused = |user, handle: &Arc<Handle>, ask: &Ask| {
        engine.lease(user, handle, ask).map_err(|error| Errno::from_io_error(&error)).err()
    };
    assert_eq!(refused(own() + 1, &handle, &ask), Some(Some(Errno::OPNOTSUPP)));
    write(&engine, &handle, 0, b"x");
    assert_eq!(refused(own(), &handle, &ask), Some(Some(Errno::AGAIN)), "that is written");
    fs::set_permissions(scratch.below("a"), std::os::unix::fs::PermissionsExt::from_mode(0o4755))
        .expect("a mode");
    let beyond = Ask { start: 4096, length: 1 };
    assert_eq!(refused(own(), &handle, &beyond), Some(Some(Errno::OPNOTSUPP)));
    let reads = File::open(scratch.below("a")).expect("a");
    let reads = Arc::new(Handle::new(handle.file.clone(), reads, own(), false));
    assert_eq!(refused(own(), &reads, &beyond), Some(Some(Errno::OPNOTSUPP)));
    let disk = [("disk", Medium::Nvme)];
    let scratch = Scratch::new("leasedisk");
    let engine = scratch.engine(&disk, Fsync::Nvme);
    let handle = open(&engine, &scratch.below("a"));
    assert_eq!(errno(Program::new(&engine, &handle, 0)), Some(Errno::OPNOTSUPP), "not on disks");
    assert_eq!(taken(&engine), (0, 0));
}

#[test]
fn leases_leave_room_and_give_way_to_writes() {
    let scratch = Scratch::new("leaseroom");
    let mut spec = scratch.spec(&RAM, Fsync::Memory);
    spec.tiers[0].bytes = 4 << 20;
    let engine = Arc::new(adopt::open(spec).expect("tiers"));
    let (a, b) = (open(&engine, &scratch.below("a")), open(&engine, &scratch.below("b")));
    let mut program = Program::new(&engine, &a, 0).expect("a lease");
    assert_eq!(program.lease.length, 1 << 20);
    assert!(program.write(b"kept"));
    write(&engine, &b, 0, &vec![7; (4 << 20) - 4096]);
    assert_eq!(engine.status().through, 0, "the lease's room was given to it");
    assert_eq!(errno(Program::new(&engine, &a, 4096)), Some(Errno::AGAIN), "it is full");
    assert_eq!((read(&engine, &a), taken(&engine).0), (b"kept".to_vec(), 4 << 20));
    engine.closing.store(true, Ordering::SeqCst);
    engine.drain_file(&b.file).expect("drained");
    assert_eq!(errno(Program::new(&engine, &a, 4096)), Some(Errno::AGAIN), "it ends");
}

#[test]
fn a_hostile_word_is_no_more_than_the_lease() {
    let scratch = Scratch::new("leasehostile");
    let engine = scratch.engine(&RAM, Fsync::Memory);
    let handle = open(&engine, &scratch.below("a"));
    let program = Program::new(&engine, &handle, 0).expect("a lease");
    let length = program.lease.length;
    assert!(program.slot().advance(program.begun(), 0, u32::MAX >> 1));
    assert_eq!(handle.file.lock().extents.end(), length);
    // What the shadow lacks is a hole, as after a truncate.
    engine.drain_file(&handle.file).expect_err("the shadow is shorter");
    assert_eq!(taken(&engine).0, length);
}

#[test]
fn any_order_of_leases_writes_cuts_drains_and_kills_keeps_the_bytes() {
    for seed in 1..40 {
        let scratch = Scratch::new(&format!("leasemodel{seed}"));
        let mut last = seed;
        let mut random = |below: u64| {
            last ^= last << 13;
            last ^= last >> 7;
            last ^= last << 17;
            last % below
        };
        let mut engine = scratch.engine(&RAM, Fsync::Memory);
        let mut handle = open(&engine, &scratch.below("a"));
        let mut programs: Vec<Program> = Vec::new();
        let mut model: Vec<u8> = Vec::new();
        for count in 0..150u8 {
            match random(10) {
                0 => {
                    let start = (model.len() as u64).next_multiple_of(GRAIN) + GRAIN * random(3);
                    programs.extend(Program::new(&engine, &handle, start));
                }
                1..=4 => {
                    let data = vec![count; 1 + random(9000) as usize];
                    for program in &mut programs {
                        let at = (program.lease.start + u64::from(program.used)) as usize;
                        if program.write(&data) {
                            model.resize(model.len().max(at + data.len()), 0);
                            model[at..at + data.len()].fill(count);
                        }
                    }
                }
                5 => {
                    let (at, data) = (random(model.len() as u64 + 5000), vec![count; 700]);
                    write(&engine, &handle, at, &data);
                    model.resize(model.len().max(at as usize + data.len()), 0);
                    model[at as usize..at as usize + data.len()].fill(count);
                }
                6 => {
                    let size = random(model.len() as u64 + 100);
                    let caller = crate::caller::Caller { user: own(), group: 0, process: 0 };
                    engine.truncate(&handle.file, caller, &handle.below, size).expect("cut");
                    model.resize(size as usize, 0);
                }
                7 => engine.drain_file(&handle.file).expect("drained"),
                8 => assert_eq!(read(&engine, &handle), model, "seed {seed}, step {count}"),
                _ if random(4) == 0 => {
                    std::mem::forget((handle, engine));
                    engine = scratch.engine(&RAM, Fsync::Memory);
                    handle = open(&engine, &scratch.below("a"));
                }
                _ => engine.shorten_journals(),
            }
        }
        engine.drain_file(&handle.file).expect("drained");
        let below = fs::read(scratch.below("a")).expect("a");
        assert_eq!((below.len(), below == model), (model.len(), true), "seed {seed}");
        assert_eq!(taken(&engine), (0, 0), "seed {seed}");
    }
}
