//! OpenACC and OpenMP programs, whose loops gcc compiles to PTX, on a server's devices.

use kedge_tests::relay::Relay;
use kedge_tests::server::Served;
use kedge_tests::{Target, offload, run, run_interrupted};

#[test]
fn programs_run_on_a_server_over_a_line_that_is_cut() {
    let server = Served::start(&["--gpu", "soft"]);
    let relay = Relay::start(&server.address, 200_000);
    let target = Target::Far(relay.address.clone());
    let any = offload::each(|binary, program| run(binary, program, &target));
    assert!(!any || relay.cuts() > 0);
}

#[test]
fn they_are_checkpointed_killed_and_restarted_there() {
    let server = Served::start(&["--gpu", "soft"]);
    let target = Target::Far(server.address.clone());
    offload::each(|binary, program| run_interrupted(binary, program, &target));
}
