//! The process management interface of MPI ranks: what a rank says to the daemon that has started
//! it, and a relay between the two that outlives neither.
//!
//! A rank begins with a line, which says whether it speaks PMI-1 or PMI-2. PMI-1 goes on in lines
//! ([`Line`]), PMI-2 in frames ([`Command`]). The [`Relay`] is a pure state machine: it speaks
//! PMI-2 with the daemon, and with the rank what that speaks. [`Session`] has the requests with
//! which it begins. None of them has a socket.
//!
//! docs/design/0048-slurm.md has the decisions. [`pmix`] has what ranks of Open MPI speak.
#![forbid(unsafe_code)]

mod error;
mod frame;
mod line;
pub mod pmix;
mod relay;
mod session;

pub use error::PmiError;
pub use frame::{Command, MAX_FRAME_LEN, take_frame};
pub use line::{Line, MAX_LINE_LEN, Version, take_line};
pub use relay::{MAX_TOLD, MAX_TOLD_BYTES, Relay, Saved};
pub use session::{Key, MAX_KEY_LEN, MAX_VALUE_LEN, Rank, Session};

/// What the fuzz target and its test hold the codecs to: whatever decodes is the same once it has
/// been encoded and decoded again, and no bytes bring the relay to anything but an error.
pub fn check_bytes(bytes: &[u8]) {
    pmix::check_bytes(bytes);
    let mut rest = bytes.to_vec();
    while let Ok(Some(frame)) = take_frame(&mut rest) {
        let Ok(command) = Command::parse(&frame) else { continue };
        let mut again = command.encode().unwrap_or_default();
        if again.is_empty() {
            // A semicolon more may be too long for a frame.
            continue;
        }
        let once_more = take_frame(&mut again).ok().flatten().map(|frame| Command::parse(&frame));
        assert_eq!(once_more, Some(Ok(command)));
    }
    let mut rest = bytes.to_vec();
    while let Ok(Some(text)) = take_line(&mut rest) {
        let Ok(line) = Line::parse(&text) else { continue };
        assert_eq!(Line::parse(line.to_string().trim_end_matches('\n')), Ok(line));
    }
    let rank = Rank { rank: 0, size: 2, application: -1, answer: Vec::new() };
    for split in [0, bytes.len() / 2, bytes.len()] {
        let mut relay = Relay::new(rank.clone(), "1.0".to_owned());
        let (one, other) = bytes.split_at(split);
        let _ = relay.from_rank(one);
        let _ = relay.from_daemon(other);
        let _ = relay.from_rank(other);
        let _ = relay.saved().map(|saved| Relay::restored(rank.clone(), saved));
    }
}
