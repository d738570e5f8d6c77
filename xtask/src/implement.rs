//! Sets the class and gate of symbols in the table, in place.

use crate::table::{COLUMNS, Class, FUNCTIONS, Gate};
use std::error::Error;
use std::fs::{self, File};
use std::path::Path;

const SYMBOL: usize = 1;
const CLASS: usize = 5;
const GATE: usize = 6;

pub(crate) fn run(
    root: &Path,
    class: &str,
    gate: &str,
    symbols: &[&str],
) -> Result<(), Box<dyn Error>> {
    Class::parse(class).ok_or_else(|| format!("no such class: `{class}`"))?;
    Gate::parse(gate).ok_or_else(|| format!("no such gate: `{gate}`"))?;
    let path = root.join(FUNCTIONS);
    // Two invocations at once must not lose each other's rows.
    let lock = File::open(&path)?;
    lock.lock()?;
    let mut missing = symbols.to_vec();
    let mut text = String::new();
    for line in fs::read_to_string(&path)?.lines() {
        let cells: Vec<&str> = line.splitn(COLUMNS, '|').collect();
        let symbol = cells.get(SYMBOL).map_or("", |cell| cell.trim());
        if cells.len() == COLUMNS && !line.starts_with('#') && symbols.contains(&symbol) {
            missing.retain(|name| *name != symbol);
            text.push_str(&with_cells(&cells, class, gate));
        } else {
            text.push_str(line);
        }
        text.push('\n');
    }
    if !missing.is_empty() {
        return Err(format!("not in {FUNCTIONS}: {}", missing.join(" ")).into());
    }
    // In place, so that the lock stays on the file that the next invocation opens.
    fs::write(&path, text)?;
    Ok(())
}

fn with_cells(cells: &[&str], class: &str, gate: &str) -> String {
    let mut row: Vec<String> = cells.iter().map(|cell| (*cell).to_owned()).collect();
    for (column, word) in [(CLASS, class), (GATE, gate)] {
        let width = cells[column].len().saturating_sub(2);
        row[column] = format!(" {word:width$} ");
    }
    row.join("|")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_columns_aligned() {
        let cells: Vec<&str> =
            "1 | a | a | 2 | plain | unsupported | none    | m | void".split('|').collect();
        let row = with_cells(&cells, "post", "healthy");
        assert_eq!(row, "1 | a | a | 2 | plain | post        | healthy | m | void");
    }
}
