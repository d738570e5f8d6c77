//! The sessions of a server, and the proxies that serve them.

use crate::ServeSpec;
use crate::chosen::Chosen;
use crate::homes::Owner;
use crate::past::Past;
use crate::refusal::Refusal;
use crate::start::{self, Started};
use crate::taking::Taking;
use crate::tenants::{Place, Tenants};
use kedge_control::gpu::GpuSpec;
use kedge_keys::{Connection, Fingerprint, Limits, Name, Secrets};
use kedge_remote::{HandedOver, JobKey, SessionKey, Terms};
use kedge_socket::Channel;
use rustix::process::{Signal, pidfd_send_signal};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Sessions at a time.
const MAX_SESSIONS: usize = 256;
/// Proxies at a time that answer NVML, of all and of one client: a job needs one.
const MAX_MANAGEMENT: usize = 256;
const MAX_MANAGEMENT_OF_ONE: usize = 32;
/// For a proxy to take a connection, and to end once it is killed.
const LIMIT: Duration = Duration::from_secs(10);
/// For a proxy to take a notice: there is room unless it is stuck.
const NOTICE: Duration = Duration::from_millis(100);
/// Between two looks whether it has.
const ENDING: Duration = Duration::from_millis(5);

/// Who has connected from another machine. Another certificate of the same name is another client.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Client {
    pub(crate) name: Name,
    pub(crate) certificate: Fingerprint,
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name.fmt(f)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Sessions(Mutex<Open>);

#[derive(Debug, Default)]
pub(crate) struct Open {
    pub(crate) by_key: HashMap<SessionKey, Session>,
    pub(crate) tenants: Tenants,
    past: Past,
    pub(crate) taking: Taking,
    /// No session begins any more; nothing does.
    pub(crate) ending: bool,
    over: bool,
}

/// What a proxy is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A client's devices: this alone is a session.
    Devices,
    /// A job's questions to NVML.
    Management,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Devices => "session",
            Kind::Management => "NVML",
        }
    }
}

impl Open {
    fn count(&self, kind: Kind) -> usize {
        self.by_key.values().filter(|session| session.kind == kind).count()
    }

    /// Checks that something may begin for a client.
    fn check(&self, asked: &Asked<'_>, who: Option<&Client>) -> Result<(), Refusal> {
        let kind = asked.kind;
        if self.over || self.ending && kind == Kind::Devices {
            return Err(Refusal::Ending);
        }
        if self.by_key.contains_key(&asked.key) {
            return Err(Refusal::Twice);
        }
        if self.past.has(who, &asked.key, asked.attempt) {
            return Err(Refusal::Over);
        }
        let most = if kind == Kind::Devices { MAX_SESSIONS } else { MAX_MANAGEMENT };
        if self.count(kind) >= most {
            return Err(Refusal::Full(most));
        }
        let name = who.map(|who| &who.name);
        let own = || self.by_key.values().filter(|it| it.kind == kind && it.name() == name);
        if kind == Kind::Management {
            let most = MAX_MANAGEMENT_OF_ONE;
            return if own().count() < most { Ok(()) } else { Err(Refusal::Management(most)) };
        }
        let jobs: HashSet<JobKey> = own().map(|session| session.job).collect();
        if let Some(most) = asked.limits.jobs
            && !jobs.contains(&asked.job)
            && jobs.len() >= most as usize
        {
            return Err(Refusal::Jobs { most });
        }
        match asked.limits.sessions {
            Some(most) if own().count() >= most as usize => Err(Refusal::Sessions { most }),
            _ => Ok(()),
        }
    }

    /// Returns the devices that a tenant's sessions are on.
    fn devices_of(&self, name: Option<&Name>) -> BTreeSet<u32> {
        let own = self.by_key.values().filter(|it| it.kind == Kind::Devices && it.name() == name);
        own.flat_map(|session| session.devices.iter().copied()).collect()
    }
}

/// What somebody asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub(crate) kind: Kind,
    pub(crate) key: SessionKey,
    pub(crate) attempt: u32,
    pub(crate) job: JobKey,
    /// By the server's numbers; none: as many as there are.
    pub(crate) devices: &'a [u32],
    /// Of its key.
    pub(crate) limits: &'a Limits,
    /// As whom its proxy runs; `None`: as the server.
    pub(crate) owner: Option<&'a Owner>,
}

#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) kind: Kind,
    /// Its slot in its tenant's account, if it is a client's.
    pub(crate) place: Option<Place>,
    /// As its near end tells it.
    pub(crate) job: JobKey,
    /// Those that it is on, by the server's numbers.
    pub(crate) devices: Vec<u32>,
    /// Whose it is; nobody's where it comes from this machine.
    who: Option<Client>,
    /// Its proxy's process, as what signals it, and its number.
    process: OwnedFd,
    /// How often its near end had tried to begin it.
    attempt: u32,
    /// Why it was ended, if it was.
    ended: Option<&'static str>,
    /// The way to its proxy.
    pub(crate) channel: Arc<Channel>,
    pid: u32,
    /// Its proxy has its terms, and has been told to heed turns.
    pub(crate) has_begun: bool,
    pub(crate) takes_turns: bool,
    /// When it was to be told so last, and took no message.
    pub(crate) told_in_vain: Option<Instant>,
}

/// A proxy that has been started for a session, and waits for its line's secrets.
pub(crate) struct Begun {
    pub(crate) proxy: Child,
    /// What it says on standard error.
    pub(crate) words: UnixStream,
    pub(crate) channel: Arc<Channel>,
    pub(crate) place: Option<Place>,
    pub(crate) gpu: GpuSpec,
}

impl Sessions {
    pub(crate) fn locked(&self) -> MutexGuard<'_, Open> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a proxy for a session on `line`, or says why not. What an earlier attempt has begun
    /// is ended first.
    pub(crate) fn begin(
        &self,
        spec: &ServeSpec,
        asked: Asked<'_>,
        who: Option<Client>,
        line: &TcpStream,
    ) -> Result<Begun, Refusal> {
        let Asked { kind, key, attempt, job, devices, limits, owner } = asked;
        self.end_before(&key, attempt, who.as_ref())?;
        let mut open = self.locked();
        open.check(&asked, who.as_ref())?;
        let name = who.as_ref().map(|who| &who.name);
        let chosen = Chosen::of(spec, devices, limits, &open.devices_of(name))?;
        let failed = Refusal::Start;
        let line: OwnedFd = line.as_fd().try_clone_to_owned().map_err(failed)?;
        let (channel, far) = Channel::pair().map_err(failed)?;
        let place = match kind {
            Kind::Devices => Some(open.tenants.enter(name, limits.bandwidth).map_err(failed)?),
            Kind::Management => None,
        };
        let started = start::proxy(spec, (kind, owner), &chosen.gpu, line, far);
        let Started { proxy, process, words } = started.map_err(|error| {
            place.iter().for_each(|place| open.tenants.leave(name, place));
            failed(error)
        })?;
        let channel = Arc::new(channel);
        let (pid, own) = (proxy.id(), channel.clone());
        let (devices, ended) = (chosen.numbers, None);
        let kept = place.clone();
        let session = Session {
            kind,
            place: kept,
            job,
            devices,
            who,
            process,
            attempt,
            ended,
            channel: own,
            pid,
            has_begun: false,
            takes_turns: false,
            told_in_vain: None,
        };
        open.by_key.insert(key, session);
        Ok(Begun { proxy, words, channel, place, gpu: chosen.gpu })
    }

    /// Counts something that was refused.
    pub(crate) fn refused(&self, who: Option<&Client>) {
        self.locked().tenants.refused(who.map(|who| &who.name));
    }

    /// Returns the way to a session's proxy, if it is theirs who ask.
    pub(crate) fn proxy_of(&self, key: &SessionKey, who: Option<&Client>) -> Option<Arc<Channel>> {
        let open = self.locked();
        let session = open.by_key.get(key).filter(|session| session.who.as_ref() == who)?;
        Some(session.channel.clone())
    }

    /// Returns the processes of the proxies of somebody's sessions.
    pub(crate) fn processes(&self, who: Option<&Client>) -> Vec<u32> {
        let open = self.locked();
        let theirs = open.by_key.values().filter(|session| session.who.as_ref() == who);
        theirs.map(|session| session.pid).collect()
    }

    /// Returns whether any session comes from another machine.
    pub(crate) fn any_from_afar(&self) -> bool {
        self.locked().by_key.values().any(|session| session.who.is_some())
    }

    /// Ends the sessions from other machines whose client does not count any more.
    ///
    /// Their near ends find the line cut, connect anew, and hear in the handshake why.
    pub(crate) fn end_unless(&self, counts: impl Fn(&Client) -> bool) {
        for session in self.locked().by_key.values_mut() {
            if session.who.as_ref().is_some_and(|who| !counts(who)) {
                session.end("its key is not pinned here any more");
            }
        }
    }

    /// Ends a session whose near end is gone, if it is theirs who ask, and waits until its proxy
    /// has ended: none is as good. It does not begin any more.
    pub(crate) fn end(&self, key: &SessionKey, who: Option<&Client>) -> Result<(), Refusal> {
        // Before it is looked for: what begins it is refused from here on.
        self.locked().past.add(who, *key, u32::MAX, Instant::now());
        self.end_before(key, u32::MAX, who)
    }

    /// Ends what an attempt before this one has begun, likewise.
    fn end_before(
        &self,
        key: &SessionKey,
        attempt: u32,
        who: Option<&Client>,
    ) -> Result<(), Refusal> {
        let begin = Instant::now();
        loop {
            let mut open = self.locked();
            let Some(session) = open.by_key.get_mut(key) else { return Ok(()) };
            if session.who.as_ref() != who {
                return Err(Refusal::Another);
            }
            if session.attempt >= attempt {
                return Err(Refusal::Later);
            }
            session.end("its near end is gone");
            drop(open);
            if begin.elapsed() > LIMIT {
                return Err(Refusal::Stuck);
            }
            std::thread::sleep(ENDING);
        }
    }

    /// Begins no session from here on. Returns how many there are.
    pub(crate) fn close(&self) -> usize {
        let mut open = self.locked();
        open.ending = true;
        open.count(Kind::Devices)
    }

    /// Tells every session's near end. One that cannot be told now is not waited for.
    pub(crate) fn tell_all(&self, what: &HandedOver) {
        // A proxy that takes nothing does not hold up who looks for a session.
        let channels: Vec<Arc<Channel>> = {
            let open = self.locked();
            let all = open.by_key.values().filter(|session| session.kind == Kind::Devices);
            all.map(|session| session.channel.clone()).collect()
        };
        for channel in channels {
            let _ = channel.send(&(what.clone(), None::<Secrets>), &[], NOTICE);
        }
    }

    /// Ends all that there is, and waits for it for so long; nothing begins any more.
    pub(crate) fn end_all(&self, why: &'static str, limit: Duration) {
        let mut open = self.locked();
        open.over = true;
        open.by_key.values_mut().for_each(|session| session.end(why));
        drop(open);
        let begin = Instant::now();
        while !self.locked().by_key.is_empty() && begin.elapsed() < limit {
            std::thread::sleep(ENDING);
        }
    }

    /// Waits until there is no session, but not past `deadline`, and not if `hurry` says so:
    /// how many there are. What answers NVML is none.
    pub(crate) fn wait_for_all(&self, deadline: Instant, hurry: &dyn Fn() -> bool) -> usize {
        loop {
            let left = self.locked().count(Kind::Devices);
            if left == 0 || Instant::now() >= deadline || hurry() {
                return left;
            }
            std::thread::sleep(ENDING);
        }
    }

    /// Waits for a session's proxy: how it ended.
    pub(crate) fn wait(&self, key: &SessionKey, mut proxy: Child) -> String {
        let ended = proxy.wait();
        let mut open = self.locked();
        let session = open.by_key.remove(key);
        if let Some(session) = &session {
            // What has begun it before its near end tried again may be under way.
            if session.kind == Kind::Devices {
                open.past.add(session.who.as_ref(), *key, session.attempt, Instant::now());
            }
            session.place.iter().for_each(|place| open.tenants.leave(session.name(), place));
        }
        drop(open);
        if let Some(why) = session.and_then(|session| session.ended) {
            return why.into();
        }
        match ended {
            Ok(status) if status.success() => "its program has ended".into(),
            Ok(status) => format!("its proxy has failed ({status})"),
            Err(error) => format!("its proxy is lost: {error}"),
        }
    }
}

impl Session {
    /// Returns whose it is.
    pub(crate) fn name(&self) -> Option<&Name> {
        self.who.as_ref().map(|who| &who.name)
    }

    fn end(&mut self, why: &'static str) {
        if self.ended.is_none() {
            self.ended = Some(why);
            // A proxy that has ended meanwhile is what is wanted.
            let _ = pidfd_send_signal(&self.process, Signal::KILL);
        }
    }
}

/// Has a session's proxy go on with its line, of which it has the stream, with its slot of its
/// tenant's account, and with how much device memory and bandwidth that may have.
pub(crate) fn tell_terms(
    channel: &Channel,
    terms: Option<(Place, Limits)>,
    line: Connection,
) -> Result<(), String> {
    let said = |error: &dyn fmt::Display| error.to_string();
    let (_, secrets) = line.into_secrets().map_err(|error| said(&error))?;
    let file = terms.as_ref().map(|(place, _)| place.file()).transpose();
    let file = file.map_err(|error| said(&error))?;
    let terms = terms.map(|(Place { slot, .. }, Limits { memory, bandwidth, .. })| Terms {
        slot,
        memory,
        bandwidth,
    });
    let fds: Vec<BorrowedFd<'_>> = file.iter().map(AsFd::as_fd).collect();
    channel.send(&(terms, secrets), &fds, LIMIT).map_err(|error| said(&error))
}

/// Hands a connection to the proxy of its session, which answers.
pub(crate) fn hand_over(
    channel: &Channel,
    what: HandedOver,
    connection: Connection,
) -> Result<(), String> {
    let (stream, secrets) = connection.into_secrets().map_err(|error| error.to_string())?;
    let handed = channel.send(&(what, secrets), &[stream.as_fd()], LIMIT);
    handed.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_keys::Keys;
    use std::net::TcpListener;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;
    use std::sync::mpsc;
    use std::{fs, thread};

    static NO_LIMITS: Limits = Limits {
        gpus: None,
        devices: None,
        memory: None,
        sessions: None,
        jobs: None,
        bandwidth: None,
    };

    /// A folder of the test's own, with keys and a proxy that does nothing.
    struct Place(PathBuf);

    impl Place {
        fn new() -> Place {
            let path = std::env::temp_dir().join(format!("kserved-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            let place = Place(path);
            fs::write(place.proxy(), "#!/bin/sh\nexec sleep 100\n").unwrap();
            fs::set_permissions(place.proxy(), fs::Permissions::from_mode(0o700)).unwrap();
            place
        }

        fn proxy(&self) -> PathBuf {
            self.0.join("proxy")
        }

        /// Returns a client with a key that nobody else has.
        fn client(&self, name: &str) -> Client {
            let keys = Keys::at(self.0.join("keys"));
            let made = keys.make(name, Duration::from_secs(1000), true).unwrap();
            Client { name: name.parse().unwrap(), certificate: made.fingerprint() }
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_session_ends_with_its_key_and_is_nobody_elses() {
        let place = Place::new();
        let spec = ServeSpec {
            listen: "127.0.0.1:0".parse().unwrap(),
            gpu: "soft".parse().unwrap(),
            devices: 1,
            soft_memory: None,
            users: None,
            keys: None,
            proxy: place.proxy(),
            takes_jobs: None,
        };
        let listener = TcpListener::bind(spec.listen).unwrap();
        let line = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (alice, later, bob) =
            (place.client("alice"), place.client("alice"), place.client("bob"));
        let sessions = Arc::<Sessions>::default();
        let asked = |key, attempt| Asked {
            kind: Kind::Devices,
            key,
            attempt,
            job: key,
            devices: &[],
            limits: &NO_LIMITS,
            owner: None,
        };
        assert!(!sessions.any_from_afar());
        let (ends, ended) = mpsc::channel();
        let begin = |key: SessionKey, attempt, who: Option<&Client>| {
            let begun = sessions.begin(&spec, asked(key, attempt), who.cloned(), &line).unwrap();
            let (all, ends) = (sessions.clone(), ends.clone());
            thread::spawn(move || ends.send((key, all.wait(&key, begun.proxy))));
            key
        };
        let here = begin([1; 16], 1, None);
        assert!(!sessions.any_from_afar());
        let of_alice = begin([2; 16], 1, Some(&alice));
        let of_bob = begin([3; 16], 1, Some(&bob));
        assert!(sessions.any_from_afar());
        // Another key of the same name is another client.
        assert!(sessions.proxy_of(&of_alice, Some(&alice)).is_some());
        for other in [Some(&later), Some(&bob), None] {
            assert!(sessions.proxy_of(&of_alice, other).is_none(), "{other:?}");
        }
        let limit = Duration::from_secs(20);
        // A later attempt takes the place of the one before; an earlier one, and another's, do not.
        let refused = |attempt, who: Option<&Client>| {
            sessions.begin(&spec, asked(here, attempt), who.cloned(), &line).is_err()
        };
        assert!(refused(1, None) && refused(2, Some(&bob)));
        assert!(sessions.end(&of_alice, None).is_err() && sessions.end(&[9; 16], None).is_ok());
        let first = sessions.locked().by_key[&here].pid;
        let earlier = sessions.locked().by_key[&here].channel.clone();
        begin(here, 2, None);
        assert_eq!(ended.recv_timeout(limit).unwrap(), (here, "its near end is gone".into()));
        assert_ne!(sessions.locked().by_key[&here].pid, first);
        // That its first proxy has its terms says nothing of this one.
        let has_begun = |channel: &Arc<Channel>| {
            sessions.has_begun(&here, channel);
            sessions.locked().by_key[&here].has_begun
        };
        let own = sessions.locked().by_key[&here].channel.clone();
        assert!(!has_begun(&earlier) && has_begun(&own));
        sessions.end_unless(|client| *client == bob || *client == later);
        let (key, why) = ended.recv_timeout(limit).unwrap();
        assert_eq!((key, &*why), (of_alice, "its key is not pinned here any more"));
        for living in [here, of_bob] {
            assert!(sessions.locked().by_key.contains_key(&living));
        }
        // Who has not been told of turns is told again.
        let told = |channel: Channel| {
            let mut open = sessions.locked();
            let session = open.by_key.get_mut(&of_bob).unwrap();
            session.channel = Arc::new(channel);
            session.takes_turns(true);
            let tried = session.told_in_vain.take().is_some();
            assert_ne!(session.takes_turns, tried);
            session.takes_turns
        };
        let (near, far) = Channel::pair().unwrap();
        drop(far);
        assert!(!told(near));
        let (near, _far) = Channel::pair().unwrap();
        assert!(told(near));
        sessions.end_unless(|_| false);
        assert_eq!(ended.recv_timeout(limit).unwrap().0, of_bob);
        // Who comes from this machine has no key to be revoked.
        assert!(ended.recv_timeout(Duration::from_millis(300)).is_err());
        sessions.end(&here, None).unwrap();
        assert_eq!(ended.recv_timeout(limit).unwrap().0, here);
        // What begins a session late finds it over, whether it was there or not.
        let over = |key: SessionKey, attempt, who: Option<&Client>| {
            let begun = sessions.begin(&spec, asked(key, attempt), who.cloned(), &line);
            matches!(begun.map(|_| ()), Err(Refusal::Over))
        };
        assert!(sessions.end(&[4; 16], Some(&bob)).is_ok());
        assert!(over(here, 9, None) && over([9; 16], 1, None) && over([4; 16], 1, Some(&bob)));
        // One whose proxy was lost may be begun anew, and nobody ends what another begins.
        assert!(over(of_bob, 1, Some(&bob)));
        for (key, attempt, who) in [(of_bob, 2, Some(&bob)), ([4; 16], 1, None)] {
            begin(key, attempt, who);
            sessions.end(&key, who).unwrap();
        }
    }
}
