//! Files to another host: by scp, and through a remote shell.

use super::hosts::{Hosts, quoted, said};
use super::{Sink, by_turns, sized};
use kedge_probe::Series;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

pub(super) const PAIRS: usize = 9;
const BLOCK: usize = 4 << 20;

pub(super) fn run(hosts: &Hosts, size: u64, pairs: usize, sink: Sink<'_>) -> Result<(), String> {
    let file = hosts.dir.join("file");
    write(&file, size).map_err(|error| format!("{}: {error}", file.display()))?;
    let (path, there) = (file.display().to_string(), &hosts.all[1]);
    let quiet = ["-q", "-o", "BatchMode=yes"];
    // Under this name and no path ssh is the job's, as for rsync and git.
    let nowhere = format!("{there}:/dev/null");
    let scp = [&["scp", "-S", "ssh"], &quiet[..], &[&path, &nowhere]].concat();
    let ssh = format!("ssh -o BatchMode=yes {}", quoted(there));
    let to = format!("{ssh} 'cat > /dev/null' < {}", quoted(&path));
    let from = format!("{ssh} {} > /dev/null", quoted(&format!("cat {}", quoted(&path))));
    for (name, unit, words) in [
        ("scp", "of scp's rate", &scp[..]),
        ("ssh HOST cat, from here", "of ssh's rate", &["sh", "-c", &to]),
        ("ssh HOST cat, from there", "of ssh's rate", &["sh", "-c", &from]),
    ] {
        compare(hosts, &sized(name, size), unit, size, pairs, words, sink)?;
    }
    std::fs::remove_file(&file).map_err(|error| error.to_string())
}

fn compare(
    hosts: &Hosts,
    name: &str,
    unit: &str,
    size: u64,
    pairs: usize,
    words: &[&str],
    sink: Sink<'_>,
) -> Result<(), String> {
    let [mut natives, mut ratios] = <[Vec<f64>; 2]>::default();
    let mut timed = |which: usize| {
        let mut command = match which {
            0 => Command::new(words[0]),
            _ => hosts.as_a_job(&hosts.job("scp")),
        };
        command.args(if which == 0 { &words[1..] } else { words });
        let begin = Instant::now();
        said(&mut command)?;
        Ok(begin.elapsed().as_secs_f64())
    };
    // The first reads the file into the page cache.
    timed(0)?;
    for pair in 0..pairs {
        let [native, job] = by_turns(pair, &mut timed)?;
        natives.push(size as f64 / 1e9 / native);
        ratios.push(native / job);
    }
    sink(Series::higher(format!("{name}, natively"), "GB/s", natives));
    sink(Series::higher(name, unit, ratios).target(0.97));
    Ok(())
}

/// Writes that many bytes, of which none is like its neighbours.
fn write(path: &Path, size: u64) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    let (mut block, mut state) = (vec![0u8; BLOCK], 1u64);
    for byte in &mut block {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        *byte = (state >> 56) as u8;
    }
    for at in (0..size).step_by(BLOCK) {
        file.write_all(&block[..(size - at).min(BLOCK as u64) as usize])?;
    }
    Ok(())
}
