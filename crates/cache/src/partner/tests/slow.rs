//! Partners that take bytes slowly, or not at all.

use super::*;
use crate::partner::link::SLOW;
use crate::partner::wire::Hello;
use std::io::Read;
use std::net::TcpListener;
use std::sync::atomic::AtomicBool;

/// How long a partner may take to answer in these tests.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// Listens as a partner that greets, and then takes so many bytes fifty times a second.
fn slow_partner(bytes: usize) -> PartnerAddress {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = PartnerAddress(listener.local_addr().expect("it listens").to_string());
    thread::spawn(move || {
        let mut kept = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let hello = Said::read(&mut stream).expect("a greeting");
            assert!(matches!(hello, Said::Hello(_)), "{hello:?}");
            Said::Done.write(&mut stream).expect("it listens");
            let mut some = vec![0; bytes];
            while bytes > 0 && stream.read(&mut some).is_ok_and(|count| count > 0) {
                thread::sleep(Duration::from_millis(20));
            }
            kept.push(stream);
        }
    });
    address
}

fn impatient(scratch: &Scratch, address: &PartnerAddress) -> Arc<Engine> {
    let mut engine = engine(scratch, address, "");
    let link = Arc::get_mut(&mut engine).and_then(|engine| engine.partner.as_mut());
    link.expect("nobody else has it").answer = REPLY_TIMEOUT;
    engine
}

#[test]
fn an_fsync_drains_where_the_partner_takes_bytes_slowly_or_none() {
    for bytes in [0, 4096] {
        let scratch = Scratch::new(&format!("partnerslow{bytes}"));
        let engine = impatient(&scratch, &slow_partner(bytes));
        begun(&engine);
        let handle = open(&engine, &scratch.below("a"));
        // More than the system keeps for a connection.
        let data = vec![7; 32 << 20];
        write(&engine, &handle, 0, &data);
        fsync(&engine, &handle);
        assert!(below(&scratch, "a") == data, "it is drained");
        let said = status(&engine);
        assert_eq!((said.connected, said.drained, said.why.as_deref()), (false, 1, Some(SLOW)));
        assert!(said.sent < data.len() as u64, "it did not go on to send");
    }
}

#[test]
fn who_waits_too_long_for_another_ends_the_connection() {
    let scratch = Scratch::new("partnerturn");
    let (_partner, address) = partner(&scratch, None);
    let engine = impatient(&scratch, &address);
    let link = begun(&engine);
    let handle = open(&engine, &scratch.below("a"));
    write(&engine, &handle, 0, b"a");
    // As one whose bytes the partner does not take.
    let mut turn = link.wire.wait();
    fsync(&engine, &handle);
    assert_eq!((below(&scratch, "a"), status(&engine).drained), (b"a".to_vec(), 1));
    let until = Instant::now() + REPLY_TIMEOUT;
    let told = link.with(&mut turn, until, |wire| wire.ask(&Said::Beat));
    drop(turn);
    assert_eq!((told, link.is_connected()), (None, false));
    assert_eq!(status(&engine).why.as_deref(), Some(SLOW));
    // It is there for all others again.
    reconnect(&engine);
    write(&engine, &handle, 0, b"b");
    fsync(&engine, &handle);
    assert_eq!((below(&scratch, "a"), status(&engine).drained), (b"a".to_vec(), 1));
}

#[test]
fn who_waits_too_long_beside_many_leaves_the_connection() {
    let scratch = Scratch::new("partnermany");
    let (_partner, address) = partner(&scratch, None);
    let engine = impatient(&scratch, &address);
    let link = begun(&engine);
    let handle = open(&engine, &scratch.below("a"));
    write(&engine, &handle, 0, b"a");
    let turn = link.wire.wait();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        // As if the partner answered others, each in its turn, and was told all by them.
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                *lock(&link.heard) = Some(Instant::now());
                link.answer_notes();
                thread::sleep(Duration::from_millis(5));
            }
        });
        fsync(&engine, &handle);
        over.store(true, Ordering::SeqCst);
    });
    assert_eq!((below(&scratch, "a"), status(&engine).drained), (b"a".to_vec(), 1));
    drop(turn);
    assert!(link.is_connected());
    beat(&engine);
}

#[test]
fn a_cache_waits_for_its_own_session_before_and_for_no_other() {
    let scratch = Scratch::new("partnerown");
    let (partner, address) = partner(&scratch, None);
    let engine = impatient(&scratch, &address);
    let link = begun(&engine);
    link.lose(&mut link.wire.wait(), &io::ErrorKind::ConnectionReset.into());
    let stream = std::net::TcpStream::connect(&address.0).expect("it listens");
    // A session that waits for its disk ends some time after its connection.
    let home = crate::spec::home_in(&kept(&scratch), &scratch.0.join("below"));
    let take = |hello: &Hello| partner.take_seat(&home, hello, &stream).expect("a seat");
    let own = take(&link.hello);
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(1500));
            drop(own);
        });
        reconnect(&engine);
    });
    link.lose(&mut link.wire.wait(), &io::ErrorKind::ConnectionReset.into());
    let _other = take(&Hello { token: "ab".into(), ..link.hello.clone() });
    let refused = engine.connect_partner(link).expect_err("it is another's");
    assert!(refused.to_string().contains("another cache, or a recovery"), "{refused}");
}
