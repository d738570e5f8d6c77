//! Two ends of a relay in one process.

use super::super::sink::Way;
use super::*;
use std::io::{PipeReader, PipeWriter, pipe};
use std::net::TcpListener;
use std::time::Instant;

const SOON: Duration = Duration::from_secs(20);

/// Two ends that have these secrets; what is written here comes out there.
fn pair(secrets: [u8; 2]) -> (Relay, Relay, PipeWriter, PipeReader) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (two, _) = listener.accept().unwrap();
    let relay = |link, secret, end| Relay::new(link, [secret; PSK_BYTES], end).unwrap();
    let mut near = relay(one, secrets[0], PskEnd::First);
    let mut far = relay(two, secrets[1], PskEnd::Second);
    let ((from, writer), (reader, to)) = (pipe().unwrap(), pipe().unwrap());
    near.read_from(Stream::In, from.into());
    far.write_to(Stream::In, to.into());
    (near, far, writer, reader)
}

/// Turns both until it is so.
fn until(near: &mut Relay, far: &mut Relay, so: impl Fn(&Relay, &Relay) -> bool) {
    let (begin, wait) = (Instant::now(), Some(Duration::from_millis(1)));
    while !so(near, far) {
        assert!(begin.elapsed() < SOON, "{near:?} {far:?}");
        near.turn(None, wait).unwrap();
        far.turn(None, wait).unwrap();
    }
}

/// Until so much has come, of which as much as fits waits in the pipe.
fn comes(near: &mut Relay, far: &mut Relay, reader: &mut PipeReader, text: &[u8]) {
    until(near, far, |_, far| {
        rustix::io::ioctl_fionread(&reader).unwrap() == text.len() as u64 && far.has_written()
    });
    let mut found = vec![0; text.len()];
    reader.read_exact(&mut found).unwrap();
    assert_eq!(found, text);
}

fn greeted(relay: &Relay, times: usize) -> bool {
    format!("{:?}", relay.channel).contains(&format!("greeted: {times},"))
}

#[test]
fn streams_go_on_in_another_life() {
    let (mut near, mut far, mut writer, mut reader) = pair([7, 7]);
    writer.write_all(b"before").unwrap();
    comes(&mut near, &mut far, &mut reader, b"before");
    assert!(greeted(&near, 1), "{near:?}");
    // Another boot counts its sockets anew: this one may have had the same number there.
    near.life = near.life.map(|(_, socket)| ("another boot".to_owned(), socket));
    writer.write_all(b"elsewhere").unwrap();
    comes(&mut near, &mut far, &mut reader, b"elsewhere");
    assert!(greeted(&near, 2), "{near:?}");
    // As it is after a restart: the connections are other sockets.
    for relay in [&mut near, &mut far] {
        relay.life = relay.life.take().map(|(boot, _)| (boot, 0));
    }
    writer.write_all(b"after").unwrap();
    comes(&mut near, &mut far, &mut reader, b"after");
    assert_ne!(near.life.as_ref().map(|(_, socket)| *socket), Some(0));
    far.say(&Frame::Exit(3));
    until(&mut near, &mut far, |near, _| !near.told.is_empty());
    assert_eq!(near.told(), [Frame::Exit(3)]);
}

#[test]
fn who_has_another_secret_hears_nothing() {
    let (mut near, mut far, mut writer, reader) = pair([7, 8]);
    writer.write_all(b"secret").unwrap();
    until(&mut near, &mut far, |_, far| far.is_closed());
    // The first reason, and not that the other one has gone.
    let why = far.why_closed().to_owned();
    assert!(!why.is_empty() && !why.contains("closed"), "{why}");
    far.close("another");
    assert_eq!(far.why_closed(), why);
    assert_eq!(rustix::io::ioctl_fionread(&reader).unwrap(), 0);
}

/// No more is sent than there is room for, and signals pass all the same.
#[test]
fn a_stream_that_nobody_reads_holds_up_nothing_else() {
    let (mut near, mut far, mut writer, reader) = pair([7, 7]);
    let fills = std::thread::spawn(move || while writer.write_all(&[5; 4096]).is_ok() {});
    until(&mut near, &mut far, |near, _| near.sources[0].room == 0);
    near.say(&Frame::Signal(15));
    until(&mut near, &mut far, |_, far| !far.told.is_empty());
    assert_eq!(far.told(), [Frame::Signal(15)]);
    assert!(far.sinks[0].waits.len() <= WINDOW);
    drop((near, reader));
    fills.join().unwrap();
}

/// As [`pair`], of two ends that outlive their connection.
fn outliving() -> (Relay, Relay, PipeWriter, PipeReader) {
    let (near, far, writer, reader) = pair([7, 7]);
    let [one, two] = connected();
    let mut other_near = Relay::outliving(one, [7; PSK_BYTES], PskEnd::First).unwrap();
    let mut other_far = Relay::outliving(two, [7; PSK_BYTES], PskEnd::Second).unwrap();
    (other_near.sources, other_far.sinks) = (near.sources, far.sinks);
    (other_near, other_far, writer, reader)
}

fn connected() -> [TcpStream; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    [one, listener.accept().unwrap().0]
}

/// Cut wherever it is, and whichever end finds that first.
#[test]
fn nothing_is_lost_or_said_twice_where_the_line_is_cut() {
    let (mut near, mut far, mut writer, reader) = outliving();
    let all: Vec<u8> = (0..6_000_000_u32).map(|number| (number % 251) as u8).collect();
    let (says, expected) = (all.clone(), all.len());
    let fills = std::thread::spawn(move || writer.write_all(&says));
    let reads = std::thread::spawn(move || {
        let mut found = Vec::new();
        (&reader).take(expected as u64).read_to_end(&mut found).map(|_| found)
    });
    let (begin, wait) = (Instant::now(), Some(Duration::from_millis(1)));
    let mut cuts = 0;
    for turn in 1.. {
        if turn % 7 == 0 && cuts < 60 {
            let links = connected();
            if turn % 2 == 0 {
                // What is on its way is thrown away.
                sockopt::set_socket_linger(&far.link, Some(Duration::ZERO)).unwrap();
            }
            for (relay, link) in [&mut near, &mut far].into_iter().zip(links) {
                let _ = relay.link.shutdown(std::net::Shutdown::Both);
                relay.turn(None, wait).unwrap();
                relay.resume(link).unwrap();
            }
            near.say(&Frame::Signal(cuts));
            cuts += 1;
        }
        near.turn(None, wait).unwrap();
        far.turn(None, wait).unwrap();
        assert!(!near.is_closed() && !far.is_closed(), "{near:?} {far:?}");
        assert!(begin.elapsed() < 3 * SOON, "{near:?} {far:?}");
        let has_all = near.sources.is_empty() && far.has_written() && far.sinks.is_empty();
        if cuts == 60 && has_all && far.told.len() == 60 {
            break;
        }
    }
    fills.join().unwrap().unwrap();
    assert!(reads.join().unwrap().unwrap() == all, "what comes is what was said");
    assert_eq!(far.told(), (0..60).map(Frame::Signal).collect::<Vec<_>>());
    far.tell_heard();
    until(&mut near, &mut far, |near, _| near.is_heard());
}

#[test]
fn what_was_not_heard_is_known() {
    let (mut near, mut far, mut writer, _reader) = outliving();
    writer.write_all(b"said").unwrap();
    until(&mut near, &mut far, |near, far| near.kept.is_some() && far.sinks[0].untold == 0);
    near.link.shutdown(std::net::Shutdown::Both).unwrap();
    writer.write_all(b" and more").unwrap();
    let begin = Instant::now();
    while near.unheard(Stream::In) != b"said and more" {
        assert!(begin.elapsed() < SOON, "{near:?}");
        near.turn(None, Some(Duration::from_millis(1))).unwrap();
    }
    assert!(near.unheard(Stream::Out).is_empty() && !near.is_heard());
}

/// A file system that is full may have room again: the stream is not given up.
#[test]
fn a_stream_waits_for_room() {
    let (mut near, mut far, mut writer, mut reader) = pair([7, 7]);
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let pipe = std::mem::replace(&mut far.sinks[0].fd, full.into());
    far.sinks[0].way = Way::Piece;
    writer.write_all(b"text").unwrap();
    until(&mut near, &mut far, |_, far| far.is_full());
    let begin = Instant::now();
    while begin.elapsed() < FULL + FULL {
        near.turn(None, Some(Duration::from_millis(1))).unwrap();
        far.turn(None, Some(Duration::from_millis(1))).unwrap();
        assert!(far.has_sinks() && !near.sources.is_empty());
    }
    far.sinks[0].fd = pipe;
    comes(&mut near, &mut far, &mut reader, b"text");
    assert!(!far.is_full());
}

/// Has `near` send what it is given, as far as it goes without the other end.
fn sends(near: &mut Relay, writer: &mut PipeWriter, bytes: usize) {
    for _ in 0..bytes / 4096 {
        writer.write_all(&[5; 4096]).unwrap();
        near.turn(None, Some(Duration::from_millis(1))).unwrap();
    }
}

fn goes_on(relay: &Relay) -> bool {
    relay.kept.as_ref().is_some_and(Kept::goes_on)
}

/// It was lost with the line, and is said again when a newer one was said first.
#[test]
fn an_older_word_of_what_was_heard_is_no_fault() {
    const BYTES: usize = 500 << 10;
    let (mut near, mut far, mut writer, reader) = outliving();
    until(&mut near, &mut far, |near, far| goes_on(near) && goes_on(far));
    let reads = std::thread::spawn(move || {
        let mut found = Vec::new();
        (&reader).take(BYTES as u64).read_to_end(&mut found).map(|_| (found, reader))
    });
    sends(&mut near, &mut writer, BYTES);
    let begin = Instant::now();
    // What it says meanwhile does not come.
    while !reads.is_finished() {
        assert!(begin.elapsed() < SOON, "{far:?}");
        far.turn(None, Some(Duration::from_millis(1))).unwrap();
    }
    let [one, two] = connected();
    near.resume(one).unwrap();
    far.resume(two).unwrap();
    until(&mut near, &mut far, |near, far| {
        assert!(!near.is_closed() && !far.is_closed(), "{near:?} {far:?}");
        goes_on(near) && goes_on(far) && near.has_sent() && far.has_sent()
    });
    far.say(&Frame::Exit(0));
    until(&mut near, &mut far, |near, far| {
        assert!(!near.is_closed() && !far.is_closed(), "{near:?} {far:?}");
        !near.told.is_empty()
    });
    assert_eq!(reads.join().unwrap().unwrap().0.len(), BYTES);
}

/// It would wait for the other one otherwise, who does not know.
#[test]
fn what_one_end_gives_up_is_over_for_both() {
    let (mut near, mut far, ..) = outliving();
    until(&mut near, &mut far, |near, far| goes_on(near) && goes_on(far));
    near.plain.extend([99, 0, 0, 0, 0]);
    until(&mut near, &mut far, |near, far| near.is_closed() && far.is_closed());
    assert!(far.why_closed().contains("means nothing"), "{far:?}");
}

/// However many bytes may be on their way, and however small the frames are.
#[test]
fn no_more_is_read_than_may_be_kept() {
    let (mut near, mut far, mut writer, mut reader) = outliving();
    until(&mut near, &mut far, |near, far| goes_on(near) && goes_on(far));
    assert!(near.kept.as_mut().unwrap().seal(&vec![0; 2 * WINDOW]));
    writer.write_all(b"more").unwrap();
    for _ in 0..50 {
        near.turn(None, Some(Duration::from_millis(1))).unwrap();
    }
    let waits = |near: &Relay| rustix::io::ioctl_fionread(&near.sources[0].fd).unwrap();
    assert_eq!(waits(&near), 4);
    assert!(near.kept.as_mut().unwrap().hears(2 * WINDOW as u64));
    comes(&mut near, &mut far, &mut reader, b"more");
}

/// What was said to the one that has ended is not said to it again.
#[test]
fn another_in_the_place_of_the_other_end_hears_nothing_of_before() {
    let (mut near, mut far, mut writer, mut reader) = outliving();
    writer.write_all(b"before").unwrap();
    comes(&mut near, &mut far, &mut reader, b"before");
    assert!(!near.is_heard(), "nobody has said so");
    let [one, two] = connected();
    near.resume(one).unwrap();
    let mut rest = Relay::outliving(two, [7; PSK_BYTES], PskEnd::Second).unwrap();
    rest.sinks = std::mem::take(&mut far.sinks);
    until(&mut near, &mut rest, |near, rest| near.is_closed() && rest.is_closed());
    assert!(near.is_another() && !near.is_heard(), "{near:?}");
    assert!(rest.has_written());
    assert_eq!(rustix::io::ioctl_fionread(&reader).unwrap(), 0);
}
