//! Whether the kernel was out of memory.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// How many processes the kernel has killed to get memory back, as far as the system counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kills {
    /// In the memory group that this process and the ranks here belong to.
    group: Option<u64>,
    /// On this machine.
    machine: Option<u64>,
}

/// That the kernel has killed somebody, who may have been the rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutOfMemory {
    /// Somebody in the rank's memory group.
    Group,
    /// Somebody on its machine.
    Machine,
}

impl Kills {
    /// The counts of now.
    pub(crate) fn now() -> Self {
        Self::read(Path::new("/"))
    }

    /// The counts of a system whose files are below `root`.
    fn read(root: &Path) -> Self {
        let count = |path: &Path| {
            let text = fs::read_to_string(path).ok()?;
            text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
        };
        let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
        let group = groups.lines().find_map(|line| count(&root.join(file_of_group(line)?)));
        Self { group, machine: count(&root.join("proc/vmstat")) }
    }

    /// What has happened since `earlier`.
    pub(crate) fn since(self, earlier: Self) -> Option<OutOfMemory> {
        if self.group > earlier.group {
            Some(OutOfMemory::Group)
        } else {
            (self.machine > earlier.machine).then_some(OutOfMemory::Machine)
        }
    }
}

/// The file with the counts of a group, from its line in `/proc/self/cgroup`: `ID:CONTROLLERS:/PATH`. In the
/// second version of groups there are no controllers.
fn file_of_group(line: &str) -> Option<PathBuf> {
    let (_, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(":/")?;
    let folder = Path::new("sys/fs/cgroup");
    match controllers {
        "" => Some(folder.join(path).join("memory.events")),
        "memory" => Some(folder.join("memory").join(path).join("memory.oom_control")),
        _ => None,
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Group => "the kernel ran out of the memory of this job's group and killed a process of it",
            Self::Machine => "the kernel ran out of memory on this machine and killed a process",
        })?;
        f.write_str(", most likely this rank: give it less to hold, or more memory")
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{Kills, OutOfMemory};

    fn kills(files: &[(&str, &str)]) -> Kills {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Kills::read(root.path())
    }

    #[test]
    fn kills_are_counted_in_both_versions_of_groups_and_on_the_machine() {
        let second = kills(&[
            ("proc/self/cgroup", "0::/job/7\n"),
            ("sys/fs/cgroup/job/7/memory.events", "low 0\noom 4\noom_kill 3\noom_group_kill 9\n"),
            ("proc/vmstat", "pgfault 1\noom_kill 5\n"),
        ]);
        assert_eq!(second, Kills { group: Some(3), machine: Some(5) });
        let first = kills(&[
            ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n"),
            ("sys/fs/cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
        ]);
        assert_eq!(first, Kills { group: Some(2), machine: None });
        assert_eq!(kills(&[("proc/vmstat", "nothing")]), Kills::default());
    }

    #[test]
    fn the_nearest_count_that_has_grown_tells() {
        let before = Kills { group: Some(1), machine: Some(1) };
        assert_eq!(before.since(before), None);
        assert_eq!(Kills { group: Some(2), machine: Some(2) }.since(before), Some(OutOfMemory::Group));
        assert_eq!(Kills { group: Some(1), machine: Some(2) }.since(before), Some(OutOfMemory::Machine));
    }
}
