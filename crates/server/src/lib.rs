//! `kedge serve`: lends this machine's devices to programs on others.
//!
//! [`Server`] listens, shakes hands with whoever comes from another machine, reads one frame of
//! each connection, and gives each session a proxy of its own, which ends with it. What a session
//! says after that frame, its proxy alone reads.
#![forbid(unsafe_code)]

mod chosen;
mod claims;
mod figures;
mod homes;
mod measure;
mod openings;
mod past;
mod refusal;
mod said;
mod sessions;
mod start;
mod taken;
mod taking;
mod tenants;
mod turns;

pub use figures::{Figures, TenantFigures, Watch};
pub use homes::Users;
pub use openings::{Opened, Openings};
pub use said::{Event, Said};

use claims::Claims;
use homes::Owner;
use kedge_control::gpu::GpuSpec;
use kedge_control::joblog::JobLog;
use kedge_keys::{Connection, HandshakeError, KeyError, Keys, Limits, Name, Whose};
use kedge_protocol::PROTOCOL_VERSION;
use kedge_remote::{
    FrameError, HandedOver, JobKey, MAGIC, Offer, Opening, Purpose, Refused, SessionKey, VERSION,
    draw_session_key, is_here, read_one, tune, write_one,
};
use kedge_socket::Channel;
use kedge_wire::Text;
use refusal::Refusal;
use sessions::{Asked, Begun, Client, Kind, Sessions, hand_over};
use start::Words;
use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use taken::Taken;
use thiserror::Error;

/// For a connection to say it.
const OPENING_LIMIT: Duration = Duration::from_secs(5);
/// For one that is refused to take the answer and close, and for one that is closed to end.
const LINGER: Duration = Duration::from_millis(500);
/// Between two looks whether the keys of open sessions still count.
const KEYS_LOOK: Duration = Duration::from_millis(500);
/// For a session that is over to end, and for its proxy once it is killed.
const FAREWELL: Duration = Duration::from_secs(2);
/// Connections at a time that have not said what they are for.
const MAX_OPENING: usize = 512;
/// Longest first frame.
const MAX_FIRST: usize = 4 << 10;

/// What is lent, and where.
#[derive(Debug, Clone)]
pub struct ServeSpec {
    pub listen: SocketAddr,
    /// Devices of this machine.
    pub gpu: GpuSpec,
    /// How many they are, as far as is known.
    pub devices: usize,
    pub soft_memory: Option<u64>,
    /// As whom the proxies of keys run; `None`: as this process.
    pub users: Option<Users>,
    /// Of the user whose devices are lent, where other machines can connect.
    pub keys: Option<Keys>,
    /// The proxy's program.
    pub proxy: PathBuf,
    /// kedge's own, where jobs of other hosts may move here.
    pub takes_jobs: Option<PathBuf>,
}

#[derive(Debug, Error)]
pub enum ServeError {
    #[error("cannot listen on {address}: {source}; --listen takes another address or port")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("{address} can be reached from other machines, which takes keys: {source}")]
    Keys { address: SocketAddr, source: KeyError },
    #[error("--gpu {0} are not devices of this machine: give soft, soft:N, local or local:I,J…")]
    NotHere(String),
    #[error("--users takes root, who may start processes as others")]
    NotRoot,
    #[error("--users: give numbers of users that nobody is, such as 70000-70999")]
    NoUsers,
    #[error(
        "--take-jobs: jobs from other machines would run as root: start `kedge serve` as the user \
         whose jobs it takes"
    )]
    TakesAsRoot,
    #[error("cannot start the thread that ends sessions of revoked keys: {0}")]
    Watch(io::Error),
}

/// A server that listens.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    lender: Arc<Lender>,
}

#[derive(Debug)]
struct Lender {
    spec: ServeSpec,
    sessions: Sessions,
    /// Jobs that move here or have.
    taken: Taken,
    openings: Openings,
    /// Connections that were refused before it was known whose they are.
    strangers: AtomicU64,
    log: JobLog,
}

impl Server {
    /// Listens. `log` is told what happens, an event each, whose fields are those of [`Said`].
    ///
    /// # Errors
    /// The address cannot be had, or is one that others reach and there is no key; the devices are
    /// not this machine's.
    pub fn bind(spec: ServeSpec, log: JobLog) -> Result<Server, ServeError> {
        if matches!(spec.gpu, GpuSpec::Remote { .. } | GpuSpec::Several(_)) {
            return Err(ServeError::NotHere(spec.gpu.to_string()));
        }
        let address = spec.listen;
        if let Some(users) = &spec.users {
            if !rustix::process::geteuid().is_root() {
                return Err(ServeError::NotRoot);
            }
            users.are_proper().then_some(()).ok_or(ServeError::NoUsers)?;
        }
        if !is_here(address) && spec.takes_jobs.is_some() && rustix::process::geteuid().is_root() {
            return Err(ServeError::TakesAsRoot);
        }
        if !is_here(address) {
            if spec.users.is_none() && rustix::process::geteuid().is_root() {
                let root = "proxies of all keys run as root: --users gives each a user of its own";
                Said::new(Event::Advice, root).log(&log);
            }
            let keys = spec.keys.as_ref().ok_or(KeyError::NoIdentity);
            let read = keys.and_then(|keys| keys.identity().and_then(|_| keys.pins()));
            let pins = read.map_err(|source| ServeError::Keys { address, source })?;
            if pins.is_empty() {
                let nobody = "nobody may connect from other machines as yet: \
                              `kedge keys add NAME FILE`";
                Said::new(Event::Advice, nobody).log(&log);
            }
        }
        let listener =
            TcpListener::bind(address).map_err(|source| ServeError::Listen { address, source })?;
        let (sessions, taken, strangers) = Default::default();
        let openings = Openings::new(MAX_OPENING);
        let lender = Arc::new(Lender { spec, sessions, taken, openings, strangers, log });
        if !is_here(address) {
            let watched = Arc::downgrade(&lender);
            let watch = move || {
                let mut failed = None;
                while let Some(lender) = watched.upgrade() {
                    lender.end_revoked(&mut failed);
                    drop(lender);
                    thread::sleep(KEYS_LOOK);
                }
            };
            thread::Builder::new().name("keys".into()).spawn(watch).map_err(ServeError::Watch)?;
        }
        Ok(Server { listener, lender })
    }

    /// Returns where it listens.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Returns what tells of this server.
    pub fn watch(&self) -> Watch {
        Watch::new(self.lender.clone())
    }

    /// Returns what can end this server.
    pub fn ender(&self) -> Ender {
        Ender(self.lender.clone())
    }

    /// Serves until an [`Ender`] has this process end.
    pub fn serve(&self) -> ! {
        loop {
            match self.listener.accept() {
                Ok((stream, from)) => self.accepted(stream, from),
                Err(error) => {
                    self.lender.trouble(format!("cannot accept a connection: {error}"));
                    // Out of descriptors, most likely: does not get better by asking faster.
                    thread::sleep(Duration::from_millis(200));
                }
            }
        }
    }

    /// Hears a connection on a thread of its own.
    fn accepted(&self, stream: TcpStream, from: SocketAddr) {
        let lender = self.lender.clone();
        let opened = match lender.openings.add(&stream, from.ip()) {
            Ok(opened) => opened,
            Err(error) => return lender.trouble(format!("cannot hear {from}: {error}")),
        };
        let hear = move || {
            let opened = opened;
            let mut key = None;
            let heard = lender.open(stream, &mut key);
            // Whoever makes many connections does not write the log full with those that had to go.
            if let Err(why) = heard
                && opened.is_there()
            {
                lender.refused(key.as_ref(), from, &why);
            }
        };
        if let Err(error) =
            thread::Builder::new().name("opening".into()).stack_size(128 << 10).spawn(hear)
        {
            self.lender.trouble(format!("cannot hear a connection: {error}"));
        }
    }
}

/// Ends a server.
#[derive(Debug, Clone)]
pub struct Ender(Arc<Lender>);

impl Ender {
    /// Begins no more sessions, tells those that there are, and waits until they have ended by
    /// themselves: for `grace` at most, or until `hurry` says so. What is left is ended then.
    /// Connections of sessions that are cut meanwhile go on.
    pub fn end(&self, grace: Duration, hurry: &dyn Fn() -> bool) {
        self.end_sessions(grace, hurry);
        // What answers NVML is waited for no longer than sessions are.
        self.0.sessions.end_all("the server was told to end", FAREWELL);
    }

    fn end_sessions(&self, grace: Duration, hurry: &dyn Fn() -> bool) {
        let Ender(lender) = self;
        let open = lender.sessions.close();
        if open == 0 {
            return lender.ending("told to end: no session is open");
        }
        let text =
            format!("`kedge serve` there was told to end: it ends these devices in {grace:?}");
        lender.sessions.tell_all(&HandedOver::Notice { text: Text::truncated(text) });
        let open = match open {
            1 => "a session is open".to_owned(),
            count => format!("{count} sessions are open"),
        };
        lender.ending(format!(
            "told to end: {open}, which may go on for {grace:?}; told again, it ends at once"
        ));
        if lender.sessions.wait_for_all(Instant::now() + grace, hurry) == 0 {
            return lender.ending("all sessions have ended");
        }
        let why = Text::truncated("`kedge serve` there was told to end".to_owned());
        lender.sessions.tell_all(&HandedOver::End { why });
        lender.sessions.wait_for_all(Instant::now() + FAREWELL, &|| false);
    }
}

/// A connection, and whose it is: nobody's where it comes from this machine.
type Admitted = (Option<Client>, Connection);

impl Lender {
    fn trouble(&self, text: impl Into<String>) {
        Said::new(Event::Trouble, text).log(&self.log);
    }

    fn ending(&self, text: impl Into<String>) {
        Said::new(Event::Ending, text).log(&self.log);
    }

    /// Says that somebody gets nothing.
    fn refused(&self, key: Option<&Name>, from: SocketAddr, why: &str) {
        let text = match key {
            Some(key) => format!("{key} ({from}): {why}"),
            None => format!("{from}: {why}"),
        };
        let (key, from) = (key.map(Name::to_string), Some(from));
        Said { key, from, ..Said::new(Event::Refused, text) }.log(&self.log);
    }

    /// Ends the sessions whose keys are not pinned any more. `failed` is why the pins could not be
    /// read before, so that it is said once.
    fn end_revoked(&self, failed: &mut Option<String>) {
        let Some(keys) = self.spec.keys.as_ref().filter(|_| self.sessions.any_from_afar()) else {
            return;
        };
        match keys.pins() {
            Ok(pins) => {
                *failed = None;
                let counts = |client: &Client| pins.counts(&client.name, client.certificate);
                self.sessions.end_unless(counts);
            }
            // Nobody new gets in meanwhile. Who has been let in has not been revoked by damage.
            Err(error) => {
                let why = format!("open sessions go on, whoever is revoked: {error}");
                if failed.as_ref() != Some(&why) {
                    self.trouble(why.as_str());
                    *failed = Some(why);
                }
            }
        }
    }

    /// Finds out whose a connection is: a pinned key's, or this user's own from this machine.
    /// Nothing is returned where somebody looks whether a server is there.
    fn admit(&self, mut stream: TcpStream) -> Result<Option<Admitted>, String> {
        let system = |error: io::Error| error.to_string();
        tune(&stream).map_err(system)?;
        stream.set_write_timeout(Some(OPENING_LIMIT)).map_err(system)?;
        if is_here(stream.peer_addr().map_err(system)?) {
            return match kedge_keys::whose(&stream).map_err(system)? {
                Whose::Own => Ok(Some((None, stream.into()))),
                Whose::Another => Err("a connection of another user: refused".into()),
                Whose::Nobodys => {
                    stream.set_read_timeout(Some(LINGER)).map_err(system)?;
                    match stream.read(&mut [0]) {
                        Ok(0) => Ok(None),
                        _ => Err("closed before it was known whose it is: refused".into()),
                    }
                }
            };
        }
        let keys = self.spec.keys.as_ref().ok_or("there are no keys")?;
        // Read for each connection: what is revoked meanwhile counts.
        let read = keys.identity().and_then(|own| Ok((own, Arc::new(keys.pins()?))));
        let (own, pins) = read.map_err(|error| error.to_string())?;
        let (who, secrets) = match kedge_keys::accept(&mut stream, &own, &pins, OPENING_LIMIT) {
            Ok(shaken) => shaken,
            Err(HandshakeError::Closed) => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        let certificate = pins.fingerprint(&who).ok_or("its key is not pinned")?;
        let who = Client { name: who, certificate };
        let connection = Connection::new(stream, Some(secrets));
        Ok(Some((Some(who), connection.map_err(|error| error.to_string())?)))
    }

    /// Reads what a connection is for, and hands it over; whose it is, once that is known.
    fn open(self: &Arc<Lender>, stream: TcpStream, key: &mut Option<Name>) -> Result<(), String> {
        let admitted = self.admit(stream).inspect_err(|_| {
            self.strangers.fetch_add(1, Ordering::Relaxed);
        })?;
        let Some((who, mut stream)) = admitted else { return Ok(()) };
        *key = who.as_ref().map(|who| who.name.clone());
        stream.read_until(Instant::now() + OPENING_LIMIT);
        let opening: Opening = match read_one(&mut stream, MAX_FIRST) {
            Ok(opening) => opening,
            // Somebody looks whether it is there.
            Err(FrameError::Closed) => return Ok(()),
            Err(error) => return Err(error.to_string()),
        };
        let Opening { magic, version, protocol, purpose } = opening;
        if magic != MAGIC {
            return Err("it does not speak as kedge does".into());
        }
        if (version, protocol) != (VERSION, PROTOCOL_VERSION) {
            let why = format!(
                "it is of another version of kedge (session {version}, messages {protocol}; here \
                 {VERSION} and {PROTOCOL_VERSION}): install the same on both machines"
            );
            return self.refuse(who.as_ref(), &mut stream, why);
        }
        match purpose {
            Purpose::Join { session, hand } => {
                match self.sessions.proxy_of(&session, who.as_ref()) {
                    Some(proxy) => hand_over(&proxy, HandedOver::Link { hand }, stream),
                    None => {
                        let why = "it has no such session: the devices' memory is lost";
                        self.refuse(who.as_ref(), &mut stream, why.into())
                    }
                }
            }
            Purpose::Measure {} => self.measured(who.as_ref(), &mut stream),
            Purpose::End { session } => match self.sessions.end(&session, who.as_ref()) {
                Ok(()) => write_one(&mut stream, &Ok::<_, Refused>(Offer {}))
                    .map_err(|error| error.to_string()),
                Err(why) => self.refuse(who.as_ref(), &mut stream, why.to_string()),
            },
            Purpose::Session { session, attempt, job, devices } => {
                let asked = (Kind::Devices, session, attempt, job);
                self.begin(asked, &devices, who, stream)
            }
            Purpose::Management { devices } => {
                let key = draw_session_key().map_err(|error| error.to_string())?;
                self.begin((Kind::Management, key, 1, JobKey::default()), &devices, who, stream)
            }
            Purpose::TakeJob { token } => self.take_job(token, who, stream),
            Purpose::JobStreams { token } => match self.taken.channel(&token, who.as_ref()) {
                Some(channel) => taken::hand_over(&channel, stream),
                None => {
                    let why = "it has no such job: it was given up there, or has ended";
                    self.refuse(who.as_ref(), &mut stream, why.into())
                }
            },
        }
    }

    /// Returns how much a client may have: read each time, so that what has been changed counts.
    fn limits_of(&self, who: Option<&Client>) -> Result<Limits, Refusal> {
        let (Some(keys), Some(who)) = (&self.spec.keys, who) else { return Ok(Limits::default()) };
        keys.limits(&who.name).map_err(|error| {
            self.trouble(error.to_string());
            Refusal::Limits(error)
        })
    }

    /// Returns as whom a client's proxies run; `None`: as this process.
    fn owner_of(&self, who: Option<&Client>) -> Result<Option<Owner>, Refusal> {
        let (Some(users), Some(keys), Some(who)) = (&self.spec.users, &self.spec.keys, who) else {
            return Ok(None);
        };
        let owner = Claims::open(&users.claims).and_then(|claims| {
            let claim = |id| claims.claim(id, &who.name, keys.path());
            let id = keys.user(&who.name, users.range.clone(), claim).map_err(io::Error::other)?;
            users.owner(id)
        });
        let owner = owner.map_err(|error| {
            self.trouble(format!("no user for {who}: {error}"));
            Refusal::User(error)
        })?;
        Ok(Some(owner))
    }

    /// Has sessions take turns where those of different tenants are on one device, as a session has
    /// begun.
    fn take_turns(self: &Arc<Lender>, key: &SessionKey, channel: &Arc<Channel>) {
        if !self.sessions.has_begun(key, channel) {
            return;
        }
        let lender = self.clone();
        let take = move || {
            while lender.sessions.take_turns() {
                thread::sleep(turns::TICK);
            }
        };
        let takes = thread::Builder::new().name("turns".into()).stack_size(128 << 10).spawn(take);
        if let Err(error) = takes {
            self.sessions.give_turns_up();
            self.trouble(format!("sessions share devices as processes do, not by key: {error}"));
        }
    }

    fn refuse(
        &self,
        who: Option<&Client>,
        stream: &mut Connection,
        why: String,
    ) -> Result<(), String> {
        self.sessions.refused(who);
        let refused = Refused { why: Text::truncated(why.clone()) };
        // Who has gone need not be told. What a success would hold does not matter.
        let _ = write_one(stream, &Err::<Offer, _>(refused));
        let _ = linger(stream.stream());
        Err(why)
    }

    /// Gives a session its proxy, or one to a job's questions to NVML.
    fn begin(
        self: &Arc<Lender>,
        (kind, key, attempt, job): (Kind, SessionKey, u32, JobKey),
        devices: &[u32],
        who: Option<Client>,
        mut stream: Connection,
    ) -> Result<(), String> {
        let peer = stream.stream().peer_addr().ok();
        let from = peer.map_or_else(|| "?".into(), |from| from.to_string());
        let from = who.iter().fold(from, |from, who| format!("{who} ({from})"));
        let begun = self.limits_of(who.as_ref()).and_then(|limits| {
            let owner = self.owner_of(who.as_ref())?;
            let owner = owner.as_ref();
            let asked = Asked { kind, key, attempt, job, devices, limits: &limits, owner };
            let begun = self.sessions.begin(&self.spec, asked, who.clone(), stream.stream())?;
            Ok((begun, limits))
        });
        let (Begun { proxy, words, channel, place, gpu }, limits) = match begun {
            Ok(begun) => begun,
            Err(why) => return self.refuse(who.as_ref(), &mut stream, why.to_string()),
        };
        let (name, terms) = (kind.name(), place.map(|place| (place, limits)));
        let pid = proxy.id();
        let said = Said {
            key: who.as_ref().map(ToString::to_string),
            from: peer,
            gpu: Some(gpu.to_string()),
            proxy: Some(pid),
            ..Said::new(Event::Begins, format!("{name} of {from} on {gpu} begins, proxy {pid}"))
        };
        let offered = write_one(&mut stream, &Ok::<_, Refused>(Offer {}));
        // Without it the proxy ends.
        let handed = sessions::tell_terms(&channel, terms, stream);
        let (lender, begins) = (self.clone(), said.clone());
        let (log, speaker) = (self.log.clone(), said.clone());
        let of = format!("proxy {pid} of {from}");
        let words = Words::hear(words, move |text| {
            let text = format!("{of}: {text}");
            Said { event: Event::Trouble, text, ..speaker.clone() }.log(&log);
        });
        let wait = move || {
            let ended = lender.sessions.wait(&key, proxy);
            // Without a thread for them they are lost, and the proxy is none the worse for it.
            words.into_iter().for_each(Words::end);
            let text = format!("{name} of {from} on {gpu} ends: {ended}");
            Said { event: Event::Ends, text, ..said }.log(&lender.log);
        };
        let waits = thread::Builder::new().name("session".into()).stack_size(64 << 10).spawn(wait);
        begins.log(&self.log);
        // A proxy without its terms would take any other word for them.
        if handed.is_ok() {
            self.take_turns(&key, &channel);
        }
        waits.map(drop).and(offered).map_err(|error| error.to_string()).and(handed)
    }
}

/// Reads for a moment what the other end goes on to say: closed with that unread, a connection is
/// reset, and what was last said to it is lost.
fn linger(mut stream: &TcpStream) -> io::Result<()> {
    stream.shutdown(Shutdown::Write)?;
    let until = Instant::now() + LINGER;
    let mut some = [0; 4096];
    while let left = until.saturating_duration_since(Instant::now())
        && !left.is_zero()
    {
        stream.set_read_timeout(Some(left))?;
        if stream.read(&mut some)? == 0 {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn spec(listen: &str, gpu: &str, devices: usize) -> ServeSpec {
        ServeSpec {
            listen: listen.parse().unwrap(),
            gpu: gpu.parse().unwrap(),
            devices,
            soft_memory: None,
            users: None,
            keys: Some(Keys::at("/nonexistent".into())),
            proxy: "/bin/false".into(),
            takes_jobs: None,
        }
    }

    /// `kedge run` looks whether a server is there, and is gone before that has looked whose it is.
    #[test]
    fn who_looks_whether_it_is_there_is_no_stranger() {
        let server = Server::bind(spec("127.0.0.1:0", "soft", 1), JobLog::none()).unwrap();
        let heard = |said: &[u8]| {
            let mut client = TcpStream::connect(server.address().unwrap()).unwrap();
            client.write_all(said).unwrap();
            let (stream, _) = server.listener.accept().unwrap();
            drop(client);
            while kedge_keys::whose(&stream).unwrap() != Whose::Nobodys {
                thread::yield_now();
            }
            let heard = server.lender.open(stream, &mut None);
            (heard, server.lender.strangers.load(Ordering::Relaxed))
        };
        assert_eq!(heard(b""), (Ok(()), 0));
        let (heard, strangers) = heard(b"GET / HTTP/1.0\r\n\r\n");
        assert!(heard.unwrap_err().contains("whose it is") && strangers == 1);
    }

    #[test]
    fn what_others_reach_takes_keys() {
        let open = Server::bind(spec("0.0.0.0:0", "soft", 1), JobLog::none());
        assert!(matches!(open, Err(ServeError::Keys { source: KeyError::NoIdentity, .. })));
        let elsewhere = Server::bind(spec("127.0.0.1:0", "other:1", 1), JobLog::none());
        assert!(matches!(elsewhere, Err(ServeError::NotHere(_))));
        let server = Server::bind(spec("127.0.0.1:0", "soft", 1), JobLog::none()).unwrap();
        let taken =
            Server::bind(spec(&server.address().unwrap().to_string(), "soft", 1), JobLog::none());
        assert!(matches!(taken, Err(ServeError::Listen { .. })));
    }
}
