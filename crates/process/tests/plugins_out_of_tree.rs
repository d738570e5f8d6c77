//! The worked example of docs/plugins.md: a plugin for vsock sockets, which lives outside of the
//! crate.

mod plugins_support;

use kedge_left_out::left_out;
use kedge_process::plugins::{
    Capture, Claim, Found, Job, Plugin, PluginError, RecreateOptions, Saved, Survey, SurveyOptions,
    World, state,
};
use plugins_support::Scenario;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use serde_json::Value;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

#[derive(Debug)]
struct Vsock;

impl Plugin for Vsock {
    fn name(&self) -> &'static str {
        "vsock"
    }

    fn claim(&self, file: &Found, _job: &Job) -> Claim {
        match file.socket {
            Some(kind) if kind.domain == libc::AF_VSOCK => Claim::Yes,
            _ => Claim::No,
        }
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        // Only its type: whoever it was connected to was another machine.
        let kind = |index: &usize| Some(capture.file(*index).socket?.kind as u32);
        let saved = |index: &usize| Some(Ok((*index as u32, kind(index)?)));
        state(mine.iter().filter_map(saved))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        for (description, kind) in world.parse::<Vec<(u32, u32)>>(state)? {
            let (family, flags) = (AddressFamily::VSOCK, SocketFlags::CLOEXEC);
            let made = socket_with(family, SocketType::from_raw(kind), flags, None);
            let fd = made.map_err(|e| PluginError::System {
                what: "make a vsock socket".to_owned(),
                source: e.into(),
            })?;
            world.made(description, fd)?;
        }
        Ok(())
    }
}

fn with_vsock<'a>(scenario: &'a Scenario) -> SurveyOptions<'a> {
    SurveyOptions { more: vec![Arc::new(Vsock)], ..scenario.options() }
}

#[test]
fn a_plugin_of_others_takes_what_kedge_s_own_do_not() {
    let mut scenario = Scenario::start("plugins_sockets.c", "vsock");
    let made = socket_with(AddressFamily::VSOCK, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    if let Err(error) = made {
        return left_out("vsock sockets", &error.to_string());
    }
    let refusals = Survey::of(&scenario.pids, &scenario.options()).unwrap_err();
    assert!(refusals[0].to_string().contains("a plugin for vsock"), "{}", refusals[0]);

    let survey = Survey::of(&scenario.pids, &with_vsock(&scenario)).unwrap();
    let saved = survey.save(&scenario.image()).unwrap();
    let saved = Saved::from_bytes(&saved.to_bytes().unwrap()).unwrap();
    drop(survey);
    scenario.kill();

    let options = RecreateOptions { folder: scenario.image(), ..RecreateOptions::default() };
    let error = saved.recreate(&options).unwrap_err();
    assert!(matches!(&error, PluginError::NoPlugin(name) if name == "vsock"), "{error}");

    let options = RecreateOptions { more: vec![Arc::new(Vsock)], ..options };
    let made = saved.recreate(&options).unwrap();
    let slot = saved.slots().iter().find(|slot| slot.fd == 10).unwrap();
    let fd = &made.descriptors[slot.description as usize];
    assert_eq!(rustix::net::sockopt::socket_domain(fd).unwrap(), AddressFamily::VSOCK);
}

/// Refuses all that there is, each after a while.
#[derive(Debug)]
struct Hesitant;

impl Plugin for Hesitant {
    fn name(&self) -> &'static str {
        "hesitant"
    }

    fn claim(&self, _file: &Found, _job: &Job) -> Claim {
        // Two of them take longer than all refusals may together.
        thread::sleep(Duration::from_millis(600));
        Claim::Refused("it is not ready".to_owned())
    }
}

#[test]
fn refusals_that_take_long_are_no_more_than_a_few() {
    let scenario = Scenario::start("plugins_sockets.c", "vsock");
    let held = std::fs::read_dir(format!("/proc/{}/fd", scenario.pids[0])).unwrap().count();
    assert!(held > 2, "{held}");
    let options = SurveyOptions { more: vec![Arc::new(Hesitant)], ..scenario.options() };
    let refusals = Survey::of(&scenario.pids, &options).unwrap_err();
    assert!((1..=2).contains(&refusals.len()), "{}", refusals.len());
}
