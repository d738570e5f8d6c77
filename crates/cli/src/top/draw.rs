//! The picture of a board as a user looks at it: nothing but these two goes in.

use super::board::Board;
use super::columns::{self, Look};
use super::pane;
use super::view::{Confirm, View};
use super::{keys, words};
use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph, Widget};

/// A screen of fewer lines shows the table alone.
const FOR_PANE: u16 = 14;

/// Draws all of the screen.
pub(crate) fn draw(frame: &mut Frame<'_>, board: &Board, view: &View) {
    let area = frame.area();
    let buffer = frame.buffer_mut();
    let Some([head, body, foot]) = bands(area) else { return };
    let pen = Pen { colour: view.colour };
    line(buffer, head, heading(board, view, pen));
    line(buffer, foot, footer(board, view, pen));
    let rows = rows(board, body.height);
    let (top, below) = cut(body, rows);
    table(buffer, top, board, view, pen);
    if let Some(job) = view.job(board).filter(|_| below.height > 2) {
        pane::draw(buffer, below, job, board.now, pen);
    }
    if view.help {
        help(buffer, area, pen);
    }
}

/// Lines of the table, with its heading, among `height`: the pane has what it leaves.
fn rows(board: &Board, height: u16) -> u16 {
    if height + 2 < FOR_PANE {
        return height;
    }
    let all = u16::try_from(board.jobs.len()).unwrap_or(u16::MAX).saturating_add(2);
    all.clamp(4, (height * 2 / 5).max(4))
}

/// How things look, with colours and without.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pen {
    pub(crate) colour: bool,
}

impl Pen {
    pub(crate) fn of(self, look: Look) -> Style {
        let (colour, modifier) = match look {
            Look::Plain => return Style::new(),
            Look::Good => (Some(Color::Green), Modifier::empty()),
            Look::Fair => (Some(Color::Yellow), Modifier::empty()),
            Look::Bad => (Some(Color::Red), Modifier::BOLD),
            Look::Dim => (None, Modifier::DIM),
        };
        let style = Style::new().add_modifier(modifier);
        colour.filter(|_| self.colour).map_or(style, |colour| style.fg(colour))
    }

    pub(crate) fn heading(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    pub(crate) fn chosen(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }
}

/// Returns the first line of a screen, what lies between, and the last line; `None` where there is
/// nothing to write on.
pub(crate) fn bands(area: Rect) -> Option<[Rect; 3]> {
    let (head, rest) = cut(area, 1);
    let (body, foot) = cut(rest, rest.height.saturating_sub(1));
    (area.height > 0 && area.width > 0).then_some([head, body, foot])
}

/// The upper `height` lines of an area, and the rest of it.
pub(crate) fn cut(area: Rect, height: u16) -> (Rect, Rect) {
    let height = height.min(area.height);
    let upper = Rect { height, ..area };
    let lower = Rect { y: area.y + height, height: area.height - height, ..area };
    (upper, lower)
}

/// Writes a line into the first line of an area.
pub(crate) fn line(buffer: &mut Buffer, area: Rect, line: Line<'_>) {
    if area.height > 0 {
        buffer.set_line(area.x, area.y, &line, area.width);
    }
}

/// `text` in so many places: its end is cut off where it has more, and marked.
pub(crate) fn fit(text: &str, width: usize) -> String {
    if Span::raw(text).width() <= width {
        return text.to_owned();
    }
    let mut out = String::new();
    for c in text.chars() {
        out.push(c);
        if Span::raw(out.as_str()).width() + 1 > width {
            out.pop();
            break;
        }
    }
    if width > 0 {
        out.push('…');
    }
    out
}

/// The same, filled up with spaces: behind it, or before a number.
pub(crate) fn padded(text: &str, width: usize, right: bool) -> String {
    let text = fit(text, width);
    let pad = " ".repeat(width.saturating_sub(Span::raw(text.as_str()).width()));
    if right { pad + &text } else { text + &pad }
}

fn heading<'a>(board: &Board, view: &View, pen: Pen) -> Line<'a> {
    let title = Span::styled("kedge top", pen.heading());
    if board.now == 0 {
        return Line::from(title);
    }
    let running = board.jobs.iter().filter(|job| job.goes_on()).count();
    let ended = board.jobs.len() - running;
    let mut text = format!("  {running} running");
    if view.all {
        text.push_str(&format!(", {ended} ended"));
    }
    text.push_str(&format!("  by {}", view.order.name()));
    if view.reverse {
        text.push_str(", reversed");
    }
    let mut spans = vec![title, Span::raw(text)];
    if let Some(seconds) = view.stale {
        let text = format!("  no figures for {}", words::time(seconds));
        spans.push(Span::styled(text, pen.of(Look::Bad)));
    }
    Line::from(spans)
}

fn footer<'a>(board: &Board, view: &View, pen: Pen) -> Line<'a> {
    if let Some(Confirm(target)) = &view.confirm {
        let job = view.job(board).filter(|job| job.name == target.name.to_string());
        let count = job.map_or(0, |job| job.program().count());
        let text =
            format!("End {}, all of its {count} processes? y: yes, any other key: no", target.name);
        return Line::from(Span::styled(text, pen.chosen()));
    }
    if !view.note.text.is_empty() {
        let look = if view.note.bad { Look::Bad } else { Look::Plain };
        return Line::from(Span::styled(words::escaped(&view.note.text), pen.of(look)));
    }
    let mut spans = Vec::new();
    for key in keys::KEYS.iter().filter(|key| !key.word.is_empty()) {
        let first = key.shown.split(' ').next().unwrap_or_default();
        spans.push(Span::styled(first, pen.heading()));
        spans.push(Span::raw(format!(" {}  ", key.word)));
    }
    Line::from(spans)
}

fn table(buffer: &mut Buffer, area: Rect, board: &Board, view: &View, pen: Pen) {
    let shown = columns::shown(area.width.into());
    let gap = " ".repeat(columns::GAP);
    let (head, body) = cut(area, 1);
    let mut titles = Vec::new();
    for (column, width) in &shown {
        titles.push(Span::styled(padded(column.heading, *width, column.right), pen.heading()));
        titles.push(Span::raw(gap.clone()));
    }
    line(buffer, head, Line::from(titles));
    if board.jobs.is_empty() {
        let none = match board.now {
            0 => "looking for jobs…",
            _ => "no job runs: `kedge run -- PROGRAM` starts one",
        };
        return line(buffer, body, Line::from(Span::styled(none, pen.of(Look::Dim))));
    }
    let at = view.at(board).unwrap_or(0);
    let first = (at + 1).saturating_sub(body.height.into());
    for (job, y) in board.jobs.iter().enumerate().skip(first).zip(body.rows()) {
        let (number, job) = job;
        let cells = shown.iter().flat_map(|(column, width)| {
            let (look, text) = (column.cell)(job, board.now);
            let text = padded(&text, *width, column.right);
            [Span::styled(text, pen.of(look)), Span::raw(gap.clone())]
        });
        line(buffer, y, Line::from(cells.collect::<Vec<_>>()));
        if number == at {
            buffer.set_style(y, pen.chosen());
        }
    }
}

fn help(buffer: &mut Buffer, area: Rect, pen: Pen) {
    let keys = keys::KEYS.iter().map(|key| (key.shown, key.does));
    list_keys(buffer, area, pen, keys);
}

/// Lists keys, as they are shown, and what they do, in the middle of an area.
pub(crate) fn list_keys<'a>(
    buffer: &mut Buffer,
    area: Rect,
    pen: Pen,
    keys: impl Iterator<Item = (&'a str, &'a str)>,
) {
    let lines: Vec<Line<'_>> = keys
        .map(|(shown, does)| {
            let keys = Span::styled(format!(" {shown:<8}"), pen.heading());
            Line::from(vec![keys, Span::raw(format!("{does} "))])
        })
        .collect();
    let width = lines.iter().map(Line::width).max().unwrap_or(0) + 2;
    let size = |length: usize, most: u16| u16::try_from(length).unwrap_or(most).min(most);
    let (width, height) = (size(width, area.width), size(lines.len() + 2, area.height));
    let (x, y) = (area.x + (area.width - width) / 2, area.y + (area.height - height) / 2);
    let place = Rect { x, y, width, height };
    Clear.render(place, buffer);
    Paragraph::new(lines).block(Block::bordered().title(" keys ")).render(place, buffer);
}
