//! Jobs that move here as a whole: each has a process of kedge's own that takes it, which has the
//! line to the host that it leaves, restarts it, and then holds its streams. The job runs as the
//! server's own user. It is no session: it goes on when the server ends.

use crate::Lender;
use crate::refusal::Refusal;
use crate::said::{Event, Said};
use crate::sessions::Client;
use crate::start::Words;
use kedge_keys::{Connection, Secrets};
use kedge_remote::{Offer, Refused, SessionKey, write_one};
use kedge_socket::Channel;
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Most jobs at a time that move here or have and run.
const MAX_JOBS: usize = 512;
/// Most such jobs of one client.
const MAX_JOBS_PER_CLIENT: usize = 64;
/// For who takes a job to take a connection.
const LIMIT: Duration = Duration::from_secs(10);

/// A job by what names its move, and whose it is.
#[derive(Debug)]
struct One {
    who: Option<Client>,
    channel: Arc<Channel>,
}

/// All that there are.
#[derive(Debug, Default)]
pub(crate) struct Taken(Mutex<HashMap<SessionKey, One>>);

impl Taken {
    fn locked(&self) -> MutexGuard<'_, HashMap<SessionKey, One>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the way to who has taken a job, if it is theirs who ask.
    pub(crate) fn channel(&self, token: &SessionKey, who: Option<&Client>) -> Option<Arc<Channel>> {
        let all = self.locked();
        all.get(token).filter(|one| one.who.as_ref() == who).map(|one| one.channel.clone())
    }

    fn add(&self, token: SessionKey, one: One) -> Result<(), Refusal> {
        let mut all = self.locked();
        if all.values().filter(|other| other.who == one.who).count() >= MAX_JOBS_PER_CLIENT {
            return Err(Refusal::TakingOfOne(MAX_JOBS_PER_CLIENT));
        }
        if all.len() >= MAX_JOBS {
            return Err(Refusal::Taking(MAX_JOBS));
        }
        if all.contains_key(&token) {
            return Err(Refusal::Twice);
        }
        all.insert(token, one);
        Ok(())
    }
}

/// Starts the process that takes a job, with its line and its end of a channel.
fn start(kedge: &Path, line: OwnedFd, far: OwnedFd) -> std::io::Result<(Child, UnixStream)> {
    let (words, says) = UnixStream::pair()?;
    // A server that stands still holds nobody up.
    says.set_nonblocking(true)?;
    let mut command = Command::new(kedge);
    // What it is to do its line says; what a file of the user's says is for people.
    command.arg("take-job").env("KEDGE_CONFIG", "").env_remove("NOTIFY_SOCKET");
    command.stdin(line).stdout(Stdio::from(far)).stderr(OwnedFd::from(says));
    Ok((command.spawn()?, words))
}

/// Hands the streams' connection to who has taken the job, who answers.
pub(crate) fn hand_over(channel: &Channel, connection: Connection) -> Result<(), String> {
    let (stream, secrets) = connection.into_secrets().map_err(|error| error.to_string())?;
    let handed = channel.send(&secrets, &[stream.as_fd()], LIMIT);
    handed.map_err(|error| error.to_string())
}

impl Lender {
    /// Has a job taken.
    pub(crate) fn take_job(
        self: &Arc<Lender>,
        token: SessionKey,
        who: Option<Client>,
        mut stream: Connection,
    ) -> Result<(), String> {
        let begun = self.begin_to_take(token, who.clone(), &stream);
        let (mut child, words, channel) = match begun {
            Ok(begun) => begun,
            Err(why) => return self.refuse(who.as_ref(), &mut stream, why.to_string()),
        };
        let peer = stream.stream().peer_addr().ok();
        let from = peer.map_or_else(|| "?".into(), |from| from.to_string());
        let from = who.iter().fold(from, |from, who| format!("{who} ({from})"));
        let key = who.as_ref().map(ToString::to_string);
        let offered = write_one(&mut stream, &Ok::<_, Refused>(Offer {}));
        let handed = stream.into_secrets().map_err(|error| error.to_string());
        let handed = handed.and_then(|(_, secrets): (_, Option<Secrets>)| {
            channel.send(&secrets, &[], LIMIT).map_err(|error| error.to_string())
        });
        let pid = child.id();
        let begins = format!("a job of {from} moves here, by process {pid}");
        let said = Said { key, from: peer, ..Said::new(Event::Begins, begins) };
        said.log(&self.log);
        let (log, speaker, of) =
            (self.log.clone(), said.clone(), format!("process {pid} of {from}"));
        let words = Words::hear(words, move |text| {
            let text = format!("{of}: {text}");
            Said { event: Event::Trouble, text, ..speaker.clone() }.log(&log);
        });
        let lender = self.clone();
        let wait = move || {
            let ended = child.wait().map_or_else(|error| error.to_string(), |it| it.to_string());
            lender.taken.locked().remove(&token);
            words.into_iter().for_each(Words::end);
            let text = format!("the process {pid} that took a job of {from} has ended: {ended}");
            Said { event: Event::Ends, text, ..said }.log(&lender.log);
        };
        let waits = thread::Builder::new().name("taken".into()).stack_size(64 << 10).spawn(wait);
        waits.map(drop).and(offered).map_err(|error| error.to_string()).and(handed)
    }

    fn begin_to_take(
        &self,
        token: SessionKey,
        who: Option<Client>,
        stream: &Connection,
    ) -> Result<(Child, UnixStream, Arc<Channel>), Refusal> {
        let kedge = self.spec.takes_jobs.as_ref().ok_or(Refusal::TakesNone)?;
        let (channel, far) = Channel::pair().map_err(Refusal::Taker)?;
        let channel = Arc::new(channel);
        self.taken.add(token, One { who, channel: channel.clone() })?;
        let line = stream.stream().try_clone();
        let started = line.and_then(|line| start(kedge, line.into(), far));
        let (child, words) = started.map_err(|error| {
            self.taken.locked().remove(&token);
            Refusal::Taker(error)
        })?;
        Ok((child, words, channel))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_keys::Keys;

    #[test]
    fn a_key_with_many_jobs_keeps_no_other_out() {
        let taken = Taken::default();
        let folder = std::env::temp_dir().join(format!("ktaken-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let client = |name: &str| {
            let keys = Keys::at(folder.join(name));
            let made = keys.make(name, Duration::from_secs(1000), true).unwrap();
            Client { name: name.parse().unwrap(), certificate: made.fingerprint() }
        };
        let (alice, bob) = (client("alice"), client("bob"));
        let add = |who: &Client, number: usize| {
            let mut token = SessionKey::default();
            token[..8].copy_from_slice(&number.to_le_bytes());
            let channel = Arc::new(Channel::pair().unwrap().0);
            taken.add(token, One { who: Some(who.clone()), channel })
        };
        (0..MAX_JOBS_PER_CLIENT).for_each(|number| add(&alice, number).unwrap());
        let refused = add(&alice, 1000).unwrap_err();
        assert!(matches!(refused, Refusal::TakingOfOne(MAX_JOBS_PER_CLIENT)), "{refused}");
        add(&bob, 1001).unwrap();
        assert!(matches!(add(&bob, 1), Err(Refusal::Twice)));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
