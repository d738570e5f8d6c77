//! The picture of a board of caches, on a screen and on paper.

use super::board::{Board, Cache};
use super::screen::{KEYS, View};
use crate::top::columns::Look;
use crate::top::draw::{Pen, bands, cut, line, list_keys, padded};
use crate::top::words;
use kedge_cache::control::{Status, TierStatus};
use ratatui::Frame;
use ratatui::text::{Line, Span};

/// The least width of the column of folders.
pub(crate) const NAME: usize = 12;
/// The other columns, and how wide each is.
const COLUMNS: [(&str, usize); 8] = [
    ("USER", 6),
    ("UNSAVED", 7),
    ("FILES", 6),
    ("OLDEST", 6),
    ("IN/S", 5),
    ("DRAIN/S", 7),
    ("PARTNER", 7),
    ("ERRORS", 6),
];
/// Places of a bar.
const BAR: usize = 20;
/// So many files that cannot be drained are named of one cache.
const NAMED: usize = 3;

/// A line, and of which cache it is.
pub(crate) struct Row {
    pub(crate) of: Option<usize>,
    pub(crate) cells: Vec<(Look, String)>,
}

/// Returns the heading and the lines of all caches, with folders in `name` places.
pub(crate) fn lines(board: &Board, name: usize) -> Vec<Row> {
    let mut cells = vec![(Look::Dim, padded("FOLDER", name, false))];
    cells.extend(COLUMNS.map(|(heading, width)| (Look::Dim, right(heading, width))));
    let mut rows = vec![Row { of: None, cells }];
    if board.caches.is_empty() {
        let text = match board.at {
            0 => "looking for caches…",
            _ => "there is no cache: `kedge cache start` starts one",
        };
        rows.push(Row { of: None, cells: vec![(Look::Dim, text.to_owned())] });
    }
    for (at, cache) in board.caches.iter().enumerate() {
        rows.extend(of_cache(cache, name).into_iter().map(|cells| Row { of: Some(at), cells }));
    }
    rows
}

fn right(text: &str, width: usize) -> String {
    format!("  {}", padded(text, width, true))
}

fn of_cache(cache: &Cache, name: usize) -> Vec<Vec<(Look, String)>> {
    let status = cache.status.as_deref();
    let mut cells = vec![(Look::Plain, padded(&cache.name(), name, false))];
    let user = (Look::Plain, cache.user.to_string());
    let rest = match status {
        Some(status) => figures(cache, status),
        None => std::array::from_fn(|_| (Look::Dim, "-".to_owned())),
    };
    let all = std::iter::once(user).chain(rest);
    cells.extend(all.zip(COLUMNS).map(|((look, text), (_, width))| (look, right(&text, width))));
    let mut lines = vec![cells];
    lines.extend(status.iter().flat_map(|status| &status.tiers).map(of_tier));
    let wrong = wrong(cache).into_iter();
    lines.extend(wrong.map(|text| vec![(Look::Bad, format!("  {}", words::escaped(&text)))]));
    lines
}

/// Returns the figures behind the user.
fn figures(cache: &Cache, status: &Status) -> [(Look, String); 7] {
    let rate = |rate: Option<f64>| match rate {
        Some(bytes) => (Look::Plain, words::size(bytes as u64)),
        None => (Look::Dim, "-".to_owned()),
    };
    let oldest = match status.oldest {
        Some(seconds) => (Look::Plain, words::time(seconds)),
        None => (Look::Dim, "-".to_owned()),
    };
    let partner = match &status.partner {
        None => (Look::Dim, "-".to_owned()),
        Some(partner) if partner.connected => (Look::Good, words::size(partner.holds)),
        Some(_) => (Look::Bad, "away".to_owned()),
    };
    let errors = match status.stuck_files {
        0 => (Look::Plain, "0".to_owned()),
        files => (Look::Bad, files.to_string()),
    };
    [
        (Look::Plain, words::size(status.dirty)),
        (Look::Plain, status.files.to_string()),
        oldest,
        rate(cache.in_bytes_per_second),
        rate(cache.drained_bytes_per_second),
        partner,
        errors,
    ]
}

fn of_tier(tier: &TierStatus) -> Vec<(Look, String)> {
    let share = tier.used as f64 / tier.limit.max(1) as f64;
    let share = share.clamp(0.0, 1.0);
    let full = (share * BAR as f64).round() as usize;
    let look = match share {
        ..0.5 => Look::Good,
        ..0.9 => Look::Fair,
        _ => Look::Bad,
    };
    let name = tier.medium.name();
    let (used, limit) = (words::size(tier.used), words::size(tier.limit));
    vec![
        (Look::Plain, format!("  {name:<5}{used:>5} of {limit:>4}  ")),
        (look, "#".repeat(full)),
        (Look::Dim, ".".repeat(BAR - full)),
        (Look::Plain, format!(" {:>3.0}%", share * 100.0)),
    ]
}

/// Returns what is wrong with a cache, a line each.
fn wrong(cache: &Cache) -> Vec<String> {
    let mut wrong: Vec<String> = cache.error.iter().cloned().collect();
    let Some(status) = &cache.status else { return wrong };
    if let Some(partner) = status.partner.as_ref().filter(|partner| !partner.connected) {
        let why = partner.why.as_deref().unwrap_or("it is not connected");
        wrong.push(format!("partner {}: {why}; fsync drains", partner.address));
    }
    if status.device.as_ref().is_some_and(|device| device.gone) {
        wrong.push("the process that holds device memory has ended".to_owned());
    }
    if status.waiting > 0 {
        wrong.push(format!("{} writes wait for room", status.waiting));
    }
    let named = status.stuck.iter().take(NAMED);
    wrong.extend(named.map(|file| format!("{}: {}", file.path, file.why)));
    let more = status.stuck_files.saturating_sub(status.stuck.len().min(NAMED) as u64);
    if more > 0 {
        wrong.push(format!("and {more} more: `kedge cache status`"));
    }
    wrong
}

/// Draws all of the screen.
pub(crate) fn draw(frame: &mut Frame<'_>, board: &Board, view: &View) {
    let area = frame.area();
    let buffer = frame.buffer_mut();
    let Some([head, body, foot]) = bands(area) else { return };
    let pen = Pen { colour: view.colour };
    let title = Span::styled("kedge cache top", pen.heading());
    let mut spans = vec![title, Span::raw(format!("  {}", counted(board.caches.len())))];
    if let Some(seconds) = view.stale {
        let text = format!("  no figures for {}", words::time(seconds));
        spans.push(Span::styled(text, pen.of(Look::Bad)));
    }
    line(buffer, head, Line::from(spans));
    line(buffer, foot, footer(view, pen));
    let others: usize = COLUMNS.iter().map(|(_, width)| width + 2).sum();
    let mut rows = lines(board, usize::from(area.width).saturating_sub(others).max(NAME));
    let (top, body) = cut(body, 1);
    line(buffer, top, drawn(rows.remove(0), pen));
    let at = view.at(board);
    // The last line of the chosen one is there, and its first one if there is room for all.
    let last = rows.iter().rposition(|row| row.of == at).unwrap_or(0);
    let begins = rows.iter().position(|row| row.of == at).unwrap_or(0);
    let first = (last + 1).saturating_sub(body.height.into()).min(begins);
    for (number, (row, place)) in rows.into_iter().skip(first).zip(body.rows()).enumerate() {
        line(buffer, place, drawn(row, pen));
        if at.is_some() && number + first == begins {
            buffer.set_style(place, pen.chosen());
        }
    }
    if view.help {
        list_keys(buffer, area, pen, KEYS.iter().map(|(shown, _, does)| (*shown, *does)));
    }
}

fn counted(caches: usize) -> String {
    format!("{caches} {}", if caches == 1 { "cache" } else { "caches" })
}

fn drawn(row: Row, pen: Pen) -> Line<'static> {
    Line::from_iter(row.cells.into_iter().map(|(look, text)| Span::styled(text, pen.of(look))))
}

fn footer(view: &View, pen: Pen) -> Line<'static> {
    if let Some((bad, note)) = &view.note {
        let look = if *bad { Look::Bad } else { Look::Plain };
        return Line::from(Span::styled(words::escaped(note), pen.of(look)));
    }
    let named = KEYS.iter().filter(|(_, word, _)| !word.is_empty());
    Line::from_iter(named.flat_map(|(shown, word, _)| {
        let first = shown.split(' ').next().unwrap_or_default();
        [Span::styled(first, pen.heading()), Span::raw(format!(" {word}  "))]
    }))
}
