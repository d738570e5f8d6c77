//! Numbers that differ from run to run, moments and names; and those of a seed, which come again.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns a number of [0, 1), not the same twice.
pub fn fraction() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut x = now.as_nanos() as u64 ^ u64::from(std::process::id()) << 32;
    for _ in 0..3 {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
    }
    (x >> 11) as f64 / (1u64 << 53) as f64
}

/// Returns a whole number below `below`.
pub fn number(below: u32) -> u32 {
    (fraction() * f64::from(below)) as u32
}

/// Numbers of a seed (xorshift).
#[derive(Debug)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        assert_ne!(seed, 0, "all numbers of the seed 0 are 0");
        Dice(seed)
    }

    /// Of the seed that an environment variable gives, else of any; standard error says which.
    pub fn of_environment(variable: &str) -> Dice {
        let seed = match std::env::var(variable) {
            Ok(seed) => seed.parse().expect("a number"),
            Err(_) => u64::from(number(u32::MAX)) + 1,
        };
        eprintln!("{variable}={seed}");
        Dice::new(seed)
    }

    pub fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % most
    }
}
