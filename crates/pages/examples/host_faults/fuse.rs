//! Shadow pages of a file that a FUSE server answers for: the kernel itself waits for its pages,
//! whoever touches them, also inside system calls.

use crate::Way;
use crate::memory::{Memory, PAGE, map, pin};
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

const IN_HEADER: usize = 40;
const FILE_NODE: u64 = 2;
const MODE: [u32; 2] = [libc::S_IFDIR | 0o755, libc::S_IFREG | 0o644];
/// Operations that are answered, by number.
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const INIT: u32 = 26;
const KEEP_CACHE: u32 = 2;
/// `FUSE_NOTIFY_INVAL_INODE`.
const INVALIDATE: i32 = 2;

struct Fuse {
    memory: Memory,
    device: Arc<File>,
    _file: File,
}

pub(crate) fn way() -> Result<Box<dyn Way>, String> {
    let refused = |error: io::Error| format!("FUSE: {error}");
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").map_err(refused)?;
    let device = Arc::new(device);
    let folder = std::env::temp_dir().join(format!("kedge-host-faults-{}", std::process::id()));
    std::fs::create_dir(&folder).map_err(refused)?;
    let opened = mounted(&device, &folder);
    let _ = std::fs::remove_dir(&folder);
    let file = opened.map_err(refused)?;
    let pages = crate::ROW;
    let view = map(file.as_raw_fd(), pages, true);
    let memory = Memory::of(view, view, pages);
    Ok(Box::new(Fuse { memory, device, _file: file }))
}

/// Mounts a file system of one file, opens that, and takes the mount off its folder.
fn mounted(device: &Arc<File>, folder: &std::path::Path) -> io::Result<File> {
    let target = CString::new(folder.as_os_str().as_bytes())?;
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
    let options = CString::new(options)?;
    // SAFETY: all are C strings that live until the calls return.
    let outcome = unsafe {
        let data = options.as_ptr().cast();
        libc::mount(c"pages".as_ptr(), target.as_ptr(), c"fuse".as_ptr(), libc::MS_NOSUID, data)
    };
    if outcome != 0 {
        return Err(io::Error::last_os_error());
    }
    let server = device.clone();
    std::thread::spawn(move || {
        pin(1);
        serve(&server)
    });
    let file = OpenOptions::new().read(true).write(true).open(folder.join("pages"));
    // SAFETY: `target` is a C string that lives until the call returns.
    unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
    file
}

fn serve(device: &File) {
    let mut request = vec![0u8; 1 << 20];
    while let Ok(length) = (&mut &*device).read(&mut request) {
        let word = |at: usize| u32::from_le_bytes(request[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_le_bytes(request[at..at + 8].try_into().unwrap());
        if length < IN_HEADER || word(4) == FORGET {
            continue;
        }
        let node = long(16);
        let answer = match word(4) {
            INIT => Ok(init()),
            LOOKUP => Ok(entry()),
            GETATTR => Ok([words(&[3600, 0, 0, 0]), attributes(node)].concat()),
            OPEN => Ok(words(&[0, 0, KEEP_CACHE, 0])),
            READ => Ok(vec![7u8; word(IN_HEADER + 16) as usize]),
            _ => Err(-libc::ENOSYS),
        };
        let (error, body) = answer.map_or_else(|error| (error, vec![]), |body| (0, body));
        let _ = send(device, error, long(8), &body);
    }
}

fn send(mut device: &File, error: i32, unique: u64, body: &[u8]) -> io::Result<()> {
    let length = 16 + body.len() as u32;
    let mut message = Vec::with_capacity(length as usize);
    message.extend_from_slice(&length.to_le_bytes());
    message.extend_from_slice(&error.to_le_bytes());
    message.extend_from_slice(&unique.to_le_bytes());
    message.extend_from_slice(body);
    device.write_all(&message)
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// `struct fuse_init_out`: 7.31, reads ahead up to 1 MiB, writes 64 KiB at a time.
fn init() -> Vec<u8> {
    let mut out = vec![7, 31, 1 << 20, 0, 16 | 12 << 16, 64 << 10, 1, 256];
    out.resize(16, 0);
    words(&out)
}

/// `struct fuse_entry_out`.
fn entry() -> Vec<u8> {
    let times = [FILE_NODE as u32, 0, 0, 0, 3600, 0, 3600, 0, 0, 0];
    [words(&times), attributes(FILE_NODE)].concat()
}

/// `struct fuse_attr`.
fn attributes(node: u64) -> Vec<u8> {
    let size = (crate::ROW * PAGE) as u32;
    let mut out = vec![node as u32, 0, size, 0, size / 512, 0];
    out.resize(15, 0);
    out.extend([MODE[usize::from(node == FILE_NODE)], 1, 0, 0, 0, PAGE as u32, 0]);
    words(&out)
}

impl Way for Fuse {
    fn name(&self) -> String {
        "FUSE, server on the other core".into()
    }

    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn read_ahead(&self, most: usize) {
        let advice = if most > 1 { libc::MADV_SEQUENTIAL } else { libc::MADV_RANDOM };
        // SAFETY: advice changes no bytes.
        unsafe { libc::madvise(self.memory.view.cast(), self.memory.pages * PAGE, advice) };
    }

    fn invalidate(&self, first: usize, count: usize) {
        let (offset, length) = ((first * PAGE) as u64, (count * PAGE) as u64);
        let body = [FILE_NODE, offset, length].map(u64::to_le_bytes).concat();
        send(&self.device, INVALIDATE, 0, &body).expect("an invalidation");
    }
}
