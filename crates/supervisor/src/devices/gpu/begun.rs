//! New proxies that bring devices back.

use super::ring::fill_ring;
use super::{LIMIT, Saved, failed, refused};
use crate::devices::proxies::{Launch, Proxies, Proxy, ProxyId};
use crate::services::keeper::Held;
use crate::services::warm::WarmProxy;
use kedge_control::proxy::{Answer, Control, ControlError, Order, StoredFile};
use kedge_cuda_types::arena::MAX_DEVICES;
use kedge_gpu_image::place_file;
use kedge_image::{FileEntry, Folder, ImageError, ImageFile, Layers, Manifest};
use kedge_process::plugins::{PluginError, World};
use kedge_wire::Text;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Between a proxy's last word and its end.
const ENDING: Duration = Duration::from_secs(2);

/// What a restart needs.
#[derive(Debug)]
pub(crate) struct Restart {
    /// What starts proxies in the job's init, where none are warm.
    pub(crate) launch: Launch,
    /// Where the new proxies are noted.
    pub(crate) proxies: Proxies,
    /// Where processes ask for devices.
    pub(crate) socket: PathBuf,
    /// The image's.
    pub(crate) files: Vec<FileEntry>,
    pub(crate) folder: PathBuf,
}

/// A proxy that brings a client's devices back.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) client: u32,
    pub(super) proxy: Arc<Proxy>,
    /// Where the files lie that it reads.
    files: Vec<PathBuf>,
}

/// A proxy that starts, and has not been told what to bring back.
#[derive(Debug)]
pub(super) struct Started {
    proxy: Arc<Proxy>,
    /// The client's end of the connection.
    near: UnixStream,
    ring: OwnedFd,
    arena: OwnedFd,
}

impl Started {
    /// Makes a client's connection and starts the proxy that is to bring its devices back.
    pub(super) fn new(restart: &Restart, warm: Option<WarmProxy>) -> Result<Started, PluginError> {
        let (near, far) = UnixStream::pair().map_err(failed("make a connection"))?;
        let ring = kedge_transport::create_ring().map_err(failed("make a ring"))?;
        let arena = kedge_transport::create_shared_arena();
        let arena = arena.map_err(failed("make a shared arena"))?;
        let proxy = restart.launch.provide(warm, far.as_fd(), &["--restore"]);
        let proxy = proxy.map_err(failed("start a proxy"))?;
        Ok(Started { proxy, near, ring, arena })
    }

    /// Fills what ties the client to the proxy, and gives it to the client.
    fn tie(&self, saved: &Saved, world: &mut World) -> Result<(), PluginError> {
        let Started { near, ring, arena, .. } = self;
        fill_ring(ring, saved, world)?;
        let again = |fd: &dyn AsFd| fd.as_fd().try_clone_to_owned();
        let sockets = saved.sockets.iter().map(|d| (*d, near.as_fd()));
        let rings = saved.rings.iter().map(|d| (*d, ring.as_fd()));
        let arenas = saved.arenas.iter().map(|d| (*d, arena.as_fd()));
        for (description, fd) in sockets.chain(rings).chain(arenas) {
            world.made(description, again(&fd).map_err(failed("duplicate it"))?)?;
        }
        match &saved.pages {
            Some(pages) => super::pages::restore(pages, saved.pid, world),
            None => Ok(()),
        }
    }
}

/// What brings devices back.
pub(super) struct Sources<'a> {
    restart: &'a Restart,
    held: Option<&'a Held>,
    /// The image and those that it builds on, once one of its files is wanted.
    chain: Vec<(Folder, Manifest)>,
}

impl<'a> Sources<'a> {
    pub(super) fn of(restart: &'a Restart, held: Option<&'a Held>) -> Sources<'a> {
        Sources { restart, held, chain: Vec::new() }
    }

    /// Has a proxy bring a client's devices back: from what is held, else from the file that
    /// `entry` tells of and those that it builds on.
    pub(super) fn restore(
        &mut self,
        (saved, entry): (&Saved, &FileEntry),
        started: Started,
        world: &mut World,
    ) -> Result<Begun, PluginError> {
        let restart = self.restart;
        started.tie(saved, world)?;
        let Started { proxy, ring, arena, .. } = started;
        let held = self.held.and_then(|held| held.client(&saved.file));
        let files = if held.is_none() { self.open_files(entry)? } else { Vec::new() };
        let control = &proxy.control;
        let pid = saved.pid as u32;
        let given = match held {
            Some(held) => {
                let file = stored(0, &restart.folder, held.file.clone());
                let given = control.give_files(&[(file, held.memory.as_fd())]);
                given.and_then(|()| control.give_parts(&held.parts))
            }
            None => give_files(control, &files),
        };
        let order = Order::Restore { held: held.is_some() };
        let given = given.and_then(|()| control.give(&order, &[ring.as_fd(), arena.as_fd()]));
        given.map_err(|error| refused(pid, &error))?;
        let paths = files.iter().map(|(_, file)| file.path().to_owned());
        let files = held.map(|held| restart.folder.join(&held.file.name)).into_iter().chain(paths);
        let files = files.collect();
        Ok(Begun { client: pid, proxy, files })
    }

    /// Opens the files that a client's devices come back from: its own and those of its places,
    /// each with those that it builds on. With whose each is.
    fn open_files(&mut self, own: &FileEntry) -> Result<Vec<(u32, Arc<ImageFile>)>, ImageError> {
        let restart = self.restart;
        if self.chain.is_empty() {
            self.chain = kedge_image::chain(&restart.folder)?;
            self.chain[0].0.is_believed()?;
        }
        let of_places = (0..MAX_DEVICES as usize).map_while(|place| {
            let name = place_file(&own.name, place);
            restart.files.iter().find(|file| file.name == name)
        });
        let mut all = Vec::new();
        for (of, entry) in (0..).zip(std::iter::once(own).chain(of_places)) {
            if self.chain[0].1.file(&entry.name) != Some(entry) {
                let (path, offset) = (restart.folder.join(&entry.name), 0);
                let what = "it is not the one that its image's manifest names";
                return Err(ImageError::Damaged { path, offset, what });
            }
            let layers = Layers::open(&self.chain, &entry.name)?;
            all.extend(layers.own().iter().map(|file| (of, file.clone())));
        }
        Ok(all)
    }
}

/// Gives a proxy open files, which it reads by their descriptors: it needs no way to their folders,
/// and no right to them.
fn give_files(control: &Control, files: &[(u32, Arc<ImageFile>)]) -> Result<(), ControlError> {
    let mut given = Vec::new();
    for (of, file) in files {
        let folder = file.path().parent().unwrap_or(Path::new("."));
        let entry = file.entry().map_err(|error| ControlError::Failed(error.to_string()))?;
        let fd = file.descriptor().ok_or(ControlError::Nonsense)?;
        given.push((stored(*of, folder, entry), fd));
    }
    control.give_files(&given)
}

/// What a proxy is told of a file of the image in `folder`.
fn stored(of: u32, folder: &Path, entry: FileEntry) -> StoredFile {
    let FileEntry { name, bytes, checksum } = entry;
    let (image, name) = (Text::truncated(image_name(folder)), Text::truncated(name));
    StoredFile { of, image, name, bytes, checksum }
}

fn image_name(folder: &Path) -> String {
    let name = folder.file_name().map_or_else(|| "image".into(), |name| name.to_string_lossy());
    name.into_owned()
}

/// Returns what proxies have said, with the whole path of a file that they know by its name and its
/// image's alone.
pub(super) fn in_full(begun: &[Begun], said: String) -> String {
    with_path(begun.iter().flat_map(|begun| &begun.files), said)
}

fn with_path<'a>(files: impl IntoIterator<Item = &'a PathBuf>, mut said: String) -> String {
    for file in files {
        let (folder, name) = (file.parent().unwrap_or(Path::new(".")), file.file_name());
        let known = format!("{}/{}", image_name(folder), name.unwrap_or_default().display());
        if let Some(at) = said.find(&known)
            && (at == 0 || said[..at].ends_with(' '))
        {
            said.replace_range(at..at + known.len(), &file.to_string_lossy());
            break;
        }
    }
    said
}

impl Begun {
    /// Whether its proxy, a child of this process, has ended. /proc may not be this namespace's as
    /// yet.
    pub(super) fn has_ended(&self) -> bool {
        let ProxyId::Child(pid) = self.proxy.id else { return false };
        // SAFETY: plain data, for which zero is a value; the call fills it and leaves the child as
        // it is.
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            libc::waitid(libc::P_PID, pid, &raw mut info, flags) == 0 && info.si_pid() != 0
        }
    }
}

/// What a proxy that has ended says of it; else `other`. Its connections close a little before it
/// has ended.
pub(super) fn why_not(begun: &[Begun], other: PluginError) -> PluginError {
    let find = || begun.iter().find(|begun| begun.has_ended());
    let begin = Instant::now();
    let mut ended = find();
    while ended.is_none() && begin.elapsed() < ENDING {
        thread::sleep(Duration::from_millis(5));
        ended = find();
    }
    ended.map_or(other, |ended| {
        let said = format!(
            "the devices of process {}: {}",
            ended.client,
            last_words(&ended.proxy.control)
        );
        PluginError::Refused(in_full(begun, said))
    })
}

/// Why a proxy that has ended does not go on. It may have said before that all is well.
fn last_words(control: &Control) -> ControlError {
    loop {
        if let Err(error) = control.answer(LIMIT) {
            return error;
        }
    }
}

/// The client's process is there: its proxy serves it from now on.
pub(super) fn go_on(proxy: &Proxy, client: u32) -> Result<(), PluginError> {
    let order = Order::Begin { pid: client };
    let done = match (proxy.id, rustix::process::Pid::from_raw(client as i32)) {
        // It has another id in the proxy's namespace.
        (ProxyId::Warm(_), Some(pid)) => {
            let flags = rustix::process::PidfdFlags::empty();
            let process = rustix::process::pidfd_open(pid, flags).map_err(io::Error::from);
            let process = process.map_err(failed("open a process descriptor"))?;
            proxy.control.ask(&order, &[process.as_fd()], LIMIT)
        }
        _ => proxy.control.ask(&order, &[], LIMIT),
    };
    match done {
        Ok(Answer::Yes {}) => Ok(()),
        Ok(_) => Err(refused(client, &ControlError::Nonsense)),
        Err(error) => Err(refused(client, &error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_as_users_find_them() {
        let files = ["/images/j-2/gpu-7.kimg", "/images/xj-1/gpu-7.kimg", "/images/j-1/gpu-7.kimg"];
        let files = files.map(PathBuf::from);
        let told = |said: &str| with_path(&files, format!("process 7: {said}, offset 4096: bad"));
        for (known, whole) in [
            ("j-1/gpu-7.kimg", "/images/j-1/gpu-7.kimg"),
            ("xj-1/gpu-7.kimg", "/images/xj-1/gpu-7.kimg"),
            ("j-3/gpu-7.kimg", "j-3/gpu-7.kimg"),
        ] {
            assert_eq!(told(known), format!("process 7: {whole}, offset 4096: bad"));
        }
        // In the folder that this process is in.
        let here = [PathBuf::from("./gpu-7.kimg")];
        assert_eq!(with_path(&here, "image/gpu-7.kimg: bad".into()), "./gpu-7.kimg: bad");
    }
}
