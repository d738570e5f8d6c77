//! Tokens of PTX text. Works on bytes and borrows from the text; ends at the text's end or at the
//! first NUL, because fatbins store PTX as a C string.

use crate::ParseError;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Token<'a> {
    /// An identifier, `%` and `$` included.
    Ident(&'a str),
    /// A dotted word, without its dot: `.b32` is `b32`, `.L1::evict_last` keeps its colons.
    Dot(&'a str),
    /// A literal as written; `number` reads it.
    Number(&'a str),
    /// A quoted string, without its quotes.
    Str(&'a str),
    Punct(u8),
    /// A two-character operator of constant expressions.
    Operator([u8; 2]),
    End,
}

impl Token<'_> {
    /// How an error message shows it.
    pub(crate) fn shown(&self) -> String {
        match self {
            Self::Ident(word) | Self::Number(word) => format!("'{word}'"),
            Self::Dot(word) => format!("'.{word}'"),
            Self::Str(text) => format!("\"{text}\""),
            Self::Punct(byte) => format!("'{}'", byte.escape_ascii()),
            Self::Operator(bytes) => format!("'{}'", bytes.escape_ascii()),
            Self::End => "the end of the text".into(),
        }
    }
}

const SPACE: u8 = 1;
const DIGIT: u8 = 2;
/// Starts an identifier (as do `%`, `$`, `_`).
const LETTER: u8 = 4;
/// Continues one, and so does a digit.
const WORD: u8 = 8;

/// Class bits of each byte.
static CLASS: [u8; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let c = byte as u8;
        table[byte] = match c {
            b' ' | b'\t' | b'\r' | b'\n' | 0x0b | 0x0c => SPACE,
            b'0'..=b'9' => DIGIT | WORD,
            b'a'..=b'z' | b'A'..=b'Z' | b'_' | b'$' => LETTER | WORD,
            b'%' => LETTER,
            _ => 0,
        };
        byte += 1;
    }
    table
};

fn is(byte: u8, class: u8) -> bool {
    CLASS[usize::from(byte)] & class != 0
}

pub(crate) struct Lexer<'a> {
    text: &'a str,
    at: usize,
    line: u32,
}

impl<'a> Lexer<'a> {
    pub(crate) fn new(text: &'a str) -> Self {
        Self { text, at: 0, line: 1 }
    }

    /// Line of the token that was read last.
    pub(crate) fn line(&self) -> u32 {
        self.line
    }

    /// The byte at a distance from the current place; 0 past the end.
    fn byte(&self, ahead: usize) -> u8 {
        self.text.as_bytes().get(self.at + ahead).copied().unwrap_or(0)
    }

    pub(crate) fn next(&mut self) -> Result<Token<'a>, ParseError> {
        self.skip_blanks()?;
        let byte = self.byte(0);
        if is(byte, LETTER) {
            // `%` alone is the remainder operator.
            if byte == b'%' && !is(self.byte(1), WORD) {
                self.at += 1;
                return Ok(Token::Punct(byte));
            }
            return Ok(Token::Ident(self.take_words(1)));
        }
        match byte {
            0 => Ok(Token::End),
            b'.' if is(self.byte(1), WORD) => Ok(self.dotted()),
            b'"' => self.string(),
            _ if is(byte, DIGIT) => Ok(self.number()),
            _ => Ok(self.punctuation(byte)),
        }
    }

    fn skip_blanks(&mut self) -> Result<(), ParseError> {
        loop {
            match self.byte(0) {
                b'\n' => {
                    self.line += 1;
                    self.at += 1;
                }
                byte if is(byte, SPACE) => self.at += 1,
                b'/' if self.byte(1) == b'/' => self.skip_line(),
                b'/' if self.byte(1) == b'*' => self.skip_block_comment()?,
                // What a preprocessor left: `# 1 "file"`.
                b'#' => self.skip_line(),
                _ => return Ok(()),
            }
        }
    }

    fn skip_line(&mut self) {
        let rest = &self.text.as_bytes()[self.at..];
        self.at += rest.iter().position(|byte| matches!(byte, b'\n' | 0)).unwrap_or(rest.len());
    }

    fn skip_block_comment(&mut self) -> Result<(), ParseError> {
        let Some(length) = self.text[self.at + 2..].find("*/") else {
            return Err(ParseError::new(self.line, "comment without an end", "'/*'"));
        };
        let end = self.at + 2 + length + 2;
        self.count_lines(end);
        self.at = end;
        Ok(())
    }

    fn count_lines(&mut self, end: usize) {
        let lines = self.text.as_bytes()[self.at..end].iter().filter(|byte| **byte == b'\n');
        self.line += lines.count() as u32;
    }

    /// A token of `skip` bytes and all word characters that follow.
    fn take_words(&mut self, skip: usize) -> &'a str {
        let start = self.at;
        self.at += skip;
        while is(self.byte(0), WORD) {
            self.at += 1;
        }
        &self.text[start..self.at]
    }

    fn dotted(&mut self) -> Token<'a> {
        self.at += 1;
        let start = self.at;
        self.take_words(0);
        while self.byte(0) == b':' && self.byte(1) == b':' && is(self.byte(2), WORD) {
            self.take_words(2);
        }
        Token::Dot(&self.text[start..self.at])
    }

    fn string(&mut self) -> Result<Token<'a>, ParseError> {
        let start = self.at + 1;
        let bytes = self.text.as_bytes();
        let mut end = start;
        while let Some(byte) = bytes.get(end) {
            match byte {
                b'"' => {
                    self.count_lines(end);
                    self.at = end + 1;
                    return Ok(Token::Str(&self.text[start..end]));
                }
                b'\\' => end += 2,
                _ => end += 1,
            }
        }
        Err(ParseError::new(self.line, "string without an end", "'\"'"))
    }

    /// An integer or float: `12U`, `0x1F`, `0f3F800000`, `1.5e-3`.
    fn number(&mut self) -> Token<'a> {
        let start = self.at;
        self.take_words(1);
        let bytes = self.text.as_bytes();
        if bytes[start..self.at].iter().all(u8::is_ascii_digit) && self.byte(0) == b'.' {
            self.take_words(1);
        }
        let prefixed = bytes[start] == b'0'
            && matches!(bytes.get(start + 1), Some(b'x' | b'X' | b'f' | b'F' | b'd' | b'D'));
        let exponent = matches!(bytes[self.at - 1], b'e' | b'E');
        if !prefixed && exponent && matches!(self.byte(0), b'+' | b'-') && is(self.byte(1), DIGIT) {
            self.take_words(2);
        }
        Token::Number(&self.text[start..self.at])
    }

    fn punctuation(&mut self, byte: u8) -> Token<'a> {
        self.at += 1;
        let next = self.byte(0);
        let double = match byte {
            b'<' | b'>' => next == byte || next == b'=',
            b'=' | b'!' => next == b'=',
            b'&' | b'|' => next == byte,
            _ => false,
        };
        if double {
            self.at += 1;
            return Token::Operator([byte, next]);
        }
        // A character that is no ASCII stays whole, so that slices stay on its boundaries.
        while !self.text.is_char_boundary(self.at) {
            self.at += 1;
        }
        Token::Punct(byte)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str) -> Vec<Token<'_>> {
        let mut lexer = Lexer::new(text);
        let mut all = Vec::new();
        loop {
            match lexer.next().unwrap() {
                Token::End => return all,
                token => all.push(token),
            }
        }
    }

    #[test]
    fn an_instruction_is_a_word_and_its_dotted_parts() {
        use Token::{Dot, Ident, Punct};
        assert_eq!(
            tokens("tex.1d.L1::no_allocate.v4 %r1, %tid.x;"),
            [
                Ident("tex"),
                Dot("1d"),
                Dot("L1::no_allocate"),
                Dot("v4"),
                Ident("%r1"),
                Punct(b','),
                Ident("%tid"),
                Dot("x"),
                Punct(b';')
            ]
        );
    }

    #[test]
    fn numbers_keep_their_form() {
        let all = ["12U", "0x1F", "0f3F800000", "1.5e-3", "2e+4", "0xe", "9.5"];
        let text = all.join(" ");
        assert_eq!(tokens(&text), all.map(Token::Number));
        assert_eq!(tokens("0xe-1"), [Token::Number("0xe"), Token::Punct(b'-'), Token::Number("1")]);
    }

    #[test]
    fn lines_are_counted_through_comments_and_strings() {
        let mut lexer = Lexer::new("// a\n/* b\n\n*/ \"x\ny\" # c\nend");
        assert_eq!(lexer.next().unwrap(), Token::Str("x\ny"));
        assert_eq!(lexer.next().unwrap(), Token::Ident("end"));
        assert_eq!(lexer.line(), 6);
    }

    #[test]
    fn what_does_not_end_is_an_error() {
        for text in ["/* a", "\"a", "\"a\\\""] {
            assert!(Lexer::new(text).next().is_err(), "{text}");
        }
    }

    #[test]
    fn a_nul_ends_the_text() {
        assert_eq!(tokens("a\0b"), [Token::Ident("a")]);
    }

    #[test]
    fn characters_beyond_ascii_are_punctuation() {
        assert_eq!(tokens("é").len(), 1);
    }
}
