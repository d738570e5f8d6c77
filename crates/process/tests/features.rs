//! Programs with one feature each, which they watch: captured at some moment, killed, and brought
//! back. Each says `wrong` when its feature is not what it was.

mod support;

use support::survive::{as_an_ordinary_user, command_survives_for};
use support::{Folder, alone, build};

fn survives(feature: &str) {
    let _alone = alone();
    let folder = Folder::new(&format!("feature-{feature}"));
    let program = build(&folder, "features.c", &["-pthread"]);
    // More lines than the pipe takes and the test reads before it captures.
    command_survives_for(&folder, &[program.to_str().unwrap(), feature], 160);
}

macro_rules! features {
    ($($feature:ident)*) => {$(
        #[test]
        fn $feature() {
            survives(stringify!($feature));
        }
    )*};
}

features! {
    attributes bound dumpable undumpable
    sessions ended_leader subreaper
    stopped trap
    removed_folder removed_folder_that_is_open folder_of_ended removed_device
    advice advice_on_shared droppable private_views
    program_in_memory lock_owner ended_pidfds other_name terminal_owner
    under_way told_of_messages file_of_a_worker
}

#[test]
fn ordinary_users_have_them_too() {
    as_an_ordinary_user();
}
