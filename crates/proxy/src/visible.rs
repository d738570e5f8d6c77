//! Which of the job's devices a client sees, and in which order: CUDA_VISIBLE_DEVICES and
//! CUDA_DEVICE_ORDER, as the CUDA programming guide has them ("CUDA environment variables").
//!
//! The guide's numbers and UUIDs are those of the machine's GPUs; here they are those of the job's
//! devices, which are all that a program can know of.

use kedge_cuda_types::uuid;
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

/// An entry of CUDA_VISIBLE_DEVICES that ends the list; what follows it is hidden.
#[derive(Debug, PartialEq, Eq, Error)]
pub(crate) enum Cut {
    #[error("`{0}` is none of the job's devices; it and what follows are hidden")]
    Unknown(String),
    #[error("`{0}` begins the UUIDs of several devices; it and what follows are hidden")]
    Ambiguous(String),
    #[error(
        "`{0}` is an instance of a divided GPU (MIG), which kedge does not drive; it and what follows are hidden"
    )]
    Mig(String),
    /// NVIDIA's driver then shows no device at all.
    #[error("`{0}` names a device for the second time; all are hidden")]
    Twice(String),
}

/// Applies a client's environment to the devices of its job.
pub(crate) fn choose(devices: &[DeviceInfo], choice: &DeviceChoice) -> Visible {
    let mut order: Vec<usize> = (0..devices.len()).collect();
    if choice.pci_order {
        order.sort_by_key(|&at| devices[at].pci);
    }
    let Some(list) = &choice.visible else { return Visible { devices: order, cut: None } };
    let mut chosen = Vec::new();
    // An empty list hides all, without a word.
    for entry in list.split(',').map(str::trim).filter(|_| !list.trim().is_empty()) {
        match find(devices, &order, entry) {
            Ok(at) if chosen.contains(&at) => {
                return Visible { devices: Vec::new(), cut: Some(Cut::Twice(entry.to_owned())) };
            }
            Ok(at) => chosen.push(at),
            Err(cut) => return Visible { devices: chosen, cut: Some(cut) },
        }
    }
    Visible { devices: chosen, cut: None }
}

/// The device that an entry names: by its number in `order`, or by the beginning of its UUID.
fn find(devices: &[DeviceInfo], order: &[usize], entry: &str) -> Result<usize, Cut> {
    let unknown = || Cut::Unknown(entry.to_owned());
    if entry.starts_with("MIG-") {
        return Err(Cut::Mig(entry.to_owned()));
    }
    if !entry.starts_with("GPU-") {
        let number: usize = entry.parse().map_err(|_| unknown())?;
        return order.get(number).copied().ok_or_else(unknown);
    }
    let mut named = order.iter().filter(|&&at| uuid::text(&devices[at].uuid).starts_with(entry));
    match (named.next(), named.next()) {
        (Some(&at), None) => Ok(at),
        (Some(_), Some(_)) => Err(Cut::Ambiguous(entry.to_owned())),
        (None, _) => Err(unknown()),
    }
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
        assert_eq!(shown(" 3 , 0 "), [3, 0]);
        assert_eq!(visible("").devices, []);
        assert_eq!(visible("").cut, None);
    }

    #[test]
    fn an_invalid_entry_hides_what_follows() {
        // The guide's own example.
        assert_eq!(shown("0,2,-1,1"), [0, 2]);
        assert_eq!(visible("0,2,-1,1").cut, Some(Cut::Unknown("-1".into())));
        for (list, left) in [("-1", vec![]), ("4", vec![]), ("1,x,2", vec![1]), ("1,,2", vec![1])] {
            assert_eq!(shown(list), left, "{list}");
            assert!(visible(list).cut.is_some(), "{list}");
        }
        assert_eq!(shown("99999999999999999999"), []);
    }

    #[test]
    fn uuids_may_be_cut_short_while_they_are_unique() {
        assert_eq!(shown("GPU-ab01,GPU-cd02"), [1, 2]);
        assert_eq!(shown("GPU-cd030000-0000-0000-0000-000000000000,0"), [3, 0]);
        assert_eq!(visible("1,GPU-ab").cut, Some(Cut::Ambiguous("GPU-ab".into())));
        assert_eq!(visible("1,GPU-ab").devices, [1]);
        assert_eq!(visible("GPU-ef").cut, Some(Cut::Unknown("GPU-ef".into())));
        assert_eq!(visible("gpu-ab01").cut, Some(Cut::Unknown("gpu-ab01".into())));
    }

    #[test]
    fn instances_of_divided_gpus_are_refused_by_name() {
        let mig = "MIG-GPU-ab000000-0000-0000-0000-000000000000/1/0";
        let found = visible(&format!("2,{mig}"));
        assert_eq!(found, Visible { devices: vec![2], cut: Some(Cut::Mig(mig.into())) });
    }

    #[test]
    fn a_device_named_twice_hides_all() {
        for list in ["1,1", "0,1,2,1", "1,GPU-ab01"] {
            let found = visible(list);
            assert_eq!(found.devices, [], "{list}");
            assert!(matches!(found.cut, Some(Cut::Twice(_))), "{list}");
        }
    }

    #[test]
    fn the_bus_order_counts_before_numbers_do() {
        let choice = |visible: Option<&str>| DeviceChoice {
            visible: visible.map(|list| Text::truncated(list.to_owned())),
            pci_order: true,
        };
        assert_eq!(choose(&devices(), &choice(None)).devices, [3, 2, 1, 0]);
        assert_eq!(choose(&devices(), &choice(Some("0,GPU-ab00"))).devices, [3, 0]);
    }
}
