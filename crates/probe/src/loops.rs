//! What `kedge bench process` times: loops of ordinary calls, natively and as a job, and programs
//! that hold memory and do with it what they are told.

use std::hint::black_box;
use std::io::{self, BufRead, PipeReader, Read, Write};
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
pub fn hold_memory(bytes: usize, input: impl BufRead, output: impl Write) -> io::Result<()> {
    obey(Holder::new(bytes, 0), input, output)
}

/// Does what [`hold_memory`] does as a job of that many processes, with that many threads each and
/// that many bytes of random memory. All but the first process and its first thread wait for its
/// end.
///
/// # Errors
///
/// Where the machine does not allow so many.
pub fn hold_many(
    processes: usize,
    threads: usize,
    bytes: usize,
    input: impl BufRead,
    output: impl Write,
) -> io::Result<()> {
    let (mut told, end) = io::pipe()?;
    // One byte from each process that is ready.
    let (mut ready, tells) = io::pipe()?;
    for number in 1..processes {
        // SAFETY: this process has one thread, so the child finds no lock held.
        match unsafe { libc::fork() } {
            0 => {
                drop(end);
                let _ = wait_as_one_of_many(number, threads, bytes, &mut told, tells);
                // SAFETY: the call ends the process without running its parent's destructors.
                unsafe { libc::_exit(0) }
            }
            pid if pid < 0 => return Err(io::Error::last_os_error()),
            _ => {}
        }
    }
    drop(tells);
    let holder = Holder::new(bytes, 0);
    let _threads = idle(threads)?;
    let mut others = vec![0; processes.saturating_sub(1)];
    ready.read_exact(&mut others).map_err(|_| io::Error::other("a process has too few threads"))?;
    obey(holder, input, output)
}

/// Waits until nobody holds the other end of `told`.
fn wait_as_one_of_many(
    number: usize,
    threads: usize,
    bytes: usize,
    told: &mut PipeReader,
    mut ready: impl Write,
) -> io::Result<()> {
    let holder = Holder::new(bytes, number as u64);
    let _threads = idle(threads)?;
    ready.write_all(&[0])?;
    drop(ready);
    let _ = told.read(&mut [0])?;
    black_box(&holder.words);
    Ok(())
}

/// Has this process have `count` threads, all but this one of which wait.
fn idle(count: usize) -> io::Result<Vec<std::thread::JoinHandle<()>>> {
    const STACK: usize = 64 << 10;
    let wait = || loop {
        std::thread::park();
    };
    let spawn = |_| std::thread::Builder::new().stack_size(STACK).spawn(wait);
    (1..count).map(spawn).collect()
}

fn obey(mut holder: Holder, input: impl BufRead, mut output: impl Write) -> io::Result<()> {
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
    /// One whose memory differs from that of others with another `seed`.
    fn new(bytes: usize, seed: u64) -> Holder {
        let words = vec![0; bytes / 8];
        let mut holder = Holder { words, state: 88_172_645_463_325_252 ^ (seed << 1) };
        for at in 0..holder.words.len() {
            holder.words[at] = holder.draw();
        }
        holder
    }

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
