//! Which of a job's images brings it back, and what it is given for that.

use crate::base::signals;
use crate::base::told::tell;
use crate::checkpoint::recovery::end_sessions_of;
use crate::devices::gpu::{self, GpuRestart, Restart};
use crate::devices::proxies::{Launch, Proxies};
use crate::job::images::Images;
use crate::job::jobs::{JobDir, JobName, StandIn};
use crate::job::joint::Joint;
use crate::job::parts::Parts;
use crate::job::policy::{Policy, former_folder};
use crate::job::rank::RankRestart;
use crate::job::shown::Shown;
use crate::job::spec::RunError;
use crate::restart::gate::Gate;
use crate::restart::init::Checkpointing;
use crate::restart::join::Join;
use crate::restart::plugins::RestartPlugins;
use crate::restart::spec::RestartSpec;
use crate::services::keeper::Held;
use crate::services::warden;
use crate::services::warm::{Kind, Own, Sources};
use kedge_control::joblog::JobLog;
use kedge_control::{error, info, warn};
use kedge_image::{Devices, ImageError, Manifest};
use kedge_process::plugins::{PathMap, Rendezvous};
use kedge_process::{Arrivals, EngineError, RestartOptions, Restarted};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

/// Which job is restarted where.
pub(crate) struct Place<'a> {
    pub(crate) name: &'a JobName,
    pub(crate) joint: Option<&'a Joint>,
    pub(crate) dir: &'a JobDir,
    /// What keeps proxies ready for it.
    pub(crate) warm: Option<&'a Own>,
    /// Where it waits before it runs, if it does.
    pub(crate) gate: Option<Arc<Gate>>,
    /// When that began.
    pub(crate) begin: Instant,
}

/// A job that has come back.
pub(crate) struct CameBack<'a> {
    pub(crate) restarted: Restarted,
    pub(crate) manifest: &'a Manifest,
    /// What its devices have come back from, where that is held in memory.
    pub(crate) held: Option<Held>,
    /// What stands in the place of the folder that the job had.
    pub(crate) stand_in: Option<StandIn>,
}

/// Restarts the newest image that is whole; a damaged one is passed over, which the log tells.
pub(crate) fn first_that_works<'a>(
    spec: &RestartSpec,
    place: &Place<'_>,
    images: &'a [(PathBuf, Manifest)],
    log: &Arc<JobLog>,
) -> Result<CameBack<'a>, RunError> {
    let Place { name, joint, dir, warm, begin, .. } = *place;
    let mut rest = images.iter().peekable();
    let mut held = spec.held();
    let mut again = None;
    loop {
        let Some((folder, manifest)) = again.take().or_else(|| rest.next()) else {
            return Err(ImageError::NoImage { path: spec.path.clone() }.into());
        };
        let held = held.take().filter(|held| held.image == *folder);
        let proxies = Proxies::default();
        let devices = spec.devices(manifest);
        let launch = devices.as_ref().map(|devices| launch(devices, dir, warm, log)).transpose()?;
        dir.link_commands()?;
        let former = former_folder(manifest)?;
        let stand_in = former.as_ref().map(|former| dir.stand_in_for(former, devices.is_some()));
        if let Some(None) = stand_in {
            warn!(
                log,
                "the folder that the job had is another job's by now, or another user's: its programs cannot ask for checkpoints, and processes that it starts get no devices"
            );
        }
        let gpu = launch.map(|launch| {
            let warm = launch.warm(clients(manifest));
            // Nobody can ask for warm ones in the init: the job has namespaces of its own.
            let (launch, proxies, socket) = (launch.cold(), proxies.clone(), dir.socket());
            let (files, folder) = (manifest.files.clone(), folder.clone());
            GpuRestart::new(Restart { launch, proxies, socket, files, folder }, held, warm)
        });
        let plugins = plugins(spec, place, (folder, manifest), gpu)?;
        let home = former.unwrap_or_else(|| dir.path().to_owned());
        let checkpointer = Checkpointing {
            spec,
            name,
            joint,
            dir,
            home,
            manifest,
            devices,
            proxies,
            plugins: &plugins,
        };
        let paths = PathMap::new(spec.paths.iter().cloned());
        let others = plugins.join.clone().map(|join| join as Arc<dyn Rendezvous>);
        let arrivals = plugins.gate.clone().filter(|_| spec.standby);
        let usual = RestartOptions::new(folder.clone());
        let give_up = || signals::sent_to_end().is_some() || warden::has_stopped_it();
        let policy = spec.policy.or(Policy::of_image(manifest));
        let ranks = joint.and_then(|joint| joint.ranks);
        // It was withheld, and meant for a step in which the job is no longer.
        let withheld = ranks.is_some() || policy.withholds_term();
        let forgets = policy.on_term.filter(|_| withheld).map(|_| libc::SIGTERM);
        let options = RestartOptions {
            paths,
            plugins: plugins.all(),
            lazy: spec.lazy,
            inherits: plugins.numbers(),
            give_up,
            tell,
            others,
            arrivals: arrivals.map(|gate| gate as Arc<dyn Arrivals>),
            forgets,
            ..usual
        };
        let restarted = kedge_process::restart(&options, |job| checkpointer.serve(job));
        if restarted.is_err() {
            plugins.shown.iter().for_each(|shown| shown.take_back());
            end_sessions_of(dir.path(), log);
        }
        let held = plugins.gpu.as_ref().and_then(|gpu| gpu.held());
        match restarted {
            Ok(restarted) => {
                plugins.gate.iter().for_each(|gate| gate.passed());
                let (ms, image) = (begin.elapsed().as_secs_f64() * 1e3, &restarted.image);
                info!(log, "restarted from {} within {ms:.0} ms", image.display());
                plugins.shown.iter().for_each(|shown| shown.restarted(name, image));
                if let Err(error) = Images::of(dir).add(image) {
                    warn!(log, "{error}");
                }
                restarted.notes.iter().for_each(|note| warn!(log, "{note}"));
                let stand_in = stand_in.flatten();
                return Ok(CameBack { restarted, manifest, held, stand_in });
            }
            // Another part may have been told first, which is this one's error then.
            Err(error) if matches!(error, EngineError::GivenUp) || give_up() => {
                let by = if warden::has_stopped_it() { "the part's warden" } else { "a signal" };
                warn!(log, "the restart was ended by {by}: nothing is left of it");
                return Err(EngineError::GivenUp.into());
            }
            Err(error) if held.is_some() => {
                let image = folder.display();
                warn!(log, "{image} does not come back from memory ({error}): now from its files");
                again = images.iter().find(|(path, _)| path == folder);
            }
            Err(error) => {
                error!(log, "{} cannot be restarted: {error}", folder.display());
                let cores = thread::available_parallelism().map_or(1, usize::from);
                if rest.peek().is_none() || kedge_image::verify(folder, cores).is_ok() {
                    return Err(error.into());
                }
            }
        }
    }
}

/// The plugins of a restart from an image.
fn plugins(
    spec: &RestartSpec,
    place: &Place<'_>,
    (folder, manifest): (&Path, &Manifest),
    gpu: Option<GpuRestart>,
) -> Result<RestartPlugins, RunError> {
    let rank = RankRestart::new(spec.seat(folder)?);
    let join = place.joint.zip(spec.joining.as_ref());
    let join = join.map(|(joint, joining)| Join::new(joint.clone(), joining.clone()));
    let show = |showing| Shown::show(showing, place.name, (folder, manifest));
    Ok(RestartPlugins {
        gpu: gpu.map(Arc::new),
        rank: Arc::new(rank),
        join: join.map(Arc::new),
        shown: spec.showing.map(show).map(Arc::new),
        gate: place.gate.clone(),
    })
}

/// How many of its processes have devices.
fn clients(manifest: &Manifest) -> usize {
    manifest.files.iter().filter(|file| gpu::is_of_client(&file.name)).count()
}

/// What the job's proxies are started with.
fn launch(
    devices: &Devices,
    dir: &JobDir,
    warm: Option<&Own>,
    log: &Arc<JobLog>,
) -> Result<Launch, RunError> {
    let (gpu, parts) = (devices.gpu.parse()?, Parts::find()?);
    dir.link_driver(&parts)?;
    let kind = Kind::here(&parts, &gpu, &devices.limits);
    let warm = Sources::new(kind, warm.map(|own| own.socket().to_owned()), log.clone());
    Ok(Launch::new(&parts, &gpu, &devices.limits, dir).with_warm(warm))
}
