//! `ssh` as a job's programs find it: has the system's ssh start a part of the job on the other
//! host, and holds the streams.

use super::frame::{Frame, Stream};
use super::options::{Call, Carried, parse};
use super::relay::Relay;
use super::{CHOICE, FAILED, NOT_FOUND, REMOTE, Request, Streams, halves};
use crate::output;
use crate::serve::ignored_signals;
use kedge_control::job::{Ask, FailureKind, Launch, Reply, Request as Asked, VERSION};
use kedge_control::job::{receive, send};
use kedge_control::joblog::JobLog;
use kedge_control::warn;
use kedge_coordinator::JobKey;
use kedge_keys::{PSK_BYTES, PskEnd};
use kedge_supervisor::die_of;
use kedge_supervisor::jobs::SHELL;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::{flag, low_level};
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(10);
/// Time between two questions to the job's supervisor.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// How long the job's supervisor may fail to answer.
const SILENT: Duration = Duration::from_secs(10);
/// How long the other end, and ssh's end, may come after one another.
const SOON: Duration = Duration::from_secs(20);
/// How long one that connects may take to show the token.
const ENTRANCE: Duration = Duration::from_secs(5);
/// How long a command may live after a signal that ends ssh.
const DYING: Duration = Duration::from_secs(2);
/// What the system's ssh does besides is for the part's beginning alone: no terminal, no X11, no
/// forwarding, and no connection that stays for others.
const ONLY: [&str; 6] = ["-T", "-x", "-o", "ClearAllForwardings=yes", "-o", "ControlMaster=no"];

/// How many that have not shown the token are listened to at once.
const COMERS: usize = 16;

/// Does what `ssh words…` does. Does not return where the system's ssh takes this process's place,
/// or a signal ends it.
pub(super) fn run(words: &[OsString]) -> ExitCode {
    let real = match find() {
        Some(real) => real,
        None => {
            output::complain("there is no ssh on the PATH but kedge's: install an SSH client");
            return ExitCode::from(127);
        }
    };
    let carried = match parse(words) {
        _ if std::env::var_os(CHOICE).is_some_and(|choice| choice == "plain") => {
            return plain(&real, words, None);
        }
        Call::Plain(why) => return plain(&real, words, Some(&why)),
        Call::Carried(carried) => carried,
    };
    let Some(control) = std::env::var_os("KEDGE_CONTROL").map(PathBuf::from) else {
        return plain(&real, words, None);
    };
    let (asker, launch) = match ask(&control, address_of(&real, &carried)) {
        Ok(asked) => asked,
        Err(why) => return plain(&real, words, Some(&why)),
    };
    launch.warning.iter().for_each(|warning| output::complain(warning));
    let begun = begin(&real, &carried, launch);
    // A checkpoint may begin.
    drop(asker);
    let ended = match begun {
        Ok(Begun::There(link, secret)) => hold(link, secret, carried.no_input),
        // Nothing has run there, and nothing was read from the input.
        Ok(Begun::Absent(why)) => {
            output::complain(&why);
            return plain(&real, words, Some(&why));
        }
        Ok(Begun::Failed(code)) => return ExitCode::from(code),
        Err(error) => Err(error),
    };
    match ended {
        Ok(Ended::Exit(code)) => ExitCode::from(code),
        Ok(Ended::Signal(signal)) => die_of(signal),
        Ok(Ended::Lost(why)) => {
            let host = carried.host.to_string_lossy();
            output::complain(&format!("{host}: the remote shell is lost: {why}"));
            ExitCode::from(FAILED)
        }
        Err(error) => {
            output::complain(&format!("{}: {error}", carried.host.to_string_lossy()));
            ExitCode::from(FAILED)
        }
    }
}

/// The ssh on the PATH that would be found if this program were not there: one before it may be
/// another kedge's, which looks behind itself likewise.
fn find() -> Option<PathBuf> {
    let own = fs::metadata("/proc/self/exe").ok().map(|own| (own.dev(), own.ino()));
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    behind(std::env::split_paths(&path).map(|folder| folder.join(SHELL)), own)
}

/// The first program behind the last one that is `own`, a device and a number.
fn behind(all: impl Iterator<Item = PathBuf>, own: Option<(u64, u64)>) -> Option<PathBuf> {
    let mut first = None;
    for ssh in all {
        let Ok(found) = fs::metadata(&ssh) else { continue };
        if Some((found.dev(), found.ino())) == own {
            first = None;
        } else if found.is_file() && found.permissions().mode() & 0o111 != 0 {
            first = first.or(Some(ssh));
        }
    }
    first
}

/// The system's ssh. What it starts itself (a ProxyCommand, say) is no part of the job.
fn system(real: &Path) -> Command {
    let mut ssh = Command::new(real);
    ssh.env(CHOICE, "plain");
    ssh
}

/// Becomes the system's ssh.
fn plain(real: &Path, words: &[OsString], why: Option<&str>) -> ExitCode {
    let log = std::env::var_os("KEDGE_LOG").map(PathBuf::from);
    let log = log.and_then(|log| JobLog::open(&log, format!("ssh[{}]", std::process::id())).ok());
    if let (Some(why), Some(log)) = (why, log) {
        warn!(log, "{why}: what this ssh starts is not a part of the job");
    }
    let error = system(real).args(words).exec();
    output::complain(&format!("{}: {error}", real.display()));
    ExitCode::from(126)
}

/// The host's address or name, as ssh's configuration has it.
fn address_of(real: &Path, carried: &Carried) -> Option<String> {
    let mut asking = system(real);
    asking.arg("-G").args(&carried.options).arg("--").arg(&carried.host);
    let told = asking.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8(told.stdout).ok()?;
    text.lines().find_map(|line| line.strip_prefix("hostname ")).map(str::to_owned)
}

/// Asks the job's supervisor for what the part is to know. No checkpoint begins as long as the
/// connection that comes with it is open.
///
/// # Errors
/// It says that there can be no part, or does not answer.
fn ask(control: &Path, toward: Option<String>) -> Result<(UnixStream, Launch), String> {
    let mut silent_since = Instant::now();
    loop {
        match ask_once(control, toward.clone()) {
            Ok((asker, Reply::Launch(launch))) => return Ok((asker, *launch)),
            Ok((_, Reply::Failed { kind: FailureKind::Busy, .. })) => silent_since = Instant::now(),
            Ok((_, Reply::Failed { message, .. })) => return Err(message),
            Ok(_) => return Err("the job answers as another version of kedge does".to_owned()),
            // As it is while a restarted job's supervisor begins.
            Err(error) if silent_since.elapsed() > SILENT => {
                return Err(format!("the job's supervisor does not answer ({error})"));
            }
            Err(_) => {}
        }
        thread::sleep(RETRY_INTERVAL);
    }
}

fn ask_once(control: &Path, toward: Option<String>) -> io::Result<(UnixStream, Reply)> {
    let stream = kedge_socket::address::connect(control)?;
    send(&stream, &Asked { version: VERSION, ask: Ask::Launch { toward } })?;
    let reply = receive(&stream)?;
    Ok((stream, reply))
}

enum Begun {
    /// The other end is there.
    There(TcpStream, [u8; PSK_BYTES]),
    /// There is no kedge: in words.
    Absent(String),
    /// ssh, or kedge on the other host, has said why not.
    Failed(u8),
}

/// Has the system's ssh start the part, and returns when its end is connected and ssh has ended.
fn begin(real: &Path, carried: &Carried, launch: Launch) -> io::Result<Begun> {
    let (listener, streams) = listen(&launch)?;
    let mut door = Door { listener, streams: streams.clone(), comers: Vec::new() };
    let own = std::env::current_exe()?;
    let kedge = std::env::var_os(REMOTE).unwrap_or_else(|| own.into_os_string());
    let mut ssh = system(real);
    ssh.args(ONLY).args(&carried.options).arg("--").arg(&carried.host);
    ssh.arg(format!("exec {} remote-shell", quoted(&kedge.to_string_lossy())));
    let mut ssh = ssh.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
    let command = carried.command.clone();
    let request = serde_json::to_vec(&Request { launch, streams, command })?;
    // One that has ended says below why.
    let _ = ssh.stdin.take().map(|mut stdin| stdin.write_all(&request));
    let (kedge, host) = (kedge.to_string_lossy(), carried.host.to_string_lossy());
    Ok(match meet(&mut door, &host, &mut ssh)? {
        Begun::Failed(NOT_FOUND) => Begun::Absent(format!(
            "{host} has no {kedge}: install kedge there under this path, or let {REMOTE} name it"
        )),
        found => found,
    })
}

/// Waits for the other end, and for ssh.
fn meet(door: &mut Door, host: &str, ssh: &mut Child) -> io::Result<Begun> {
    let (mut link, mut ended): (Option<TcpStream>, Option<(u8, Instant)>) = (None, None);
    let mut since = None;
    loop {
        if link.is_none() {
            link = door.look()?;
            since = link.as_ref().map(|_| Instant::now());
        }
        if ended.is_none() {
            let code = |status: std::process::ExitStatus| status.code().map_or(FAILED, |c| c as u8);
            ended = ssh.try_wait()?.map(|status| (code(status), Instant::now()));
        }
        match (link.take(), ended) {
            (Some(link), Some(_)) => {
                return Ok(Begun::There(link, door.streams.secret));
            }
            (Some(link), None) if since.is_some_and(|since| since.elapsed() > SOON) => {
                // Nothing is to be had from it any more.
                ssh.kill()?;
                ssh.wait()?;
                return Ok(Begun::There(link, door.streams.secret));
            }
            (None, Some((0, at))) if at.elapsed() > SOON => {
                output::complain(&format!("{host}: nothing has connected from there"));
                return Ok(Begun::Failed(FAILED));
            }
            (None, Some((code, _))) if code != 0 => return Ok(Begun::Failed(code)),
            (none, _) => link = none,
        }
        thread::sleep(PAUSE);
    }
}

/// Listens for the other end.
fn listen(launch: &Launch) -> io::Result<(TcpListener, Streams)> {
    let any: IpAddr = match launch.own {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let listener = TcpListener::bind((any, 0))?;
    listener.set_nonblocking(true)?;
    let address = SocketAddr::new(launch.own, listener.local_addr()?.port());
    let token = String::from_utf8_lossy(JobKey::generate()?.text()).into_owned();
    let secret = kedge_keys::new_psk().map_err(io::Error::other)?;
    Ok((listener, Streams { address, token, secret }))
}

/// Where the other end comes in: it shows the first half of the token, and is shown the other one.
struct Door {
    listener: TcpListener,
    streams: Streams,
    /// Those who have not shown theirs yet, what they have, and since when they are there.
    comers: Vec<(TcpStream, Vec<u8>, Instant)>,
}

impl Door {
    /// Takes the connection of the other end, if it is there. Waits for nobody.
    fn look(&mut self) -> io::Result<Option<TcpStream>> {
        match self.listener.accept() {
            Ok((comer, _)) => {
                comer.set_nonblocking(true)?;
                if self.comers.len() == COMERS {
                    self.comers.remove(0);
                }
                self.comers.push((comer, Vec::new(), Instant::now()));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // One that has gone again.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => return Err(error),
        }
        let (asked, answer) = halves(&self.streams.token);
        let mut index = 0;
        while let Some((comer, shown, since)) = self.comers.get_mut(index) {
            let has_time = since.elapsed() < ENTRANCE;
            match shows(comer, shown, asked) {
                Some(true) => {
                    let (mut link, ..) = self.comers.swap_remove(index);
                    link.set_nonblocking(false)?;
                    if link.write_all(answer).is_ok() {
                        return Ok(Some(link));
                    }
                }
                None if has_time => index += 1,
                _ => drop(self.comers.swap_remove(index)),
            }
        }
        Ok(None)
    }
}

/// Whether somebody shows what is `asked`; `None` as long as that is open.
fn shows(comer: &mut TcpStream, shown: &mut Vec<u8>, asked: &[u8]) -> Option<bool> {
    let mut rest = vec![0; asked.len() - shown.len()];
    match comer.read(&mut rest) {
        Ok(0) => return Some(false),
        Ok(read) => shown.extend(&rest[..read]),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
        Err(_) => return Some(false),
    }
    match asked.starts_with(shown) {
        true if shown.len() < asked.len() => None,
        right => Some(right),
    }
}

/// As one word of any shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// How the remote shell has ended.
enum Ended {
    /// The command's own status, as ssh tells it.
    Exit(u8),
    /// By a signal to this process.
    Signal(i32),
    /// And why.
    Lost(String),
}

/// Holds the streams until the command has ended.
fn hold(link: TcpStream, secret: [u8; PSK_BYTES], no_input: bool) -> io::Result<Ended> {
    let caught = Caught::new()?;
    let mut relay = Relay::new(link, secret, PskEnd::First)?;
    match no_input {
        true => relay.say(&Frame::End(Stream::In)),
        false => relay.read_from(Stream::In, io::stdin().as_fd().try_clone_to_owned()?),
    }
    relay.write_to(Stream::Out, io::stdout().as_fd().try_clone_to_owned()?);
    relay.write_to(Stream::Err, io::stderr().as_fd().try_clone_to_owned()?);
    let (mut exit, mut dying): (Option<u8>, Option<(i32, Instant)>) = (None, None);
    loop {
        let left = dying.map(|(_, at)| DYING.saturating_sub(at.elapsed()));
        if relay.turn(Some(caught.wake.as_fd()), left)?
            && let Some(signal) = caught.taken()
        {
            relay.say(&Frame::Signal(signal as u8));
            dying = dying.or(Some((signal, Instant::now())));
        }
        for told in relay.told() {
            if let Frame::Exit(code) = told {
                exit = Some(code);
            }
        }
        let is_late = dying.is_some_and(|(_, at)| at.elapsed() >= DYING);
        let is_over = match exit {
            Some(_) => relay.has_written(),
            None => relay.is_closed() && relay.has_written(),
        };
        match (dying, exit) {
            (Some((signal, _)), _) if is_over || is_late => return Ok(Ended::Signal(signal)),
            (_, Some(code)) if is_over => return Ok(Ended::Exit(code)),
            (_, None) if is_over => return Ok(Ended::Lost(relay.why_closed().to_owned())),
            _ => {}
        }
    }
}

/// Signals that are passed on before they end this process.
struct Caught {
    wake: UnixStream,
    which: Arc<AtomicUsize>,
}

impl Caught {
    fn new() -> io::Result<Caught> {
        let (wake, waker) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        let which = Arc::new(AtomicUsize::new(0));
        // What is ignored stays so: under nohup, or in the background of a script.
        let ignored = ignored_signals();
        let heeded = [SIGHUP, SIGINT, SIGQUIT, SIGTERM].into_iter().filter(|one| !ignored(*one));
        for signal in heeded {
            // In this order: who is woken finds which it was.
            flag::register_usize(signal, which.clone(), signal as usize)?;
            low_level::pipe::register(signal, waker.try_clone()?)?;
        }
        Ok(Caught { wake, which })
    }

    /// The latest that has come since this was asked.
    fn taken(&self) -> Option<i32> {
        let _ = (&self.wake).read(&mut [0; 16]);
        let signal = self.which.swap(0, Ordering::SeqCst);
        i32::try_from(signal).ok().filter(|signal| *signal > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ssh_is_looked_for_behind_kedge_s_own() {
        let base = std::env::temp_dir().join(format!("kssh-find-{}", std::process::id()));
        let ssh = |folder: &str| base.join(folder).join(SHELL);
        for folder in ["a", "b", "c", "d"] {
            fs::create_dir_all(base.join(folder)).unwrap();
            fs::write(ssh(folder), "").unwrap();
            fs::set_permissions(ssh(folder), fs::Permissions::from_mode(0o755)).unwrap();
        }
        fs::set_permissions(ssh("c"), fs::Permissions::from_mode(0o644)).unwrap();
        let own = fs::metadata(ssh("b")).map(|own| (own.dev(), own.ino())).ok();
        let find = |own| behind(["a", "b", "none", "c", "d"].map(ssh).into_iter(), own);
        assert_eq!(find(own), Some(ssh("d")));
        assert_eq!(find(None), Some(ssh("a")));
        fs::remove_dir_all(base).unwrap();
    }

    fn door() -> (Door, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let at = listener.local_addr().unwrap();
        let streams = Streams { address: at, token: "abcdefgh".into(), secret: [0; PSK_BYTES] };
        (Door { listener, streams, comers: Vec::new() }, at)
    }

    fn soon(door: &mut Door) -> Option<TcpStream> {
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(10) {
            if let Some(link) = door.look().unwrap() {
                return Some(link);
            }
            thread::sleep(PAUSE);
        }
        None
    }

    #[test]
    fn strangers_hold_up_nobody_at_the_door() {
        let (mut door, at) = door();
        let silent: Vec<_> = (0..40).map(|_| TcpStream::connect(at).unwrap()).collect();
        let mut wrong = TcpStream::connect(at).unwrap();
        wrong.write_all(b"abcx").unwrap();
        let mut other = TcpStream::connect(at).unwrap();
        other.write_all(b"ab").unwrap();
        other.write_all(b"cd").unwrap();
        let begin = Instant::now();
        let link = soon(&mut door).expect("the other end");
        assert!(begin.elapsed() < ENTRANCE);
        assert_eq!(link.peer_addr().unwrap(), other.local_addr().unwrap());
        let mut answer = [0; 4];
        other.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"efgh");
        // Whoever shows something else hears nothing.
        wrong.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        assert!(matches!(wrong.read(&mut answer), Ok(0) | Err(_)));
        drop(silent);
    }

    #[test]
    fn a_word_is_quoted_for_any_shell() {
        for word in ["/opt/kedge", "a b", "it's", "$HOME;`x`", ""] {
            let line = format!("printf %s {}", quoted(word));
            let said = Command::new("sh").arg("-c").arg(line).output().expect("sh");
            assert_eq!(String::from_utf8_lossy(&said.stdout), word);
        }
    }
}
