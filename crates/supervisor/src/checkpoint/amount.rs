//! How much of a checkpoint has been written: told from time to time to whoever waits for it.

use crate::devices::gpu;
use crate::services::control::Progress;
use kedge_image::Meter;
use kedge_process::Options;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Between two words.
const TICK: Duration = Duration::from_millis(250);

/// What is written of an image.
#[derive(Debug)]
pub(crate) struct Amount {
    folder: PathBuf,
    /// Of the processes' memory.
    meter: Arc<Meter>,
    /// Proxies write what their devices held, of which only the files are seen.
    devices: bool,
}

impl Amount {
    pub(crate) fn of(options: &Options, devices: bool) -> Amount {
        Amount { folder: options.folder.clone(), meter: options.meter.clone(), devices }
    }

    /// Does `work`, which has a `tell` of its own, and meanwhile tells how much is written, if that
    /// is `wanted`.
    pub(crate) fn telling<T>(
        &self,
        wanted: bool,
        tell: &mut (impl FnMut(Progress) + Send),
        work: impl FnOnce(&mut dyn FnMut(Progress)) -> T,
    ) -> T {
        if !wanted {
            return work(tell);
        }
        let tell = Mutex::new(tell);
        let say = &|progress| (tell.lock().unwrap_or_else(PoisonError::into_inner))(progress);
        let is_written = &AtomicBool::new(false);
        let (done, over) = mpsc::channel::<()>();
        let ticks = move || {
            let mut last = 0;
            while over.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                let (stored, bytes) = self.read();
                // Nobody learns anything from hearing the same again.
                if stored != last && !is_written.load(Ordering::SeqCst) {
                    last = stored;
                    say(Progress::Writing { done: stored, bytes });
                }
            }
        };
        thread::scope(|scope| {
            // Without a thread nothing is told of it.
            let _ = thread::Builder::new().name("amount".into()).spawn_scoped(scope, ticks);
            let result = work(&mut |progress| {
                if matches!(progress, Progress::Verifying { .. }) {
                    is_written.store(true, Ordering::SeqCst);
                }
                say(progress);
            });
            drop(done);
            result
        })
    }

    /// How much is written, and of how much, if that is known.
    fn read(&self) -> (u64, Option<u64>) {
        let (stored, expected) = self.meter.read();
        if !self.devices {
            return (stored, Some(expected));
        }
        let files = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let of_devices =
            files.filter(|file| file.file_name().to_str().is_some_and(gpu::is_of_devices));
        let bytes = of_devices.filter_map(|file| file.metadata().ok()).map(|data| data.len());
        (bytes.fold(stored, u64::saturating_add), None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_image::{Choice, ImageWriter, encode};
    use std::time::Instant;

    #[test]
    fn it_is_told_what_has_been_written() {
        let folder = std::env::temp_dir().join(format!("kedge-amount-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let options = Options::new(folder.clone());
        let amount = Amount::of(&options, false);
        let mut heard = Vec::new();
        let wait = |text: &mut dyn FnMut(Progress)| {
            let writer = ImageWriter::create(&folder.join("1.kimg")).unwrap();
            let writer = writer.metered(&options.meter);
            writer.expect(8192);
            writer.memory(0, 4096, 4096, &encode(&[7; 4096], Choice::Raw)).unwrap();
            let begin = Instant::now();
            while begin.elapsed() < 4 * TICK {
                thread::sleep(TICK / 4);
            }
            let (image, done, bytes) = (folder.clone(), 0, 1);
            text(Progress::Verifying { image, done, bytes });
            7
        };
        assert_eq!(amount.telling(true, &mut |progress| heard.push(progress), wait), 7);
        std::fs::remove_dir_all(&folder).unwrap();
        let written = Progress::Writing { done: 4096, bytes: Some(8192) };
        assert_eq!((heard.len(), &heard[0]), (2, &written), "{heard:?}");
    }
}
