//! What only the process itself can ask the kernel. Of a live thread as little as possible, and all
//! at once: each stop costs. The rest is asked of the clone, which has inherited the answers.

use crate::attributes;
use crate::freeze::FrozenClone;
use crate::home::{Question, Row, Ways};
use crate::inject::{self, Parasite, checked};
use crate::maps::{self, Mapping};
use crate::state::{Action, ProcessState, SIGNALS};
use crate::sys;
use crate::{EngineError, Thread};
use libc::pid_t;
use std::collections::VecDeque;
use std::rc::Rc;

/// Bytes of a process's memory that answers are put into for a moment.
const ROOM: usize = 240;

/// What is asked, and how many bytes the answer has.
struct Asked {
    what: &'static str,
    call: i64,
    number: i32,
    bytes: usize,
}

const fn prctl(what: &'static str, option: i32) -> Asked {
    Asked { what, call: libc::SYS_prctl, number: option, bytes: 8 }
}

const fn timer(which: i32) -> Asked {
    Asked { what: "read its interval timers", call: libc::SYS_getitimer, number: which, bytes: 32 }
}

const ALTERNATE_STACK: Asked =
    Asked { what: "read its alternate stack", call: libc::SYS_sigaltstack, number: 0, bytes: 24 };
const TID_ADDRESS: Asked = prctl("read its tid address", 40);

/// A thread's name has 16 bytes, with a zero at its end.
const NAME: Asked = Asked { bytes: NAME_BYTES, ..prctl("read its name", libc::PR_GET_NAME) };
const NAME_BYTES: usize = 16;

/// What every thread is asked.
const OF_THREAD: [Asked; 3] = [ALTERNATE_STACK, TID_ADDRESS, NAME];
/// Bytes of the answers.
const THREAD_ROOM: usize = 24 + 8 + NAME_BYTES;
/// What the first thread is asked: the same, then what is its process's.
const OF_LEADER: [Asked; 8] = [
    ALTERNATE_STACK,
    TID_ADDRESS,
    NAME,
    prctl("read its parent death signal", libc::PR_GET_PDEATHSIG),
    prctl("read whether it is a subreaper", libc::PR_GET_CHILD_SUBREAPER),
    timer(libc::ITIMER_REAL),
    timer(libc::ITIMER_VIRTUAL),
    timer(libc::ITIMER_PROF),
];
/// POSIX timers whose answers fit into the room together.
const TIMERS: usize = ROOM / 32;

/// What a thread has told of itself.
#[derive(Debug)]
pub(super) struct ThreadAnswers {
    /// Address, flags and length.
    pub(super) alternate_stack: (u64, i32, u64),
    pub(super) clear_tid: u64,
    pub(super) name: String,
}

/// What the first thread has told of its process.
#[derive(Debug)]
pub(super) struct ProcessAnswers {
    pub(super) parent_death_signal: i32,
    pub(super) subreaper: bool,
    /// Interval and rest of each interval timer, in microseconds.
    pub(super) timers: Vec<(u64, u64)>,
}

/// A place in a stopped process where answers are put, and what lay there before.
#[derive(Debug)]
pub(super) struct Scratch {
    pid: pid_t,
    ways: Rc<Ways>,
    address: u64,
    before: [u8; ROOM],
}

impl Scratch {
    /// At the end of the stack lie the program's name, its environment and zeros; all threads are
    /// stopped, so nobody sees them change.
    pub(super) fn of(
        pid: pid_t,
        mappings: &[Mapping],
        ways: Rc<Ways>,
    ) -> Result<Scratch, EngineError> {
        let writable = libc::PROT_READ | libc::PROT_WRITE;
        let fits = |m: &&Mapping| m.protection & writable == writable && !m.shared;
        let stack = mappings.iter().filter(fits).find(|m| m.name == "[stack]");
        let place = stack.or_else(|| mappings.iter().filter(fits).find(|m| m.inode == 0));
        let place = place
            .ok_or_else(|| EngineError::unsupported(pid, "it has no writable memory of its own"))?;
        let address = place.end - ROOM as u64;
        let mut before = [0; ROOM];
        inject::read_exact(pid, address, &mut before)?;
        Ok(Scratch { pid, ways, address, before })
    }

    /// Whether its children end without its waiting for them (SIG_IGN or SA_NOCLDWAIT for SIGCHLD).
    /// The leader is at home afterwards.
    pub(super) fn forgets_children(&self, leader: &mut Thread) -> Result<bool, EngineError> {
        let mut action = [0; 32];
        sys::write(self.pid, self.address, &action)?;
        self.ways.lead(leader)?;
        let arguments = [libc::SIGCHLD as u64, 0, self.address, 8];
        let result = leader.call(self.ways.home(), libc::SYS_rt_sigaction, &arguments)?;
        leader.go_home()?;
        checked(self.pid, "read its signal actions", result)?;
        inject::read_exact(self.pid, self.address, &mut action)?;
        let no_wait = word(&action, 8) & libc::SA_NOCLDWAIT as u64 != 0;
        Ok(no_wait || word(&action, 0) == libc::SIG_IGN as u64)
    }

    /// Asks threads what only they can tell of themselves. They are at home afterwards.
    pub(super) fn ask_threads(
        &self,
        threads: &mut [Thread],
    ) -> Result<Vec<ThreadAnswers>, EngineError> {
        let at_once = self.ways.at_once().min(ROOM / THREAD_ROOM);
        let asked = self.ask_in_turn(threads, at_once)?;
        let each = threads.iter_mut().zip(asked);
        each.map(|(thread, answers)| answers.map_or_else(|| self.ask_alone(thread), Ok)).collect()
    }

    /// Asks threads with one stop each, `at_once` of them at any time: while one is brought home
    /// and the next one sets out, the others make their calls. `None` of those that are to be asked
    /// by themselves.
    fn ask_in_turn(
        &self,
        threads: &mut [Thread],
        at_once: usize,
    ) -> Result<Vec<Option<ThreadAnswers>>, EngineError> {
        let mut all = Vec::new();
        all.resize_with(threads.len(), || None);
        if at_once == 0 {
            return Ok(all);
        }
        let (mut away, mut next, mut result) = (VecDeque::with_capacity(at_once), 0, Ok(()));
        loop {
            // A slot is free when whoever had it before is home.
            while result.is_ok()
                && next < threads.len()
                && away.front().is_none_or(|(first, _)| next - first < at_once)
            {
                match self.set_out(&mut threads[next], next % at_once) {
                    Ok(row) => away.extend(row.map(|row| (next, row))),
                    Err(error) => result = Err(error),
                }
                next += 1;
            }
            // Whatever has failed of one, the others are waited for.
            let Some((index, row)) = away.pop_front() else { break };
            match self.come_home(&mut threads[index], row, index % at_once) {
                Ok(answers) => all[index] = answers,
                Err(error) => result = result.and(Err(error)),
            }
        }
        result.map(|()| all)
    }

    /// Has a thread set out to answer in the slot of that number.
    fn set_out(&self, thread: &mut Thread, slot: usize) -> Result<Option<Row>, EngineError> {
        let questions = questions_at(self.room(slot), &OF_THREAD);
        let row = self.ways.lead_asking_in(slot, thread, &questions)?;
        if let Some(row) = row {
            thread.set_out(row)?;
        }
        Ok(row)
    }

    /// Waits until it has answered.
    fn come_home(
        &self,
        thread: &mut Thread,
        row: Row,
        slot: usize,
    ) -> Result<Option<ThreadAnswers>, EngineError> {
        if thread.end_row(row, |_| Ok(()))? != 0 {
            return Ok(None);
        }
        let mut answers = [0; THREAD_ROOM];
        inject::read_exact(self.pid, self.room(slot), &mut answers)?;
        Ok(Some(thread_answers(&split(&answers, &OF_THREAD))))
    }

    /// Where the answers of the thread in that slot come.
    fn room(&self, slot: usize) -> u64 {
        self.address + (slot * THREAD_ROOM) as u64
    }

    /// Asks a thread by itself, whose answers are not those that were hoped for.
    fn ask_alone(&self, thread: &mut Thread) -> Result<ThreadAnswers, EngineError> {
        Ok(thread_answers(&self.ask(thread, &OF_THREAD)?))
    }

    /// Has the first thread set out to tell what it can of itself and of its process, if it can
    /// make calls in a row: [`Scratch::leader_told`] is to be called then, whatever else fails.
    pub(super) fn ask_leader(&self, leader: &mut Thread) -> Result<Option<Row>, EngineError> {
        sys::write(self.pid, self.address, &[0; ROOM][..length(&OF_LEADER)])?;
        let row = self.ways.lead_asking(leader, &self.questions(&OF_LEADER))?;
        if let Some(row) = row {
            leader.set_out(row)?;
        }
        Ok(row)
    }

    /// Returns what the first thread tells, which has set out on `row` if that is one. It is at
    /// home afterwards.
    pub(super) fn leader_told(
        &self,
        leader: &mut Thread,
        row: Option<Row>,
    ) -> Result<(ThreadAnswers, ProcessAnswers), EngineError> {
        let at_once = row.map(|row| leader.end_row(row, |_| Ok(()))).transpose()?;
        if at_once != Some(0) {
            self.ask_one_by_one(leader, &OF_LEADER)?;
        }
        let answers = self.answers(&OF_LEADER)?;
        let timer = |answer: &Vec<u8>| {
            let time = |at| word(answer, at).wrapping_mul(1_000_000) + word(answer, at + 8);
            (time(0), time(16))
        };
        let process = ProcessAnswers {
            parent_death_signal: word(&answers[3], 0) as i32,
            subreaper: word(&answers[4], 0) as i32 != 0,
            timers: answers[5..].iter().map(timer).collect(),
        };
        Ok((thread_answers(&answers), process))
    }

    /// Asks what is left of POSIX timers: interval, then rest, in seconds and nanoseconds.
    pub(super) fn ask_timers(
        &self,
        leader: &mut Thread,
        ids: &[i32],
    ) -> Result<Vec<[i64; 4]>, EngineError> {
        let mut all = Vec::with_capacity(ids.len());
        for some in ids.chunks(TIMERS) {
            let (what, call, bytes) = ("read its timers", libc::SYS_timer_gettime, 32);
            let asked: Vec<Asked> =
                some.iter().map(|id| Asked { what, call, number: *id, bytes }).collect();
            let answers = self.ask(leader, &asked)?;
            let times = answers.iter().map(|a| [0, 8, 16, 24].map(|at| word(a, at) as i64));
            all.extend(times);
        }
        Ok(all)
    }

    /// Has the thread ask all of `asked`; the bytes of each answer.
    fn ask(&self, thread: &mut Thread, asked: &[Asked]) -> Result<Vec<Vec<u8>>, EngineError> {
        sys::write(self.pid, self.address, &[0; ROOM][..length(asked)])?;
        if !self.ask_at_once(thread, asked)? {
            self.ask_one_by_one(thread, asked)?;
        }
        self.answers(asked)
    }

    /// The answers that have come.
    fn answers(&self, asked: &[Asked]) -> Result<Vec<Vec<u8>>, EngineError> {
        let mut room = [0; ROOM];
        let answers = &mut room[..length(asked)];
        inject::read_exact(self.pid, self.address, answers)?;
        Ok(split(answers, asked))
    }

    fn questions(&self, asked: &[Asked]) -> Vec<Question> {
        questions_at(self.address, asked)
    }

    /// Asks with one stop. `false` if the process cannot make calls in a row, or had no answer.
    fn ask_at_once(&self, thread: &mut Thread, asked: &[Asked]) -> Result<bool, EngineError> {
        match self.ways.lead_asking(thread, &self.questions(asked))? {
            // Nothing that is asked makes anybody.
            Some(row) => Ok(thread.run(row, |_| Ok(()))? == 0),
            None => Ok(false),
        }
    }

    /// Asks with two stops a question; an error names the one that had no answer.
    fn ask_one_by_one(&self, thread: &mut Thread, asked: &[Asked]) -> Result<(), EngineError> {
        self.ways.lead(thread)?;
        for (Asked { what, call, .. }, question) in asked.iter().zip(self.questions(asked)) {
            let arguments = [question.number as u64, question.answer, 0];
            let result = thread.call(self.ways.home(), *call, &arguments)?;
            checked(self.pid, what, result)?;
        }
        // If whoever traces it is killed, a thread that is at home just goes on.
        thread.go_home()
    }
}

/// The same with the address of each answer, of which the first lies at `answer`.
fn questions_at(mut answer: u64, asked: &[Asked]) -> Vec<Question> {
    let question = |asked: &Asked| {
        let question = Question { call: asked.call, number: asked.number, answer };
        answer += asked.bytes as u64;
        question
    };
    asked.iter().map(question).collect()
}

/// Bytes of all answers.
fn length(asked: &[Asked]) -> usize {
    asked.iter().map(|asked| asked.bytes).sum()
}

/// The bytes of each answer.
fn split(mut answers: &[u8], asked: &[Asked]) -> Vec<Vec<u8>> {
    let answer = |asked: &Asked| {
        let (answer, after) = answers.split_at(asked.bytes);
        answers = after;
        answer.to_vec()
    };
    asked.iter().map(answer).collect()
}

fn thread_answers(answers: &[Vec<u8>]) -> ThreadAnswers {
    let (stack, name) = (&answers[0], &answers[2]);
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    ThreadAnswers {
        alternate_stack: (word(stack, 0), word(stack, 8) as i32, word(stack, 16)),
        clear_tid: word(&answers[1], 0),
        // Names may hold anything.
        name: String::from_utf8_lossy(name).into_owned(),
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A process that has ended needs nothing back.
        let _ = sys::write(self.pid, self.address, &self.before);
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// Asks the clone for what it has inherited: signal actions, the heap's end, dumpability,
/// securebits.
pub(super) fn ask_clone(
    clone: &FrozenClone,
    mappings: &[Mapping],
    state: &mut ProcessState,
) -> Result<(), EngineError> {
    ask_inherited(&mut clone.thread()?, mappings, state).map(drop)
}

/// The same of a process that shares the program's memory, where nothing may be left behind.
pub(super) fn ask_beside(
    beside: &mut Thread,
    mappings: &[Mapping],
    state: &mut ProcessState,
) -> Result<(), EngineError> {
    ask_inherited(beside, mappings, state)?.remove(beside)
}

fn ask_inherited(
    thread: &mut Thread,
    mappings: &[Mapping],
    state: &mut ProcessState,
) -> Result<Parasite, EngineError> {
    let taken = mappings.iter().map(|mapping| (mapping.start, mapping.end));
    let base = maps::hole(taken, Parasite::LENGTH)
        .ok_or_else(|| EngineError::unsupported(state.ids.pid, "its address space is full"))?;
    let pid = thread.pid();
    let parasite = Parasite::install(thread, base)?;
    let mut batch = parasite.batch(thread);
    let mut places = Vec::new();
    for signal in 1..=SIGNALS {
        let at = batch.put(&[0; 32])?;
        places.push((signal, at));
        let arguments = [signal as u64, 0, at, 8];
        batch.call("read its signal actions", libc::SYS_rt_sigaction, &arguments)?;
    }
    batch.call("read its heap's end", libc::SYS_brk, &[0])?;
    let dumpable = libc::PR_GET_DUMPABLE as u64;
    batch.call("read whether it is dumpable", libc::SYS_prctl, &[dumpable])?;
    let securebits = libc::PR_GET_SECUREBITS as u64;
    batch.call("read its securebits", libc::SYS_prctl, &[securebits])?;
    let asked = attributes::ask(&mut batch)?;
    let results = batch.run()?;
    if let Some((before, answers)) = results.split_last_chunk::<{ attributes::QUESTIONS }>()
        && let [.., brk, dumpable, securebits] = before[..]
    {
        state.mm.brk.1 = brk as u64;
        state.dumpable = dumpable;
        state.credentials.securebits = securebits as u32;
        state.attributes.answered(pid, &asked, *answers)?;
    }
    for (signal, at) in places {
        let mut bytes = [0; 32];
        inject::read_exact(pid, at, &mut bytes)?;
        let [handler, flags, restorer, mask] = [0, 8, 16, 24].map(|at| word(&bytes, at));
        // The default ones come by themselves.
        if handler != 0 || flags != 0 {
            state.actions.push(Action { signal, handler, flags, restorer, mask });
        }
    }
    Ok(parasite)
}
