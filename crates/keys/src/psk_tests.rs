use crate::psk::{PskChannel, PskEnd, PskError};

const SECRET: [u8; 32] = [7; 32];

fn pair() -> [PskChannel; 2] {
    [PskEnd::First, PskEnd::Second].map(|end| PskChannel::new(SECRET, end).unwrap())
}

/// Has one of them say something, if it may.
fn say(from: &mut PskChannel, text: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    from.seal(text, &mut out).unwrap();
    out
}

/// Returns what the other one hears, in pieces of that size; and what it has to say itself.
fn hear(to: &mut PskChannel, bytes: &[u8], piece: usize) -> (Vec<u8>, Vec<u8>) {
    let (mut plain, mut out) = (Vec::new(), Vec::new());
    bytes.chunks(piece).for_each(|bytes| to.open(bytes, &mut plain).unwrap());
    to.greet(&mut out);
    (plain, out)
}

/// Has the two greet each other.
fn shake(first: &mut PskChannel, second: &mut PskChannel) {
    let (one, two) = (say(first, b""), say(second, b""));
    assert!(!first.is_ready() && !second.is_ready());
    assert_eq!(hear(second, &one, 5), (Vec::new(), Vec::new()));
    assert_eq!(hear(first, &two, 33), (Vec::new(), Vec::new()));
    assert!(first.is_ready() && second.is_ready());
}

#[test]
fn what_one_says_the_other_hears_however_it_is_cut() {
    for piece in [1, 3, 33, 4096, usize::MAX] {
        let [mut first, mut second] = pair();
        shake(&mut first, &mut second);
        let long = vec![5; 50_000];
        let sent = [say(&mut first, b"one"), say(&mut first, &long)].concat();
        assert!(!sent.windows(16).any(|window| window == [5; 16]), "it is sealed");
        let (plain, answer) = hear(&mut second, &sent, piece);
        assert_eq!(plain, [b"one", &long[..]].concat());
        assert!(answer.is_empty());
        let back = say(&mut second, b"two");
        assert_eq!(hear(&mut first, &back, piece).0, b"two");
    }
}

#[test]
fn another_secret_or_a_changed_byte_is_found() {
    let [mut first, _] = pair();
    let mut stranger = PskChannel::new([8; 32], PskEnd::Second).unwrap();
    let greeting = say(&mut first, b"");
    let (_, answer) = hear(&mut stranger, &greeting, 99);
    hear(&mut first, &answer, 99);
    let sealed = say(&mut first, b"secret");
    assert!(matches!(stranger.open(&sealed, &mut Vec::new()), Err(PskError::Record(_))));
    for at in 0..sealed.len() {
        let [mut first, mut second] = pair();
        shake(&mut first, &mut second);
        let mut sealed = say(&mut first, b"secret");
        sealed[at] ^= 1;
        let mut plain = Vec::new();
        let opened = second.open(&sealed, &mut plain);
        // A length that has grown waits for more.
        assert!(opened.is_err() || second.is_ready() && plain.is_empty(), "{at}");
        assert!(plain.is_empty(), "{at}");
    }
}

#[test]
fn nothing_comes_before_a_greeting() {
    let [mut first, _] = pair();
    assert_eq!(first.open(&[23, 3, 3, 0, 1, 0], &mut Vec::new()), Err(PskError::Nonsense));
}

/// Both go on with other keys after a restart, and what was on its way then is heard.
#[test]
fn who_was_brought_back_greets_anew() {
    let [mut first, mut second] = pair();
    shake(&mut first, &mut second);
    let on_its_way = say(&mut first, b"before ");
    first.renew().unwrap();
    let mut held = Vec::new();
    assert!(!first.seal(b"after", &mut held).unwrap(), "not before the answer");
    let (plain, answer) = hear(&mut second, &[on_its_way, held].concat(), 7);
    assert_eq!(plain, b"before ");
    assert_eq!(hear(&mut first, &answer, 7).0, b"");
    let after = say(&mut first, b"after");
    assert_eq!(hear(&mut second, &after, 7).0, b"after");
    let back = say(&mut second, b"and back");
    assert_eq!(hear(&mut first, &back, 7).0, b"and back");
}

/// Both at once, and one of them twice with its first greeting still on its way.
#[test]
fn greetings_that_cross_belong_together_by_their_order() {
    let [mut first, mut second] = pair();
    shake(&mut first, &mut second);
    let mut to_second = say(&mut first, b"a");
    first.renew().unwrap();
    to_second.extend(say(&mut first, b""));
    // Another life begins before that has come.
    first.renew().unwrap();
    to_second.extend(say(&mut first, b""));
    second.renew().unwrap();
    let mut to_first = say(&mut second, b"");
    // The first of the two is answered, and something said by it; then the other one.
    let cut = to_second.len() - 33;
    let (plain, answer) = hear(&mut second, &to_second[..cut], 11);
    assert_eq!((plain, answer), (b"a".to_vec(), Vec::new()));
    to_first.extend(say(&mut second, b"b"));
    let (plain, answer) = hear(&mut second, &to_second[cut..], 11);
    assert!(plain.is_empty());
    to_first.extend(answer);
    to_first.extend(say(&mut second, b"c"));
    assert_eq!(hear(&mut first, &to_first, 13).0, b"bc");
    let last = say(&mut first, b"d");
    assert_eq!(hear(&mut second, &last, 13).0, b"d");
}

/// Two lives of one memory do not seal by the same key.
#[test]
fn two_lives_have_keys_of_their_own() {
    let [mut first, mut second] = pair();
    let [mut again, mut other] = pair();
    for (one, two) in [(&mut first, &mut second), (&mut again, &mut other)] {
        shake(one, two);
    }
    assert_ne!(say(&mut first, b"text"), say(&mut again, b"text"));
}

#[test]
fn who_greets_without_end_is_not_listened_to() {
    let [mut first, _] = pair();
    let greeting = [&[1][..], &[9; 32]].concat();
    let mut failed = None;
    for _ in 0..5000 {
        failed = failed.or(first.open(&greeting, &mut Vec::new()).err());
    }
    assert_eq!(failed, Some(PskError::TooOften));
}
