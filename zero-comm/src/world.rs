//! A world of ranks, whatever they are.

use std::fmt::{Debug, Display};
use std::sync::Arc;
use std::time::Duration;

use zero_core::{Rank, WorldSize};

use crate::environment::{EnvironmentError, Launch};
use crate::{Communicator, LocalWorld, ProcessWorld, WorldError};

/// A world of ranks: threads of this process, or processes of which this is one.
///
/// ```
/// use zero_comm::{CommError, CommunicatorExt, ReduceOp, World};
/// use zero_core::WorldSize;
///
/// // Started by a launcher, this process is one rank of its world; else it makes four threads.
/// let world = World::from_env_or_local(WorldSize::new(4).unwrap())?;
/// let size = world.size().get() as i32;
/// let sums = world.run(|comm| comm.all_reduce_value(1, ReduceOp::Sum, "ranks"))?;
/// assert!(sums.iter().all(|sum| *sum == size));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum World {
    /// Ranks are threads of this process.
    Local(LocalWorld),
    /// This process is one rank.
    Process(Box<ProcessWorld>),
}

impl World {
    /// The world that a launcher made this process a rank of: `zero-run`, `torchrun`, `srun`, or the `mpirun`
    /// of Open MPI, MPICH and their like. `None` if no launcher started this process.
    ///
    /// `ZERO_SHARED_MEMORY=off` keeps the ranks of a host from sharing memory; they then talk over TCP.
    ///
    /// # Errors
    ///
    /// [`EnvironmentError`] if the variables of launchers are incomplete, malformed or contradictory; it lists
    /// what was found.
    pub fn from_env() -> Result<Option<Self>, EnvironmentError> {
        let Some(launch) = Launch::from_env()? else { return Ok(None) };
        Ok(Some(Self::Process(Box::new(ProcessWorld::from_launch(&launch)))))
    }

    /// As [`from_env`](Self::from_env); without a launcher, `size` threads of this process.
    ///
    /// # Errors
    ///
    /// As [`from_env`](Self::from_env).
    pub fn from_env_or_local(size: WorldSize) -> Result<Self, EnvironmentError> {
        Ok(Self::from_env()?.unwrap_or_else(|| Self::Local(LocalWorld::new(size))))
    }

    /// The number of ranks.
    pub const fn size(&self) -> WorldSize {
        match self {
            Self::Local(world) => world.size(),
            Self::Process(world) => world.size(),
        }
    }

    /// The rank that this process is; `None` if it is all of them.
    pub const fn rank(&self) -> Option<Rank> {
        match self {
            Self::Local(_) => None,
            Self::Process(world) => Some(world.rank()),
        }
    }

    /// The same world, in which an operation waits for other ranks no longer than `deadline`.
    #[must_use]
    pub fn with_deadline(self, deadline: Duration) -> Self {
        match self {
            Self::Local(world) => Self::Local(world.with_deadline(deadline)),
            Self::Process(world) => Self::Process(Box::new(world.with_deadline(deadline))),
        }
    }

    /// Runs `f` once for each rank that lives in this process, and returns what they return, in rank order.
    ///
    /// # Errors
    ///
    /// [`WorldError`]; see [`LocalWorld::run`] and [`ProcessWorld::run`].
    pub fn run<T, E, F>(&self, f: F) -> Result<Vec<T>, WorldError<E>>
    where
        T: Send,
        E: Display + Debug + Send,
        F: Fn(Arc<dyn Communicator>) -> Result<T, E> + Sync,
    {
        match self {
            Self::Local(world) => world.run(f),
            Self::Process(world) => Ok(vec![world.run(f)?]),
        }
    }
}
