//! What kernels print, kept until the client's next synchronisation.

use kedge_protocol::{Output, OutputTarget};
use kedge_wire::{Bytes, List};

/// Kept at most, bytes; what is printed beyond it is lost, as on a GPU whose print buffer is full.
const MAX_KEPT: usize = 8 << 20;
/// Limits of one `Output`.
const MAX_PART: usize = 1 << 20;
const MAX_PARTS: usize = 1024;

#[derive(Debug, Default, Clone)]
pub(crate) struct OutputBuffer {
    parts: Vec<(OutputTarget, Vec<u8>)>,
    kept: usize,
    pub(crate) dropped: u64,
}

impl OutputBuffer {
    /// Appends; false for the first bytes that no longer fit.
    pub(crate) fn append(&mut self, target: OutputTarget, bytes: &[u8]) -> bool {
        if self.kept + bytes.len() > MAX_KEPT || self.parts.len() >= MAX_KEPT / 64 {
            self.dropped += bytes.len() as u64;
            return self.dropped > bytes.len() as u64;
        }
        self.kept += bytes.len();
        match self.parts.last_mut() {
            Some((last, kept)) if *last == target && kept.len() + bytes.len() <= MAX_PART => {
                kept.extend_from_slice(bytes);
            }
            _ => {
                for piece in bytes.chunks(MAX_PART) {
                    self.parts.push((target, piece.to_vec()));
                }
            }
        }
        true
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Takes the oldest parts, as many as one message holds.
    pub(crate) fn take(&mut self) -> Output {
        let count = self.parts.len().min(MAX_PARTS);
        let mut parts = Vec::with_capacity(count);
        for (target, bytes) in self.parts.drain(..count) {
            self.kept -= bytes.len();
            // `append` keeps both limits.
            parts.push((target, Bytes::new(bytes).unwrap_or_default()));
        }
        self.dropped = 0;
        Output { parts: List::new(parts).unwrap_or_default(), more: !self.parts.is_empty() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    const OUT: OutputTarget = OutputTarget::Stdout {};
    const ERR: OutputTarget = OutputTarget::Stderr {};

    #[test]
    fn neighbours_merge_and_order_stays() {
        let mut buffer = OutputBuffer::default();
        for (target, text) in [(OUT, "a"), (OUT, "b"), (ERR, "c"), (OUT, "d")] {
            assert!(buffer.append(target, text.as_bytes()));
        }
        let output = buffer.take();
        let texts: Vec<&[u8]> = output.parts.iter().map(|(_, bytes)| &bytes[..]).collect();
        assert_eq!(texts, [b"ab".as_slice(), b"c", b"d"]);
        assert!(!output.more && buffer.is_empty());
    }

    #[test]
    fn it_is_bounded_and_says_so_once() {
        let mut buffer = OutputBuffer::default();
        assert!(buffer.append(OUT, &vec![b'x'; 3 * MAX_PART / 2]));
        let mib = vec![b'y'; MAX_PART];
        let refused = (0..20).filter(|_| !buffer.append(OUT, &mib)).count();
        assert_eq!(refused, 1);
        let mut total = 0;
        loop {
            let output = buffer.take();
            total += output.parts.iter().map(|(_, bytes)| bytes.len()).sum::<usize>();
            if !output.more {
                break;
            }
        }
        assert_eq!(total, 3 * MAX_PART / 2 + 6 * MAX_PART);
        assert!(buffer.append(OUT, b"again"));
    }

    #[test]
    fn alternating_targets_come_in_several_messages() {
        let mut buffer = OutputBuffer::default();
        for i in 0..3000 {
            buffer.append(if i % 2 == 0 { OUT } else { ERR }, b"z");
        }
        let mut counts = Vec::new();
        while !buffer.is_empty() {
            counts.push(buffer.take().parts.len());
        }
        assert_eq!(counts, [1024, 1024, 952]);
    }
}
