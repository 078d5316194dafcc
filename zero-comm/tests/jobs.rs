//! Ranks of this crate's worlds that `zero-run` starts, and what it says of those that the others have to do without.

#![cfg(unix)]

use std::convert::Infallible;
use std::env;
use std::io::{BufRead, BufReader};
use std::process::{self, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use zero_comm::{Communicator, World};

/// Selects what the ranks do.
const ACT: &str = "ZERO_COMM_TEST_ACT";

/// How long the ranks wait for each other, in seconds.
const DEADLINE: &str = "ZERO_COMM_TEST_DEADLINE";

/// What makes a rank of a process.
const RANK: &str = "\"$0\" --exact a_rank --ignored --nocapture";

/// A job of two ranks in shells that run `script`, in which [`RANK`] is a rank that does `act`.
fn job(script: &str, act: &str, deadline: u64) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_zero-run"));
    command.args(["-n", "2", "--", "sh", "-c", script]).arg(env::current_exe().unwrap());
    command.env(ACT, act).env(DEADLINE, deadline.to_string()).stdin(Stdio::null());
    command
}

/// The exit code, and what the launcher says.
fn run(job: &mut Command) -> (Option<i32>, String) {
    let output = job.output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    (output.status.code(), told[told.find("zero-run: ").unwrap_or(told.len())..].to_owned())
}

#[test]
fn a_rank_that_ends_before_it_joins_is_named_at_once() {
    let script = format!("test $RANK = 1 || exec {RANK}");
    let (code, report) = run(&mut job(&script, "meet", 3600));
    assert_eq!(code, Some(1), "{report}");
    assert!(
        report.starts_with("zero-run: rank 1 failed first: ended before it joined its world\n"),
        "{report}"
    );
    assert!(report.contains("    its process: exit code 0\n"), "{report}");
    assert!(report.contains("  rank 0: stopped because of rank 1\n"), "{report}");
}

#[test]
fn a_rank_that_never_joins_is_named_at_the_deadline_of_the_others() {
    let script = format!("test $RANK = 1 && exec sleep 3600; exec {RANK}");
    let (code, report) = run(&mut job(&script, "meet", 1));
    assert_eq!(code, Some(1), "{report}");
    assert!(report.starts_with("zero-run: rank 1 failed first: did not join within 1s\n"), "{report}");
    assert!(report.contains("    its process: ended by SIGTERM\n"), "{report}");
    assert!(report.contains("  rank 0: stopped because of rank 1\n"), "{report}");
}

#[test]
fn a_rank_that_falls_silent_when_the_others_have_finished_ends_the_job() {
    let mut job = job(&format!("exec {RANK}"), "wait", 1);
    let mut job = job.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(job.stdout.take().unwrap()).lines();
    let pid = lines.find_map(|line| line.unwrap().strip_prefix("[rank 1] @@").map(str::to_owned)).unwrap();
    kill_process(Pid::from_raw(pid.parse().unwrap()).unwrap(), Signal::STOP).unwrap();
    // Read on, so that it can write on.
    let reading = thread::spawn(move || lines.for_each(drop));
    let output = job.wait_with_output().unwrap();
    reading.join().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("zero-run: rank 1 failed: not heard of for 10s\n"), "{told}");
    assert!(told.contains("    its process: killed, since it did not end after SIGTERM\n"), "{told}");
    assert!(told.contains("  rank 0: exit code 0\n"), "{told}");
}

#[test]
fn a_process_that_goes_without_a_word_when_the_others_have_finished_is_no_failure() {
    let (code, report) = run(&mut job(&format!("exec {RANK}"), "vanish", 60));
    assert_eq!((code, report.as_str()), (Some(0), ""));
}

#[test]
fn a_world_of_a_launcher_is_joined_once() {
    let (code, report) = run(&mut job(&format!("exec {RANK}"), "meet twice", 60));
    assert_ne!(code, Some(0), "{report}");
    assert!(report.contains("this process has joined the world of its launcher as rank"), "{report}");
}

/// One rank of a job, where the tests above start it.
#[test]
#[ignore = "run by the other tests"]
fn a_rank() {
    let act = env::var(ACT).unwrap();
    let deadline = Duration::from_secs(env::var(DEADLINE).unwrap().parse().unwrap());
    let world = World::from_env().unwrap().expect("a launcher should have started this");
    let world = world.with_deadline(deadline);
    let work = |comm: Arc<dyn Communicator>| {
        comm.barrier("all are there").unwrap();
        if comm.rank().index() == 1 {
            match act.as_str() {
                "wait" => {
                    println!("\n@@{}", process::id());
                    loop {
                        thread::park();
                    }
                }
                "vanish" => process::exit(0),
                _ => {}
            }
        }
        Ok::<_, Infallible>(())
    };
    world.run(work).unwrap();
    if act == "meet twice" {
        world.run(work).unwrap();
    }
}
