//! Members on several hosts: here, two folders that share an address.

use kedge_coordinator::{
    Client, ClientError, Far, Find, JobKey, Leader, Link, Member, Place, Series, Server, Who,
};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(20);
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
    client.arrive(&series, step, who, LONG).unwrap();
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
        assert_eq!(hung_up_on(&mut stream, LONG), 40);
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
    assert!(silent.drain(..).all(|mut stream| hung_up_on(&mut stream, LONG) == 40));
    assert!(begin.elapsed() < LONG, "{:?}", begin.elapsed());
    thread::scope(|scope| {
        scope.spawn(|| pass(&mut one, 1));
        pass(&mut other, 1);
    });
    let far = other.meet(&Series::of_node("s"), 1, 2, LONG).unwrap_err();
    assert!(matches!(&far, ClientError::Refused(why) if why.contains("another host")), "{far}");
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
