//! Machine code that a program keeps on disk runs in its next process, and `kedge kernel-cache`.
use kedge_tests::world::{World, has_fields};
use kedge_tests::{host, root};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A program that keeps a cubin, and its files.
struct Keeper {
    world: World,
    program: PathBuf,
}

impl Keeper {
    fn new(name: &str) -> Keeper {
        let lib = root().join(".tools/cu13/lib").display().to_string();
        let rpath = ["-Xlinker", "-rpath", "-Xlinker", &lib];
        let library = format!("-L{lib}");
        let flags = [&["-std=c++17", "-lnvrtc", &library][..], &rpath].concat();
        Keeper { world: World::new(name), program: host("keeps_cubin.cu", "keeps_cubin", &flags) }
    }

    /// Runs the program; `what` is make or load.
    fn run(&self, what: &str) -> Output {
        let (program, cubin) = (self.program.display().to_string(), self.cubin());
        let words = ["run", "--gpu", "soft", "--job", "keeps", "--", &program, what];
        let mut command = self.world.kedge(&[&words[..], &[&cubin.display().to_string()]].concat());
        command.env("TRITON_CACHE_DIR", self.beside()).output().expect("kedge")
    }

    fn runs(&self, what: &str) {
        let output = self.run(what);
        assert!(output.status.success(), "{what}: {output:?}; {}", self.log());
        assert!(String::from_utf8_lossy(&output.stdout).ends_with("ok a cubin\n"), "{output:?}");
    }

    /// The cubin is refused; what the program was told.
    fn refused(&self) -> String {
        let output = self.run("load");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        assert!(said.starts_with("refused 209: "), "{said}");
        said
    }

    fn cubin(&self) -> PathBuf {
        self.world.0.join("kept.cubin")
    }

    /// Where Triton would keep its compilations.
    fn beside(&self) -> PathBuf {
        self.world.0.join("triton")
    }

    fn log(&self) -> String {
        self.world.text(&["logs", "keeps"])
    }

    fn folder(&self) -> PathBuf {
        self.world.caches().join("kedge/kernels")
    }

    fn entries(&self) -> Vec<PathBuf> {
        let files = fs::read_dir(self.folder()).expect("the cache").flatten();
        let mut paths: Vec<_> = files.map(|file| file.path()).collect();
        paths.retain(|path| path.file_name().is_some_and(|name| name != "lock"));
        paths
    }

    fn listing(&self) -> Value {
        let text = self.world.text(&["kernel-cache", "ls", "--json"]);
        serde_json::from_str(&text).expect("JSON")
    }
}

#[test]
fn a_cubin_on_disk_runs_in_the_next_process() {
    let keeper = Keeper::new("kcnext");
    keeper.runs("make");
    keeper.runs("load");
    for path in keeper.entries() {
        assert_eq!(fs::metadata(&path).expect("a file").mode() & 0o777, 0o600);
    }
    let listing = keeper.listing();
    assert_eq!(listing["path"], keeper.folder().display().to_string());
    let entries = listing["entries"].as_array().expect("a list");
    assert!(!entries.is_empty());
    has_fields(entries, &["cubin", "kernels", "bytes", "used"]);
    for entry in entries {
        assert_eq!(entry["kernels"], serde_json::json!(["triple"]));
    }
    assert!(keeper.world.text(&["kernel-cache", "ls"]).contains("triple"));
}

#[test]
fn a_cubin_from_before_is_refused_with_what_to_do() {
    let keeper = Keeper::new("kcbefore");
    keeper.runs("make");
    let cleared = keeper.world.text(&["kernel-cache", "clear", "--json"]);
    let cleared: Value = serde_json::from_str(&cleared).expect("JSON");
    assert!(cleared["entries"].as_u64().expect("a number") > 0, "{cleared}");
    assert_eq!(keeper.listing()["entries"], serde_json::json!([]));
    assert!(keeper.world.text(&["kernel-cache", "ls"]).contains("is empty"));
    let said = keeper.refused();
    for text in [said, keeper.log()] {
        assert!(text.contains("kedge kernel-cache ls") && text.contains("compile it"), "{text}");
    }
}

#[test]
fn a_cubin_beside_its_ptx_runs_and_is_known_from_then_on() {
    let keeper = Keeper::new("kcbeside");
    keeper.runs("make");
    // Behind a header of 88 bytes.
    let ptx = fs::read(&keeper.entries()[0]).expect("an entry").split_off(88);
    keeper.world.text(&["kernel-cache", "clear"]);
    keeper.refused();
    let folder = keeper.beside().join("HASH");
    fs::create_dir_all(&folder).expect("a folder");
    fs::copy(keeper.cubin(), folder.join("triple.cubin")).expect("copied");
    fs::write(folder.join("triple.ptx"), ptx).expect("written");
    keeper.runs("load");
    fs::remove_dir_all(&folder).expect("removed");
    keeper.runs("load");
}

#[test]
fn what_is_damaged_in_the_cache_harms_nobody() {
    let keeper = Keeper::new("kcdamage");
    keeper.runs("make");
    for path in keeper.entries() {
        let mut bytes = fs::read(&path).expect("an entry");
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&path, bytes).expect("written");
    }
    keeper.refused();
    keeper.runs("make");
    keeper.runs("load");
}

#[test]
fn a_cache_that_others_can_enter_is_done_without() {
    let keeper = Keeper::new("kcopen");
    fs::create_dir_all(keeper.folder()).expect("a folder");
    fs::set_permissions(keeper.folder(), fs::Permissions::from_mode(0o777)).expect("mine");
    keeper.runs("make");
    assert!(keeper.entries().is_empty(), "{:?}", keeper.entries());
    let log = keeper.log();
    assert_eq!(log.matches("kernel cache: ").count(), 1, "{log}");
    assert!(log.contains("XDG_CACHE_HOME"), "{log}");
    let output = keeper.world.output(&["kernel-cache", "ls"]);
    assert_eq!(output.status.code(), Some(125), "{output:?}");
}

/// Runs one of CUDA's compilers.
fn tool(name: &str, folder: &Path, words: &[&str]) {
    let path = root().join(".tools/cu13/bin").join(name);
    let output = Command::new(&path).args(words).current_dir(folder).output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(output.status.success(), "{name} {words:?}: {output:?}");
}

/// Of two texts before and after an edit each cubin gets what it was linked of, although their
/// functions have the same names, and although both files have an inline and a static function.
#[test]
fn a_linked_cubin_runs_the_very_texts_that_it_was_linked_of() {
    let world = World::new("kclinked");
    let shared = |plus: u32, own: u32| {
        format!(
            "inline __device__ __noinline__ int shared(int x) {{ return x + {plus}; }}\n\
             static __device__ __noinline__ int own(int x) {{ return x * {own}; }}\n"
        )
    };
    let foo = "__device__ int bar(int);\n\
               extern \"C\" __global__ void foo(int *x) { *x = bar(10) + shared(0) + own(1); }";
    let bar = |by: u32| {
        format!("__device__ int bar(int x) {{ return x * {by} + 1000 * own(1) + shared(0); }}")
    };
    let texts = [
        ("foo", shared(100, 2) + foo),
        ("twice", shared(100, 3) + &bar(2)),
        ("thrice", shared(100, 3) + &bar(3)),
        ("other", shared(200, 3) + &bar(4)),
        ("unknown", shared(100, 3) + &bar(5)),
    ];
    let path = |name: &str, kind: &str| world.0.join(format!("{name}.{kind}"));
    let mut words = Vec::new();
    for (name, text) in &texts {
        compile(&world.0, name, text, &[]);
        if *name != "unknown" {
            words.extend([path(name, "ptx"), path(name, "o")]);
        }
    }
    words.push("--".into());
    let links = [
        ("a", ["foo.o", "twice.o"]),
        ("b", ["foo.o", "thrice.o"]),
        ("c", ["foo.o", "other.o"]),
        ("d", ["other.o", "foo.o"]),
        ("e", ["foo.o", "unknown.o"]),
    ];
    for (name, [first, second]) in links {
        tool("nvlink", &world.0, &["-arch=sm_90", first, second, "-o", &format!("{name}.cubin")]);
        words.push(path(name, "cubin"));
    }
    let (said, log) = offer(&world, &words);
    let left: Vec<&str> = said.lines().filter_map(|line| line.split(' ').next()).collect();
    let sum = |by: u32, plus: u32| (10 * by + 3000 + plus + plus + 2).to_string();
    let want = [sum(2, 100), sum(3, 100), sum(4, 100), sum(4, 200), "refused".to_owned()];
    assert_eq!(left, want, "{said}; {log}");
    assert!(said.ends_with("refused 209\n"), "{said}");
    assert!(log.contains("its function _Z3bari was not compiled here"), "{log}");
}

/// Compiles a source to `NAME.ptx` and `NAME.o`, which can be linked.
fn compile(folder: &Path, name: &str, text: &str, options: &[&str]) {
    let (source, ptx, object) = (format!("{name}.cu"), format!("{name}.ptx"), format!("{name}.o"));
    fs::write(folder.join(&source), text).expect("written");
    tool("nvcc", folder, &["-arch=compute_90", "-rdc=true", "-ptx", &source, "-o", &ptx]);
    tool("ptxas", folder, &[&["-arch=sm_90", "-c", &ptx, "-o", &object], options].concat());
}

/// Runs `offers_cubins`: what it printed, and the log.
fn offer(world: &World, words: &[PathBuf]) -> (String, String) {
    let program = host("offers_cubins.cu", "offers_cubins", &["-std=c++17"]);
    let words = [&[program], words].concat();
    let words: Vec<String> = words.iter().map(|word| word.display().to_string()).collect();
    let run = ["run", "--gpu", "soft", "--job", "offers", "--"];
    let words: Vec<&str> = run.into_iter().chain(words.iter().map(String::as_str)).collect();
    let output = world.kedge(&words).output().expect("kedge");
    let log = world.text(&["logs", "offers"]);
    assert!(output.status.success(), "{output:?}; {log}");
    (String::from_utf8_lossy(&output.stdout).into_owned(), log)
}

/// As a linker's `-maxrregcount`, with which Numba's `max_registers` is passed on.
#[test]
fn a_cubin_s_bound_on_registers_is_told_of_its_ptx() {
    let world = World::new("kcregisters");
    let text = "extern \"C\" __global__ void foo(int *x) {
        int held[40];
        #pragma unroll
        for (int i = 0; i < 40; i++) held[i] = ((volatile int *)x)[0] + i;
        __syncthreads();
        int sum = 0;
        #pragma unroll
        for (int i = 0; i < 40; i++) sum += held[i] * held[39 - i];
        x[0] = sum;
    }";
    compile(&world.0, "free", text, &[]);
    compile(&world.0, "bound", text, &["-maxrregcount=24"]);
    for name in ["free", "bound"] {
        let (object, linked) = (format!("{name}.o"), format!("{name}.cubin"));
        tool("nvlink", &world.0, &["-arch=sm_90", &object, "-o", &linked]);
    }
    let words = ["free.ptx", "free.o", "bound.ptx", "bound.o", "--", "free.cubin", "bound.cubin"];
    let words = words.map(|word| if word == "--" { word.into() } else { world.0.join(word) });
    let (said, log) = offer(&world, &words);
    let registers: Vec<u32> = said
        .lines()
        .map(|line| line.split(' ').nth(1).and_then(|word| word.parse().ok()).expect("a number"))
        .collect();
    let [free, bound] = registers[..] else { panic!("{said}; {log}") };
    assert!(free > 24 && bound <= 24, "{said}; {log}");
}
