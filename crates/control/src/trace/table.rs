//! How long things took, by name.

use super::{Kind, Span};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Most names that are told apart; what has another counts as `(others)`.
const MAX_NAMES: usize = 10_000;
const OTHERS: &str = "(others)";

/// All that had one name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    pub count: u64,
    /// Nanoseconds, as are `min` and `max`.
    pub total: u64,
    pub min: u64,
    pub max: u64,
    pub bytes: u64,
}

impl Row {
    /// Returns how long one took, nanoseconds.
    pub fn mean(&self) -> u64 {
        self.total / self.count.max(1)
    }
}

/// What a trace has, summed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    rows: BTreeMap<(Kind, String), Row>,
}

impl Table {
    /// Counts a span.
    pub fn add(&mut self, span: &Span) {
        let took = span.end.saturating_sub(span.begin);
        let key = (span.kind, span.name.clone());
        let full = self.rows.len() >= MAX_NAMES && !self.rows.contains_key(&key);
        let key = if full { (span.kind, OTHERS.to_owned()) } else { key };
        let row = Row { count: 0, total: 0, min: u64::MAX, max: 0, bytes: 0 };
        let row = self.rows.entry(key).or_insert(row);
        row.count = row.count.saturating_add(1);
        row.total = row.total.saturating_add(took);
        row.bytes = row.bytes.saturating_add(span.bytes);
        (row.min, row.max) = (row.min.min(took), row.max.max(took));
    }

    /// Returns what there is of a kind, what took most first.
    pub fn of(&self, kind: Kind) -> Vec<(&str, Row)> {
        let its = self.rows.iter().filter(|((of, _), _)| *of == kind);
        let mut rows: Vec<_> = its.map(|((_, name), row)| (&**name, *row)).collect();
        rows.sort_by_key(|(_, row)| Reverse(row.total));
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(kind: Kind, name: &str, begin: u64, end: u64) -> Span {
        let name = name.to_owned();
        Span { kind, name, begin, end, lane: 0, device: None, bytes: 2, outcome: 0 }
    }

    #[test]
    fn names_are_summed_by_kind_and_the_longest_come_first() {
        let mut table = Table::default();
        for (name, begin, end) in [("a", 0, 3), ("b", 0, 100), ("a", 10, 15), ("a", 9, 7)] {
            table.add(&span(Kind::Kernel, name, begin, end));
        }
        table.add(&span(Kind::Call, "a", 0, u64::MAX));
        table.add(&span(Kind::Call, "a", 0, u64::MAX));
        let a = Row { count: 3, total: 8, min: 0, max: 5, bytes: 6 };
        let b = Row { count: 1, total: 100, min: 100, max: 100, bytes: 2 };
        assert_eq!(table.of(Kind::Kernel), [("b", b), ("a", a)]);
        assert_eq!((a.mean(), table.of(Kind::Call)[0].1.total), (2, u64::MAX));
        assert!(table.of(Kind::Copy).is_empty());
    }

    #[test]
    fn there_are_only_so_many_names() {
        let mut table = Table::default();
        for number in 0..MAX_NAMES + 5 {
            table.add(&span(Kind::Kernel, &number.to_string(), 0, 1));
        }
        table.add(&span(Kind::Kernel, "7", 0, 1));
        let rows = table.of(Kind::Kernel);
        let count = |name| rows.iter().find(|row| row.0 == name).map(|row| row.1.count);
        assert_eq!((rows.len(), count(OTHERS), count("7")), (MAX_NAMES + 1, Some(5), Some(2)));
    }
}
