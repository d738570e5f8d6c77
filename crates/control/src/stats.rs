//! What a job has asked of its devices: counted by its proxies, summed by its supervisor, and what
//! `kedge model predict` reads.

use crate::told;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::ops::AddAssign;
use std::path::Path;

/// The version of [`JobStats`] that this one writes and reads.
pub const FORMAT: u32 = 1;
/// Longest file of figures that is read, in bytes.
const MAX_FILE_LEN: u64 = 1 << 20;

/// A number of things and their bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Amount {
    pub count: u64,
    pub bytes: u64,
}

impl Amount {
    /// Adds one thing of so many bytes.
    #[inline]
    pub fn add(&mut self, bytes: u64) {
        self.count = self.count.saturating_add(1);
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

impl AddAssign for Amount {
    fn add_assign(&mut self, other: Amount) {
        self.count = self.count.saturating_add(other.count);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

/// What was copied, by where it came from and went. The shared arena holds pinned and managed
/// memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Copies {
    /// Small ones to devices, whose bytes travelled in the ring.
    pub inline: Amount,
    /// From the program's own memory to devices.
    pub to_device: Amount,
    /// From devices to the program's own memory.
    pub from_device: Amount,
    pub shared_to_device: Amount,
    pub device_to_shared: Amount,
    /// Between devices, on one, or within the host.
    pub others: Amount,
}

impl AddAssign for Copies {
    fn add_assign(&mut self, other: Copies) {
        self.inline += other.inline;
        self.to_device += other.to_device;
        self.from_device += other.from_device;
        self.shared_to_device += other.shared_to_device;
        self.device_to_shared += other.device_to_shared;
        self.others += other.others;
    }
}

/// Regions of device memory by size: class `k` has those of 2^k to 2^(k+1) − 1 bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Regions(BTreeMap<u32, Amount>);

impl Regions {
    /// Returns the class of a size.
    fn class(bytes: u64) -> u32 {
        bytes.checked_ilog2().unwrap_or(0)
    }

    /// Adds a region.
    pub fn add(&mut self, bytes: u64) {
        self.0.entry(Regions::class(bytes)).or_default().add(bytes);
    }

    /// Takes a region of this size away.
    pub fn remove(&mut self, bytes: u64) {
        let class = Regions::class(bytes);
        let Some(amount) = self.0.get_mut(&class) else { return };
        amount.count = amount.count.saturating_sub(1);
        amount.bytes = amount.bytes.saturating_sub(bytes);
        if amount.count == 0 {
            self.0.remove(&class);
        }
    }

    /// Returns the classes that have regions, by size.
    pub fn classes(&self) -> impl Iterator<Item = (u32, Amount)> {
        self.0.iter().map(|(class, amount)| (*class, *amount))
    }

    /// Returns all of them together.
    pub fn total(&self) -> Amount {
        let mut total = Amount::default();
        self.0.values().for_each(|amount| total += *amount);
        total
    }
}

impl AddAssign<&Regions> for Regions {
    fn add_assign(&mut self, other: &Regions) {
        other.classes().for_each(|(class, amount)| *self.0.entry(class).or_default() += amount);
    }
}

/// What the clients of a job have asked of its devices.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stats {
    /// Processes that used the devices.
    pub clients: u64,
    /// Messages that nobody waited for.
    pub posts: u64,
    /// Messages that the program waited for.
    pub calls: u64,
    /// Bytes of the ring that all messages took.
    pub message_bytes: u64,
    /// Messages by kind.
    pub kinds: BTreeMap<String, u64>,
    pub copies: Copies,
    /// Images that were loaded.
    pub modules: Amount,
    /// Messages that a restart repeats, where they were the most.
    pub records: u64,
    /// Device memory, where it was the most.
    pub regions: Regions,
    /// Pinned, registered and managed memory, where it was the most.
    pub shared_bytes: u64,
}

impl AddAssign<&Stats> for Stats {
    fn add_assign(&mut self, other: &Stats) {
        let add = |sum: &mut u64, more: u64| *sum = sum.saturating_add(more);
        add(&mut self.clients, other.clients);
        add(&mut self.posts, other.posts);
        add(&mut self.calls, other.calls);
        add(&mut self.message_bytes, other.message_bytes);
        for (kind, count) in &other.kinds {
            add(self.kinds.entry(kind.clone()).or_default(), *count);
        }
        self.copies += other.copies;
        self.modules += other.modules;
        add(&mut self.records, other.records);
        self.regions += &other.regions;
        add(&mut self.shared_bytes, other.shared_bytes);
    }
}

/// A job's figures, as `kedge run --stats=FILE` writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobStats {
    pub format: u32,
    pub job: String,
    /// As `--gpu` took it.
    pub gpu: String,
    pub command: Vec<String>,
    /// From the program's start to its end.
    pub seconds: f64,
    pub stats: Stats,
}

impl Stats {
    /// Writes it to a new file, as a proxy does when it ends.
    ///
    /// # Errors
    /// As of files.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        File::create_new(path)?.write_all(&serde_json::to_vec(self)?)
    }

    /// Returns the sum of all files in a folder; of what is no such file, nothing.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn sum(folder: &Path) -> io::Result<Stats> {
        let mut sum = Stats::default();
        for path in told::files(folder, "json")? {
            let text = told::read(&path, MAX_FILE_LEN).unwrap_or_default();
            if let Ok(one) = serde_json::from_slice(&text) {
                sum += &one;
            }
        }
        Ok(sum)
    }

    /// Returns lines that tell of it.
    pub fn lines(&self) -> Vec<String> {
        let amount = |what: &str, amount: Amount| {
            (amount.count > 0).then(|| format!("{what} {} ({})", amount.count, size(amount.bytes)))
        };
        let kind = |(kind, count): (&String, &u64)| format!("{kind} {count}");
        let mut kinds: Vec<_> = self.kinds.iter().collect();
        kinds.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        let kinds: Vec<String> = kinds.into_iter().map(kind).collect();
        let copies = self.copies;
        let copied = [
            amount("in the ring", copies.inline),
            amount("to devices", copies.to_device),
            amount("from devices", copies.from_device),
            amount("pinned to devices", copies.shared_to_device),
            amount("devices to pinned", copies.device_to_shared),
            amount("others", copies.others),
        ];
        let copied: Vec<String> = copied.into_iter().flatten().collect();
        let regions = self.regions.total();
        let classes: Vec<String> = self
            .regions
            .classes()
            .map(|(class, amount)| format!("{} × {}", amount.count, size(1 << class.min(63))))
            .collect();
        let (messages, calls) = (self.posts.saturating_add(self.calls), self.calls);
        let mut lines = vec![
            format!(
                "{} processes sent {messages} messages ({}); {calls} were waited for",
                self.clients,
                size(self.message_bytes)
            ),
            format!("messages: {}", or_none(&kinds)),
            format!("copies: {}", or_none(&copied)),
            format!("modules: {} ({})", self.modules.count, size(self.modules.bytes)),
            format!("a restart repeats {} messages at most", self.records),
            format!("device memory: {} regions, {} at most", regions.count, size(regions.bytes)),
        ];
        if !classes.is_empty() {
            lines.push(format!("regions by size, from: {}", classes.join(", ")));
        }
        if self.shared_bytes > 0 {
            lines.push(format!("pinned and managed memory: {} at most", size(self.shared_bytes)));
        }
        lines
    }
}

fn or_none(list: &[String]) -> String {
    if list.is_empty() { "none".to_owned() } else { list.join(", ") }
}

/// Writes bytes for people: three digits that count.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn some(bytes: u64) -> Stats {
        let mut stats = Stats { clients: 1, posts: 2, calls: 3, ..Stats::default() };
        stats.kinds.insert("Launch".into(), 2);
        stats.copies.to_device.add(bytes);
        stats.regions.add(bytes);
        stats
    }

    #[test]
    fn proxies_figures_are_summed() {
        let folder = std::env::temp_dir().join(format!("kedge-stats-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        some(100).write(&folder.join("1.json")).unwrap();
        some(120).write(&folder.join("2.json")).unwrap();
        assert!(some(1).write(&folder.join("2.json")).is_err(), "no file is written over");
        fs::write(folder.join("3.json"), "{\"posts\": -1}").unwrap();
        std::os::unix::fs::symlink("1.json", folder.join("4.json")).unwrap();
        fs::create_dir(folder.join("5.json")).unwrap();
        let sum = Stats::sum(&folder).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!((sum.clients, sum.posts, sum.calls), (2, 4, 6));
        assert_eq!(sum.kinds["Launch"], 4);
        assert_eq!(sum.copies.to_device, Amount { count: 2, bytes: 220 });
        assert_eq!(sum.regions.classes().count(), 1);
        assert_eq!(sum.regions.total(), Amount { count: 2, bytes: 220 });
    }

    #[test]
    fn regions_come_and_go_by_class() {
        let mut regions = Regions::default();
        for bytes in [0, 1, 4096, 8191, 8192, u64::MAX] {
            regions.add(bytes);
        }
        let classes: Vec<(u32, u64)> = regions.classes().map(|(c, a)| (c, a.count)).collect();
        assert_eq!(classes, [(0, 2), (12, 2), (13, 1), (63, 1)]);
        for bytes in [8192, 4096, 8191, u64::MAX, 0, 1, 7] {
            regions.remove(bytes);
        }
        assert_eq!(regions, Regions::default());
    }

    #[test]
    fn they_are_told_in_lines() {
        let lines = some(3 << 20).lines();
        assert_eq!(lines[0], "1 processes sent 5 messages (0 B); 3 were waited for");
        assert_eq!(lines[2], "copies: to devices 1 (3.00 MiB)");
        assert_eq!(lines[6], "regions by size, from: 1 × 2.00 MiB");
        assert_eq!(
            (size(1023), size(1024), size(1 << 20)),
            ("1023 B".into(), "1.00 KiB".into(), "1.00 MiB".into())
        );
    }
}
