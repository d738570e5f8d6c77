//! What the client has made and not ended: the messages that a restart hands to a new backend.
//!
//! Pruned as things end, so a client that makes and ends things for days does not make it grow. The
//! order stays that in which things were made: what a device places by itself then comes to lie
//! where it lay. What memory holds, and which ranges of it are valid, a snapshot tells.

mod graph;
#[cfg(test)]
mod tests;

use graph::Graph;
use kedge_device::Code;
use kedge_protocol::{
    ArrayId, Call, CtxId, EventId, GraphExecId, KernelRef, MemHandleId, Message, ModuleId, Post,
    StreamId,
};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

/// The image of a module, as it was loaded.
pub(crate) type Image = Arc<Vec<u8>>;

/// The calls that leave nothing behind which a restart has to make: a pattern. What they load is
/// recorded as a module, if anything. A new call is put here or gets an arm in each match.
macro_rules! asking {
    () => {
        Call::MemFree { .. }
            | Call::ModuleLoad { .. }
            | Call::ModuleLink { .. }
            | Call::StreamSync { .. }
            | Call::CtxSync { .. }
            | Call::EventSync { .. }
            | Call::StreamQuery { .. }
            | Call::EventQuery { .. }
            | Call::EventElapsed { .. }
            | Call::TakeOutput {}
            | Call::Ping {}
            | Call::KernelNames { .. }
            | Call::Global { .. }
            | Call::Occupancy { .. }
            | Call::Limit { .. }
            | Call::TensorMap { .. }
            | Call::TensorMapMove { .. }
            | Call::CheckPlaced { .. }
            | Call::HandleExport { .. }
            | Call::SlabShare { .. }
            | Call::EventShare { .. }
            | Call::Adopt { .. }
    };
}
pub(crate) use asking;

/// What a step of a restart does.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Step {
    /// `result`: the texture's handle, which must come out again; else 0.
    Message {
        message: Message,
        result: u64,
    },
    Module {
        ctx: CtxId,
        module: ModuleId,
        code: Code<Image>,
    },
}

/// What an entry is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    Context(CtxId),
    Limit(CtxId, u32),
    Stream(StreamId),
    Event(EventId),
    Module(ModuleId),
    /// By index.
    Kernel(ModuleId, u32),
    /// Of a kernel by index.
    Attribute(ModuleId, u32, u32),
    Array(ArrayId),
    Texture(CtxId, u64),
    Graph(GraphExecId),
    Slab(u64),
    Handle(MemHandleId),
    Mapping(u64),
    /// Address and device.
    Access(u64, u32),
    Alias(u64),
    Shared(u64),
}

#[derive(Debug)]
struct Entry {
    /// It ends with this context.
    owner: Option<CtxId>,
    what: What,
}

#[derive(Debug)]
enum What {
    Message(Message, u64),
    Module(ModuleId, Code<Image>),
    /// Several levels, of which some have ended: the memory goes with the last of them.
    Mipmap {
        message: Message,
        left: BTreeSet<ArrayId>,
        ended: Vec<ArrayId>,
    },
    Graph(Graph),
}

#[derive(Debug)]
pub(crate) struct Record {
    /// The newest entry's number.
    next: u64,
    /// That of the oldest, or of what comes before all.
    first: u64,
    entries: BTreeMap<u64, Entry>,
    subjects: BTreeMap<Subject, Vec<u64>>,
    /// Entries that are graphs.
    graphs: BTreeSet<u64>,
}

/// More than will ever be put before all else.
const FIRST: u64 = 1 << 32;

impl Default for Record {
    fn default() -> Record {
        let (entries, subjects, graphs) = Default::default();
        Record { next: FIRST, first: FIRST, entries, subjects, graphs }
    }
}

impl Record {
    /// Whether [`Record::post`] wants to know of it.
    #[inline]
    pub(crate) fn wants(post: &Post) -> bool {
        !matches!(post, Post::Enqueue { .. } | Post::MemAlloc { .. } | Post::MemFree { .. })
    }

    /// A post that has been carried out.
    pub(crate) fn post(&mut self, post: Post) {
        match post {
            Post::CtxDestroy { ctx } => self.forget_context(ctx),
            Post::StreamCreate { stream, ctx, .. } => {
                self.add_post(Subject::Stream(stream), Some(ctx), post);
            }
            Post::EventCreate { event, ctx, .. } => {
                self.add_post(Subject::Event(event), Some(ctx), post);
            }
            Post::StreamDestroy { stream } => self.forget(Subject::Stream(stream)),
            Post::EventDestroy { event } => self.forget(Subject::Event(event)),
            Post::ModuleUnload { module } => self.forget_module(module),
            Post::ArrayDestroy { array } => self.end_array(array),
            Post::TextureDestroy { ctx, handle } => self.forget(Subject::Texture(ctx, handle)),
            Post::GraphExecBegin { exec, ctx } => {
                self.add(Subject::Graph(exec), Some(ctx), What::Graph(Graph::new(exec)));
            }
            Post::GraphExecNode { exec, op } => {
                self.graph(exec, |graph| graph.nodes.push(op));
            }
            Post::GraphExecEdges { exec, .. } => self.graph(exec, |graph| graph.edges.push(post)),
            Post::GraphExecReady { exec, .. } => {
                self.graph(exec, |graph| graph.ready = Some(post));
            }
            Post::GraphExecUpdate { exec, node, op } => {
                self.graph(exec, |graph| graph.update(node, op));
            }
            Post::GraphExecDestroy { exec } => self.forget(Subject::Graph(exec)),
            Post::Unshare { addr, .. } => self.forget(Subject::Shared(addr)),
            Post::Unalias { alias, size } => self.cut_alias(alias, size),
            Post::HandleDestroy { handle } => self.forget(Subject::Handle(handle)),
            Post::HandleUnmap { addr, size } => self.unmap(addr, size),
            Post::KernelAttribute { kernel, attribute, .. } => {
                let KernelRef { module, index } = kernel;
                let owner = self.owner_of(Subject::Module(module));
                let message = Message::Post { post };
                self.replace(Subject::Attribute(module, index, attribute), owner, message);
            }
            // No capture is taken while files are shown in the arena (`Sharing::check_private`).
            Post::Disown { .. } => {}
            Post::Enqueue { .. } | Post::MemAlloc { .. } | Post::MemFree { .. } => {}
        }
    }

    /// A call that has succeeded; `result` is the handle that a texture got.
    pub(crate) fn call(&mut self, call: Call, result: u64) {
        let (subject, owner) = match &call {
            Call::CtxCreate { ctx, .. } => (Subject::Context(*ctx), Some(*ctx)),
            Call::SetLimit { ctx, limit, .. } => {
                self.forget(Subject::Limit(*ctx, *limit));
                (Subject::Limit(*ctx, *limit), Some(*ctx))
            }
            Call::Grant { addr, .. } => (Subject::Slab(*addr), None),
            Call::Return { addr, .. } => return self.forget(Subject::Slab(*addr)),
            Call::Kernel { module, index, .. } => {
                let subject = Subject::Kernel(*module, *index);
                if self.subjects.contains_key(&subject) {
                    return;
                }
                (subject, self.owner_of(Subject::Module(*module)))
            }
            Call::ArrayCreate { ctx, array, .. } => (Subject::Array(*array), Some(*ctx)),
            Call::MipmapCreate { ctx, levels, .. } => {
                let (owner, levels) = (*ctx, levels.to_vec());
                return self.add_mipmap(owner, &levels, call);
            }
            Call::TextureCreate { ctx, .. } => (Subject::Texture(*ctx, result), Some(*ctx)),
            Call::HandleCreate { handle, .. }
            | Call::HandleImport { handle, .. }
            | Call::PeerOpen { handle, .. } => (Subject::Handle(*handle), None),
            Call::EventOpen { event, ctx, .. } => (Subject::Event(*event), Some(*ctx)),
            Call::HandleMap { addr, .. } => (Subject::Mapping(*addr), None),
            Call::HandleAccess { addr, device, .. } => {
                let subject = Subject::Access(*addr, *device);
                return self.replace(subject, None, Message::Call { call });
            }
            Call::Share { addr, .. } => (Subject::Shared(*addr), None),
            Call::Alias { alias, .. } => (Subject::Alias(*alias), None),
            asking!() => return,
        };
        self.add(subject, owner, What::Message(Message::Call { call }, result));
    }

    /// A module that has been loaded or linked.
    pub(crate) fn module(&mut self, ctx: CtxId, module: ModuleId, code: Code<Image>) {
        self.add(Subject::Module(module), Some(ctx), What::Module(module, code));
    }

    /// Another process's memory has become the client's own. It is made before all else: who waits
    /// for it at a restart may have what this client waits for.
    pub(crate) fn adopt_handle(&mut self, handle: MemHandleId, device: u32, size: u64) {
        let subject = Subject::Handle(handle);
        self.forget(subject);
        let call = Call::HandleCreate { handle, device, size, shareable: true };
        self.add_first(subject, call);
    }

    /// Another process's event has become the client's own.
    pub(crate) fn adopt_event(&mut self, event: EventId, ctx: CtxId) {
        let post = Post::EventCreate { event, ctx, timing: false, interprocess: true };
        let number = self.subjects.get(&Subject::Event(event)).and_then(|numbers| numbers.first());
        if let Some(entry) = number.and_then(|number| self.entries.get_mut(number)) {
            entry.what = What::Message(Message::Post { post }, 0);
        }
    }

    /// Bytes of a handle that the client has made.
    pub(crate) fn created_bytes(&self, handle: MemHandleId) -> Option<u64> {
        let numbers = self.subjects.get(&Subject::Handle(handle))?;
        numbers.iter().find_map(|number| match &self.entries.get(number)?.what {
            What::Message(Message::Call { call: Call::HandleCreate { size, .. } }, _) => {
                Some(*size)
            }
            _ => None,
        })
    }

    /// How much of a handle the client has mapped: a lower limit of its size.
    pub(crate) fn mapped_bytes(&self, handle: MemHandleId) -> u64 {
        let end = |entry: &Entry| match &entry.what {
            What::Message(
                Message::Call { call: Call::HandleMap { handle: of, size, offset, .. } },
                _,
            ) if *of == handle => offset.checked_add(*size),
            _ => None,
        };
        self.entries.values().filter_map(end).max().unwrap_or(0)
    }

    /// What makes everything anew, in order.
    pub(crate) fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::with_capacity(self.entries.len());
        let plain = |message: Message| Step::Message { message, result: 0 };
        for entry in self.entries.values() {
            match &entry.what {
                What::Message(message, result) => {
                    steps.push(Step::Message { message: message.clone(), result: *result });
                }
                What::Module(module, code) => {
                    let ctx = entry.owner.unwrap_or_default();
                    steps.push(Step::Module { ctx, module: *module, code: code.clone() });
                }
                What::Mipmap { message, ended, .. } => {
                    steps.push(plain(message.clone()));
                    let destroy = |array: &ArrayId| Message::Post {
                        post: Post::ArrayDestroy { array: *array },
                    };
                    steps.extend(ended.iter().map(|array| plain(destroy(array))));
                }
                What::Graph(graph) => {
                    let posts = graph.posts(entry.owner.unwrap_or_default());
                    steps.extend(posts.map(|post| plain(Message::Post { post })));
                }
            }
        }
        steps
    }

    /// Returns how many entries there are.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    fn add_post(&mut self, subject: Subject, owner: Option<CtxId>, post: Post) {
        self.add(subject, owner, What::Message(Message::Post { post }, 0));
    }

    /// A value in the place of the one before. One that graphs were made under stays before them:
    /// they are made again where it holds, as a node may need it.
    fn replace(&mut self, subject: Subject, owner: Option<CtxId>, message: Message) {
        let old = self.subjects.get(&subject);
        if old.and_then(|old| old.last()).is_some_and(|last| self.says(*last, &message)) {
            return;
        }
        let old = self.subjects.remove(&subject).unwrap_or_default();
        let ends = old.iter().skip(1).copied().chain([self.next + 1]);
        let mut kept = Vec::new();
        for (number, end) in old.iter().copied().zip(ends) {
            if self.graphs.range(number..end).next().is_some() {
                kept.push(number);
            } else {
                self.entries.remove(&number);
            }
        }
        self.subjects.insert(subject, kept);
        self.add(subject, owner, What::Message(message, 0));
    }

    fn says(&self, number: u64, message: &Message) -> bool {
        let entry = self.entries.get(&number);
        entry.is_some_and(|entry| matches!(&entry.what, What::Message(told, _) if told == message))
    }

    fn add(&mut self, subject: Subject, owner: Option<CtxId>, what: What) {
        self.next += 1;
        if matches!(what, What::Graph(_)) {
            self.graphs.insert(self.next);
        }
        self.entries.insert(self.next, Entry { owner, what });
        self.subjects.entry(subject).or_default().push(self.next);
    }

    /// Adds a call that needs nothing else to be there.
    fn add_first(&mut self, subject: Subject, call: Call) {
        self.first -= 1;
        let what = What::Message(Message::Call { call }, 0);
        self.entries.insert(self.first, Entry { owner: None, what });
        self.subjects.entry(subject).or_default().push(self.first);
    }

    fn forget(&mut self, subject: Subject) {
        for number in self.subjects.remove(&subject).unwrap_or_default() {
            self.entries.remove(&number);
            self.graphs.remove(&number);
        }
    }

    /// Forgets all subjects of [from, to).
    fn forget_range(&mut self, from: Subject, to: Subject) {
        let range = (Bound::Included(from), Bound::Excluded(to));
        let subjects: Vec<Subject> = self.subjects.range(range).map(|(s, _)| *s).collect();
        subjects.into_iter().for_each(|subject| self.forget(subject));
    }

    fn forget_module(&mut self, module: ModuleId) {
        self.forget(Subject::Module(module));
        let next = ModuleId(module.0.saturating_add(1));
        self.forget_range(Subject::Kernel(module, 0), Subject::Kernel(next, 0));
        self.forget_range(Subject::Attribute(module, 0, 0), Subject::Attribute(next, 0, 0));
    }

    fn forget_context(&mut self, ctx: CtxId) {
        self.entries.retain(|_, entry| entry.owner != Some(ctx));
        let entries = &self.entries;
        self.graphs.retain(|number| entries.contains_key(number));
        self.subjects.retain(|_, numbers| {
            numbers.retain(|number| entries.contains_key(number));
            !numbers.is_empty()
        });
    }

    fn owner_of(&self, subject: Subject) -> Option<CtxId> {
        let first = self.subjects.get(&subject)?.first()?;
        self.entries.get(first)?.owner
    }

    fn graph(&mut self, exec: GraphExecId, change: impl FnOnce(&mut Graph)) {
        let number = self.subjects.get(&Subject::Graph(exec)).and_then(|numbers| numbers.first());
        let entry = number.and_then(|number| self.entries.get_mut(number));
        if let Some(Entry { what: What::Graph(graph), .. }) = entry {
            change(graph);
        }
    }

    fn add_mipmap(&mut self, owner: CtxId, levels: &[ArrayId], call: Call) {
        let left = levels.iter().copied().collect();
        let what = What::Mipmap { message: Message::Call { call }, left, ended: Vec::new() };
        self.next += 1;
        self.entries.insert(self.next, Entry { owner: Some(owner), what });
        for level in levels {
            self.subjects.entry(Subject::Array(*level)).or_default().push(self.next);
        }
    }

    fn end_array(&mut self, array: ArrayId) {
        for number in self.subjects.remove(&Subject::Array(array)).unwrap_or_default() {
            if let Some(Entry { what: What::Mipmap { left, ended, .. }, .. }) =
                self.entries.get_mut(&number)
            {
                left.remove(&array);
                ended.push(array);
                if !left.is_empty() {
                    continue;
                }
            }
            self.entries.remove(&number);
        }
    }

    fn unmap(&mut self, addr: u64, size: u64) {
        let end = addr.saturating_add(size);
        self.forget_range(Subject::Mapping(addr), Subject::Mapping(end));
        self.forget_range(Subject::Access(addr, 0), Subject::Access(end, 0));
    }

    /// Ends a part of what is aliased, which may be parts of several aliases. What is left is made
    /// before all else: memory that was shared later may lie in it.
    fn cut_alias(&mut self, from: u64, size: u64) {
        let to = from.saturating_add(size);
        let before = self.subjects.range(Subject::Alias(0)..Subject::Alias(from)).next_back();
        let inside = self.subjects.range(Subject::Alias(from)..Subject::Alias(to));
        let touched: Vec<(Subject, u64)> = before
            .into_iter()
            .chain(inside)
            .filter_map(|(subject, numbers)| Some((*subject, *numbers.first()?)))
            .collect();
        for (subject, number) in touched {
            let Some(Entry { what: What::Message(Message::Call { call }, _), .. }) =
                self.entries.get(&number)
            else {
                continue;
            };
            let Call::Alias { alias, addr, size } = *call else { continue };
            let end = alias + size;
            if end <= from {
                continue;
            }
            self.forget(subject);
            if end > to {
                let rest = Call::Alias { alias: to, addr: addr + (to - alias), size: end - to };
                self.add_first(Subject::Alias(to), rest);
            }
            if alias < from {
                let rest = Call::Alias { alias, addr, size: from - alias };
                self.add_first(subject, rest);
            }
        }
    }
}
