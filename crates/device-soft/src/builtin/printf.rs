//! Device `printf`.
//!
//! nvcc compiles it to `vprintf(format, arguments)`: the arguments lie one after the other, each
//! aligned to its size, 4 or 8 bytes. The C library does each conversion, so the output is what the
//! host of a real device would print (CUDA programming guide, "Formatted Output").

use super::Call;
use crate::exec::Flow;
use kedge_protocol::OutputTarget;

/// The largest width and precision, in characters: one conversion must not print megabytes.
const MAX_FIELD: u32 = 4096;

/// Implements `int vprintf(const char *format, void *arguments)`: prints for each lane.
pub(super) fn vprintf(call: &mut Call<'_>) -> Result<(), Flow> {
    // Lanes usually share one format: it is read once.
    let mut format: Option<(u64, Vec<u8>)> = None;
    for lane in call.lanes() {
        let (addr, arguments) = (call.u64(lane, 0), call.u64(lane, 1));
        if addr == 0 {
            call.set_result(lane, (-1i32).to_le_bytes());
            continue;
        }
        if format.as_ref().is_none_or(|(read, _)| *read != addr) {
            format = Some((addr, call.string(lane, addr)?));
        }
        let text = format.as_ref().map_or(&[][..], |(_, text)| text);
        let mut source = LaneArguments { call, lane, next: arguments };
        let (out, count) = render(text, &mut source)?;
        call.services().print(OutputTarget::Stdout {}, &out);
        call.set_result(lane, count.to_le_bytes());
    }
    Ok(())
}

/// A source of a format's values, in order.
trait Arguments {
    /// Returns the next value of 4 bytes.
    fn word(&mut self) -> Result<u32, Flow>;
    /// Returns the next value of 8 bytes.
    fn wide(&mut self) -> Result<u64, Flow>;
    /// Reads the string at a generic address.
    fn string(&mut self, addr: u64) -> Result<Vec<u8>, Flow>;
}

struct LaneArguments<'a, 'w> {
    call: &'a mut Call<'w>,
    lane: usize,
    /// Generic address of the next argument, not yet aligned.
    next: u64,
}

impl LaneArguments<'_, '_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Flow> {
        let at = self.next.wrapping_add(N as u64 - 1) & !(N as u64 - 1);
        self.next = at.wrapping_add(N as u64);
        self.call.read(self.lane, at)
    }
}

impl Arguments for LaneArguments<'_, '_> {
    fn word(&mut self) -> Result<u32, Flow> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    fn wide(&mut self) -> Result<u64, Flow> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    fn string(&mut self, addr: u64) -> Result<Vec<u8>, Flow> {
        self.call.string(self.lane, addr)
    }
}

/// A conversion specification, between its `%` and its letter.
#[derive(Debug, Default, Clone, Copy)]
struct Spec {
    /// Which of [`FLAGS`] are set, in their order.
    flags: [bool; 5],
    width: Option<u32>,
    precision: Option<u32>,
    length: Length,
}

const FLAGS: [u8; 5] = *b"-+ #0";

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Length {
    Char,
    Short,
    #[default]
    Int,
    /// `l`, `ll`, `j`, `z` or `t`: 8 bytes on Linux.
    Long,
}

/// Returns the formatted text, and how many arguments it took.
fn render(format: &[u8], source: &mut dyn Arguments) -> Result<(Vec<u8>, i32), Flow> {
    let mut out = Vec::with_capacity(format.len() + 32);
    let mut count = 0;
    let mut rest = format;
    while let Some(percent) = rest.iter().position(|byte| *byte == b'%') {
        out.extend_from_slice(&rest[..percent]);
        let start = &rest[percent..];
        let mut cursor = &start[1..];
        let spec = Spec::parse(&mut cursor, source, &mut count)?;
        let letter = cursor.first().copied();
        rest = cursor.get(1..).unwrap_or_default();
        match letter {
            Some(b'%') => out.push(b'%'),
            Some(letter) if b"diouxXcpsfFeEgGaA".contains(&letter) => {
                count += 1;
                convert(&mut out, spec, letter, source)?;
            }
            // CUDA does not know this conversion, and prints it as it stands.
            _ => out.extend_from_slice(&start[..start.len() - rest.len()]),
        }
    }
    out.extend_from_slice(rest);
    Ok((out, count))
}

impl Spec {
    /// Parses what follows the `%`; `cursor` then begins with the letter.
    fn parse(
        cursor: &mut &[u8],
        source: &mut dyn Arguments,
        count: &mut i32,
    ) -> Result<Self, Flow> {
        let mut spec = Self::default();
        while let Some(flag) = cursor.first().and_then(|c| FLAGS.iter().position(|f| f == c)) {
            spec.flags[flag] = true;
            *cursor = &cursor[1..];
        }
        if let Some(width) = number(cursor, source, count)? {
            // A negative width from `*` is the `-` flag and its absolute value.
            spec.flags[0] |= width < 0;
            spec.width = Some(width.unsigned_abs().min(MAX_FIELD));
        }
        if let Some(after) = cursor.strip_prefix(b".") {
            *cursor = after;
            let precision = number(cursor, source, count)?.unwrap_or(0);
            spec.precision = u32::try_from(precision).ok().map(|p| p.min(MAX_FIELD));
        }
        for (prefix, length) in [
            (&b"hh"[..], Length::Char),
            (b"h", Length::Short),
            (b"ll", Length::Long),
            (b"l", Length::Long),
            (b"j", Length::Long),
            (b"z", Length::Long),
            (b"t", Length::Long),
        ] {
            if let Some(after) = cursor.strip_prefix(prefix) {
                *cursor = after;
                spec.length = length;
                break;
            }
        }
        Ok(spec)
    }

    /// Returns the specification as a C format with its NUL; `length` is the modifier of the type
    /// that is passed.
    fn c_format(&self, length: &str, letter: u8) -> Vec<u8> {
        let mut out = vec![b'%'];
        out.extend(FLAGS.iter().zip(self.flags).filter(|(_, set)| *set).map(|(flag, _)| *flag));
        if let Some(width) = self.width {
            out.extend(width.to_string().bytes());
        }
        if let Some(precision) = self.precision {
            out.extend(format!(".{precision}").bytes());
        }
        out.extend(length.bytes());
        out.extend([letter, 0]);
        out
    }
}

/// Parses a number, or takes the next argument for `*`; `None` if neither is there.
fn number(
    cursor: &mut &[u8],
    source: &mut dyn Arguments,
    count: &mut i32,
) -> Result<Option<i32>, Flow> {
    if let Some(after) = cursor.strip_prefix(b"*") {
        *cursor = after;
        *count += 1;
        return Ok(Some(source.word()? as i32));
    }
    let digits = cursor.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (text, after) = cursor.split_at(digits);
    *cursor = after;
    let value = text.iter().fold(0i32, |value, digit| {
        value.saturating_mul(10).saturating_add(i32::from(digit - b'0'))
    });
    Ok((digits > 0).then_some(value))
}

/// Appends one converted value.
fn convert(
    out: &mut Vec<u8>,
    spec: Spec,
    letter: u8,
    source: &mut dyn Arguments,
) -> Result<(), Flow> {
    match letter {
        b'd' | b'i' => {
            let value = match spec.length {
                Length::Long => source.wide()? as i64,
                Length::Int => i64::from(source.word()? as i32),
                Length::Short => i64::from(source.word()? as i16),
                Length::Char => i64::from(source.word()? as i8),
            };
            print(out, &spec.c_format("ll", letter), value as u64);
        }
        b'o' | b'u' | b'x' | b'X' => {
            let value = match spec.length {
                Length::Long => source.wide()?,
                Length::Int => u64::from(source.word()?),
                Length::Short => u64::from(source.word()? as u16),
                Length::Char => u64::from(source.word()? as u8),
            };
            print(out, &spec.c_format("ll", letter), value);
        }
        b'p' => print(out, &spec.c_format("", letter), source.wide()?),
        b'c' => {
            let character = source.word()? as u8;
            pad(out, &[character], spec);
        }
        b's' => {
            let addr = source.wide()?;
            let mut text = if addr == 0 { b"(null)".to_vec() } else { source.string(addr)? };
            text.truncate(spec.precision.map_or(usize::MAX, |precision| precision as usize));
            pad(out, &text, spec);
        }
        _ => {
            let value = f64::from_bits(source.wide()?);
            print_float(out, &spec.c_format("", letter), value);
        }
    }
    Ok(())
}

/// Appends text, padded to the specification's width.
fn pad(out: &mut Vec<u8>, text: &[u8], spec: Spec) {
    let gap = (spec.width.unwrap_or(0) as usize).saturating_sub(text.len());
    let (before, after) = if spec.flags[0] { (0, gap) } else { (gap, 0) };
    out.resize(out.len() + before, b' ');
    out.extend_from_slice(text);
    out.resize(out.len() + after, b' ');
}

/// Appends a value by a format of one conversion of a 64-bit integer or pointer, and a NUL.
fn print(out: &mut Vec<u8>, format: &[u8], value: u64) {
    append(out, |to, len| {
        // SAFETY: `append` gives a buffer of `len` bytes, and the format, which ends with a NUL,
        // has one conversion, which takes a value of this type.
        unsafe { libc::snprintf(to, len, format.as_ptr().cast(), value) }
    });
}

/// Appends a value by a format of one conversion of a double, and a NUL.
fn print_float(out: &mut Vec<u8>, format: &[u8], value: f64) {
    append(out, |to, len| {
        // SAFETY: `append` gives a buffer of `len` bytes, and the format, which ends with a NUL,
        // has one conversion, which takes a double.
        unsafe { libc::snprintf(to, len, format.as_ptr().cast(), value) }
    });
}

/// Appends what `snprintf` prints: calls it once, and again with a larger buffer if that was too
/// small.
fn append(out: &mut Vec<u8>, snprintf: impl Fn(*mut libc::c_char, usize) -> i32) {
    let mut buffer = [0u8; 128];
    let len = usize::try_from(snprintf(buffer.as_mut_ptr().cast(), buffer.len())).unwrap_or(0);
    if let Some(text) = buffer.get(..len).filter(|text| text.len() < buffer.len()) {
        out.extend_from_slice(text);
        return;
    }
    let mut large = vec![0u8; len + 1];
    snprintf(large.as_mut_ptr().cast(), large.len());
    out.extend_from_slice(&large[..len]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// Values in order, and strings, whose addresses are their index + 1.
    struct Fixed(VecDeque<u64>, &'static [&'static str]);

    impl Arguments for Fixed {
        fn word(&mut self) -> Result<u32, Flow> {
            Ok(self.wide()? as u32)
        }
        fn wide(&mut self) -> Result<u64, Flow> {
            Ok(self.0.pop_front().expect("more conversions than values"))
        }
        fn string(&mut self, addr: u64) -> Result<Vec<u8>, Flow> {
            Ok(self.1[addr as usize - 1].bytes().collect())
        }
    }

    fn text(format: &str, values: &[u64]) -> (String, i32) {
        let mut source = Fixed(values.iter().copied().collect(), &["kedge", ""]);
        let (out, count) = render(format.as_bytes(), &mut source).ok().unwrap();
        (String::from_utf8(out).unwrap(), count)
    }

    #[test]
    fn integers_print_as_in_c() {
        let minus = -5i32 as u32 as u64;
        assert_eq!(
            text("%d|%5d|%-5d|%05d|%+d\n", &[minus, 7, 7, 7, 7]).0,
            "-5|    7|7    |00007|+7\n"
        );
        assert_eq!(text("%u %x %X %#o", &[minus, 255, 255, 8]).0, "4294967291 ff FF 010");
        assert_eq!(
            text("%lld %lu %hhd %hu", &[u64::MAX, u64::MAX, 0x1ff, 0x1_ffff]).0,
            "-1 18446744073709551615 -1 65535"
        );
        assert_eq!(text("%*d|%-*d|%.*d", &[4, 1, 4, 1, 3, 1]), ("   1|1   |001".into(), 6));
        assert_eq!(text("%p %p", &[0x1000, 0]).0, "0x1000 (nil)");
    }

    #[test]
    fn floats_print_as_in_c() {
        let v = |x: f64| x.to_bits();
        assert_eq!(
            text("%f %.2f %e %g", &[v(0.1), v(2.005), v(12345.678), v(1e-5)]).0,
            "0.100000 2.00 1.234568e+04 1e-05"
        );
        assert_eq!(text("%8.3f|%-8.1f|", &[v(3.24159), v(-1.0)]).0, "   3.242|-1.0    |");
        assert_eq!(text("%f %F %a", &[v(f64::INFINITY), v(f64::NAN), v(1.0)]).0, "inf NAN 0x1p+0");
        assert_eq!(text("%.200f", &[v(1.0)]).0.len(), 202);
    }

    #[test]
    fn text_and_odd_formats() {
        assert_eq!(
            text("%s|%8s|%-8s|%.2s|%s", &[1, 1, 1, 1, 0]).0,
            "kedge|   kedge|kedge   |ke|(null)"
        );
        assert_eq!(text("%c%3c 100%%", &[65, 66]), ("A  B 100%".into(), 2));
        assert_eq!(text("%y %", &[]), ("%y %".into(), 0));
        assert_eq!(text("%999999999d", &[1]).0.len(), 4096);
    }
}
