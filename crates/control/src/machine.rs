//! What a machine has to offer, as the proxy's program there tells (`kedge-proxy --describe`), and
//! the devices that follow from it where nobody names any.

use crate::gpu::GpuSpec;
use kedge_socket::{Channel, SocketError};
use kedge_wire::{Bytes, Text, wire};
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use thiserror::Error;

/// Has the proxy's program describe the machine to its standard output, a socket, and end.
pub const DESCRIBE: &str = "--describe";
/// Changes with what the description means.
const VERSION: u32 = 1;
/// How the program ends that knows no such option.
const EXIT_USAGE: i32 = 2;
/// For the program to start and to look at some files.
const LIMIT: Duration = Duration::from_secs(20);

wire! {
    /// The one message: what a machine has.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Description {
        pub version: u32,
        pub driver: Option<Bytes<4096>>,
        pub gpus: u32,
        pub obstacle: Option<Text<4096>>,
    }
}

/// Why a machine's devices are not known.
#[derive(Debug, Error)]
pub enum MachineError {
    #[error("cannot start {program}: {source}", program = .program.display())]
    Start { program: PathBuf, source: io::Error },
    #[error("{program} does not tell what devices there are: {source}", program = .program.display())]
    Answer { program: PathBuf, source: SocketError },
    #[error("{program} is of another version of kedge: install matching parts", program = .program.display())]
    Version { program: PathBuf },
}

/// NVIDIA's driver and GPUs, as far as files tell: nothing is opened, and no GPU is woken.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Machine {
    /// The driver's libcuda.so.1.
    pub driver: Option<PathBuf>,
    /// GPUs that have a device node.
    pub gpus: usize,
    /// What stands in the way of using the GPUs, and what mends it, in one line.
    pub obstacle: Option<String>,
}

impl Machine {
    /// Asks the proxy's program at `program`, with this process's environment.
    ///
    /// # Errors
    /// The program does not start, does not answer in time, or is of another version.
    pub fn ask(program: &Path) -> Result<Machine, MachineError> {
        let start = |source| MachineError::Start { program: program.to_owned(), source };
        let (near, far) = Channel::pair().map_err(start)?;
        // The command, which holds the far end as well, is gone after this statement: the program's
        // end is the end of the connection.
        let mut child = Command::new(program)
            .arg(DESCRIBE)
            .stdin(Stdio::null())
            .stdout(far)
            .stderr(Stdio::null())
            .spawn()
            .map_err(start)?;
        let answer = near.receive::<Description>(LIMIT);
        // It has answered or will not: one that does not end by itself must not hold up its asker.
        let _ = child.kill();
        let status = child.wait().ok().and_then(|status| status.code());
        let answer = answer.map_err(|source| {
            let program = program.to_owned();
            match source {
                SocketError::Malformed(_) | SocketError::TooLong { .. } => {
                    MachineError::Version { program }
                }
                // One that does not know the option.
                SocketError::Closed if status == Some(EXIT_USAGE) => {
                    MachineError::Version { program }
                }
                source => MachineError::Answer { program, source },
            }
        })?;
        Machine::read(answer.0).ok_or_else(|| MachineError::Version { program: program.to_owned() })
    }

    fn read(told: Description) -> Option<Machine> {
        let Description { version: VERSION, driver, gpus, obstacle } = told else { return None };
        let driver = driver.map(|path| OsString::from_vec(path.into_inner()).into());
        Some(Machine {
            driver,
            gpus: usize::try_from(gpus).ok()?,
            obstacle: obstacle.map(Text::into_inner),
        })
    }

    /// Tells whoever has the other end of `socket`.
    ///
    /// # Errors
    /// `socket` is none, or nobody reads there.
    pub fn tell(self, socket: OwnedFd) -> Result<(), SocketError> {
        let path = |path: PathBuf| Bytes::new(path.as_os_str().as_bytes().to_vec());
        let too_long = |_| io::Error::from(io::ErrorKind::InvalidData);
        let description = Description {
            version: VERSION,
            driver: self.driver.map(path).transpose().map_err(too_long)?,
            gpus: u32::try_from(self.gpus).unwrap_or(u32::MAX),
            obstacle: self.obstacle.map(Text::truncated),
        };
        Channel::new(socket).send(&description, &[], LIMIT)
    }

    /// Returns the devices of a job that names none: the GPUs where there are some with a driver,
    /// else one software device. And why, in words.
    ///
    /// A GPU that is there but cannot be used is not passed over in silence: the job then fails
    /// with what is wrong, because a software device is slower by orders of magnitude.
    pub fn default_gpu(&self) -> (GpuSpec, String) {
        let local = GpuSpec::Local { ordinals: Vec::new() };
        let soft = GpuSpec::Soft { devices: 1, apart: false };
        match (&self.driver, self.gpus) {
            (Some(driver), 1) => (local, format!("there is a GPU, and {}", driver.display())),
            (Some(driver), 2..) => {
                (local, format!("there are {} GPUs, and {}", self.gpus, driver.display()))
            }
            (Some(_), 0) => (soft, "there is an NVIDIA driver, but no GPU".into()),
            (None, 0) => (soft, "there is no NVIDIA driver and no GPU".into()),
            (None, _) => (soft, "there is a GPU, but no NVIDIA driver (libcuda.so.1)".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_arrives_as_it_was() {
        let machine = Machine {
            driver: Some("/lib/\u{e9}/libcuda.so.1".into()),
            gpus: 3,
            obstacle: Some("none".into()),
        };
        let (near, far) = Channel::pair().unwrap();
        machine.clone().tell(far).unwrap();
        let (told, _) = near.receive::<Description>(LIMIT).unwrap();
        assert_eq!(Machine::read(told.clone()), Some(machine));
        assert_eq!(Machine::read(Description { version: VERSION + 1, ..told }), None);
    }

    #[test]
    fn a_program_that_tells_nothing_is_named() {
        for (program, said) in [("/bin/true", "does not tell"), ("/nonexistent", "cannot start")] {
            let error = Machine::ask(Path::new(program)).unwrap_err().to_string();
            assert!(error.contains(program) && error.contains(said), "{error}");
        }
    }

    /// One that knows no such option, and one that says something else.
    #[test]
    fn a_program_of_another_version_is_told() {
        for program in ["/bin/sh", "/bin/echo"] {
            let error = Machine::ask(Path::new(program)).unwrap_err();
            assert!(matches!(error, MachineError::Version { .. }), "{program}: {error}");
        }
    }

    #[test]
    fn gpus_are_the_default_where_a_driver_drives_them() {
        let choice = |driver: bool, gpus| {
            let driver = driver.then(|| PathBuf::from("/usr/lib/libcuda.so.1"));
            Machine { driver, gpus, obstacle: None }.default_gpu()
        };
        assert_eq!(choice(true, 1).0, GpuSpec::Local { ordinals: vec![] });
        assert_eq!(choice(true, 8).0, GpuSpec::Local { ordinals: vec![] });
        assert!(choice(true, 8).1.contains("8 GPUs"));
        for (driver, gpus, why) in
            [(true, 0, "no GPU"), (false, 0, "no NVIDIA driver"), (false, 1, "libcuda.so.1")]
        {
            let (gpu, said) = choice(driver, gpus);
            assert_eq!(gpu, GpuSpec::Soft { devices: 1, apart: false });
            assert!(said.contains(why), "{said}");
        }
    }
}
