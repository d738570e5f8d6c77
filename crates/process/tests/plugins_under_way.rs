//! Descriptors that are under way in Unix sockets come back there, also those that no process
//! holds.

mod plugins_support;

use kedge_process::plugins::{PathMap, PluginError, Survey, SurveyOptions};
use plugins_support::{Scenario, as_an_ordinary_user};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const SOURCE: &str = "plugins_under_way.c";
const SAVED: [&str; 7] = ["streams", "messages", "kinds", "shared", "nested", "many", "told"];

#[test]
fn streams_keep_the_place_at_which_descriptors_come() {
    Scenario::round_trip(SOURCE, "streams");
}

#[test]
fn messages_keep_their_descriptors() {
    Scenario::round_trip(SOURCE, "messages");
}

#[test]
fn all_kinds_come_back() {
    Scenario::round_trip(SOURCE, "kinds");
}

#[test]
fn one_description_stays_one_wherever_it_is() {
    Scenario::round_trip(SOURCE, "shared");
}

#[test]
fn sockets_under_way_come_back_with_what_waits_in_them() {
    Scenario::round_trip(SOURCE, "nested");
}

#[test]
fn as_many_come_back_as_the_kernel_takes() {
    Scenario::round_trip(SOURCE, "many");
}

/// Options of who reads are what they were, and take nothing from what waits.
#[test]
fn who_is_told_of_senders_gets_all_of_it() {
    Scenario::round_trip(SOURCE, "told");
}

/// The program has raised its own limit, and this process has not.
#[test]
fn more_come_back_than_a_process_may_have_by_default() {
    let mut scenario = Scenario::start(SOURCE, "thousand");
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(1024), ..before }).unwrap();
    let saved = scenario.save();
    scenario.kill();
    scenario.check(&saved, PathMap::default());
}

#[test]
fn queues_of_a_saved_job_are_not_disturbed() {
    for name in SAVED {
        let scenario = Scenario::start(SOURCE, name);
        scenario.save();
        scenario.goes_on();
    }
}

/// What is saved twice is the same both times.
#[test]
fn a_second_save_finds_what_the_first_one_has() {
    for name in ["streams", "kinds", "nested"] {
        let mut scenario = Scenario::start(SOURCE, name);
        scenario.save();
        std::fs::remove_dir_all(scenario.image()).unwrap();
        std::fs::create_dir(scenario.image()).unwrap();
        let saved = scenario.save();
        scenario.kill();
        scenario.check(&saved, PathMap::default());
    }
}

#[test]
fn what_the_kernel_does_not_show_again_is_not_lost() {
    let mut scenario = Scenario::start(SOURCE, "hidden");
    let saved = scenario.save();
    let options = SurveyOptions { still: true, ..scenario.options() };
    let said = Survey::of(&scenario.pids, &options).unwrap_err()[0].to_string();
    assert!(said.contains("descriptor 11: socket:["), "{said}");
    assert!(said.contains("does not show all descriptors"), "{said}");
    scenario.kill();
    scenario.check(&saved, PathMap::default());
}

/// An ordinary descriptor table holds none of the job's afterwards.
#[test]
fn nothing_is_left_open_here() {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    for name in ["many", "told"] {
        let scenario = Scenario::start(SOURCE, name);
        let before = open();
        scenario.save();
        assert_eq!(open(), before, "{name}");
        scenario.goes_on();
    }
}

#[test]
fn what_cannot_be_saved_is_named_before_anything_is_stopped() {
    for (name, what) in [
        ("pidfd", "pidfd"),
        ("own", "/status is under way in it: only a process that holds one of its kind (own)"),
        ("owner", "is under way in it: it has an owner or a signal (F_SETOWN, F_SETSIG)"),
    ] {
        let scenario = Scenario::start(SOURCE, name);
        let refusals = Survey::of(&scenario.pids, &scenario.options()).unwrap_err();
        let said = refusals[0].to_string();
        assert!(said.contains("descriptor 11: socket:["), "{said}");
        assert!(said.contains("cannot be saved: ") && said.contains(what), "{said}");
        scenario.goes_on();
    }
}

/// Behind something else it is found when the job stands still, and the queue stays as it was.
#[test]
fn what_cannot_be_seen_before_is_named_then() {
    let scenario = Scenario::start(SOURCE, "deep");
    let survey = Survey::of(&scenario.pids, &scenario.options()).unwrap();
    scenario.stop();
    let error = survey.save(&scenario.image()).unwrap_err();
    assert!(matches!(error, PluginError::Survey(_)), "{error}");
    let said = error.to_string();
    assert!(said.contains("descriptor 11: socket:["), "{said}");
    assert!(said.contains("/status is under way in it: "), "{said}");
    let options = SurveyOptions { still: true, ..scenario.options() };
    assert_eq!(Survey::of(&scenario.pids, &options).unwrap_err()[0].to_string(), said);
    scenario.goes_on();
}

#[test]
fn ordinary_users_can_do_all_that() {
    as_an_ordinary_user();
}
