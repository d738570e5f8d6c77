//! Handshakes that are to succeed, and those that are not, over sockets of this machine.

use crate::handshake::{HandshakeError, accept, client_config, connect, server_config};
use crate::store::now;
use crate::testing::{LIMIT, Pair, Random, connection, identity, name};
use crate::verify::Verifier;
use crate::{Identity, Pins, RecordError, Refusal, Secrets};
use rustls::client::ResolvesClientCert;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::sign::{CertifiedKey, SigningKey};
use rustls::{
    ClientConfig, ClientConnection, Error, ServerConnection, SignatureScheme, StreamOwned,
};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

type Accepted = Result<(crate::Name, Secrets), HandshakeError>;

/// Shakes hands with these keys and pins; what the client hears later, if it connects.
fn shake(
    client: (&Identity, &Arc<Pins>),
    server: (&Identity, &Arc<Pins>),
) -> (Result<Result<bool, RecordError>, HandshakeError>, Accepted) {
    let (mut near, mut far) = connection();
    thread::scope(|scope| {
        let accepting = scope.spawn(move || {
            let accepted = accept(&mut far, server.0, server.1, LIMIT);
            drop(far);
            accepted
        });
        let connected = connect(&mut near, client.0, client.1, &name("server"), LIMIT);
        let heard = connected.map(|secrets| {
            let (_, mut opener) = secrets.records().expect("a suite of ours");
            let mut arrived = Vec::new();
            near.read_to_end(&mut arrived).expect("what it says before it closes");
            opener.open(&arrived, &mut Vec::new())
        });
        drop(near);
        (heard, accepting.join().expect("no panic"))
    })
}

#[test]
fn who_is_pinned_is_known_by_name() {
    let pair = Pair::new();
    let (mut near, connected, mut far, accepted) = pair.shake();
    assert_eq!(connected.suite, accepted.suite);
    assert!(connected.send == accepted.receive && connected.receive == accepted.send);
    assert!(connected.send != connected.receive);
    // Secrets cross a process boundary as they are, and nothing of them is printed.
    let mut bytes = Vec::new();
    kedge_wire::encode(&accepted, &mut bytes);
    assert!(kedge_wire::decode::<Secrets>(&bytes).unwrap() == accepted);
    assert!(!format!("{accepted:?} {:?}", accepted.send).contains("key"));
    // The streams block for ever again, and nothing of the handshake is left on them.
    assert_eq!((near.read_timeout().unwrap(), far.write_timeout().unwrap()), (None, None));
    near.shutdown(Shutdown::Write).unwrap();
    far.shutdown(Shutdown::Write).unwrap();
    assert_eq!(near.read(&mut [0; 16]).unwrap() + far.read(&mut [0; 16]).unwrap(), 0);
    // Keys are another connection's each time.
    let (_, again, _, _) = pair.shake();
    assert!(again.send != connected.send);
}

/// What follows a handshake at once, in one piece with it, stays on the stream.
#[test]
fn nothing_is_read_beyond_the_handshake() {
    let pair = Pair::new();
    let (mut near, mut far) = connection();
    // Arrives together, and only once all of it is there.
    let (mut relay_near, mut relay_far) = connection();
    let text = b"sent with the last of the handshake";
    thread::scope(|scope| {
        scope.spawn(|| {
            let secrets =
                connect(&mut near, &pair.client, &pair.pins, &name("server"), LIMIT).unwrap();
            let (mut sealer, _) = secrets.records().unwrap();
            let mut sealed = Vec::new();
            sealer.seal(&[text], &mut sealed).unwrap();
            near.write_all(&sealed).unwrap();
            near.shutdown(Shutdown::Write).unwrap();
        });
        let (mut from_server, mut to_near) =
            (relay_near.try_clone().unwrap(), far.try_clone().unwrap());
        scope.spawn(move || std::io::copy(&mut from_server, &mut to_near));
        scope.spawn(move || {
            // The hello, then everything else that the client has to say, together.
            let mut some = vec![0; 64 << 10];
            let n = far.read(&mut some).unwrap();
            relay_near.write_all(&some[..n]).unwrap();
            let mut rest = Vec::new();
            far.read_to_end(&mut rest).unwrap();
            relay_near.write_all(&rest).unwrap();
        });
        let (_, secrets) = accept(&mut relay_far, &pair.server, &pair.pins, LIMIT).unwrap();
        let (_, mut opener) = secrets.records().unwrap();
        let mut opened = Vec::new();
        let mut some = [0; 1024];
        while opened.len() < text.len() {
            let n = relay_far.read(&mut some).unwrap();
            assert!(n > 0, "the text is lost");
            opener.open(&some[..n], &mut opened).unwrap();
        }
        assert_eq!(opened, text);
        // The relay back to the client ends with this.
        drop(relay_far);
    });
}

#[test]
fn a_stranger_is_refused_and_told() {
    let pair = Pair::new();
    let stranger = identity("client", 0, now() + 1000);
    let (heard, accepted) = shake((&stranger, &pair.pins), (&pair.server, &pair.pins));
    let shown = stranger.certificate().fingerprint();
    assert!(
        matches!(&accepted, Err(HandshakeError::Refused(Refusal::Unknown(it))) if *it == shown),
        "{accepted:?}"
    );
    let heard = heard.unwrap().unwrap_err().to_string();
    assert!(heard.contains("has not pinned your certificate"), "{heard}");

    // The same in the other direction: the client says nothing of its own to a stranger.
    let (heard, accepted) = shake((&pair.client, &pair.pins), (&stranger, &pair.pins));
    assert!(matches!(heard, Err(HandshakeError::Refused(Refusal::Unknown(_)))), "{heard:?}");
    let told = accepted.unwrap_err().to_string();
    assert!(told.contains("has not pinned your certificate"), "{told}");
}

#[test]
fn a_revoked_certificate_is_refused_and_told() {
    let pair = Pair::new();
    for of in ["client", "server"] {
        let mut pins = Pins::clone(&pair.pins);
        let at = pins.pinned.iter().position(|(it, _)| *it == name(of)).unwrap();
        let revoked = pins.pinned.remove(at);
        pins.revoked.push((name("formerly"), revoked.1));
        // The server is pinned by another certificate now.
        let other = identity("s", 0, now() + 1000).certificate().clone();
        pins.pinned.push((name("server"), other));
        let pins = Arc::new(pins);
        let (heard, accepted) = match of {
            "client" => shake((&pair.client, &pair.pins), (&pair.server, &pins)),
            _ => shake((&pair.client, &pins), (&pair.server, &pair.pins)),
        };
        let (refused, told) = match of {
            "client" => {
                (accepted.unwrap_err().to_string(), heard.unwrap().unwrap_err().to_string())
            }
            _ => (heard.unwrap_err().to_string(), accepted.unwrap_err().to_string()),
        };
        assert_eq!(refused, "the certificate of formerly has been revoked here");
        assert!(told.contains("has been revoked there"), "{told}");
    }
}

#[test]
fn another_ones_certificate_is_refused() {
    let pair = Pair::new();
    // Whoever answers at the server's address has the key of somebody else who is pinned.
    let (heard, accepted) = shake((&pair.client, &pair.pins), (&pair.client, &pair.pins));
    let expected = Refusal::Another { expected: name("server"), shown: name("client") };
    assert!(matches!(&heard, Err(HandshakeError::Refused(it)) if *it == expected), "{heard:?}");
    let told = accepted.unwrap_err().to_string();
    assert!(told.contains("not the one that it knows you by"), "{told}");
    // A server of which nothing is known is not even asked.
    let (mut near, mut far) = connection();
    let nobody = connect(&mut near, &pair.client, &pair.pins, &name("elsewhere"), LIMIT);
    assert!(matches!(&nobody, Err(HandshakeError::NotPinned(it)) if *it == name("elsewhere")));
    drop(near);
    assert_eq!(far.read(&mut [0; 16]).unwrap(), 0);
}

/// A certificate that is pinned is of no use without its key.
#[test]
fn a_copied_certificate_is_refused() {
    let pair = Pair::new();
    let thief = identity("thief", 0, now() + 1000);
    let shown = Shows(Some((pair.client.certificate().der().clone(), key_of(&thief))));
    let (refused, _) = shows(shown, &pair);
    assert!(
        matches!(&refused, HandshakeError::NotItsKey(of) if *of == name("client")),
        "{refused}"
    );
}

#[test]
fn a_client_without_a_certificate_is_refused() {
    let (refused, told) = shows(Shows(None), &Pair::new());
    assert!(matches!(refused, HandshakeError::NoCertificate), "{refused}");
    assert!(told.contains("CertificateRequired"), "{told}");
}

/// A client that shows this certificate and signs with this key.
#[derive(Debug)]
struct Shows(Option<(CertificateDer<'static>, Arc<dyn SigningKey>)>);

impl ResolvesClientCert for Shows {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        let (certificate, key) = self.0.clone()?;
        Some(Arc::new(CertifiedKey::new(vec![certificate], key)))
    }

    fn has_certs(&self) -> bool {
        self.0.is_some()
    }
}

fn key_of(identity: &Identity) -> Arc<dyn SigningKey> {
    ResolvesClientCert::resolve(&*identity.resolver(), &[], &[]).expect("a key").key.clone()
}

/// Returns what the pair's server says to that, and what it tells the client.
fn shows(shown: Shows, pair: &Pair) -> (HandshakeError, String) {
    let verifier = Arc::new(Verifier::new(pair.pins.clone(), None));
    let mut config = (*client_config(&pair.client, verifier).unwrap()).clone();
    config.client_auth_cert_resolver = Arc::new(shown);
    plain_client(Arc::new(config), pair, &pair.pins)
}

/// Has a plain client of rustls connect to the pair's server, which refuses it.
fn plain_client(
    config: Arc<ClientConfig>,
    pair: &Pair,
    pins: &Arc<Pins>,
) -> (HandshakeError, String) {
    let (near, mut far) = connection();
    thread::scope(|scope| {
        let server = scope.spawn(move || {
            let accepted = accept(&mut far, &pair.server, pins, LIMIT);
            drop(far);
            accepted.expect_err("it is refused")
        });
        let mut stream = StreamOwned::new(ClientConnection::new(config, any()).unwrap(), near);
        let said = stream.write_all(b"hello").and_then(|()| stream.read(&mut [0; 16]));
        (server.join().unwrap(), said.expect_err("it is refused").to_string())
    })
}

fn any() -> ServerName<'static> {
    ServerName::try_from("127.0.0.1").unwrap()
}

#[test]
fn certificates_out_of_their_time_are_refused() {
    let pair = Pair::new();
    let now = now();
    let pinned = |of: &str, it: &Identity| {
        let pinned = vec![(name(of), it.certificate().clone())];
        Arc::new(Pins { pinned, revoked: Vec::new() })
    };
    // A client that does not look at its own clock.
    let tries = |client: &Identity| {
        let verifier = Arc::new(Verifier::new(pair.pins.clone(), None));
        let config = client_config(client, verifier).unwrap();
        let (refused, told) = plain_client(config, &pair, &pinned("bob", client));
        (refused.to_string(), told)
    };
    let old = identity("old", 0, now - 100);
    let (refused, told) = tries(&old);
    assert!(refused.contains("the certificate of bob has expired on "), "{refused}");
    assert!(told.contains("CertificateExpired"), "{told}");
    // As where a clock was set back.
    let young = identity("young", now + 1000, now + 2000);
    let (refused, told) = tries(&young);
    assert!(refused.contains("the certificate of bob is valid from "), "{refused}");
    assert!(told.contains("CertificateExpired"), "{told}");
    // One's own is found out before anything is sent.
    for (own, said) in [(&old, "has expired on"), (&young, "is valid from")] {
        let (mut near, mut far) = connection();
        let connected = connect(&mut near, own, &pair.pins, &name("server"), LIMIT);
        let connected = connected.unwrap_err().to_string();
        assert!(connected.starts_with("your own certificate"), "{connected}");
        assert!(connected.contains(said), "{connected}");
        let accepted = accept(&mut far, own, &pair.pins, LIMIT).unwrap_err().to_string();
        assert!(accepted.contains(said), "{accepted}");
    }
    // A server's as well.
    let (near, far) = connection();
    let server = server_config(&old, Arc::new(Verifier::new(pair.pins.clone(), None))).unwrap();
    let refused = thread::scope(|scope| {
        scope.spawn(move || {
            let server = ServerConnection::new(server).unwrap();
            let _ = StreamOwned::new(server, far).read(&mut [0; 16]);
        });
        let (mut near, pins) = (near, pinned("server", &old));
        connect(&mut near, &pair.client, &pins, &name("server"), LIMIT)
    });
    assert!(matches!(refused, Err(HandshakeError::Refused(Refusal::Expired { .. }))));
}

/// Returns what arrives at a server that is no handshake.
fn accepted(bytes: &[u8], limit: Duration, pair: &Pair) -> (HandshakeError, Duration) {
    let (mut near, mut far) = connection();
    let begin = Instant::now();
    thread::scope(|scope| {
        let server = scope.spawn(move || {
            let refused = accept(&mut far, &pair.server, &pair.pins, limit);
            refused.expect_err("no handshake")
        });
        // It may have hung up already.
        let _ = near.write_all(bytes);
        let error = server.join().expect("no panic");
        (error, begin.elapsed())
    })
}

#[test]
fn nonsense_is_refused() {
    let pair = Pair::new();
    let mut random = Random::new();
    for round in 0..200 {
        let mut bytes = random.bytes(600);
        // Half of them look like a record at first.
        if round % 2 == 0 && bytes.len() > 9 {
            let length = (bytes.len() - 5) as u16;
            bytes[..5].copy_from_slice(&[22, 3, 1, (length >> 8) as u8, length as u8]);
            bytes[5] = [1, 2, 11, 20][round / 2 % 4];
        }
        // It says why, and does not panic.
        let (error, _) = accepted(&bytes, Duration::from_millis(20), &pair);
        assert!(!matches!(error, HandshakeError::Refused(_)), "{error}");
    }
}

/// Each byte of a hello, changed, leads to a refusal or is none of the handshake's business, and
/// never to a panic.
#[test]
fn a_changed_hello_is_survived() {
    let pair = Pair::new();
    let hello = hello(&pair);
    for at in 0..hello.len() {
        let mut bytes = hello.clone();
        bytes[at] ^= 0x41;
        let (error, _) = accepted(&bytes, Duration::from_millis(5), &pair);
        assert!(!matches!(error, HandshakeError::Refused(_)), "{at}: {error}");
    }
}

fn hello(pair: &Pair) -> Vec<u8> {
    let verifier = Arc::new(Verifier::new(pair.pins.clone(), None));
    let config = client_config(&pair.client, verifier).unwrap();
    let mut hello = Vec::new();
    ClientConnection::new(config, any()).unwrap().write_tls(&mut hello).unwrap();
    hello
}

/// What somebody has recorded of a handshake is of no use to him.
#[test]
fn a_replayed_handshake_is_refused() {
    let pair = Pair::new();
    let (mut near, mut far) = connection();
    let (mut relay_near, mut relay_far) = connection();
    let recorded = thread::scope(|scope| {
        scope.spawn(|| {
            let _ = connect(&mut near, &pair.client, &pair.pins, &name("server"), LIMIT).unwrap();
            near.shutdown(Shutdown::Write).unwrap();
        });
        let (mut from_server, mut to_client) =
            (relay_near.try_clone().unwrap(), far.try_clone().unwrap());
        scope.spawn(move || std::io::copy(&mut from_server, &mut to_client));
        let recording = scope.spawn(move || {
            let (mut recorded, mut some) = (Vec::new(), [0; 4096]);
            loop {
                let n = far.read(&mut some).unwrap();
                if n == 0 {
                    return recorded;
                }
                relay_near.write_all(&some[..n]).unwrap();
                recorded.extend_from_slice(&some[..n]);
            }
        });
        accept(&mut relay_far, &pair.server, &pair.pins, LIMIT).unwrap();
        drop(relay_far);
        recording.join().unwrap()
    });
    // It has all that the client said: a certificate, a signature, and the last of the handshake.
    assert!(recorded.len() > 500, "{}", recorded.len());
    let (error, _) = accepted(&recorded, LIMIT, &pair);
    assert!(matches!(error, HandshakeError::Tls(Error::DecryptError)), "{error:?}");
}

#[test]
fn a_hello_tells_nobody_where_it_goes() {
    let pair = Pair::new();
    let verifier = Arc::new(Verifier::new(pair.pins.clone(), None));
    let config = client_config(&pair.client, verifier).unwrap();
    let server = ServerName::try_from("secret.example.org").unwrap();
    let mut hello = Vec::new();
    ClientConnection::new(config, server).unwrap().write_tls(&mut hello).unwrap();
    assert!(!hello.windows(6).any(|part| part == b"secret"));
}

#[test]
fn who_is_slow_is_cut_off() {
    let pair = Pair::new();
    let limit = Duration::from_millis(200);
    let (error, took) = accepted(&[], limit, &pair);
    assert!(matches!(error, HandshakeError::Late(it) if it == limit), "{error}");
    assert!(took >= limit, "{took:?}");
    // One byte now and then buys no time.
    let hello = hello(&pair);
    let (mut near, mut far) = connection();
    thread::scope(|scope| {
        let server = scope.spawn(move || accept(&mut far, &pair.server, &pair.pins, limit));
        let begin = Instant::now();
        let drips = hello.iter().map_while(|byte| {
            thread::sleep(Duration::from_millis(20));
            near.write_all(&[*byte]).ok().filter(|()| begin.elapsed() < LIMIT)
        });
        assert!(drips.count() < hello.len(), "it may take as long as it likes");
        assert!(matches!(server.join().unwrap(), Err(HandshakeError::Late(_))));
    });
    // And so do records without end.
    let endless = [22, 3, 1, 0x40, 0].iter().chain(&[1, 0, 0xff, 0xff]).copied();
    let endless: Vec<u8> = endless.chain(std::iter::repeat_n(0, 0x4000 - 4)).collect();
    let pair = Pair::new();
    let (error, _) = accepted(&endless.repeat(8), LIMIT, &pair);
    assert!(!matches!(error, HandshakeError::Late(_)), "{error}");
}

#[test]
fn who_leaves_is_not_waited_for() {
    let pair = Pair::new();
    let hello = hello(&pair);
    for cut in [0, 1, 5, hello.len() / 2, hello.len()] {
        let (mut near, mut far) = connection();
        near.write_all(&hello[..cut]).unwrap();
        drop::<TcpStream>(near);
        let left = accept(&mut far, &pair.server, &pair.pins, LIMIT);
        assert!(matches!(left, Err(HandshakeError::Closed)), "{cut}: {left:?}");
    }
}
