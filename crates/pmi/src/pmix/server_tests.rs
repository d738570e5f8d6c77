use super::*;
use crate::pmix::{BUFFER, Client, PACKING, Step};

fn member(rank: u32) -> Member {
    Member { namespace: "n".to_owned(), rank, size: 2, host: format!("h{rank}") }
}

/// Ranks with their servers, which are asked as the library asks.
struct Ranks(Vec<(Client, Server)>);

impl Ranks {
    /// Two that have begun, and know where they are.
    fn begun() -> Ranks {
        let begin = |rank| {
            let mut server = Server::new(member(rank));
            let step = Step { namespace: "n".to_owned(), rank };
            server.from_rank(&Client::hello(&step, 0, 0)).unwrap();
            let index = Client::welcomed(server.to_rank()).unwrap().expect("an answer");
            (Client::new(step, index), server)
        };
        let mut ranks = Ranks(vec![begin(0), begin(1)]);
        ranks.gather();
        ranks
    }

    fn ask(&mut self, rank: usize, request: impl Fn(&mut Client) -> Vec<u8>) -> Option<Vec<u8>> {
        let (client, server) = &mut self.0[rank];
        let request = request(client);
        server.from_rank(&request).unwrap();
        self.hears(rank)
    }

    fn hears(&mut self, rank: usize) -> Option<Vec<u8>> {
        let (client, server) = &mut self.0[rank];
        client.answer(server.to_rank()).unwrap()
    }

    /// Ends the gathering that all have come to.
    fn gather(&mut self) {
        let of = |(_, server): &(Client, Server)| {
            server.gathers().map(|(number, own)| (number, own.to_vec())).expect("one has begun")
        };
        let all: Vec<(u64, Vec<u8>)> = self.0.iter().map(of).collect();
        assert_eq!(all[0].0, all[1].0);
        let contributions: Vec<Vec<u8>> = all.iter().map(|(_, own)| own.clone()).collect();
        for (_, server) in &mut self.0 {
            server.gathered(all[0].0, contributions.clone()).unwrap();
        }
    }

    /// The rank goes on in another process.
    fn restart(&mut self, rank: usize) {
        let text = serde_json::to_vec(&self.0[rank].1.saved()).unwrap();
        let saved: Server = serde_json::from_slice(&text).unwrap();
        self.0[rank].1 = saved.restored().unwrap();
    }
}

fn succeeds(answer: Option<Vec<u8>>) {
    Client::done(&answer.expect("an answer"), "it").unwrap();
}

#[test]
fn what_a_rank_tells_others_get_after_a_fence() {
    let mut ranks = Ranks::begun();
    succeeds(ranks.ask(0, |client| client.commit(&[("a", "1"), ("b", "2")])));
    // Told again, it counts once.
    succeeds(ranks.ask(0, |client| client.commit(&[("a", "3")])));
    assert_eq!(ranks.ask(0, Client::fence), None);
    let early = ranks.ask(1, |client| client.get(0)).unwrap();
    assert!(Client::got(&early).unwrap().is_empty());
    assert_eq!(ranks.ask(1, Client::fence), None);
    ranks.gather();
    succeeds(ranks.hears(0));
    succeeds(ranks.hears(1));
    let got = Client::got(&ranks.ask(1, |client| client.get(0)).unwrap()).unwrap();
    assert_eq!((got["a"].as_str(), got["b"].as_str(), got.len()), ("3", "2", 2));
    // The next fence brings nothing new, and what there is stays.
    assert_eq!(ranks.ask(0, Client::fence), None);
    assert_eq!(ranks.0[0].1.gathers().unwrap().1, [SAME]);
    assert_eq!(ranks.ask(1, Client::fence), None);
    ranks.gather();
    let again = Client::got(&ranks.ask(1, |client| client.get(0)).unwrap()).unwrap();
    assert_eq!(again, got);
}

#[test]
fn a_rank_s_job_waits_for_where_all_are() {
    let mut server = Server::new(member(1));
    server.from_rank(&Client::hello(&Step { namespace: "n".to_owned(), rank: 1 }, 0, 0)).unwrap();
    server.to_rank().clear();
    let job = Message { tag: 101, body: Pack::default().count(1).byte(command::JOB).0 };
    server.from_rank(&job.encode(0)).unwrap();
    assert!(server.to_rank().is_empty());
    assert_eq!(server.gathers(), Some((0, &b"h1"[..])));
    server.gathered(0, vec![b"h0".to_vec(), b"h1".to_vec()]).unwrap();
    let answer = Message::take(server.to_rank()).unwrap().expect("an answer");
    assert_eq!((answer.tag, Unpack(&answer.body).one()), (101, Ok(())));
    assert_eq!(server.last(), None, "the first rank tells the others");
}

#[test]
fn a_fence_outlives_a_restart_at_any_moment() {
    let mut ranks = Ranks::begun();
    succeeds(ranks.ask(1, |client| client.commit(&[("a", "1")])));
    assert_eq!(ranks.ask(0, Client::fence), None);
    ranks.restart(0);
    assert_eq!(ranks.ask(1, Client::fence), None);
    ranks.restart(1);
    // One knows that all have come, and the other one does not.
    let of = |server: &Server| server.gathers().unwrap().1.to_vec();
    let all: Vec<Vec<u8>> = ranks.0.iter().map(|(_, server)| of(server)).collect();
    ranks.0[0].1.gathered(1, all.clone()).unwrap();
    ranks.restart(0);
    ranks.restart(1);
    let (number, last) = ranks.0[0].1.last().map(|(number, last)| (number, last.to_vec())).unwrap();
    assert_eq!((number, &last), (1, &all));
    let told = Server::split(&Server::join(&last)).unwrap();
    ranks.0[1].1.gathered(number, told).unwrap();
    succeeds(ranks.hears(0));
    succeeds(ranks.hears(1));
    assert!(ranks.0[1].1.gathered(1, all).is_err(), "it has ended");
}

#[test]
fn nothing_is_taken_while_it_is_held() {
    let mut ranks = Ranks::begun();
    ranks.0[0].1.hold(true).unwrap();
    assert_eq!(ranks.ask(0, |client| client.commit(&[("a", "1")])), None);
    ranks.restart(0);
    assert!(!ranks.0[0].1.is_held());
    ranks.0[0].1.hold(false).unwrap();
    succeeds(ranks.hears(0));
    // What the rank has not read comes before what it is told next.
    let server = &mut ranks.0[0].1;
    server.to_rank().extend_from_slice(b"new");
    server.unread(b"old".to_vec());
    assert_eq!(server.to_rank(), b"oldnew");
}

#[test]
fn another_rank_is_not_served() {
    let mut server = Server::new(member(1));
    let other = Client::hello(&Step { namespace: "n".to_owned(), rank: 0 }, 0, 0);
    assert!(matches!(server.from_rank(&other), Err(PmixError::Who { .. })));
    let mut server = Server::new(member(1));
    let hello = Hello { packing: "v41".to_owned(), ..Hello::of("n", 1, 0, 0) };
    let refused = server.from_rank(&hello.encode()).unwrap_err().to_string();
    assert!(refused.contains("v41") && refused.contains(PACKING), "{refused}");
    let hello = Hello { buffer: BUFFER + 1, ..Hello::of("n", 1, 0, 0) };
    let mut server = Server::new(member(1));
    assert!(matches!(server.from_rank(&hello.encode()), Err(PmixError::Packing { .. })));
}

#[test]
fn what_is_not_served_is_said_to_be() {
    let mut ranks = Ranks::begun();
    let answered = |ranks: &mut Ranks, body: Pack| {
        let bytes = Message { tag: 4711, body: body.0 }.encode(0);
        let server = &mut ranks.0[0].1;
        server.from_rank(&bytes).unwrap();
        Message::take(server.to_rank()).unwrap().map(|answer| Unpack(&answer.body).status())
    };
    let spawn = Pack::default().count(1).byte(9);
    assert_eq!(answered(&mut ranks, spawn), Some(Ok(status::NOT_SUPPORTED)));
    let some = Pack::default().count(1).byte(command::FENCE).count(1).size(1);
    let some = some.count(1).rank_of("n", 0);
    assert_eq!(answered(&mut ranks, some), Some(Ok(status::NOT_SUPPORTED)));
    let leave = Pack::default().count(1).byte(command::DEREGISTER_EVENTS);
    assert_eq!(answered(&mut ranks, leave), None);
}

#[test]
fn images_that_no_server_leaves_are_refused() {
    let good = serde_json::to_value(Ranks::begun().0.remove(0).1.saved()).unwrap();
    let restored =
        |image: serde_json::Value| serde_json::from_value::<Server>(image).unwrap().restored();
    assert!(restored(good.clone()).is_ok());
    for (key, value) in [
        ("told", serde_json::json!([[]])),
        ("hosts", serde_json::json!(["h"])),
        ("done", serde_json::json!(0)),
        ("last", serde_json::json!([0, []])),
    ] {
        let mut bad = good.clone();
        bad[key] = value;
        assert!(matches!(restored(bad), Err(PmixError::Image(_))), "{key}");
    }
    let mut far = good;
    far["member"]["rank"] = serde_json::json!(2);
    assert!(restored(far).is_err());
}

#[test]
fn a_program_may_come_after_another() {
    let mut ranks = Ranks::begun();
    succeeds(ranks.ask(0, Client::finalize));
    let server = &mut ranks.0[0].1;
    assert!(server.is_free() && !server.is_in_session());
    server.connected();
    server.from_rank(&Client::hello(&Step { namespace: "n".to_owned(), rank: 0 }, 0, 0)).unwrap();
    assert!(server.is_in_session());
}
