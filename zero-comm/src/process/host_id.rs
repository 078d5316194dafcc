//! Which ranks can share memory.

use std::fs;

/// A text that is equal for two processes if, and only if, one can open what the other has in `/proc`: those
/// of one boot of one kernel, one space of process ids and one user.
///
/// `None` where that cannot be told, or does not exist.
pub(crate) fn host_id() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let processes = fs::read_link("/proc/self/ns/pid").ok()?;
    let user = rustix::process::geteuid().as_raw();
    Some(format!("{} {} {user}", boot.trim(), processes.display()))
}
