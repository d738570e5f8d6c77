//! A round on its way between two machines: the proxy beside the client passes on what the other
//! two say.

use super::line::{Message, Reply, receive, receive_bytes, send};
use super::shown::Way;
use crate::error::LineError;
use std::io::{Read, Write};

/// What has passed of a round.
pub(crate) struct Passed {
    pub(crate) bytes: u64,
    /// What the target said last.
    pub(crate) ended: Reply,
}

/// Passes on what follows a round's notes, from the source on `from` to the target by `way`, and
/// the target's replies back by `back`.
pub(crate) fn pass(
    from: &mut impl Read,
    way: &mut Way<'_>,
    back: &mut impl Write,
) -> Result<Passed, LineError> {
    let (mut bytes, mut buffer) = (0, Vec::new());
    loop {
        let message = receive::<Message>(from)?;
        match message {
            Message::Round { .. }
            | Message::Lend { .. }
            | Message::Part { .. }
            | Message::There { .. } => return Err(LineError::Order),
            Message::Bytes { len, .. } => {
                receive_bytes(from, len, &mut buffer)?;
                send(&mut way.to, &message)?;
                way.to.write_all(&buffer)?;
                bytes += len;
            }
            Message::Make {} | Message::End {} => {
                send(&mut way.to, &message)?;
                let reply = match (way.reply)()? {
                    // It is not near to the other.
                    Reply::Near {} => Reply::Done {},
                    reply => reply,
                };
                send(back, &reply)?;
                if message == (Message::End {}) || reply != (Reply::Done {}) {
                    return Ok(Passed { bytes, ended: reply });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_wire::Text;

    /// A source's words, as bytes.
    fn said(messages: &[(Message, &[u8])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (message, payload) in messages {
            send(&mut bytes, message).unwrap();
            bytes.extend_from_slice(payload);
        }
        bytes
    }

    fn passed(from: &[u8], replies: &[Reply]) -> (Result<Passed, LineError>, Vec<u8>, Vec<u8>) {
        let (mut to, mut back) = (Vec::new(), Vec::new());
        let mut replies = replies.iter().cloned();
        let mut reply = || replies.next().ok_or(LineError::Order);
        let passed = pass(
            &mut &from[..],
            &mut Way { to: &mut to, reply: &mut reply, socket: None },
            &mut back,
        );
        (passed, to, back)
    }

    #[test]
    fn a_round_passes_as_it_is_and_its_replies_come_back() {
        let bytes = Message::Bytes { number: 1, from: 0, len: 3 };
        let round = said(&[
            (Message::Make {}, &[]),
            (bytes, b"abc"),
            (Message::End {}, &[]),
            (Message::Make {}, &[]),
        ]);
        let (all, to, back) = passed(&round, &[Reply::Done {}, Reply::Done {}]);
        let all = all.unwrap();
        assert_eq!((all.bytes, all.ended), (3, Reply::Done {}));
        assert_eq!(to, round[..to.len()], "what follows is the next round's");
        assert!(to.len() < round.len());
        let mut back = &back[..];
        for _ in 0..2 {
            assert_eq!(receive::<Reply>(&mut back).unwrap(), Reply::Done {});
        }
        assert!(back.is_empty());
    }

    #[test]
    fn a_round_ends_where_the_target_cannot_take_it() {
        let unfit = Reply::Unfit { why: Text::default() };
        let round = said(&[(Message::Make {}, &[]), (Message::End {}, &[])]);
        let (ended, _, back) = passed(&round, std::slice::from_ref(&unfit));
        assert_eq!(ended.unwrap().ended, unfit);
        assert_eq!(receive::<Reply>(&mut &back[..]).unwrap(), unfit);
        let nested = said(&[(Message::Round { last: true }, &[])]);
        assert!(matches!(passed(&nested, &[]).0, Err(LineError::Order)));
        let endless = said(&[(Message::Bytes { number: 1, from: 0, len: u64::MAX }, &[])]);
        assert!(matches!(passed(&endless, &[]).0, Err(LineError::TooLong { .. })));
    }
}
