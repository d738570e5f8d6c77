//! Devices of several places in one list, such as `a/0,a/1,b/0,local:0,soft:1`.

use super::{BadGpuSpec, GpuSpec, Server, simple};
use kedge_cuda_types::arena::MAX_DEVICES;
use std::fmt;

/// A list of devices of at least two places; a program counts them in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Several {
    /// In order, each once.
    devices: Vec<Device>,
}

/// A device of one place.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Device {
    /// A software device of this machine.
    Soft,
    /// A GPU of this machine, as the driver counts.
    Local(u32),
    /// A server's, by number.
    Remote(Server, u32),
}

/// Some of a list's devices, which one executor has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// All of the list's devices there: never [`GpuSpec::Several`].
    pub spec: GpuSpec,
    /// Which of them a program sees, by their positions in `spec`.
    pub positions: Vec<u32>,
    /// As which devices of the program it sees these: rising.
    pub windows: Vec<u32>,
}

impl Device {
    fn is_with(&self, other: &Device) -> bool {
        match (self, other) {
            (Device::Remote(a, _), Device::Remote(b, _)) => a == b,
            (a, b) => std::mem::discriminant(a) == std::mem::discriminant(b),
        }
    }
}

impl Several {
    /// Cuts a text into what names devices: a number alone belongs to what is before it.
    pub(super) fn items(text: &str) -> Vec<String> {
        let mut items: Vec<String> = Vec::new();
        for part in text.split(',') {
            let takes_numbers = |item: &&mut String| {
                item.contains('/') || item.starts_with("local:") || part.is_empty()
            };
            let alone = part.bytes().all(|c| c.is_ascii_digit());
            match items.last_mut().filter(takes_numbers).filter(|_| alone) {
                Some(item) => {
                    item.push(',');
                    item.push_str(part);
                }
                None => items.push(part.to_owned()),
            }
        }
        items
    }

    /// Reads a list; where all of it is of one place, that place.
    ///
    /// # Errors
    /// An item that names no devices, or not which; a device that is named twice; too many.
    pub(super) fn of(text: &str, items: &[String]) -> Result<GpuSpec, BadGpuSpec> {
        let mut devices: Vec<Device> = Vec::new();
        for item in items {
            let named = simple(item).ok_or_else(|| BadGpuSpec::Unknown(text.to_owned()))?;
            for device in devices_of(item, named)? {
                // One software device is like another.
                if device != Device::Soft && devices.contains(&device) {
                    return Err(BadGpuSpec::Twice(item.clone()));
                }
                devices.push(device);
            }
        }
        if devices.len() > MAX_DEVICES as usize {
            return Err(BadGpuSpec::TooMany(devices.len()));
        }
        let several = Several { devices };
        match &several.places()[..] {
            [one] => Ok(one.spec.clone()),
            _ => Ok(GpuSpec::Several(several)),
        }
    }

    /// Returns how many devices there are.
    #[expect(clippy::len_without_is_empty, reason = "a list of several places is never empty")]
    pub fn len(&self) -> usize {
        self.devices.len()
    }

    /// Returns its places, in the order in which they are first named.
    pub fn places(&self) -> Vec<Place> {
        let all: Vec<usize> = (0..self.devices.len()).collect();
        self.seen(&all)
    }

    /// Returns the places of which a program sees devices that sees those of the list that `chosen`
    /// names by their positions, in that order, each once.
    pub fn seen(&self, chosen: &[usize]) -> Vec<Place> {
        let mut places: Vec<(&Device, Place)> = Vec::new();
        for device in &self.devices {
            if !places.iter().any(|(first, _)| first.is_with(device)) {
                let here: Vec<&Device> =
                    self.devices.iter().filter(|other| other.is_with(device)).collect();
                let (positions, windows) = Default::default();
                places.push((device, Place { spec: spec_of(&here), positions, windows }));
            }
        }
        for (window, &at) in (0..).zip(chosen) {
            let Some(device) = self.devices.get(at) else { continue };
            let before = self.devices[..at].iter().filter(|other| other.is_with(device)).count();
            if let Some((_, place)) = places.iter_mut().find(|(first, _)| first.is_with(device)) {
                place.positions.push(before as u32);
                place.windows.push(window);
            }
        }
        places.retain(|(_, place)| !place.windows.is_empty());
        places.into_iter().map(|(_, place)| place).collect()
    }
}

/// Returns the devices that an item of a list names.
fn devices_of(item: &str, named: GpuSpec) -> Result<Vec<Device>, BadGpuSpec> {
    match named {
        GpuSpec::Soft { apart: true, .. } => Err(BadGpuSpec::Apart(item.to_owned())),
        GpuSpec::Soft { devices, .. } => Ok(vec![Device::Soft; devices as usize]),
        GpuSpec::Local { ordinals: list } | GpuSpec::Remote { devices: list, .. }
            if list.is_empty() =>
        {
            Err(BadGpuSpec::Unnumbered(item.to_owned()))
        }
        GpuSpec::Local { ordinals } => Ok(ordinals.into_iter().map(Device::Local).collect()),
        GpuSpec::Remote { server, devices } => {
            Ok(devices.into_iter().map(|number| Device::Remote(server.clone(), number)).collect())
        }
        GpuSpec::Several(several) => Ok(several.devices),
    }
}

/// Returns what names devices that are all of one place.
fn spec_of(devices: &[&Device]) -> GpuSpec {
    let number = |device: &&Device| match device {
        Device::Soft => None,
        Device::Local(number) | Device::Remote(_, number) => Some(*number),
    };
    let numbers = devices.iter().filter_map(number).collect();
    match devices.first() {
        Some(Device::Local(_)) => GpuSpec::Local { ordinals: numbers },
        Some(Device::Remote(server, _)) => {
            GpuSpec::Remote { server: server.clone(), devices: numbers }
        }
        _ => GpuSpec::Soft { devices: devices.len() as u32, apart: false },
    }
}

impl fmt::Display for Several {
    /// Neighbours of one place are named as one item.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut comma = "";
        for run in self.devices.chunk_by(Device::is_with) {
            let run: Vec<&Device> = run.iter().collect();
            write!(f, "{comma}{}", spec_of(&run))?;
            comma = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<GpuSpec, BadGpuSpec> {
        text.parse()
    }

    #[test]
    fn lists_read_as_people_write_them() {
        for (text, shown) in [
            ("a/0,a/1,b/0,local:0,soft:1", "a:7531/0,1,b:7531/0,local:0,soft"),
            ("soft,a:9/1,0,[::1]/2", "soft,a:9/1,0,[::1]:7531/2"),
            ("soft:2,a/0,soft", "soft:2,a:7531/0,soft"),
            ("a/0,b/0,a/1", "a:7531/0,b:7531/0,a:7531/1"),
            ("local:3,1,a/0", "local:3,1,a:7531/0"),
        ] {
            let spec = of(text).unwrap();
            assert!(matches!(spec, GpuSpec::Several(_)), "{text}");
            assert_eq!(spec.to_string(), shown);
            assert_eq!(of(shown), Ok(spec), "{text}");
        }
        // What is of one place is as without a list.
        for (text, one) in
            [("a/0,a/1", "a:7531/0,1"), ("soft,soft:2", "soft:3"), ("local:1,local:0", "local:1,0")]
        {
            assert_eq!(of(text), of(one));
            assert!(!matches!(of(text), Ok(GpuSpec::Several(_))), "{text}");
        }
    }

    #[test]
    fn lists_that_cannot_be_are_refused() {
        let unnumbered = BadGpuSpec::Unnumbered;
        for text in ["a/0,", ",a/0", "a/0,,b/0", "soft,1", "a/0,soft:0", "a/0,none", "soft:8,9"] {
            assert!(matches!(of(text), Err(BadGpuSpec::Unknown(_) | BadGpuSpec::Unnumbered(_))));
        }
        assert_eq!(of("a,soft"), Err(unnumbered("a".into())));
        assert_eq!(of("soft,local"), Err(unnumbered("local".into())));
        assert_eq!(of("a/0,b/0,a/0"), Err(BadGpuSpec::Twice("a/0".into())));
        assert_eq!(of("a/0,soft:16"), Err(BadGpuSpec::TooMany(17)));
        assert_eq!(of("a/0,soft:2:apart"), Err(BadGpuSpec::Apart("soft:2:apart".into())));
    }

    fn several(text: &str) -> Several {
        let Ok(GpuSpec::Several(several)) = of(text) else { panic!("{text}") };
        several
    }

    fn told(places: &[Place]) -> Vec<String> {
        let one = |place: &Place| {
            let Place { spec, positions, windows } = place;
            format!("{spec} {positions:?} {windows:?}")
        };
        places.iter().map(one).collect()
    }

    #[test]
    fn what_is_of_one_machine_is_one_place() {
        let list = several("a/4,b/0,a/2,soft,b/7,soft:2");
        assert_eq!(
            told(&list.places()),
            ["a:7531/4,2 [0, 1] [0, 2]", "b:7531/0,7 [0, 1] [1, 4]", "soft:3 [0, 1, 2] [3, 5, 6]"]
        );
    }

    #[test]
    fn a_program_sees_what_it_has_chosen() {
        let list = several("a/4,b/0,a/2,soft");
        assert_eq!(told(&list.seen(&[3, 2, 0])), ["a:7531/4,2 [1, 0] [1, 2]", "soft [0] [0]"]);
        assert_eq!(told(&list.seen(&[])), [""; 0]);
        assert_eq!(told(&list.seen(&[9])), [""; 0]);
    }

    #[test]
    fn a_driver_shows_those_of_this_machine() {
        assert_eq!(of("a/0,local:3,1").unwrap().shown().as_deref(), Some("3,1"));
        assert_eq!(of("a/0,soft").unwrap().shown(), None);
    }
}
