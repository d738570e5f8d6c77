//! Why a text is not PTX that kedge understands.

/// Where the parser stopped, what it needed there and what it saw instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("PTX line {line}: {what}, found {found}")]
pub struct ParseError {
    /// Line of the text, from 1.
    pub line: u32,
    /// What is wrong, for instance `expected ';'`.
    pub what: String,
    /// The text that stands there, shortened.
    pub found: String,
}

/// Most of a token that a message repeats.
const SHOWN: usize = 40;

impl ParseError {
    pub(crate) fn new(line: u32, what: impl Into<String>, found: &str) -> Self {
        let mut shown: String = found.chars().take(SHOWN).collect();
        if shown.len() < found.len() {
            shown.push('…');
        }
        Self { line, what: what.into(), found: shown }
    }
}
