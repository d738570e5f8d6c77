//! What `kedge bench process` times: loops of ordinary calls, natively and as a job, and a program
//! that holds memory and does with it what it is told.

use std::hint::black_box;
use std::io::{BufRead, Write};
use std::time::{Duration, Instant, SystemTime};

/// Bytes that the loop over pages writes to.
const PAGES: usize = 64 << 20;
const PAGE: usize = 4096;

/// A name, how often it turns, and what does that.
type Loop = (&'static str, u32, fn(u32) -> Duration);

const LOOPS: [Loop; 6] = [
    ("open", 100_000, |turns| repeat(turns, open)),
    ("malloc", 2_000_000, |turns| repeat(turns, malloc)),
    ("putc", 10_000_000, putc),
    ("pages", 40, pages),
    ("getppid", 500_000, |turns| repeat(turns, getppid)),
    ("fork", 300, |turns| repeat(turns, fork)),
];

/// Nanoseconds that one turn of the loop `name` takes; `None` if there is none of that name.
pub fn time_loop(name: &str) -> Option<f64> {
    let (_, turns, run) = *LOOPS.iter().find(|(own, ..)| *own == name)?;
    Some(run(turns).as_nanos() as f64 / f64::from(turns))
}

fn repeat(turns: u32, turn: fn()) -> Duration {
    let begin = Instant::now();
    (0..turns).for_each(|_| turn());
    begin.elapsed()
}

fn open() {
    // SAFETY: the path is a string, and the descriptor is closed once.
    unsafe {
        let fd = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY);
        libc::close(fd);
    }
}

fn malloc() {
    // SAFETY: what malloc gives is freed once.
    unsafe { libc::free(black_box(libc::malloc(5000))) }
}

fn getppid() {
    // SAFETY: getppid takes no arguments and only returns a number.
    black_box(unsafe { libc::getppid() });
}

fn fork() {
    // SAFETY: the child ends at once; the parent waits for it.
    unsafe {
        match libc::fork() {
            0 => libc::_exit(0),
            child => libc::waitpid(child, std::ptr::null_mut(), 0),
        };
    }
}

fn putc(turns: u32) -> Duration {
    // SAFETY: the names are strings; the stream is used while it is open, and closed once.
    unsafe {
        let stream = libc::fopen(c"/dev/null".as_ptr(), c"w".as_ptr());
        if stream.is_null() {
            return Duration::ZERO;
        }
        let begin = Instant::now();
        for turn in 0..turns {
            libc::fputc((turn & 0x7f) as i32, stream);
        }
        let taken = begin.elapsed();
        libc::fclose(stream);
        taken
    }
}

fn pages(turns: u32) -> Duration {
    let mut memory = vec![1u8; PAGES];
    let begin = Instant::now();
    for turn in 0..turns {
        memory.chunks_mut(PAGE).for_each(|page| page[8] = turn as u8);
        black_box(&mut memory);
    }
    begin.elapsed()
}

/// Holds that many bytes of random memory and obeys one order a line, each with a line of its own:
/// `ping`; `dirty PERCENT` of its pages; `write SECONDS` long as fast as it can, or `beat SECONDS`
/// long to a few pages each millisecond, whereupon it tells the longest gap between two writes;
/// `change SECONDS` long to one page in a hundred each second, which tells that gap, too; `work
/// PAGES`. It answers with seconds.
pub fn hold_memory(
    bytes: usize,
    input: impl BufRead,
    mut output: impl Write,
) -> std::io::Result<()> {
    let mut holder = Holder { words: vec![0; bytes / 8], state: 88_172_645_463_325_252 };
    for at in 0..holder.words.len() {
        holder.words[at] = holder.draw();
    }
    writeln!(output, "ready")?;
    output.flush()?;
    for line in input.lines() {
        let line = line?;
        let (order, number) = line.split_once(' ').unwrap_or((&line, "0"));
        let number = number.parse::<f64>().unwrap_or(0.0);
        let seconds = match order {
            "dirty" => holder.write_pages((holder.pages() as f64 * number / 100.0) as usize),
            "work" => holder.write_pages(number as usize),
            "write" => holder.longest_gap(seconds_of(number), 100, Duration::ZERO),
            "beat" => holder.longest_gap(seconds_of(number), 20, BEAT),
            "change" => holder.change(seconds_of(number)),
            _ => Duration::ZERO,
        };
        writeln!(output, "{}", seconds.as_secs_f64())?;
        output.flush()?;
    }
    Ok(())
}

fn seconds_of(number: f64) -> Duration {
    Duration::from_secs_f64(number.clamp(0.0, 600.0))
}

/// Between two of a program that does not only write.
const BEAT: Duration = Duration::from_millis(1);

struct Holder {
    words: Vec<u64>,
    state: u64,
}

impl Holder {
    fn draw(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }

    fn pages(&self) -> usize {
        self.words.len() * 8 / PAGE
    }

    fn write_pages(&mut self, count: usize) -> Duration {
        let begin = Instant::now();
        for _ in 0..count {
            let value = self.draw();
            let page = value as usize % self.pages().max(1);
            if let Some(word) = self.words.get_mut(page * PAGE / 8) {
                *word = value;
            }
        }
        begin.elapsed()
    }

    /// Writes to one page in a hundred each second, a few each millisecond, and sleeps between: the
    /// longest gap between two writes. By the time of day, as in a job that goes on on another host
    /// the monotonic clock leaves out how long it stood still.
    fn change(&mut self, time: Duration) -> Duration {
        let since = |last: SystemTime| last.elapsed().unwrap_or_default();
        let (begin, mut longest) = (SystemTime::now(), Duration::ZERO);
        let (mut last, mut due) = (begin, 0.0);
        while since(begin) < time {
            std::thread::sleep(BEAT);
            let gap = since(last);
            last = SystemTime::now();
            longest = longest.max(gap);
            // What a pause kept it from is not made up for.
            due += self.pages() as f64 / 100.0 * gap.min(10 * BEAT).as_secs_f64();
            self.write_pages(due as usize);
            due -= due.floor();
        }
        longest
    }

    fn longest_gap(&mut self, time: Duration, pages: usize, between: Duration) -> Duration {
        let (begin, mut longest) = (Instant::now(), Duration::ZERO);
        let mut last = begin;
        while begin.elapsed() < time {
            self.write_pages(pages);
            while last.elapsed() < between {
                std::hint::spin_loop();
            }
            let now = Instant::now();
            longest = longest.max(now - last);
            last = now;
        }
        longest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_loop_turns() {
        for (name, ..) in LOOPS {
            assert!(time_loop(name).is_some_and(|nanoseconds| nanoseconds > 0.0), "{name}");
        }
        assert!(time_loop("other").is_none());
    }

    #[test]
    fn the_holder_answers_every_order() {
        let orders = b"ping\ndirty 50\nwrite 0.01\nbeat 0.01\nchange 0.01\nwork 3\nnonsense\n";
        let mut said = Vec::new();
        hold_memory(1 << 20, &orders[..], &mut said).unwrap();
        let said = String::from_utf8(said).unwrap();
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!((lines.len(), lines[0]), (8, "ready"));
        assert!(lines[1..].iter().all(|line| line.parse::<f64>().is_ok()), "{said}");
    }
}
