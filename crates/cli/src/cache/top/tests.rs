//! Pictures of caches, compared with what was drawn before: `goldens/NAME.txt`, which this writes
//! with KEDGE_BLESS=1.

use super::board::{Board, Cache};
use super::draw::draw;
use super::printed;
use super::screen::{Command, View};
use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use kedge_cache::control::{Status, Stuck, TierStatus};
use kedge_cache::partner::PartnerStatus;
use kedge_cache::places::Place;
use kedge_cache::spec::{Fsync, Medium};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Cell;
use ratatui::style::Color;
use std::path::PathBuf;

fn tier(medium: Medium, used: u64, limit: u64) -> TierStatus {
    TierStatus { medium, folder: "/dev/shm".into(), limit, used }
}

pub(super) fn status(under: &str) -> Status {
    Status {
        under: under.into(),
        pid: 7,
        fsync: Fsync::Partner,
        tiers: vec![tier(Medium::Ram, 6 << 30, 8 << 30), tier(Medium::Nvme, 1 << 30, 200 << 30)],
        dirty: 7 << 30,
        files: 12,
        oldest: Some(75),
        waiting: 0,
        below: 0,
        users: Vec::new(),
        absorbed: 0,
        leased: 0,
        through: 0,
        drained: 0,
        moved: 0,
        back: 0,
        device: None,
        partner: None,
        waited: 0,
        stuck: Vec::new(),
        stuck_files: 0,
    }
}

fn cache(user: u32, under: &str, status: Option<Status>) -> Cache {
    Cache {
        user,
        under: under.into(),
        in_bytes_per_second: status.as_ref().map(|_| 1.5e9),
        drained_bytes_per_second: status.as_ref().map(|_| 3e8),
        error: None,
        status: status.map(Box::new),
        place: Place { user, at: under.into() },
    }
}

/// Caches that do well, have trouble, do not answer, and have a name that a terminal would obey.
fn board() -> Board {
    let partner = |connected, why: Option<&str>| PartnerStatus {
        address: "node2:7541".into(),
        connected,
        holds: 2 << 30,
        sent: 0,
        drained: 0,
        why: why.map(str::to_owned),
    };
    let well = Status { partner: Some(partner(true, None)), ..status("/scratch") };
    let stuck = |n: u32| Stuck {
        path: format!("run/\x1b[2Jfile-{n}"),
        bytes: 4096,
        why: "No space left on device (os error 28)".into(),
    };
    let trouble = Status {
        partner: Some(partner(false, Some("connection refused"))),
        stuck: (0..5).map(stuck).collect(),
        stuck_files: 9,
        waiting: 4,
        oldest: None,
        tiers: vec![tier(Medium::Ram, 8 << 30, 8 << 30)],
        ..status("/project/of/many/people")
    };
    let error = Some("its daemon does not answer".into());
    let silent = Cache { error, ..cache(1000, "/dev/shm/kedge-cache-1000/x", None) };
    let hostile = cache(1001, "/a\x1b]0;owned\x07\u{202e}b", Some(status("/")));
    let well = cache(0, "/scratch", Some(well));
    let trouble = cache(0, "/project/of/many/people", Some(trouble));
    Board { at: 1_800_000_000, caches: vec![well, trouble, silent, hostile] }
}

fn cells(board: &Board, view: &View, width: u16, height: u16) -> Vec<Cell> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
    terminal.draw(|frame| draw(frame, board, view)).expect("a picture");
    terminal.backend().buffer().content.clone()
}

fn picture(board: &Board, view: &View, width: u16, height: u16) -> String {
    let mut out = String::new();
    for row in cells(board, view, width, height).chunks(usize::from(width.max(1))) {
        let line: String = row.iter().map(Cell::symbol).collect();
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

fn is_golden(name: &str, drawn: &str) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/cache/top/goldens");
    let path = folder.join(format!("{name}.txt"));
    if std::env::var_os("KEDGE_BLESS").is_some() {
        std::fs::write(&path, drawn).expect("a golden");
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(golden == drawn, "{name} is drawn otherwise (KEDGE_BLESS=1 keeps it):\n{drawn}");
    let bad = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
    assert!(!drawn.contains(bad), "a terminal would obey it: {drawn:?}");
}

#[test]
fn a_screen_of_80_by_24() {
    is_golden("80x24", &picture(&board(), &View::default(), 80, 24));
}

#[test]
fn keys_are_listed() {
    let view = View { help: true, ..View::default() };
    is_golden("help", &picture(&board(), &view, 80, 24));
}

#[test]
fn a_low_screen_shows_the_chosen_cache() {
    let chosen = Some(board().caches[3].place.clone());
    is_golden("low", &picture(&board(), &View { chosen, ..View::default() }, 100, 8));
}

#[test]
fn there_is_no_cache() {
    let board = Board { at: 1, ..Board::default() };
    is_golden("nothing", &picture(&board, &View::default(), 80, 6));
}

#[test]
fn on_paper_there_is_all() {
    is_golden("paper", &anstream::adapter::strip_str(&printed(&board())).to_string());
}

#[test]
fn every_size_is_drawn() {
    for (width, height) in (0..120).step_by(3).flat_map(|w| (0..30).map(move |h| (w, h))) {
        let view = View { help: height % 2 == 0, stale: Some(9), ..View::default() };
        cells(&board(), &view, width, height);
    }
}

#[test]
fn without_colours_words_say_the_same() {
    let drawn = |colour| View { colour, ..View::default() };
    let (with, without) = (drawn(true), drawn(false));
    assert_eq!(picture(&board(), &with, 80, 24), picture(&board(), &without, 80, 24));
    let coloured = |view| cells(&board(), view, 80, 24).iter().any(|it| it.fg != Color::Reset);
    assert!(coloured(&with) && !coloured(&without));
}

#[test]
fn keys_do_what_the_help_says() {
    let (board, mut view) = (board(), View::default());
    let mut press = |code| {
        let command = view.press(&board, KeyEvent::new(code, KeyModifiers::NONE));
        (command, view.at(&board), view.help)
    };
    for (at, code) in [(1, KeyCode::Down), (2, KeyCode::Char('j')), (1, KeyCode::Up)] {
        assert_eq!(press(code), (None, Some(at), false));
    }
    let cache = &board.caches[1];
    let drains = Command::Drain(cache.place.clone(), cache.under.clone());
    assert_eq!(press(KeyCode::Char('d')).0, Some(drains));
    assert_eq!(press(KeyCode::Char('?')), (None, Some(1), true));
    assert_eq!(press(KeyCode::Char('d')), (None, Some(1), false), "it ends the help alone");
    assert_eq!(press(KeyCode::Char('q')).0, Some(Command::Quit));
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(View::default().press(&board, interrupt), Some(Command::Quit));
    let none = Board::default();
    let drain = KeyEvent::new(KeyCode::Char('d'), KeyModifiers::NONE);
    assert_eq!(View::default().press(&none, drain), None);
}
