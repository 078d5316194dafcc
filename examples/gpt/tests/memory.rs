//! What a disk keeps is not in memory.

#![cfg(target_os = "linux")]

mod common;

use std::process::Command;

use common::folder;
use serde_json::Value;

/// The most memory that a run of the main job held at once, in bytes.
#[expect(clippy::zombie_processes, reason = "`wait4` waits for it")]
fn peak(folder: &tempfile::TempDir, flags: &[&str]) -> u64 {
    let all = ["--config", "large.toml", "--corpus", "text.txt"];
    let child =
        Command::new(env!("CARGO_BIN_EXE_gpt")).current_dir(folder).args(all).args(flags).spawn().unwrap();
    let pid = child.id() as libc::pid_t;
    let (mut status, mut usage) = (0, std::mem::MaybeUninit::<libc::rusage>::zeroed());
    // SAFETY: both pointers are valid, and the child, of this process, has not been waited for.
    let waited = unsafe { libc::wait4(pid, &raw mut status, 0, usage.as_mut_ptr()) };
    assert_eq!((waited, status), (pid, 0), "{flags:?}");
    // SAFETY: it was zeroed, and written by the call.
    let usage = unsafe { usage.assume_init() };
    usage.ru_maxrss as u64 * 1024
}

fn json(line: &str) -> Value {
    serde_json::from_str(line).unwrap()
}

/// Parameters of the model.
const PARAMETERS: u64 = 19_200_000;
const BUDGET: u64 = 14 << 20;
// Two moments of f32.
const _: () = assert!(8 * PARAMETERS >= 10 * BUDGET);
/// Activations, the program itself, and what the allocator keeps.
const CONSTANT: u64 = 48 << 20;

/// The peak of a run in `precision` on one rank with these kinds of state on a disk.
fn peak_on_disk(precision: &str, kinds: &[&str]) -> u64 {
    let folder = folder();
    let model = "[model]\ncontext = 8\ndim = 512\nheads = 4\nlayers = 6\n";
    let train = "[train]\nranks = 1\nsteps = 2\nbatch = 1\nheld_out_rows = 1\nsample = 1\n";
    let offload = format!("[zero.offload]\nbuffer_bytes = {BUDGET}\nblock_bytes = 65536\n");
    std::fs::write(folder.path().join("large.toml"), format!("{model}{train}{offload}")).unwrap();
    let disk = folder.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let places = kinds.iter().map(|kind| format!("--offload={kind}=nvme:{}", disk.display()));
    let places: Vec<_> = places.collect();
    let flags = ["--precision", precision].into_iter().chain(places.iter().map(String::as_str));
    peak(&folder, &flags.collect::<Vec<_>>())
}

/// Asserts that a run holds what is not on a disk, so many bytes for each parameter, the buffers and a constant.
fn check(peak: u64, in_memory: u64) {
    let expected = in_memory * PARAMETERS + BUDGET + CONSTANT;
    assert!(peak <= expected, "{peak} bytes, at most {expected}");
}

#[test]
fn activations_that_are_computed_again_take_memory_for_one_block() {
    let folder = folder();
    let model = "[model]\ncontext = 384\ndim = 64\nheads = 4\nlayers = 12\n";
    let train = "[train]\nranks = 1\nsteps = 2\nbatch = 1\nheld_out_rows = 1\nsample = 1\n";
    std::fs::write(folder.path().join("large.toml"), format!("{model}{train}")).unwrap();
    let [kept, again] = [&["--metrics", "kept"][..], &["--metrics", "again", "--recompute"]]
        .map(|flags| peak(&folder, flags));
    // Of a block in backward two things of so many scores at least, and of twelve blocks one.
    let scores = 4 * 384 * 384 * 4;
    assert!(kept > again + 10 * scores, "{kept} and {again} bytes");
    let metrics = |name: &str| {
        let lines = std::fs::read_to_string(folder.path().join(name)).unwrap();
        let of = |line: &str| ["loss", "grad_norm"].map(|key| json(line)[key].as_f64().unwrap());
        lines.lines().map(of).collect::<Vec<_>>()
    };
    assert_eq!(metrics("kept"), metrics("again"));
}

#[test]
fn optimizer_state_on_a_disk_takes_its_buffers_in_memory_and_no_more() {
    // Shards, and gradients, whose memory takes what a step that may fail makes of the shards.
    check(peak_on_disk("f32", &["optimizer"]), 4 + 4);
}

#[test]
fn master_weights_on_a_disk_take_the_same_buffers() {
    // Shards of 16 bits, as they were and as they will be, and gradients.
    check(peak_on_disk("bf16", &["optimizer", "parameters"]), 2 + 2 + 4);
}
