//! Chooses which of a server's devices a session gets.

use crate::ServeSpec;
use crate::refusal::Refusal;
use kedge_control::gpu::GpuSpec;
use kedge_keys::Limits;
use std::collections::BTreeSet;

/// The devices of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chosen {
    /// The devices as the session's proxy opens them.
    pub(crate) gpu: GpuSpec,
    /// The server's numbers of the devices.
    pub(crate) numbers: Vec<u32>,
}

impl Chosen {
    /// Returns the devices whose numbers are `wanted`, or all that the session's key may have if it
    /// wants none by number. `in_use` are the devices of the key's other sessions.
    ///
    /// # Errors
    /// A device is not there, or the key may not have it, or not so many.
    pub(crate) fn of(
        spec: &ServeSpec,
        wanted: &[u32],
        limits: &Limits,
        in_use: &BTreeSet<u32>,
    ) -> Result<Chosen, Refusal> {
        let limited = limits.gpus.is_some() || limits.devices.is_some();
        if wanted.is_empty() && !limited {
            let numbers = (0..).take(spec.devices).collect();
            return Ok(Chosen { gpu: spec.gpu.clone(), numbers });
        }
        let numbers = match wanted {
            [] => unnamed(spec, limits, in_use)?,
            wanted => wanted.to_vec(),
        };
        check(&numbers, limits, in_use)?;
        Ok(Chosen { gpu: named(spec, &numbers)?, numbers })
    }
}

/// Returns the numbers of the devices that a key may have. If its limit allows fewer, those that it
/// uses come first.
fn unnamed(spec: &ServeSpec, limits: &Limits, in_use: &BTreeSet<u32>) -> Result<Vec<u32>, Refusal> {
    let there: Vec<u32> = (0..).take(spec.devices).collect();
    let allowed = limits.devices.clone().unwrap_or_else(|| there.clone());
    let allowed: Vec<u32> = allowed.into_iter().filter(|number| there.contains(number)).collect();
    if allowed.is_empty() {
        return Err(Refusal::Unnamed);
    }
    let most = limits.gpus.map_or(allowed.len(), |most| most as usize);
    let (used, new): (Vec<u32>, Vec<u32>) =
        allowed.iter().partition(|number| in_use.contains(number));
    let chosen: BTreeSet<u32> = used.into_iter().chain(new).take(most.max(1)).collect();
    Ok(allowed.into_iter().filter(|number| chosen.contains(number)).collect())
}

/// Checks that a key may use `numbers` in addition to the devices that it uses.
fn check(numbers: &[u32], limits: &Limits, in_use: &BTreeSet<u32>) -> Result<(), Refusal> {
    if let Some(allowed) = &limits.devices
        && let Some(number) = numbers.iter().copied().find(|number| !allowed.contains(number))
    {
        let may: Vec<String> = allowed.iter().map(u32::to_string).collect();
        return Err(Refusal::NotYours { number, may: may.join(", ") });
    }
    // A device that is named twice counts twice.
    let named: BTreeSet<_> = numbers.iter().collect();
    let would = in_use.iter().chain(numbers).collect::<BTreeSet<_>>().len();
    let would = would + numbers.len() - named.len();
    match limits.gpus {
        Some(most) if would > most as usize => Err(Refusal::Gpus { most, would }),
        _ => Ok(()),
    }
}

/// Returns the devices with the server's `numbers`, as a proxy opens them.
fn named(spec: &ServeSpec, numbers: &[u32]) -> Result<GpuSpec, Refusal> {
    // With `local` and no ordinals, the driver knows which devices there are, and refuses others.
    let known = !matches!(&spec.gpu, GpuSpec::Local { ordinals } if ordinals.is_empty());
    let missing = numbers.iter().copied().find(|number| *number as usize >= spec.devices);
    if let Some(number) = missing.filter(|_| known) {
        return Err(Refusal::NoDevice { number, last: spec.devices.saturating_sub(1) });
    }
    match &spec.gpu {
        GpuSpec::Local { ordinals } if ordinals.is_empty() => {
            Ok(GpuSpec::Local { ordinals: numbers.to_vec() })
        }
        GpuSpec::Soft { apart, .. } => {
            Ok(GpuSpec::Soft { devices: numbers.len() as u32, apart: *apart })
        }
        GpuSpec::Local { ordinals } => {
            let of = |number: &u32| ordinals.get(*number as usize).copied();
            Ok(GpuSpec::Local { ordinals: numbers.iter().filter_map(of).collect() })
        }
        GpuSpec::Remote { .. } | GpuSpec::Several(_) => Err(Refusal::NoneOfItsOwn),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(
        (gpu, devices): (&str, usize),
        wanted: &[u32],
        limits: &Limits,
        has: &[u32],
    ) -> Result<(String, Vec<u32>), String> {
        let spec = ServeSpec {
            listen: "127.0.0.1:0".parse().unwrap(),
            gpu: gpu.parse().unwrap(),
            devices,
            soft_memory: None,
            users: None,
            keys: None,
            proxy: "/bin/false".into(),
            takes_jobs: None,
        };
        let has = has.iter().copied().collect();
        let chosen = Chosen::of(&spec, wanted, limits, &has);
        chosen.map(|it| (it.gpu.to_string(), it.numbers)).map_err(|why| why.to_string())
    }

    #[test]
    fn a_session_gets_the_devices_that_it_names() {
        for (gpu, count, wanted, expected) in [
            ("soft:4", 4, &[][..], Some(("soft:4", &[0, 1, 2, 3][..]))),
            ("soft:4", 4, &[3, 1], Some(("soft:2", &[3, 1]))),
            ("soft:4", 4, &[4], None),
            ("local", 3, &[2], Some(("local:2", &[2]))),
            ("local", 3, &[3], Some(("local:3", &[3]))),
            ("local", 3, &[], Some(("local", &[0, 1, 2]))),
            ("local:5,7", 2, &[1], Some(("local:7", &[1]))),
            ("local:5,7", 2, &[2], None),
        ] {
            let found = chosen((gpu, count), wanted, &Limits::default(), &[]).ok();
            let expected = expected.map(|(gpu, numbers)| (gpu.to_owned(), numbers.to_vec()));
            assert_eq!(found, expected, "{gpu} {wanted:?}");
        }
    }

    #[test]
    fn a_key_gets_the_devices_that_it_may_have() {
        let limits = |gpus: Option<u32>, devices: &[u32]| Limits {
            gpus,
            devices: (!devices.is_empty()).then(|| devices.to_vec()),
            ..Limits::default()
        };
        let soft = ("soft:4", 4);
        let two = limits(Some(2), &[]);
        let got = |gpu: &str, numbers: &[u32]| Ok((gpu.to_owned(), numbers.to_vec()));
        assert_eq!(chosen(soft, &[], &two, &[]), got("soft:2", &[0, 1]));
        assert_eq!(chosen(soft, &[], &two, &[3]), got("soft:2", &[0, 3]));
        assert_eq!(chosen(soft, &[], &two, &[3, 2]), got("soft:2", &[2, 3]));
        assert_eq!(chosen(soft, &[2, 3], &two, &[3]), got("soft:2", &[2, 3]));
        let refused = chosen(soft, &[0], &two, &[2, 3]).unwrap_err();
        assert!(refused.contains("use 2 of its devices") && refused.contains("use 3"), "{refused}");
        assert!(chosen(soft, &[0, 1, 2], &two, &[]).unwrap_err().contains("use 3"));
        assert!(chosen(soft, &[0, 0, 0], &two, &[]).unwrap_err().contains("use 3"));
        assert!(chosen(soft, &[], &limits(Some(0), &[]), &[]).unwrap_err().contains("use 0 of"));

        let some = limits(None, &[3, 1]);
        assert_eq!(chosen(soft, &[], &some, &[]), got("soft:2", &[3, 1]));
        assert_eq!(chosen(soft, &[1], &some, &[]), got("soft", &[1]));
        assert!(chosen(soft, &[2], &some, &[]).unwrap_err().contains("its device 2, but 3, 1:"));
        assert_eq!(chosen(soft, &[], &limits(Some(1), &[3, 1]), &[]), got("soft", &[3]));
        assert_eq!(chosen(("local", 8), &[], &some, &[]), got("local:3,1", &[3, 1]));
        assert_eq!(chosen(("local:6,7", 2), &[], &some, &[]), got("local:7", &[1]));
        // What is not there is not given, whatever the limits say.
        assert!(chosen(soft, &[9], &limits(None, &[9]), &[]).unwrap_err().contains("no device 9"));
        assert!(chosen(soft, &[], &limits(None, &[9]), &[]).is_err());
        assert!(chosen(("local", 0), &[], &two, &[]).unwrap_err().contains("name some"));
    }
}
