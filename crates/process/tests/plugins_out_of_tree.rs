//! The worked example of docs/plugins.md: a plugin for netlink sockets, which lives outside of the
//! crate.

mod plugins_support;

use kedge_process::plugins::{
    Capture, Claim, Found, Job, Plugin, PluginError, RecreateOptions, Saved, Survey, SurveyOptions,
    World, state,
};
use plugins_support::Scenario;
use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, socket_with};
use serde_json::Value;
use std::num::NonZeroU32;

#[derive(Debug)]
struct Netlink;

impl Plugin for Netlink {
    fn name(&self) -> &'static str {
        "netlink"
    }

    fn claim(&self, file: &Found, _job: &Job) -> Claim {
        match file.socket {
            Some(kind) if kind.domain == libc::AF_NETLINK => Claim::Yes,
            _ => Claim::No,
        }
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        // Only its protocol; what waits in it is about the machine as it was.
        let protocol = |index: &usize| Some(capture.file(*index).socket?.protocol as u32);
        let saved = |index: &usize| Some(Ok((*index as u32, protocol(index)?)));
        state(mine.iter().filter_map(saved))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        for (description, protocol) in world.parse::<Vec<(u32, u32)>>(state)? {
            // 0, NETLINK_ROUTE, is what a socket without a protocol has.
            let protocol = NonZeroU32::new(protocol).map(Protocol::from_raw);
            let (family, flags) = (AddressFamily::NETLINK, SocketFlags::CLOEXEC);
            let made = socket_with(family, SocketType::RAW, flags, protocol);
            let fd = made.map_err(|e| PluginError::System {
                what: "make a netlink socket".to_owned(),
                source: e.into(),
            })?;
            world.made(description, fd)?;
        }
        Ok(())
    }
}

fn with_netlink<'a>(scenario: &'a Scenario) -> SurveyOptions<'a> {
    SurveyOptions { more: vec![&Netlink], ..scenario.options() }
}

#[test]
fn a_plugin_of_others_takes_what_the_table_does_not() {
    let mut scenario = Scenario::start("plugins_sockets.c", "netlink");
    let refusals = Survey::of(&scenario.pids, &scenario.options()).unwrap_err();
    assert!(refusals[0].to_string().contains("a plugin for netlink"), "{}", refusals[0]);

    let survey = Survey::of(&scenario.pids, &with_netlink(&scenario)).unwrap();
    let saved = survey.save(&scenario.image()).unwrap();
    let saved = Saved::from_bytes(&saved.to_bytes().unwrap()).unwrap();
    drop(survey);
    scenario.kill();

    let options = RecreateOptions { folder: scenario.image(), ..RecreateOptions::default() };
    let error = saved.recreate(&options).unwrap_err();
    assert!(matches!(&error, PluginError::NoPlugin(name) if name == "netlink"), "{error}");

    let options = RecreateOptions { more: vec![&Netlink], ..options };
    let made = saved.recreate(&options).unwrap();
    let slot = saved.slots().iter().find(|slot| slot.fd == 10).unwrap();
    let fd = &made.descriptors[slot.description as usize];
    assert_eq!(rustix::net::sockopt::socket_domain(fd).unwrap(), AddressFamily::NETLINK);
}
