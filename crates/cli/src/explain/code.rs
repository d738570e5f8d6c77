//! A program's device code, and the devices that it runs on.

use super::cubin::Cubin;
use kedge_ptx::SOFTWARE_DEVICE_SM;
use kedge_ptx::fatbin::{self, FatbinError, ImageKind};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The compute capabilities of NVIDIA's GPUs, rising; 90 is 9.0.
const CAPABILITIES: [u32; 20] =
    [50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121];

/// Longest cubin that may have no code, in bytes: nvcc links one into each program.
const MAX_EMPTY_LEN: u64 = 16 << 10;

/// The architecture that code was compiled for, as in `sm_90a` and `compute_100f`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Target {
    pub(super) sm: u32,
    /// `a` for code of this architecture alone, `f` for its family.
    pub(super) suffix: Option<char>,
}

impl Target {
    /// Returns whether machine code for this target runs on a GPU of compute capability `sm`.
    fn machine_code_runs_on(self, sm: u32) -> bool {
        self.suffix != Some('a') && self.sm / 10 == sm / 10 && self.sm <= sm || self.sm == sm
    }

    /// Returns whether PTX for this target runs on a GPU of compute capability `sm`.
    fn ptx_runs_on(self, sm: u32) -> bool {
        match self.suffix {
            None => self.sm <= sm,
            Some(_) => self.machine_code_runs_on(sm),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.sm)?;
        self.suffix.map_or(Ok(()), |suffix| write!(f, "{suffix}"))
    }
}

/// What a software device does with a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum OnSoftware {
    /// It runs the module's PTX.
    Runs,
    /// All PTX is for newer GPUs: the device takes it, and refuses instructions that it lacks by
    /// name.
    Newer,
    /// It refuses the module, which has machine code and no PTX.
    MachineCode,
    /// It refuses the module, which has code for link-time optimisation (LTO) alone.
    LinkTimeCode,
}

/// The targets that there is code for, of a kernel or a module.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Forms {
    pub(super) ptx: BTreeSet<Target>,
    pub(super) machine_code: BTreeSet<Target>,
}

/// The code that a program loads at once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Module {
    pub(super) forms: Forms,
    link_time_code: bool,
    /// Symbol → forms of the kernel; empty unless asked for.
    pub(super) kernels: BTreeMap<String, Forms>,
}

impl Module {
    /// Reads a fatbin, with its kernels if asked; `None` if it has no code.
    ///
    /// # Errors
    /// The fatbin is damaged.
    pub(super) fn of_fatbin(
        container: &[u8],
        kernels: bool,
    ) -> Result<Option<Module>, FatbinError> {
        let mut module = Module::default();
        for image in fatbin::images(container)? {
            let target = Target { sm: image.sm, suffix: image.sm_suffix };
            match image.kind {
                ImageKind::Ptx => {
                    module.forms.ptx.insert(target);
                    if kernels {
                        module.add_ptx_kernels(&image.text()?, target);
                    }
                }
                ImageKind::Elf => {
                    let looks = kernels || image.size <= MAX_EMPTY_LEN;
                    let cubin = looks.then(|| image.data()).transpose()?;
                    // A cubin that cannot be parsed counts as code.
                    let cubin = cubin.and_then(|data| Cubin::parse(&data).ok());
                    if cubin.as_ref().is_none_or(|cubin| !cubin.is_empty) {
                        module.forms.machine_code.insert(target);
                    }
                    if let Some(cubin) = cubin.filter(|_| kernels) {
                        module.add_machine_code_kernels(&cubin, target);
                    }
                }
                ImageKind::Lto => module.link_time_code = true,
                ImageKind::Other(_) => {}
            }
        }
        Ok((module != Module::default()).then_some(module))
    }

    /// Reads PTX text, whose `.target` names its architecture; sm_0 if it has none.
    pub(super) fn of_ptx(text: &str, kernels: bool) -> Module {
        let mut module = Module::default();
        let named = text.split_once(".target").and_then(|(_, rest)| target(rest));
        let target = named.unwrap_or(Target { sm: 0, suffix: None });
        module.forms.ptx.insert(target);
        if kernels {
            module.add_ptx_kernels(text, target);
        }
        module
    }

    /// Reads a cubin that is not in a fatbin.
    pub(super) fn of_cubin(cubin: &Cubin, kernels: bool) -> Module {
        let mut module = Module::default();
        let target = Target { sm: cubin.sm, suffix: None };
        module.forms.machine_code.insert(target);
        if kernels {
            module.add_machine_code_kernels(cubin, target);
        }
        module
    }

    fn add_ptx_kernels(&mut self, text: &str, target: Target) {
        for name in ptx_kernels(text) {
            self.kernels.entry(name.to_owned()).or_default().ptx.insert(target);
        }
    }

    fn add_machine_code_kernels(&mut self, cubin: &Cubin, target: Target) {
        for name in &cubin.kernels {
            self.kernels.entry(name.clone()).or_default().machine_code.insert(target);
        }
    }

    pub(super) fn is_machine_code_only(&self) -> bool {
        self.forms.ptx.is_empty() && !self.link_time_code
    }

    /// Returns the module that linking both yields.
    pub(super) fn linked_with(mut self, other: Module) -> Module {
        self.forms.extend(other.forms);
        self.link_time_code |= other.link_time_code;
        for (name, forms) in other.kernels {
            self.kernels.entry(name).or_default().extend(forms);
        }
        self
    }

    pub(super) fn on_software(&self) -> OnSoftware {
        self.forms.on_software().unwrap_or(match self.link_time_code {
            true => OnSoftware::LinkTimeCode,
            false => OnSoftware::MachineCode,
        })
    }
}

impl Forms {
    pub(super) fn extend(&mut self, other: Forms) {
        self.ptx.extend(other.ptx);
        self.machine_code.extend(other.machine_code);
    }

    /// Returns what a software device does with the PTX; `None` if there is none.
    pub(super) fn on_software(&self) -> Option<OnSoftware> {
        let oldest = self.ptx.iter().map(|target| target.sm).min()?;
        let runs = oldest <= SOFTWARE_DEVICE_SM;
        Some(if runs { OnSoftware::Runs } else { OnSoftware::Newer })
    }

    /// Returns the compute capabilities of the GPUs that run this.
    pub(super) fn gpus(&self) -> BTreeSet<u32> {
        let runs = |sm: &u32| {
            self.ptx.iter().any(|target| target.ptx_runs_on(*sm))
                || self.machine_code.iter().any(|target| target.machine_code_runs_on(*sm))
        };
        CAPABILITIES.iter().copied().filter(runs).collect()
    }
}

/// Formats compute capabilities for people, as `7.5–9.0, 12.0` or `5.2 and later`.
pub(super) fn spoken(gpus: &BTreeSet<u32>) -> String {
    let dotted = |sm: u32| format!("{}.{}", sm / 10, sm % 10);
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (place, _) in CAPABILITIES.iter().enumerate().filter(|(_, sm)| gpus.contains(sm)) {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == place => *last = place,
            _ => runs.push((place, place)),
        }
    }
    let words = runs.into_iter().map(|(first, last)| {
        let (from, to) = (dotted(CAPABILITIES[first]), dotted(CAPABILITIES[last]));
        match last {
            _ if last + 1 == CAPABILITIES.len() && first < last => format!("{from} and later"),
            _ if first == last => from,
            _ => format!("{from}–{to}"),
        }
    });
    let text = words.collect::<Vec<_>>().join(", ");
    if text.is_empty() { "none known".to_owned() } else { text }
}

/// Parses what follows `.target`, such as ` sm_90a, debug`.
fn target(words: &str) -> Option<Target> {
    let name = words.trim_start().strip_prefix("sm_")?;
    let end = name.find(|c: char| !c.is_ascii_digit()).unwrap_or(name.len());
    let suffix = name[end..].chars().next().filter(|c| matches!(c, 'a' | 'f'));
    Some(Target { sm: name[..end].parse().ok()?, suffix })
}

/// Returns the names of the kernels that a PTX text defines.
fn ptx_kernels(text: &str) -> impl Iterator<Item = &str> {
    text.split(".entry").skip(1).filter_map(|rest| {
        let name = rest.strip_prefix(|c: char| c.is_ascii_whitespace())?.trim_start();
        let end = name.find(|c: char| !(c.is_ascii_alphanumeric() || "_$%".contains(c)));
        Some(&name[..end?]).filter(|name| !name.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets(names: &[&str]) -> BTreeSet<Target> {
        names.iter().map(|name| target(&format!(" sm_{name}")).expect("a target")).collect()
    }

    fn gpus(ptx: &[&str], machine_code: &[&str]) -> String {
        let forms = Forms { ptx: targets(ptx), machine_code: targets(machine_code) };
        spoken(&forms.gpus())
    }

    #[test]
    fn gpus_run_what_was_made_for_them_and_before() {
        assert_eq!(gpus(&["52"], &[]), "5.2 and later");
        assert_eq!(gpus(&[], &["80"]), "8.0–8.9");
        assert_eq!(gpus(&[], &["75", "80", "86", "90", "120"]), "7.5–9.0, 12.0 and later");
        assert_eq!(gpus(&[], &["90a"]), "9.0");
        assert_eq!(gpus(&["90a"], &[]), "9.0");
        assert_eq!(gpus(&["100f"], &[]), "10.0–10.3");
        assert_eq!(gpus(&[], &["100a", "100f"]), "10.0–10.3");
        assert_eq!(gpus(&[], &[]), "none known");
    }

    #[test]
    fn a_software_device_takes_the_oldest_ptx() {
        let on = |names: &[&str]| Forms { ptx: targets(names), ..Forms::default() }.on_software();
        assert_eq!(on(&["52", "120"]), Some(OnSoftware::Runs));
        assert_eq!(on(&["90a"]), Some(OnSoftware::Runs));
        assert_eq!(on(&["100"]), Some(OnSoftware::Newer));
        assert_eq!(on(&[]), None);
    }

    #[test]
    fn kernels_are_found_in_text() {
        let text = ".version 8.0\n.target sm_80a, debug\n.visible .entry _Z1kPf(\n.param .u64 p)\n{}\n\
                    .entry\n\tother() { ret; }\n// .entryway\n.weak .entry ";
        let module = Module::of_ptx(text, true);
        assert_eq!(module.forms.ptx, targets(&["80a"]));
        assert_eq!(module.kernels.keys().collect::<Vec<_>>(), ["_Z1kPf", "other"]);
        assert_eq!(Module::of_ptx("nonsense .target", true).forms.ptx.len(), 1);
    }
}
