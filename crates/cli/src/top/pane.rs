//! What is told of the chosen job, below the table.

use super::board::{self, Device, Job, Process};
use super::columns::Look;
use super::draw::{Pen, cut, fit, line};
use super::words;
use crate::time::Time;
use kedge_control::size::Size;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Widget};

/// A part: its title, and its lines, of which `from_end` may cut off the first ones.
struct Part {
    title: &'static str,
    lines: Vec<(Look, String)>,
    from_end: bool,
}

/// Draws it into an area of at least three lines.
pub(super) fn draw(buffer: &mut Buffer, area: Rect, job: &Job, now: u64, pen: Pen) {
    let title = format!(" {} ", words::escaped(&job.name));
    let block = Block::new().borders(Borders::TOP).title(Span::styled(title, pen.heading()));
    let inner = block.inner(area);
    block.render(area, buffer);
    let mut left = inner;
    let parts = [facts(job, now), devices(job), processes(job), log(job)];
    let lengths: Vec<usize> = parts.iter().map(|part| part.lines.len()).collect();
    let shares = shares(&lengths, inner.height.into());
    for (part, share) in parts.iter().zip(shares) {
        let (place, rest) = cut(left, u16::try_from(share).unwrap_or(u16::MAX));
        write(buffer, place, part, pen);
        left = rest;
    }
}

/// Lines of each part, title and all, where there are `height`. Facts come first and have what they
/// need; devices and processes have a third of the rest at most, unless the log needs less.
fn shares(lengths: &[usize], height: usize) -> Vec<usize> {
    let mut left = height;
    let mut shares = Vec::new();
    for (index, length) in lengths.iter().enumerate() {
        let most = if index == 0 || index + 1 == lengths.len() { left } else { (left / 3).max(2) };
        let share = (*length).min(most).min(left);
        shares.push(share);
        left -= share;
    }
    shares
}

fn write(buffer: &mut Buffer, area: Rect, part: &Part, pen: Pen) {
    let room = usize::from(area.height);
    let all = part.lines.len();
    let first = if part.from_end { all.saturating_sub(room) } else { 0 };
    let cut_off = !part.from_end && all > room && room > 0;
    for (number, row) in area.rows().enumerate() {
        let Some((look, text)) = part.lines.get(first + number) else { return };
        let is_last = number + 1 == room;
        let (look, text) = match cut_off && is_last {
            true => (Look::Dim, format!("… {} more", all - number)),
            false => (*look, text.clone()),
        };
        let title = if number == 0 { part.title } else { "" };
        let head = Span::styled(format!("{title:<10}"), pen.of(Look::Dim));
        let text = fit(&text, usize::from(row.width).saturating_sub(10));
        line(buffer, row, Line::from(vec![head, Span::styled(text, pen.of(look))]));
    }
}

fn facts(job: &Job, now: u64) -> Part {
    let plain = |text: String| (Look::Plain, text);
    let mut lines = vec![plain(words::escaped(&job.command.join(" ")))];
    if let Some(time) = job.silent {
        let time = words::time(time.as_secs());
        let text = format!("its supervisor has not answered for {time}: the state may be old");
        lines.push((Look::Bad, text));
    }
    if job.devices.silent > 0 {
        let text = format!("{} of its proxies do not answer", job.devices.silent);
        lines.push((Look::Bad, text));
    }
    if let Some(image) = &job.image {
        let name = image.image.file_name().unwrap_or_default().to_string_lossy();
        lines.push(plain(format!(
            "{}, {}, {} ago, stood still {}",
            words::escaped(&name),
            Size(image.bytes),
            words::time(now.saturating_sub(image.captured)),
            words::pause(image.stall_seconds)
        )));
    } else {
        lines.push((Look::Dim, "no image".into()));
    }
    let mut counts =
        format!("{} checkpoints, {} failed", job.checkpoints.durable, job.checkpoints.failed);
    if let (Some(interval), Some(next)) = (job.interval, job.next) {
        let next = words::time(next.saturating_sub(now));
        counts.push_str(&format!("; every {}, the next in {next}", Time(interval)));
    }
    if let Some(held) = &job.held {
        let bytes = held.on_devices.saturating_add(held.in_memory);
        counts.push_str(&format!("; {} held in memory", Size(bytes)));
    }
    lines.push(plain(counts));
    if let Some(failure) = board::failure(job) {
        let ago = words::time(now.saturating_sub(failure.at));
        lines.push((Look::Bad, format!("failed {ago} ago: {}", words::escaped(&failure.why))));
    }
    Part { title: "job", lines, from_end: false }
}

fn devices(job: &Job) -> Part {
    let line = |device: &Device| {
        let used = device.used.map_or_else(|| "?".to_owned(), words::size);
        let (size, name) = (words::size(device.size), words::escaped(&device.name));
        let place = words::escaped(&device.place);
        (Look::Plain, format!("{used:>4} of {size:<4}  {place}: {name}"))
    };
    let mut lines: Vec<_> = job.devices.each.iter().map(line).collect();
    if lines.is_empty() {
        let why = if job.gpu == "none" { "none" } else { "none is used as yet" };
        lines.push((Look::Dim, why.into()));
    }
    Part { title: "devices", lines, from_end: false }
}

fn processes(job: &Job) -> Part {
    let line = |process: &Process| {
        let percent = process
            .processor_percent
            .map_or_else(|| "-".to_owned(), |percent| format!("{percent:.0}%"));
        let memory = words::size(process.resident);
        let text = format!(
            "{:>7} {percent:>5} {memory:>5}  {}",
            process.pid,
            words::escaped(&process.name)
        );
        (if process.kedge { Look::Dim } else { Look::Plain }, text)
    };
    // The program's first.
    let (kedge, program): (Vec<_>, Vec<_>) = job.processes.iter().partition(|one| one.kedge);
    let lines = program.into_iter().chain(kedge).map(line).collect();
    Part { title: "processes", lines, from_end: false }
}

fn log(job: &Job) -> Part {
    let line = |text: &String| (Look::Plain, words::escaped(without_date(text)));
    Part { title: "log", lines: job.tail.iter().map(line).collect(), from_end: true }
}

/// A line without its date: `19:35:00 proxy[12]: text`.
fn without_date(line: &str) -> &str {
    let is_date = |date: &str| {
        date.len() == 10 && date.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-')
    };
    match line.split_once('T') {
        Some((date, rest)) if is_date(date) => rest,
        _ => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_shared_out() {
        assert_eq!(shares(&[3, 1, 2, 5], 30), [3, 1, 2, 5], "all of it");
        assert_eq!(shares(&[3, 9, 40, 50], 15), [3, 4, 2, 6]);
        assert_eq!(shares(&[3, 1, 2, 5], 2), [2, 0, 0, 0]);
        for height in 0..40 {
            assert!(shares(&[4, 16, 500, 100], height).iter().sum::<usize>() <= height);
        }
    }

    #[test]
    fn log_lines_begin_with_the_time() {
        let line = "2026-11-20T19:35:00.123Z kedge[1]: note: x";
        assert_eq!(without_date(line), "19:35:00.123Z kedge[1]: note: x");
        assert_eq!(without_date("The end"), "The end");
    }
}
