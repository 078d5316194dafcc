//! Why the environment does not say who this process is.

use std::fmt;

use super::launch::Launcher;

/// Why the environment does not say who this process is. Each error lists the variables that were found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentError {
    /// A variable has a value that means nothing.
    #[error("{name}={value} is not {expected}; set it right or unset it; found: {found}")]
    Malformed {
        /// The variable.
        name: &'static str,
        /// Its value, quoted, or a placeholder if it is a secret.
        value: String,
        /// What it has to be.
        expected: String,
        /// All that was found.
        found: FoundVariables,
    },

    /// Some variables of a launcher are there and others, which it always sets, are not.
    #[error(
        "the environment names a rank in part only: {} missing; start the program with a launcher (torchrun, \
         srun, mpirun), set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or unset what is there; \
         found: {found}",
        Listed(missing)
    )]
    Partial {
        /// What is not there.
        missing: Vec<&'static str>,
        /// All that was found.
        found: FoundVariables,
    },

    /// Two variables cannot both be right.
    #[error(
        "the environment contradicts itself: {conflict}; unset the variables that were left over from another \
         launcher; found: {found}"
    )]
    Contradiction {
        /// What contradicts what.
        conflict: String,
        /// All that was found.
        found: FoundVariables,
    },

    /// Ranks are on several hosts, as far as can be seen, and nothing says at which address they meet.
    #[error(
        "{launcher} started ranks that are not known to be on one host, and does not say where they meet; \
         export MASTER_ADDR (a name or address of the host of rank 0) and MASTER_PORT (a free port there); \
         found: {found}"
    )]
    NoMeeting {
        /// Who started this process.
        launcher: Launcher,
        /// All that was found.
        found: FoundVariables,
    },

    /// The process stands in a Slurm allocation of several tasks, but `srun` did not start it: the batch script
    /// or the shell of `salloc` did, once.
    #[error(
        "Slurm allocated {tasks} tasks, but this process is none of them: it was not started by srun; start the \
         program with `srun`, or unset SLURM_NTASKS to run it alone; found: {found}"
    )]
    NotATask {
        /// How many tasks the allocation is for.
        tasks: usize,
        /// All that was found.
        found: FoundVariables,
    },
}

/// Variables and their values, in an error. Secrets are not kept, and long values are cut.
#[derive(Clone, PartialEq, Eq)]
pub struct FoundVariables(pub(super) Vec<(&'static str, String)>);

impl fmt::Display for FoundVariables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("nothing");
        }
        for (position, (name, value)) in self.0.iter().enumerate() {
            write!(f, "{}{name}={value}", if position == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

impl fmt::Debug for FoundVariables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

struct Listed<'a>(&'a [&'static str]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.0.join(", "), if self.0.len() == 1 { "is" } else { "are" })
    }
}
