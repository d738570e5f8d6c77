//! Bytes that wait: taken from the front, without moving what is behind each time.

/// So many that were taken are kept in front, at most, before the rest is moved.
const KEPT: usize = 64 << 10;

#[derive(Debug, Default)]
pub(super) struct Bytes {
    all: Vec<u8>,
    /// How many of them have been taken.
    taken: usize,
}

impl Bytes {
    pub(super) fn len(&self) -> usize {
        self.all.len() - self.taken
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Those that wait.
    pub(super) fn waiting(&self) -> &[u8] {
        &self.all[self.taken..]
    }

    /// For who appends some.
    pub(super) fn end(&mut self) -> &mut Vec<u8> {
        &mut self.all
    }

    /// Takes the first `count` of them, or all if there are fewer.
    pub(super) fn take(&mut self, count: usize) {
        self.taken += count.min(self.len());
        if self.is_empty() {
            self.all.clear();
            self.taken = 0;
        } else if self.taken > KEPT {
            self.all.drain(..self.taken);
            self.taken = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_in_the_order_in_which_they_went() {
        let all: Vec<u8> = (0..400_000_u32).map(|number| (number % 251) as u8).collect();
        let (mut bytes, mut found) = (Bytes::default(), Vec::new());
        for (index, piece) in all.chunks(1000).enumerate() {
            bytes.end().extend_from_slice(piece);
            let count = (index * 7 % 1990).min(bytes.len());
            found.extend_from_slice(&bytes.waiting()[..count]);
            bytes.take(count);
            assert!(bytes.all.len() <= bytes.len() + KEPT + 2000);
        }
        found.extend_from_slice(bytes.waiting());
        bytes.take(usize::MAX);
        assert!(bytes.is_empty() && bytes.waiting().is_empty());
        assert_eq!(found, all);
    }
}
