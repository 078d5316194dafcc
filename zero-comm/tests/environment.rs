//! Who a process is, for the variables that launchers set. The larger sets are those of real launchers: torchrun
//! of PyTorch 2.15, Slurm 22.05, Open MPI 4.1 and 5.0, MPICH 5.0, Intel MPI 2021.19.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use proptest::prelude::*;
use zero_comm::{EnvironmentError, Launch, Launcher, Meeting, Surroundings};

type Set<'a> = &'a [(&'a str, &'a str)];

fn surroundings() -> Surroundings {
    Surroundings { user: 1000, parent: 4321, temporary: PathBuf::from("/tmp") }
}

/// Detects in all the sets together; a later one wins.
fn detect(sets: &[Set<'_>]) -> Result<Option<Launch>, EnvironmentError> {
    let find = |name: &str| {
        sets.concat().iter().rev().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
    };
    Launch::detect(find, &surroundings())
}

fn launch(sets: &[Set<'_>]) -> Launch {
    detect(sets).unwrap().unwrap()
}

fn error(sets: &[Set<'_>]) -> EnvironmentError {
    detect(sets).unwrap_err()
}

/// Rank, world size, local rank, local world size.
type Place = (usize, usize, usize, Option<usize>);

fn place(launch: &Launch) -> Place {
    (launch.rank.index(), launch.world_size.get(), launch.local_rank, launch.local_world_size)
}

fn bind(host: &str, port: u16) -> Meeting {
    Meeting::Bind { host: host.to_owned(), port }
}

fn file(name: &str) -> Meeting {
    Meeting::File { path: format!("/tmp/zero-comm-1000/{name}.address").into() }
}

const MASTER: Set<'_> = &[("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")];

const ZERO: Set<'_> = &[
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("ZERO_RENDEZVOUS", "node01:4242"),
    ("ZERO_JOB_TOKEN", "very-secret and long"),
    ("MASTER_ADDR", "node01"),
    ("MASTER_PORT", "4243"),
];

const TORCHRUN: Set<'_> = &[
    ("RANK", "1"),
    ("WORLD_SIZE", "2"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "localhost"),
    ("MASTER_PORT", "33825"),
    ("TORCHELASTIC_RUN_ID", "93e6a2f4"),
    ("TORCHELASTIC_RESTART_COUNT", "2"),
    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
];

const OPEN_MPI_4: Set<'_> = &[
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("PMIX_NAMESPACE", "984154113"),
    ("PMIX_RANK", "1"),
];

const OPEN_MPI_5: Set<'_> = &[
    ("OMPI_COMM_WORLD_RANK", "0"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("PMIX_NAMESPACE", "prterun-vm-23219@1"),
    ("PMIX_RANK", "0"),
];

const MPICH: Set<'_> =
    &[("PMI_RANK", "2"), ("PMI_SIZE", "3"), ("MPI_LOCALRANKID", "2"), ("MPI_LOCALNRANKS", "3")];

const INTEL_MPI: Set<'_> = &[
    ("PMI_RANK", "0"),
    ("PMI_SIZE", "2"),
    ("MPI_LOCALRANKID", "0"),
    ("MPI_LOCALNRANKS", "2"),
    ("I_MPI_HYDRA_UUID", "ea5f0000-ebac-f22b-6c61-0600fe77a84e"),
];

const CRAY_PALS: Set<'_> = &[
    ("PMI_RANK", "5"),
    ("PMI_SIZE", "6"),
    ("PMI_LOCAL_RANK", "5"),
    ("PMI_LOCAL_SIZE", "6"),
    ("PALS_APID", "f3c0a1"),
];

const MVAPICH: Set<'_> = &[
    ("MV2_COMM_WORLD_RANK", "1"),
    ("MV2_COMM_WORLD_SIZE", "2"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "1"),
    ("MV2_COMM_WORLD_LOCAL_SIZE", "2"),
];

/// `srun -N2 -n3`, the last task.
const SRUN: Set<'_> = &[
    ("SLURM_JOB_ID", "123456"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_PROCID", "2"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "1"),
    ("SLURM_NTASKS", "3"),
    ("SLURM_STEP_NUM_TASKS", "3"),
    ("SLURM_TASKS_PER_NODE", "2,1"),
    ("SLURM_STEP_TASKS_PER_NODE", "2,1"),
    ("SLURM_JOB_NODELIST", "node[01-02]"),
    ("SLURM_STEP_NODELIST", "node[01-02]"),
];

/// The script of `sbatch -N2 -n4`, of which there is one process.
const SBATCH: Set<'_> = &[
    ("SLURM_JOB_ID", "123456"),
    ("SLURM_PROCID", "0"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "0"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_TASKS_PER_NODE", "2(x2)"),
    ("SLURM_JOB_NODELIST", "node[01-02]"),
];

/// The shell of `salloc -n3`.
const SALLOC: Set<'_> = &[
    ("SLURM_JOB_ID", "4"),
    ("SLURM_NTASKS", "3"),
    ("SLURM_TASKS_PER_NODE", "3"),
    ("SLURM_JOB_NODELIST", "node01"),
];

/// A helper of MPI, one per node, or a launcher, that srun started on the first of two nodes.
const SRUN_PER_NODE: Set<'_> = &[
    ("SLURM_JOB_ID", "123456"),
    ("SLURM_STEP_ID", "2"),
    ("SLURM_PROCID", "0"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "0"),
    ("SLURM_NTASKS", "2"),
    ("SLURM_STEP_NUM_TASKS", "2"),
    ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"),
    ("SLURM_STEP_NODELIST", "node[01-02]"),
];

#[test]
fn without_a_launcher_there_is_none() {
    let shells: [Set<'_>; 4] = [
        &[],
        &[("HOME", "/home/a"), ("OMP_NUM_THREADS", "4")],
        // A secret says nothing about ranks, and a daemon's own variables nothing about tasks.
        &[("ZERO_JOB_TOKEN", "very-secret and long")],
        &[("SLURM_JOB_NODELIST", "node01"), ("SLURM_LOCALID", "0")],
    ];
    for shell in shells {
        assert_eq!(detect(&[shell]), Ok(None), "{shell:?}");
    }
}

#[test]
fn every_launcher_is_understood() {
    let expected: &[(Set<'_>, Launcher, Place, Meeting, &str)] = &[
        (
            ZERO,
            Launcher::Zero,
            (3, 4, 1, Some(2)),
            Meeting::Coordinator { address: "node01:4242".to_owned() },
            "zero-4242.0",
        ),
        (
            TORCHRUN,
            Launcher::Torchrun,
            (1, 2, 1, Some(2)),
            Meeting::AgentStore {
                host: "localhost".to_owned(),
                port: 33825,
                key: "zero-comm/93e6a2f4/address".to_owned(),
            },
            "93e6a2f4-33825",
        ),
        (OPEN_MPI_4, Launcher::OpenMpi, (1, 2, 1, Some(2)), file("984154113"), "984154113"),
        (
            OPEN_MPI_5,
            Launcher::OpenMpi,
            (0, 2, 0, Some(2)),
            file("prterun-vm-23219%401"),
            "prterun-vm-23219@1",
        ),
        (MPICH, Launcher::Mpich, (2, 3, 2, Some(3)), file("parent-4321"), "parent-4321"),
        (
            INTEL_MPI,
            Launcher::Mpich,
            (0, 2, 0, Some(2)),
            file("ea5f0000-ebac-f22b-6c61-0600fe77a84e"),
            "ea5f0000-ebac-f22b-6c61-0600fe77a84e",
        ),
        (CRAY_PALS, Launcher::Mpich, (5, 6, 5, Some(6)), file("f3c0a1"), "f3c0a1"),
        (MVAPICH, Launcher::Mvapich, (1, 2, 1, Some(2)), file("parent-4321"), "parent-4321"),
        (SRUN, Launcher::Slurm, (2, 3, 0, Some(1)), bind("node01", 18456), "123456.0.0"),
    ];
    for (set, launcher, place_of, meeting, job) in expected {
        let launch = launch(&[set]);
        assert_eq!(launch.launcher, *launcher);
        assert_eq!(place(&launch), *place_of, "{launcher:?}");
        assert_eq!(launch.meeting, *meeting);
        assert_eq!(launch.job.as_str(), *job, "{launcher:?}");
    }
}

#[test]
fn the_address_of_the_master_wins_over_what_could_be_derived() {
    for set in [OPEN_MPI_4, OPEN_MPI_5, MPICH, INTEL_MPI, CRAY_PALS, MVAPICH, SRUN] {
        assert_eq!(launch(&[set, MASTER]).meeting, bind("10.0.0.1", 29500), "{set:?}");
    }
    // Launchers without ids of their own are told apart by the port.
    assert_eq!(launch(&[MPICH, MASTER]).job.as_str(), "port-29500");
    assert_eq!(launch(&[MVAPICH, MASTER]).job.as_str(), "port-29500");
    assert_eq!(launch(&[SRUN, MASTER]).job.as_str(), "123456.0.0");
}

#[test]
fn the_names_of_pytorch_suffice() {
    let named: Set<'_> = &[("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")];
    let found = launch(&[named, MASTER]);
    assert_eq!((found.launcher, place(&found)), (Launcher::Env, (5, 8, 1, None)));
    assert_eq!((found.meeting, found.job.as_str()), (bind("10.0.0.1", 29500), "port-29500"));
    assert_eq!((found.token, found.restart), (None, 0));
}

#[test]
fn torchrun_without_a_store_of_its_own_leaves_the_port_to_rank_0() {
    let found = launch(&[TORCHRUN, &[("TORCHELASTIC_USE_AGENT_STORE", "False")]]);
    assert_eq!(found.meeting, bind("localhost", 33825));
}

#[test]
fn restarts_are_counted_but_do_not_change_the_key_of_torchrun() {
    let (first, second) = (launch(&[TORCHRUN]), launch(&[TORCHRUN, &[("TORCHELASTIC_RESTART_COUNT", "3")]]));
    assert_eq!((first.restart, second.restart), (2, 3));
    // The other host's torchrun may not have counted.
    assert_eq!((first.meeting, first.job), (second.meeting, second.job));

    let again = launch(&[SRUN, &[("SLURM_RESTART_COUNT", "1")]]);
    assert_eq!((again.restart, again.job.as_str()), (1, "123456.0.1"));
    let again = launch(&[ZERO, &[("ZERO_RESTART_COUNT", "7")]]);
    assert_eq!((again.restart, again.job.as_str()), (7, "zero-4242.7"));
    assert_eq!(launch(&[OPEN_MPI_4]).restart, 0);
}

#[test]
fn a_world_of_one_meets_nobody() {
    let sets: [Set<'_>; 5] = [
        &[("RANK", "0"), ("WORLD_SIZE", "1")],
        &[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")],
        &[("PMI_RANK", "0"), ("PMI_SIZE", "1")],
        &[("RANK", "0"), ("WORLD_SIZE", "1"), ("TORCHELASTIC_RUN_ID", "none")],
        // The shell of `srun --pty bash`.
        &[
            ("SLURM_JOB_ID", "5"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "1"),
            ("SLURM_STEP_NUM_TASKS", "1"),
        ],
    ];
    for set in sets {
        let found = launch(&[set]);
        assert_eq!((place(&found), found.meeting), ((0, 1, 0, None), Meeting::Alone), "{set:?}");
    }
    // A coordinator waits even for one.
    let own: Set<'_> = &[("RANK", "0"), ("WORLD_SIZE", "1"), ("ZERO_RENDEZVOUS", "[::1]:80")];
    assert_eq!(launch(&[own]).meeting, Meeting::Coordinator { address: "[::1]:80".to_owned() });
}

#[test]
fn the_token_is_kept_and_never_shown() {
    let found = launch(&[ZERO]);
    assert_eq!(found.token, Some("very-secret and long".parse().unwrap()));
    assert!(!format!("{found:?}").contains("very-secret"), "{found:?}");

    let wrong = error(&[ZERO, &[("RANK", "4")]]);
    for text in [format!("{wrong}"), format!("{wrong:?}")] {
        assert!(text.contains("ZERO_JOB_TOKEN=<hidden>") && !text.contains("very-secret"), "{text}");
    }
    let empty = error(&[ZERO, &[("ZERO_JOB_TOKEN", "")]]);
    assert!(empty.to_string().starts_with("ZERO_JOB_TOKEN=<hidden> is not a text"), "{empty}");
}

#[test]
fn a_token_that_can_be_guessed_is_refused_and_not_shown() {
    let short = error(&[ZERO, &[("ZERO_JOB_TOKEN", "top-secret")]]);
    assert!(matches!(short, EnvironmentError::Malformed { name: "ZERO_JOB_TOKEN", .. }), "{short}");
    let text = short.to_string();
    assert!(text.contains("a token of 10 bytes can be guessed") && !text.contains("top-secret"), "{text}");
}

#[test]
fn shared_memory_is_on_or_off_and_nothing_else() {
    let shares = |value: &str| detect(&[ZERO, &[("ZERO_SHARED_MEMORY", value)]]);
    assert!(launch(&[ZERO]).shared_memory);
    assert!(shares("on").unwrap().unwrap().shared_memory);
    assert!(!shares("off").unwrap().unwrap().shared_memory);
    for value in ["", "0", "Off", "no"] {
        let error = shares(value).unwrap_err();
        assert!(matches!(error, EnvironmentError::Malformed { name: "ZERO_SHARED_MEMORY", .. }), "{error}");
        // Without a launcher, too.
        assert!(detect(&[&[("ZERO_SHARED_MEMORY", value)]]).is_err());
    }
}

#[test]
fn the_inner_launcher_wins() {
    let expected: &[(&[Set<'_>], Launcher, Place)] = &[
        // torchrun on each node, started by srun or mpirun; and in a batch script.
        (&[SRUN_PER_NODE, TORCHRUN], Launcher::Torchrun, (1, 2, 1, Some(2))),
        (&[SBATCH, TORCHRUN], Launcher::Torchrun, (1, 2, 1, Some(2))),
        (&[OPEN_MPI_5, TORCHRUN], Launcher::Torchrun, (1, 2, 1, Some(2))),
        (&[MPICH, TORCHRUN], Launcher::Torchrun, (1, 2, 1, Some(2))),
        // Our own, likewise.
        (&[SRUN_PER_NODE, ZERO], Launcher::Zero, (3, 4, 1, Some(2))),
        (&[SBATCH, ZERO], Launcher::Zero, (3, 4, 1, Some(2))),
        (&[OPEN_MPI_5, ZERO], Launcher::Zero, (3, 4, 1, Some(2))),
        // Another launcher that sets the names of PyTorch, started by srun.
        (
            &[SRUN_PER_NODE, MASTER, &[("RANK", "3"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "3")]],
            Launcher::Env,
            (3, 8, 3, None),
        ),
        // mpirun in the shell of salloc, in a batch script, and its helpers started by srun.
        (&[SALLOC, OPEN_MPI_4], Launcher::OpenMpi, (1, 2, 1, Some(2))),
        (&[SBATCH, OPEN_MPI_4], Launcher::OpenMpi, (1, 2, 1, Some(2))),
        (&[SRUN_PER_NODE, OPEN_MPI_4], Launcher::OpenMpi, (1, 2, 1, Some(2))),
        (&[SRUN_PER_NODE, OPEN_MPI_5], Launcher::OpenMpi, (0, 2, 0, Some(2))),
        (&[SALLOC, MPICH], Launcher::Mpich, (2, 3, 2, Some(3))),
        (&[SRUN_PER_NODE, MPICH], Launcher::Mpich, (2, 3, 2, Some(3))),
        (&[SRUN_PER_NODE, INTEL_MPI], Launcher::Mpich, (0, 2, 0, Some(2))),
    ];
    for (sets, launcher, place_of) in expected {
        let found = launch(sets);
        assert_eq!((found.launcher, place(&found)), (*launcher, *place_of), "{sets:?}");
        // What the outer one says of itself does not even have to make sense.
        let outer: Set<'_> = &[("SLURM_NODEID", "99"), ("SLURM_STEP_TASKS_PER_NODE", "7")];
        assert!(*launcher == Launcher::Env || launch(&[outer, &sets.concat()]) == found, "{sets:?}");
    }
}

#[test]
fn ranks_of_one_mpirun_meet_at_one_place_whatever_slurm_says_of_their_helpers() {
    // By chance, the first rank's place is its helper's.
    let second: Set<'_> = &[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_LOCAL_RANK", "1")];
    let meeting = launch(&[SRUN_PER_NODE, OPEN_MPI_5]).meeting;
    assert_eq!(launch(&[SRUN_PER_NODE, OPEN_MPI_5, second]).meeting, meeting);
    let second: Set<'_> = &[("PMI_RANK", "1"), ("MPI_LOCALRANKID", "1")];
    let meeting = launch(&[SRUN_PER_NODE, INTEL_MPI]).meeting;
    assert_eq!(launch(&[SRUN_PER_NODE, INTEL_MPI, second]).meeting, meeting);
}

#[test]
fn pmi_that_comes_from_slurm_is_slurm() {
    let pmi2: Set<'_> = &[("PMI_RANK", "2"), ("PMI_SIZE", "3")];
    let cray: Set<'_> = &[
        ("PMI_RANK", "2"),
        ("PMI_SIZE", "3"),
        ("PMI_LOCAL_RANK", "0"),
        ("PMI_LOCAL_SIZE", "1"),
        ("PALS_APID", "123456.0"),
    ];
    let pmix: Set<'_> = &[("PMIX_RANK", "2"), ("PMIX_NAMESPACE", "slurm.pmix.123456.0")];
    for set in [pmi2, cray, pmix] {
        assert_eq!(launch(&[SRUN, set]), launch(&[SRUN]), "{set:?}");
    }
    let other = error(&[SRUN, pmi2, &[("PMI_RANK", "1")]]);
    assert!(other.to_string().contains("PMI_RANK=1 and PMI_SIZE=3, but SLURM_PROCID=2"), "{other}");
}

#[test]
fn a_set_that_agrees_completes_the_names_of_pytorch() {
    let named: Set<'_> = &[("RANK", "2"), ("WORLD_SIZE", "3")];
    let found = launch(&[SRUN, named]);
    assert_eq!((found.launcher, place(&found)), (Launcher::Slurm, (2, 3, 0, Some(1))));
    assert_eq!(found.meeting, bind("node01", 18456));
    let found = launch(&[MPICH, named]);
    assert_eq!((place(&found), found.meeting), ((2, 3, 2, Some(3)), file("parent-4321")));
    // One device for each rank is numbered 0 everywhere.
    assert_eq!(place(&launch(&[MPICH, named, &[("LOCAL_RANK", "0")]])), (2, 3, 0, Some(3)));
    assert_eq!(launch(&[MPICH, named, MASTER]).meeting, bind("10.0.0.1", 29500));
}

#[test]
fn several_sets_of_mpi_that_agree_are_one() {
    let pmi: Set<'_> = &[("PMI_RANK", "1"), ("PMI_SIZE", "2")];
    let found = launch(&[MVAPICH, pmi]);
    assert_eq!((place(&found), found.meeting), ((1, 2, 1, Some(2)), file("parent-4321")));
}

#[test]
fn an_allocation_is_no_launch() {
    for set in [SBATCH, SALLOC] {
        let error = error(&[set]);
        assert!(matches!(error, EnvironmentError::NotATask { .. }), "{error}");
        assert!(error.to_string().contains("start the program with `srun`"), "{error}");
        // Exporting where to meet makes no difference, saying who one is does.
        assert!(matches!(detect(&[set, MASTER]), Err(EnvironmentError::NotATask { .. })));
        let alone = launch(&[set, &[("RANK", "0"), ("WORLD_SIZE", "1")]]);
        assert_eq!(alone.meeting, Meeting::Alone);
    }
    // With one task, or if nothing says how many, the process is on its own.
    assert_eq!(detect(&[SBATCH, &[("SLURM_NTASKS", "1")]]), Ok(None));
    assert_eq!(detect(&[&SALLOC[..1]]), Ok(None));
    // An interactive shell that is a step, and not one of tasks.
    let shell: Set<'_> = &[("SLURM_STEP_ID", "4294967290")];
    assert!(matches!(detect(&[SBATCH, shell]), Err(EnvironmentError::NotATask { tasks: 4, .. })));
}

#[test]
fn a_batch_script_that_inherits_a_step_is_no_task_of_it() {
    let outer: Set<'_> = &[
        ("SLURM_STEP_ID", "1"),
        ("SLURM_STEP_NUM_TASKS", "1"),
        ("SLURM_STEP_TASKS_PER_NODE", "1"),
        ("SLURM_STEP_NODELIST", "node01"),
    ];
    assert!(matches!(detect(&[SBATCH, outer]), Err(EnvironmentError::NotATask { tasks: 4, .. })));
}

#[test]
fn slurm_ranks_meet_at_the_first_host_of_their_step() {
    let other: Set<'_> = &[("SLURM_STEP_NODELIST", "node02,node[05-06]"), ("SLURM_STEP_ID", "7")];
    assert_eq!(launch(&[SRUN, other]).meeting, bind("node02", 18463));
    let without = &SRUN[..SRUN.len() - 1];
    assert_eq!(launch(&[without]).meeting, bind("node01", 18456));
    for (job, port) in [("0", 15000), ("9999", 24999), ("10000", 15000), ("18446744073709551615", 16615)] {
        assert_eq!(launch(&[SRUN, &[("SLURM_JOB_ID", job)]]).meeting, bind("node01", port));
    }
}

#[test]
fn an_incomplete_set_is_refused_with_what_is_missing_and_found() {
    let expected: &[(&[Set<'_>], &str)] = &[
        (&[&[("RANK", "0")]], "WORLD_SIZE is missing"),
        (&[&[("WORLD_SIZE", "2")]], "RANK is missing"),
        (&[&[("LOCAL_RANK", "0")]], "RANK, WORLD_SIZE are missing"),
        (&[&[("LOCAL_WORLD_SIZE", "2")]], "RANK, WORLD_SIZE are missing"),
        (&[&[("RANK", "0"), ("WORLD_SIZE", "2")], MASTER], "LOCAL_RANK is missing"),
        (
            &[&[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")]],
            "MASTER_ADDR, MASTER_PORT are missing",
        ),
        (&[MASTER], "RANK, WORLD_SIZE, LOCAL_RANK are missing"),
        (&[&[("PMIX_RANK", "0"), ("PMIX_NAMESPACE", "a")]], "RANK, WORLD_SIZE, LOCAL_RANK are missing"),
        (&[&[("TORCHELASTIC_RUN_ID", "a")]], "RANK, WORLD_SIZE, LOCAL_RANK are missing"),
        (&[&[("ZERO_RENDEZVOUS", "a:1")]], "RANK, WORLD_SIZE, LOCAL_RANK are missing"),
        (&[OPEN_MPI_4, &[("MASTER_ADDR", "a")]], "MASTER_PORT is missing"),
        (&[SRUN, &[("MASTER_PORT", "1")]], "MASTER_ADDR is missing"),
        (&[&OPEN_MPI_4[..1]], "OMPI_COMM_WORLD_SIZE is missing"),
        (&[&OPEN_MPI_4[..2]], "OMPI_COMM_WORLD_LOCAL_RANK is missing"),
        (&[&MPICH[..2]], "MPI_LOCALRANKID is missing"),
        (&[&MPICH[1..2]], "PMI_RANK is missing"),
        (&[&MVAPICH[1..]], "MV2_COMM_WORLD_RANK is missing"),
        (&[&SRUN[1..]], "SLURM_JOB_ID is missing"),
        (&[&SRUN[2..]], "SLURM_JOB_ID, SLURM_STEP_ID are missing"),
        (&[&[("SLURM_PROCID", "1")]], "SLURM_JOB_ID, SLURM_STEP_ID, SLURM_NTASKS, SLURM_LOCALID are missing"),
        (&[&[("SLURM_NTASKS", "2")]], "SLURM_JOB_ID, SLURM_STEP_ID, SLURM_PROCID, SLURM_LOCALID are missing"),
        (&[&SRUN[..2]], "SLURM_PROCID, SLURM_STEP_NUM_TASKS are missing"),
        (&[&SRUN[..3], &SRUN[4..]], "SLURM_LOCALID is missing"),
        (&[&SRUN[..9]], "SLURM_JOB_NODELIST is missing"),
    ];
    for (sets, missing) in expected {
        let error = error(sets);
        assert!(matches!(error, EnvironmentError::Partial { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(&format!("in part only: {missing};")), "{sets:?}: {text}");
        for (name, value) in sets.concat() {
            assert!(text.contains(&format!("{name}={value:?}")), "{name}: {text}");
        }
    }
}

#[test]
fn more_ranks_than_there_can_be_are_a_typing_error() {
    let sets: [Set<'_>; 3] = [
        &[("RANK", "0"), ("WORLD_SIZE", "65537"), ("LOCAL_RANK", "0")],
        &[("RANK", "0"), ("WORLD_SIZE", "99999999999"), ("LOCAL_RANK", "0")],
        &[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "70000")],
    ];
    for set in sets {
        let error = error(&[set, MASTER]);
        let (name, value) = set[1];
        let expected = format!("{name}={value:?} is not a number of ranks, 1 to 65536;");
        assert!(error.to_string().starts_with(&expected), "{error}");
    }
    let most: Set<'_> = &[("RANK", "0"), ("WORLD_SIZE", "65536"), ("LOCAL_RANK", "0")];
    assert_eq!(launch(&[most, MASTER]).world_size.get(), 65_536);
}

#[test]
fn a_set_that_contradicts_itself_is_refused() {
    let named: Set<'_> =
        &[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")];
    let expected: &[(&[Set<'_>], &str)] = &[
        (&[named, &[("RANK", "2")]], "RANK=2 must be less than WORLD_SIZE=2"),
        (&[named, &[("LOCAL_RANK", "2")]], "LOCAL_RANK=2 must be less than LOCAL_WORLD_SIZE=2"),
        (&[&named[..2], &[("LOCAL_RANK", "2")]], "LOCAL_RANK=2 must be less than WORLD_SIZE=2"),
        (&[named, &[("LOCAL_WORLD_SIZE", "3")]], "of WORLD_SIZE=2 ranks, LOCAL_WORLD_SIZE counts 3"),
        (&[ZERO, &[("RANK", "4")]], "RANK=4 must be less than WORLD_SIZE=4"),
        (&[TORCHRUN, &[("RANK", "2")]], "RANK=2 must be less than WORLD_SIZE=2"),
        (&[OPEN_MPI_4, &[("OMPI_COMM_WORLD_RANK", "2")]], "OMPI_COMM_WORLD_RANK=2 must be less"),
        (&[MPICH, &[("MPI_LOCALRANKID", "3")]], "MPI_LOCALRANKID=3 must be less than MPI_LOCALNRANKS=3"),
        (&[SRUN, &[("SLURM_PROCID", "3")]], "SLURM_PROCID=3 must be less than SLURM_STEP_NUM_TASKS=3"),
        (&[SRUN, &[("SLURM_LOCALID", "1")]], "SLURM_LOCALID=1 must be less than SLURM_STEP_TASKS_PER_NODE=1"),
        (
            &[SRUN, &[("SLURM_STEP_TASKS_PER_NODE", "2(x2)")]],
            "SLURM_STEP_TASKS_PER_NODE add up to 4, not to 3",
        ),
        (&[SRUN, &[("SLURM_NODEID", "2")]], "SLURM_NODEID=2, but SLURM_STEP_TASKS_PER_NODE has 2 hosts"),
    ];
    for (sets, conflict) in expected {
        let error = error(sets);
        assert!(matches!(error, EnvironmentError::Contradiction { .. }), "{error}");
        assert!(error.to_string().contains(conflict), "{sets:?}: {error}");
    }
}

#[test]
fn launchers_that_disagree_are_refused() {
    let named: Set<'_> = &[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")];
    let expected: &[(&[Set<'_>], &str)] = &[
        (
            &[named, OPEN_MPI_4],
            "RANK=0 and WORLD_SIZE=2, but OMPI_COMM_WORLD_RANK=1 and OMPI_COMM_WORLD_SIZE=2",
        ),
        (&[named, OPEN_MPI_4, MASTER], "RANK=0 and WORLD_SIZE=2, but OMPI_COMM_WORLD_RANK=1"),
        (&[named, MPICH], "RANK=0 and WORLD_SIZE=2, but PMI_RANK=2 and PMI_SIZE=3"),
        (&[named, SRUN], "RANK=0 and WORLD_SIZE=2, but SLURM_PROCID=2 and SLURM_STEP_NUM_TASKS=3"),
        (&[MPICH, OPEN_MPI_4], "PMI_RANK=2 and PMI_SIZE=3, but OMPI_COMM_WORLD_RANK=1"),
        (
            &[OPEN_MPI_5, MVAPICH],
            "OMPI_COMM_WORLD_RANK=0 and OMPI_COMM_WORLD_SIZE=2, but MV2_COMM_WORLD_RANK=1",
        ),
    ];
    for (sets, conflict) in expected {
        let error = error(sets);
        assert!(matches!(error, EnvironmentError::Contradiction { .. }), "{error}");
        assert!(error.to_string().contains(conflict), "{sets:?}: {error}");
    }
}

#[test]
fn a_malformed_value_is_refused_by_name() {
    let numbers = ["", "x", "-1", "+1", " 1", "1 ", "0x1", "1.0", "99999999999999999999999", "\u{661}"];
    let sets: &[(Set<'_>, &[&str])] = &[
        (ZERO, &["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"]),
        (ZERO, &["ZERO_RESTART_COUNT"]),
        (TORCHRUN, &["RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"]),
        (OPEN_MPI_4, &["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"]),
        (OPEN_MPI_4, &["OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"]),
        (MPICH, &["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]),
        (MVAPICH, &["MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"]),
        (SRUN, &["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_JOB_ID"]),
        (SRUN, &["SLURM_NTASKS", "SLURM_NODEID", "SLURM_RESTART_COUNT"]),
        (SALLOC, &["SLURM_NTASKS"]),
    ];
    for (set, names) in sets {
        for name in *names {
            for value in numbers {
                let error = error(&[set, &[(name, value)]]);
                assert!(matches!(error, EnvironmentError::Malformed { .. }), "{name}={value}: {error}");
                assert!(error.to_string().starts_with(&format!("{name}={value:?} is not a ")), "{error}");
            }
        }
    }
    let others: &[(Set<'_>, &str, &[&str])] = &[
        (ZERO, "WORLD_SIZE", &["0"]),
        (ZERO, "MASTER_PORT", &["0", "65536"]),
        (ZERO, "MASTER_ADDR", &["", "a b", "tcp://a"]),
        (
            ZERO,
            "ZERO_RENDEZVOUS",
            &["", "a", ":1", "a:", "a:0", "a:65536", "a:+1", "a:x", "http://a:1", "a b:1"],
        ),
        (TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE", &["", "true", "1"]),
        (TORCHRUN, "TORCHELASTIC_RUN_ID", &[""]),
        (OPEN_MPI_4, "PMIX_NAMESPACE", &[""]),
        (INTEL_MPI, "I_MPI_HYDRA_UUID", &[""]),
        (SRUN, "SLURM_STEP_TASKS_PER_NODE", &["", "2,", "2(x", "2(1)", "a"]),
        (SRUN, "SLURM_STEP_NODELIST", &["", "node[01", "node[3-1]", "a,,b"]),
    ];
    for (set, name, values) in others {
        for value in *values {
            let error = error(&[set, &[(name, value)]]);
            assert!(matches!(error, EnvironmentError::Malformed { .. }), "{name}={value}: {error}");
            assert!(error.to_string().starts_with(&format!("{name}={value:?} is not ")), "{error}");
        }
    }
}

#[test]
fn a_value_that_is_no_text_is_refused() {
    let find = |name: &str| (name == "RANK").then(|| OsString::from_vec(vec![b'1', 0xff]));
    let error = Launch::detect(find, &surroundings()).unwrap_err();
    assert!(error.to_string().starts_with("RANK=\"1\u{fffd}\" is not valid Unicode"), "{error}");
}

#[test]
fn a_long_value_is_cut_in_errors() {
    let list = "node,".repeat(100_000);
    let text = error(&[SRUN, &[("SLURM_STEP_NODELIST", &list)]]).to_string();
    assert!(text.contains("node,\"..."), "{text}");
    assert!(text.len() < 2000, "{} bytes", text.len());
}

#[test]
fn mpi_over_several_hosts_has_to_be_told_where_to_meet() {
    let spread: &[&[Set<'_>]] = &[
        &[OPEN_MPI_4, &[("OMPI_COMM_WORLD_SIZE", "4")]],
        &[&OPEN_MPI_4[..3]],
        &[MPICH, &[("PMI_SIZE", "6")]],
        &[MVAPICH, &[("MV2_COMM_WORLD_SIZE", "3")]],
    ];
    for sets in spread {
        let error = error(sets);
        assert!(matches!(error, EnvironmentError::NoMeeting { .. }), "{error}");
        assert!(error.to_string().contains("export MASTER_ADDR"), "{error}");
        assert_eq!(launch(&[&sets.concat(), MASTER]).meeting, bind("10.0.0.1", 29500));
    }
}

#[test]
fn a_namespace_cannot_lead_out_of_the_folder() {
    for (namespace, name) in [
        ("../../etc/x", "..%2f..%2fetc%2fx"),
        ("a/b", "a%2fb"),
        ("..", ".."),
        ("ä", "%c3%a4"),
        ("a%2fb", "a%252fb"),
    ] {
        assert_eq!(launch(&[OPEN_MPI_4, &[("PMIX_NAMESPACE", namespace)]]).meeting, file(name));
    }
}

#[test]
fn the_environment_of_this_process_can_be_read() {
    let find = |name: &str| std::env::var_os(name);
    assert_eq!(Launch::from_env(), Launch::detect(find, &Surroundings::current()));
    assert_eq!(Surroundings::current().temporary, std::env::temp_dir());
}

proptest! {
    #[test]
    fn a_place_is_taken_if_and_only_if_it_makes_sense(
        family in 0..FAMILIES.len(),
        rank in 0..5_usize,
        size in 0..5_usize,
        local_rank in 0..5_usize,
        local_size in 0..5_usize,
    ) {
        let names = FAMILIES[family];
        let values = [rank, size, local_rank, local_size].map(|value| value.to_string());
        let set: Vec<(&str, &str)> = names.into_iter().zip(values.iter().map(String::as_str)).collect();
        let sensible = rank < size && local_rank < local_size && local_size <= size;
        match detect(&[&set, MASTER]) {
            Ok(found) => {
                let found = found.unwrap();
                prop_assert!(sensible);
                prop_assert_eq!(place(&found), (rank, size, local_rank, Some(local_size)));
                prop_assert_eq!(size == 1, found.meeting == Meeting::Alone);
            }
            Err(error) => prop_assert!(!sensible, "{}", error),
        }
    }
}

/// How rank, size, local rank and local size are called.
const FAMILIES: [[&str; 4]; 4] = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    [
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ],
    ["MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"],
];
