//! What a node offers: its software devices, and what a container gets that is given some.

use crate::api::{CdiDevice, ContainerAllocateResponse, Device, HEALTHY, Mount, UNHEALTHY};
use kedge_cuda_types::arena::MAX_DEVICES;
use kedge_cuda_types::granted;
use std::collections::BTreeSet;
use std::path::Path;
use thiserror::Error;

/// Containers that may be given one device at a time.
pub const MAX_SHARE: u32 = 1024;
/// Bytes of an id that are told in an error.
const SHOWN: usize = 40;

/// How a container gets what belongs to a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum By {
    /// By mounts and variables, which every container runtime knows.
    Mounts { environment: Vec<(String, String)> },
    /// By the devices' names in a CDI specification of this kind, which lies where the runtime
    /// looks.
    Cdi(String),
}

/// The devices of a node.
#[derive(Debug, Clone)]
pub struct Offer {
    devices: u32,
    share: u32,
    mounts: Vec<Mount>,
    by: By,
}

#[derive(Debug, PartialEq, Eq, Error)]
pub enum OfferError {
    #[error("{0} software devices: give 1 to {MAX_DEVICES}")]
    Devices(u32),
    #[error("{0} containers a device: give 1 to {MAX_SHARE}")]
    Share(u32),
}

/// Why a container does not get what was asked for.
#[derive(Debug, PartialEq, Eq, Error)]
pub enum AllocateError {
    #[error("there is no device {0:?} here")]
    Unknown(String),
    #[error("{asked} devices for one container, and there are {devices}")]
    TooMany { asked: usize, devices: u32 },
    #[error("device {0} twice for one container: its shares are for several containers")]
    Twice(String),
    #[error("{0} is missing on this node: install kedge there")]
    Unhealthy(String),
}

impl Offer {
    /// # Errors
    /// There are no devices or too many, or no shares or too many.
    pub fn new(devices: u32, share: u32, mounts: Vec<Mount>, by: By) -> Result<Offer, OfferError> {
        if !(1..=MAX_DEVICES).contains(&devices) {
            return Err(OfferError::Devices(devices));
        }
        if !(1..=MAX_SHARE).contains(&share) {
            return Err(OfferError::Share(share));
        }
        Ok(Offer { devices, share, mounts, by })
    }

    /// What the kubelet knows the devices by: `soft0`, and where they are shared `soft0-0`.
    pub fn ids(&self) -> Vec<String> {
        let id = |device, share| match self.share {
            1 => name(device),
            _ => format!("{}-{share}", name(device)),
        };
        let all = (0..self.share).flat_map(|share| (0..self.devices).map(move |it| (it, share)));
        all.map(|(device, share)| id(device, share)).collect()
    }

    /// The first file of kedge's that is missing on this node.
    pub fn missing(&self) -> Option<&str> {
        let there = |mount: &&Mount| !Path::new(&mount.host_path).is_file();
        self.mounts.iter().find(there).map(|mount| &*mount.host_path)
    }

    /// All devices with their health: they are as healthy as kedge's files are there.
    pub fn listed(&self) -> Vec<Device> {
        let health = if self.missing().is_none() { HEALTHY } else { UNHEALTHY };
        let device = |id| Device { id, health: health.to_owned() };
        self.ids().into_iter().map(device).collect()
    }

    /// The number of the device that `id` means, or a share of it.
    fn device(&self, id: &str) -> Option<u32> {
        let (device, share) = match (self.share, id.split_once('-')) {
            (1, None) => (id, 0),
            (2.., Some((device, share))) => (device, plain(share)?),
            _ => return None,
        };
        let number = plain(device.strip_prefix("soft")?)?;
        (number < self.devices && share < self.share).then_some(number)
    }

    /// What a container gets that is given these devices.
    ///
    /// # Errors
    /// One is not there, or is named twice; kedge's files are missing.
    pub fn allocate(&self, ids: &[String]) -> Result<ContainerAllocateResponse, AllocateError> {
        if ids.len() > self.devices as usize {
            return Err(AllocateError::TooMany { asked: ids.len(), devices: self.devices });
        }
        let mut devices = BTreeSet::new();
        for id in ids {
            let device = self.device(id).ok_or_else(|| AllocateError::Unknown(shown(id)))?;
            if !devices.insert(device) {
                return Err(AllocateError::Twice(name(device)));
            }
        }
        if let Some(missing) = self.missing() {
            return Err(AllocateError::Unhealthy(missing.to_owned()));
        }
        Ok(self.edits(&devices))
    }

    fn edits(&self, devices: &BTreeSet<u32>) -> ContainerAllocateResponse {
        let mut edits = ContainerAllocateResponse::default();
        match &self.by {
            By::Cdi(kind) => {
                let named = |device: &u32| CdiDevice { name: format!("{kind}={}", name(*device)) };
                edits.cdi_devices = devices.iter().map(named).collect();
            }
            By::Mounts { environment } => {
                let granted = devices.iter().map(|device| granted::variable(*device));
                edits.envs = environment.iter().cloned().chain(granted).collect();
                edits.mounts = self.mounts.clone();
            }
        }
        edits
    }

    /// Chooses `size` of the `available` ids, those in `must` among them: no two of one device, and
    /// the devices first of which most shares are left.
    pub fn prefer(&self, available: &[String], must: &[String], size: usize) -> Vec<String> {
        let mut left = vec![0usize; self.devices as usize];
        let known = |id: &&String| self.device(id).is_some();
        for device in available.iter().filter_map(|id| self.device(id)) {
            left[device as usize] += 1;
        }
        let mut chosen: Vec<String> = must.iter().filter(known).take(size).cloned().collect();
        let mut taken: BTreeSet<_> = chosen.iter().filter_map(|id| self.device(id)).collect();
        let mut others: Vec<_> =
            available.iter().filter_map(|id| Some((self.device(id)?, id))).collect();
        others.sort_by_key(|(device, _)| (std::cmp::Reverse(left[*device as usize]), *device));
        for (device, id) in others {
            if chosen.len() < size && taken.insert(device) {
                chosen.push(id.clone());
            }
        }
        chosen
    }
}

/// A device's name, as it is in CDI specifications.
fn name(device: u32) -> String {
    format!("soft{device}")
}

/// A number as this program writes it: no sign and no zeros in front.
fn plain(text: &str) -> Option<u32> {
    text.parse().ok().filter(|number: &u32| number.to_string() == text)
}

/// As much of an id as is told to whoever asked for it.
fn shown(id: &str) -> String {
    id.chars().take(SHOWN).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(devices: u32, share: u32) -> Offer {
        let by = By::Mounts { environment: vec![("A".to_owned(), "b".to_owned())] };
        Offer::new(devices, share, Vec::new(), by).unwrap()
    }

    fn ids(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn containers_get_what_they_were_given() {
        let edits = offer(3, 1).allocate(&ids("soft2 soft0")).unwrap();
        let mut variables: Vec<_> = edits.envs.into_iter().collect();
        variables.sort();
        let expected = [("A", "b"), ("KEDGE_DEVICE_SOFT0", "soft"), ("KEDGE_DEVICE_SOFT2", "soft")];
        assert_eq!(variables, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
        let by = By::Cdi("kedge.dev/gpu".to_owned());
        let edits = Offer::new(2, 1, Vec::new(), by).unwrap().allocate(&ids("soft1")).unwrap();
        assert_eq!(edits.cdi_devices, [CdiDevice { name: "kedge.dev/gpu=soft1".to_owned() }]);
        assert!(edits.envs.is_empty() && edits.mounts.is_empty());
    }

    #[test]
    fn what_is_not_there_is_refused() {
        let offer = offer(2, 1);
        let long = "x".repeat(100_000);
        for id in ["soft2", "soft", "soft-1", "soft01", "soft+1", "soft0-0", "", "hard0", &*long] {
            let refused = offer.allocate(&[id.to_owned()]).unwrap_err();
            assert!(matches!(&refused, AllocateError::Unknown(told) if told.len() <= SHOWN));
        }
        let many = vec!["soft0".to_owned(); 100_000];
        let refused = offer.allocate(&many);
        assert_eq!(refused, Err(AllocateError::TooMany { asked: 100_000, devices: 2 }));
        let refused = offer.allocate(&ids("soft1 soft1"));
        assert_eq!(refused, Err(AllocateError::Twice("soft1".to_owned())));
        let mounts = vec![Mount { host_path: "/nonexistent/kedge".to_owned(), ..Mount::default() }];
        let without = Offer::new(1, 1, mounts, By::Cdi("a/b".to_owned())).unwrap();
        assert_eq!(without.listed()[0].health, UNHEALTHY);
        assert!(matches!(without.allocate(&ids("soft0")), Err(AllocateError::Unhealthy(_))));
    }

    #[test]
    fn shares_are_for_several_containers() {
        let offer = offer(2, 2);
        assert_eq!(offer.ids(), ids("soft0-0 soft1-0 soft0-1 soft1-1"));
        assert!(offer.allocate(&ids("soft0-1 soft1-0")).is_ok());
        let refused = offer.allocate(&ids("soft0-0 soft0-1"));
        assert_eq!(refused, Err(AllocateError::Twice("soft0".to_owned())));
        assert!(offer.allocate(&ids("soft0")).is_err());
        assert!(offer.allocate(&ids("soft0-2")).is_err());
    }

    #[test]
    fn the_device_is_preferred_of_which_most_is_left() {
        let offer = offer(2, 3);
        let available = ids("soft0-1 soft1-0 soft1-1 soft1-2 soft9-0");
        assert_eq!(offer.prefer(&available, &[], 1), ids("soft1-0"));
        assert_eq!(offer.prefer(&available, &[], 2), ids("soft1-0 soft0-1"));
        assert_eq!(offer.prefer(&available, &ids("soft0-1"), 2), ids("soft0-1 soft1-0"));
        // There are no more than two devices.
        assert_eq!(offer.prefer(&available, &[], usize::MAX).len(), 2);
    }
}
