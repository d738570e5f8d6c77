//! Descriptors without a path come back as they were.

mod plugins_support;

use plugins_support::{Scenario, as_an_ordinary_user};

const SOURCE: &str = "plugins_anonymous.c";

#[test]
fn memfds_come_back_with_contents_and_seals() {
    Scenario::round_trip(SOURCE, "memfd");
}

#[test]
fn ordinary_users_can_do_all_that() {
    as_an_ordinary_user();
}
