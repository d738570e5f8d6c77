//! The screen of caches: its keys, and the loop between them and what is gathered.

use super::board::{Board, Gatherer};
use super::{INTERVAL, draw};
use crate::Failure;
use crate::top::screen::{Screen, TICK, is_taken, with};
use crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use kedge_cache::control::{Answer, Ask};
use kedge_cache::places::Place;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

/// Figures that are older are told to be.
const STALE: Duration = Duration::from_secs(3);

/// The keys: as the help names them, in one word for the last line, and what each does.
pub(crate) const KEYS: [(&str, &str, &str); 7] = [
    ("Up k", "", "choose the cache above"),
    ("Down j", "", "choose the cache below"),
    ("d", "drain", "have all that the chosen cache holds be below"),
    ("Ctrl-L", "", "draw the screen anew"),
    ("? h", "help", "this help"),
    ("q", "quit", "quit"),
    ("Ctrl-C", "", "quit"),
];

/// How a user looks at a board.
#[derive(Debug, Clone, Default)]
pub(crate) struct View {
    pub(crate) chosen: Option<Place>,
    pub(crate) colour: bool,
    pub(crate) help: bool,
    /// What there is to say, and whether it is bad.
    pub(crate) note: Option<(bool, String)>,
    /// Seconds for which nothing was gathered.
    pub(crate) stale: Option<u64>,
}

/// What a key has the loop do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Command {
    Quit,
    Redraw,
    Drain(Place, String),
}

impl View {
    /// Returns which cache is chosen: the first one where none is, or it has gone.
    pub(crate) fn at(&self, board: &Board) -> Option<usize> {
        let chosen = self.chosen.as_ref();
        let at = board.caches.iter().position(|cache| Some(&cache.place) == chosen);
        at.or((!board.caches.is_empty()).then_some(0))
    }

    /// Takes a key.
    pub(crate) fn press(&mut self, board: &Board, key: KeyEvent) -> Option<Command> {
        if key.kind == KeyEventKind::Release || key.modifiers.contains(KeyModifiers::ALT) {
            return None;
        }
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match (key.code, control) {
            (KeyCode::Char('c'), true) => return Some(Command::Quit),
            (KeyCode::Char('l'), true) => return Some(Command::Redraw),
            _ if control => return None,
            // Any key ends the help.
            (code, false) if self.help => {
                self.help = false;
                return (code == KeyCode::Char('q')).then_some(Command::Quit);
            }
            _ => self.note = None,
        }
        let at = self.at(board);
        let choose = |at: Option<usize>| Some(board.caches.get(at?)?.place.clone());
        match key.code {
            KeyCode::Char('q') => return Some(Command::Quit),
            KeyCode::Char('?' | 'h') => self.help = true,
            KeyCode::Up | KeyCode::Char('k') => {
                self.chosen = choose(at.map(|at| at.saturating_sub(1)));
            }
            KeyCode::Down | KeyCode::Char('j') => {
                let last = board.caches.len().saturating_sub(1);
                self.chosen = choose(at.map(|at| (at + 1).min(last)));
            }
            KeyCode::Char('d') => {
                let cache = board.caches.get(at?)?;
                return Some(Command::Drain(cache.place.clone(), cache.under.clone()));
            }
            _ => {}
        }
        None
    }
}

/// How a drain has ended.
type Drained = (Place, (bool, String));

/// Has a cache drain, on a thread of its own: it takes as long as it takes.
fn drain(place: Place, under: String, tell: Sender<Drained>) -> Result<(), Failure> {
    let work = move || {
        let said = match place.ask(Ask::Drain) {
            Ok(Answer::Done) => (false, format!("{under}: all is below")),
            Ok(_) => (true, format!("{under}: its daemon did not answer the question")),
            Err(error) => (true, error.to_string()),
        };
        // Nobody may look any more: the drain goes on.
        let _ = tell.send((place, said));
    };
    thread::Builder::new().name("drain".into()).spawn(work)?;
    Ok(())
}

/// Shows the caches until the user has seen enough.
///
/// # Errors
/// Where the terminal cannot be used, or no thread be started.
pub(crate) fn show(colour: bool) -> Result<(), Failure> {
    with(|screen, signal| run(screen, View { colour, ..View::default() }, signal))
}

fn run(screen: &mut Screen, mut view: View, signal: &AtomicUsize) -> Result<(), Failure> {
    let (send, boards) = mpsc::channel();
    let gather = move || {
        let mut gatherer = Gatherer::default();
        loop {
            let begin = Instant::now();
            let board = gatherer.gather();
            let failed = board.is_err();
            if send.send(board).is_err() || failed {
                return;
            }
            thread::sleep(INTERVAL.saturating_sub(begin.elapsed()));
        }
    };
    thread::Builder::new().name("gather".into()).spawn(gather)?;
    let (tell, told) = mpsc::channel();
    let mut draining = BTreeSet::new();
    let (mut board, mut newest) = (Board::default(), Instant::now());
    while signal.load(Ordering::SeqCst) == 0 && is_taken() {
        loop {
            match boards.try_recv() {
                Ok(fresh) => (board, newest) = (fresh?, Instant::now()),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    return Err(Failure::new("nothing is gathered any more"));
                }
            }
        }
        while let Ok((place, said)) = told.try_recv() {
            draining.remove(&place);
            view.note = Some(said);
        }
        let age = newest.elapsed();
        view.stale = (age > STALE).then_some(age.as_secs());
        screen.terminal.draw(|frame| draw::draw(frame, &board, &view))?;
        if !event::poll(TICK)? {
            continue;
        }
        while event::poll(Duration::ZERO)? {
            let Event::Key(key) = event::read()? else { continue };
            match view.press(&board, key) {
                Some(Command::Quit) => return Ok(()),
                Some(Command::Redraw) => screen.terminal.clear()?,
                Some(Command::Drain(place, under)) => {
                    view.note = Some((false, format!("{under}: draining…")));
                    if draining.insert(place.clone()) {
                        drain(place, under, tell.clone())?;
                    }
                }
                None => {}
            }
        }
    }
    match is_taken() {
        true => Ok(()),
        false => {
            Err(Failure::new("this is a bug in kedge: a thread of `kedge cache top` panicked"))
        }
    }
}
