//! Programs with kernel AIO: captured at some moment, killed, and brought back. Completions that
//! they have not read are read after the restart, in their order, and none is lost.

mod support;

use support::survive::{as_an_ordinary_user, captured_again, steps_survive};

#[test]
fn contexts_of_kernel_aio_come_back() {
    steps_survive("aio", "aio.c", &["-pthread"]);
}

#[test]
fn contexts_that_came_back_can_be_captured_again() {
    captured_again("aio-again", "aio.c");
}

#[test]
fn ordinary_users_have_them_too() {
    as_an_ordinary_user();
}
