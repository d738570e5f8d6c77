//! What the threads of a client's places have together: the way to the client, how far all is
//! complete, and what one place waits for of another.

use super::gates::{Gates, OWN_TOKENS, Released};
use super::table::At;
use crate::client_memory::ClientMemory;
use crate::host::ProxyHost;
use crate::outlet::{Outlet, PrivateMemory};
use crate::tickets::Tickets;
use kedge_control::joblog::JobLog;
use kedge_control::warn;
use kedge_cuda_types::CuError;
use kedge_protocol::{CtxId, Message, Output, Status};
use kedge_transport::{Announcement, ReplyTo, SLOTS};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// What gates hear.
enum Heard {
    Called(At, u64),
    ContextEnds(At, CtxId),
    Enqueued(u64),
}

/// Why a reply is looked at on its way.
#[derive(Debug)]
enum Watched {
    /// Others may have something printed as well.
    Output(At),
    /// All places are asked: how many have not answered, which have done it, and the first error.
    All { left: usize, done: Vec<At>, failed: Option<u32>, undo: Option<Message> },
}

/// Up to where everything is complete.
#[derive(Debug)]
struct Progress {
    places: Vec<Sent>,
    /// The newest of the client's messages that has been handed on.
    newest: u64,
    told: u64,
}

/// What a place has been sent. Each place's messages have numbers of their own: it may get several
/// for one of the client's.
#[derive(Debug, Default)]
struct Sent {
    last: u64,
    /// Those that are not known to be complete, with the client's that each is for.
    under_way: VecDeque<(u64, u64)>,
}

pub(crate) struct Hub {
    outlet: Box<dyn Outlet>,
    memory: ClientMemory,
    log: Arc<JobLog>,
    hosts: OnceLock<Vec<Arc<ProxyHost>>>,
    progress: Mutex<Progress>,
    /// Slots whose replies are looked at.
    watched: [AtomicBool; SLOTS],
    replies: Mutex<HashMap<u32, Watched>>,
    /// The places that have something printed.
    printed: Mutex<Vec<bool>>,
    /// Whose the client's host functions are that it has been asked to run, in that order.
    host_fns: Mutex<HashMap<u64, VecDeque<At>>>,
    /// Where each context is, and whether it is broken.
    contexts: Mutex<HashMap<CtxId, (At, bool)>>,
    gates: Mutex<Gates>,
    heard: Sender<Heard>,
    /// What places are to be sent that did what others could not.
    undo: Mutex<Vec<(At, Message)>>,
    tickets: Tickets,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hub {
    /// Makes it for so many places, all complete up to the client's message `done`, with a thread
    /// that opens gates: whoever hears that one is called may not wait until another place has been
    /// told.
    pub(crate) fn start(
        outlet: impl Outlet + 'static,
        memory: ClientMemory,
        log: Arc<JobLog>,
        places: usize,
        done: u64,
    ) -> io::Result<Arc<Hub>> {
        let (heard, hears) = channel();
        let sent = (0..places).map(|_| Sent { last: done, ..Sent::default() }).collect();
        let hub = Arc::new(Hub {
            outlet: Box::new(outlet),
            memory,
            log,
            hosts: OnceLock::new(),
            progress: Mutex::new(Progress { places: sent, newest: done, told: done }),
            watched: [const { AtomicBool::new(false) }; SLOTS],
            replies: Mutex::default(),
            printed: Mutex::new(vec![false; places]),
            host_fns: Mutex::default(),
            contexts: Mutex::default(),
            gates: Mutex::default(),
            heard,
            undo: Mutex::default(),
            tickets: Tickets::default(),
        });
        let opens = hub.clone();
        let open = move || opens.open_gates(&hears);
        std::thread::Builder::new().name("gates".into()).spawn(open)?;
        Ok(hub)
    }

    /// The client is this process from now on.
    pub(crate) fn client_is(&self, pid: u32) {
        self.memory.belongs_to(pid);
    }

    /// Tells it who hosts each place; once.
    pub(crate) fn set_hosts(&self, hosts: Vec<Arc<ProxyHost>>) {
        let _ = self.hosts.set(hosts);
    }

    /// Returns who hosts a place, once that is known.
    pub(super) fn host(&self, at: At) -> Option<&Arc<ProxyHost>> {
        self.hosts.get()?.get(at)
    }

    pub(super) fn log(&self, line: &str) {
        warn!(self.log, "{line}");
    }

    pub(super) fn gates(&self) -> MutexGuard<'_, Gates> {
        locked(&self.gates)
    }

    /// Descriptors that the client has sent.
    pub(super) fn tickets(&self) -> &Tickets {
        &self.tickets
    }

    fn open_gates(&self, heard: &Receiver<Heard>) {
        while let Ok(heard) = heard.recv() {
            let released = match heard {
                Heard::Called(at, token) => self.gates().call(at, token),
                Heard::ContextEnds(at, ctx) => self.gates().context_ends(at, ctx),
                Heard::Enqueued(copy) => self.gates().enqueued(copy),
            };
            self.release(released);
        }
    }

    fn release(&self, released: Released) {
        for (at, token) in released {
            // What was not asked for has been done by a place that is about to end.
            let _ = self.host(at).is_some_and(|host| host.host_function_done(token));
        }
    }

    /// What the client has said on its socket; `false` where that breaks the rules.
    pub(crate) fn heard(&self, announcement: Announcement) -> bool {
        match announcement {
            Announcement::Returned(token) => self.returned(token),
            Announcement::Descriptor(ticket, fd) => self.tickets.put(ticket, fd),
            Announcement::Nonsense => false,
        }
    }

    fn returned(&self, token: u64) -> bool {
        let mut host_fns = locked(&self.host_fns);
        let Some(places) = host_fns.get_mut(&token) else { return false };
        let at = places.pop_front();
        if places.is_empty() {
            host_fns.remove(&token);
        }
        drop(host_fns);
        let done = at.and_then(|at| self.host(at)).is_some_and(|h| h.host_function_done(token));
        // There is room for one more, whose place may have none under way.
        self.hosts.get().into_iter().flatten().for_each(|host| host.ask_waiting());
        done
    }
}

/// Contexts.
impl Hub {
    /// A context is about to be made.
    pub(super) fn context_begins(&self, ctx: CtxId, at: At) {
        locked(&self.contexts).insert(ctx, (at, false));
    }

    /// A context is about to end.
    pub(super) fn context_ends(&self, ctx: CtxId) {
        if let Some((at, _)) = locked(&self.contexts).remove(&ctx) {
            let _ = self.heard.send(Heard::ContextEnds(at, ctx));
        }
    }

    /// Gates have been enqueued in these contexts; one that is broken calls none.
    pub(super) fn gates_are_of(&self, contexts: &[CtxId]) {
        let known = locked(&self.contexts);
        for ctx in contexts {
            if let Some((at, true)) = known.get(ctx) {
                let _ = self.heard.send(Heard::ContextEnds(*at, *ctx));
            }
        }
    }

    /// A copy's last gate has been enqueued.
    pub(super) fn copy_is_enqueued(&self, copy: u64, contexts: &[CtxId]) {
        let _ = self.heard.send(Heard::Enqueued(copy));
        self.gates_are_of(contexts);
    }

    /// A place says that a context is broken; `false` where it is none of its own.
    fn breaks(&self, at: At, ctx: CtxId) -> bool {
        match locked(&self.contexts).get_mut(&ctx) {
            Some((of, broken)) if *of == at => {
                *broken = true;
                true
            }
            _ => false,
        }
    }
}

/// Progress.
impl Hub {
    /// A place is about to be sent a message for the client's `seq`: its number there.
    pub(super) fn sent(&self, at: At, seq: u64) -> u64 {
        let mut progress = locked(&self.progress);
        let Some(sent) = progress.places.get_mut(at) else { return 0 };
        sent.last += 1;
        sent.under_way.push_back((sent.last, seq));
        sent.last
    }

    /// The client's message `seq` has been handed on.
    pub(super) fn handed_on(&self, seq: u64) {
        locked(&self.progress).newest = seq;
    }

    fn completed(&self, at: At, number: u64) {
        let mut progress = locked(&self.progress);
        if let Some(sent) = progress.places.get_mut(at) {
            while sent.under_way.front().is_some_and(|(of, _)| *of <= number) {
                sent.under_way.pop_front();
            }
        }
        self.tell(progress);
    }

    /// Tells the client how far all is complete.
    pub(super) fn publish(&self) {
        self.tell(locked(&self.progress));
    }

    fn tell(&self, mut progress: MutexGuard<'_, Progress>) {
        let oldest = progress.places.iter().filter_map(|sent| Some(sent.under_way.front()?.1));
        let all = oldest.min().map_or(progress.newest, |seq| seq.saturating_sub(1));
        let all = all.min(progress.newest);
        if all > progress.told {
            progress.told = all;
            self.outlet.set_completed(all);
        }
    }
}

/// Replies.
impl Hub {
    /// All places are about to be asked; `undo` ends what has been done where others could not.
    pub(super) fn asks_all(&self, to: &ReplyTo, places: usize, undo: Option<Message>) {
        let watched = Watched::All { left: places, done: Vec::new(), failed: None, undo };
        self.watch(to, watched);
    }

    /// A place is about to be asked what was printed: which.
    pub(super) fn asks_output(&self, to: &ReplyTo) -> At {
        let at = locked(&self.printed).iter().position(|printed| *printed).unwrap_or(0);
        self.watch(to, Watched::Output(at));
        at
    }

    fn watch(&self, to: &ReplyTo, watched: Watched) {
        locked(&self.replies).insert(to.number(), watched);
        self.watched[to.number() as usize].store(true, Ordering::SeqCst);
    }

    /// Returns whether places are to be sent something that did what others could not.
    pub(super) fn is_to_undo(&self) -> bool {
        !locked(&self.undo).is_empty()
    }

    /// Returns the newest of the client's messages that has been handed on.
    pub(super) fn newest(&self) -> u64 {
        locked(&self.progress).newest
    }

    /// Takes what places are to be sent that did what others could not.
    pub(super) fn to_undo(&self) -> Vec<(At, Message)> {
        std::mem::take(&mut *locked(&self.undo))
    }

    /// Answers a call itself.
    pub(super) fn answer(&self, to: ReplyTo, answer: Result<(), CuError>) {
        let mut bytes = Vec::new();
        kedge_wire::encode::<Status>(&answer.map_err(|error| error.0), &mut bytes);
        if let Err(why) = self.outlet.reply(to, &bytes) {
            self.log(&format!("a reply could not be sent: {why}"));
        }
    }

    fn reply(&self, at: At, to: ReplyTo, bytes: &[u8]) -> Result<(), String> {
        if !self.watched[to.number() as usize].load(Ordering::SeqCst) {
            return self.outlet.reply(to, bytes);
        }
        let mut replies = locked(&self.replies);
        match replies.get_mut(&to.number()) {
            None => self.outlet.reply(to, bytes),
            Some(Watched::Output(of)) => {
                let of = *of;
                self.unwatch(replies, &to);
                self.reply_output(of, to, bytes)
            }
            Some(Watched::All { left, done, failed, undo }) => {
                match kedge_wire::decode::<Status>(bytes).map_err(|error| error.to_string())? {
                    Ok(()) => done.push(at),
                    Err(error) => _ = failed.get_or_insert(error),
                }
                *left = left.saturating_sub(1);
                if *left > 0 {
                    return Ok(());
                }
                let (done, failed, undo) = (std::mem::take(done), *failed, undo.take());
                self.unwatch(replies, &to);
                if let (Some(_), Some(undo)) = (failed, undo) {
                    locked(&self.undo).extend(done.into_iter().map(|at| (at, undo.clone())));
                }
                self.answer(to, failed.map_or(Ok(()), |error| Err(CuError(error))));
                Ok(())
            }
        }
    }

    fn unwatch(&self, mut replies: MutexGuard<'_, HashMap<u32, Watched>>, to: &ReplyTo) {
        replies.remove(&to.number());
        self.watched[to.number() as usize].store(false, Ordering::SeqCst);
    }

    /// Others may have printed something as well: the client is to ask again.
    fn reply_output(&self, at: At, to: ReplyTo, bytes: &[u8]) -> Result<(), String> {
        let mut output = kedge_wire::decode::<Output>(bytes).map_err(|error| error.to_string())?;
        let printed = locked(&self.printed);
        output.more |= printed.iter().enumerate().any(|(of, printed)| *printed && of != at);
        drop(printed);
        let mut bytes = Vec::new();
        kedge_wire::encode(&output, &mut bytes);
        self.outlet.reply(to, &bytes)
    }
}

/// The way from one place to the client.
pub(crate) struct PlaceOutlet {
    pub(crate) hub: Arc<Hub>,
    pub(crate) at: At,
}

impl Outlet for PlaceOutlet {
    fn reply(&self, to: ReplyTo, bytes: &[u8]) -> Result<(), String> {
        self.hub.reply(self.at, to, bytes)
    }

    /// A place breaks its own contexts only.
    fn set_sticky(&self, ctx: CtxId, error: CuError) {
        if self.hub.breaks(self.at, ctx) {
            self.hub.outlet.set_sticky(ctx, error);
            let _ = self.hub.heard.send(Heard::ContextEnds(self.at, ctx));
        }
    }

    fn clear_sticky(&self, ctx: CtxId) {
        // It may have ended by now; the client does not use its number again.
        if locked(&self.hub.contexts).get(&ctx).is_none_or(|(at, _)| *at == self.at) {
            self.hub.outlet.clear_sticky(ctx);
        }
    }

    fn wants_reader(&self) -> bool {
        self.hub.outlet.wants_reader()
    }

    fn set_completed(&self, seq: u64) {
        self.hub.completed(self.at, seq);
    }

    fn set_output_pending(&self, pending: bool) {
        let mut printed = locked(&self.hub.printed);
        if let Some(of) = printed.get_mut(self.at) {
            *of = pending;
        }
        self.hub.outlet.set_output_pending(printed.contains(&true));
    }

    fn try_host_fn(&self, token: u64) -> bool {
        if token >= OWN_TOKENS {
            // Whoever says so may hold locks of the place's: another thread goes on.
            return self.hub.heard.send(Heard::Called(self.at, token)).is_ok();
        }
        let mut host_fns = locked(&self.hub.host_fns);
        let asked = self.hub.outlet.try_host_fn(token);
        if asked {
            host_fns.entry(token).or_default().push_back(self.at);
        }
        asked
    }

    fn close(&self) {
        self.hub.outlet.close();
    }
}

/// The client's private memory, with what is on its way between places.
pub(crate) struct PlaceMemory {
    pub(crate) hub: Arc<Hub>,
    pub(crate) at: At,
}

impl PrivateMemory for PlaceMemory {
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), CuError> {
        let found = self.hub.gates().read(self.at, addr, out);
        found.unwrap_or_else(|| self.hub.memory.read(addr, out))
    }

    fn write(&self, addr: u64, bytes: &[u8]) -> Result<(), CuError> {
        let found = self.hub.gates().write(self.at, addr, bytes);
        found.unwrap_or_else(|| self.hub.memory.write(addr, bytes))
    }

    fn belongs_to(&self, pid: u32) {
        self.hub.memory.belongs_to(pid);
    }
}

#[cfg(test)]
#[path = "hub_tests.rs"]
mod tests;
