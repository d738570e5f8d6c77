//! Records: with rustls at the other end, and changed, lost and repeated on their way.

use crate::handshake::{client_config, server_config};
use crate::testing::{LIMIT, Pair, Random, connection, name};
use crate::verify::Verifier;
use crate::{Opener, RecordError, Sealer, Secrets, TrafficKey, accept, connect};
use rustls::pki_types::ServerName;
use rustls::{CipherSuite, ClientConnection, ServerConnection, StreamOwned};
use std::io::{Read, Write};
use std::sync::Arc;
use std::thread;

const SUITES: [CipherSuite; 2] =
    [CipherSuite::TLS13_AES_256_GCM_SHA384, CipherSuite::TLS13_CHACHA20_POLY1305_SHA256];

/// Returns the ends of one direction, from a record on.
fn ends(suite: CipherSuite, sequence: u64) -> (Sealer, Opener) {
    let key = || TrafficKey { key: [7; 32], iv: [9; 12], sequence };
    let secrets = || Secrets { suite: suite.into(), send: key(), receive: key() };
    (secrets().records().unwrap().0, secrets().records().unwrap().1)
}

/// Returns bytes of which none is where another might be.
fn text(len: usize) -> Vec<u8> {
    (0..len as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// One of the two ways of opening what arrives.
type Open = fn(&mut Opener, &[u8], &mut Vec<u8>) -> Result<bool, RecordError>;
const WAYS: [Open; 2] =
    [Opener::open, |opener, arrived, out| opener.open_in_place(&mut arrived.to_vec(), out)];

#[test]
fn texts_arrive_however_they_are_cut() {
    for (suite, open) in SUITES.into_iter().flat_map(|suite| WAYS.map(|open| (suite, open))) {
        for step in [1, 7, 4096, 16_406, 16_407, 1 << 20] {
            let (mut sealer, mut opener) = ends(suite, 0);
            let (mut sealed, mut opened, mut whole) = (Vec::new(), Vec::new(), Vec::new());
            for len in [0, 1, 100, 16_384, 16_385, 100_000] {
                sealer.seal(&[&text(len)], &mut sealed).unwrap();
                whole.extend(text(len));
            }
            sealer.close(&mut sealed).unwrap();
            let last = sealed.len().div_ceil(step) - 1;
            for (at, part) in sealed.chunks(step).enumerate() {
                assert_eq!(open(&mut opener, part, &mut opened), Ok(at != last), "{step}");
            }
            assert!(opened == whole, "{suite:?} {step}");
            // What follows the end is not looked at.
            assert_eq!(open(&mut opener, &[1, 2, 3], &mut opened), Ok(false));
        }
    }
}

#[test]
fn each_byte_is_protected() {
    for (suite, open) in SUITES.into_iter().flat_map(|suite| WAYS.map(|open| (suite, open))) {
        let (mut sealer, _) = ends(suite, 0);
        let mut sealed = Vec::new();
        sealer.seal(&[&text(300)], &mut sealed).unwrap();
        for at in 0..sealed.len() {
            for bit in [0x01, 0x80] {
                let (_, mut opener) = ends(suite, 0);
                let mut bytes = sealed.clone();
                bytes[at] ^= bit;
                // A record that is said to be longer waits for the rest of it.
                bytes.resize(bytes.len() + (1 << 15), 0);
                let mut opened = Vec::new();
                let error = open(&mut opener, &bytes, &mut opened).unwrap_err();
                let expected = [RecordError::NoRecord, RecordError::Changed];
                assert!(expected.contains(&error) && opened.is_empty(), "{at}: {error:?}");
                // Nothing that follows is trusted either.
                assert_eq!(open(&mut opener, &sealed, &mut opened), Err(RecordError::Dead));
                assert!(opened.is_empty());
            }
        }
    }
}

#[test]
fn nonsense_opens_nothing() {
    let mut random = Random::new();
    for round in 0..20_000 {
        let (_, mut opener) = ends(SUITES[round % 2], 0);
        let mut bytes = random.bytes(200);
        // Most of them look like a record at first.
        if round % 4 > 0 && bytes.len() > 5 {
            let length = (bytes.len() - 5) as u8;
            bytes[..5].copy_from_slice(&[23, 3, 3, 0, length]);
        }
        let mut opened = Vec::new();
        let is_over = opener.open(&bytes, &mut opened).is_err() || opener.is_within_record();
        assert!((is_over || bytes.is_empty()) && opened.is_empty(), "{bytes:?}");
    }
}

#[test]
fn lost_and_repeated_records_are_noticed() {
    for suite in SUITES {
        let (mut sealer, _) = ends(suite, 0);
        let records = [0u8, 1, 2].map(|which| {
            let mut sealed = Vec::new();
            sealer.seal(&[&[which; 50]], &mut sealed).unwrap();
            sealed
        });
        for (order, good) in
            [(&[0, 1, 2][..], 3), (&[0, 2], 1), (&[0, 0], 1), (&[1], 0), (&[0, 1, 1], 2)]
        {
            let (_, mut opener) = ends(suite, 0);
            let mut opened = Vec::new();
            let done: Result<Vec<_>, _> =
                order.iter().map(|which| opener.open(&records[*which], &mut opened)).collect();
            assert_eq!(done.is_ok(), good == order.len(), "{order:?}");
            assert!(done.is_ok() || done == Err(RecordError::Changed));
            assert_eq!(opened.len(), 50 * good, "{order:?}");
        }
        // Nor does the other direction's, or another connection's, count as this one's.
        let other = TrafficKey { key: [8; 32], iv: [9; 12], sequence: 0 };
        let send = TrafficKey { key: [8; 32], iv: [9; 12], sequence: 0 };
        let secrets = Secrets { suite: suite.into(), send, receive: other };
        let (_, mut opener) = secrets.records().unwrap();
        assert_eq!(opener.open(&records[0], &mut Vec::new()), Err(RecordError::Changed));
    }
}

#[test]
fn a_key_is_used_no_longer_than_it_may_be() {
    const LIMIT: u64 = 1 << 24;
    let suite = CipherSuite::TLS13_AES_256_GCM_SHA384;
    let (mut sealer, mut opener) = ends(suite, LIMIT - 17);
    let mut sealed = Vec::new();
    // Two records are more than the one that is left: nothing is sealed.
    let too_much = sealer.seal(&[&text(16_385)], &mut sealed);
    assert_eq!((too_much, sealed.len()), (Err(RecordError::UsedUp(LIMIT - 17)), 0));
    sealer.seal(&[&text(10)], &mut sealed).unwrap();
    assert_eq!(sealer.seal(&[&text(10)], &mut sealed), Err(RecordError::UsedUp(LIMIT - 16)));
    // That nothing more comes can still be said.
    sealer.close(&mut sealed).unwrap();
    let mut opened = Vec::new();
    assert_eq!((opener.open(&sealed, &mut opened), opened), (Ok(false), text(10)));

    let (mut sealer, mut opener) = ends(suite, LIMIT);
    assert_eq!(sealer.close(&mut Vec::new()), Err(RecordError::UsedUp(LIMIT)));
    let used_up = opener.open(&sealed, &mut Vec::new());
    assert_eq!(used_up, Err(RecordError::UsedUp(LIMIT)));
    // A number that a hostile process made up does not overflow.
    let (mut sealer, _) = ends(CipherSuite::TLS13_CHACHA20_POLY1305_SHA256, u64::MAX);
    assert_eq!(sealer.seal(&[&[1]], &mut Vec::new()), Err(RecordError::UsedUp(u64::MAX)));
}

#[test]
fn unknown_suites_are_refused() {
    for number in [0, 0x1301, 0xc02b, u16::MAX] {
        let key = || TrafficKey { key: [0; 32], iv: [0; 12], sequence: 0 };
        let secrets = Secrets { suite: number, send: key(), receive: key() };
        assert_eq!(secrets.records().unwrap_err(), RecordError::Suite(number));
    }
}

fn any() -> ServerName<'static> {
    ServerName::try_from("127.0.0.1").unwrap()
}

/// Sends a text each way and then the end, with kedge's records here.
fn talk(stream: &mut (impl Read + Write), secrets: Secrets) {
    let (mut sealer, mut opener) = secrets.records().unwrap();
    let mut sealed = Vec::new();
    sealer.seal(&[&text(100_000)], &mut sealed).unwrap();
    sealer.close(&mut sealed).unwrap();
    stream.write_all(&sealed).unwrap();
    let (mut opened, mut some, mut more) = (Vec::new(), [0; 1000], true);
    while more {
        let n = stream.read(&mut some).unwrap();
        assert!(n > 0, "no end was said");
        more = opener.open(&some[..n], &mut opened).unwrap();
    }
    assert!(opened == text(70_000));
    assert!(!opener.is_within_record());
}

/// The same with rustls.
fn talk_plainly(stream: &mut (impl Read + Write)) {
    stream.write_all(&text(70_000)).unwrap();
    stream.flush().unwrap();
    let mut heard = Vec::new();
    stream.read_to_end(&mut heard).expect("the other end has said its end");
    assert!(heard == text(100_000));
}

#[test]
fn a_plain_client_of_tls_is_understood() {
    let pair = Pair::new();
    let verifier = Arc::new(Verifier::new(pair.pins.clone(), None));
    let config = client_config(&pair.client, verifier).unwrap();
    let (near, mut far) = connection();
    thread::scope(|scope| {
        scope.spawn(move || {
            let client = ClientConnection::new(config, any()).unwrap();
            let mut stream = StreamOwned::new(client, near);
            talk_plainly(&mut stream);
            stream.conn.send_close_notify();
            stream.flush().unwrap();
        });
        let (_, secrets) = accept(&mut far, &pair.server, &pair.pins, LIMIT).unwrap();
        talk(&mut far, secrets);
    });
}

#[test]
fn a_plain_server_of_tls_is_understood() {
    let pair = Pair::new();
    let verifier = Arc::new(Verifier::new(pair.pins.clone(), None));
    let mut config = (*server_config(&pair.server, verifier).unwrap()).clone();
    config.enable_secret_extraction = false;
    let (mut near, far) = connection();
    thread::scope(|scope| {
        scope.spawn(move || {
            let server = ServerConnection::new(Arc::new(config)).unwrap();
            let mut stream = StreamOwned::new(server, far);
            talk_plainly(&mut stream);
            stream.conn.send_close_notify();
            stream.flush().unwrap();
        });
        let secrets = connect(&mut near, &pair.client, &pair.pins, &name("server"), LIMIT).unwrap();
        talk(&mut near, secrets);
    });
}

/// A peer that renews its keys, which kedge does not speak, is told so and not misunderstood.
#[test]
fn a_renewal_of_keys_is_refused() {
    let pair = Pair::new();
    let verifier = Arc::new(Verifier::new(pair.pins.clone(), None));
    let config = client_config(&pair.client, verifier).unwrap();
    let (near, mut far) = connection();
    thread::scope(|scope| {
        scope.spawn(move || {
            let client = ClientConnection::new(config, any()).unwrap();
            let mut stream = StreamOwned::new(client, near);
            stream.write_all(b"before").unwrap();
            stream.conn.refresh_traffic_keys().unwrap();
            stream.write_all(b"after").unwrap();
        });
        let (_, secrets) = accept(&mut far, &pair.server, &pair.pins, LIMIT).unwrap();
        let (_, mut opener) = secrets.records().unwrap();
        let (mut arrived, mut opened) = (Vec::new(), Vec::new());
        far.read_to_end(&mut arrived).unwrap();
        assert_eq!(opener.open(&arrived, &mut opened), Err(RecordError::Kind(22)));
        assert_eq!(opened, b"before");
    });
}
