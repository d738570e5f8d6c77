//! Constant expressions (PTX ISA, "Constant Expressions"): C's operators over `.s64` and `.u64`.

use super::number::{Number, parse_number};
use super::{Parser, Result};
use crate::lexer::Token;

/// Threads of a warp: the value of `WARP_SZ`.
const WARP_SIZE: u64 = 32;

fn truth(value: bool) -> Number {
    signed(i64::from(value))
}

fn signed(value: i64) -> Number {
    Number::Int { bits: value as u64, unsigned: false }
}

fn negated(value: Number) -> Number {
    match value {
        Number::Int { bits, unsigned } => Number::Int { bits: bits.wrapping_neg(), unsigned },
        Number::F32(bits) => Number::F32(bits ^ 1 << 31),
        Number::F64(bits) => Number::F64(bits ^ 1 << 63),
    }
}

impl Parser<'_> {
    /// A constant that is an integer; what it is for goes into the error.
    pub(super) fn constant(&mut self, what: &str) -> Result<i64> {
        match self.expression()? {
            Number::Int { bits, .. } => Ok(bits as i64),
            _ => Err(self.error(format!("expected an integer as {what} before this"))),
        }
    }

    pub(super) fn constant_u32(&mut self, what: &str) -> Result<u32> {
        let value = self.constant(what)?;
        u32::try_from(value).map_err(|_| self.error(format!("{value} is out of range as {what}")))
    }

    pub(super) fn expression(&mut self) -> Result<Number> {
        self.nested(|parser| {
            let condition = parser.binary(0)?;
            if !parser.eat(b'?')? {
                return Ok(condition);
            }
            let yes = parser.expression()?;
            parser.expect(b':')?;
            let no = parser.expression()?;
            let (bits, _) = parser.integer(condition)?;
            Ok(if bits != 0 { yes } else { no })
        })
    }

    /// Precedence climbing: all operators that bind at least as tightly as `least`.
    fn binary(&mut self, least: u8) -> Result<Number> {
        let left = self.unary()?;
        self.binary_from(left, least)
    }

    /// The expression that goes on after `left`.
    fn binary_from(&mut self, mut left: Number, least: u8) -> Result<Number> {
        while let Some((level, operator)) = self.binary_operator() {
            if level < least {
                break;
            }
            self.advance()?;
            let right = self.nested(|parser| parser.binary(level + 1))?;
            left = self.apply(operator, left, right)?;
        }
        Ok(left)
    }

    /// The operator that is looked at, with its level (higher binds tighter).
    fn binary_operator(&self) -> Option<(u8, [u8; 2])> {
        let (level, operator) = match self.token {
            Token::Operator(operator) => {
                let level = match &operator {
                    b"||" => 1,
                    b"&&" => 2,
                    b"==" | b"!=" => 6,
                    b"<=" | b">=" => 7,
                    _ => 8,
                };
                (level, operator)
            }
            Token::Punct(byte) => {
                let level = match byte {
                    b'|' => 3,
                    b'^' => 4,
                    b'&' => 5,
                    b'<' | b'>' => 7,
                    b'+' | b'-' => 9,
                    b'*' | b'/' | b'%' => 10,
                    _ => return None,
                };
                (level, [byte, 0])
            }
            _ => return None,
        };
        Some((level, operator))
    }

    fn unary(&mut self) -> Result<Number> {
        let Token::Punct(operator @ (b'+' | b'-' | b'!' | b'~')) = self.token else {
            return self.primary();
        };
        self.advance()?;
        let value = self.nested(Self::unary)?;
        match operator {
            b'+' => Ok(value),
            b'-' => Ok(negated(value)),
            _ => {
                let (bits, unsigned) = self.integer(value)?;
                let inverted = Number::Int { bits: !bits, unsigned };
                Ok(if operator == b'~' { inverted } else { truth(bits == 0) })
            }
        }
    }

    /// An expression whose leading minus has been read.
    pub(super) fn negative_expression(&mut self) -> Result<Number> {
        let first = self.nested(Self::unary)?;
        self.binary_from(negated(first), 0)
    }

    fn primary(&mut self) -> Result<Number> {
        match self.token {
            Token::Number(text) => {
                let Some(value) = parse_number(text) else {
                    return Err(self.error("malformed number"));
                };
                self.advance()?;
                Ok(value)
            }
            Token::Ident("WARP_SZ") => {
                self.advance()?;
                Ok(signed(WARP_SIZE as i64))
            }
            Token::Punct(b'(') => {
                self.advance()?;
                if let Token::Dot(cast @ ("s64" | "u64")) = self.token {
                    self.advance()?;
                    self.expect(b')')?;
                    let value = self.nested(Self::unary)?;
                    let (bits, _) = self.integer(value)?;
                    return Ok(Number::Int { bits, unsigned: cast == "u64" });
                }
                let value = self.expression()?;
                self.expect(b')')?;
                Ok(value)
            }
            _ => Err(self.error("expected a constant")),
        }
    }

    fn integer(&self, value: Number) -> Result<(u64, bool)> {
        match value {
            Number::Int { bits, unsigned } => Ok((bits, unsigned)),
            _ => Err(self.error("operator on a floating-point constant before this")),
        }
    }

    fn apply(&self, operator: [u8; 2], left: Number, right: Number) -> Result<Number> {
        let (a, a_unsigned) = self.integer(left)?;
        let (b, b_unsigned) = self.integer(right)?;
        let unsigned = a_unsigned || b_unsigned;
        let int = |bits| Number::Int { bits, unsigned };
        let less = |a: u64, b: u64| if unsigned { a < b } else { (a as i64) < b as i64 };
        Ok(match &operator {
            b"||" => truth(a != 0 || b != 0),
            b"&&" => truth(a != 0 && b != 0),
            b"==" => truth(a == b),
            b"!=" => truth(a != b),
            b"<=" => truth(!less(b, a)),
            b">=" => truth(!less(a, b)),
            b"<\0" => truth(less(a, b)),
            b">\0" => truth(less(b, a)),
            b"|\0" => int(a | b),
            b"^\0" => int(a ^ b),
            b"&\0" => int(a & b),
            b"+\0" => int(a.wrapping_add(b)),
            b"-\0" => int(a.wrapping_sub(b)),
            b"*\0" => int(a.wrapping_mul(b)),
            // A shift keeps its left side's type; one by 64 or more leaves only the sign.
            b"<<" => Number::Int { bits: shift(b).map_or(0, |b| a << b), unsigned: a_unsigned },
            b">>" if a_unsigned => {
                Number::Int { bits: shift(b).map_or(0, |b| a >> b), unsigned: true }
            }
            b">>" => signed((a as i64) >> shift(b).unwrap_or(63)),
            b"/\0" | b"%\0" if b == 0 => return Err(self.error("division by zero before this")),
            b"/\0" if unsigned => int(a / b),
            b"%\0" if unsigned => int(a % b),
            b"/\0" => signed((a as i64).wrapping_div(b as i64)),
            _ => signed((a as i64).wrapping_rem(b as i64)),
        })
    }
}

fn shift(by: u64) -> Option<u32> {
    u32::try_from(by).ok().filter(|by| *by < u64::BITS)
}
