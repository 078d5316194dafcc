//! What ends the ranks and all they have started if this program is killed.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};

use rustix::process::Pid;

/// Each line it reads tells of a group that has come (`+`) or gone (`-`), as `kill` wants it. What is there when
/// no more can come is killed, and the job's folder, its name, removed.
const SCRIPT: &str = r#"
trap '' HUP INT QUIT TERM
alive=' '
while read -r sign group; do
    case $sign in
    +) alive="$alive$group " ;;
    -) alive="${alive%%" $group "*} ${alive#*" $group "}" ;;
    esac
done
[ -z "${alive%% }" ] || kill -KILL $alive
rm -rf -- "$0"
"#;

/// A process that waits for the end of this one, in a group of its own.
///
/// The kernel would kill the ranks too, but not what they have started.
#[derive(Debug)]
pub(crate) struct Guard {
    process: Child,
    input: Option<ChildStdin>,
    /// The groups it knows.
    groups: BTreeSet<i32>,
}

impl Guard {
    /// Starts it; it removes `folder` in the end.
    pub(crate) fn start(folder: &Path) -> io::Result<Self> {
        let mut process = Command::new("sh")
            .args(["-c", SCRIPT])
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        let input = process.stdin.take();
        Ok(Self { process, input, groups: BTreeSet::new() })
    }

    /// Says which groups there are to be killed, all of them.
    pub(crate) fn watch(&mut self, groups: impl Iterator<Item = Pid>) {
        let groups: BTreeSet<i32> = groups.map(|group| group.as_raw_nonzero().get()).collect();
        let come = groups.difference(&self.groups).map(|group| format!("+ -{group}\n"));
        let gone = self.groups.difference(&groups).map(|group| format!("- -{group}\n"));
        let text: String = come.chain(gone).collect();
        if let Some(input) = &mut self.input {
            // Should somebody have killed it, the job is no worse than without.
            let _ = input.write_all(text.as_bytes());
        }
        self.groups = groups;
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.input = None;
        let _ = self.process.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::{Child, Command};

    use rustix::process::Pid;

    use super::Guard;
    use crate::launcher::process;

    fn group() -> (Child, Pid) {
        let mut command = Command::new("sleep");
        process::as_group(command.arg("1000"));
        let child = command.spawn().unwrap();
        let group = Pid::from_child(&child);
        (child, group)
    }

    #[test]
    fn what_is_there_at_the_end_is_killed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap().keep();
        let mut guard = Guard::start(&folder).unwrap();
        let mut ranks: Vec<_> = (0..4).map(|_| group()).collect();
        for count in 1..=4 {
            guard.watch(ranks[..count].iter().map(|(_, group)| *group));
        }
        guard.watch([0, 2].map(|rank| ranks[rank].1).into_iter());
        drop(guard);
        assert!(!fs::exists(&folder).unwrap());
        for rank in [0, 2] {
            assert!(!ranks[rank].0.wait().unwrap().success());
        }
        for rank in [1, 3] {
            assert_eq!(ranks[rank].0.try_wait().unwrap(), None);
            ranks[rank].0.kill().unwrap();
            ranks[rank].0.wait().unwrap();
        }
    }

    #[test]
    fn without_groups_only_the_folder_is_removed() {
        let folder = tempfile::tempdir().unwrap().keep();
        drop(Guard::start(&folder).unwrap());
        assert!(!fs::exists(&folder).unwrap());
    }
}
