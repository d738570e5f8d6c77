//! Members of a job that meet at barriers in memory, across a checkpoint and a restart of the job
//! that they run in.
use kedge_coordinator::{Client, Leader, Member, Series, connect, reach};
use kedge_tests::job::{User, family, kedge_as, send};
use kedge_tests::world::{World, stderr};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

const MEMBERS: u32 = 4;
const STEPS: u32 = 150;
/// The first member waits there until the job has been saved.
const WAITS: u32 = 100;
const TIMEOUT: Duration = Duration::from_secs(40);
/// In a process of this program that is a member: which one.
const MEMBER: &str = "KEDGE_TEST_MEMBER";

/// What [`members_inside_a_barrier_come_back`] has its processes do, and nothing otherwise.
#[test]
fn member() {
    let Ok(index) = std::env::var(MEMBER) else { return };
    let folder = PathBuf::from(std::env::var("KEDGE_TEST_FOLDER").expect("a folder"));
    let saved = folder.join("saved");
    let out = folder.join(format!("steps.{index}"));
    let mut out = OpenOptions::new().append(true).create(true).open(out).expect("a file");
    let member = Member { job: "j".into(), name: index.clone(), node: "n".into(), part: true };
    let find = Box::new(move || connect(&folder));
    let mut client = Client::join(&member, find).expect("a coordinator");
    for step in 1..=STEPS {
        client.meet(&Series::of_node("s"), step, MEMBERS, TIMEOUT).expect("all of them");
        writeln!(out, "{step}").expect("room");
        // The others wait for this one nearly all the time.
        if index == "0" {
            thread::sleep(Duration::from_millis(10));
            while step == WAITS && !saved.exists() {
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

fn steps(world: &World, member: u32) -> Vec<u32> {
    let text = fs::read_to_string(world.home().join(format!("steps.{member}")));
    text.unwrap_or_default().lines().filter_map(|line| line.parse().ok()).collect()
}

#[test]
fn members_inside_a_barrier_come_back() {
    let world = World::new("meet");
    let home = world.home();
    let (_stream, leader) = reach(&home, "j").expect("a coordinator");
    let Leader::This(_server) = leader else { panic!("somebody else coordinates") };
    let own = std::env::current_exe().expect("this program").display().to_string();
    let start = format!(
        "for i in 0 1 2 3; do {MEMBER}=$i KEDGE_TEST_FOLDER={} {own} meet::member --exact >/dev/null & done; wait",
        home.display()
    );
    let run = ["run", "--gpu", "none", "--job", "meet", "--", "sh", "-c", &start];
    let mut running =
        kedge_as(&world, User::Same, &run).stdout(Stdio::null()).spawn().expect("kedge");
    let begin = Instant::now();
    while steps(&world, 0).len() < 30 {
        if begin.elapsed() > TIMEOUT {
            send("KILL", &family(running.id()));
            panic!("{:?}", steps(&world, 0));
        }
        thread::sleep(Duration::from_millis(5));
    }
    let taken =
        kedge_as(&world, User::Same, &["checkpoint", "meet", "--stop"]).output().expect("kedge");
    if !taken.status.success() {
        send("KILL", &family(running.id()));
    }
    // It has ended with the image, at the latest when `timeout` ends it.
    let _ = running.wait();
    assert!(taken.status.success(), "{}", stderr(&taken));
    assert!(steps(&world, 0).len() <= WAITS as usize, "it was over before");
    fs::write(home.join("saved"), "").expect("a file");
    let ended = kedge_as(&world, User::Same, &["restart", "meet-0001"]).output().expect("kedge");
    assert!(ended.status.success(), "{}", stderr(&ended));
    for member in 0..MEMBERS {
        assert_eq!(steps(&world, member), (1..=STEPS).collect::<Vec<_>>(), "member {member}");
    }
}
