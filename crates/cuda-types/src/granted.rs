//! The software devices that a container was given: variables of its environment, one a device,
//! which container tools set (`kedge cdi`, `kedge k8s plugin`).

use crate::arena::MAX_DEVICES;
use std::ffi::OsStr;

/// What the name of a granted device's variable begins with. The device's own name follows, so that
/// the variables of several devices do not replace each other.
pub const PREFIX: &str = "KEDGE_DEVICE_";
/// The value of such a variable: a device in software.
pub const SOFT: &str = "soft";

/// Returns the variable, name and value, that grants the node's software device of this number.
pub fn variable(device: u32) -> (String, String) {
    (format!("{PREFIX}SOFT{device}"), SOFT.to_owned())
}

/// Counts the software devices that these variables grant; no more than a program can have.
pub fn count<N, V>(variables: impl IntoIterator<Item = (N, V)>) -> u32
where
    N: AsRef<OsStr>,
    V: AsRef<OsStr>,
{
    let granted = |(name, value): &(N, V)| {
        name.as_ref().as_encoded_bytes().starts_with(PREFIX.as_bytes()) && value.as_ref() == SOFT
    };
    let count = variables.into_iter().filter(granted).take(MAX_DEVICES as usize).count();
    count as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_variable_is_a_device() {
        assert_eq!(count::<&str, &str>([]), 0);
        let given = [("KEDGE_DEVICE_SOFT0", "soft"), ("KEDGE_DEVICE_SOFT7", "soft")];
        let others = [("KEDGE_DEVICE_X", "hard"), ("KEDGE_DEVICES", "soft"), ("PATH", "soft")];
        assert_eq!(count(given.into_iter().chain(others)), 2);
        let many = (0..100).map(variable);
        assert_eq!(count(many), MAX_DEVICES);
    }
}
