//! `kedge doctor`: what this machine offers, and for what is missing the command that mends it.

mod installation;
mod machine;
mod native;
mod round_trip;
mod runtimes;

use crate::Failure;
use crate::gpu;
use crate::output::{self, BAD, DIM, FAIR, GOOD, HEADING, PLAIN, styled};
use anstyle::Style;
use clap::Args;
use kedge_control::gpu::GpuSpec;
use serde::Serialize;
use std::fmt::Write;
use std::process::ExitCode;

const AFTER_HELP: &str = "\
With --json, one list of objects:
  group   \"machine\", \"kedge\", \"checkpoints\", \"runtimes\" or \"native\"
  name    what was looked at
  status  \"ok\", \"note\" (works, but worth knowing) or \"missing\" (kedge needs it)
  value   what was found
  mend    the command that mends it, or null

Exits with 1 if anything is missing.";

/// Look at this machine: what kedge needs, whether jobs come back, which CUDA runtimes start
///
/// A job of the CPU, and one with a device, are really checkpointed, killed and restarted. Each
/// CUDA runtime (libcudart) that is found is really started, in a job of its own. For what is
/// missing, doctor prints the command that mends it.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct DoctorArgs {
    /// The devices on which runtimes are started [default: as for `kedge run`]
    #[arg(long, value_name = "SPEC")]
    gpu: Option<GpuSpec>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Ok,
    Note,
    Missing,
}

/// One thing that was looked at.
#[derive(Debug, Clone, Serialize)]
struct Check {
    group: &'static str,
    name: String,
    status: Status,
    value: String,
    mend: Option<String>,
}

impl Check {
    fn new(group: &'static str, name: impl Into<String>, status: Status, value: String) -> Check {
        Check { group, name: name.into(), status, value, mend: None }
    }

    fn mend(self, how: impl Into<String>) -> Check {
        Check { mend: Some(how.into()), ..self }
    }

    /// Mended as its value says, where that ends in a remedy (`what is wrong; what to do`); else by
    /// `how`.
    fn mend_as_said(mut self, how: impl Into<String>) -> Check {
        let said = self.value.rsplit_once("; ");
        let said = said.map(|(what, remedy)| (what.to_owned(), remedy.to_owned()));
        match said {
            Some((what, remedy)) if !remedy.is_empty() => {
                self.value = what;
                self.mend(remedy)
            }
            _ => self.mend(how),
        }
    }
}

pub(crate) fn run(args: &DoctorArgs) -> Result<ExitCode, Failure> {
    let mut report = Report { json: args.json, group: "", checks: Vec::new() };
    for check in machine::checks() {
        report.add(check)?;
    }
    for check in restarts() {
        report.add(check)?;
    }
    let machine = gpu::look();
    let default = || match &machine {
        Ok(machine) => machine.default_gpu().0,
        // A check says that nobody knows this machine's default; software devices are tried.
        Err(_) => GpuSpec::Soft { devices: 1, apart: false },
    };
    if let Some(refused) = args.gpu.as_ref().and_then(|gpu| gpu.refuse_several("kedge doctor")) {
        return Err(refused.into());
    }
    let gpu = args.gpu.clone().unwrap_or_else(default);
    let (checks, works) = installation::checks(&gpu);
    for check in checks {
        report.add(check)?;
    }
    for check in round_trip::checks(&gpu, works) {
        report.add(check)?;
    }
    for path in runtimes::find() {
        report.add(runtimes::start(&path, &gpu, works))?;
    }
    if !report.checks.iter().any(|check| check.group == runtimes::GROUP) {
        report.add(runtimes::none())?;
    }
    for check in native::checks(&machine) {
        report.add(check)?;
    }
    report.end()
}

/// What restarts that were killed have left undone: it is undone now, and told.
fn restarts() -> Vec<Check> {
    let check = |status, value| Check::new("kedge", "restarts", status, value);
    let said = kedge_supervisor::settle_restarts();
    if said.is_empty() {
        return vec![check(Status::Ok, "none has left anything to be undone".to_owned())];
    }
    said.into_iter().map(|said| check(Status::Note, said)).collect()
}

/// Shows checks as they come, or all at once as JSON.
struct Report {
    json: bool,
    /// The one that the last check belonged to.
    group: &'static str,
    checks: Vec<Check>,
}

impl Report {
    fn add(&mut self, check: Check) -> Result<(), Failure> {
        if !self.json {
            let mut text = String::new();
            if check.group != self.group {
                let gap = if self.group.is_empty() { "" } else { "\n" };
                let _ = writeln!(text, "{gap}{}", styled(HEADING, check.group));
                self.group = check.group;
            }
            text.push_str(&render(&check));
            output::print(&text)?;
        }
        self.checks.push(check);
        Ok(())
    }

    fn end(self) -> Result<ExitCode, Failure> {
        let missing = self.checks.iter().filter(|check| check.status == Status::Missing).count();
        if self.json {
            output::json(&self.checks)?;
        } else if missing > 0 {
            output::print(&styled(BAD, &format!("\n{missing} missing: see → above\n")))?;
        }
        Ok(if missing == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn render(check: &Check) -> String {
    const WIDTH: usize = 18;
    let (style, mark): (Style, &str) = match check.status {
        Status::Ok => (GOOD, "ok  "),
        Status::Note => (FAIR, "note"),
        Status::Missing => (BAD, "MISS"),
    };
    let (name, value) = (output::harmless(&check.name), output::harmless(&check.value));
    let gap = " ".repeat(WIDTH.saturating_sub(name.chars().count()).max(1));
    let mut text = format!("  {} {name}{gap}{value}\n", styled(style, mark));
    if let Some(mend) = &check.mend {
        let style = if check.status == Status::Missing { PLAIN } else { DIM };
        let _ =
            writeln!(text, "       {}", styled(style, &format!("→ {}", output::harmless(mend))));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_is_a_line_and_its_mend_another() {
        let check =
            Check::new("machine", "memory", Status::Missing, "little".into()).mend("buy some");
        let text = anstream::adapter::strip_str(&render(&check)).to_string();
        assert_eq!(text, "  MISS memory            little\n       → buy some\n");
    }

    #[test]
    fn a_remedy_that_is_named_is_the_mend() {
        let check = |value: &str| {
            let check = Check::new("kedge", "kernel", Status::Missing, value.into());
            let Check { value, mend, .. } = check.mend_as_said("kedge logs");
            (value, mend.unwrap_or_default())
        };
        let pair = |value: &str, mend: &str| (value.to_owned(), mend.to_owned());
        assert_eq!(check("no driver; install one"), pair("no driver", "install one"));
        assert_eq!(check("wrong sum"), pair("wrong sum", "kedge logs"));
    }
}
