//! Checkpoints and restarts that the user ends, or that the disk is too small for: nothing is left
//! running, and the image is as it was.
use kedge_left_out::left_out;
use kedge_tests::gpu_steps::{GpuSteps, STEPS};
use kedge_tests::job::{User, family, send};
use kedge_tests::random;
use kedge_tests::world::{is_root, wait_for};
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

const INTERRUPTED: Option<i32> = Some(2);

/// The signal that ended it, as itself or as `timeout`, which runs it, may tell it.
fn signal(mut child: Child) -> Option<i32> {
    let status = child.wait().expect("ended");
    status.signal().or(status.code().map(|code| code - 128))
}

/// A job's image, after a few steps, and its nonce. The job has ended.
fn saved(place: &GpuSteps) -> (PathBuf, String) {
    let mut job = place.start(&[]);
    job.read_to(10);
    let image = place.checkpoint(&[]);
    job.kill();
    (image, job.nonce.clone())
}

/// The `kedge` below what the tests run it by.
fn interrupt(child: &Child) {
    let kedge = || family(child.id()).into_iter().find(|pid| name(*pid) == "kedge");
    let mut found = None;
    wait_for("kedge does not start", || {
        found = kedge();
        found.is_some()
    });
    send("INT", &found.into_iter().collect::<Vec<_>>());
}

fn name(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}

/// Ctrl-C while a new proxy says nothing, which would last for an hour; and then at random moments.
#[test]
fn a_restart_that_is_interrupted_leaves_nothing_behind() {
    for (name, user) in [("giveup", User::Same), ("giveupu", User::Nobody)] {
        let Some(place) = GpuSteps::new(name, user) else { continue };
        let (image, nonce) = saved(&place);
        let (proxy, kept) = (place.world.0.join("bin/kedge-proxy"), place.world.0.join("kept"));
        fs::rename(&proxy, &kept).expect("renamed");
        fs::write(&proxy, "#!/bin/sh\nexec sleep 1000\n").expect("written");
        fs::set_permissions(&proxy, fs::Permissions::from_mode(0o755)).expect("mine");
        let restart = place.to_restart(&image, &[]).spawn().expect("kedge");
        let waits = || family(restart.id()).into_iter().any(|pid| self::name(pid) == "sleep");
        wait_for("no proxy is started", waits);
        interrupt(&restart);
        assert_eq!(signal(restart), INTERRUPTED);
        place.nothing_runs();
        fs::rename(&kept, &proxy).expect("renamed");
        for _ in 0..4 {
            let restart = place.to_restart(&image, &[]).spawn().expect("kedge");
            thread::sleep(Duration::from_millis(u64::from(random::number(120))));
            interrupt(&restart);
            assert_eq!(signal(restart), INTERRUPTED);
            place.nothing_runs();
        }
        place.is_good(&image);
        place.goes_on(&image, &nonce);
    }
}

/// Who asked for a checkpoint no longer waits for it; it becomes durable, and the job goes on.
#[test]
fn a_checkpoint_is_taken_although_nobody_waits_for_it_any_more() {
    let place = GpuSteps::mine("giveckpt");
    let mut job = place.start(&[]);
    job.read_to(5);
    let proxies = job.proxies();
    // It does not come to rest meanwhile.
    send("STOP", &proxies);
    let asked = place.kedge(&["checkpoint", "j"]).spawn().expect("kedge");
    let images = place.world.home().join("kedge/images");
    wait_for("nothing begins", || fs::read_dir(&images).is_ok_and(|all| all.count() > 0));
    interrupt(&asked);
    assert_eq!(signal(asked), INTERRUPTED);
    send("CONT", &proxies);
    let image = images.join("j-0001");
    wait_for("it does not become durable", || image.join("manifest.json").exists());
    place.is_good(&image);
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    place.nothing_runs();
}

/// Runs `kedge restart` where the folder of running jobs is a disk with room for `pages` only.
fn restart_on_a_full_disk(place: &GpuSteps, image: &Path, pages: u32) -> Output {
    let kedge = place.to_restart(image, &[]);
    let script = format!(
        "mount -t tmpfs -o size=64k,mode=700 none $D || exit 77
         dd if=/dev/zero of=$D/fill bs=4k 2>/dev/null; truncate -s $((65536 - {pages} * 4096)) $D/fill
         exec \"$@\""
    );
    let disk = place.world.0.join("disk");
    fs::create_dir_all(&disk).expect("a folder");
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", &script, "sh"]).arg(kedge.get_program()).args(kedge.get_args());
    command.envs(kedge.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command
        .env("D", &disk)
        .env("XDG_RUNTIME_DIR", &disk)
        .env("XDG_STATE_HOME", &disk)
        .current_dir(place.world.home());
    command.output().expect("unshare")
}

#[test]
fn a_restart_on_a_full_disk_is_refused_by_name_or_goes_on() {
    let place = GpuSteps::mine("fullrst");
    if !is_root() {
        return left_out("a full disk", "only root can mount a small one");
    }
    let mut job = place.start(&[]);
    job.read_to(STEPS - 20);
    let (image, nonce) = (place.checkpoint(&[]), job.nonce.clone());
    job.kill();
    let (mut refused, mut went) = (0, 0);
    for pages in [0, 1, 2, 4, 12] {
        let output = restart_on_a_full_disk(&place, &image, pages);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        match output.status.code() {
            Some(7) => {
                went += 1;
                assert!(printed.ends_with(&format!("{nonce} well\n")), "{pages}: {printed}");
            }
            Some(125) => {
                refused += 1;
                assert!(said.contains("No space left") && said.lines().count() == 1, "{said}");
                assert_eq!(printed, "", "{pages}: it has begun all the same");
            }
            Some(77) => return left_out("a full disk", "no small one can be mounted"),
            other => panic!("{pages} pages: {other:?}: {said}{printed}"),
        }
        place.nothing_runs();
        place.is_good(&image);
    }
    assert!(refused > 0 && went > 0, "refused {refused}, went on {went}");
}

/// On a terminal, where nothing but its closing line is left when the program goes on.
#[test]
fn a_restart_tells_a_terminal_what_it_is_about() {
    let place = GpuSteps::mine("giveterm");
    let (image, nonce) = saved(&place);
    let kedge = place.to_restart(&image, &[]);
    let words = [kedge.get_program()].into_iter().chain(kedge.get_args());
    let words: Vec<String> =
        words.map(|word| format!("'{}'", word.to_string_lossy().replace('\'', "'\\''"))).collect();
    let mut terminal = Command::new("script");
    terminal.args(["--quiet", "--return", "--command", &words.join(" "), "/dev/null"]);
    terminal.envs(kedge.get_envs().filter_map(|(name, value)| Some((name, value?))));
    terminal.current_dir(place.world.home()).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut terminal = terminal.spawn().expect("script, from bsdutils");
    let mut said = String::new();
    let output = terminal.stdout.take().expect("a pipe");
    output.take(1 << 20).read_to_string(&mut said).expect("text");
    assert_eq!(terminal.wait().expect("ended").code(), Some(7), "{said}");
    let (before, after) = said.split_once(&nonce).expect("steps");
    let (under_way, closing) = before.rsplit_once("\r\x1b[K").expect("taken back");
    assert!(under_way.contains("restarting j from j-0001: "), "{before:?}");
    assert!(closing.contains("j-0001  ") && closing.contains(", restarted in "), "{before:?}");
    assert_eq!(closing.lines().count(), 1, "{before:?}");
    assert!(!after.contains('\x1b'), "{after:?}");
}
