//! Descriptors without a path come back as they were.

mod plugins_support;

use plugins_support::{Scenario, as_an_ordinary_user};

const SOURCE: &str = "plugins_anonymous.c";

#[test]
fn memfds_come_back_with_contents_and_seals() {
    Scenario::round_trip(SOURCE, "memfd");
}

#[test]
fn eventfds_come_back_with_their_count() {
    Scenario::round_trip(SOURCE, "eventfd");
}

#[test]
fn timerfds_come_back_with_the_time_left() {
    Scenario::round_trip(SOURCE, "timerfd");
}

#[test]
fn signalfds_come_back_with_their_mask() {
    Scenario::round_trip(SOURCE, "signalfd");
}

#[test]
fn pidfds_come_back_as_the_same_process() {
    Scenario::round_trip(SOURCE, "pidfd");
}

#[test]
fn inotify_comes_back_with_its_watches() {
    Scenario::round_trip(SOURCE, "inotify");
}

#[test]
fn epoll_comes_back_with_its_members() {
    Scenario::round_trip(SOURCE, "epoll");
}

#[test]
fn terminals_come_back_with_settings_session_and_what_waits() {
    Scenario::round_trip(SOURCE, "pty");
}

#[test]
fn files_about_the_process_itself_come_back() {
    Scenario::round_trip(SOURCE, "own");
}

#[test]
fn descriptors_of_a_saved_job_are_not_disturbed() {
    for name in ["memfd", "eventfd", "timerfd", "signalfd", "inotify", "pty"] {
        let scenario = Scenario::start(SOURCE, name);
        scenario.save();
        scenario.goes_on();
    }
}

#[test]
fn ordinary_users_can_do_all_that() {
    as_an_ordinary_user();
}
