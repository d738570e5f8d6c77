//! Integer and floating-point literals.

/// A literal's value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Number {
    /// `unsigned` is `.u64`: a `U` suffix, or too large for `.s64`.
    Int { bits: u64, unsigned: bool },
    /// Bits of an `0f` constant.
    F32(u32),
    /// Bits of an `0d` or decimal constant.
    F64(u64),
}

/// Reads a literal; None where it is none or does not fit 64 bits.
pub(super) fn parse_number(text: &str) -> Option<Number> {
    let (head, rest) = text.split_at_checked(2).unwrap_or((text, ""));
    match head {
        "0f" | "0F" if rest.len() == 8 => Some(Number::F32(hex(rest)?.try_into().ok()?)),
        "0d" | "0D" if rest.len() == 16 => Some(Number::F64(hex(rest)?)),
        "0x" | "0X" => integer(rest, 16),
        "0b" | "0B" => integer(rest, 2),
        _ if text.bytes().any(|byte| matches!(byte, b'.' | b'e' | b'E')) => {
            Some(Number::F64(text.parse::<f64>().ok()?.to_bits()))
        }
        _ if text.len() > 1 && text.starts_with('0') => integer(&text[1..], 8),
        _ => integer(text, 10),
    }
}

/// Hexadecimal digits alone: `from_str_radix` would take a sign.
fn hex(digits: &str) -> Option<u64> {
    let all = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    all.then(|| u64::from_str_radix(digits, 16).ok())?
}

fn integer(digits: &str, radix: u32) -> Option<Number> {
    let bare = digits.strip_suffix('U');
    // `0U` reaches this as octal with no digits left.
    let text = match bare.unwrap_or(digits) {
        "" if radix == 8 => "0",
        text => text,
    };
    if text.starts_with('+') {
        return None;
    }
    let bits = u64::from_str_radix(text, radix).ok()?;
    Some(Number::Int { bits, unsigned: bare.is_some() || bits > i64::MAX as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn int(text: &str) -> Option<u64> {
        match parse_number(text)? {
            Number::Int { bits, .. } => Some(bits),
            _ => None,
        }
    }

    #[test]
    fn integers_in_each_radix() {
        assert_eq!(int("42"), Some(42));
        assert_eq!(int("0x2A"), Some(42));
        assert_eq!(int("052"), Some(42));
        assert_eq!(int("0b101010U"), Some(42));
        assert_eq!(int("0"), Some(0));
        assert_eq!(int("0U"), Some(0));
        assert_eq!(int("0xFFFFFFFFFFFFFFFF"), Some(u64::MAX));
    }

    #[test]
    fn large_and_suffixed_ones_are_unsigned() {
        for (text, is) in [("1", false), ("1U", true), ("0x8000000000000000", true)] {
            let Some(Number::Int { unsigned, .. }) = parse_number(text) else { panic!("{text}") };
            assert_eq!(unsigned, is, "{text}");
        }
    }

    #[test]
    fn floats_are_bits() {
        assert_eq!(parse_number("0f3F800000"), Some(Number::F32(0x3f80_0000)));
        assert_eq!(parse_number("0d3FF0000000000000"), Some(Number::F64(1f64.to_bits())));
        assert_eq!(parse_number("1.5e1"), Some(Number::F64(15f64.to_bits())));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in
            ["0x", "08", "12a", "0x1FFFFFFFFFFFFFFFF", "1.2.3", "0b2", "99999999999999999999"]
        {
            assert_eq!(parse_number(text), None, "{text}");
        }
    }
}
