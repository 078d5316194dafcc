//! What is left on the disk, and what is not.

use std::env;
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};

use tempfile::TempDir;
use zero_offload::{Engine, NvmeStore};

use super::{content, entries, options};

const DIRECTORY: &str = "STORE_OF_THE_CHILD";

/// A process of its own: opens a store, says so, and stays until it is killed.
#[test]
#[ignore = "run by `what_a_killed_process_left_is_removed`"]
fn child() {
    let directory = env::var_os(DIRECTORY).unwrap();
    let store = NvmeStore::open(options(directory.as_ref(), Engine::Auto)).unwrap();
    let mut slot = store.reserve("tensor", 100_000).unwrap();
    slot.write(0, &content(100_000, 0)).unwrap();
    println!("\nopened");
    // Ends when the parent does.
    io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn what_a_killed_process_left_is_removed() {
    let directory = TempDir::new().unwrap();
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "crashes::child", "--ignored", "--nocapture"])
        .env(DIRECTORY, directory.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "opened"));

    // It lives: its files stay.
    let beside = NvmeStore::open(options(directory.path(), Engine::Auto)).unwrap();
    let of_the_child = directory.path().join("zero-offload-run-0-0");
    assert_eq!(fs::metadata(of_the_child.join("data")).unwrap().len(), 2 * 102_400);
    drop(beside);

    child.kill().unwrap();
    child.wait().unwrap();
    assert!(of_the_child.join("data").is_file());
    let next = NvmeStore::open(options(directory.path(), Engine::Auto)).unwrap();
    assert_eq!(entries(directory.path()), ["zero-offload-run-0-0"]);
    assert_eq!(next.path(), of_the_child.canonicalize().unwrap());
    assert_eq!(fs::metadata(of_the_child.join("data")).unwrap().len(), 0);
    drop(next);
    assert!(entries(directory.path()).is_empty());
}

#[test]
fn what_is_not_a_stores_is_never_touched() {
    let (directory, elsewhere) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let path = |name: &str| directory.path().join(name);
    // A file, a directory and a link that bear the names of stores; a dead store that somebody put a file into.
    fs::write(path("zero-offload-run-0-0"), "mine").unwrap();
    fs::create_dir(path("zero-offload-run-0-1")).unwrap();
    fs::write(path("zero-offload-run-0-1/data"), "mine").unwrap();
    fs::write(elsewhere.path().join("lock"), "").unwrap();
    fs::write(elsewhere.path().join("data"), "mine").unwrap();
    symlink(elsewhere.path(), path("zero-offload-run-0-2")).unwrap();
    fs::create_dir(path("zero-offload-run-0-3")).unwrap();
    fs::write(path("zero-offload-run-0-3/lock"), "1").unwrap();
    fs::write(path("zero-offload-run-0-3/data"), "tensors").unwrap();
    fs::write(path("zero-offload-run-0-3/notes"), "mine").unwrap();
    fs::create_dir(path("zero-offload-run-0-4")).unwrap();
    symlink(elsewhere.path().join("data"), path("zero-offload-run-0-4/lock")).unwrap();
    fs::create_dir(path("other")).unwrap();

    let store = NvmeStore::open(options(directory.path(), Engine::Auto)).unwrap();
    assert!(store.path().ends_with("zero-offload-run-0-5"));
    drop(store);
    assert_eq!(fs::read_to_string(path("zero-offload-run-0-0")).unwrap(), "mine");
    assert_eq!(fs::read_to_string(path("zero-offload-run-0-1/data")).unwrap(), "mine");
    assert_eq!(fs::read_to_string(path("zero-offload-run-0-2/data")).unwrap(), "mine");
    assert_eq!(entries(&path("zero-offload-run-0-3")), ["notes"]);
    assert_eq!(entries(&path("zero-offload-run-0-4")), ["lock"]);
    assert_eq!(fs::read_to_string(elsewhere.path().join("data")).unwrap(), "mine");
    assert!(path("other").is_dir());
}

#[test]
fn an_empty_directory_of_a_store_that_died_early_is_removed() {
    let directory = TempDir::new().unwrap();
    fs::create_dir(directory.path().join("zero-offload-old-3-0")).unwrap();
    let _store = NvmeStore::open(options(directory.path(), Engine::Auto)).unwrap();
    assert_eq!(entries(directory.path()), ["zero-offload-run-0-0"]);
}
