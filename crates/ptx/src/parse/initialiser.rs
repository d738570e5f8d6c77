//! Parses the initialisers of variables: constants, nested braces and addresses.

use super::number::Number;
use super::{MAX_INITIALISED, Parser, Result};
use crate::ast::{Relocation, Type, Variable};
use crate::lexer::Token;

/// The part of a variable that one pair of braces fills: the bytes from `at` to `end`. Its elements
/// have the dimensions from `level` on.
#[derive(Debug, Clone, Copy)]
struct Region {
    at: u64,
    end: u64,
    level: usize,
}

impl<'a> Parser<'a> {
    /// Parses the initialiser after `=`, which also sets the first dimension of an array without
    /// one.
    pub(super) fn initialiser(&mut self, variable: &mut Variable) -> Result<()> {
        let unsized_array = variable.dims.first() == Some(&0);
        let mut shape = variable.dims.clone();
        if variable.lanes > 1 {
            shape.push(u64::from(variable.lanes));
        }
        if !self.at(b'{') {
            return self.scalar(variable, 0);
        }
        let end = if unsized_array { MAX_INITIALISED } else { variable.size() };
        let filled = self.braces(variable, &shape, Region { at: 0, end, level: 0 })?;
        if unsized_array {
            let stride = stride(variable.ty, &shape[1..]).max(1);
            variable.dims[0] = filled.div_ceil(stride);
        }
        Ok(())
    }

    /// Parses `{ a, { b, c }, … }`, and returns the offset of its end. Inner braces may be left
    /// out, as in C.
    fn braces(&mut self, variable: &mut Variable, shape: &[u64], region: Region) -> Result<u64> {
        self.expect(b'{')?;
        let inner = shape.get(region.level + 1..).unwrap_or_default();
        let mut at = region.at;
        while !self.eat(b'}')? {
            let nested = self.at(b'{');
            let step = stride(variable.ty, if nested { inner } else { &[] });
            if at.saturating_add(step) > region.end {
                return Err(self.error("more initialisers than the variable holds"));
            }
            if nested {
                let part = Region { at, end: at + step, level: region.level + 1 };
                self.nested(|parser| parser.braces(variable, shape, part))?;
            } else {
                self.scalar(variable, at)?;
            }
            at += step;
            if !self.eat(b',')? {
                self.expect(b'}')?;
                break;
            }
        }
        Ok(at)
    }

    /// Parses one element at byte offset `at`.
    fn scalar(&mut self, variable: &mut Variable, at: u64) -> Result<()> {
        let size = variable.ty.size();
        if let Token::Ident(name) = self.token
            && name != "WARP_SZ"
        {
            let relocation = self.symbol_address(at, size)?;
            return self.relocate(variable, relocation);
        }
        let value = self.expression()?;
        if self.at(b'(') {
            let relocation = self.masked_address(value, at)?;
            return self.relocate(variable, relocation);
        }
        let Some(bytes) = encode(value, variable.ty) else {
            return Err(self.error("constant does not fit the variable's type, before this"));
        };
        self.store(variable, at, &bytes[..size as usize])
    }

    /// Parses `sym`, `sym+8` or `generic(sym)+8`, an address at byte `offset` that takes `size`
    /// bytes.
    fn symbol_address(&mut self, offset: u64, size: u32) -> Result<Relocation> {
        let line = self.line;
        let mut symbol = self.identifier("a symbol")?;
        let generic = symbol == "generic" && self.eat(b'(')?;
        let mut addend = 0;
        if generic {
            symbol = self.identifier("a symbol")?;
            addend = self.addend()?;
            self.expect(b')')?;
        }
        addend = self.addend()?.wrapping_add(addend);
        self.undeclared.push((symbol, line));
        Ok(Relocation { offset, size, shift: 0, symbol: symbol.to_owned(), addend, generic })
    }

    /// Parses `+8`, `-8` or nothing.
    pub(super) fn addend(&mut self) -> Result<i64> {
        match self.token {
            // The expression reads the sign itself.
            Token::Punct(b'+' | b'-') => self.constant("an offset"),
            _ => Ok(0),
        }
    }

    /// Parses the rest of `0xFF00(sym)`: the bytes of an address that the mask selects.
    fn masked_address(&mut self, mask: Number, at: u64) -> Result<Relocation> {
        let Number::Int { bits: mask, .. } = mask else {
            return Err(self.error("expected an integer mask before this"));
        };
        let shift = mask.trailing_zeros();
        let bits = mask.count_ones();
        let whole = bits > 0 && shift % 8 == 0 && bits % 8 == 0;
        if !whole || bits + shift + mask.leading_zeros() != u64::BITS {
            return Err(self.error(format!("mask {mask:#x} does not select whole bytes, before")));
        }
        self.expect(b'(')?;
        let mut relocation = self.symbol_address(at, bits / 8)?;
        relocation.shift = shift;
        self.expect(b')')?;
        relocation.addend = relocation.addend.wrapping_add(self.addend()?);
        Ok(relocation)
    }

    /// Stores zeros, and notes the relocation that fills them.
    fn relocate(&mut self, variable: &mut Variable, relocation: Relocation) -> Result<()> {
        let size = variable.ty.size();
        if relocation.size > size
            || !matches!(variable.ty, Type::B8 | Type::U8 | Type::S8) && size < 4
        {
            return Err(self.error("an address does not fit the variable's type, before this"));
        }
        self.store(variable, relocation.offset, &[0; 16][..size as usize])?;
        variable.relocations.push(relocation);
        Ok(())
    }

    /// Stores an element's bytes at offset `at`.
    fn store(&mut self, variable: &mut Variable, at: u64, bytes: &[u8]) -> Result<()> {
        let end = at + bytes.len() as u64;
        let grown = end.saturating_sub(variable.init.len() as u64);
        self.initialised = self.initialised.saturating_add(grown);
        if self.initialised > MAX_INITIALISED {
            return Err(self.error("initialisers above 1 GiB"));
        }
        // Elements come in the order of their offsets; gaps are zeros.
        variable.init.resize(at as usize, 0);
        variable.init.extend_from_slice(bytes);
        Ok(())
    }
}

/// Returns the bytes of an element of the given shape.
fn stride(ty: Type, shape: &[u64]) -> u64 {
    shape.iter().fold(u64::from(ty.size()), |size, dim| size.saturating_mul(*dim))
}

/// Returns a constant's bytes as a variable of type `ty` stores them, low bytes first; `None` if
/// the type cannot hold it.
fn encode(value: Number, ty: Type) -> Option<[u8; 16]> {
    let bits = match (ty, value) {
        // The bits as given: a NaN keeps its payload.
        (Type::F32 | Type::Tf32 | Type::B32, Number::F32(bits)) => u128::from(bits),
        (Type::F64 | Type::B64, Number::F64(bits)) => u128::from(bits),
        (Type::F32 | Type::Tf32, _) => u128::from((to_f64(value) as f32).to_bits()),
        (Type::F64, _) => u128::from(to_f64(value).to_bits()),
        (_, Number::Int { bits, unsigned: true }) => u128::from(bits),
        (_, Number::Int { bits, unsigned: false }) => i128::from(bits as i64) as u128,
        _ => return None,
    };
    Some(bits.to_le_bytes())
}

fn to_f64(value: Number) -> f64 {
    match value {
        Number::Int { bits, unsigned: true } => bits as f64,
        Number::Int { bits, unsigned: false } => bits as i64 as f64,
        Number::F32(bits) => f64::from(f32::from_bits(bits)),
        Number::F64(bits) => f64::from_bits(bits),
    }
}
