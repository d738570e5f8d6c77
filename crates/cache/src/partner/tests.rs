//! A cache's engine and its partner, over this machine's loopback.

mod bounds;
mod recoveries;
mod slow;

use super::link::ANSWER;
use super::wire::{Hello, VERSION};
use super::*;
use crate::adopt;
use crate::daemon::{Discard, recover_partner, recover_partner_with};
use crate::engine::tests::{Scratch, open, write};
use crate::faults::Faults;
use crate::file::Handle;
use crate::spec::{Fsync, Medium, PartnerAddress, memory_home};
use crate::tier::make_home;
use std::fs;
use std::net::TcpStream;
use std::path::PathBuf;

const RAM: [(&str, Medium); 1] = [("ram", Medium::Ram)];

/// A partner, which ends with the process.
fn partner(scratch: &Scratch, quota: Option<u64>) -> (Arc<Partner>, PartnerAddress) {
    let listen = "127.0.0.1:0".parse().expect("an address");
    let folder = scratch.0.join("partner");
    let spec = PartnerSpec { listen, folder, quota, keys: None };
    let partner = Partner::bind(spec).expect("a partner");
    let address = PartnerAddress(partner.address().expect("it listens").to_string());
    let own = partner.clone();
    thread::spawn(move || own.serve(|_| ()));
    (partner, address)
}

fn engine(scratch: &Scratch, address: &PartnerAddress, faults: &str) -> Arc<Engine> {
    let spec = scratch.spec(&RAM, Fsync::Partner);
    make_home(&memory_home(&spec.under)).expect("a folder");
    let link = Link::new(&spec, address).expect("a way");
    let mut engine = adopt::open(spec).expect("tiers");
    engine.faults = Faults::parse(faults);
    engine.partner = Some(link);
    Arc::new(engine)
}

/// The folder of this node in the partner's.
fn kept(scratch: &Scratch) -> PathBuf {
    let node = fs::read_to_string("/proc/sys/kernel/hostname").expect("a name");
    scratch.0.join("partner/_here").join(node.trim())
}

/// Recovers at the partner, once it has seen that the cache is gone.
fn recover(scratch: &Scratch) -> Result<adopt::Recovered, CacheError> {
    recover_with(scratch, "")
}

fn recover_with(scratch: &Scratch, faults: &str) -> Result<adopt::Recovered, CacheError> {
    let (begin, under) = (Instant::now(), scratch.0.join("below"));
    loop {
        match recover_partner_with(&under, &kept(scratch), None, Faults::parse(faults)) {
            Err(CacheError::Tier(why))
                if why.contains("connected") && begin.elapsed() < Duration::from_secs(20) =>
            {
                thread::sleep(Duration::from_millis(10));
            }
            other => return other,
        }
    }
}

fn status(engine: &Engine) -> PartnerStatus {
    engine.partner_status().expect("there is a partner")
}

fn below(scratch: &Scratch, name: &str) -> Vec<u8> {
    fs::read(scratch.below(name)).expect("there")
}

/// Has the daemon be gone, and the node's memory with it.
fn lose_node(scratch: &Scratch, engine: Arc<Engine>) {
    drop(engine);
    let _ = fs::remove_dir_all(memory_home(&scratch.0.join("below")));
    fs::remove_dir_all(scratch.0.join("ram")).expect("a tier");
}

fn begun(engine: &Arc<Engine>) -> &Link {
    engine.begin_partner().expect("a partner");
    engine.partner.as_ref().expect("a partner")
}

/// As the daemon does where the connection was lost.
fn reconnect(engine: &Engine) {
    let link = engine.partner.as_ref().expect("a partner");
    engine.connect_partner(link).expect("it is there");
}

fn beat(engine: &Engine) {
    let link = engine.partner.as_ref().expect("a partner");
    link.beat().expect("told").expect("done");
}

fn fsync(engine: &Arc<Engine>, handle: &Handle) {
    engine.fsync(handle).expect("acknowledged");
}

#[test]
fn what_fsync_acknowledged_survives_the_node() {
    let scratch = Scratch::new("partner");
    let (_partner, address) = partner(&scratch, None);
    let engine = engine(&scratch, &address, "");
    begun(&engine);
    let handle = open(&engine, &scratch.below("a"));
    let data: Vec<u8> = (0..9 << 20).map(|at| (at / 4096 % 251) as u8).collect();
    write(&engine, &handle, 5, &data);
    fsync(&engine, &handle);
    assert_eq!(below(&scratch, "a"), b"", "nothing is below");
    assert_eq!((status(&engine).holds, status(&engine).drained), (9 << 20, 0));
    write(&engine, &handle, 5, b"newer");
    fsync(&engine, &handle);
    assert_eq!(status(&engine).sent, (9 << 20) + 5, "what it has is not sent again");
    write(&engine, &handle, 5, b"never acknowledged");
    drop(handle);
    lose_node(&scratch, engine);
    let recovered = recover(&scratch).expect("recovered");
    assert_eq!((recovered.files, recovered.bytes, recovered.stuck), (1, 9 << 20, vec![]));
    let expected = [&[0; 5][..], b"newer", &data[5..]].concat();
    assert!(below(&scratch, "a") == expected);
    assert!(!kept(&scratch).exists(), "nothing is left");
}

#[test]
fn what_is_below_is_given_up() {
    let scratch = Scratch::new("partnerdrain");
    let (_partner, address) = partner(&scratch, None);
    let engine = engine(&scratch, &address, "");
    begun(&engine);
    let [a, b, gone] = ["a", "b", "gone"].map(|name| {
        let handle = open(&engine, &scratch.below(name));
        write(&engine, &handle, 0, name.as_bytes());
        fsync(&engine, &handle);
        handle
    });
    engine.drain_file(&a.file).expect("drained");
    fs::remove_file(scratch.below("gone")).expect("removed");
    engine.name_is_gone(gone.file.key, &Arc::new(fs::File::open(&scratch.0).expect("it").into()));
    assert_eq!(status(&engine).holds, 1);
    beat(&engine);
    // Another node has changed it since.
    fs::write(scratch.below("a"), "later").expect("written");
    drop((a, b, gone));
    lose_node(&scratch, engine);
    assert_eq!(recover(&scratch).expect("recovered").files, 1);
    assert_eq!((below(&scratch, "a"), below(&scratch, "b")), (b"later".to_vec(), b"b".to_vec()));
}

#[test]
fn a_file_is_shorter_where_it_was_cut() {
    let scratch = Scratch::new("partnercut");
    let (_partner, address) = partner(&scratch, None);
    let engine = engine(&scratch, &address, "");
    begun(&engine);
    let handle = open(&engine, &scratch.below("a"));
    write(&engine, &handle, 0, b"0123456789");
    fsync(&engine, &handle);
    let caller = crate::caller::Caller { user: 0, group: 0, process: 0 };
    engine.truncate(&handle.file, caller, &handle.below, 4).expect("cut");
    fsync(&engine, &handle);
    drop(handle);
    lose_node(&scratch, engine);
    recover(&scratch).expect("recovered");
    assert_eq!(below(&scratch, "a"), b"0123");
}

#[test]
fn a_connection_lost_at_any_message_loses_nothing_acknowledged() {
    // Without a partner, a file that it has is acknowledged late.
    let all: Vec<_> = (0..24).map(|messages| thread::spawn(move || lost_after(messages))).collect();
    let failed = all.into_iter().filter_map(|thread| thread.join().err()).count();
    assert_eq!(failed, 0);
}

fn lost_after(messages: u64) {
    let scratch = Scratch::new(&format!("partnerlost{messages}"));
    let (_partner, address) = partner(&scratch, None);
    let engine = engine(&scratch, &address, &format!("partner={messages}"));
    let _ = engine.begin_partner();
    let names = ["a", "b", "c"];
    let handles = names.map(|name| open(&engine, &scratch.below(name)));
    for (handle, name) in handles.iter().zip(names) {
        write(&engine, handle, 0, &[name.as_bytes(), b"old"].concat());
        fsync(&engine, handle);
        write(&engine, handle, 1, b"new");
        fsync(&engine, handle);
    }
    drop(handles);
    lose_node(&scratch, engine);
    let _ = recover(&scratch);
    for name in names {
        let expected = [name.as_bytes(), b"new"].concat();
        assert_eq!(below(&scratch, name), expected, "{name}, after {messages} messages");
    }
}

#[test]
fn a_partner_that_was_lost_learns_what_is_below() {
    let scratch = Scratch::new("partneragain");
    let (_partner, address) = partner(&scratch, None);
    let engine = engine(&scratch, &address, "");
    let link = begun(&engine);
    let handles = ["a", "b", "c"].map(|name| {
        let handle = open(&engine, &scratch.below(name));
        write(&engine, &handle, 0, name.as_bytes());
        fsync(&engine, &handle);
        handle
    });
    link.lose(&mut link.wire.wait(), &io::Error::other("a test"));
    engine.drain_file(&handles[0].file).expect("drained");
    write(&engine, &handles[1], 0, b"B");
    fsync(&engine, &handles[1]);
    assert_eq!(below(&scratch, "b"), b"B", "without a partner, fsync drains");
    assert!(!status(&engine).connected && status(&engine).drained == 1);
    reconnect(&engine);
    beat(&engine);
    assert_eq!(status(&engine).holds, 1);
    fs::write(scratch.below("a"), "later").expect("written");
    drop(handles);
    lose_node(&scratch, engine);
    assert_eq!(recover(&scratch).expect("recovered").files, 1);
    let all = ["a", "b", "c"].map(|name| below(&scratch, name));
    assert_eq!(all, [b"later".to_vec(), b"B".to_vec(), b"c".to_vec()]);
}

/// Writes "v0", which stands still on its way below until what is returned is called.
fn flying(scratch: &Scratch, engine: &Arc<Engine>, handle: &Arc<Handle>) -> impl FnOnce() + use<> {
    let hold = scratch.0.join("hold");
    fs::write(&hold, "").expect("written");
    write(engine, handle, 0, b"v0");
    let (own, file) = (engine.clone(), handle.file.clone());
    let drains = thread::spawn(move || own.drain_part(&file, 0, &mut Vec::new()).map(drop));
    while below(scratch, "a") != b"v0" {
        thread::sleep(Duration::from_millis(1));
    }
    move || {
        fs::remove_file(hold).expect("removed");
        drains.join().expect("it ends").expect("drained");
    }
}

#[test]
fn an_older_part_that_lands_leaves_the_partner_what_it_has() {
    for reconnects in [false, true] {
        let scratch = Scratch::new(&format!("partnerflies{reconnects}"));
        let (_partner, address) = partner(&scratch, None);
        let hold = scratch.0.join("hold").display().to_string();
        let engine = engine(&scratch, &address, &format!("carried={hold}"));
        let link = begun(&engine);
        let handle = open(&engine, &scratch.below("a"));
        let land = flying(&scratch, &engine, &handle);
        write(&engine, &handle, 0, b"v1");
        fsync(&engine, &handle);
        write(&engine, &handle, 0, b"v2");
        if reconnects {
            link.lose(&mut link.wire.wait(), &io::Error::other("a test"));
            reconnect(&engine);
        }
        land();
        beat(&engine);
        assert_eq!((status(&engine).holds, below(&scratch, "a")), (2, b"v0".to_vec()));
        drop(handle);
        lose_node(&scratch, engine);
        recover(&scratch).expect("recovered");
        assert_eq!(below(&scratch, "a"), b"v1");
    }
}

#[test]
fn a_part_that_lands_takes_what_is_older() {
    let scratch = Scratch::new("partnerlands");
    let (_partner, address) = partner(&scratch, None);
    let hold = scratch.0.join("hold").display().to_string();
    let engine = engine(&scratch, &address, &format!("carried={hold}"));
    begun(&engine);
    let handle = open(&engine, &scratch.below("a"));
    write(&engine, &handle, 0, b"v-");
    fsync(&engine, &handle);
    let land = flying(&scratch, &engine, &handle);
    write(&engine, &handle, 0, b"v1");
    land();
    beat(&engine);
    assert_eq!(status(&engine).holds, 0, "v0 is below, which is newer");
    drop(handle);
    lose_node(&scratch, engine);
    let _ = recover(&scratch);
    assert_eq!(below(&scratch, "a"), b"v0");
}

#[test]
fn what_the_partner_was_not_told_counts_when_the_file_is_known_anew() {
    for (connected, reconnects) in [(true, false), (false, false), (false, true)] {
        let scratch = Scratch::new(&format!("partnerknown{connected}{reconnects}"));
        let (_partner, address) = partner(&scratch, None);
        let engine = engine(&scratch, &address, "");
        let link = begun(&engine);
        let handle = open(&engine, &scratch.below("a"));
        write(&engine, &handle, 0, b"v1");
        fsync(&engine, &handle);
        if !connected {
            link.lose(&mut link.wire.wait(), &io::Error::other("a test"));
        }
        engine.drain_file(&handle.file).expect("drained");
        handle.file.lock().writers = 0;
        engine.let_go(&handle.file);
        assert!(engine.known(handle.file.key).is_none(), "it is forgotten");
        let again = open(&engine, &scratch.below("a"));
        if reconnects {
            reconnect(&engine);
        }
        write(&engine, &again, 0, b"v2");
        engine.drain_file(&again.file).expect("drained");
        fsync(&engine, &again);
        drop((handle, again));
        lose_node(&scratch, engine);
        let _ = recover(&scratch);
        assert_eq!(below(&scratch, "a"), b"v2", "connected: {connected}, {reconnects}");
    }
}

#[test]
fn a_partner_that_cannot_be_told_of_the_end_is_named() {
    let scratch = Scratch::new("partnerend");
    let nobody = PartnerAddress("127.0.0.1:1".into());
    let why = engine(&scratch, &nobody, "").end_partner().expect_err("nobody is there");
    assert!(why.contains("may keep"), "{why}");
}

#[test]
fn a_new_daemon_goes_on_and_another_boot_is_refused() {
    let scratch = Scratch::new("partnerboot");
    let (_partner, address) = partner(&scratch, None);
    let first = engine(&scratch, &address, "");
    begun(&first);
    let handle = open(&first, &scratch.below("a"));
    write(&first, &handle, 0, b"a");
    fsync(&first, &handle);
    drop((handle, first));
    let second = engine(&scratch, &address, "");
    begun(&second);
    assert_eq!((status(&second).holds, below(&scratch, "a")), (0, b"a".to_vec()));
    let handle = open(&second, &scratch.below("a"));
    write(&second, &handle, 0, b"b");
    fsync(&second, &handle);
    drop(handle);
    lose_node(&scratch, second);
    let third = engine(&scratch, &address, "");
    let refused = third.begin_partner().expect_err("it has what is nowhere else").to_string();
    assert!(refused.contains("recover --partner"), "{refused}");
    recover(&scratch).expect("recovered");
    assert_eq!(below(&scratch, "a"), b"b");
    third.begin_partner().expect("nothing is left there");
    third.end_partner().expect("told");
    assert!(!kept(&scratch).exists());
    lose_node(&scratch, third);
}

/// The partner hears nothing as long as what is newer than what it has is not below: a recovery
/// there would take what it has for the newest.
#[test]
fn a_daemon_that_cannot_drain_has_no_partner() {
    let scratch = Scratch::new("partnerstuck");
    let (_partner, address) = partner(&scratch, None);
    let first = engine(&scratch, &address, "");
    begun(&first);
    let handle = open(&first, &scratch.below("a"));
    write(&first, &handle, 0, b"older");
    fsync(&first, &handle);
    write(&first, &handle, 0, b"newer");
    drop((handle, first));
    let full = scratch.0.join("full");
    fs::write(&full, "").expect("a file");
    let second = engine(&scratch, &address, &format!("eio={}", full.display()));
    let refused = second.begin_partner().expect_err("not all is below").to_string();
    assert!(refused.contains("is to be below") && !status(&second).connected, "{refused}");
    fs::remove_file(&full).expect("it is there");
    begun(&second);
    assert_eq!((status(&second).holds, below(&scratch, "a")), (0, b"newer".to_vec()));
    second.end_partner().expect("told");
}

#[test]
fn a_full_partner_has_fsync_drain() {
    let scratch = Scratch::new("partnerfull");
    let (_partner, address) = partner(&scratch, Some(1 << 20));
    let engine = engine(&scratch, &address, "");
    begun(&engine);
    let (large, small) = (open(&engine, &scratch.below("a")), open(&engine, &scratch.below("b")));
    write(&engine, &large, 0, &[7; 2 << 20]);
    fsync(&engine, &large);
    assert_eq!(below(&scratch, "a").len(), 2 << 20);
    let said = status(&engine);
    assert!(said.connected && said.drained == 1 && said.why.expect("why").contains("no more room"));
    beat(&engine);
    write(&engine, &small, 0, b"b");
    fsync(&engine, &small);
    assert_eq!((below(&scratch, "b").len(), status(&engine).drained), (0, 1));
    drop((large, small));
    lose_node(&scratch, engine);
    recover(&scratch).expect("recovered");
    assert_eq!(below(&scratch, "b"), b"b");
}

#[test]
fn what_was_changed_below_since_is_not_overwritten() {
    let scratch = Scratch::new("partnernewer");
    let (_partner, address) = partner(&scratch, None);
    let engine = engine(&scratch, &address, "");
    begun(&engine);
    let handle = open(&engine, &scratch.below("a"));
    write(&engine, &handle, 0, b"older");
    fsync(&engine, &handle);
    drop(handle);
    lose_node(&scratch, engine);
    let home = crate::spec::home_in(&kept(&scratch), &scratch.0.join("below"));
    let long_ago = std::time::SystemTime::now() - Duration::from_secs(60);
    let under = scratch.0.join("below");
    let ended = || crate::home::take(&home, &under).is_ok();
    while !ended() {
        thread::sleep(Duration::from_millis(10));
    }
    let contact = fs::File::options().write(true).open(home.join("contact")).expect("a home");
    contact.set_modified(long_ago).expect("set");
    let recovered = recover(&scratch).expect("looked at");
    assert!(recovered.stuck[0].why.contains("changed below"), "{recovered:?}");
    assert_eq!(below(&scratch, "a"), b"");
    // Where it is not known when the partner was told last, all below may be newer.
    fs::remove_file(home.join("contact")).expect("it is there");
    let recovered = recover(&scratch).expect("looked at");
    assert!(recovered.stuck[0].why.contains("changed below"), "{recovered:?}");
    let given_up = recover_partner(&under, &kept(&scratch), Some(Discard::All));
    assert_eq!(given_up.expect("given up").discarded.len(), 1);
}

#[test]
fn hostile_ends_are_refused() {
    let scratch = Scratch::new("partnerhostile");
    let (listening, _) = partner(&scratch, None);
    let at = listening.address().expect("it listens");
    let say = |said: &[Said]| {
        let mut stream = TcpStream::connect(at).expect("it listens");
        stream.set_read_timeout(Some(ANSWER)).expect("set");
        for said in said {
            // It may have closed the connection by now.
            let _ = said.write(&mut stream);
        }
        let mut heard = Vec::new();
        while let Ok(said) = Said::read(&mut stream) {
            heard.push(said);
        }
        heard
    };
    let under = PathBuf::from("/scratch");
    let hello = |node: &str| {
        let (node, token) = (node.to_owned(), "1".into());
        Said::Hello(Hello { version: VERSION, under: under.clone(), node, token })
    };
    for node in ["..", "a/b", "", "../../x"] {
        assert!(matches!(&say(&[hello(node)])[..], [Said::Failed(_)]), "{node}");
    }
    assert_eq!(say(&[Said::Beat]), []);
    // What a partner says, and bytes of a file that has no name.
    assert_eq!(say(&[hello("n1"), Said::Note(Record::Write(1, 0, 9))]), [Said::Done]);
    let heard = say(&[hello("n2"), Said::Data(1, 0, vec![1]), Said::Sync(1), Said::Done]);
    assert!(matches!(&heard[..], [Said::Done, Said::Failed(_)]), "{heard:?}");
    let clean = Said::Note(Record::Clean(1, u64::MAX, u64::MAX));
    assert_eq!(say(&[hello("n3"), clean, Said::Beat, Said::Done]), [Said::Done, Said::Done]);
    let all = fs::read_dir(scratch.0.join("partner")).expect("a folder").count();
    assert_eq!(all, 1, "no folder but that of this machine");
}
