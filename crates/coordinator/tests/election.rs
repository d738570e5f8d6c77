//! Members over real sockets, and coordinators that are lost.

use kedge_coordinator::{
    Client, ClientError, Find, Hello, Leader, Link, Member, Name, Notice, Request, Series, Server,
    Who, connect, reach,
};
use kedge_wire::List;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(20);

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

    /// As [`World::lose`], if there is one now.
    fn lose_if_there(&self) -> bool {
        self.leader.lock().unwrap().take().is_some()
    }

    /// Ends the coordinator, as if its process had ended.
    fn lose(&self) {
        let begin = Instant::now();
        while begin.elapsed() < TIMEOUT {
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

/// `arrive` passes a step; coordinators are lost meanwhile.
fn hold_while_coordinators_are_lost(test: &str, arrive: fn(&mut Client, u32, u64)) {
    const STEPS: u64 = 200;
    let world = World::new(test);
    let reached: Arc<Vec<Mutex<u64>>> = Arc::new((0..MEMBERS).map(|_| Mutex::new(0)).collect());
    let (done, all_done) = mpsc::channel();
    for index in 0..MEMBERS {
        let (world, reached, done) = (world.clone(), reached.clone(), done.clone());
        thread::spawn(move || {
            let mut client = world.join(&index.to_string(), true);
            for step in 1..=STEPS {
                *reached[index as usize].lock().unwrap() = step;
                arrive(&mut client, index, step);
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
    let (mut lost, mut finished) = (0, 0);
    let begin = Instant::now();
    while finished < MEMBERS {
        assert!(begin.elapsed() < Duration::from_secs(60), "{finished} are through all steps");
        match all_done.recv_timeout(Duration::from_millis(2)) {
            Ok(()) => finished += 1,
            Err(mpsc::RecvTimeoutError::Disconnected) => panic!("a member has failed"),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                // After some steps more each time, however long they take.
                let slowest = reached.iter().map(|one| *one.lock().unwrap()).min();
                if slowest > Some(lost * STEPS / 5 + 3) && world.lose_if_there() {
                    lost += 1;
                }
            }
        }
    }
    assert!(lost >= 2, "only {lost} coordinators were lost");
}

const MEMBERS: u32 = 8;

#[test]
fn barriers_hold_while_one_coordinator_after_the_other_is_lost() {
    hold_while_coordinators_are_lost("barriers", |client, _, step| {
        let who = Who::Count { members: MEMBERS };
        client.arrive(&Series::of_job("s"), step, who, TIMEOUT).unwrap();
    });
}

#[test]
fn meetings_in_memory_hold_while_one_coordinator_after_the_other_is_lost() {
    hold_while_coordinators_are_lost("meetings", |client, index, step| {
        // They go on without a coordinator until one of them has waited for a while.
        if index == 0 && step % 50 == 0 {
            thread::sleep(Duration::from_millis(800));
        }
        client.meet(&Series::of_node("s"), step as u32, MEMBERS, TIMEOUT).unwrap();
    });
}

/// Two that have met once.
fn two_that_meet(world: &World) -> (Client, Client) {
    let (mut one, mut other) = (world.join("one", true), world.join("other", true));
    thread::scope(|scope| {
        scope.spawn(|| other.meet(&Series::of_node("s"), 1, 2, TIMEOUT).unwrap());
        one.meet(&Series::of_node("s"), 1, 2, TIMEOUT).unwrap();
    });
    (one, other)
}

#[test]
fn who_ends_breaks_a_meeting_in_memory_by_name() {
    let world = World::new("meeting-ends");
    let (mut one, other) = two_that_meet(&world);
    let waiting = thread::spawn(move || {
        let begin = Instant::now();
        let broken = one.meet(&Series::of_node("s"), 2, 2, TIMEOUT).unwrap_err();
        (broken, begin.elapsed())
    });
    thread::sleep(Duration::from_millis(30));
    drop(other);
    let (broken, after) = waiting.join().unwrap();
    assert!(matches!(&broken, ClientError::Broken { by, .. } if by == "other"), "{broken}");
    assert!(after < TIMEOUT / 2, "{after:?}");
}

#[test]
fn a_meeting_in_memory_that_is_broken_is_so_for_all_and_a_new_one_is_not() {
    let world = World::new("meeting-broken");
    let (mut one, mut other) = two_that_meet(&world);
    one.break_series(&Series::of_node("s"), "no room").unwrap();
    for client in [&mut one, &mut other] {
        let broken = client.meet(&Series::of_node("s"), 2, 2, TIMEOUT).unwrap_err();
        assert!(matches!(&broken, ClientError::Broken { why, .. } if why == "no room"), "{broken}");
    }
    for client in [&mut one, &mut other] {
        client.end(&Series::of_node("s")).unwrap();
    }
    let late = one.meet(&Series::of_node("s"), 1, 2, Duration::from_millis(20));
    assert!(matches!(late, Err(ClientError::Late)), "{late:?}");
}

#[test]
fn a_meeting_in_memory_is_for_one_node_and_for_one_way() {
    let world = World::new("meeting-refused");
    let mut one = world.join("one", true);
    let short = Duration::from_millis(20);
    let who = Who::Count { members: 2 };
    let far = one.meet(&Series::of_job("s"), 1, 2, short).unwrap_err();
    assert!(far.to_string().contains("on one node"), "{far}");
    let many = one.meet(&Series::of_node("s"), 1, 5000, short).unwrap_err();
    assert!(many.to_string().contains("4096"), "{many}");
    assert!(matches!(one.meet(&Series::of_node("s"), 1, 2, short), Err(ClientError::Late)));
    let early = one.meet(&Series::of_node("s"), 3, 2, short).unwrap_err();
    assert!(early.to_string().contains("before"), "{early}");
    let mixed = one.arrive(&Series::of_node("s"), 1, who, short).unwrap_err();
    assert!(mixed.to_string().contains("in memory"), "{mixed}");
    let other = world.join("other", true).meet(&Series::of_node("s"), 1, 3, short).unwrap_err();
    assert!(other.to_string().contains("another number"), "{other}");
}

fn frame(request: &Request) -> Vec<u8> {
    let mut body = Vec::new();
    kedge_wire::encode(request, &mut body);
    [&(body.len() as u32).to_le_bytes()[..], &body].concat()
}

#[test]
fn who_does_not_read_its_answers_is_hung_up_on() {
    use std::io::{Read, Write};
    let world = World::new("deaf");
    let mut one = world.join("one", true);
    let at = Notice::of_job("a", b"k").unwrap();
    one.publish(&at, &[7; 16000], false).unwrap();
    let Link::Local(mut stream) = connect(&world.folder).unwrap() else { panic!() };
    let text = |text: &str| Name::truncated(text.to_owned());
    let hello = Hello {
        version: 2,
        job: text("j"),
        member: text("deaf"),
        node: text("a"),
        part: false,
        passed: List::default(),
        broken: List::default(),
    };
    let look = frame(&Request::Look { at, after: 0, wait_ms: 0 });
    stream.write_all(&frame(&Request::Hello { hello })).unwrap();
    // More than the socket holds of their answers, of which none is read before the end:
    // who reads as fast as the coordinator answers is not hung up on.
    let _ = stream.write_all(&look.repeat(1000));
    let until = Timespec { tv_sec: TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    let hung_up = poll(&mut [PollFd::new(&stream, PollFlags::empty())], Some(&until));
    assert_eq!(hung_up, Ok(1));
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let (mut read, mut piece) = (0, [0; 65536]);
    while let Ok(length) = stream.read(&mut piece)
        && length > 0
    {
        read += length;
    }
    assert!(read < 1000 * 16000, "{read}");
    assert_eq!(one.members().unwrap(), ["one"]);
}

#[test]
fn what_was_published_is_there_after_the_coordinator_is_lost() {
    let world = World::new("published");
    let (mut one, mut other) = (world.join("one", true), world.join("other", true));
    let at = Notice::of_job("net", b"one").unwrap();
    one.publish(&at, b"10.0.0.1:77", true).unwrap();
    world.lose();
    // Whoever has published is back when it asks next; who looks waits.
    let looking = thread::spawn(move || other.look(&at, 0, TIMEOUT).unwrap());
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
        other.arrive(&first, 1, both, TIMEOUT).unwrap();
        // And now it ends.
    });
    one.arrive(&series, 1, who, TIMEOUT).unwrap();
    other.join().unwrap();
    let broken = one.arrive(&series, 2, who, TIMEOUT).unwrap_err();
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
        let Link::Local(mut stream) = connect(Path::new(&world.folder)).unwrap() else { panic!() };
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.write_all(bytes).unwrap();
        assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0, "{bytes:?}");
    }
    assert_eq!(one.members().unwrap(), ["one"]);
}

#[test]
fn who_looks_once_gives_a_lost_coordinator_up_at_once() {
    let world = World::new("once");
    let _leader = world.join("leader", true);
    let (folder, looks) = (world.folder.clone(), Arc::new(Mutex::new(0)));
    let counted = looks.clone();
    let find: Find = Box::new(move || {
        *counted.lock().unwrap() += 1;
        connect(&folder)
    });
    let member = Member { job: "j".into(), name: "one".into(), node: "a".into(), part: true };
    let mut one = Client::join(&member, find).unwrap();
    one.look_once();
    let series = Series::of_job("s");
    one.break_series(&series, "it is there").unwrap();
    assert_eq!(*looks.lock().unwrap(), 1);
    world.lose();
    let gone = one.break_series(&series, "it is not");
    assert!(matches!(gone, Err(ClientError::None(_))), "{gone:?}");
    assert_eq!(*looks.lock().unwrap(), 2);
}
