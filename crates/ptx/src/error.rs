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
