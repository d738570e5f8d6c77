//! Sockets come back connected, with what waits in them.

mod plugins_support;

use kedge_process::plugins::{PathMap, Survey};
use plugins_support::{Scenario, as_an_ordinary_user};

const SOURCE: &str = "plugins_sockets.c";

#[test]
fn pairs_come_back_with_messages_and_passed_descriptors() {
    Scenario::round_trip(SOURCE, "pairs");
}

#[test]
fn servers_come_back_with_their_clients() {
    Scenario::round_trip(SOURCE, "server");
}

#[test]
fn datagrams_come_back_with_their_senders() {
    Scenario::round_trip(SOURCE, "datagrams");
}

#[test]
fn messages_without_data_come_back_among_others() {
    Scenario::round_trip(SOURCE, "empty");
}

#[test]
fn idle_netlink_sockets_come_back_with_ports_and_groups() {
    Scenario::round_trip(SOURCE, "netlink");
}

/// What is closed while it is looked at is not taken for something that nobody can save.
#[test]
fn sockets_that_come_and_go_are_not_refused() {
    let mut scenario = Scenario::start(SOURCE, "restless");
    for round in 0..200 {
        let survey = Survey::of(&scenario.pids, &scenario.options());
        assert!(survey.is_ok(), "round {round}: {:?}", survey.err());
    }
    scenario.kill();
}

#[test]
fn netlink_sockets_with_an_answer_are_refused() {
    let mut scenario = Scenario::start(SOURCE, "unread");
    let refusals = Survey::of(&scenario.pids, &scenario.options()).unwrap_err();
    assert!(refusals[0].to_string().contains("waits in this netlink socket"), "{}", refusals[0]);
    scenario.kill();
}

/// Another kernel, or this one after another start, gives a group's number to another family.
#[test]
fn groups_of_generic_netlink_are_refused() {
    let mut scenario = Scenario::start(SOURCE, "generic");
    let refusals = Survey::of(&scenario.pids, &scenario.options()).unwrap_err();
    assert!(refusals[0].to_string().contains("groups of generic netlink"), "{}", refusals[0]);
    scenario.kill();
}

#[test]
fn a_peer_outside_is_named_and_found_closed() {
    let mut scenario = Scenario::start(SOURCE, "outside");
    let saved = scenario.save();
    scenario.kill();
    // The test itself may have been started with pipes that lead outside.
    let named = |warning: &&String| warning.contains("descriptor 10 ");
    let warning = saved.warnings().iter().find(named).expect("a warning");
    assert!(warning.contains("is connected outside of the job"), "{warning}");
    scenario.check(&saved, PathMap::default());
}

#[test]
fn names_that_are_gone_come_back_beside_what_has_them_now() {
    Scenario::round_trip(SOURCE, "ghosts");
}

#[test]
fn files_of_names_keep_their_owners() {
    Scenario::round_trip(SOURCE, "owned");
}

#[test]
fn what_nobody_has_accepted_yet_is_refused_by_name() {
    for name in ["unaccepted", "unaccepted-gone"] {
        Scenario::refused_unaccepted(SOURCE, name);
    }
}

#[test]
fn sockets_of_a_saved_job_are_not_disturbed() {
    for name in ["pairs", "datagrams", "empty", "ghosts", "owned"] {
        let scenario = Scenario::start(SOURCE, name);
        scenario.save();
        scenario.goes_on();
    }
}

#[test]
fn what_nobody_has_accepted_yet_is_not_waited_for_in_a_pause() {
    Scenario::refused_at_once(SOURCE, "unaccepted");
}

#[test]
fn ordinary_users_can_do_all_that() {
    as_an_ordinary_user();
}
