//! A program that takes steps on a device, in a place of its own, as a job that may go back to an
//! image: for the tests of lost proxies.

use crate::job::{Job, User, family, name, send};
use crate::place::Place;
use crate::{copy_program, host};
use std::collections::BTreeSet;
use std::fs;
use std::ops::Deref;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Of the program that the tests run.
pub const STEPS: u64 = 600;
pub const BETWEEN: &str = "10";

/// A place, and the program that its jobs run.
#[derive(Debug)]
pub struct GpuSteps {
    pub place: Place,
    pub program: PathBuf,
    /// Steps that its jobs make: [`STEPS`], unless a test wants fewer.
    pub steps: u64,
}

impl Deref for GpuSteps {
    type Target = Place;

    fn deref(&self) -> &Place {
        &self.place
    }
}

impl GpuSteps {
    pub fn new(name: &str, user: User) -> Option<GpuSteps> {
        GpuSteps::of("gpu_steps", name, user)
    }

    /// With another program of `tests/hosts` that prints as gpu_steps does.
    pub fn of(program: &str, name: &str, user: User) -> Option<GpuSteps> {
        let place = Place::new(name, user)?;
        let world = &place.world;
        world.parts();
        let built = host(&format!("{program}.cu"), program, &[]);
        let program = world.0.join("bin").join(program);
        copy_program(&built, &program);
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("mine");
        Some(GpuSteps { place, program, steps: STEPS })
    }

    pub fn mine(name: &str) -> GpuSteps {
        GpuSteps::new(name, User::Same).expect("the test's own user")
    }

    pub fn start(&self, options: &[&str]) -> Job {
        Job::start_recovering(self.to_run(options))
    }

    /// What runs the program as the job `j` on a software device.
    pub fn to_run(&self, options: &[&str]) -> Command {
        let program = self.program.display().to_string();
        let steps = self.steps.to_string();
        // A process may have one slab of its own, one of another that has ended, and memory by
        // descriptor.
        let run = [&["run", "--gpu", "soft", "--soft-memory", "128M", "--job", "j"], options];
        self.kedge(&[&run.concat()[..], &["--", &program, &steps, BETWEEN]].concat())
    }

    /// What restarts an image.
    pub fn to_restart(&self, image: &Path, options: &[&str]) -> Command {
        let image = image.display().to_string();
        self.kedge(&[&["restart", &image], options].concat())
    }

    /// Restarts the image and reads it to its end.
    pub fn goes_on(&self, image: &Path, nonce: &str) {
        let mut job = Job::spawn_recovering(self.to_restart(image, &[]), nonce);
        job.read_to(self.steps);
        assert_eq!(job.end().code(), Some(7), "{}", self.log());
    }

    /// Kills a job and brings it back, for each of `rounds`, from the image of the round before:
    /// made after so many steps, and killed after so many more. Then it is read to the last of
    /// `steps`.
    pub fn comes_back_each_time(
        &self,
        mut job: Job,
        rounds: impl IntoIterator<Item = [u64; 2]>,
        options: &[&str],
        steps: u64,
    ) {
        let nonce = job.nonce.clone();
        for (round, [until, more]) in rounds.into_iter().enumerate() {
            job.read_to(job.step + until);
            let before = job.step;
            let image = self.checkpoint(&[]);
            job.read_to(job.step + more);
            job.kill();
            let printed = job.step;
            self.is_good(&image);
            job = Job::spawn_recovering(self.to_restart(&image, options), &nonce);
            job.read_to(1);
            assert!((before + 1..=printed + 1).contains(&job.step), "round {round}: {}", job.step);
        }
        job.read_to(steps);
        assert_eq!(job.end().code(), Some(7), "{}", self.log());
        self.nothing_runs();
    }

    /// Reads a job to its end; then nothing runs, and its newest image is good.
    pub fn ends_well(&self, mut job: Job) {
        job.read_to(self.steps);
        let nonce = job.nonce.clone();
        assert_eq!(job.end().code(), Some(7), "{}", self.log());
        self.nothing_runs();
        let images = self.images();
        self.is_good(&images);
        self.goes_on(&images, &nonce);
    }

    /// The program's processes of `job`.
    pub fn clients(&self, job: &Job) -> Vec<u32> {
        let program = self.program.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        family(job.supervisor()).into_iter().filter(|pid| name(*pid) == program).collect()
    }

    /// All proxies, but those that are `spare`, and their clients die at once. The proxies are the
    /// first, for one whose client has ended ends by itself.
    pub fn kill_proxies_and_clients(&self, job: &Job, spare: &BTreeSet<u32>) {
        let proxies = self.proxies().into_iter().filter(|pid| !spare.contains(pid));
        send("KILL", &proxies.chain(self.clients(job)).collect::<Vec<_>>());
    }

    /// After `kill` the job goes back, and on for a while. It has taken steps by then that its
    /// image has not: else nothing would show that it has gone back.
    pub fn goes_back(&self, job: &mut Job, kill: impl FnOnce(&mut Job)) {
        job.catch_up();
        job.read_to(job.step + 2);
        self.goes_back_from_here(job, kill);
    }

    /// As [`GpuSteps::goes_back`], without a look at where the job is: `kill` comes at a time of
    /// its own.
    pub fn goes_back_from_here(&self, job: &mut Job, kill: impl FnOnce(&mut Job)) {
        let times = job.back.len() + 1;
        kill(job);
        while job.back.len() < times {
            job.read_to(job.step + 1);
            assert!(job.step < self.steps - 50, "it does not go back; {}", self.log());
        }
        job.read_to(job.step + 3);
    }
}
