//! The places that jobs move between, as they are named.

use kedge_control::gpu::GpuSpec;

/// Places, the best first: each of one machine's devices, and none of another's as well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Places(Vec<GpuSpec>);

impl Places {
    /// Reads names of places.
    ///
    /// # Errors
    /// Fewer than two; one that names no devices, or those of several places; two that have a
    /// device in common.
    pub(super) fn read(names: &[String]) -> Result<Places, String> {
        let mut places: Vec<GpuSpec> = Vec::new();
        for name in names {
            let bad = |why: String| format!("--place {}: {why}", crate::output::harmless(name));
            let spec = name.parse::<GpuSpec>().map_err(|error| bad(error.to_string()))?;
            if matches!(spec, GpuSpec::Several(_)) {
                return Err(bad("it is several places: give each of them a --place".to_owned()));
            }
            if let Some(other) = places.iter().find(|other| overlap(other, &spec)) {
                return Err(bad(format!("it has devices in common with {other}: name each once")));
            }
            places.push(spec);
        }
        match places.len() {
            0 | 1 => Err("give --place twice or more: jobs move from one place to another".into()),
            _ => Ok(Places(places)),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &GpuSpec> {
        self.0.iter()
    }

    /// Returns which of them a job is on, as `kedge ps` names its devices.
    pub(super) fn find(&self, gpu: &str) -> Option<usize> {
        let gpu = gpu.parse::<GpuSpec>().ok()?;
        self.0.iter().position(|place| *place == gpu)
    }
}

/// Whether they are devices of this machine.
pub(super) fn is_near(spec: &GpuSpec) -> bool {
    matches!(spec, GpuSpec::Soft { .. } | GpuSpec::Local { .. })
}

/// Whether no job moves between them and a server's devices, as `kedge migrate` has it.
pub(super) fn is_bound(spec: &GpuSpec) -> bool {
    matches!(spec, GpuSpec::Local { .. } | GpuSpec::Soft { apart: true, .. })
}

/// How many devices that names, where it tells.
pub(super) fn count(spec: &GpuSpec) -> Option<usize> {
    match spec {
        GpuSpec::Soft { devices, .. } => usize::try_from(*devices).ok(),
        GpuSpec::Local { ordinals: listed } | GpuSpec::Remote { devices: listed, .. } => {
            Some(listed.len()).filter(|count| *count > 0)
        }
        GpuSpec::Several(_) => None,
    }
}

/// Whether two have a device in common, as far as their names tell. Software devices are the
/// processors, whatever their number.
pub(super) fn overlap(a: &GpuSpec, b: &GpuSpec) -> bool {
    let common = |a: &[u32], b: &[u32]| {
        // None are all.
        a.is_empty() || b.is_empty() || a.iter().any(|number| b.contains(number))
    };
    match (a, b) {
        (GpuSpec::Several(_), _) => a.places().iter().any(|place| overlap(place, b)),
        (_, GpuSpec::Several(_)) => overlap(b, a),
        (GpuSpec::Soft { .. }, GpuSpec::Soft { .. }) => true,
        (GpuSpec::Local { ordinals: a }, GpuSpec::Local { ordinals: b }) => common(a, b),
        (
            GpuSpec::Remote { server: at, devices: a },
            GpuSpec::Remote { server: other, devices: b },
        ) => at == other && common(a, b),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> GpuSpec {
        text.parse().expect(text)
    }

    fn read(names: &[&str]) -> Result<Places, String> {
        Places::read(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn places_are_checked() {
        let places = read(&["local:0", "gpu7/1", "soft"]).expect("three places");
        for (gpu, at) in [
            ("local:0", Some(0)),
            ("gpu7:7531/1", Some(1)),
            ("soft", Some(2)),
            ("soft:2", None),
            ("local", None),
            ("none", None),
            ("\x1b", None),
        ] {
            assert_eq!(places.find(gpu), at, "{gpu}");
        }
        for (names, said) in [
            (&[][..], "twice or more"),
            (&["soft"], "twice or more"),
            (&["soft", "local:x"], "--place local:x: `local:x` names no devices"),
            (&["soft", "a/0,b/0"], "--place a/0,b/0: it is several places"),
            (&["local", "local:1"], "--place local:1: it has devices in common with local"),
            (&["gpu7/0,1", "gpu7:7531/1"], "in common with gpu7:7531/0,1"),
            (&["soft", "soft:2"], "in common with soft"),
        ] {
            let error = read(names).expect_err(said);
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn devices_are_in_common_as_far_as_names_tell() {
        for (a, b, common) in [
            ("local:0", "local:1", false),
            ("local:0", "local:1,0", true),
            ("local", "local:1", true),
            ("soft:2", "soft:apart", true),
            ("soft", "local:0", false),
            ("a/0", "a/1", false),
            ("a/0", "a:7532/0", false),
            ("a/0", "a", true),
            ("a/0,b/0", "b/0", true),
            ("a/0,b/0", "b/1", false),
            ("b/1", "a/0,b/1", true),
        ] {
            assert_eq!(overlap(&spec(a), &spec(b)), common, "{a} {b}");
            assert_eq!(overlap(&spec(b), &spec(a)), common, "{b} {a}");
        }
    }

    #[test]
    fn names_tell_how_many_devices_there_are() {
        for (text, many) in [
            ("soft", Some(1)),
            ("soft:3", Some(3)),
            ("local:2,0", Some(2)),
            ("local", None),
            ("gpu7", None),
            ("gpu7/1", Some(1)),
        ] {
            assert_eq!(count(&spec(text)), many, "{text}");
        }
    }
}
