//! What this machine has to offer, and the devices that follow from it where nobody names any.

use crate::backend::GpuSpec;
use kedge_device_nvidia::{driver_path, gpu_nodes};
use std::path::PathBuf;

pub use kedge_device_nvidia::obstacle;

/// NVIDIA's driver and GPUs, as far as files tell: nothing is opened, and no GPU is woken.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Machine {
    /// The driver's libcuda.so.1.
    pub driver: Option<PathBuf>,
    /// GPUs that have a device node.
    pub gpus: usize,
}

impl Machine {
    pub fn look() -> Machine {
        Machine { driver: driver_path(), gpus: gpu_nodes().len() }
    }

    /// The devices of a job that names none: the GPUs where there are some with a driver, else one
    /// software device. And why, in words.
    ///
    /// A GPU that is there but cannot be used is not passed over in silence: the job then fails with
    /// what is wrong, because a software device is slower by orders of magnitude.
    pub fn default_gpu(&self) -> (GpuSpec, String) {
        let local = GpuSpec::Local { ordinals: Vec::new() };
        let soft = GpuSpec::Soft { devices: 1 };
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
    fn gpus_are_the_default_where_a_driver_drives_them() {
        let choice = |driver: bool, gpus| {
            let driver = driver.then(|| PathBuf::from("/usr/lib/libcuda.so.1"));
            Machine { driver, gpus }.default_gpu()
        };
        assert_eq!(choice(true, 1).0, GpuSpec::Local { ordinals: vec![] });
        assert_eq!(choice(true, 8).0, GpuSpec::Local { ordinals: vec![] });
        assert!(choice(true, 8).1.contains("8 GPUs"));
        for (driver, gpus, why) in
            [(true, 0, "no GPU"), (false, 0, "no NVIDIA driver"), (false, 1, "libcuda.so.1")]
        {
            let (gpu, said) = choice(driver, gpus);
            assert_eq!(gpu, GpuSpec::Soft { devices: 1 });
            assert!(said.contains(why), "{said}");
        }
    }
}
