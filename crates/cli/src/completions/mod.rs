//! `kedge completions`: made from the definition that parses the command line. What clap generates
//! knows words and options; names of jobs and images are asked for as they are needed, by
//! `kedge names`.

mod names;

use crate::{Cli, Failure, output};
use clap::{Arg, Args, Command, CommandFactory, ValueHint};
use clap_complete::Shell;
use names::Of;
pub(crate) use names::{NamesArgs, names};

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

pub(crate) fn completions(args: &CompletionsArgs) -> Result<(), Failure> {
    Ok(output::print(&script(args.shell, &Cli::command()))?)
}

fn script(shell: Shell, cli: &Command) -> String {
    let mut cli = without_hidden(cli);
    cli.build();
    let text = match shell {
        Shell::Zsh => generated(shell, hinted(cli.clone())),
        _ => generated(shell, cli.clone()),
    };
    let named = Named::all(&cli);
    match shell {
        Shell::Bash => text + &bash(&named),
        Shell::Fish => text + &fish(&named),
        Shell::Zsh => zsh(&text),
        _ => text,
    }
}

fn generated(shell: Shell, mut command: Command) -> String {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, "kedge", &mut text);
    String::from_utf8_lossy(&text).into_owned()
}

/// `command` with only those commands that are told to people: shells would offer the others too.
fn without_hidden(command: &Command) -> Command {
    Command::new("kedge")
        .version(env!("CARGO_PKG_VERSION"))
        .args(command.get_arguments().cloned())
        .subcommands(command.get_subcommands().filter(|sub| !sub.is_hide_set()).cloned())
}

/// An argument that is a name.
struct Named {
    /// The first word behind `kedge`.
    command: String,
    of: Of,
    kind: Kind,
}

enum Kind {
    /// The word has this place at least; `kedge` has 0. The options are those of the command that
    /// take the next word.
    Word {
        place: usize,
        options: Vec<String>,
    },
    Option {
        name: String,
    },
}

impl Named {
    fn all(cli: &Command) -> Vec<Named> {
        cli.get_subcommands().flat_map(Named::of).collect()
    }

    fn of(command: &Command) -> Vec<Named> {
        let name = command.get_name();
        let named = command.get_arguments().filter_map(|arg| Some((arg, of(command, arg)?)));
        let kind = |arg: &Arg| match (arg.get_long(), arg.get_index()) {
            (Some(long), _) => Kind::Option { name: format!("--{long}") },
            (None, place) => {
                Kind::Word { place: 1 + place.unwrap_or(1), options: options(command) }
            }
        };
        named.map(|(arg, of)| Named { command: name.to_owned(), of, kind: kind(arg) }).collect()
    }
}

fn of(command: &Command, arg: &Arg) -> Option<Of> {
    Of::argument(command.get_name(), arg.get_value_names()?.first()?)
}

/// The options of a command that take the word behind them.
fn options(command: &Command) -> Vec<String> {
    let takes = |arg: &&Arg| arg.get_action().takes_values() && !arg.is_require_equals_set();
    let names = |arg: &Arg| {
        let short = arg.get_short().map(|short| format!("-{short}"));
        arg.get_long().map(|long| format!("--{long}")).into_iter().chain(short)
    };
    command.get_arguments().filter(takes).flat_map(names).collect()
}

/// A function around the generated one, which is in the place of it from then on.
fn bash(named: &[Named]) -> String {
    let (mut by_option, mut by_word) = (String::new(), String::new());
    for Named { command, of, kind } in named {
        let of = of.word();
        match kind {
            Kind::Option { name } => {
                by_option.push_str(&format!("        {command}:{name}) of={of} ;;\n"));
            }
            Kind::Word { place, options } => {
                for option in options {
                    by_word.push_str(&format!("        {command}:{option}) ;;\n"));
                }
                by_word.push_str(&format!(
                    "        {command}:*) [[ $COMP_CWORD -lt {place} ]] || of={of} ;;\n"
                ));
            }
        }
    }
    format!(
        r#"
# Names of jobs and images, where the word may be one: they are asked for.
_kedge_with_names() {{
    _kedge "$@"
    local of= name found=()
    case "$2" in -* | */*) return 0 ;; esac
    case "${{COMP_WORDS[1]}}:$3" in
{by_option}{by_word}    esac
    [[ -n $of ]] || return 0
    while read -r name; do
        [[ $name != "$2"* ]] || found+=("$name")
    done < <("$1" names "$of" 2>/dev/null)
    [[ ${{#found[@]}} -eq 0 ]] || COMPREPLY=("${{found[@]}}")
}}
complete -F _kedge_with_names -o bashdefault -o default kedge
"#
    )
}

fn fish(named: &[Named]) -> String {
    let mut text = String::new();
    for Named { command, of, kind } in named {
        let condition = format!("complete -c kedge -n \"__fish_kedge_using_subcommand {command}\"");
        let (files, of) = (if of.is_path() { "" } else { " -f" }, of.word());
        let option = match kind {
            Kind::Option { name } => format!(" -l {} -r", name.trim_start_matches('-')),
            Kind::Word { .. } => String::new(),
        };
        text.push_str(&format!(
            "{condition}{option}{files} -a \"(kedge names {of} 2>/dev/null)\"\n"
        ));
    }
    text
}

/// What zsh would call for a hint that no argument of kedge's has otherwise, for each kind of name.
const HINTS: [(Of, ValueHint, &str); 4] = [
    (Of::Jobs, ValueHint::Username, ":_users'"),
    (Of::Kept, ValueHint::Hostname, ":_hosts'"),
    (Of::Images, ValueHint::Url, ":_urls'"),
    (Of::Restartable, ValueHint::EmailAddress, ":_email_addresses'"),
];

/// `cli` with these hints at the arguments that are names.
fn hinted(cli: Command) -> Command {
    let commands: Vec<String> =
        cli.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    commands.into_iter().fold(cli, |cli, name| {
        cli.mut_subcommand(&name, |command| {
            command.mut_args(|arg| {
                let value = arg.get_value_names().and_then(|names| names.first());
                let of = value.and_then(|value| Of::argument(&name, value));
                match HINTS.iter().find(|(hinted, ..)| Some(*hinted) == of) {
                    Some((_, hint, _)) => arg.value_hint(*hint),
                    None => arg,
                }
            })
        })
    })
}

/// `text`, made with [`hinted`] arguments, which calls functions of kedge's instead.
fn zsh(text: &str) -> String {
    let (mut text, mut functions) = (text.to_owned(), String::new());
    for (of, _, called) in HINTS {
        let word = of.word();
        text = text.replace(called, &format!(":_kedge_{word}'"));
        let files = if of.is_path() { "\n    _files" } else { "" };
        functions.push_str(&format!(
            "_kedge_{word}() {{\n    local -a found\n    \
             found=(${{(f)\"$(kedge names {word} 2>/dev/null)\"}})\n    \
             compadd -a found{files}\n}}\n"
        ));
    }
    // Before the generated function is called, which the last lines do.
    match text.split_once('\n') {
        Some((first, rest)) => format!("{first}\n\n{functions}{rest}"),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_argument_that_is_a_name_is_completed() {
        let cli = Cli::command();
        for (shell, job, image) in [
            (Shell::Bash, "checkpoint:*) [[ $COMP_CWORD -lt 2 ]] || of=jobs", "of=restartable"),
            (Shell::Zsh, ":job -- The job:_kedge_jobs'", ":_kedge_restartable'"),
            (
                Shell::Fish,
                "checkpoint\" -f -a \"(kedge names jobs",
                "-a \"(kedge names restartable",
            ),
        ] {
            let text = script(shell, &cli);
            assert!(text.contains(job) && text.contains(image), "{shell}: {text}");
            for (_, _, called) in HINTS {
                assert!(!text.contains(called), "{shell}: {called} is left");
            }
            assert!(!text.contains("kedge__subcmd__names"), "{shell}: what is hidden shows");
        }
    }

    #[test]
    fn values_of_options_are_not_taken_for_names() {
        let text = script(Shell::Bash, &Cli::command());
        for line in ["checkpoint:--wait) ;;", "images:--release) of=jobs ;;", "logs:-n) ;;"] {
            assert!(text.contains(line), "{line}");
        }
        // Given with an equals sign alone: the next word may be the job.
        assert!(!text.contains("checkpoint:--hold)"));
    }
}
