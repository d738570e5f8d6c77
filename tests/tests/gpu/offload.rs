//! OpenACC and OpenMP programs, whose loops gcc compiles to PTX that libgomp loads by the driver's
//! linker, on software devices.

use kedge_tests::{Target, offload, run, run_interrupted};

#[test]
fn programs_run_on_software_devices() {
    let target = Target::Kedge("soft".to_owned());
    offload::each(|binary, program| run(binary, program, &target));
}

#[test]
fn so_they_do_where_devices_see_no_memory_of_the_host() {
    let target = Target::Kedge("soft:apart".to_owned());
    offload::each(|binary, program| run(binary, program, &target));
}

#[test]
fn they_are_checkpointed_killed_and_restarted() {
    let target = Target::Kedge("soft".to_owned());
    offload::each(|binary, program| run_interrupted(binary, program, &target));
}

#[test]
fn so_they_are_where_devices_see_no_memory_of_the_host() {
    let target = Target::Kedge("soft:apart".to_owned());
    offload::each(|binary, program| run_interrupted(binary, program, &target));
}
