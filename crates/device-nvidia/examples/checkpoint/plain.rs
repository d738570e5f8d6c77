//! The driver's own checkpoint (cuCheckpointProcess*), of a process that holds as many bytes in one
//! allocation.

use crate::driver::Cuda;
use crate::rig::{CHUNK, GIB, Outcome, Pattern, say};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::ptr;
use std::time::Instant;

pub(crate) fn program(gib: &str) -> Outcome {
    let bytes = gib.parse::<u64>()? * GIB;
    let (cuda, pattern) = (Cuda::open()?, Pattern::new());
    let (mut context, mut memory) = (0, 0);
    cuda.init(0)?;
    cuda.create_context(&mut context, 0, 0)?;
    cuda.allocate(&mut memory, bytes as usize)?;
    cuda.pin(pattern.all())?;
    for at in (0..bytes).step_by(CHUNK) {
        cuda.to_device(memory + at, pattern.at(at, CHUNK))?;
    }
    say("ready");
    std::io::stdin().lock().read_line(&mut String::new())?;
    let mut buffer = vec![0; CHUNK];
    for at in [0, bytes / 2, bytes - CHUNK as u64] {
        cuda.to_host(&mut buffer, memory + at)?;
        if pattern.at(at, CHUNK) != buffer {
            return Err("bytes are not what they were".into());
        }
    }
    say("same");
    Ok(())
}

pub(crate) fn checkpoint(gib: &str) -> Outcome {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["plain", gib])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let pid = child.id() as i32;
    let mut output = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
    if output.next().transpose()?.as_deref() != Some("ready") {
        return Err("the plain program did not start".into());
    }
    let cuda = Cuda::open()?;
    cuda.init(0)?;
    let mut times = [0.0; 4];
    let steps = [Cuda::lock, Cuda::checkpoint, Cuda::restore, Cuda::unlock];
    for (time, step) in times.iter_mut().zip(steps) {
        let begin = Instant::now();
        step(&cuda, pid, ptr::null_mut())?;
        *time = begin.elapsed().as_secs_f64();
    }
    child.stdin.take().ok_or("no input")?.write_all(b"\n")?;
    let same = output.next().transpose()?.as_deref() == Some("same");
    child.wait()?;
    let [lock, checkpoint, restore, unlock] = times;
    say(&format!(
        "{{\"what\": \"driver\", \"gib\": {gib}, \"lock_s\": {lock:.3}, \"checkpoint_s\": {checkpoint:.3}, \
         \"restore_s\": {restore:.3}, \"unlock_s\": {unlock:.3}, \"same\": {same}}}"
    ));
    Ok(())
}
