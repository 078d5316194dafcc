//! What a rank finds in its environment.

use std::ffi::OsString;
use std::net::SocketAddr;

use super::placement::Place;
use crate::Token;

/// Variables by which other launchers tell a process its place.
///
/// This program may run under one of them (a shell of an allocation, an MPI job of one process). Its ranks
/// would then be told two different places.
const FOREIGN: [&str; 14] = [
    "CROSS_RANK",
    "CROSS_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "OMPI_UNIVERSE_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_TASKS_PER_NODE",
];

/// What the names of such variables begin with.
const FOREIGN_BEGINNINGS: [&str; 9] = [
    "MPI_LOCAL",
    "MV2_COMM_WORLD_",
    "OMPI_COMM_WORLD_",
    "PALS_",
    "PMIX_",
    "PMI_",
    "SLURM_NTASKS_PER_",
    "SLURM_STEP_",
    "TORCHELASTIC_",
];

/// What the names of variables begin with that ranks on other machines get from here. What is about this
/// machine, like paths, is not among them.
const SHARED_BEGINNINGS: [&str; 6] = ["BURN_", "CUBECL_", "NCCL_", "OMP_", "RUST_", "ZERO_"];

/// What the rank at `place` is told.
pub(crate) fn of_rank(
    place: &Place,
    ranks: usize,
    rendezvous: SocketAddr,
    token: &Token,
) -> Vec<(&'static str, String)> {
    vec![
        ("RANK", place.rank.index().to_string()),
        ("WORLD_SIZE", ranks.to_string()),
        ("LOCAL_RANK", place.local_rank.to_string()),
        ("LOCAL_WORLD_SIZE", place.local_world_size.to_string()),
        ("MASTER_ADDR", rendezvous.ip().to_string()),
        ("MASTER_PORT", rendezvous.port().to_string()),
        ("ZERO_RENDEZVOUS", rendezvous.to_string()),
        ("ZERO_JOB_TOKEN", token.to_hex()),
    ]
}

/// The variables of this process that a rank here must not inherit.
pub(crate) fn foreign() -> impl Iterator<Item = OsString> {
    std::env::vars_os().map(|(name, _)| name).filter(|name| name.to_str().is_some_and(is_foreign))
}

fn is_foreign(name: &str) -> bool {
    FOREIGN.contains(&name) || FOREIGN_BEGINNINGS.iter().any(|beginning| name.starts_with(beginning))
}

/// An extended regular expression for the beginnings of lines of `env` that are foreign.
pub(crate) fn foreign_pattern() -> String {
    let (names, beginnings) = (FOREIGN.join("|"), FOREIGN_BEGINNINGS.join("|"));
    format!("^(({names})|({beginnings})[A-Za-z0-9_]*)=")
}

/// The variables of this process that ranks on other machines get too.
pub(crate) fn shared() -> impl Iterator<Item = (String, OsString)> {
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value))).filter(
        |(name, _)| {
            // It becomes a word of a shell script.
            name.bytes().all(|byte| byte == b'_' || byte.is_ascii_alphanumeric())
                && SHARED_BEGINNINGS.iter().any(|beginning| name.starts_with(beginning))
        },
    )
}

#[cfg(test)]
mod tests {
    use super::is_foreign;

    #[test]
    fn places_told_by_other_launchers_are_foreign_and_their_settings_are_not() {
        for name in ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID", "SLURM_NTASKS_PER_NODE"]
        {
            assert!(is_foreign(name), "{name}");
        }
        for name in ["SLURM_JOB_ID", "OMPI_MCA_btl", "OMP_NUM_THREADS", "NTASKS", "MY_PMI_RANK"] {
            assert!(!is_foreign(name), "{name}");
        }
    }
}
