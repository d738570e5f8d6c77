//! The PTX parser.

use crate::{ParseError, ast::Module};

/// Parses one PTX module.
///
/// The text ends at its end or at its first NUL.
///
/// # Errors
/// The first construct that is not PTX, or that exceeds a bound, with its line.
pub fn parse(text: &str) -> Result<Module, ParseError> {
    let _ = text;
    Err(ParseError { line: 1, what: "parser not landed yet".into(), found: String::new() })
}
