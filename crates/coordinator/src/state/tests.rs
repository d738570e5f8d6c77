use super::*;
use crate::message::{Broken, Key, Notice, Passed, Value};
use proptest::prelude::*;

fn name(text: &str) -> Name {
    Name::truncated(text.to_owned())
}

fn series(text: &str) -> Series {
    Series { scope: Scope::Job {}, name: name(text) }
}

fn hello(member: &str, node: &str) -> Hello {
    Hello {
        version: VERSION,
        job: name("j"),
        member: name(member),
        node: name(node),
        part: true,
        passed: List::default(),
        broken: List::default(),
    }
}

fn arrive(series: &Series, step: u64, members: u32) -> Request {
    let who = Who::Count { members };
    Request::Arrive { series: series.clone(), step, who, wait_ms: 1000 }
}

/// Returns members 0.. of a job, all on node `a`.
fn world(members: u64) -> State {
    let mut state = State::new("j".into(), 0);
    for conn in 0..members {
        let hello = hello(&conn.to_string(), "a");
        state.ask(conn, Request::Hello { hello }, 0).unwrap();
    }
    assert!(state.replies().iter().all(|(_, reply)| matches!(reply, Reply::Welcome { .. })));
    state
}

fn asked(state: &mut State, conn: Conn, request: Request) -> Vec<(Conn, Reply)> {
    state.ask(conn, request, 0).unwrap();
    state.replies()
}

#[test]
fn nobody_is_through_before_all_are_there() {
    let mut state = world(3);
    let s = series("s");
    assert!(asked(&mut state, 0, arrive(&s, 1, 3)).is_empty());
    assert!(asked(&mut state, 2, arrive(&s, 1, 3)).is_empty());
    let through = asked(&mut state, 1, arrive(&s, 1, 3));
    let all: Vec<Conn> = through.iter().map(|(conn, _)| *conn).collect();
    assert_eq!(all, [0, 1, 2]);
    assert!(through.iter().all(|(_, reply)| *reply == Reply::Through {}));
    // Said once more: through at once. The next step waits again.
    assert_eq!(asked(&mut state, 0, arrive(&s, 1, 3)), [(0, Reply::Through {})]);
    assert!(asked(&mut state, 0, arrive(&s, 2, 3)).is_empty());
    assert_eq!(state.next_deadline(), Some(1000));
}

#[test]
fn who_is_lost_breaks_what_it_takes_part_in_and_nothing_else() {
    let mut state = world(3);
    let (s, other) = (series("s"), series("other"));
    asked(&mut state, 0, arrive(&s, 1, 3));
    asked(&mut state, 1, arrive(&s, 1, 3));
    asked(&mut state, 2, arrive(&other, 1, 2));
    state.lost(1);
    let told = state.replies();
    assert!(matches!(&told[..], [(0, Reply::Broken { by, .. })] if **by == *"1"));
    assert!(matches!(&asked(&mut state, 0, arrive(&s, 2, 2))[..], [(0, Reply::Broken { .. })]));
    asked(&mut state, 0, Request::End { series: s.clone() });
    let through = asked(&mut state, 0, arrive(&other, 1, 2));
    assert_eq!(through.len(), 2);
}

#[test]
fn all_means_the_parts_that_are_there() {
    let mut state = world(3);
    let s = series("s");
    let all = |step| Request::Arrive { series: s.clone(), step, who: Who::All {}, wait_ms: 9 };
    asked(&mut state, 0, all(1));
    asked(&mut state, 1, all(1));
    // The third was never there.
    state.lost(2);
    assert_eq!(state.replies().len(), 2);
    let guest = Hello { part: false, ..hello("guest", "a") };
    asked(&mut state, 9, Request::Hello { hello: guest });
    asked(&mut state, 0, all(2));
    assert_eq!(asked(&mut state, 1, all(2)).len(), 2);
}

#[test]
fn a_node_waits_for_its_own() {
    let mut state = world(2);
    state.ask(7, Request::Hello { hello: hello("7", "b") }, 0).unwrap();
    state.replies();
    let s = Series { scope: Scope::Node {}, name: name("s") };
    let request = Request::Arrive { series: s.clone(), step: 1, who: Who::All {}, wait_ms: 9 };
    assert_eq!(asked(&mut state, 7, request.clone()), [(7, Reply::Through {})]);
    assert!(asked(&mut state, 0, request.clone()).is_empty());
    assert_eq!(asked(&mut state, 1, request).len(), 2);
}

#[test]
fn who_waits_too_long_is_told() {
    let mut state = world(2);
    let s = series("s");
    asked(&mut state, 0, arrive(&s, 1, 2));
    state.expire(999);
    assert!(state.replies().is_empty());
    state.expire(1000);
    assert_eq!(state.replies(), [(0, Reply::Late {})]);
    // It does not count as having arrived.
    assert!(asked(&mut state, 1, arrive(&s, 1, 2)).is_empty());
    assert_eq!(asked(&mut state, 0, arrive(&s, 1, 2)).len(), 2);
}

#[test]
fn a_new_coordinator_hears_what_was() {
    // Of three, 0 was through step 4 when the coordinator was lost; 1 and 2 were not told.
    let mut state = State::new("j".into(), 0);
    let s = series("s");
    for conn in [1, 2] {
        state.ask(conn, Request::Hello { hello: hello(&conn.to_string(), "a") }, 0).unwrap();
        state.ask(conn, arrive(&s, 4, 3), 0).unwrap();
    }
    state.replies();
    let passed = List::new(vec![Passed { series: s.clone(), step: 4 }]).unwrap();
    let knows = Hello { passed, ..hello("0", "a") };
    let through = asked(&mut state, 0, Request::Hello { hello: knows });
    assert_eq!(through.iter().filter(|(_, reply)| *reply == Reply::Through {}).count(), 2);
    // And so with what was broken.
    let t = series("t");
    asked(&mut state, 1, arrive(&t, 1, 3));
    let (by, why) = (name("2"), Why::truncated("no room".into()));
    let broken = List::new(vec![Broken { series: t, by, why }]).unwrap();
    let knows = Hello { broken, ..hello("3", "a") };
    let told = asked(&mut state, 3, Request::Hello { hello: knows });
    assert!(told.iter().any(|(conn, reply)| *conn == 1 && matches!(reply, Reply::Broken { .. })));
}

fn notice(key: &str) -> Notice {
    let key = Key::new(key.as_bytes().to_vec()).unwrap();
    Notice { scope: Scope::Job {}, space: name("net"), key }
}

fn publish(key: &str, value: &str, alone: bool) -> Request {
    let value = Value::new(value.as_bytes().to_vec()).unwrap();
    Request::Publish { at: notice(key), value, alone }
}

#[test]
fn what_is_published_is_found_by_who_looks_before_and_after() {
    let mut state = world(2);
    let look = |after| Request::Look { at: notice("k"), after, wait_ms: 50 };
    assert!(asked(&mut state, 1, look(0)).is_empty());
    let told = asked(&mut state, 0, publish("k", "v", false));
    assert_eq!(told[0], (0, Reply::Published { revision: 1 }));
    let is = |reply: &Reply, text: &str| matches!(reply, Reply::Found { value, .. } if **value == *text.as_bytes());
    assert!(told[1].0 == 1 && is(&told[1].1, "v"));
    assert!(is(&asked(&mut state, 1, look(0))[0].1, "v"));
    assert!(asked(&mut state, 1, look(1)).is_empty());
    assert!(is(&asked(&mut state, 0, publish("k", "w", false))[1].1, "w"));
    // It goes with its owner.
    state.lost(0);
    assert!(asked(&mut state, 1, look(0)).is_empty());
}

#[test]
fn one_of_those_who_want_to_be_alone_is_elected() {
    let mut state = world(3);
    let reply = |told: Vec<(Conn, Reply)>| told.into_iter().next().unwrap().1;
    assert!(matches!(reply(asked(&mut state, 1, publish("l", "", true))), Reply::Published { .. }));
    let taken = reply(asked(&mut state, 0, publish("l", "", true)));
    assert!(matches!(taken, Reply::Taken { by } if *by == *"1"));
    assert!(matches!(reply(asked(&mut state, 0, publish("l", "x", false))), Reply::Taken { .. }));
    state.lost(1);
    assert!(matches!(reply(asked(&mut state, 0, publish("l", "", true))), Reply::Published { .. }));
}

#[test]
fn who_breaks_the_rules_is_told_from_who_does_not() {
    let mut state = world(2);
    assert_eq!(state.ask(5, Request::Members {}, 0), Err(Violation::Greeting));
    let hello_again = Request::Hello { hello: hello("0", "a") };
    assert_eq!(state.ask(0, hello_again, 0), Err(Violation::Greeting));
    asked(&mut state, 0, arrive(&series("s"), 1, 2));
    assert_eq!(state.ask(0, Request::Members {}, 0), Err(Violation::Impatient));
    let other = Hello { job: name("other"), ..hello("9", "a") };
    let told = asked(&mut state, 9, Request::Hello { hello: other });
    assert!(matches!(&told[..], [(9, Reply::Refused { .. })]));
    let told = asked(&mut state, 1, arrive(&series("s"), 1, 0));
    assert!(matches!(&told[..], [(1, Reply::Refused { .. })]));
    let told = asked(&mut state, 1, arrive(&series("s"), 1, 3));
    assert!(matches!(&told[..], [(1, Reply::Refused { .. })]));
}

proptest! {
    /// Whatever members do, each request has one answer at most, and none is answered that has not
    /// asked.
    #[test]
    fn answers_are_for_questions(moves in prop::collection::vec((0u64..4, 0u8..8, 0u64..4, 1u32..5), 1..200)) {
        let mut state = State::new("j".into(), 0);
        let mut open = [0i32; 4];
        for (now, (conn, what, step, members)) in moves.into_iter().enumerate() {
            let now = now as u64 * 100;
            let s = series(if members % 2 == 0 { "s" } else { "t" });
            let request = match what {
                0 => Some(Request::Hello { hello: hello(&conn.to_string(), "a") }),
                1 | 2 => Some(arrive(&s, step, members)),
                3 => Some(Request::Break { series: s, why: Why::default() }),
                4 => Some(publish("k", "v", members % 2 == 0)),
                5 => Some(Request::Look { at: notice("k"), after: step, wait_ms: 100 }),
                6 => Some(Request::End { series: s }),
                _ => None,
            };
            match request {
                Some(request) => {
                    if state.ask(conn, request, now).is_ok() {
                        open[conn as usize] += 1;
                    }
                }
                None => {
                    state.lost(conn);
                    open[conn as usize] = 0;
                }
            }
            state.expire(now);
            for (conn, _) in state.replies() {
                open[conn as usize] -= 1;
            }
            prop_assert!(open.iter().all(|count| (0..=1).contains(count)), "{open:?}");
        }
    }
}

#[test]
fn a_part_is_on_one_node() {
    let mut state = world(2);
    let greet = |state: &mut State, conn, hello| asked(state, conn, Request::Hello { hello });
    let twice = greet(&mut state, 7, hello("1", "b"));
    assert!(matches!(&twice[..], [(7, Reply::Taken { by })] if **by == *"a"), "{twice:?}");
    // One that has come back, and a guest.
    assert!(matches!(greet(&mut state, 8, hello("1", "a"))[..], [(8, Reply::Welcome { .. })]));
    let guest = Hello { part: false, ..hello("1", "b") };
    assert!(matches!(greet(&mut state, 9, guest)[..], [(9, Reply::Welcome { .. })]));
}

#[test]
fn who_meets_in_memory_is_told_when_one_is_lost() {
    let mut state = world(3);
    let s = Series { scope: Scope::Node {}, name: name("s") };
    let meet = || Request::Meet { series: s.clone(), members: 3 };
    let pages: Vec<_> = (0..3)
        .map(|conn| {
            assert_eq!(asked(&mut state, conn, meet()), [(conn, Reply::Page {})]);
            state.page_for(conn).expect("a page")
        })
        .collect();
    state.lost(1);
    assert!(pages.iter().all(|page| page.has_been_left()));
    assert!(
        matches!(&asked(&mut state, 0, meet())[..], [(0, Reply::Broken { by, .. })] if **by == *"1")
    );
    for conn in [0, 2] {
        asked(&mut state, conn, Request::End { series: s.clone() });
    }
    asked(&mut state, 0, meet());
    assert!(!state.page_for(0).expect("a page").has_been_left());
}
