//! Members over real sockets, and coordinators that are lost.

use kedge_coordinator::{
    Client, ClientError, Find, Leader, Member, Notice, Series, Server, Who, connect, reach,
};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(20);

/// A job's folder, and whoever of its members coordinates.
#[derive(Clone)]
struct World {
    folder: PathBuf,
    leader: Arc<Mutex<Option<Server>>>,
}

impl World {
    fn new(test: &str) -> World {
        let folder = std::env::temp_dir().join(format!("kcoord-{test}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir(&folder).unwrap();
        World { folder, leader: Arc::default() }
    }

    fn find(&self) -> Find {
        let world = self.clone();
        Box::new(move || {
            let (stream, leader) = reach(&world.folder, "j")?;
            if let Leader::This(server) = leader {
                *world.leader.lock().unwrap() = Some(server);
            }
            Ok(stream)
        })
    }

    fn join(&self, name: &str, part: bool) -> Client {
        let name = name.to_owned();
        let member = Member { job: "j".into(), name, node: "a".into(), part };
        Client::join(&member, self.find()).unwrap()
    }

    /// Ends the coordinator, as if its process had ended.
    fn lose(&self) {
        let begin = Instant::now();
        while begin.elapsed() < LONG {
            if let Some(server) = self.leader.lock().unwrap().take() {
                return drop(server);
            }
            thread::sleep(Duration::from_millis(1));
        }
        panic!("nobody coordinates");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if Arc::strong_count(&self.leader) == 1 {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}

#[test]
fn barriers_hold_while_one_coordinator_after_the_other_is_lost() {
    const MEMBERS: u32 = 8;
    const STEPS: u64 = 200;
    let world = World::new("barriers");
    let reached: Arc<Vec<Mutex<u64>>> = Arc::new((0..MEMBERS).map(|_| Mutex::new(0)).collect());
    let (done, all_done) = mpsc::channel();
    for index in 0..MEMBERS {
        let (world, reached, done) = (world.clone(), reached.clone(), done.clone());
        thread::spawn(move || {
            let mut client = world.join(&index.to_string(), true);
            let series = Series::of_job("s");
            for step in 1..=STEPS {
                *reached[index as usize].lock().unwrap() = step;
                client.arrive(&series, step, Who::Count { members: MEMBERS }, LONG).unwrap();
                // Nobody is through before all have come.
                for one in reached.iter() {
                    assert!(*one.lock().unwrap() >= step);
                }
                thread::sleep(Duration::from_micros(200));
            }
            done.send(()).unwrap();
        });
    }
    drop(done);
    let mut lost = 0;
    let begin = Instant::now();
    let mut finished = 0;
    while finished < MEMBERS {
        assert!(begin.elapsed() < Duration::from_secs(60), "{finished} are through all steps");
        match all_done.recv_timeout(Duration::from_millis(15)) {
            Ok(()) => finished += 1,
            Err(mpsc::RecvTimeoutError::Timeout) if finished == 0 => {
                world.lose();
                lost += 1;
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => panic!("a member has failed"),
        }
    }
    assert!(lost >= 2, "only {lost} coordinators were lost");
}

#[test]
fn what_was_published_is_there_after_the_coordinator_is_lost() {
    let world = World::new("published");
    let (mut one, mut other) = (world.join("one", true), world.join("other", true));
    let at = Notice::of_job("net", b"one").unwrap();
    one.publish(&at, b"10.0.0.1:77", true).unwrap();
    world.lose();
    // Whoever has published is back when it asks next; who looks waits.
    let looking = thread::spawn(move || other.look(&at, 0, LONG).unwrap());
    assert!(one.members().unwrap().contains(&"one".to_owned()));
    assert_eq!(looking.join().unwrap().unwrap().value, b"10.0.0.1:77");
}

#[test]
fn who_ends_breaks_the_barrier_by_name() {
    let world = World::new("ends");
    let (mut one, mut other) = (world.join("one", true), world.join("other", true));
    let series = Series::of_job("s");
    let who = Who::Count { members: 2 };
    let (first, both) = (series.clone(), who);
    let other = thread::spawn(move || {
        other.arrive(&first, 1, both, LONG).unwrap();
        // And now it ends.
    });
    one.arrive(&series, 1, who, LONG).unwrap();
    other.join().unwrap();
    let broken = one.arrive(&series, 2, who, LONG).unwrap_err();
    assert!(matches!(&broken, ClientError::Broken { by, .. } if by == "other"), "{broken}");
}

#[test]
fn who_waits_for_nobody_is_told_in_time() {
    let world = World::new("late");
    let mut one = world.join("one", true);
    let who = Who::Count { members: 2 };
    let late = one.arrive(&Series::of_job("s"), 1, who, Duration::from_millis(30));
    assert!(matches!(late, Err(ClientError::Late)));
}

#[test]
fn one_job_is_not_another() {
    let world = World::new("other");
    let _one = world.join("one", true);
    let folder = world.folder.clone();
    let find = Box::new(move || connect(&folder));
    let member = Member { job: "k".into(), name: "x".into(), node: "a".into(), part: true };
    let refused = Client::join(&member, find).unwrap_err();
    assert!(refused.to_string().contains("this is the job j"), "{refused}");
}

#[test]
fn nonsense_is_hung_up_on_and_the_others_go_on() {
    use std::io::{Read, Write};
    let world = World::new("nonsense");
    let mut one = world.join("one", true);
    for bytes in [&b"\xff\xff\xff\xff"[..], b"\x04\0\0\0\x08\0\0\0", b"\x01\0\0\0x"] {
        let mut stream: UnixStream = connect(Path::new(&world.folder)).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(bytes).unwrap();
        assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0, "{bytes:?}");
    }
    assert_eq!(one.members().unwrap(), ["one"]);
}
