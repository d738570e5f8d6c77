//! TCP and UDP come back between the job's own sockets, with what waits in them.

mod plugins_support;

use kedge_left_out::{left_out, needs_root};
use kedge_process::plugins::PathMap;
use plugins_support::{Scenario, as_an_ordinary_user};
use rustix::thread::UnshareFlags;
use std::process::Command;

const SOURCE: &str = "plugins_inet.c";
/// The first and the last group whose processes may make sockets for pings.
const PING_GROUPS: &str = "/proc/sys/net/ipv4/ping_group_range";

#[test]
fn connections_come_back_at_their_addresses() {
    Scenario::round_trip(SOURCE, "four");
}

#[test]
fn connections_of_ipv6_come_back_too() {
    Scenario::round_trip(SOURCE, "six");
}

#[test]
fn old_connections_do_not_stand_in_the_way() {
    Scenario::round_trip(SOURCE, "closed-first");
}

#[test]
fn a_full_connection_comes_back_full() {
    Scenario::round_trip(SOURCE, "full");
}

#[test]
fn connections_of_a_saved_job_are_not_disturbed() {
    for name in ["full", "udp", "ended", "connecting", "listeners", "options"] {
        let scenario = Scenario::start(SOURCE, name);
        scenario.save();
        scenario.goes_on();
    }
}

#[test]
fn datagrams_come_back() {
    Scenario::round_trip(SOURCE, "udp");
}

/// An error is told once, to who looks first: not to a checkpoint.
#[test]
fn a_program_is_told_of_what_was_not_delivered() {
    let scenario = Scenario::start(SOURCE, "undelivered");
    let refused = scenario.refused();
    assert!(refused.contains("descriptor 10") && refused.contains("ECONNREFUSED"), "{refused}");
    scenario.goes_on();
}

/// Whether this is root, who alone makes raw sockets.
fn may_be_raw() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        needs_root("raw sockets", "only root makes them");
    }
    root
}

#[test]
fn raw_sockets_come_back() {
    if may_be_raw() {
        Scenario::round_trip(SOURCE, "raw");
        let scenario = Scenario::start(SOURCE, "raw");
        scenario.save();
        scenario.goes_on();
    }
}

#[test]
fn packets_that_wait_in_raw_sockets_are_lost_with_a_warning() {
    if !may_be_raw() {
        return;
    }
    let mut scenario = Scenario::start(SOURCE, "waiting");
    let saved = scenario.save();
    scenario.kill();
    let named = |warning: &String| {
        warning.contains("descriptor 11 ") && warning.contains("packets that wait")
    };
    assert!(saved.warnings().iter().any(named), "{:?}", saved.warnings());
    scenario.check(&saved, PathMap::default());
}

/// Has this thread, and what it starts, in a network of its own in which all groups may ping: on
/// most machines none may. False where this takes rights that this process lacks.
fn in_a_network_for_pings() -> bool {
    if !rustix::process::geteuid().is_root() {
        return false;
    }
    // SAFETY: descriptors stay as they are; this thread alone changes its network.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
    assert!(up.success(), "ip link set lo up");
    std::fs::write(PING_GROUPS, "0 2147483647").unwrap();
    true
}

/// Whether this process's group may ping.
fn may_ping() -> bool {
    let range = std::fs::read_to_string(PING_GROUPS).unwrap();
    let range: Vec<u32> = range.split_whitespace().map(|word| word.parse().unwrap()).collect();
    (range[0]..=range[1]).contains(&rustix::process::getegid().as_raw())
}

#[test]
fn sockets_for_pings_come_back() {
    if !may_ping() && !in_a_network_for_pings() {
        return left_out("sockets for pings", "net.ipv4.ping_group_range does not have this group");
    }
    Scenario::round_trip(SOURCE, "ping");
}

#[test]
fn a_peer_outside_is_named_and_resets_the_connection() {
    let mut scenario = Scenario::start(SOURCE, "outside");
    let saved = scenario.save();
    scenario.kill();
    let named = |warning: &&String| warning.contains("descriptor 11 ");
    let warning = saved.warnings().iter().find(named).expect("a warning");
    assert!(warning.contains("outside of the job"), "{warning}");
    scenario.check(&saved, PathMap::default());
}

#[test]
fn what_has_ended_has_ended_in_the_same_way() {
    Scenario::round_trip(SOURCE, "ended");
}

#[test]
fn a_connection_that_is_under_way_is_begun_once_more() {
    Scenario::round_trip(SOURCE, "connecting");
}

#[test]
fn listeners_come_back_with_who_is_gone_and_with_shared_ports() {
    Scenario::round_trip(SOURCE, "listeners");
}

#[test]
fn filters_locks_and_addresses_that_are_nobodys_come_back() {
    Scenario::round_trip(SOURCE, "options");
}

#[test]
fn what_nobody_has_accepted_yet_is_refused_by_name() {
    for name in ["unaccepted", "unaccepted-gone"] {
        Scenario::refused_unaccepted(SOURCE, name);
    }
}

#[test]
fn what_nobody_has_accepted_yet_is_not_waited_for_in_a_pause() {
    Scenario::refused_at_once(SOURCE, "unaccepted");
}

#[test]
fn ordinary_users_can_do_all_that() {
    in_a_network_for_pings();
    as_an_ordinary_user();
}
