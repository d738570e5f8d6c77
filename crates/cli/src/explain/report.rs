//! What `kedge explain` says of what it has found.

use super::code::{Forms, Module, OnSoftware, Target, spoken};
use super::files::Found;
use crate::output::{BAD, FAIR, GOOD, PLAIN, Table, harmless};
use anstyle::Style;
use kedge_ptx::SOFTWARE_DEVICE_SM;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;

#[derive(Debug, Serialize)]
pub(super) struct Report {
    files: Vec<Row>,
    missing: Vec<Missing>,
    unread: Vec<Unread>,
    advice: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Row {
    path: PathBuf,
    modules: usize,
    software: Software,
    gpus: BTreeSet<u32>,
    gpus_partly: BTreeSet<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kernels: Option<Vec<Kernel>>,
}

/// How many modules fare how on a software device.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
struct Software {
    runs: usize,
    newer: usize,
    machine_code: usize,
    link_time_code: usize,
}

#[derive(Debug, Serialize)]
struct Kernel {
    name: String,
    ptx: Vec<String>,
    machine_code: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Missing {
    library: String,
    needed_by: PathBuf,
}

#[derive(Debug, Serialize)]
struct Unread {
    path: PathBuf,
    why: String,
}

impl Report {
    pub(super) fn of(found: &Found, kernels: bool) -> Report {
        let files = found.files.iter();
        let files: Vec<Row> =
            files.map(|(path, binary)| Row::of(path.clone(), &binary.modules, kernels)).collect();
        let missing = found.missing.iter().map(|(library, needed_by)| Missing {
            library: library.clone(),
            needed_by: needed_by.clone(),
        });
        let unread =
            found.unread.iter().map(|(path, why)| Unread { path: path.clone(), why: why.clone() });
        let advice = advice(&files, found);
        Report { files, missing: missing.collect(), unread: unread.collect(), advice }
    }

    pub(super) fn render(&self) -> String {
        let mut text = String::new();
        if !self.files.is_empty() {
            let columns = ["FILE", "MODULES", "SOFTWARE DEVICES", "GPUS (COMPUTE CAPABILITY)"];
            let mut table = Table::new(&columns, &[1]);
            for row in &self.files {
                let (style, software) = row.software.spoken();
                table.row([
                    (PLAIN, harmless(&row.path.to_string_lossy())),
                    (PLAIN, row.modules.to_string()),
                    (style, software),
                    (PLAIN, row.spoken_gpus()),
                ]);
            }
            text.push_str(&table.render());
        }
        self.files.iter().for_each(|row| row.render_kernels(&mut text));
        for missing in &self.missing {
            let by = missing.needed_by.display().to_string();
            let line = format!("{}, which {by} needs, is not found", missing.library);
            let _ = writeln!(text, "{}", harmless(&line));
        }
        for unread in &self.unread {
            let line = format!("{}: {}", unread.path.display(), unread.why);
            let _ = writeln!(text, "{}", harmless(&line));
        }
        for sentence in &self.advice {
            let _ = writeln!(text, "\n{sentence}");
        }
        text
    }
}

impl Row {
    fn of(path: PathBuf, modules: &[Module], kernels: bool) -> Row {
        let mut software = Software::default();
        for module in modules {
            *software.of(module.on_software()) += 1;
        }
        let gpus = modules.iter().map(|module| module.forms.gpus());
        let gpus_partly = gpus.clone().flatten().collect();
        Row {
            path,
            modules: modules.len(),
            software,
            gpus: gpus.reduce(|all, one| &all & &one).unwrap_or_default(),
            gpus_partly,
            kernels: kernels.then(|| Kernel::of_all(modules)),
        }
    }

    /// Libraries have modules for one kind of GPU each, and load those that fit.
    fn spoken_gpus(&self) -> String {
        match self.gpus.is_empty() {
            false => spoken(&self.gpus),
            true => format!("in part: {}", spoken(&self.gpus_partly)),
        }
    }

    fn render_kernels(&self, text: &mut String) {
        let Some(kernels) = self.kernels.as_ref().filter(|kernels| !kernels.is_empty()) else {
            return;
        };
        let mut table = Table::new(&["KERNEL", "PTX", "MACHINE CODE"], &[]);
        let listed = |targets: &[String]| match targets.is_empty() {
            true => "-".to_owned(),
            false => targets.join(" "),
        };
        for kernel in kernels {
            table.row([
                (PLAIN, harmless(&demangled(&kernel.name))),
                (PLAIN, listed(&kernel.ptx)),
                (PLAIN, listed(&kernel.machine_code)),
            ]);
        }
        let path = harmless(&self.path.to_string_lossy());
        let _ = write!(text, "\n{path}\n{}", table.render());
    }
}

impl Software {
    fn of(&mut self, on: OnSoftware) -> &mut usize {
        match on {
            OnSoftware::Runs => &mut self.runs,
            OnSoftware::Newer => &mut self.newer,
            OnSoftware::MachineCode => &mut self.machine_code,
            OnSoftware::LinkTimeCode => &mut self.link_time_code,
        }
    }

    fn spoken(self) -> (Style, String) {
        let kinds = [
            (self.newer, "PTX for newer GPUs: tried"),
            (self.machine_code, "machine code only"),
            (self.link_time_code, "link-time code only"),
        ];
        let others: Vec<_> = kinds.iter().filter(|(count, _)| *count > 0).collect();
        match (self.runs, &others[..]) {
            (_, []) => (GOOD, "run".to_owned()),
            (0, [(_, one)]) => (if self.newer > 0 { FAIR } else { BAD }, (*one).to_owned()),
            (runs, _) => {
                let others = others.iter().map(|(count, what)| format!("{count} {what}"));
                let runs = (runs > 0).then(|| format!("{runs} run"));
                (FAIR, runs.into_iter().chain(others).collect::<Vec<_>>().join("; "))
            }
        }
    }
}

impl Kernel {
    fn of_all(modules: &[Module]) -> Vec<Kernel> {
        let mut all = BTreeMap::<&str, Forms>::new();
        for (name, forms) in modules.iter().flat_map(|module| &module.kernels) {
            all.entry(name).or_default().extend(forms.clone());
        }
        let listed = |targets: &BTreeSet<Target>| targets.iter().map(Target::to_string).collect();
        all.into_iter()
            .map(|(name, forms)| Kernel {
                name: name.to_owned(),
                ptx: listed(&forms.ptx),
                machine_code: listed(&forms.machine_code),
            })
            .collect()
    }
}

/// A kernel's name as its source has it.
fn demangled(symbol: &str) -> String {
    let name = cpp_demangle::Symbol::new(symbol).ok();
    name.and_then(|name| name.demangle().ok()).unwrap_or_else(|| symbol.to_owned())
}

/// What helps, a sentence or two for each thing that needs help.
fn advice(files: &[Row], found: &Found) -> Vec<String> {
    let mut advice = Vec::new();
    let total = |count: fn(&Software) -> usize| files.iter().map(|row| count(&row.software)).sum();
    let (machine_code, newer): (usize, usize) = (total(|s| s.machine_code), total(|s| s.newer));
    let link_time_code: usize = total(|s| s.link_time_code);
    let sm = SOFTWARE_DEVICE_SM;
    if files.is_empty() {
        let compilers = ["libnvrtc.so", "libnvJitLink.so"];
        let compiles = |name: &String| compilers.iter().any(|one| name.starts_with(one));
        advice.push(match found.needed.iter().any(compiles) {
            true => "There is no device code here: kernels are compiled as the program runs, and that works \
                     on software devices and on GPUs."
                .to_owned(),
            false => "There is no device code here. Of a Python program, give the folder of its packages \
                      (such as .venv); a program may also open libraries as it runs."
                .to_owned(),
        });
    }
    if machine_code > 0 {
        advice.push(format!(
            "Modules without PTX run on GPUs alone: here with `kedge run --gpu local`, or on a machine that \
             lends its GPUs with `--gpu HOST`. Of code of your own, keep the PTX: \
             `nvcc -gencode arch=compute_{sm},code=compute_{sm}`, CMake's CMAKE_CUDA_ARCHITECTURES={sm}-virtual, \
             or TORCH_CUDA_ARCH_LIST={}.{}+PTX for extensions of PyTorch. NVIDIA's libraries and the wheels of \
             PyTorch and JAX come without.",
            sm / 10,
            sm % 10
        ));
    }
    if newer > 0 {
        advice.push(format!(
            "PTX for GPUs newer than {}.{} is tried on software devices; an instruction that they lack is \
             refused by name when its kernel is launched.",
            sm / 10,
            sm % 10
        ));
    }
    if link_time_code > 0 {
        advice.push(
            "Link-time code (nvcc -dlto) alone runs nowhere as it is: the program has nvJitLink link it, or \
             holds the result as well."
                .to_owned(),
        );
    }
    advice
}

#[cfg(test)]
mod tests {
    use super::super::cubin::Cubin;
    use super::*;

    #[test]
    fn what_fares_how_is_said_in_few_words() {
        let all = Software::default();
        let spoken = |software: Software| software.spoken().1;
        assert_eq!(spoken(Software { runs: 3, ..all }), "run");
        assert_eq!(spoken(Software { machine_code: 2, ..all }), "machine code only");
        assert_eq!(
            spoken(Software { runs: 1, machine_code: 2, newer: 3, ..all }),
            "1 run; 3 PTX for newer GPUs: tried; 2 machine code only"
        );
    }

    #[test]
    fn advice_is_given_where_it_is_needed() {
        let found = Found::default();
        let row = |path: &str, modules: &[Module]| Row::of(path.into(), modules, false);
        let ptx = |sm: u32| Module::of_ptx(&format!(".version 8.0\n.target sm_{sm}\n"), false);
        assert_eq!(advice(&[row("a", &[ptx(90)])], &found), Vec::<String>::new());
        assert!(advice(&[row("a", &[ptx(100)])], &found)[0].contains("newer than 9.0"));
        let cubin = Cubin { sm: 90, kernels: Vec::new(), is_empty: false };
        let cubin = Module::of_cubin(&cubin, false);
        assert!(advice(&[row("a", &[cubin])], &found)[0].contains("compute_90"));
        assert!(advice(&[], &found)[0].contains("no device code"));
    }
}
