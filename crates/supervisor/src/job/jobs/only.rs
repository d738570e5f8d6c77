//! What a user has one of on a host, at most.

use super::{JobError, Jobs, io_error, lock_soon};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;

/// Beside the folder of jobs: locked for as long as it runs, and its process id.
const BALANCE: &str = "balance.lock";
/// Longest such id, in bytes.
const MAX_ID_LEN: u64 = 16;

impl Jobs {
    /// Takes the lock of the user's one `kedge balance` on this host, which lasts as long as the
    /// file is open: until its process ends, however it ends.
    ///
    /// # Errors
    /// Another one has it, which is not about to end; the file cannot be made or locked.
    pub fn only_balance(&self) -> Result<File, JobError> {
        let path = self.dir.with_file_name(BALANCE);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        // No FIFO is waited for, and no link followed.
        let options = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let mut file = options.open(&path).map_err(io_error(&path))?;
        // One that was killed may not be gone yet.
        let locked = match lock_soon(&file) {
            true => Ok(()),
            false => flock(&file, FlockOperation::NonBlockingLockExclusive),
        };
        if locked == Err(Errno::WOULDBLOCK) {
            let mut text = String::new();
            let read = Read::by_ref(&mut file).take(MAX_ID_LEN).read_to_string(&mut text);
            let pid = read.ok().and_then(|_| text.trim().parse().ok());
            return Err(JobError::Balances { pid });
        }
        locked.map_err(|error| io_error(&path)(error.into()))?;
        let note = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
        note.map_err(io_error(&path))?;
        Ok(file)
    }
}
