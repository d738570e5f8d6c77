//! Members on several hosts: here, two folders that share an address.

use kedge_coordinator::{
    Client, ClientError, Far, Find, JobKey, Leader, Link, Member, Place, Series, Server, Who,
};
use rustix::net::{AddressFamily, SocketType};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(20);
const KEY: &[u8] = b"0123456789abcdef0123456789abcdef\n";

/// A host: a folder, and the coordinator if it is there.
#[derive(Clone)]
struct Host {
    place: Place,
    leader: Arc<Mutex<Option<Server>>>,
}

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("kremote-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir(&folder).unwrap();
    folder
}

/// An address that nobody has, as far as one can tell.
fn address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

impl Host {
    fn new(name: &str, address: &str) -> Host {
        let far = Some(Far::new(address, JobKey::new(KEY).unwrap()).unwrap());
        Host { place: Place { folder: folder(name), far }, leader: Arc::default() }
    }

    fn find(&self) -> Find {
        let host = self.clone();
        Box::new(move || {
            let (stream, leader) = host.place.reach("j")?;
            if let Leader::This(server) = leader {
                *host.leader.lock().unwrap() = Some(server);
            }
            Ok(stream)
        })
    }

    fn join(&self, name: &str) -> Client {
        let member = Member { job: "j".into(), name: name.into(), node: "a".into(), part: true };
        Client::join(&member, self.find()).unwrap()
    }

    fn lose(&self) -> bool {
        self.leader.lock().unwrap().take().is_some()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if Arc::strong_count(&self.leader) == 1 {
            let _ = std::fs::remove_dir_all(&self.place.folder);
        }
    }
}

fn both(step: u64) -> (Series, u64, Who) {
    (Series::of_job("s"), step, Who::Count { members: 2 })
}

fn pass(client: &mut Client, step: u64) {
    let (series, step, who) = both(step);
    client.arrive(&series, step, who, TIMEOUT).unwrap();
}

#[test]
fn barriers_hold_between_hosts_while_one_coordinator_after_the_other_is_lost() {
    let address = address();
    let hosts = [Host::new("one", &address), Host::new("other", &address)];
    let mut clients = [hosts[0].join("one"), hosts[1].join("other")];
    assert!(hosts[0].leader.lock().unwrap().is_some(), "the first one coordinates");
    assert!(matches!(hosts[1].place.connect().unwrap(), Link::Remote(_)));
    let mut lost = [0, 0];
    for step in 1..=60 {
        let [one, other] = &mut clients;
        thread::scope(|scope| {
            scope.spawn(|| pass(one, step));
            scope.spawn(|| pass(other, step));
        });
        if step % 10 == 0 {
            hosts.iter().zip(&mut lost).for_each(|(host, lost)| *lost += u32::from(host.lose()));
        }
    }
    assert_eq!(lost.iter().sum::<u32>(), 6, "{lost:?}");
}

#[test]
fn the_coordinator_counts_two_messages_a_member_for_a_barrier() {
    let address = address();
    let hosts = [Host::new("counts", &address), Host::new("counted", &address)];
    let mut clients = [hosts[0].join("one"), hosts[1].join("other")];
    let messages = || hosts[0].leader.lock().unwrap().as_ref().unwrap().messages();
    let before = messages();
    for step in 1..=5 {
        let [one, other] = &mut clients;
        thread::scope(|scope| {
            scope.spawn(|| pass(one, step));
            scope.spawn(|| pass(other, step));
        });
    }
    assert_eq!(messages() - before, 5 * 2 * 2);
}

#[test]
fn another_key_is_refused_by_both_sides() {
    let address = address();
    let host = Host::new("key", &address);
    let mut one = host.join("one");
    let far = Far::new(&address, JobKey::new(b"another key of the length").unwrap()).unwrap();
    let stranger = Place { folder: folder("stranger"), far: Some(far) };
    let refused = stranger.connect().unwrap_err();
    assert!(refused.to_string().contains("does not take this key"), "{refused}");
    let _ = std::fs::remove_dir_all(&stranger.folder);
    assert_eq!(one.members().unwrap(), ["one"]);

    // One that only says that it is the coordinator.
    let liar = TcpListener::bind("127.0.0.1:0").unwrap();
    let far = Far::new(&liar.local_addr().unwrap().to_string(), JobKey::new(KEY).unwrap()).unwrap();
    let lie = thread::spawn(move || {
        let (mut stream, _) = liar.accept().unwrap();
        stream.write_all(&[&b"kedge-c1"[..], &[7; 32]].concat()).unwrap();
        stream.read_exact(&mut [0; 64]).unwrap();
        stream.write_all(&[9; 32]).unwrap();
    });
    let place = Place { folder: folder("lied-to"), far: Some(far) };
    let refused = place.connect().unwrap_err();
    assert!(refused.to_string().contains("does not have this key"), "{refused}");
    let _ = std::fs::remove_dir_all(&place.folder);
    lie.join().unwrap();
}

/// What is there until the other side hangs up; the greeting, that is.
fn hung_up_on(stream: &mut TcpStream, within: Duration) -> usize {
    stream.set_read_timeout(Some(within)).unwrap();
    let (mut read, mut piece) = (0, [0; 4096]);
    loop {
        match stream.read(&mut piece) {
            Ok(0) => return read,
            Ok(length) => read += length,
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return read,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn who_does_not_show_the_key_is_told_nothing_and_hinders_nobody() {
    let address = address();
    let host = Host::new("strangers", &address);
    let mut one = host.join("one");
    // Proofs that are none, and what a member would say.
    for bytes in [vec![0; 64], vec![0xff; 5000], b"\x04\0\0\0\x08\0\0\0".repeat(16)] {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(&bytes).unwrap();
        assert_eq!(hung_up_on(&mut stream, TIMEOUT), 40);
    }
    // Some that say nothing, and then one that has the key.
    let mut silent: Vec<TcpStream> =
        (0..200).map(|_| TcpStream::connect(&address).unwrap()).collect();
    let mut other = Client::join(
        &Member { job: "j".into(), name: "other".into(), node: "b".into(), part: true },
        {
            let place = Place { folder: folder("far"), ..host.place.clone() };
            Box::new(move || place.connect())
        },
    )
    .unwrap();
    let begin = Instant::now();
    assert!(silent.drain(..).all(|mut stream| hung_up_on(&mut stream, TIMEOUT) == 40));
    assert!(begin.elapsed() < TIMEOUT, "{:?}", begin.elapsed());
    thread::scope(|scope| {
        scope.spawn(|| pass(&mut one, 1));
        pass(&mut other, 1);
    });
    let far = other.meet(&Series::of_node("s"), 1, 2, TIMEOUT).unwrap_err();
    assert!(matches!(&far, ClientError::Refused(why) if why.contains("another host")), "{far}");
}

/// Stands before a coordinator, and lets nobody answer its greeting before `count` are greeted:
/// where that is, and how many have come.
fn all_at_once(coordinator: String, count: usize) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let all = Arc::new(Barrier::new(count));
    let come = Arc::new(AtomicUsize::new(0));
    let counts = come.clone();
    thread::spawn(move || {
        for number in 0.. {
            let (member, _) = listener.accept().unwrap();
            counts.store(number + 1, Relaxed);
            let server = TcpStream::connect(&coordinator).unwrap();
            let all = all.clone();
            thread::spawn(move || pass_on(&member, &server, (number < count).then_some(&*all)));
        }
    });
    (at, come)
}

fn pass_on(member: &TcpStream, server: &TcpStream, all: Option<&Barrier>) -> Option<()> {
    let mut greeting = [0; 40];
    (&mut &*server).read_exact(&mut greeting).ok()?;
    all.map(Barrier::wait);
    (&mut &*member).write_all(&greeting).ok()?;
    let copy = |mut from: &TcpStream, mut to: &TcpStream| {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    };
    thread::scope(|scope| {
        scope.spawn(|| copy(member, server));
        copy(server, member);
    });
    Some(())
}

/// From `source`, as another host's.
fn silent(source: &str, to: &str) -> TcpStream {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let source: SocketAddr = format!("{source}:0").parse().unwrap();
    rustix::net::bind(&socket, &source).unwrap();
    rustix::net::connect(&socket, &to.parse::<SocketAddr>().unwrap()).unwrap();
    socket.into()
}

/// As many as a large job has, none of which has shown the key when the last one comes; and another
/// host opens connections all the time, of which it makes no use.
#[test]
fn members_that_start_at_once_all_come_in() {
    const MEMBERS: usize = 200;
    let coordinator = address();
    let host = Host::new("at-once", &coordinator);
    let _one = host.join("one");
    let hostile: Vec<TcpStream> = (0..1000).map(|_| silent("127.0.0.2", &coordinator)).collect();
    let (door, come) = all_at_once(coordinator.clone(), MEMBERS);
    let far = Far::new(&door, JobKey::new(KEY).unwrap()).unwrap();
    let over = AtomicBool::new(false);
    let others = thread::scope(|scope| {
        let floods = scope.spawn(|| {
            let mut all = hostile;
            while !over.load(Relaxed) {
                all.push(silent("127.0.0.2", &coordinator));
                if all.len() > 2000 {
                    all.drain(..1000);
                }
                thread::sleep(Duration::from_millis(1));
            }
        });
        let joins = |number| {
            let far = far.clone();
            let find: Find = Box::new(move || far.connect().map(Link::Remote));
            let name = format!("member {number}");
            let member = Member { job: "j".into(), name, node: "b".into(), part: true };
            Client::join(&member, find).map_err(|error| error.to_string())
        };
        let joining: Vec<_> =
            (0..MEMBERS).map(|number| scope.spawn(move || joins(number))).collect();
        let joined: Vec<_> = joining.into_iter().map(|one| one.join().unwrap()).collect();
        over.store(true, Relaxed);
        floods.join().unwrap();
        joined
    });
    let refused: Vec<&String> = others.iter().filter_map(|one| one.as_ref().err()).collect();
    assert!(refused.is_empty(), "{} of {MEMBERS}: {refused:?}", refused.len());
    assert_eq!(come.load(Relaxed), MEMBERS, "nobody has to come again");
}

/// Whoever is told that there is no room comes again; it is not taken for one with another key.
#[test]
fn who_has_to_come_again_does() {
    let coordinator = address();
    let host = Host::new("again", &coordinator);
    let _one = host.join("one");
    let full = TcpListener::bind("127.0.0.1:0").unwrap();
    let far = Far::new(&full.local_addr().unwrap().to_string(), JobKey::new(KEY).unwrap()).unwrap();
    let says = thread::spawn(move || {
        for told_early in [true, false] {
            let (mut stream, _) = full.accept().unwrap();
            stream.write_all(&[&b"kedge-c1"[..], &[7; 32]].concat()).unwrap();
            if !told_early {
                stream.read_exact(&mut [0; 64]).unwrap();
            }
            stream.write_all(&[0; 32]).unwrap();
        }
        let (member, _) = full.accept().unwrap();
        pass_on(&member, &TcpStream::connect(&coordinator).unwrap(), None)
    });
    let member = Member { job: "j".into(), name: "other".into(), node: "b".into(), part: true };
    let find: Find = Box::new(move || far.connect().map(Link::Remote));
    let mut other = Client::join(&member, find).unwrap();
    assert_eq!(other.members().unwrap().len(), 2);
    drop(other);
    assert_eq!(says.join().unwrap(), Some(()));
}

#[test]
fn addresses_and_keys_that_cannot_be_are_named() {
    let key = || JobKey::new(KEY).unwrap();
    for bad in ["0.0.0.0:70", "127.0.0.1:0", "127.0.0.1", "no such host.:7"] {
        let error = Far::new(bad, key()).unwrap_err().to_string();
        assert!(error.contains(bad) && error.contains("HOST:PORT"), "{error}");
    }
    assert!(JobKey::new(b"short  \n\n\n\n\n\n\n\n\n").is_err());
    assert!(JobKey::new(&[b'x'; 5000]).is_err());
    let path = folder("keys").join("key");
    std::fs::write(&path, KEY).unwrap();
    let error = JobKey::read(&path).unwrap_err().to_string();
    assert!(error.contains("chmod 600"), "{error}");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&path, mode).unwrap();
    JobKey::read(&path).unwrap();
    let _ = std::fs::remove_dir_all(path.parent().unwrap());
}

/// Its errno would be that of a limit on processes, and somebody told to raise that.
#[test]
fn one_that_says_nothing_is_told_as_that() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let error = Far::new(&address, JobKey::new(KEY).unwrap()).unwrap().connect().unwrap_err();
    assert_eq!((error.kind(), error.raw_os_error()), (ErrorKind::TimedOut, None), "{error}");
}
