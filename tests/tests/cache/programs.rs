//! Programs that know nothing of the cache, on a cached folder.
use kedge_left_out::left_out;
use kedge_tests::cached::Cached;
use std::fs;
use std::path::Path;
use std::process::Command;

fn cached(name: &str) -> Option<Cached> {
    Cached::start(name, &["--tier", "ram:64M", "--host-free", "64M"])
}

/// Whether a program, with these first arguments, can be run.
fn there(program: &str, arguments: &[&str]) -> bool {
    let output = Command::new(program).args(arguments).output();
    let well = output.is_ok_and(|output| output.status.success());
    if !well {
        left_out(program, "it is not installed");
    }
    well
}

#[test]
fn cp_tar_and_mv_keep_bytes_times_and_rights() {
    let Some(cached) = cached("cpcp") else { return };
    cached.sh(
        "mkdir ../from; cd ../from; mkdir -p a/b; seq 100000 > a/numbers; chmod 640 a/numbers
         truncate -s 3M a/b/hole; printf end >> a/b/hole; ln -s ../a/numbers a/link
         touch -d '2001-02-03 04:05:06' a/numbers a/b/hole",
    );
    cached.sh(
        "cp -a ../from copy; tar -C ../from -cf whole.tar a; mkdir out; tar -C out -xpf whole.tar",
    );
    cached.sh("mv out/a out/moved; mv out/moved moved; rmdir out");
    let check =
        "cd ../from/a; find . -type f -printf '%p %s %m %T@\\n' | sort; md5sum numbers b/hole";
    let expected = cached.sh(check);
    for copy in ["copy/a", "moved"] {
        assert_eq!(cached.sh(&check.replace("../from/a", copy)), expected, "{copy}");
    }
    cached.drain();
    for copy in ["copy/a", "moved"] {
        assert_eq!(cached.sh(&check.replace("../from/a", copy)), expected, "{copy}, drained");
    }
    cached.stop();
    assert_eq!(cached.sh(&check.replace("../from/a", "moved")), expected);
}

const PYTHON: &str = r#"
import fcntl, mmap, os, subprocess, sys
# Shared memory of a file, seen by write and read, and by another process.
with open("m", "w+b") as f:
    f.truncate(1 << 20)
    with mmap.mmap(f.fileno(), 0) as m:
        m[5000:5005] = b"mmap!"
        m.flush()
        os.pwrite(f.fileno(), b"write", 9000)
        assert os.pread(f.fileno(), 5, 5000) == b"mmap!"
        assert m[9000:9005] == b"write", m[9000:9005]
        m[0:2] = b"xy"
assert open("m", "rb").read(2) == b"xy"
assert subprocess.check_output(["dd", "if=m", "bs=1", "skip=5000", "count=5"], stderr=-3) == b"mmap!"
# What other processes write is seen in a file's shared memory, and the other way round.
with open("seen", "w+b") as f:
    f.truncate(8192)
    with mmap.mmap(f.fileno(), 0) as m:
        assert m[100:103] == bytes(3)
        dd = ["dd", "of=seen", "bs=1", "seek=100", "conv=notrunc"]
        subprocess.run(dd, input=b"new", stderr=-3, check=True)
        assert m[100:103] == b"new", m[100:103]
        m[200:203] = b"map"
        for direct in [], ["iflag=direct"]:
            page = subprocess.check_output(["dd", "if=seen", "bs=4096", "count=1"] + direct, stderr=-3)
            assert page[200:203] == b"map" and page[100:103] == b"new", direct
        subprocess.check_call(["truncate", "-s", "4096", "seen"])
        assert os.fstat(f.fileno()).st_size == 4096
        subprocess.check_call(["truncate", "-s", "8192", "seen"])
        assert m[4096:8192] == bytes(4096) and m[200:203] == b"map"
# Aligned writes without the kernel's pages.
fd = os.open("direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
page = mmap.mmap(-1, 8192)
page[:] = b"d" * 8192
assert os.write(fd, page) == 8192
assert os.preadv(fd, [page], 4096) == 4096
os.close(fd)
assert open("direct", "rb").read() == b"d" * 8192
# Appending at the file's end, whoever writes there.
a, b = (os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND) for _ in range(2))
for i in range(50):
    os.write(a, b"a" * 10); os.write(b, b"b" * 10)
assert open("log", "rb").read() == (b"a" * 10 + b"b" * 10) * 50
# Locks exclude other processes.
lock = open("lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
taken = "import fcntl\ntry: fcntl.flock(open('lock','w'), fcntl.LOCK_EX | fcntl.LOCK_NB)\nexcept OSError: print('taken')"
assert subprocess.check_output([sys.executable, "-c", taken]) == b"taken\n"
fcntl.lockf(lock, fcntl.LOCK_EX)
# Holes are holes, and data is data, cached or not.
fd = os.open("holes", os.O_RDWR | os.O_CREAT)
os.pwrite(fd, b"1" * 4096, 0); os.pwrite(fd, b"2" * 4096, 1 << 20)
gathers = sys.argv[1] == "true"
assert os.lseek(fd, 4096, os.SEEK_DATA) == (4096 if gathers else 1 << 20)
assert os.lseek(fd, 0, os.SEEK_HOLE) == ((1 << 20) + 4096 if gathers else 4096)
os.posix_fallocate(fd, 0, 2 << 20)
assert os.fstat(fd).st_size == 2 << 20
os.fsync(fd)
assert os.pread(fd, 4096, 1 << 20) == b"2" * 4096
# A file written, renamed and read by its new name.
open("t", "w").write("new"); os.replace("t", "final")
assert open("final").read() == "new"
os.setxattr("final", "user.name", b"value")
assert os.getxattr("final", "user.name") == b"value" and os.listxattr("final") == ["user.name"]
print("ok")
"#;

fn python(gather: bool) {
    if !there("python3", &["-c", "import mmap"]) {
        return;
    }
    let options = ["--tier", "ram:64M", "--gather"];
    let (name, options) = if gather { ("cpygat", &options[..]) } else { ("cpy", &options[..2]) };
    let Some(cached) = Cached::start(name, options) else { return };
    fs::write(cached.world.0.join("t.py"), PYTHON).expect("a file");
    assert_eq!(cached.sh(&format!("python3 ../t.py {gather}")).trim(), "ok");
    cached.drain();
    assert_eq!(fs::read(cached.below().join("m")).expect("there")[5000..5005], *b"mmap!");
    assert_eq!(fs::read(cached.below().join("log")).expect("there").len(), 1000);
}

#[test]
fn python_maps_locks_appends_and_seeks() {
    python(false);
}

#[test]
fn python_does_so_where_the_kernel_gathers() {
    python(true);
}

#[test]
fn fio_verifies_what_it_wrote() {
    if !there("fio", &["--version"]) {
        return;
    }
    let Some(cached) = cached("cfio") else { return };
    for how in
        ["randwrite --bs=4k-128k", "write --bs=1M --fsync=8", "randwrite --bs=512-9k --direct=0"]
    {
        cached.sh(&format!(
            "fio --name=f --filename_format='f.$jobnum' --rw={how} --size=24M --numjobs=3 \
             --verify=crc32c --verify_fatal=1 --do_verify=1 --minimal --ioengine=psync"
        ));
    }
    cached.drain();
}

#[test]
fn h5py_writes_and_reads() {
    let python = std::env::var("KEDGE_PYTHON").unwrap_or_else(|_| "/usr/bin/python3".into());
    if !there(&python, &["-c", "import h5py"]) {
        return;
    }
    let Some(cached) = cached("ch5") else { return };
    let write = "import h5py, numpy
f = h5py.File('t.h5', 'w')
d = f.create_dataset('x', data=numpy.arange(1000000.0).reshape(1000, 1000), chunks=True)
f.create_group('g').attrs['a'] = 7
f.close()
f = h5py.File('t.h5', 'a'); f['x'][5] = 0; f.flush(); f.close()";
    let read = "import h5py
f = h5py.File('t.h5', 'r')
assert f['x'][6, 7] == 6007 and f['x'][5].sum() == 0 and f['g'].attrs['a'] == 7
print('ok')";
    for (name, text) in [("w.py", write), ("r.py", read)] {
        fs::write(cached.world.0.join(name), text).expect("a file");
    }
    cached.sh(&format!("{python} ../w.py"));
    assert_eq!(cached.sh(&format!("{python} ../r.py")).trim(), "ok");
    cached.stop();
    assert_eq!(cached.sh(&format!("{python} ../r.py")).trim(), "ok");
    assert!(Path::new(&cached.under).join("t.h5").exists());
}
