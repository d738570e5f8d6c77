//! What is to be done to devices that were made by one record so that they are as another, later
//! one of the same client tells. A record loses what has ended, keeps the order of what is left,
//! and grows at its end; what is left may itself have changed: a graph's nodes, and which levels of
//! a mipmap have ended.

use kedge_gpu_image::SavedStep;
use kedge_protocol::{ArrayId, Call, GraphExecId, Message, Post, StreamOp};
use std::collections::BTreeSet;

/// Returns the steps from `made` to `now`: the ends of what is there no more, what has changed,
/// then what is new. `None` where something has ended or changed for which there is no message, or
/// a module has come or gone: its managed variables lie in the shared arena, where only the proxy
/// that has the client may write.
///
/// Nothing that both have is made anew: its bytes are the ones that have crossed.
pub(crate) fn steps_between(made: &[SavedStep], now: &[SavedStep]) -> Option<Vec<SavedStep>> {
    let (mut ended, mut changed) = (Ended::default(), Vec::new());
    let mut now = entries(now).peekable();
    for entry in entries(made) {
        match now.next_if(|new| is_same(entry, new)) {
            Some(new) => changed.extend(changes(entry, new)?),
            None => ended.add(entry)?,
        }
    }
    let mut steps = ended.steps;
    steps.extend(changed);
    for step in now.flatten() {
        let is_message = matches!(step, SavedStep::Message { .. });
        if !is_message || arrays(step).iter().any(|array| ended.arrays.contains(array)) {
            return None;
        }
        steps.push(step.clone());
    }
    Some(steps)
}

/// The steps of each thing that a record has: some tell more of what the one before has made.
fn entries(steps: &[SavedStep]) -> impl Iterator<Item = &[SavedStep]> {
    steps.chunk_by(|_, next| {
        let Some(post) = post_of(next) else { return false };
        matches!(
            post,
            Post::GraphExecNode { .. }
                | Post::GraphExecEdges { .. }
                | Post::GraphExecReady { .. }
                | Post::GraphExecUpdate { .. }
                | Post::ArrayDestroy { .. }
        )
    })
}

/// Whether two entries are of one thing, which may have changed.
fn is_same(old: &[SavedStep], new: &[SavedStep]) -> bool {
    old.first() == new.first()
}

fn post_of(step: &SavedStep) -> Option<&Post> {
    match step {
        SavedStep::Message { message: Message::Post { post }, .. } => Some(post),
        _ => None,
    }
}

fn step(post: Post) -> SavedStep {
    SavedStep::Message { message: Message::Post { post }, result: 0 }
}

/// The arrays that a step makes.
fn arrays(step: &SavedStep) -> &[ArrayId] {
    match step {
        SavedStep::Message { message: Message::Call { call }, .. } => match call {
            Call::ArrayCreate { array, .. } => std::slice::from_ref(array),
            Call::MipmapCreate { levels, .. } => levels,
            _ => &[],
        },
        _ => &[],
    }
}

/// What makes of an entry what it is now.
fn changes(old: &[SavedStep], new: &[SavedStep]) -> Option<Vec<SavedStep>> {
    // It has become more: a graph that is being made, or of which nodes do nothing any more, or
    // another level has ended.
    if let Some(more) = new.strip_prefix(old) {
        return Some(more.to_vec());
    }
    let (old, new) = (Graph::of(old)?, Graph::of(new)?);
    let alike = old.exec == new.exec && old.rest == new.rest && old.nodes.len() == new.nodes.len();
    if !alike {
        return None;
    }
    let mut steps = Vec::new();
    for (node, (was, is)) in (0..).zip(old.nodes.iter().zip(&new.nodes)) {
        let (did, does) = (!old.disabled.contains(&node), !new.disabled.contains(&node));
        let mut update = |op| steps.push(step(Post::GraphExecUpdate { exec: new.exec, node, op }));
        // What it is when it does something is to be known also where it does nothing.
        if was != is || (does && !did) {
            update((*is).clone());
        }
        if !does && (did || was != is) {
            update(StreamOp::Empty {});
        }
    }
    Some(steps)
}

/// A graph, as a record makes it.
struct Graph<'a> {
    exec: GraphExecId,
    nodes: Vec<&'a StreamOp>,
    /// Nodes that do nothing.
    disabled: BTreeSet<u32>,
    /// Edges, and that it is ready.
    rest: Vec<&'a Post>,
}

impl Graph<'_> {
    /// `None` of what no record has.
    fn of(entry: &[SavedStep]) -> Option<Graph<'_>> {
        let mut posts = entry.iter().map(post_of);
        let Post::GraphExecBegin { exec, .. } = posts.next()?? else { return None };
        let (nodes, disabled, rest) = Default::default();
        let mut graph = Graph { exec: *exec, nodes, disabled, rest };
        for post in posts {
            match post? {
                Post::GraphExecNode { op, .. } => graph.nodes.push(op),
                Post::GraphExecUpdate { node, op: StreamOp::Empty {}, .. } => {
                    graph.disabled.insert(*node);
                }
                post @ (Post::GraphExecEdges { .. } | Post::GraphExecReady { .. }) => {
                    graph.rest.push(post);
                }
                _ => return None,
            }
        }
        Some(graph)
    }
}

/// What is there no more.
#[derive(Default)]
struct Ended {
    steps: Vec<SavedStep>,
    arrays: BTreeSet<ArrayId>,
}

impl Ended {
    /// Ends what the entry made, unless something later stands for it.
    fn add(&mut self, entry: &[SavedStep]) -> Option<()> {
        let (first, more) = entry.split_first()?;
        self.arrays.extend(arrays(first));
        let end = match first {
            SavedStep::Module { .. } | SavedStep::Linked { .. } => return None,
            SavedStep::Message { message: Message::Post { post }, .. } => match post {
                Post::EventCreate { event, .. } => Post::EventDestroy { event: *event },
                Post::StreamCreate { stream, .. } => Post::StreamDestroy { stream: *stream },
                Post::GraphExecBegin { exec, .. } => Post::GraphExecDestroy { exec: *exec },
                Post::KernelAttribute { .. } => return Some(()),
                _ => return None,
            },
            SavedStep::Message { message: Message::Call { call }, result } => match call {
                Call::ArrayCreate { array, .. } => Post::ArrayDestroy { array: *array },
                Call::MipmapCreate { levels, .. } => {
                    let destroy = |array: &ArrayId| step(Post::ArrayDestroy { array: *array });
                    let left = levels.iter().map(destroy).filter(|level| !more.contains(level));
                    self.steps.extend(left);
                    return Some(());
                }
                Call::TextureCreate { ctx, .. } => {
                    Post::TextureDestroy { ctx: *ctx, handle: *result }
                }
                Call::SetLimit { .. } => return Some(()),
                _ => return None,
            },
        };
        self.steps.push(step(end));
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Record, Step};
    use kedge_protocol::{ArrayDesc, CtxId, EventId, ModuleId, StreamId};
    use kedge_wire::List;

    fn post(post: Post) -> SavedStep {
        SavedStep::Message { message: Message::Post { post }, result: 0 }
    }

    fn event(id: u32) -> SavedStep {
        let (event, ctx) = (EventId(id), CtxId(1));
        post(Post::EventCreate { event, ctx, timing: true, interprocess: false })
    }

    fn stream(id: u32) -> SavedStep {
        let (stream, ctx) = (StreamId(id), CtxId(1));
        post(Post::StreamCreate { stream, ctx, blocking: true, priority: 0 })
    }

    #[test]
    fn what_has_ended_ends_and_what_is_new_is_made() {
        let made = [event(1), stream(2), event(3)];
        assert_eq!(steps_between(&made, &made), Some(vec![]));
        let now = [event(1), event(3), event(4)];
        let ended = post(Post::StreamDestroy { stream: StreamId(2) });
        assert_eq!(steps_between(&made, &now), Some(vec![ended, event(4)]));
        let ends = |id| post(Post::EventDestroy { event: EventId(id) });
        let all = post(Post::StreamDestroy { stream: StreamId(2) });
        assert_eq!(steps_between(&made, &[]), Some(vec![ends(1), all, ends(3)]));
    }

    #[test]
    fn what_has_no_end_of_its_own_is_made_anew() {
        let ctx = CtxId(1);
        let call = Call::CtxCreate { ctx, device: 0, legacy: StreamId(1) };
        let context = SavedStep::Message { message: Message::Call { call }, result: 0 };
        assert_eq!(steps_between(&[context], &[event(1)]), None);
        let module = SavedStep::Module { ctx, module: ModuleId(1), image: 1 };
        assert_eq!(steps_between(&[], std::slice::from_ref(&module)), None);
        assert_eq!(steps_between(std::slice::from_ref(&module), &[]), None);
        assert_eq!(
            steps_between(std::slice::from_ref(&module), std::slice::from_ref(&module)),
            Some(vec![])
        );
        // A graph that has another number of nodes is another.
        let made = graph(&[1, 2], &[]);
        assert_eq!(steps_between(&made, &graph(&[1], &[])), None);
        let ended = post(Post::GraphExecDestroy { exec: EXEC });
        assert_eq!(steps_between(&made, &[]), Some(vec![ended]));
        // An array of the name of one that has ended.
        let again = [event(1), array(1)];
        assert_eq!(steps_between(&[array(1), event(1)], &again), None);
        let levels = [mipmap(1), event(1)];
        assert_eq!(steps_between(&levels, &[event(1), array(2)]), None);
    }

    const CTX: CtxId = CtxId(1);
    const EXEC: GraphExecId = GraphExecId(1);
    const DESC: ArrayDesc =
        ArrayDesc { device: 0, width: 4, height: 4, depth: 0, format: 1, channels: 1, flags: 0 };

    fn array(id: u32) -> SavedStep {
        let call = Call::ArrayCreate { ctx: CTX, array: ArrayId(id), desc: DESC };
        SavedStep::Message { message: Message::Call { call }, result: 0 }
    }

    /// Of three levels from this one on.
    fn mipmap(first: u32) -> SavedStep {
        let levels = List::new((first..first + 3).map(ArrayId).collect()).unwrap();
        let call = Call::MipmapCreate { ctx: CTX, levels, desc: DESC };
        SavedStep::Message { message: Message::Call { call }, result: 0 }
    }

    fn write(value: u64) -> StreamOp {
        StreamOp::WriteValue { addr: 0, value, wide: true }
    }

    fn update(node: u32, op: StreamOp) -> SavedStep {
        post(Post::GraphExecUpdate { exec: EXEC, node, op })
    }

    /// A graph of nodes that write these values, of which some do nothing.
    fn graph(values: &[u64], disabled: &[u32]) -> Vec<SavedStep> {
        let node = |value: &u64| post(Post::GraphExecNode { exec: EXEC, op: write(*value) });
        let mut steps = vec![post(Post::GraphExecBegin { exec: EXEC, ctx: CTX })];
        steps.extend(values.iter().map(node));
        steps.push(post(Post::GraphExecReady { exec: EXEC, priorities: false }));
        steps.extend(disabled.iter().map(|node| update(*node, StreamOp::Empty {})));
        steps
    }

    /// The bytes of an array that is made anew would be taken for those that have crossed.
    #[test]
    fn what_changes_before_an_array_leaves_it_as_it_is() {
        let destroyed = |id| post(Post::ArrayDestroy { array: ArrayId(id) });
        let before = |steps: &[SavedStep]| [steps, &[array(9), event(1)]].concat();
        for (made, now, between) in [
            (graph(&[1, 2], &[]), graph(&[1, 2], &[1]), vec![update(1, StreamOp::Empty {})]),
            (graph(&[1, 2], &[1]), graph(&[1, 2], &[]), vec![update(1, write(2))]),
            (graph(&[1, 2], &[]), graph(&[3, 2], &[]), vec![update(0, write(3))]),
            (
                graph(&[1, 2], &[0]),
                graph(&[3, 2], &[0, 1]),
                vec![
                    update(0, write(3)),
                    update(0, StreamOp::Empty {}),
                    update(1, StreamOp::Empty {}),
                ],
            ),
            (vec![mipmap(1)], vec![mipmap(1), destroyed(2)], vec![destroyed(2)]),
            (vec![mipmap(1), destroyed(2)], vec![], vec![destroyed(1), destroyed(3)]),
            (
                graph(&[1, 2], &[])[..2].to_vec(),
                graph(&[1, 2], &[]),
                graph(&[1, 2], &[])[2..].to_vec(),
            ),
        ] {
            assert_eq!(steps_between(&before(&made), &before(&now)), Some(between));
        }
        let now = [&before(&[])[..], &[mipmap(1)]].concat();
        assert_eq!(steps_between(&before(&[]), &now), Some(vec![mipmap(1)]));
    }

    /// Has a record do what a step says, as the target's does.
    fn carry_out(record: &mut Record, step: SavedStep) {
        match step {
            SavedStep::Message { message: Message::Post { post }, .. } => record.post(post),
            SavedStep::Message { message: Message::Call { call }, result } => {
                record.call(call, result);
            }
            SavedStep::Module { .. } | SavedStep::Linked { .. } => panic!("no test has modules"),
        }
    }

    fn saved(record: &Record) -> Vec<SavedStep> {
        let saved = |step| match step {
            Step::Message { message, result } => SavedStep::Message { message, result },
            Step::Module { .. } => panic!("no test has modules"),
        };
        record.steps().into_iter().map(saved).collect()
    }

    /// A program that makes, changes and ends things at random.
    struct Program {
        record: Record,
        seed: u64,
        last: u32,
        arrays: Vec<u32>,
        graphs: Vec<u32>,
    }

    impl Program {
        fn below(&mut self, most: usize) -> usize {
            self.seed =
                self.seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.seed >> 33) as usize % most
        }

        fn one(&mut self) {
            self.last += 3;
            let last = self.last;
            match self.below(8) {
                0 => {
                    self.arrays.push(last);
                    carry_out(&mut self.record, array(last));
                }
                1 => {
                    self.arrays.extend(last..last + 3);
                    carry_out(&mut self.record, mipmap(last));
                }
                2 | 3 if !self.arrays.is_empty() => {
                    let at = self.below(self.arrays.len());
                    let array = ArrayId(self.arrays.swap_remove(at));
                    self.record.post(Post::ArrayDestroy { array });
                }
                4 => {
                    self.graphs.push(last);
                    let exec = GraphExecId(last);
                    self.record.post(Post::GraphExecBegin { exec, ctx: CTX });
                    for value in 0..3 {
                        self.record.post(Post::GraphExecNode { exec, op: write(value) });
                    }
                    if self.below(2) > 0 {
                        self.record.post(Post::GraphExecReady { exec, priorities: false });
                    }
                }
                5 if !self.graphs.is_empty() => {
                    let at = self.below(self.graphs.len());
                    let exec = GraphExecId(self.graphs.swap_remove(at));
                    self.record.post(Post::GraphExecDestroy { exec });
                }
                6 | 7 if !self.graphs.is_empty() => {
                    let at = self.below(self.graphs.len());
                    let exec = GraphExecId(self.graphs[at]);
                    let node = self.below(3) as u32;
                    let op =
                        if self.below(2) > 0 { StreamOp::Empty {} } else { write(last.into()) };
                    self.record.post(Post::GraphExecUpdate { exec, node, op });
                }
                _ => carry_out(&mut self.record, event(last)),
            }
        }
    }

    #[test]
    fn the_target_becomes_what_the_source_is_and_keeps_what_both_have() {
        for seed in 0..300 {
            let (record, last, arrays, graphs) = Default::default();
            let mut program = Program { record, seed, last, arrays, graphs };
            let mut target = Record::default();
            let mut made: Vec<SavedStep> = Vec::new();
            for _ in 0..12 {
                let steps = program.below(9);
                (0..steps).for_each(|_| program.one());
                let now = saved(&program.record);
                let between = steps_between(&made, &now).expect("each change has a message");
                let had: BTreeSet<ArrayId> = made.iter().flat_map(arrays_of).collect();
                let anew = between.iter().flat_map(arrays_of).any(|array| had.contains(&array));
                assert!(!anew, "seed {seed}: {between:?}");
                between.into_iter().for_each(|step| carry_out(&mut target, step));
                assert_eq!(saved(&target), now, "seed {seed}");
                made = now;
            }
        }
    }

    fn arrays_of(step: &SavedStep) -> Vec<ArrayId> {
        arrays(step).to_vec()
    }
}
