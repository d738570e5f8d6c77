//! Pictures of boards, compared with what was drawn before: `goldens/NAME.txt`, which this writes
//! with KEDGE_BLESS=1.

use super::board::{Board, Device, Devices, Job, Process, Rates};
use super::draw::draw;
use super::view::{Command, Confirm, Deed, Note, Order, Target, View};
use super::{columns, printed};
use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use kedge_supervisor::jobs::{LastImage, State};
use kedge_supervisor::{Checkpoints, HeldImage, LastFailure};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::style::Color;
use std::path::PathBuf;
use std::time::Duration;

const NOW: u64 = 1_800_000_000;

fn process(pid: u32, name: &str, kedge: bool) -> Process {
    let processor_percent = Some(if kedge { 3.0 } else { 98.6 });
    Process { pid, name: name.into(), kedge, resident: u64::from(pid) << 16, processor_percent }
}

fn device(name: &str, place: &str, used: Option<u64>) -> Device {
    Device { name: name.into(), place: place.into(), used, size: 8 << 30 }
}

fn job(name: &str, state: State, started: u64) -> Job {
    Job {
        name: name.into(),
        state,
        supervisor: 100,
        started,
        ended: None,
        gpu: "none".into(),
        command: vec!["./simulate".into(), "--steps".into(), "100".into()],
        log: PathBuf::from("/jobs/log"),
        image: None,
        checkpoints: Checkpoints::default(),
        held: None,
        interval: None,
        next: None,
        silent: None,
        processes: vec![process(100, "kedge", true), process(101, "simulate", false)],
        devices: Devices::default(),
        tail: Vec::new(),
    }
}

fn trains() -> Job {
    let image = LastImage {
        image: "/images/train-0007".into(),
        captured: NOW - 290,
        bytes: 3 << 30,
        stall_seconds: 0.012,
        last_word: false,
    };
    let devices = Devices {
        each: vec![
            device("kedge software device", "software", Some(3 << 29)),
            device("kedge software device", "software", None),
        ],
        clients: 1,
        silent: 0,
        rates: Some(Rates { launches: 1234.0, copies: 12.0 }),
        swapped_out: false,
    };
    let checkpoints = Checkpoints {
        durable: 7,
        failed: 1,
        last_failure: Some(LastFailure { at: NOW - 30, why: "the disk is full".into() }),
    };
    let held = HeldImage {
        image: image.image.clone(),
        on_devices: 1 << 30,
        in_memory: 1 << 29,
        until: NOW + 60,
    };
    Job {
        gpu: "soft:2".into(),
        image: Some(image),
        checkpoints,
        held: Some(held),
        interval: Some(Duration::from_secs(600)),
        next: Some(NOW + 310),
        devices,
        tail: (1..30).map(|n| format!("2027-01-15T08:00:{n:02}.000Z proxy[9]: line {n}")).collect(),
        ..job("train", State::Running, NOW - 7300)
    }
}

/// Jobs in each state, one of them as hostile as a folder can make it.
fn board() -> Board {
    let silent = Job {
        silent: Some(Duration::from_secs(7)),
        gpu: "gpu-host:7531/0,1,2,3,4,5,6,7".into(),
        devices: Devices { silent: 3, ..Devices::default() },
        ..job("waits-for-an-answer-that-does-not-come", State::Running, NOW - 400_000)
    };
    let away = Devices { swapped_out: true, ..trains().devices };
    let hostile = Job {
        command: vec!["\x1b]0;owned\x07".into(), "a\nb".into()],
        tail: vec!["\x1b[2J\x1b[Hgone \u{202e}txt".into()],
        gpu: "\x1b[31msoft".into(),
        ..job("a\x1b[2Jb\r\u{200b}", State::Running, NOW - 5)
    };
    let ended = |name: &str, state| Job {
        ended: Some(NOW - 100),
        processes: Vec::new(),
        ..job(name, state, NOW - 160)
    };
    let jobs = vec![
        trains(),
        silent,
        Job { devices: away, ..job("notebook", State::Running, NOW - 90_000) },
        job("left", State::Unsupervised, NOW - 3600),
        hostile,
        ended("done", State::Exited(0)),
        ended("failed", State::Exited(1)),
        ended("shot", State::Killed(9)),
    ];
    Board { now: NOW, jobs }
}

fn chosen(name: &str) -> View {
    View { chosen: Some(name.into()), colour: true, ..View::default() }
}

fn drawn(board: &Board, view: &View, width: u16, height: u16) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
    terminal.draw(|frame| draw(frame, board, view)).expect("a picture");
    terminal.backend().buffer().clone()
}

fn text(buffer: &Buffer) -> String {
    let width = usize::from(buffer.area.width);
    let mut out = String::new();
    for row in buffer.content.chunks(width.max(1)) {
        let line: String = row.iter().map(ratatui::buffer::Cell::symbol).collect();
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// Compares with the golden of that name.
fn is_golden(name: &str, drawn: &str) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/top/goldens");
    let path = folder.join(format!("{name}.txt"));
    if std::env::var_os("KEDGE_BLESS").is_some() {
        std::fs::write(&path, drawn).expect("a golden");
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(golden == drawn, "{name} is drawn otherwise (KEDGE_BLESS=1 keeps it):\n{drawn}");
}

fn golden(name: &str, board: &Board, view: &View, width: u16, height: u16) {
    is_golden(name, &text(&drawn(board, view, width, height)));
}

#[test]
fn a_screen_of_80_by_24() {
    golden("80x24", &board(), &chosen("train"), 80, 24);
}

#[test]
fn a_wide_screen_has_all_columns() {
    golden("140x40", &board(), &View { all: true, ..chosen("train") }, 140, 40);
}

#[test]
fn a_small_screen_has_the_table_alone() {
    golden("40x8", &board(), &chosen("left"), 40, 8);
}

#[test]
fn a_supervisor_that_does_not_answer_is_told() {
    let board = board();
    let view = View { stale: Some(4), ..chosen(&board.jobs[1].name) };
    golden("silent", &board, &view, 80, 24);
}

#[test]
fn hostile_text_is_shown_escaped() {
    let board = board();
    let name = &board.jobs[4].name;
    let picture = text(&drawn(&board, &chosen(name), 100, 30));
    let bad = |c: char| c.is_control() && c != '\n' || matches!(c, '\u{202e}' | '\u{200b}');
    assert!(!picture.contains(bad), "{picture:?}");
    is_golden("hostile", &picture);
}

#[test]
fn nothing_runs() {
    golden("nothing", &Board { now: NOW, jobs: Vec::new() }, &View::default(), 80, 24);
}

#[test]
fn nothing_is_known_as_yet() {
    let picture = text(&drawn(&Board::default(), &View::default(), 80, 24));
    assert!(picture.contains("looking for jobs") && !picture.contains("running"), "{picture}");
}

#[test]
fn the_keys_are_listed() {
    golden("help", &board(), &View { help: true, ..chosen("train") }, 80, 24);
}

#[test]
fn the_end_of_a_job_is_asked_for() {
    let (name, supervisor) = ("train".parse().expect("a name"), 100);
    let confirm = Some(Confirm(Target { name, supervisor, started: NOW - 7300 }));
    golden("confirm", &board(), &View { confirm, ..chosen("train") }, 80, 24);
}

#[test]
fn on_paper_there_are_all_columns() {
    let text = anstream::adapter::strip_str(&printed(&board())).to_string();
    is_golden("paper", &text);
}

/// Whatever the size, there is a picture of what there is room for.
#[test]
fn every_size_is_drawn() {
    let board = board();
    for width in (0..=132).step_by(3) {
        for height in 0..=40 {
            drawn(&board, &View { help: true, ..chosen("left") }, width, height);
            let picture = text(&drawn(&board, &chosen("train"), width, height));
            let first: String = "kedge top".chars().take(width.into()).collect();
            assert!(height == 0 || picture.starts_with(first.trim()), "{width}x{height}");
        }
    }
}

#[test]
fn without_colours_words_say_the_same() {
    let board = board();
    let colours = |colour| {
        let view = View { colour, stale: Some(4), ..chosen("train") };
        let buffer = drawn(&board, &view, 80, 24);
        let plain = |colour: &Color| *colour == Color::Reset;
        let without = buffer.content.iter().all(|cell| plain(&cell.fg) && plain(&cell.bg));
        (text(&buffer), without)
    };
    let (with, without) = (colours(true), colours(false));
    assert!(!with.1 && without.1);
    assert_eq!(with.0, without.0);
}

#[test]
fn a_table_scrolls_with_the_chosen_job() {
    let jobs = (0..100).map(|n| job(&format!("job-{n:02}"), State::Running, NOW - n)).collect();
    let board = Board { now: NOW, jobs };
    let picture = text(&drawn(&board, &chosen("job-77"), 80, 24));
    assert!(picture.contains("job-77") && !picture.contains("job-78"), "{picture}");
}

fn press(view: &mut View, board: &mut Board, code: KeyCode) -> Option<Command> {
    view.press(board, KeyEvent::new(code, KeyModifiers::NONE))
}

#[test]
fn a_job_stays_chosen_wherever_it_is() {
    let (mut board, mut view) = (board(), View::default());
    view.take(&mut board);
    let first = view.chosen.clone();
    assert_eq!(first.as_deref(), Some(board.jobs[0].name.as_str()), "the newest");
    assert_eq!(press(&mut view, &mut board, KeyCode::Char('j')), Some(Command::Gather));
    let second = view.chosen.clone();
    assert_ne!(first, second);
    for _ in 0..7 {
        press(&mut view, &mut board, KeyCode::Char('o'));
        press(&mut view, &mut board, KeyCode::Char('r'));
        assert_eq!(view.chosen, second);
    }
    press(&mut view, &mut board, KeyCode::End);
    press(&mut view, &mut board, KeyCode::Down);
    assert_eq!(view.at(&board), Some(board.jobs.len() - 1));
    press(&mut view, &mut board, KeyCode::Home);
    press(&mut view, &mut board, KeyCode::Up);
    assert_eq!(view.at(&board), Some(0));
    board.jobs.remove(0);
    view.take(&mut board);
    assert_eq!(view.at(&board), Some(0), "it has ended");
}

#[test]
fn a_job_ends_only_when_that_is_said_twice() {
    let (mut board, mut view) = (board(), chosen("train"));
    assert_eq!(press(&mut view, &mut board, KeyCode::Char('x')), None);
    assert!(view.confirm.is_some());
    assert_eq!(press(&mut view, &mut board, KeyCode::Char('x')), None, "that is no yes");
    assert_eq!(view.confirm, None);
    assert_eq!(press(&mut view, &mut board, KeyCode::Char('y')), None, "nothing is asked");
    press(&mut view, &mut board, KeyCode::Char('x'));
    let done = press(&mut view, &mut board, KeyCode::Char('y'));
    assert!(matches!(done, Some(Command::Do(target, Deed::End)) if target.supervisor == 100));

    // Another job of that name is not meant.
    press(&mut view, &mut board, KeyCode::Char('x'));
    board.jobs[0].supervisor = 200;
    view.take(&mut board);
    assert_eq!(view.confirm, None);
}

#[test]
fn what_cannot_be_done_is_told() {
    let mut board = board();
    for name in ["done", "a\x1b[2Jb\r\u{200b}"] {
        for key in ['c', 's', 'x'] {
            let mut view = chosen(name);
            assert_eq!(press(&mut view, &mut board, KeyCode::Char(key)), None, "{name:?}");
            assert!(view.note.bad && view.confirm.is_none());
        }
    }
    let mut nothing = Board::default();
    let mut view = View::default();
    for key in KEYS_OF_ALL_KINDS {
        press(&mut view, &mut nothing, *key);
    }
}

const KEYS_OF_ALL_KINDS: &[KeyCode] = &[
    KeyCode::Up,
    KeyCode::Down,
    KeyCode::Home,
    KeyCode::End,
    KeyCode::Char('c'),
    KeyCode::Char('s'),
    KeyCode::Char('x'),
    KeyCode::Char('o'),
    KeyCode::Char('a'),
];

#[test]
fn memory_goes_out_and_comes_in_by_one_key() {
    let mut board = board();
    let mut pressed = |name: &str| press(&mut chosen(name), &mut board, KeyCode::Char('s'));
    assert!(matches!(pressed("train"), Some(Command::Do(_, Deed::SwapOut))));
    assert!(matches!(pressed("notebook"), Some(Command::Do(_, Deed::SwapIn))));
}

#[test]
fn any_key_ends_the_help_and_ctrl_c_ends_all() {
    let (mut board, mut view) = (board(), chosen("train"));
    press(&mut view, &mut board, KeyCode::Char('?'));
    assert!(view.help);
    assert_eq!(press(&mut view, &mut board, KeyCode::Char('x')), None);
    assert!(!view.help && view.confirm.is_none());
    press(&mut view, &mut board, KeyCode::Char('x'));
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(view.press(&mut board, interrupt), Some(Command::Quit));
}

#[test]
fn jobs_are_sorted_by_what_is_asked() {
    let mut jobs = board().jobs;
    let mut first = |order: Order, reverse| {
        order.sort(&mut jobs, reverse);
        jobs[0].name.clone()
    };
    assert_eq!(first(Order::Name, true), "waits-for-an-answer-that-does-not-come");
    assert_eq!(first(Order::Age, true), "waits-for-an-answer-that-does-not-come");
    assert_eq!(first(Order::Memory, false), "train");
    assert_eq!(first(Order::Kernels, false), "train");
    assert_eq!(first(Order::Image, true), "train", "the only one that has an image");
}

#[test]
fn a_note_of_a_job_s_own_words_is_escaped() {
    let note = Note { text: "\x1b[2J".into(), bad: true };
    let picture = text(&drawn(&board(), &View { note, ..chosen("train") }, 80, 24));
    assert!(picture.contains("\\u{1b}[2J"), "{picture}");
}

#[test]
fn headings_fit_into_their_columns() {
    for column in &columns::COLUMNS {
        assert!(column.heading.len() <= column.width.0, "{}", column.heading);
    }
}

#[test]
fn json_says_what_the_table_says() {
    let board = board();
    let rows = serde_json::to_value(board.rows()).expect("JSON");
    let train = &rows[0];
    assert_eq!(train["name"], "train");
    assert_eq!(train["launches_per_second"], 1234.0);
    assert_eq!(
        (&train["image_age_seconds"], &train["next_checkpoint"]),
        (&290.into(), &(NOW + 310).into())
    );
    assert_eq!(
        (&train["device_memory_bytes"], &train["device_memory_size"]),
        (&(3_u64 << 29).into(), &(8_u64 << 30).into())
    );
    assert_eq!(train["processes"][1]["kedge"], false);
    assert_eq!(rows[1]["silent_seconds"], 7.0);
    assert!(rows[1]["launches_per_second"].is_null());
}
