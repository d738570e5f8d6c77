//! Which of the job's devices a client sees, and in which order: CUDA_VISIBLE_DEVICES and
//! CUDA_DEVICE_ORDER, as the CUDA programming guide has them ("CUDA environment variables"), and in
//! what it leaves open as driver 580 was seen to read them.
//!
//! The guide's numbers and UUIDs are those of the machine's GPUs; here they are those of the job's
//! devices, which are all that a program can know of.

use kedge_cuda_types::{CuError, uuid};
use kedge_protocol::{DeviceChoice, DeviceInfo};
use thiserror::Error;

/// What the environment makes of a job's devices.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Visible {
    /// Positions among the job's devices, in the client's order.
    pub(crate) devices: Vec<usize>,
    /// Why CUDA_VISIBLE_DEVICES says less than it seems to.
    pub(crate) cut: Option<Cut>,
}

/// An entry of CUDA_VISIBLE_DEVICES that ends the list.
#[derive(Debug, PartialEq, Eq, Error)]
pub(crate) enum Cut {
    #[error("`{0}` is none of the job's devices, and hides what follows")]
    Unknown(String),
    #[error("`{0}` begins the UUIDs of several devices, and hides what follows")]
    Ambiguous(String),
    #[error(
        "`{0}` is an instance of a divided GPU (MIG), which kedge does not drive, and hides what follows"
    )]
    Mig(String),
    #[error("`{0}` is a number after UUIDs, or the reverse, and hides what follows")]
    Mixed(String),
    #[error("`{0}` names a device for the second time, which is an error")]
    Twice(String),
}

impl Cut {
    /// What cuInit answers where this leaves no device.
    pub(crate) fn code(&self) -> CuError {
        match self {
            Cut::Twice(_) => CuError::INVALID_DEVICE,
            _ => CuError::NO_DEVICE,
        }
    }
}

/// Applies a client's environment to the devices of its job.
pub(crate) fn choose(devices: &[DeviceInfo], choice: &DeviceChoice) -> Visible {
    let mut order: Vec<usize> = (0..devices.len()).collect();
    if choice.pci_order {
        order.sort_by_key(|&at| devices[at].pci);
    }
    let Some(list) = &choice.visible else { return Visible { devices: order, cut: None } };
    // An empty list hides all, without a word.
    if list.trim().is_empty() {
        return Visible { devices: Vec::new(), cut: None };
    }
    let by_uuid = list.starts_with(UUID);
    let mut chosen = Vec::new();
    for entry in list.split(',') {
        match find(devices, &order, entry, by_uuid) {
            Ok(at) if chosen.contains(&at) => {
                let cut = Some(Cut::Twice(entry.to_owned()));
                return Visible { devices: Vec::new(), cut };
            }
            Ok(at) => chosen.push(at),
            Err(cut) => return Visible { devices: chosen, cut: Some(cut) },
        }
    }
    Visible { devices: chosen, cut: None }
}

/// How the UUIDs of devices begin, and those of instances of divided ones.
const UUID: &str = "GPU-";
const MIG: &str = "MIG-";

/// The device that an entry names: by its number in `order`, or by its UUID or enough of it.
fn find(devices: &[DeviceInfo], order: &[usize], entry: &str, by_uuid: bool) -> Result<usize, Cut> {
    let unknown = || Cut::Unknown(entry.to_owned());
    let number = number(entry);
    match (entry.starts_with(UUID), number) {
        _ if entry.starts_with(MIG) => Err(Cut::Mig(entry.to_owned())),
        (true, _) if !by_uuid => Err(Cut::Mixed(entry.to_owned())),
        (true, _) => by_beginning(devices, order, entry),
        (false, Some(_)) if by_uuid => Err(Cut::Mixed(entry.to_owned())),
        (false, Some(number)) => order.get(number).copied().ok_or_else(unknown),
        (false, None) => Err(unknown()),
    }
}

fn by_beginning(devices: &[DeviceInfo], order: &[usize], entry: &str) -> Result<usize, Cut> {
    // What follows a whole UUID does not count.
    let named = |at: &&usize| {
        let uuid = uuid::text(&devices[**at].uuid);
        uuid.starts_with(entry) || entry.starts_with(&uuid)
    };
    let mut found = order.iter().filter(named);
    match (found.next(), found.next()) {
        (Some(&at), None) => Ok(at),
        (Some(_), Some(_)) => Err(Cut::Ambiguous(entry.to_owned())),
        (None, _) => Err(Cut::Unknown(entry.to_owned())),
    }
}

/// The number that an entry begins with, as strtol reads it: spaces before it and anything after it
/// do not count. `None` for a negative one.
fn number(entry: &str) -> Option<usize> {
    let text = entry.trim_start();
    let text = text.strip_prefix('+').unwrap_or(text);
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_wire::{List, Text};

    /// Four devices, whose bus numbers fall, and whose UUIDs begin alike two by two.
    fn devices() -> Vec<DeviceInfo> {
        let device = |index: u8| DeviceInfo {
            name: Text::default(),
            uuid: [
                [0xab, 0xcd][usize::from(index / 2)],
                index,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
            ],
            pci: [0, 9 - i32::from(index), 0],
            total_memory: 0,
            exact: true,
            apart: false,
            attributes: List::default(),
        };
        (0..4).map(device).collect()
    }

    fn visible(list: &str) -> Visible {
        let visible = Some(Text::truncated(list.to_owned()));
        choose(&devices(), &DeviceChoice { visible, pci_order: false })
    }

    fn shown(list: &str) -> Vec<usize> {
        visible(list).devices
    }

    #[test]
    fn unset_shows_all() {
        let all = choose(&devices(), &DeviceChoice::default());
        assert_eq!(all, Visible { devices: vec![0, 1, 2, 3], cut: None });
    }

    #[test]
    fn numbers_select_and_order() {
        assert_eq!(shown("2,1"), [2, 1]);
        for (list, seen) in [(" 3 , 0 ", [3, 0]), ("+3,00", [3, 0]), ("3a,0x1", [3, 0])] {
            assert_eq!(visible(list), Visible { devices: seen.into(), cut: None }, "{list}");
        }
        for nothing in ["", " "] {
            assert_eq!(visible(nothing), Visible { devices: vec![], cut: None });
        }
    }

    #[test]
    fn an_invalid_entry_hides_what_follows() {
        // The guide's own example.
        assert_eq!(shown("0,2,-1,1"), [0, 2]);
        assert_eq!(visible("0,2,-1,1").cut, Some(Cut::Unknown("-1".into())));
        for (list, left) in
            [("-1", vec![]), ("4", vec![]), ("1,x,2", vec![1]), ("1,,2", vec![1]), (",1", vec![])]
        {
            assert_eq!(shown(list), left, "{list}");
            assert_eq!(visible(list).cut.unwrap().code(), CuError::NO_DEVICE, "{list}");
        }
        assert!(shown("99999999999999999999").is_empty());
    }

    const FIRST: &str = "GPU-ab000000-0000-0000-0000-000000000000";

    #[test]
    fn uuids_may_be_cut_short_while_they_are_unique() {
        assert_eq!(shown("GPU-ab01,GPU-cd02"), [1, 2]);
        assert!(shown(&format!("GPU-cd,{FIRST}")).is_empty());
        assert_eq!(shown(&format!("GPU-cd03,{FIRST} ,GPU-ab01")), [3, 0, 1]);
        assert_eq!(visible("GPU-ab01,GPU-ab").cut, Some(Cut::Ambiguous("GPU-ab".into())));
        assert_eq!(visible("GPU-ab01,GPU-ab").devices, [1]);
        for none in ["GPU-ef", "gpu-ab01", "ab01", " GPU-ab01"] {
            assert_eq!(visible(none).cut, Some(Cut::Unknown(none.into())));
        }
    }

    #[test]
    fn numbers_and_uuids_do_not_mix() {
        assert_eq!(visible(&format!("1,{FIRST}")).devices, [1]);
        let reverse = visible(&format!("{FIRST},1"));
        assert_eq!(reverse, Visible { devices: vec![0], cut: Some(Cut::Mixed("1".into())) });
    }

    #[test]
    fn instances_of_divided_gpus_are_refused_by_name() {
        let mig = format!("MIG-{FIRST}/1/0");
        let found = visible(&format!("2,{mig}"));
        assert_eq!(found, Visible { devices: vec![2], cut: Some(Cut::Mig(mig)) });
    }

    #[test]
    fn a_device_named_twice_is_an_error() {
        for list in ["1,1", "0,1,2,1", "GPU-ab01,GPU-ab010"] {
            let found = visible(list);
            assert!(found.devices.is_empty(), "{list}");
            assert_eq!(found.cut.unwrap().code(), CuError::INVALID_DEVICE);
        }
    }

    #[test]
    fn the_bus_order_counts_before_numbers_do() {
        let choice = |visible: Option<&str>| DeviceChoice {
            visible: visible.map(|list| Text::truncated(list.to_owned())),
            pci_order: true,
        };
        assert_eq!(choose(&devices(), &choice(None)).devices, [3, 2, 1, 0]);
        assert_eq!(choose(&devices(), &choice(Some("0,3"))).devices, [3, 0]);
    }
}
