//! Two processes that a real launcher starts are a world. A launcher that is not installed is skipped, which
//! the output says.

use std::env;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use zero_comm::{CommError, CommunicatorExt, Launch, Launcher, Meeting, ReduceOp, WindowKey, World};
use zero_core::Rank;

/// The path of `program`, which the variable `variable` may name; `None` if it is not installed.
fn installed(variable: &str, program: &str) -> Option<PathBuf> {
    let named = env::var_os(variable).map(PathBuf::from);
    let found = named.or_else(|| {
        let folders = env::var_os("PATH").unwrap_or_default();
        env::split_paths(&folders).map(|folder| folder.join(program)).find(|path| path.is_file())
    });
    if found.is_none() {
        println!("skipped: {program} is not on PATH, and {variable} does not name it");
    }
    found
}

/// Runs `rank` of this file twice under `launcher`, and checks that both came to its end.
fn run(launcher: &mut Command) {
    // What runs the tests may itself be started by a launcher.
    const FOREIGN: [&str; 12] = [
        "LOCAL_",
        "MASTER_",
        "MPI_",
        "MV2_",
        "OMPI_",
        "PALS_",
        "PMI",
        "RANK",
        "SLURM_",
        "TORCHELASTIC_",
        "WORLD_SIZE",
        "ZERO_",
    ];
    for (name, _) in env::vars_os() {
        if FOREIGN.iter().any(|prefix| name.as_encoded_bytes().starts_with(prefix.as_bytes())) {
            launcher.env_remove(name);
        }
    }
    launcher.arg(env::current_exe().unwrap()).args(["--exact", "rank", "--ignored", "--nocapture"]);
    // Open MPI asks before it runs as root, or more processes than there are cores.
    launcher.envs([
        ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
        ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
        ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
        ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
    ]);
    let output = launcher.output().unwrap();
    let text =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(output.status.success(), "{}\n{text}", output.status);
    for rank in ["rank 0", "rank 1"] {
        assert!(text.contains(&format!("{rank} has met the other")), "{text}");
    }
}

#[test]
fn two_processes_of_torchrun_are_a_world() {
    let Some(torchrun) = installed("TORCHRUN", "torchrun") else { return };
    run(Command::new(torchrun).args(["--standalone", "--no-python", "--nproc-per-node", "2"]));
}

#[test]
fn two_processes_of_mpirun_are_a_world() {
    let Some(mpirun) = installed("MPIRUN", "mpirun") else { return };
    run(Command::new(mpirun).args(["-n", "2"]));
}

/// One rank of two, where the launchers above start it.
#[test]
#[ignore = "run by the other tests"]
fn rank() {
    let launch = Launch::from_env().unwrap().expect("a launcher should have started this");
    assert_eq!((launch.local_rank, launch.local_world_size), (launch.rank.index(), Some(2)));
    match launch.launcher {
        Launcher::Torchrun => assert!(matches!(launch.meeting, Meeting::AgentStore { .. })),
        _ => assert!(matches!(launch.meeting, Meeting::File { .. })),
    }
    let world = World::from_env().unwrap().unwrap();
    let sums = world.run(|comm| {
        comm.expose(WindowKey::new(0), Arc::new(vec![comm.rank().index() as u8; 100]))?;
        let mut all = vec![1.0_f32; 1 << 20];
        comm.all_reduce(&mut all, ReduceOp::Sum, "ones")?;
        let (mut window, other) = ([9; 100], Rank::new(1 - comm.rank().index()));
        comm.read(other, WindowKey::new(0), 0, &mut window, "window")?;
        assert_eq!(window, [other.index() as u8; 100]);
        Ok::<_, CommError>(all.iter().all(|sum| *sum == 2.0))
    });
    assert_eq!(sums.unwrap(), [true]);
    println!("{} has met the other", launch.rank);
}
