//! How MPI's implementations start four ranks here; `tests/tests/joint_mpi.rs` has them from here
//! too.

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
