//! What commands print: aligned, in colours on a terminal, plain in a pipe; JSON for scripts.

use anstyle::{AnsiColor, Style};
pub(crate) use kedge_control::text::harmless;
use serde::Serialize;
use std::io::{self, IsTerminal, Write};

pub(crate) const PLAIN: Style = Style::new();
pub(crate) const HEADING: Style = Style::new().bold();
pub(crate) const DIM: Style = Style::new().dimmed();
pub(crate) const GOOD: Style = AnsiColor::Green.on_default();
pub(crate) const FAIR: Style = AnsiColor::Yellow.on_default();
pub(crate) const BAD: Style = AnsiColor::Red.on_default();

/// Writes `text` to stdout, colours only if it is a terminal. A reader that has gone away, such as
/// `head`, has read what it wanted.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut out = anstream::stdout().lock();
    forgive(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// Writes `value` to stdout as indented JSON.
pub(crate) fn json(value: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    let mut out = io::stdout().lock();
    forgive(out.write_all(&text).and_then(|()| out.flush()))
}

/// Writes a line to stderr, as kedge's. Whoever has closed his end of it is not told.
pub(crate) fn complain(line: &str) {
    let _ = writeln!(anstream::stderr(), "kedge: {line}");
}

/// Writes a line to stderr, if that is a terminal: what a person wants to see, and no script.
pub(crate) fn tell(line: &str) {
    let mut out = anstream::stderr();
    if io::stderr().is_terminal() {
        let _ = writeln!(out, "{}", styled(DIM, line));
    }
}

fn forgive(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// `text` in `style`.
pub(crate) fn styled(style: Style, text: &str) -> String {
    format!("{style}{text}{style:#}")
}

/// Rows in columns.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: Vec<Vec<(Style, String)>>,
    /// Columns that hold numbers.
    right: Vec<usize>,
}

impl Table {
    /// `right` names the columns that align to the right.
    pub(crate) fn new(headings: &[&str], right: &[usize]) -> Table {
        let heading = headings.iter().map(|text| (HEADING, (*text).to_owned())).collect();
        Table { rows: vec![heading], right: right.to_vec() }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = (Style, String)>) {
        self.rows.push(cells.into_iter().collect());
    }

    pub(crate) fn render(&self) -> String {
        let width = |text: &str| text.chars().count();
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns)
            .map(|column| {
                let cells = self.rows.iter().filter_map(|row| row.get(column));
                cells.map(|(_, text)| width(text)).max().unwrap_or(0)
            })
            .collect();
        let mut out = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (column, (style, text)) in row.iter().enumerate() {
                let pad = " ".repeat(widths[column].saturating_sub(width(text)));
                let text = if *style == PLAIN { text.clone() } else { styled(*style, text) };
                match self.right.contains(&column) {
                    true => line.extend([pad, text]),
                    false => line.extend([text, pad]),
                }
                line.push_str("  ");
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align() {
        let mut table = Table::new(&["NAME", "N"], &[1]);
        table.row([(PLAIN, "µ".into()), (PLAIN, "1".into())]);
        table.row([(GOOD, "longer".into()), (PLAIN, "100".into())]);
        let text = anstream::adapter::strip_str(&table.render()).to_string();
        assert_eq!(text, "NAME      N\nµ         1\nlonger  100\n");
    }
}
