//! The terminal while it is kedge's: taken, given back whatever happens, and the loop between.

use super::act::Deeds;
use super::board::Board;
use super::draw;
use super::gather::Gatherer;
use super::view::{Command, View};
use crate::Failure;
use crossterm::cursor::{Hide, Show};
use crossterm::event::{self, Event};
use crossterm::execute;
use crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use kedge_supervisor::die_of;
use kedge_supervisor::jobs::Jobs;
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::{self, Stdout};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, Once};
use std::thread;
use std::time::{Duration, Instant};

/// Between two looks at what is not a key.
pub(crate) const TICK: Duration = Duration::from_millis(100);
/// Figures that are older, beside the interval, are told to be.
const STALE: Duration = Duration::from_secs(2);

/// Whether the terminal is kedge's.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// The terminal, in raw mode, on its other screen, until this is dropped.
pub(crate) struct Screen {
    pub(crate) terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Screen {
    fn take() -> io::Result<Screen> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                // First, so that its message can be read.
                give_back();
                before(panic);
            }));
        });
        enable_raw_mode()?;
        TAKEN.store(true, Ordering::SeqCst);
        let entered = execute!(io::stdout(), EnterAlternateScreen, Hide);
        let terminal = entered.and_then(|()| Terminal::new(CrosstermBackend::new(io::stdout())));
        // Given back where it could not be taken as a whole.
        terminal.map(|terminal| Screen { terminal }).inspect_err(|_| give_back())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

/// Gives the terminal back, once, as it was. One that has gone away needs nothing.
fn give_back() {
    if TAKEN.swap(false, Ordering::SeqCst) {
        let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
        let _ = disable_raw_mode();
    }
}

/// Whether the terminal is kedge's still: a thread that panics gives it back.
pub(crate) fn is_taken() -> bool {
    TAKEN.load(Ordering::SeqCst)
}

/// What the gathering thread is told.
struct Wanted {
    chosen: Option<String>,
    all: bool,
}

type Gathered = Result<Board, Failure>;

/// Shows the jobs until the user has seen enough. A signal that ends it ends the process.
///
/// # Errors
/// Where the terminal cannot be used, or the jobs cannot be listed.
pub(crate) fn show(jobs: &Jobs, view: View, interval: Duration) -> Result<(), Failure> {
    with(|screen, signal| run(screen, jobs, view, interval, signal))
}

/// Takes the terminal for `work`, which ends once the number of a signal is there, or [`is_taken`]
/// says no more.
///
/// # Errors
/// Where the terminal cannot be used, or what `work` returns.
pub(crate) fn with(
    work: impl FnOnce(&mut Screen, &AtomicUsize) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let signal = Arc::new(AtomicUsize::new(0));
    for number in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::flag::register_usize(number, signal.clone(), number as usize)?;
    }
    let mut screen = Screen::take()?;
    let outcome = work(&mut screen, &signal);
    drop(screen);
    match signal.load(Ordering::SeqCst) {
        0 => outcome,
        number => die_of(number as i32),
    }
}

fn run(
    screen: &mut Screen,
    jobs: &Jobs,
    mut view: View,
    interval: Duration,
    signal: &AtomicUsize,
) -> Result<(), Failure> {
    let (want, wanted) = mpsc::channel();
    let (send, boards) = mpsc::channel();
    let gatherer = Gatherer::new(jobs.clone(), view.all);
    let gathering = move || gather(gatherer, interval, &wanted, &send);
    thread::Builder::new().name("gather".into()).spawn(gathering)?;
    let mut deeds = Deeds::new(jobs.clone());
    let (mut board, mut newest) = (Board::default(), Instant::now());
    while signal.load(Ordering::SeqCst) == 0 && TAKEN.load(Ordering::SeqCst) {
        if let Some(fresh) = latest(&boards)? {
            (board, newest) = (fresh, Instant::now());
            view.take(&mut board);
        }
        if let Some(note) = deeds.news() {
            view.note = note;
        }
        let age = newest.elapsed();
        view.stale = (age > interval + STALE).then_some(age.as_secs());
        screen.terminal.draw(|frame| draw::draw(frame, &board, &view))?;
        if !event::poll(TICK)? {
            continue;
        }
        // All that have been pressed meanwhile: the screen is drawn once.
        while event::poll(Duration::ZERO)? {
            let Event::Key(key) = event::read()? else { continue };
            match view.press(&mut board, key) {
                Some(Command::Quit) => return Ok(()),
                Some(Command::Redraw) => screen.terminal.clear()?,
                Some(Command::Do(target, deed)) => view.note = deeds.begin(target, deed),
                Some(Command::Gather) => {}
                None => continue,
            }
            // A thread that is gone has said why.
            let _ = want.send(Wanted { chosen: view.chosen.clone(), all: view.all });
        }
    }
    match TAKEN.load(Ordering::SeqCst) {
        true => Ok(()),
        false => Err(Failure::new("this is a bug in kedge: a thread of `kedge top` has panicked")),
    }
}

/// The newest board that has come, if any has.
fn latest(boards: &Receiver<Gathered>) -> Result<Option<Board>, Failure> {
    let mut newest = None;
    loop {
        match boards.try_recv() {
            Ok(board) => newest = Some(board?),
            Err(TryRecvError::Empty) => return Ok(newest),
            Err(TryRecvError::Disconnected) => {
                return Err(Failure::new("nothing is gathered any more"));
            }
        }
    }
}

/// Gathers once an interval, and when something else is wanted, until nobody looks.
fn gather(
    mut gatherer: Gatherer,
    interval: Duration,
    wanted: &Receiver<Wanted>,
    send: &Sender<Gathered>,
) {
    let mut chosen = None;
    loop {
        let begin = Instant::now();
        let board = gatherer.gather(chosen.as_deref());
        let failed = board.is_err();
        if send.send(board).is_err() || failed {
            return;
        }
        let left = interval.saturating_sub(begin.elapsed());
        let mut next = wanted.recv_timeout(left);
        while let Ok(Wanted { chosen: job, all }) = next {
            chosen = job;
            gatherer.set_all(all);
            // What is wanted last counts.
            next = wanted.try_recv().map_err(|error| match error {
                TryRecvError::Empty => RecvTimeoutError::Timeout,
                TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
            });
        }
        if next.is_err_and(|error| error == RecvTimeoutError::Disconnected) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    /// Has this test run again in a terminal of its own, where it panics.
    const PANICS: &str = "KEDGE_TOP_TEST_PANICS";

    #[test]
    fn a_panic_gives_the_terminal_back_before_its_message() {
        if std::env::var_os(PANICS).is_some() {
            let _screen = Screen::take().expect("a terminal");
            panic!("this is the message");
        }
        let own = std::env::current_exe().expect("this program");
        let test = "top::screen::tests::a_panic_gives_the_terminal_back_before_its_message";
        let again = format!("{} --exact {test} --nocapture; stty -a", own.display());
        let mut command = Command::new("script");
        command.args(["--quiet", "--return", "--command", &again, "/dev/null"]);
        command.env(PANICS, "1").env("TERM", "xterm").stdin(Stdio::null());
        let output = command.output().expect("script, from bsdutils");
        let said = String::from_utf8_lossy(&output.stdout);
        let at = |what: &str| said.find(what).unwrap_or_else(|| panic!("no {what:?} in {said:?}"));
        assert!(at("\x1b[?1049h") < at("\x1b[?1049l"));
        assert!(at("\x1b[?25h") < at("this is the message"));
        assert!(at("\x1b[?1049l") < at("this is the message"));
        let settings = &said[at("this is the message")..];
        assert!(settings.contains(" icanon") && settings.contains(" echo "), "{settings}");
    }
}
