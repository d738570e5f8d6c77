//! The rules of what events cost and what they tell.

use kedge_pages::{
    Access, Action, Attach, BLOCK, Engine, NodeConfig, NodeId, Note, Pages, Place, Protection,
    Step, StreamId,
};

const GPU: NodeId = NodeId(0);
const STREAM: StreamId = StreamId(7);
const START: u64 = 0x3_0000_0000;

fn engine(quota: Option<u64>, maps_host: bool) -> Engine {
    Engine::new([(GPU, NodeConfig { quota, maps_host, ..NodeConfig::default() })], 1)
}

fn done(step: Step) -> Vec<Action> {
    match step {
        Step::Do(actions) => actions,
        Step::Wait { .. } => panic!("{step:?}"),
    }
}

fn launch(engine: &mut Engine, likely: &[u64]) -> Vec<Action> {
    done(engine.launch(GPU, STREAM, likely).unwrap())
}

fn wait(engine: &mut Engine) {
    let ticket = engine.ticket();
    assert!(engine.over(GPU, STREAM, ticket).is_empty());
}

fn touch(engine: &mut Engine, page: u64, access: Access) -> Vec<Action> {
    done(engine.touch(page, access, None).unwrap())
}

fn page(page: u64) -> Pages {
    page..page + 1
}

/// Pages that lie apart are closed by a call for all blocks that follow each other.
#[test]
fn scattered_pages_are_closed_together_and_sent_one_by_one() {
    let mut engine = engine(None, true);
    engine.alloc(START..START + 2000, Attach::Global, GPU).unwrap();
    launch(&mut engine, &[]);
    wait(&mut engine);
    let written = [10, 100, 500, 600, 1900].map(|at| START + at);
    for at in written {
        touch(&mut engine, at, Access::Write);
    }
    let actions = launch(&mut engine, &[]);
    let sends: Vec<Action> =
        written.iter().map(|at| Action::Send { node: GPU, pages: page(*at) }).collect();
    let closes: Vec<Action> = [START..START + 512, page(START + 600), page(START + 1900)]
        .map(|pages| Action::Protect { pages, to: Protection::None })
        .to_vec();
    assert_eq!(actions, [closes, sends].concat());
}

/// A launch costs what the host has touched, and nothing for what is allocated.
#[test]
fn a_launch_looks_at_what_was_touched_alone() {
    let mut engine = engine(None, true);
    for index in 0..1000 {
        let start = START + index * 5000;
        engine.alloc(start..start + 5000, Attach::Global, GPU).unwrap();
    }
    assert!(launch(&mut engine, &[START]).is_empty());
    wait(&mut engine);
    let (read, written) = (START + 3, START + 5000 * 900 + 4000);
    assert_eq!(
        touch(&mut engine, read, Access::Read),
        [
            Action::Fetch { node: GPU, pages: page(read) },
            Action::Protect { pages: page(read), to: Protection::Read },
        ]
    );
    touch(&mut engine, written, Access::Write);
    assert_eq!(
        launch(&mut engine, &[]),
        [
            Action::Protect { pages: page(read), to: Protection::None },
            Action::Protect { pages: page(written), to: Protection::None },
            Action::Send { node: GPU, pages: page(written) },
        ]
    );
    assert!(launch(&mut engine, &[]).is_empty());
}

/// Memory that no kernel can have touched is fetched from nowhere.
#[test]
fn first_touches_of_new_memory_fetch_nothing() {
    let mut engine = engine(None, false);
    engine.alloc(START..START + 10, Attach::Global, GPU).unwrap();
    let opened = |to| vec![Action::Protect { pages: page(START), to }];
    assert_eq!(touch(&mut engine, START, Access::Read), opened(Protection::Read));
    assert_eq!(touch(&mut engine, START, Access::Write), opened(Protection::ReadWrite));
    assert!(touch(&mut engine, START, Access::Write).is_empty(), "another thread was faster");
}

/// The bytes of a page that is open for reading are there already.
#[test]
fn a_write_behind_a_read_fetches_nothing() {
    let mut engine = engine(None, false);
    engine.alloc(START..START + 10, Attach::Global, GPU).unwrap();
    launch(&mut engine, &[]);
    wait(&mut engine);
    touch(&mut engine, START, Access::Read);
    let opened = Action::Protect { pages: page(START), to: Protection::ReadWrite };
    assert_eq!(touch(&mut engine, START, Access::Write), [opened]);
}

/// It is told once, and then neither side waits for the other any more.
#[test]
fn a_block_that_both_sides_touch_becomes_host_memory_once() {
    let mut engine = engine(None, true);
    let all = START..START + 2 * BLOCK;
    engine.alloc(all, Attach::Global, GPU).unwrap();
    launch(&mut engine, &[]);
    let ticket = engine.ticket();
    let waits = Step::Wait { streams: vec![(GPU, STREAM)], ticket };
    assert_eq!(engine.touch(START + 1, Access::Write, None).unwrap(), waits);
    engine.over(GPU, STREAM, ticket);
    let actions = touch(&mut engine, START + 1, Access::Write);
    let block = START..START + BLOCK;
    let told = Action::Tell(Note::TouchedByBoth { pages: block.clone() });
    assert_eq!(actions.iter().filter(|action| **action == told).count(), 1);
    assert!(actions.contains(&Action::Map { pages: block, at: Place::Host }));
    launch(&mut engine, &[START]);
    assert!(touch(&mut engine, START + 2, Access::Write).is_empty());
    assert_ne!(engine.touch(START + BLOCK, Access::Read, None).unwrap(), Step::Do(vec![]));
}

/// Whoever asks what a touch would wait for, and reports that it is over, has no kernel taken for
/// running.
#[test]
fn a_block_that_is_touched_behind_a_kernel_stays() {
    let mut engine = engine(None, true);
    engine.alloc(START..START + 2 * BLOCK, Attach::Global, GPU).unwrap();
    for page in START..START + 3 {
        launch(&mut engine, &[START]);
        let waits = engine.touch_waits(page, Access::Write, None).unwrap();
        let ticket = engine.ticket();
        assert_eq!(waits, Some(Step::Wait { streams: vec![(GPU, STREAM)], ticket }));
        engine.over(GPU, STREAM, ticket);
        assert_eq!(engine.touch_waits(page, Access::Write, None).unwrap(), None);
        let actions = touch(&mut engine, page, Access::Write);
        let told = actions.iter().any(|action| matches!(action, Action::Tell(_)));
        assert!(!told && !actions.is_empty(), "{actions:?}");
    }
}

/// Of three regions of two blocks, two fit: the launch that wants the third moves the one that was
/// used least recently.
#[test]
fn the_least_recently_used_gives_way() {
    let mut engine = engine(Some(4 * BLOCK), true);
    let starts = [0, 1, 2].map(|index| START + index * 2 * BLOCK);
    for start in starts {
        engine.alloc(start..start + 2 * BLOCK, Attach::Global, GPU).unwrap();
    }
    let on_gpu = |engine: &Engine| -> Vec<bool> {
        let survey: Vec<_> = engine.survey().collect();
        let at =
            |start: &u64| survey.iter().any(|(it, at)| it.contains(start) && *at != Place::Host);
        starts.iter().map(at).collect()
    };
    assert_eq!(on_gpu(&engine), [true, true, false]);
    launch(&mut engine, &[starts[0]]);
    wait(&mut engine);
    let moved = launch(&mut engine, &[starts[2]]);
    assert_eq!(on_gpu(&engine), [true, false, true]);
    let bytes = |pages: &Pages| pages.end - pages.start;
    let sent = moved.iter().map(|action| match action {
        Action::Send { pages, .. } | Action::Fetch { pages, .. } => bytes(pages),
        _ => 0,
    });
    assert_eq!(sent.sum::<u64>(), 4 * BLOCK);
    wait(&mut engine);
    assert!(launch(&mut engine, &[starts[0], starts[2]]).is_empty(), "both are there");
}

/// What is attached to one stream is nobody else's concern.
#[test]
fn a_stream_s_memory_stays_open_while_others_work() {
    let mut engine = engine(None, true);
    engine.alloc(START..START + 4, Attach::Global, GPU).unwrap();
    done(engine.attach(START, Attach::Stream(StreamId(1))).unwrap());
    touch(&mut engine, START, Access::Write);
    assert!(launch(&mut engine, &[]).is_empty(), "stream 7 does not touch it");
    assert!(touch(&mut engine, START, Access::Write).is_empty());
    assert_eq!(touch(&mut engine, START + 1, Access::Read).len(), 1);
    let sent = done(engine.launch(GPU, StreamId(1), &[]).unwrap());
    assert!(sent.contains(&Action::Send { node: GPU, pages: page(START) }));
}

/// Work that was launched before a region was there is not waited for when it is attached.
#[test]
fn a_new_region_is_attached_while_others_work() {
    let mut engine = engine(None, true);
    engine.alloc(START..START + 4, Attach::Global, GPU).unwrap();
    let other = START + BLOCK;
    assert!(launch(&mut engine, &[]).is_empty());
    engine.alloc(other..other + 4, Attach::Global, GPU).unwrap();
    assert!(done(engine.attach(other, Attach::Stream(StreamId(1))).unwrap()).is_empty());
    assert_eq!(touch(&mut engine, other, Access::Write).len(), 1, "stream 7 does not touch it");
    let wait = |step| matches!(step, Step::Wait { .. });
    assert!(wait(engine.attach(START, Attach::Host).unwrap()), "this one it may touch");
    assert!(done(engine.attach(START, Attach::Global).unwrap()).is_empty(), "nothing changes");
}

/// A copy that runs may still read what is attached to another stream meanwhile.
#[test]
fn a_copy_from_new_memory_is_waited_for() {
    let mut engine = engine(None, true);
    engine.alloc(START..START + 4, Attach::Global, GPU).unwrap();
    let bytes = START * kedge_pages::PAGE..START * kedge_pages::PAGE + 8;
    done(engine.device_access(GPU, STREAM, &[bytes], &[]).unwrap());
    let wait = |step| matches!(step, Step::Wait { .. });
    assert!(wait(engine.attach(START, Attach::Stream(StreamId(1))).unwrap()));
}

/// A prefetch to the node sends what the host has written, and leaves it open for reading.
#[test]
fn a_prefetch_sends_ahead_of_the_launch() {
    let mut engine = engine(None, false);
    engine.alloc(START..START + 4, Attach::Global, GPU).unwrap();
    touch(&mut engine, START, Access::Write);
    let all = START..START + 4;
    assert_eq!(
        engine.prefetch(all.clone(), Place::Node(GPU)).unwrap(),
        [
            Action::Protect { pages: page(START), to: Protection::Read },
            Action::Send { node: GPU, pages: page(START) },
        ]
    );
    assert_eq!(launch(&mut engine, &[]).len(), 1, "it is closed, and not sent again");
    // While the kernel runs, a prefetch to the host waits.
    assert!(engine.prefetch(all.clone(), Place::Host).unwrap().is_empty());
    let ticket = engine.ticket();
    let fetched = Action::Fetch { node: GPU, pages: all };
    assert!(engine.over(GPU, STREAM, ticket).contains(&fetched));
}

/// The host function's own stream is not waited for: what is behind it has not begun.
#[test]
fn a_host_function_does_not_wait_for_itself() {
    let mut engine = engine(None, false);
    engine.alloc(START..START + 4, Attach::Global, GPU).unwrap();
    launch(&mut engine, &[]);
    assert!(matches!(engine.touch(START, Access::Write, None).unwrap(), Step::Wait { .. }));
    let own = engine.touch(START, Access::Write, Some(STREAM)).unwrap();
    assert!(matches!(own, Step::Do(actions) if actions.len() == 2));
    let sent = engine.host_function_over(STREAM);
    assert!(sent.contains(&Action::Send { node: GPU, pages: page(START) }));
}

/// A page that is open and not in the view is shown again, and with it those behind it that are
/// alike where touches follow each other; nothing is fetched.
#[test]
fn what_the_view_has_lost_is_shown_again() {
    let mut engine = Engine::new([(GPU, NodeConfig::default())], 64);
    engine.alloc(START..START + 100, Attach::Global, GPU).unwrap();
    launch(&mut engine, &[]);
    wait(&mut engine);
    let opened = done(engine.touch_range(START..START + 10, Access::Write, None).unwrap());
    assert_eq!(opened.len(), 2);
    let opened = done(engine.touch_range(START + 10..START + 12, Access::Read, None).unwrap());
    assert_eq!(opened.len(), 2);
    let shown = |pages, to| vec![Action::Protect { pages, to }];
    let (read, write) = (Protection::Read, Protection::ReadWrite);
    assert_eq!(engine.reopen(START + 7).unwrap(), shown(page(START + 7), write));
    assert_eq!(engine.reopen(START + 8).unwrap(), shown(START + 8..START + 10, write));
    assert_eq!(engine.reopen(START + 10).unwrap(), shown(page(START + 10), read));
    assert_eq!(engine.reopen(START + 12).unwrap(), [], "it is closed");
    assert!(engine.reopen(START + 100).is_err());
}

/// After a restart the host has what it alone had.
#[test]
fn a_restart_leaves_with_the_node_what_both_had() {
    let mut engine = engine(None, false);
    engine.alloc(START..START + 100, Attach::Global, GPU).unwrap();
    launch(&mut engine, &[]);
    wait(&mut engine);
    touch(&mut engine, START + 3, Access::Read);
    touch(&mut engine, START + 5, Access::Write);
    let shown = |pages, to| Action::Protect { pages, to };
    let expected =
        [shown(page(START + 3), Protection::None), shown(page(START + 5), Protection::ReadWrite)];
    assert_eq!(engine.rebuilt(), expected);
    assert!(touch(&mut engine, START + 5, Access::Write).is_empty());
    let fetched = Action::Fetch { node: GPU, pages: page(START + 3) };
    assert_eq!(touch(&mut engine, START + 3, Access::Read)[0], fetched);
    let sent = Action::Send { node: GPU, pages: page(START + 5) };
    assert_eq!(launch(&mut engine, &[]).last(), Some(&sent));
}

/// What something else wants of a node is given by what was used least recently, and comes back
/// with the launch that uses it once there is room.
#[test]
fn managed_memory_gives_way_to_other_memory() {
    let mut engine = engine(Some(4 * BLOCK), true);
    let starts = [0, 1].map(|index| START + index * 2 * BLOCK);
    for start in starts {
        engine.alloc(start..start + 2 * BLOCK, Attach::Global, GPU).unwrap();
    }
    launch(&mut engine, &[starts[0]]);
    let wants = engine.give_way(GPU, BLOCK + 1).unwrap();
    assert!(matches!(wants, Step::Wait { .. }), "a kernel may be using it");
    wait(&mut engine);
    let all = starts[1]..starts[1] + 2 * BLOCK;
    let moved = done(engine.give_way(GPU, BLOCK + 1).unwrap());
    let released: u64 = moved
        .iter()
        .map(|action| match action {
            Action::Release { pages, .. } => {
                assert!(all.contains(&pages.start), "the first was used since");
                pages.end - pages.start
            }
            _ => 0,
        })
        .sum();
    assert_eq!(released, 2 * BLOCK);
    assert!(engine.is_away(starts[1]) && !engine.is_away(starts[0]));
    engine.set_free(GPU, BLOCK).unwrap();
    // One block has room. The other would need one of what the launch uses as well.
    let back = launch(&mut engine, &starts);
    let sent = back.iter().filter(|it| matches!(it, Action::Send { .. })).count();
    assert_eq!(sent, 1);
    assert!(engine.is_away(starts[1]));
}

/// A block that goes to its node leaves nothing in host memory, which others want.
#[test]
fn a_block_is_in_one_place() {
    let mut engine = engine(Some(0), true);
    let all = START..START + BLOCK;
    engine.alloc(all.clone(), Attach::Global, GPU).unwrap();
    engine.set_free(GPU, BLOCK).unwrap();
    let pages = all.clone();
    let expected = [
        Action::Protect { pages: all.clone(), to: Protection::None },
        Action::Reserve { node: GPU, pages: all.clone() },
        Action::Send { node: GPU, pages: all.clone() },
        Action::Map { pages: all.clone(), at: Place::Node(GPU) },
        Action::Forget { pages },
    ];
    assert_eq!(launch(&mut engine, &[START]), expected);
    // There was less room than was thought.
    let stays = [
        Action::Map { pages: all.clone(), at: Place::Host },
        Action::Protect { pages: all, to: Protection::ReadWrite },
    ];
    assert_eq!(engine.refused(&(START..START + BLOCK)), stays);
    assert!(engine.is_away(START));
}

/// What is prefetched does not push out what was prefetched a moment before.
#[test]
fn a_prefetch_beyond_the_quota_moves_each_block_once() {
    let mut engine = engine(Some(0), true);
    let all = START..START + 6 * BLOCK;
    engine.alloc(all.clone(), Attach::Global, GPU).unwrap();
    engine.set_free(GPU, 2 * BLOCK).unwrap();
    let moved = engine.prefetch(all, Place::Node(GPU)).unwrap();
    let sent = moved.iter().filter(|it| matches!(it, Action::Send { .. })).count();
    let fetched = moved.iter().filter(|it| matches!(it, Action::Fetch { .. })).count();
    assert_eq!((sent, fetched), (2, 0));
}

/// One touch of a page that was touched before the last launch fetches others that were, unseen; of
/// those, what has not been touched by the next launch is expected no longer.
#[test]
fn what_is_touched_again_is_fetched_together() {
    let mut engine = Engine::new([(GPU, NodeConfig::default())], 1).expecting(100);
    let (far, other) = (START + 3 * BLOCK, START + 100 * BLOCK);
    engine.alloc(START..START + 10 * BLOCK, Attach::Global, GPU).unwrap();
    engine.alloc(other..other + 9, Attach::Global, GPU).unwrap();
    launch(&mut engine, &[]);
    wait(&mut engine);
    let fetched = |page: Pages| Action::Fetch { node: GPU, pages: page };
    let shown = |at| Action::Protect { pages: page(at), to: Protection::Read };
    for at in [START + 5, START + 9, far, other] {
        let actions = touch(&mut engine, at, Access::Read);
        assert_eq!(actions, [fetched(page(at)), shown(at)], "nothing is known as yet");
    }
    launch(&mut engine, &[]);
    wait(&mut engine);
    let actions = touch(&mut engine, START + 5, Access::Read);
    let together = [START + 9, far, other, START + 5].map(|at| fetched(page(at)));
    assert_eq!(actions, [&together[..], &[shown(START + 5)]].concat());
    // They are there, and only shown.
    assert_eq!(touch(&mut engine, far, Access::Read), []);
    assert_eq!(engine.reopen(far).unwrap(), [shown(far)]);
    let write = Action::Protect { pages: page(other), to: Protection::ReadWrite };
    assert_eq!(touch(&mut engine, other, Access::Write), [write]);
    launch(&mut engine, &[]);
    wait(&mut engine);
    let actions = touch(&mut engine, START + 5, Access::Read);
    let together = [far, other, START + 5].map(|at| fetched(page(at)));
    assert_eq!(actions, [&together[..], &[shown(START + 5)]].concat(), "one was for nothing");
    // What comes before is fetched for itself.
    launch(&mut engine, &[]);
    wait(&mut engine);
    let actions = touch(&mut engine, START + 5, Access::Read);
    assert_eq!(actions, [fetched(page(START + 5)), shown(START + 5)]);
}

/// A few touches behind an initialisation of much fetch some of it, and not all.
#[test]
fn a_few_touches_behind_many_fetch_few_for_nothing() {
    const BLOCKS: u64 = 200;
    let mut engine = Engine::new([(GPU, NodeConfig::default())], 4096).expecting(4096);
    engine.alloc(START..START + BLOCKS * BLOCK, Attach::Global, GPU).unwrap();
    let all = START..START + BLOCKS * BLOCK;
    assert!(matches!(engine.touch_range(all, Access::Write, None), Ok(Step::Do(_))));
    launch(&mut engine, &[]);
    wait(&mut engine);
    let mut fetched = 0;
    for number in 0..50 {
        let at = START + number * 2003;
        let actions = touch(&mut engine, at, Access::Read);
        fetched += actions.iter().map(pages_fetched).sum::<u64>();
    }
    assert!((50..=64 + 17 * 50).contains(&fetched), "{fetched} pages");
}

fn pages_fetched(action: &Action) -> u64 {
    if let Action::Fetch { pages, .. } = action { pages.end - pages.start } else { 0 }
}
