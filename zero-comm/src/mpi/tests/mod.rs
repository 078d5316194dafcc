//! Each test here starts an MPI job whose ranks are this test binary again, with one of `children` to run.

mod children;
mod job;

use std::env;
use std::io;
use std::ops::RangeInclusive;
use std::process::{Command, Output};

/// What a job has come to.
struct Outcome {
    success: bool,
    /// All that its ranks and `mpirun` wrote.
    text: String,
}

/// Runs `child` in a job of so many ranks; `None` without `mpirun`.
fn job(child: &str, ranks: usize, variables: &[(&str, &str)]) -> Option<Outcome> {
    let spawned = Command::new("mpirun")
        .args(["-n", &ranks.to_string()])
        .arg(env::current_exe().unwrap())
        .args(["--ignored", "--nocapture", "--exact", &format!("mpi::tests::children::{child}")])
        // As variables and not as options, for libraries other than Open MPI 4 do not know them.
        .envs([
            ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
            ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
            ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
            ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
            // In seconds: a guard against a job that hangs.
            ("MPIEXEC_TIMEOUT", "200"),
        ])
        .envs(variables.iter().copied())
        .output();
    let Output { status, stdout, stderr } = match spawned {
        Ok(output) => output,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            println!("skipped: mpirun is not installed");
            return None;
        }
        Err(error) => panic!("mpirun: {error}"),
    };
    let text = format!("{}\n{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    Some(Outcome { success: status.success(), text })
}

/// Makes Open MPI talk between ranks of one host as it does between hosts.
const OVER_TCP: [(&str, &str); 1] = [("OMPI_MCA_btl", "self,tcp")];

/// Runs `child` in jobs of so many ranks, all of which must pass and end MPI.
fn pass(child: &str, ranks: RangeInclusive<usize>) {
    for ranks in ranks {
        pass_with(child, ranks, &[]);
    }
}

fn pass_with(child: &str, ranks: usize, variables: &[(&str, &str)]) {
    let Some(outcome) = job(child, ranks, variables) else { return };
    let passed = outcome.text.matches("1 passed").count();
    assert!(outcome.success && passed == ranks, "{child}, {ranks} ranks, {passed} passed:\n{}", outcome.text);
}

#[test]
fn streams_may_be_cut_differently_on_both_sides() {
    pass("streams_cut_differently", 1..=5);
}

#[test]
fn ranks_of_different_hosts_reach_each_other_as_those_of_one() {
    for child in ["streams_cut_differently", "groups_and_threads", "window_reads"] {
        pass_with(child, 3, &OVER_TCP);
    }
}

#[test]
fn big_transfers_to_all_ranks_at_once_arrive_whole() {
    pass("big_exchange", 1..=5);
}

#[test]
fn groups_and_threads_do_not_disturb_each_other() {
    pass("groups_and_threads", 1..=4);
}

#[test]
fn sends_alone_end_before_they_are_received() {
    pass("sends_alone", 2..=2);
}

#[test]
fn windows_are_read_while_their_owner_does_other_things() {
    pass("window_reads", 1..=5);
}

#[test]
fn a_wrong_read_says_what_is_wrong_and_the_next_works() {
    pass("wrong_reads", 1..=3);
}

#[test]
fn a_region_goes_when_its_last_reader_is_done() {
    pass("region_goes", 2..=2);
}

#[test]
fn rank_0_tells_all_ranks_a_text() {
    pass("texts", 1..=5);
}

#[test]
fn the_place_must_be_that_of_mpi() {
    pass("places", 1..=2);
}

#[test]
fn mpi_that_the_program_started_is_used_and_left_to_it() {
    pass("started_by_the_program", 1..=2);
}

#[test]
fn mpi_of_too_low_a_thread_level_is_refused() {
    pass("low_thread_level", 1..=1);
}

#[test]
fn after_the_end_nothing_begins_and_mpi_does_not_start_again() {
    pass("after_the_end", 1..=2);
}

#[test]
fn the_survivors_of_a_killed_rank_get_an_error_each() {
    for ranks in 2..=5 {
        survive(ranks, &[]);
    }
}

#[test]
fn the_survivors_get_an_error_even_if_mpi_does_not_return() {
    for ranks in 2..=4 {
        survive(ranks, &OVER_TCP);
    }
}

fn survive(ranks: usize, variables: &[(&str, &str)]) {
    let recovery = [("OMPI_MCA_orte_enable_recovery", "1")];
    let Some(outcome) = job("killed", ranks, &[variables, &recovery].concat()) else { return };
    for rank in (0..ranks).filter(|rank| *rank != 1) {
        for operation in ["transfer", "big transfer", "read", "collective", "failed world"] {
            let line = format!("rank {rank}: {operation} failed as it must\n");
            assert!(outcome.text.contains(&line), "{line}{}", outcome.text);
        }
    }
    assert_eq!(outcome.text.matches("1 passed").count(), ranks - 1, "{}", outcome.text);
}

#[test]
fn a_job_that_ends_without_finalising_mpi_is_a_failed_job() {
    let Some(outcome) = job("unhealthy_end", 2, &[]) else { return };
    assert!(!outcome.success, "{}", outcome.text);
    assert!(outcome.text.contains("the broadcast has timed out"), "{}", outcome.text);
}
