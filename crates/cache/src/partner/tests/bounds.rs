//! What a partner keeps of ends that have it keep too much.

use super::*;
use crate::journal::Identity;
use crate::partner::account::{Account, Kept, Limits};
use crate::partner::home::size_of;
use crate::partner::wire::END;

/// Bounds that no test meets by accident.
const WIDE: Limits = Limits::new();

fn bounded(scratch: &Scratch, limits: Limits, quota: Option<u64>) -> Arc<Partner> {
    let listen = "127.0.0.1:0".parse().expect("an address");
    let spec = PartnerSpec { listen, folder: scratch.0.join("partner"), quota, keys: None };
    let partner = Partner::bind_with(spec, limits).expect("a partner");
    let own = partner.clone();
    thread::spawn(move || own.serve(|_| ()));
    partner
}

fn with_kept(kept: Kept) -> Limits {
    Limits { kept, ..WIDE }
}

/// A cache of a node that says what it likes.
struct End(TcpStream);

impl End {
    /// Begins a session. What is kept for it is told, or why it is refused.
    fn begin(partner: &Partner, node: &str) -> Result<(End, usize), String> {
        let at = partner.address().expect("it listens");
        let mut end = End(TcpStream::connect(at).expect("it listens"));
        end.0.set_read_timeout(Some(ANSWER)).expect("set");
        let (node, token) = (node.to_owned(), "1".into());
        end.say(Said::Hello(Hello { version: VERSION, under: "/scratch".into(), node, token }));
        let mut parts = 0;
        loop {
            match Said::read(&mut end.0).expect("an answer") {
                Said::Note(_) => parts += 1,
                Said::Done => return Ok((end, parts)),
                Said::Failed(why) => return Err(why),
                said => panic!("{said:?}"),
            }
        }
    }

    fn say(&mut self, said: Said) {
        said.write(&mut self.0).expect("it listens");
    }

    fn ask(&mut self, said: Said) -> Result<(), String> {
        self.say(said);
        match Said::read(&mut self.0).expect("an answer") {
            Said::Done => Ok(()),
            Said::Failed(why) => Err(why),
            said => panic!("{said:?}"),
        }
    }

    /// Names a file, with a name of a length.
    fn name(&mut self, file: u64, length: usize) -> Result<(), String> {
        self.say_name(file, length);
        self.ask(Said::Sync(file))
    }

    fn say_name(&mut self, file: u64, length: usize) {
        let identity = Identity { path: vec![b'n'; length], ..Identity::default() };
        self.say(Said::Note(Record::File(file, identity)));
    }

    fn forget(&mut self, file: u64) {
        self.say(Said::Note(Record::Drop(file)));
        self.ask(Said::Beat).expect("told");
    }

    fn data(&mut self, file: u64, offset: u64, length: usize) -> Result<(), String> {
        self.say(Said::Data(file, offset, vec![7; length]));
        self.ask(Said::Sync(file))
    }
}

fn begin(partner: &Partner, node: &str) -> End {
    End::begin(partner, node).expect("a session").0
}

fn refused(result: Result<(), String>, why: &str) {
    let said = result.expect_err(why);
    assert!(said.contains(why), "{said}");
}

/// Waits until no session is left, and none of its connection.
fn end_all(partner: &Partner, ends: impl IntoIterator<Item = End>) {
    drop(ends.into_iter().collect::<Vec<_>>());
    let begin = Instant::now();
    while !lock(&partner.accounts).is_empty() || !lock(&partner.homes).is_empty() {
        assert!(begin.elapsed() < Duration::from_secs(20), "a session, or its connection, is kept");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn files_of_all_caches_of_a_key_are_counted() {
    let scratch = Scratch::new("partnerfiles");
    let partner = bounded(&scratch, with_kept(Kept { files: 3, ..WIDE.kept }), None);
    let (mut one, mut two) = (begin(&partner, "n1"), begin(&partner, "n2"));
    assert_eq!((one.name(1, 9), one.name(2, 9), two.name(1, 9)), (Ok(()), Ok(()), Ok(())));
    refused(two.name(2, 9), "no more of them");
    refused(two.data(2, 0, 9), "no more of them");
    // One that is known may have another name.
    assert_eq!((two.name(1, 20), one.data(2, 0, 9)), (Ok(()), Ok(())));
    one.forget(1);
    assert_eq!(two.name(2, 9), Ok(()));
    end_all(&partner, [one, two]);
    // Of what has no data, nothing is kept for a later session.
    let (mut one, parts) = End::begin(&partner, "n1").expect("a session");
    assert_eq!((parts, one.name(7, 9), one.name(8, 9)), (1, Ok(()), Ok(())));
    refused(one.name(9, 9), "no more of them");
}

/// A recovery would take what came later for all of it.
#[test]
fn what_could_not_be_kept_fails_the_sync_also_if_there_is_room_by_then() {
    let scratch = Scratch::new("partnerhole");
    let partner = bounded(&scratch, with_kept(Kept { files: 2, ..WIDE.kept }), None);
    let mut end = begin(&partner, "n1");
    for drops in [false, true] {
        assert_eq!((end.name(1, 9), end.name(2, 9)), (Ok(()), Ok(())));
        end.say_name(3, 9);
        end.say(Said::Data(3, 0, vec![7; 9]));
        end.forget(1);
        if drops {
            // All of it is below.
            end.forget(3);
        }
        end.say_name(3, 9);
        let synced = end.data(3, 4 << 20, 9);
        if drops {
            assert_eq!(synced, Ok(()));
        } else {
            refused(synced, "no more files");
        }
        assert_eq!(end.data(3, 0, 9), Ok(()), "it is sent anew");
        end.forget(3);
    }
    // More of them than are remembered end the session.
    assert_eq!(end.name(1, 9), Ok(()));
    for file in 10..10 + (1 << 16) {
        end.say_name(file, 9);
    }
    assert_eq!(end.ask(Said::Beat), Ok(()));
    end.say_name(9, 9);
    let _ = Said::Beat.write(&mut end.0);
    assert!(Said::read(&mut end.0).is_err());
}

/// A recovery is another process's.
#[test]
fn what_was_recovered_counts_no_more_beside_another_cache() {
    let scratch = Scratch::new("partnerrecovered");
    let partner = bounded(&scratch, WIDE, Some(8 << 20));
    let (mut one, mut two) = (begin(&partner, "n1"), begin(&partner, "n2"));
    assert_eq!((one.name(1, 9), two.name(1, 9)), (Ok(()), Ok(())));
    for part in 0..3 {
        assert_eq!(one.data(1, part * (2 << 20), 2 << 20), Ok(()));
    }
    refused(two.data(1, 0, 3 << 20), "no more room");
    drop(one);
    while lock(&partner.homes).len() > 1 {
        thread::sleep(Duration::from_millis(5));
    }
    std::fs::remove_dir_all(scratch.0.join("partner/_here/n1")).expect("a folder");
    refused(two.data(1, 0, 3 << 20), "no more room");
    lock(&partner.accounts).values_mut().for_each(Account::let_measure);
    assert_eq!(two.data(1, 0, 3 << 20), Ok(()));
}

/// Of a file that cannot be so long, nothing counts, and nothing is remembered.
#[test]
fn what_cannot_be_written_takes_no_room() {
    let scratch = Scratch::new("partnerlong");
    let partner = bounded(&scratch, WIDE, Some(4 << 20));
    let mut end = begin(&partner, "n1");
    assert_eq!(end.name(1, 9), Ok(()));
    let longest = END - (2 << 20);
    for part in 0..8 {
        let refused = end.data(1, longest - part * (2 << 20), 1 << 20);
        assert!(refused.is_err_and(|why| !why.contains("room")), "{part}");
    }
    assert_eq!(end.data(1, 0, 3 << 20), Ok(()));
}

#[test]
fn names_are_counted_and_of_a_bounded_length() {
    let scratch = Scratch::new("partnernames");
    let partner = bounded(&scratch, with_kept(Kept { names: 100, ..WIDE.kept }), None);
    let mut end = begin(&partner, "n1");
    assert_eq!((end.name(1, 60), end.data(1, 0, 9)), (Ok(()), Ok(())));
    refused(end.name(2, 60), "does not know");
    // What is kept of it has the name before, and is told not to be as it should.
    refused(end.name(1, 101), "no more names");
    assert_eq!((end.name(1, 30), end.name(2, 60)), (Ok(()), Ok(())));
    end_all(&partner, [end]);
    let scratch = Scratch::new("partnername");
    let wide = bounded(&scratch, WIDE, None);
    let mut end = begin(&wide, "n1");
    assert_eq!(end.name(1, 4096), Ok(()));
    refused(end.name(2, 4097), "does not know");
    refused(end.name(1, 0), "too long");
}

#[test]
fn parts_are_counted_and_no_cut_makes_more() {
    let scratch = Scratch::new("partnerparts");
    let partner = bounded(&scratch, with_kept(Kept { parts: 4, ..WIDE.kept }), None);
    let mut end = begin(&partner, "n1");
    assert_eq!(end.name(1, 9), Ok(()));
    for part in 0..4 {
        assert_eq!(end.data(1, part << 20, 9), Ok(()));
    }
    refused(end.data(1, 4 << 20, 9), "no more parts");
    // It is below, or newer there.
    for part in 0..4 {
        end.say(Said::Note(Record::Clean(1, (part << 20) + 4, 1)));
    }
    assert_eq!(end.ask(Said::Beat), Ok(()));
    end.say(Said::Note(Record::Clean(1, 1, 1)));
    let _ = Said::Beat.write(&mut end.0);
    assert!(Said::read(&mut end.0).is_err(), "the session ends: what is cut must not be kept");
    end_all(&partner, [end]);
    // All is there that was, and can be given up.
    let (mut end, parts) = End::begin(&partner, "n1").expect("a session");
    assert_eq!(parts, 8);
    refused(end.data(1, 4 << 20, 9), "no more parts");
    end.say(Said::Note(Record::Clean(1, 0, 2 << 20)));
    end.say(Said::Note(Record::Clean(1, 2 << 20, 4)));
    assert_eq!((end.ask(Said::Beat), end.data(1, 4 << 20, 9)), (Ok(()), Ok(())));
}

#[test]
fn journals_and_names_count_for_the_room_of_a_key() {
    let scratch = Scratch::new("partnerjournal");
    let quota = 512 << 10;
    let partner = bounded(&scratch, WIDE, Some(quota));
    let mut end = begin(&partner, "n1");
    // Names of one file alone, of which the last counts.
    (3000..4000).for_each(|length| end.say_name(1, length));
    assert_eq!(end.ask(Said::Sync(1)), Ok(()));
    let kept = || size_of(&scratch.0.join("partner/_here"));
    assert!(kept() < quota, "{}", kept());
    (2..200).for_each(|file| end.say_name(file, 4000));
    let refusals = (2..200).filter(|file| end.ask(Said::Sync(*file)).is_err()).count();
    assert!((70..150).contains(&refusals), "{refusals}");
    refused(end.name(1, 4000), "no more room");
    // The blocks of folders, and those that a journal takes ahead.
    assert!(kept() < quota + (512 << 10), "{}", kept());
    refused(end.data(1, 0, 9), "no more room");
    // Another cache of the key has none, either; and there is some when these are gone.
    refused(begin(&partner, "n2").name(1, 4000), "no more of them");
    (2..200).for_each(|file| end.say(Said::Note(Record::Drop(file))));
    assert_eq!((end.ask(Said::Beat), end.name(3, 4000)), (Ok(()), Ok(())));
    assert_eq!(end.data(1, 0, 9), Ok(()));
}

#[test]
fn caches_and_folders_of_a_key_are_counted() {
    let scratch = Scratch::new("partnercaches");
    let partner = bounded(&scratch, Limits { sessions: 2, homes: 3, ..WIDE }, None);
    let (one, two) = (begin(&partner, "n1"), begin(&partner, "n2"));
    let why = |node| End::begin(&partner, node).map(|(_, parts)| parts).expect_err("too many");
    assert!(why("n3").contains("too many caches"));
    end_all(&partner, [one, two]);
    // The third has its folder by now.
    assert!(why("n4").contains("too many folders"));
    assert!(!scratch.0.join("partner/_here/n4").exists());
    end_all(&partner, [begin(&partner, "n3")]);
    assert_eq!(begin(&partner, "n3").ask(Said::End), Ok(()));
    assert!(End::begin(&partner, "n4").is_ok());
}

#[test]
fn a_cache_without_a_token_is_none() {
    let scratch = Scratch::new("partnertoken");
    let partner = bounded(&scratch, WIDE, None);
    let mut stream =
        TcpStream::connect(partner.address().expect("it listens")).expect("so it does");
    let hello = Hello {
        version: VERSION,
        under: "/scratch".into(),
        node: "n1".into(),
        token: String::new(),
    };
    Said::Hello(hello).write(&mut stream).expect("it listens");
    assert!(matches!(Said::read(&mut stream), Ok(Said::Failed(_))));
    assert!(!scratch.0.join("partner/_here").exists());
}
