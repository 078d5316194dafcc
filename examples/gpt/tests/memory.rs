//! What a disk keeps is not in memory.

#![cfg(target_os = "linux")]

mod common;

use std::process::Command;

use common::folder;

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

#[test]
fn optimizer_state_on_a_disk_takes_its_buffers_in_memory_and_no_more() {
    let folder = folder();
    let model = "[model]\ncontext = 8\ndim = 512\nheads = 4\nlayers = 6\n";
    let train = "[train]\nranks = 1\nsteps = 2\nbatch = 1\nheld_out_rows = 1\nsample = 1\n";
    let budget: u64 = 14 << 20;
    let offload = format!("[zero.offload]\nbuffer_bytes = {budget}\nblock_bytes = 65536\n");
    std::fs::write(folder.path().join("large.toml"), format!("{model}{train}{offload}")).unwrap();
    let disk = folder.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let place = format!("optimizer=nvme:{}", disk.display());

    // Two moments of f32 for each of 19 million parameters.
    let state = 8 * 19_000_000_u64;
    assert!(state >= 10 * budget);
    let in_memory = peak(&folder, &[]);
    let on_disk = peak(&folder, &["--offload", &place]);
    // A step that may fail keeps the old parameters, 4 bytes each, until it has not; the rest is a constant.
    let constant = 24 << 20;
    let expected = in_memory - state + budget + state / 2 + constant;
    assert!(on_disk <= expected, "{on_disk} bytes, {in_memory} with the state in memory; at most {expected}");
}
