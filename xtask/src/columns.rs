//! Comments and Markdown wrap at 100 columns, as rustfmt wraps code.

use std::path::Path;
use std::process::Command;

const COLUMNS: usize = 100;
/// Programs wrote these, or they are history.
const EXEMPT: [&str; 3] = ["docs/support.md", "docs/benchmarks.md", "docs/benchmarks-log.md"];

/// Fails with the lines that are longer and could be broken.
///
/// # Errors
/// Names each such line; or what could not be read.
pub(crate) fn check(root: &Path) -> Result<(), String> {
    let listed = Command::new("git").arg("-C").arg(root).arg("ls-files").output();
    let listed = listed.map_err(|error| format!("git ls-files: {error}"))?;
    let mut long = Vec::new();
    for file in String::from_utf8_lossy(&listed.stdout).lines().filter(|file| is_ours(file)) {
        // One that is removed and not yet committed is listed still.
        let Ok(text) = std::fs::read_to_string(root.join(file)) else { continue };
        let found = long_lines(&text, file.ends_with(".md"));
        long.extend(found.iter().map(|line| format!("{file}:{line}")));
    }
    match long.as_slice() {
        [] => Ok(()),
        long => Err(format!("longer than {COLUMNS} columns:\n{}", long.join("\n"))),
    }
}

fn is_ours(file: &str) -> bool {
    let kinds = [".rs", ".md", ".c", ".cu", ".cuh", ".h"];
    let ours = kinds.iter().any(|kind| file.ends_with(kind)) && !file.contains("/generated/");
    ours && !EXEMPT.contains(&file)
}

/// The numbers of the lines of prose that are too long.
fn long_lines(text: &str, markdown: bool) -> Vec<usize> {
    let mut code = false;
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let words = if markdown { line } else { line.trim_start().trim_start_matches('/') };
        let begun = words.trim_start_matches(['!', ' ']);
        if begun.starts_with("```") {
            code = !code;
        }
        let is_prose = match markdown {
            true => !code && !line.starts_with("    ") && !begun.starts_with(['|', '#']),
            // Tables and drawings are indented.
            false => line.trim_start().starts_with("//") && !code && !words.contains("  "),
        };
        if is_prose && line.chars().count() > COLUMNS && can_be_broken(line) {
            found.push(index + 1);
        }
    }
    found
}

/// Whether a word ends between the fourth column of its text and the last one that a line may have:
/// a long link cannot be broken, nor a picture.
fn can_be_broken(line: &str) -> bool {
    let words = line.trim_start_matches([' ', '/', '!', '[', '-', '*']);
    let indent = line.chars().count() - words.chars().count();
    !words.starts_with('<')
        && !line.trim_start().starts_with("![")
        && words.chars().take(COLUMNS - indent).skip(4).any(|c| c == ' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_prose_that_can_be_broken_is_told() {
        let word = "word ".repeat(21);
        let link = "x".repeat(120);
        let rust =
            format!("let x = 1; // {word}\n/// {word}\n/// {link}\n//! a  {word}\n    // {word}");
        assert_eq!(long_lines(&rust, false), [2, 5]);
        let page = format!("{word}\n| {word}\n# {word}\n```\n{word}\n```\n- {word}\n{link}\n");
        assert_eq!(long_lines(&page, true), [1, 7]);
    }
}
