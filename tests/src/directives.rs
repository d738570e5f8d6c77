//! What a program's leading comment asks of the runner.
//!
//! ```text
//! // build: -rdc=true {dir}/_rdc_device.cu -lcudadevrt
//! // devices: 2
//! // alone: fills the device
//! // args: 1000
//! // stderr: assertion
//! // seconds: 60
//! // checkpoint refused: shares device memory
//! // far refused: cudaHostRegister
//! // far checkpoint refused: shares device memory
//! // move refused: shares device memory
//! // check finds: illegal address
//! ```
//!
//! In `build`, `{dir}` is the program's folder, `{toolkit}` the CUDA toolkit's, and `{cuda}` what
//! links the driver library (kedge's own where there is no other).

use std::path::{Path, PathBuf};
use thiserror::Error;

/// A test program and how it is built and run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    pub name: String,
    pub source: PathBuf,
    /// Further arguments of nvcc.
    pub build: Vec<String>,
    /// Devices that it needs.
    pub devices: u32,
    /// It leaves the others on its device no memory, so that none may run beside it.
    pub alone: bool,
    pub args: Vec<String>,
    /// Text that its standard error must hold.
    pub stderr: Option<String>,
    /// Time that it may take.
    pub seconds: u64,
    /// It may be refused to be checkpointed, with this text.
    pub refused: Option<String>,
    /// It is refused with this text where its devices are on another machine.
    pub far_refused: Option<String>,
    /// It may be refused to be checkpointed with this text where its devices are on another
    /// machine.
    pub far_checkpoint_refused: Option<String>,
    /// Its devices may be refused to move while it runs, with this text.
    pub move_refused: Option<String>,
    /// What `kedge check` finds in it, for it makes mistakes; elsewhere there is nothing to find.
    pub check_finds: Option<String>,
}

#[derive(Debug, Error)]
pub enum DirectiveError {
    #[error("{path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path}:{line}: {what}")]
    Invalid { path: PathBuf, line: usize, what: String },
}

impl Program {
    /// Reads the directives of `source`.
    pub fn load(source: &Path) -> Result<Self, DirectiveError> {
        let text = std::fs::read_to_string(source)
            .map_err(|error| DirectiveError::Read { path: source.to_owned(), source: error })?;
        Self::parse(source, &text)
    }

    /// Every program of a folder, by name. Files whose name starts with `_` belong to another.
    pub fn all(folder: &Path) -> Result<Vec<Self>, DirectiveError> {
        let read = |error| DirectiveError::Read { path: folder.to_owned(), source: error };
        let mut sources = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(read)? {
            let path = entry.map_err(read)?.path();
            let own = path.file_name().is_some_and(|name| !name.to_string_lossy().starts_with('_'));
            if own && path.extension().is_some_and(|ext| ext == "cu" || ext == "cpp") {
                sources.push(path);
            }
        }
        sources.sort();
        sources.iter().map(|path| Self::load(path)).collect()
    }

    fn parse(source: &Path, text: &str) -> Result<Self, DirectiveError> {
        let mut program = Self {
            name: source.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default(),
            source: source.to_owned(),
            build: Vec::new(),
            devices: 1,
            alone: false,
            args: Vec::new(),
            stderr: None,
            seconds: 120,
            refused: None,
            far_refused: None,
            far_checkpoint_refused: None,
            move_refused: None,
            check_finds: None,
        };
        let folder = source.parent().unwrap_or(Path::new(".")).to_string_lossy().into_owned();
        for (index, line) in text.lines().enumerate() {
            let Some(comment) = line.strip_prefix("//") else { break };
            let Some((key, value)) = comment.split_once(':') else { continue };
            let value = value.trim();
            let invalid = |what: String| DirectiveError::Invalid {
                path: source.to_owned(),
                line: index + 1,
                what,
            };
            let number = || value.parse().map_err(|_| invalid(format!("{value:?} is no number")));
            let words = || value.split_whitespace().map(|w| w.replace("{dir}", &folder)).collect();
            match key.trim() {
                "build" => program.build = words(),
                "alone" => program.alone = true,
                "args" => program.args = words(),
                "checkpoint refused" => program.refused = Some(value.to_owned()),
                "far refused" => program.far_refused = Some(value.to_owned()),
                "far checkpoint refused" => program.far_checkpoint_refused = Some(value.to_owned()),
                "move refused" => program.move_refused = Some(value.to_owned()),
                "check finds" => program.check_finds = Some(value.to_owned()),
                "stderr" => program.stderr = Some(value.to_owned()),
                "devices" => program.devices = number()?,
                "seconds" => program.seconds = number()?.into(),
                // An ordinary sentence with a colon.
                _ => {}
            }
        }
        Ok(program)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directives_are_read_from_the_leading_comment_only() {
        let text = "// Sums: two vectors.\n// build: -rdc=true {dir}/_b.cu\n// devices: 2\n\
                    // alone: fills it\n\n// args: 7\n";
        let program = Program::parse(Path::new("x/a.cu"), text).unwrap();
        assert_eq!(program.build, ["-rdc=true", "x/_b.cu"]);
        assert!(program.alone);
        assert_eq!((program.devices, program.args.len()), (2, 0));
    }

    #[test]
    fn a_bad_number_names_its_line() {
        let error = Program::parse(Path::new("a.cu"), "// devices: two\n").unwrap_err();
        assert!(error.to_string().starts_with("a.cu:1:"), "{error}");
    }
}
