//! In which order a restart repeats what a client has made.

use kedge_gpu_image::SavedStep;
use kedge_protocol::{Call, Message, Post};

/// Returns the steps in order, but memory before the first that may name it: a graph or a texture
/// of managed memory is older than the blocks of it that have moved since. Where drivers place
/// things does not depend on memory at addresses of the client's choice.
pub(crate) fn memory_first(steps: &[SavedStep]) -> impl Iterator<Item = &SavedStep> {
    let first = steps.iter().position(names_memory).unwrap_or(steps.len());
    let (before, rest) = steps.split_at(first);
    let (memory, others): (Vec<_>, Vec<_>) = rest.iter().partition(|step| is_memory(step));
    before.iter().chain(memory).chain(others)
}

fn is_memory(step: &SavedStep) -> bool {
    let SavedStep::Message { message: Message::Call { call }, .. } = step else { return false };
    matches!(call, Call::Grant { .. } | Call::Alias { .. } | Call::Share { .. })
}

fn names_memory(step: &SavedStep) -> bool {
    match step {
        SavedStep::Message { message: Message::Call { call }, .. } => {
            matches!(call, Call::TextureCreate { .. })
        }
        SavedStep::Message { message: Message::Post { post }, .. } => {
            matches!(post, Post::GraphExecBegin { .. })
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_protocol::{CtxId, EventId, GraphExecId, StreamId};

    fn post(post: Post) -> SavedStep {
        SavedStep::Message { message: Message::Post { post }, result: 0 }
    }

    fn call(call: Call) -> SavedStep {
        SavedStep::Message { message: Message::Call { call }, result: 0 }
    }

    #[test]
    fn memory_that_has_moved_is_there_before_the_graph_that_names_it() {
        let (ctx, size) = (CtxId(1), 2 << 20);
        let context = call(Call::CtxCreate { ctx, device: 0, legacy: StreamId(1) });
        let grant = |addr| call(Call::Grant { device: 0, addr, bytes: size });
        let event = |id| {
            let event = EventId(id);
            post(Post::EventCreate { event, ctx, timing: true, interprocess: false })
        };
        let graph = post(Post::GraphExecBegin { exec: GraphExecId(1), ctx });
        let alias = call(Call::Alias { alias: 2 * size, addr: 0, size });
        let share = call(Call::Share { addr: 2 * size, size });
        let steps =
            [&context, &event(1), &grant(0), &graph, &event(2), &alias, &share, &grant(size)];
        let steps = steps.map(SavedStep::clone);
        let expected =
            [&context, &event(1), &grant(0), &alias, &share, &grant(size), &graph, &event(2)];
        let ordered: Vec<SavedStep> = memory_first(&steps).cloned().collect();
        assert_eq!(ordered, expected.map(SavedStep::clone));
        // Without graphs all stays as it is.
        assert!(memory_first(&steps[..3]).eq(&steps[..3]));
    }
}
