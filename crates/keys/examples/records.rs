//! Prints how many bytes a second one processor seals and opens, in records of 16 KiB.
//!
//! `cargo run --release -p kedge-keys --example records`

use kedge_keys::{RecordError, Secrets, TrafficKey};
use std::time::{Duration, Instant};

/// Bytes of each call.
const TEXT: usize = 1 << 20;
/// Calls between two looks at the clock.
const CALLS: usize = 64;
/// How long each is done.
const LASTS: Duration = Duration::from_secs(2);

fn main() -> Result<(), RecordError> {
    for (name, suite) in [("AES-256-GCM", 0x1302), ("ChaCha20-Poly1305", 0x1303)] {
        let text = vec![0x5a; TEXT];
        let (mut sealer, _) = secrets(suite).records()?;
        let mut sealed = Vec::new();
        sealer.seal(&[&text], &mut sealed)?;
        let seal = rate(|| {
            sealed.clear();
            sealer.seal(&[&text], &mut sealed)
        })?;

        // What is opened has to be sealed first, out of the time that counts.
        let (mut sealer, mut opener) = (secrets(suite).records()?.0, secrets(suite).records()?.1);
        let (mut opened, mut spent, mut bytes) = (Vec::new(), Duration::ZERO, 0);
        while spent < LASTS {
            sealed.clear();
            sealer.seal(&[&text], &mut sealed)?;
            opened.clear();
            let begin = Instant::now();
            opener.open(&sealed, &mut opened)?;
            spent += begin.elapsed();
            bytes += opened.len();
        }
        let open = bytes as f64 / spent.as_secs_f64() / 1e9;
        println!("{name}: seal {seal:.2} GB/s, open {open:.2} GB/s");
    }
    Ok(())
}

/// Returns the GB/s of what takes a text each time.
fn rate(mut work: impl FnMut() -> Result<(), RecordError>) -> Result<f64, RecordError> {
    let (begin, mut bytes) = (Instant::now(), 0);
    while begin.elapsed() < LASTS {
        (0..CALLS).try_for_each(|_| work())?;
        bytes += CALLS * TEXT;
    }
    Ok(bytes as f64 / begin.elapsed().as_secs_f64() / 1e9)
}

fn secrets(suite: u16) -> Secrets {
    let key = || TrafficKey { key: [1; 32], iv: [2; 12], sequence: 0 };
    Secrets { suite, send: key(), receive: key() }
}
