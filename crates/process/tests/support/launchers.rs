//! How MPI's implementations start four ranks here, and in which network;
//! `tests/tests/hosts/joint_mpi.rs` has them from here too.

use std::process::Command;

/// It takes two cores for too few, and root for a mistake.
pub(crate) const OPEN_MPI: [&str; 6] = [
    "OMPI_ALLOW_RUN_AS_ROOT=1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    "mpirun.openmpi",
    "--oversubscribe",
    "-np",
    "4",
];

pub(crate) const MPICH: [&str; 3] = ["mpiexec.mpich", "-np", "4"];

/// Makes a host's network of an empty one: `$0` is its address.
pub(crate) const HOST: &str = "ip link set lo up && \
    ip link add kedge0 type veth peer name kedge1 && \
    ip addr add $0/24 dev kedge0 && ip link set kedge0 up && ip link set kedge1 up";

/// Set in a process of a test's program whose network keeps no closed connections.
const NETWORK: &str = "KEDGE_TEST_NETWORK";

/// Runs `work` in a process of its own, by the test of that name, in a network in which a closed
/// connection is gone at once. Launchers close connections as they begin: a restart that follows so
/// soon waits a minute for their ports (TIME-WAIT), as the one of `mpich_goes_on_over_tcp` does.
/// What `turn` makes is kept meanwhile.
pub(crate) fn in_a_network_without_time_wait<T>(
    test: &str,
    turn: impl FnOnce() -> T,
    work: impl FnOnce(),
) {
    if std::env::var_os(NETWORK).is_some() || !rustix::process::geteuid().is_root() {
        return work();
    }
    let _turn = turn();
    let make = format!("{HOST} && echo 0 > /proc/sys/net/ipv4/tcp_max_tw_buckets && exec \"$@\"");
    let mut again = Command::new("unshare");
    again.args(["-n", "sh", "-c", &make, "10.77.3.1"]).arg(std::env::current_exe().unwrap());
    let ended = again.args([test, "--exact", "--nocapture"]).env(NETWORK, "1").output().unwrap();
    let said = String::from_utf8_lossy(&ended.stdout);
    let passed = ended.status.success() && said.contains("1 passed");
    assert!(passed, "{said}{}", String::from_utf8_lossy(&ended.stderr));
}
