//! `kedge man`: made from the definition that parses the command line.

use crate::{Cli, Failure, output};
use clap::{Args, CommandFactory};
use clap_mangen::Man;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Only this command's page, such as run
    #[arg(value_name = "COMMAND", conflicts_with = "dir")]
    page: Option<String>,
    /// Write a page for every command into this folder
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
}

pub(crate) fn man(args: &ManArgs) -> Result<(), Failure> {
    let mut command = Cli::command().disable_help_subcommand(true);
    if let Some(dir) = &args.dir {
        std::fs::create_dir_all(dir)?;
        return Ok(clap_mangen::generate_to(command, dir)?);
    }
    command.build();
    let wanted = match &args.page {
        None => command,
        Some(name) => command
            .find_subcommand(name)
            .cloned()
            .ok_or_else(|| format!("kedge has no command {name}: `kedge --help` lists them"))?,
    };
    Ok(output::print(&String::from_utf8_lossy(&render(wanted)?))?)
}

fn render(command: clap::Command) -> std::io::Result<Vec<u8>> {
    let mut text = Vec::new();
    Man::new(command).render(&mut text)?;
    Ok(text)
}
