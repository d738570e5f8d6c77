//! Digests of blocks of memory: which of them have changed since the last image.
//!
//! 64 rows of 256 words of 16 bytes make a block of [`BLOCK`] bytes; a shorter one ends in zeros.
//! Column by column, 16 rows at a time, four sums of products (NH with Toeplitz keys, as in UMAC)
//! make four 64-bit numbers of 256 bytes; their halves, of all columns, are the coefficients of
//! four polynomials modulo 2^61 − 1, whose values are the digest. All keys are drawn at random,
//! once a job. Two different blocks of one length have the same digest with probability 2^-127.9 at
//! most, whatever they hold (docs/design/0010-incremental-drains.md).
//!
//! [`kernel`] has the same for a GPU, in PTX; here it is for everything else.

pub mod kernel;

use std::fs::File;
use std::io::{self, Read};

/// Bytes of memory that have one digest.
pub const BLOCK: u64 = (ROWS * ROW) as u64;

/// Columns, of 16 bytes: the kernel's threads.
const COLUMNS: usize = 256;
const ROW: usize = COLUMNS * 16;
const ROWS: usize = 64;
/// Rows that are summed up together.
const GROUP: usize = 16;
/// Independent digests beside each other.
const LANES: usize = 4;
/// Keys of the sums: two more for each further lane.
const WORDS: usize = GROUP * 4 + 2 * (LANES - 1);
/// Coefficients that each column has.
const DEGREE: usize = 2 * ROWS / GROUP;
/// 2^61 − 1.
const P: u64 = (1 << 61) - 1;

/// A block's. Comparable with those of the same keys and of blocks of the same length only.
pub type Digest = [u64; LANES];

/// The secret that makes a collision a matter of chance.
#[derive(Clone)]
pub struct Keys {
    words: [u32; WORDS],
    points: [u64; LANES],
    /// Each column's power of the points.
    powers: Vec<[u64; LANES]>,
}

impl Keys {
    /// Draws new keys, of the system's randomness.
    pub fn draw() -> io::Result<Keys> {
        let mut bytes = [0; WORDS * 4 + LANES * 8];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Keys::of(&bytes))
    }

    fn of(bytes: &[u8; WORDS * 4 + LANES * 8]) -> Keys {
        let (words, points) = bytes.split_at(WORDS * 4);
        let mut words =
            words.chunks_exact(4).map(|word| word.try_into().map_or(0, u32::from_le_bytes));
        let points =
            points.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
        let mut points = points.map(|point| point % P);
        let words = std::array::from_fn(|_| words.next().unwrap_or(0));
        let points: [u64; LANES] = std::array::from_fn(|_| points.next().unwrap_or(0));
        let steps = points.map(|point| (0..DEGREE).fold(1, |power, _| multiply(power, point)));
        let mut power = [1; LANES];
        let mut next = || {
            let this = power;
            power = std::array::from_fn(|lane| canonical(multiply(power[lane], steps[lane])));
            this
        };
        let powers = (0..COLUMNS).map(|_| next()).collect();
        Keys { words, points, powers }
    }

    /// Returns the digest of one block: of `bytes`, [`BLOCK`] at most.
    pub fn digest(&self, bytes: &[u8]) -> Digest {
        let mut values = vec![[0_u64; LANES]; COLUMNS];
        let mut sums = vec![[0_u64; COLUMNS * 2]; LANES];
        for group in 0..ROWS / GROUP {
            sums.iter_mut().for_each(|lane| lane.fill(0));
            for row in 0..GROUP {
                let at = (group * GROUP + row) * ROW;
                let end = bytes.len().min(at + ROW);
                let words = self.words_of(row);
                match bytes.get(at..end) {
                    Some(full) if full.len() == ROW => add_row(&mut sums, full, &words),
                    part => {
                        let mut padded = [0; ROW];
                        let part = part.unwrap_or(&[]);
                        padded[..part.len()].copy_from_slice(part);
                        add_row(&mut sums, &padded, &words);
                    }
                }
            }
            self.evaluate(&sums, &mut values);
        }
        self.total(&values)
    }

    /// Returns the keys of a row of a group: two for each half of a word, for each lane.
    fn words_of(&self, row: usize) -> [[u32; 4]; LANES] {
        std::array::from_fn(|lane| std::array::from_fn(|n| self.words[row * 4 + lane * 2 + n]))
    }

    /// Adds a group's coefficients to each column's polynomials.
    fn evaluate(&self, sums: &[[u64; COLUMNS * 2]], values: &mut [[u64; LANES]]) {
        for (column, value) in values.iter_mut().enumerate() {
            for lane in 0..LANES {
                let [left, right] = [sums[lane][column * 2], sums[lane][column * 2 + 1]];
                let sum = left.wrapping_add(right);
                let high = multiply(value[lane], self.points[lane]) + (sum >> 32);
                value[lane] = multiply(high, self.points[lane]) + (sum & 0xffff_ffff);
            }
        }
    }

    /// Returns all columns together.
    fn total(&self, values: &[[u64; LANES]]) -> Digest {
        std::array::from_fn(|lane| {
            let columns = values.iter().zip(&self.powers);
            let parts = columns.map(|(value, power)| multiply(value[lane], power[lane]));
            canonical(parts.fold(0, |sum, part| fold(sum + part)))
        })
    }
}

/// Adds a row's products to the sums: of each 8 bytes one.
fn add_row(sums: &mut [[u64; COLUMNS * 2]], row: &[u8], keys: &[[u32; 4]; LANES]) {
    for (sums, keys) in sums.iter_mut().zip(keys) {
        for (pair, bytes) in sums.chunks_exact_mut(2).zip(row.chunks_exact(16)) {
            for half in 0..2 {
                let word = bytes[half * 8..half * 8 + 8].try_into().map_or(0, u64::from_le_bytes);
                let low = (word as u32).wrapping_add(keys[half * 2]);
                let high = ((word >> 32) as u32).wrapping_add(keys[half * 2 + 1]);
                pair[half] = pair[half].wrapping_add(u64::from(low) * u64::from(high));
            }
        }
    }
}

/// Returns a number that is the same modulo P, 2^61 + 6 at most.
const fn fold(number: u64) -> u64 {
    (number & P) + (number >> 61)
}

/// Returns the product modulo P of numbers below 2^62 and 2^61 + 8: below 2^61 + 8.
const fn multiply(a: u64, b: u64) -> u64 {
    let product = a as u128 * b as u128;
    fold((product as u64 & P) + (product >> 61) as u64)
}

const fn canonical(number: u64) -> u64 {
    let folded = fold(number);
    if folded >= P { folded - P } else { folded }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(seed: u8) -> Keys {
        let byte =
            |n: usize| (n as u32 * 167 + u32::from(seed) * 59 + (n as u32 * n as u32) / 7) as u8;
        Keys::of(&std::array::from_fn(byte))
    }

    fn noise(bytes: usize) -> Vec<u8> {
        let mut state = 7_u64;
        let next = |_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        (0..bytes).map(next).collect()
    }

    /// Returns what the documentation says, word by word.
    fn plain(keys: &Keys, bytes: &[u8]) -> Digest {
        let word = |n: usize| {
            let byte = |i| u32::from(bytes.get(n * 4 + i).copied().unwrap_or(0));
            byte(0) | byte(1) << 8 | byte(2) << 16 | byte(3) << 24
        };
        std::array::from_fn(|lane| {
            let r = u128::from(keys.points[lane]);
            let p = u128::from(P);
            let mut total = 0;
            for column in 0..COLUMNS {
                let mut value = 0;
                for group in 0..ROWS / GROUP {
                    let mut sum = 0_u64;
                    for n in (0..GROUP * 4).step_by(2) {
                        let row = group * GROUP + n / 4;
                        let at = (row * COLUMNS + column) * 4 + n % 4;
                        let key = |i| keys.words[n + lane * 2 + i];
                        let a = word(at).wrapping_add(key(0));
                        let b = word(at + 1).wrapping_add(key(1));
                        sum = sum.wrapping_add(u64::from(a) * u64::from(b));
                    }
                    value = (value * r + u128::from(sum >> 32)) % p;
                    value = (value * r + u128::from(sum & 0xffff_ffff)) % p;
                }
                let power = (0..DEGREE * column).fold(1, |power, _| power * r % p);
                total = (total + value * power) % p;
            }
            total as u64
        })
    }

    #[test]
    fn it_is_what_it_is_said_to_be() {
        for (seed, bytes) in
            [(1, BLOCK as usize), (2, 0), (3, 17), (4, 5 * 4096 + 16), (5, 100_000)]
        {
            let (keys, bytes) = (keys(seed), noise(bytes));
            assert_eq!(keys.digest(&bytes), plain(&keys, &bytes), "{} bytes", bytes.len());
        }
    }

    #[test]
    fn every_bit_counts() {
        let keys = Keys::draw().unwrap();
        let mut bytes = noise(BLOCK as usize);
        let was = keys.digest(&bytes);
        for at in (0..bytes.len()).step_by(4093) {
            for bit in [1, 0x80] {
                bytes[at] ^= bit;
                assert!(keys.digest(&bytes).iter().zip(&was).all(|(a, b)| a != b), "byte {at}");
                bytes[at] ^= bit;
            }
        }
        // Words that have changed their places.
        bytes.swap(0, 16);
        assert_ne!(keys.digest(&bytes), was);
        bytes.swap(0, 16);
        assert_eq!(keys.digest(&bytes), was);
        assert_ne!(Keys::draw().unwrap().digest(&bytes), was, "other keys");
    }

    #[test]
    fn numbers_stay_small() {
        let most = (1 << 62) - 1;
        assert!(multiply(most, P + 7) <= P + 8);
        assert_eq!(canonical(P), 0);
        assert_eq!(canonical(2 * P + 5), 5);
        assert_eq!(canonical(multiply(P - 1, P - 1)), 1);
    }
}
