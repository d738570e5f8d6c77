use super::*;
use crate::engine::tests::{Scratch, open, write};
use crate::faults::Faults;
use crate::journal::{Held, merge, replay};
use crate::spec::{Fsync, Medium};
use std::collections::HashMap;
use std::fs;

const TIERS: [(&str, Medium); 2] = [("ram", Medium::Ram), ("disk", Medium::Nvme)];

/// What the journals say, after a kill or, if `rebooted`, a power cut.
fn held(scratch: &Scratch, rebooted: bool) -> Vec<Held> {
    let under = scratch.0.join("below");
    let replays = TIERS.iter().enumerate().map(|(tier, (name, _))| {
        let home = crate::spec::home_in(&scratch.0.join(name), &under);
        let journal = fs::read(home.join("tier/journal")).expect("a journal");
        // What was in memory is gone.
        let journal = if rebooted && tier == 0 { &[] } else { &journal[..] };
        replay(journal, rebooted, &HashMap::new()).expect("of this version")
    });
    merge(replays.collect())
}

#[test]
fn a_journal_written_anew_has_what_a_failed_cut_left() {
    let scratch = Scratch::new("uncut");
    let mut engine = scratch.engine(&TIERS, Fsync::Nvme);
    let flag = scratch.0.join("lost");
    let faults = Faults::parse(&format!("lost={}", flag.display()));
    Arc::get_mut(&mut engine).expect("no one else has it").faults = faults;
    let file = open(&engine, &scratch.below("a"));
    write(&engine, &file, 0, &[1; 16384]);
    engine.fsync(&file).expect("on the disk");
    fs::write(&flag, "").expect("a file");
    let caller = Caller { user: 0, group: 0, process: 0 };
    engine.truncate(&file.file, caller, &file.below, 100).expect_err("a sync below failed");
    write(&engine, &file, 8192, &[2; 4096]);
    for _ in 0..2 {
        let all = held(&scratch, true);
        assert_eq!(all.len(), 1, "{all:?}");
        assert_eq!(all[0].parts.total(), 16384, "the file below may be empty after a power cut");
        // The newer bytes are in memory, and win where it is still there.
        let tiers: Vec<_> = held(&scratch, false)[0].parts.within(8192..12288).collect();
        assert_eq!(tiers, [(8192..12288, 0)]);
        engine.rewrite_journals().expect("journals");
    }
    // Once the disk below knows, they are forgotten.
    engine.finish_cut(&file.file, &file.below).expect("synced");
    engine.rewrite_journals().expect("journals");
    assert_eq!(held(&scratch, true)[0].parts.total(), 100);
}
