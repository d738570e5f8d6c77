//! Jobs with devices come back elsewhere than where they were saved: their files, kedge and the
//! image in other folders, by another user, where others have their process ids.
use kedge_left_out::left_out;
use kedge_tests::copy_program;
use kedge_tests::gpu_steps::{BETWEEN, GpuSteps, STEPS};
use kedge_tests::job::{Job, User, build, send};
use kedge_tests::world::{failure, is_root};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A job of a program in `folder`, where it works, saved and killed: its image and its nonce.
fn saved_in(place: &GpuSteps, folder: &Path) -> (PathBuf, String) {
    let program = folder.join("gpu_steps");
    copy_program(&place.program, &program);
    let (program, steps) = (program.display().to_string(), STEPS.to_string());
    let run = ["run", "--gpu", "soft", "--job", "j", "--", &program, &steps, BETWEEN];
    let mut command = place.kedge(&run);
    command.current_dir(folder);
    saved(place, Job::start_recovering(command))
}

fn saved(place: &GpuSteps, mut job: Job) -> (PathBuf, String) {
    job.read_to(10);
    let image = place.checkpoint(&[]);
    job.kill();
    place.nothing_runs();
    (image, job.nonce.clone())
}

/// Reads a restarted job to its end.
fn ends_well(place: &GpuSteps, mut job: Job) {
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7), "{}", place.log());
    place.nothing_runs();
}

/// A folder that every user may look into.
fn folder(place: &GpuSteps, name: &str) -> PathBuf {
    let folder = place.world.0.join(name);
    fs::create_dir_all(&folder).expect("a folder");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).expect("mine");
    folder
}

fn mapped(old: &Path, new: &Path) -> String {
    format!("{}={}", old.display(), new.display())
}

#[test]
fn a_job_comes_back_where_its_folders_have_other_names() {
    for (name, user) in [("else", User::Same), ("elseu", User::Nobody)] {
        let Some(place) = GpuSteps::new(name, user) else { continue };
        let old = folder(&place, "work");
        let (image, nonce) = saved_in(&place, &old);
        let (new, images) = (place.world.0.join("new/work"), place.world.home().join("moved"));
        folder(&place, "new");
        fs::rename(&old, &new).expect("renamed");
        fs::rename(image.parent().expect("a folder"), &images).expect("renamed");
        let image = images.join(image.file_name().expect("a name"));
        // Without a word about it, what is missing is named, and how to tell.
        let said = failure(&place.to_restart(&image, &[]).output().expect("kedge"));
        assert!(said.contains("work") && said.contains("--path-map"), "{said}");
        place.nothing_runs();
        let map = mapped(&old, &new);
        let mut job =
            Job::spawn_recovering(place.to_restart(&image, &["--path-map", &map]), &nonce);
        job.read_to(20);
        let program = place.clients(&job)[0];
        let link = |what: &str| fs::read_link(format!("/proc/{program}/{what}")).expect("a link");
        assert_eq!((link("cwd"), link("exe")), (new.clone(), new.join("gpu_steps")));
        // What is saved there names the new places: no map is needed any more.
        let again = place.checkpoint(&[]);
        assert_eq!(again.parent(), Some(&*images), "its images stay together");
        job.kill();
        place.nothing_runs();
        ends_well(&place, Job::spawn_recovering(place.to_restart(&again, &[]), &nonce));
    }
}

/// As after an update that puts each version in a folder of its own, or on a machine where kedge is
/// elsewhere.
#[test]
fn a_job_comes_back_by_a_kedge_in_another_folder() {
    let place = GpuSteps::mine("elsebin");
    let (image, nonce) = saved(&place, place.start(&[]));
    let (old, new) = (place.world.0.join("bin"), place.world.0.join("other"));
    fs::rename(&old, &new).expect("renamed");
    let kedge = place.to_restart(&image, &["--path-map", &mapped(&old, &new)]);
    let mut command = Command::new(kedge.get_program());
    let elsewhere = |word: &std::ffi::OsStr| match word == old.join("kedge") {
        true => new.join("kedge").into_os_string(),
        false => word.to_owned(),
    };
    command.args(kedge.get_args().map(elsewhere));
    command.envs(kedge.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.current_dir(place.world.home()).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut job = Job::spawn_recovering(command, &nonce);
    job.read_to(STEPS);
    assert_eq!(job.end().code(), Some(7));
}

/// A copy of the image that the user of `place` has.
fn given(image: &Path, place: &GpuSteps) -> PathBuf {
    let copy = place.world.home().join("given");
    let owner = fs::metadata(place.world.home()).expect("a folder");
    let copied = Command::new("cp").arg("-r").arg(image).arg(&copy).status();
    assert!(copied.is_ok_and(|status| status.success()), "cp");
    let ids = format!("{}:{}", owner.uid(), owner.gid());
    let given = Command::new("chown").arg("-R").arg(ids).arg(&copy).status();
    assert!(given.is_ok_and(|status| status.success()), "chown");
    copy
}

/// Somebody who has ids, so that nobody else can.
struct Taker(Child);

impl Taker {
    fn of(place: &GpuSteps, pids: &[u32]) -> Taker {
        let mut command = Command::new(build(&place.world, "taken", &[]));
        command.args(pids.iter().map(u32::to_string));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut taker = command.spawn().expect("the program");
        let mut line = String::new();
        let said = taker.stdout.take().expect("a pipe");
        BufReader::new(said).read_line(&mut line).expect("text");
        assert_eq!(line, "taken\n");
        Taker(taker)
    }
}

impl Drop for Taker {
    fn drop(&mut self) {
        send("KILL", &[self.0.id()]);
        let _ = self.0.wait();
    }
}

/// A process's id in the innermost of its namespaces.
fn own_id(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    ids.split_whitespace().last()?.parse().ok()
}

#[test]
fn a_job_comes_back_where_others_have_its_ids() {
    if !is_root() {
        return left_out("ids that others have", "only root can choose ids");
    }
    for (name, user) in [("elseids", User::Same), ("elseidsu", User::Nobody)] {
        let Some(place) = GpuSteps::new(name, user) else { continue };
        let mut job = place.start(&[]);
        job.read_to(10);
        let image = place.checkpoint(&[]);
        let (clients, all) = (place.clients(&job), place.running());
        job.kill();
        place.nothing_runs();
        let _taker = Taker::of(&place, &all);
        assert!(all.iter().all(|pid| Path::new(&format!("/proc/{pid}")).exists()));
        let mut restarted = Job::spawn_recovering(place.to_restart(&image, &[]), &job.nonce);
        restarted.read_to(20);
        let ids: Vec<_> = place.clients(&restarted).into_iter().filter_map(own_id).collect();
        assert_eq!(ids, clients, "it knows itself by its old id");
        restarted.read_to(STEPS);
        assert_eq!(restarted.end().code(), Some(7), "{}", place.log());
    }
}

#[test]
fn root_brings_the_job_of_an_ordinary_user_back_as_that_user() {
    let Some(theirs) = GpuSteps::new("elseuser", User::Nobody) else { return };
    let (image, nonce) = saved(&theirs, theirs.start(&[]));
    let own = GpuSteps::mine("elseroot");
    let image = given(&image, &own);
    let mut job = Job::spawn_recovering(own.to_restart(&image, &[]), &nonce);
    job.read_to(20);
    let program = theirs.clients(&job);
    let owner = fs::metadata(format!("/proc/{}", program[0])).expect("it runs").uid();
    assert_eq!(owner, 65534, "it is that user's as before");
    // As any other job of root's.
    let again = own.checkpoint(&[]);
    job.kill();
    own.nothing_runs();
    ends_well(&own, Job::spawn_recovering(own.to_restart(&again, &[]), &nonce));
}

/// Its processes are the user's own, and see themselves as root, as they did.
#[test]
fn an_ordinary_user_brings_a_job_of_root_back_as_its_own() {
    let Some(own) = GpuSteps::new("elsetheirs", User::Nobody) else { return };
    let roots = GpuSteps::mine("elseroots");
    // Not below root's own folder, which that user may not enter.
    let work = folder(&roots, "work");
    let (image, nonce) = saved_in(&roots, &work);
    let image = given(&image, &own);
    let mut job = Job::spawn_recovering(own.to_restart(&image, &[]), &nonce);
    job.read_to(20);
    let program = format!("/proc/{}", roots.running_as("gpu_steps")[0]);
    assert_eq!(fs::metadata(&program).expect("it runs").uid(), 65534);
    let map = fs::read_to_string(format!("{program}/uid_map")).expect("it runs");
    assert_eq!(map.split_whitespace().collect::<Vec<_>>(), ["0", "65534", "1"]);
    let again = own.checkpoint(&[]);
    job.kill();
    own.nothing_runs();
    ends_well(&own, Job::spawn_recovering(own.to_restart(&again, &[]), &nonce));
}
