//! Processes and their groups. The only file of this program with unsafe code.

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use rustix::process::{self, Pid, Signal, WaitId, WaitIdOptions};

/// The name of this machine.
pub(crate) fn machine_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Makes the processes that our ranks leave behind ours, so that we can see them end: not everywhere does
/// somebody else take care of orphans.
pub(crate) fn adopt_orphans() {
    // Without it, a group of which only unburied processes are left looks alive and ends with a delay.
    let _ = process::set_child_subreaper(Some(process::getpid()));
}

/// Prepares `command` to be started as the leader of a process group of its own, with piped output, and to
/// be killed when the thread that starts it ends: that must be one that lives as long as this process.
pub(crate) fn as_group(command: &mut Command) {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let parent = process::getpid();
    let die_with_parent = move || {
        process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // If the parent has died before the line above, nothing will come.
        if process::getppid() == Some(parent) {
            Ok(())
        } else {
            Err(io::Error::from_raw_os_error(libc::ESRCH))
        }
    };
    // SAFETY: between fork and exec the closure makes two system calls and reads its own copy of a number;
    // it neither allocates nor locks.
    unsafe { command.pre_exec(die_with_parent) };
}

/// Sends `signal` to all processes of a group. That there are none any more is no problem of the sender.
pub(crate) fn signal_group(group: Pid, signal: Signal) {
    let _ = process::kill_process_group(group, signal);
}

/// Whether a group has processes. Its leader must have been waited for.
pub(crate) fn group_is_alive(group: Pid) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    while let Ok(Some(_)) = process::waitid(WaitId::Pgid(Some(group)), options) {}
    // Anything but "no such group" means that there is something that may not be ours to signal.
    process::test_kill_process_group(group) != Err(rustix::io::Errno::SRCH)
}

/// Waits until a child has ended, and leaves it to be waited for.
pub(crate) fn wait_for_end(child: Pid) {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while matches!(process::waitid(WaitId::Pid(child), options), Err(rustix::io::Errno::INTR)) {}
}

/// Whether this process was started to ignore `signal`, as `nohup` does with SIGHUP.
pub(crate) fn is_ignored(signal: i32) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action the call changes nothing and writes the present one to `action`, which is
    // as large as it has to be; all zeros, which it stays if the call fails, is a valid value too.
    let action = unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
        action.assume_init()
    };
    action.sa_sigaction == libc::SIG_IGN
}
