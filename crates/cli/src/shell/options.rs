//! ssh's command line, as OpenSSH reads it (ssh(1), ssh_config(5)): what a remote shell that is a
//! part of the job can carry, and what only ssh itself can do.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Options with a value.
const WITH_VALUE: &[u8] = b"BDEFIJLOPQRSWbceilmopw";
/// Options without one that change nothing for a command and its streams.
const HARMLESS: &[u8] = b"1246CTaknqvxy";
/// Those with one.
const HARMLESS_WITH_VALUE: &[u8] = b"BEFIJPbceilmop";
/// Programs at the other end of a transfer: what they copy is not to cross the helpers.
const TRANSFERS: [&str; 12] = [
    "borg",
    "git-lfs-authenticate",
    "git-lfs-transfer",
    "hg",
    "rsync",
    "scp",
    "sftp-server",
    "git-upload-pack",
    "git-receive-pack",
    "git-upload-archive",
    "svnserve",
    "unison",
];

/// What a command line asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// A command on a host, with its three streams.
    Carried(Carried),
    /// Something that only ssh itself can do: why.
    Plain(String),
}

/// A command on a host.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Carried {
    /// For ssh.
    pub(super) options: Vec<OsString>,
    pub(super) host: OsString,
    /// As the other end's shell is given it.
    pub(super) command: String,
    /// Whether its standard input is empty (`-n`).
    pub(super) no_input: bool,
}

/// Reads the words behind `ssh`.
pub(super) fn parse(words: &[OsString]) -> Call {
    match read(words) {
        Ok(carried) => Call::Carried(carried),
        Err(why) => Call::Plain(why),
    }
}

fn read(words: &[OsString]) -> Result<Carried, String> {
    let mut carried = Carried::default();
    let mut rest = words;
    // Options may stand behind the host, too, but not behind `--` or the command.
    loop {
        let (after, ended) = options(rest, &mut carried)?;
        rest = after;
        if !carried.host.is_empty() {
            break;
        }
        let (host, after) = rest.split_first().ok_or("no host")?;
        carried.host.clone_from(host);
        rest = after;
        if ended || host.is_empty() {
            break;
        }
    }
    if rest.is_empty() {
        return Err("an interactive shell".to_owned());
    }
    let words: Vec<&[u8]> = rest.iter().map(|word| word.as_bytes()).collect();
    let command = String::from_utf8(words.join(&b' '));
    carried.command = command.map_err(|_| "a command that is not UTF-8")?;
    match transfer(&carried.command) {
        Some(name) => Err(format!("a transfer ({name})")),
        None => Ok(carried),
    }
}

/// Reads options up to the first word that is none; whether `--` has ended them.
fn options<'a>(
    words: &'a [OsString],
    carried: &mut Carried,
) -> Result<(&'a [OsString], bool), String> {
    let mut rest = words;
    while let Some((word, after)) = rest.split_first() {
        let bytes = word.as_bytes();
        if bytes == b"--" {
            return Ok((after, true));
        }
        if bytes.len() < 2 || bytes[0] != b'-' {
            break;
        }
        rest = one(bytes, after, carried)?;
    }
    Ok((rest, false))
}

/// Reads a word of options; `rest` is what stands behind it. What is behind the value of its last
/// one comes back.
fn one<'a>(
    word: &[u8],
    mut rest: &'a [OsString],
    carried: &mut Carried,
) -> Result<&'a [OsString], String> {
    let mut kept = vec![b'-'];
    for (at, letter) in word.iter().enumerate().skip(1) {
        if !WITH_VALUE.contains(letter) {
            flag(*letter, carried)?;
            // ssh has its input for itself.
            kept.extend(Some(*letter).filter(|letter| *letter != b'n'));
            continue;
        }
        // In the rest of this word, or in the next one.
        let value = match &word[at + 1..] {
            [] => {
                let (value, after) = rest.split_first().ok_or("an option without a value")?;
                rest = after;
                value.clone()
            }
            value => OsString::from_vec(value.to_vec()),
        };
        if valued(*letter, &value, carried)? {
            kept.push(*letter);
            carried.options.push(OsString::from_vec(kept));
            carried.options.push(value);
            return Ok(rest);
        }
        break;
    }
    if kept.len() > 1 {
        carried.options.push(OsString::from_vec(kept));
    }
    Ok(rest)
}

fn flag(letter: u8, carried: &mut Carried) -> Result<(), String> {
    carried.no_input |= letter == b'n';
    match HARMLESS.contains(&letter) {
        true => Ok(()),
        false => Err(format!("-{}", char::from(letter))),
    }
}

/// Whether it is for ssh, too.
fn valued(letter: u8, value: &OsStr, carried: &mut Carried) -> Result<bool, String> {
    if !HARMLESS_WITH_VALUE.contains(&letter) {
        return Err(format!("-{}", char::from(letter)));
    }
    if letter != b'o' {
        return Ok(true);
    }
    // `Key=value` or `Key value`, in any case.
    let text = value.to_string_lossy().to_ascii_lowercase();
    let end = text.find(|c: char| c == '=' || c.is_whitespace()).unwrap_or(text.len());
    let (key, value) = text.split_at(end);
    let value = value.trim_matches(|c: char| c == '=' || c == '"' || c.is_whitespace());
    let off = matches!(value, "no" | "false" | "none" | "default" | "auto");
    match key {
        "stdinnull" => {
            carried.no_input |= !off;
            return Ok(false);
        }
        "localforward"
        | "remoteforward"
        | "dynamicforward"
        | "tunnel"
        | "forwardagent"
        | "forwardx11"
        | "forwardx11trusted"
        | "requesttty"
        | "remotecommand"
        | "sessiontype"
        | "forkafterauthentication"
        | "gssapidelegatecredentials"
            if !off =>
        {
            return Err(format!("-o {key}"));
        }
        _ => {}
    }
    Ok(true)
}

/// The program of a transfer that the command starts.
fn transfer(command: &str) -> Option<&'static str> {
    let program = command.split_whitespace().next()?;
    let name = program.rsplit('/').next()?.trim_matches(|c| c == '\'' || c == '"');
    TRANSFERS.into_iter().find(|known| *known == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn call(line: &str) -> Call {
        parse(&line.split(' ').map(OsString::from).collect::<Vec<_>>())
    }

    fn carried(line: &str) -> Carried {
        match call(line) {
            Call::Carried(carried) => carried,
            Call::Plain(why) => panic!("{line}: {why}"),
        }
    }

    #[test]
    fn launchers_of_mpi_are_carried() {
        let open_mpi = carried("-x node2 orted -mca ess env --tree-spawn");
        assert_eq!(open_mpi.host, "node2");
        assert_eq!(open_mpi.options, ["-x"]);
        assert_eq!(open_mpi.command, "orted -mca ess env --tree-spawn");
        assert!(!open_mpi.no_input);
        let hydra = carried("-x 10.0.0.2 \"/usr/bin/hydra_pmi_proxy\" --control-port a:1");
        assert_eq!(hydra.command, "\"/usr/bin/hydra_pmi_proxy\" --control-port a:1");
    }

    #[test]
    fn options_are_read_as_openssh_reads_them() {
        let line =
            "-qTp22 -l me -oBatchMode=yes -o ConnectTimeout=5 -i key -F /dev/null u@h -n -v ls -l";
        let found = carried(line);
        assert_eq!((found.host.to_str(), found.no_input), (Some("u@h"), true));
        assert_eq!(found.command, "ls -l");
        // Values are words of their own, and ssh itself has an input.
        let options = "-qTp 22 -l me -o BatchMode=yes -o ConnectTimeout=5 -i key -F /dev/null -v";
        assert_eq!(found.options, options.split(' ').collect::<Vec<_>>());
        assert_eq!(carried("-nq h true").options, ["-q"]);
        assert_eq!(carried("-xoStdinNull=yes h true").options, ["-x"]);
        assert_eq!(carried("h -- ls -t").command, "ls -t");
        assert_eq!(carried("-- h -t").command, "-t");
        assert!(carried("-o StdinNull=yes h cat").no_input);
        assert!(!carried("-ostdinnull=no h cat").no_input);
        assert_eq!(carried("-oForwardAgent=no -oRequestTTY=auto h true").command, "true");
    }

    #[test]
    fn what_only_ssh_can_do_is_left_to_it() {
        for (line, why) in [
            ("-t h top", "-t"),
            ("-qtt h top", "-t"),
            ("-L 1:a:2 h true", "-L"),
            ("-R1:a:2 h true", "-R"),
            ("-A h true", "-A"),
            ("-f h sleep 9", "-f"),
            ("-N h true", "-N"),
            ("-G h", "-G"),
            ("-V", "-V"),
            ("-s h sftp", "-s"),
            ("h -X xterm", "-X"),
            ("-oRequestTTY=force h true", "-o requesttty"),
            ("-o LocalForward=1 h true", "-o localforward"),
            ("h", "an interactive shell"),
            ("-p", "an option without a value"),
            ("-q", "no host"),
            ("h rsync --server . x", "a transfer (rsync)"),
            ("h /usr/bin/scp -t x", "a transfer (scp)"),
            ("git@h git-upload-pack 'x'", "a transfer (git-upload-pack)"),
        ] {
            assert_eq!(call(line), Call::Plain(why.to_owned()), "{line}");
        }
    }

    proptest! {
        #[test]
        fn no_line_is_too_odd(words in proptest::collection::vec("[-a-zA-Z0-9=@ ]{0,6}", 0..8)) {
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            if let Call::Carried(carried) = parse(&words) {
                // What was carried is the line: its options, its host, its command.
                prop_assert!(words.contains(&carried.host));
            }
        }
    }
}
