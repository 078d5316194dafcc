//! What a launcher told this process.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use zero_core::{Rank, WorldSize};

use super::claim::{self, Claim, INDEX};
use super::error::EnvironmentError;
use super::meeting::{Coordinator, Master, Meeting};
use super::slurm;
use super::variables::Variables;
use crate::{Token, TokenError};

/// What a launcher told this process: who it is, and where it meets the others.
///
/// # Which launcher
///
/// Launchers are nested: `torchrun` under `srun`, `mpirun` in the shell of `salloc`. A process then finds the
/// variables of all of them, and the innermost launcher knows its rank. So:
///
/// 1. `ZERO_RENDEZVOUS`: our own launcher, and nothing else is looked at.
/// 2. `TORCHELASTIC_RUN_ID`: `torchrun`, likewise.
/// 3. `RANK` and `WORLD_SIZE` without either: set by hand or by a launcher that follows PyTorch. Under `srun`
///    they may differ from Slurm's if `MASTER_ADDR` and `MASTER_PORT` are set too; in all other cases they have
///    to agree with what MPI and Slurm say.
/// 4. `PMI_*` (MPICH, Intel MPI, Cray MPI), `OMPI_*`, `MV2_*`; if several are there, they have to agree.
/// 5. The task of a Slurm job step. The batch script of `sbatch` and the shell of `salloc` are no tasks though
///    they have variables of one: a process started there is refused if the allocation is for several tasks
///    ([`EnvironmentError::NotATask`]), and is on its own if it is for one. The shell that `srun --pty` opens is
///    a task, in almost all cases the only one of its step.
///
/// Of what is read, nothing may be missing, contradict itself or be malformed: the error lists what was found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Launch {
    /// This process's rank.
    pub rank: Rank,
    /// How many ranks there are.
    pub world_size: WorldSize,
    /// The rank among those on this host: the number of the device to use.
    pub local_rank: usize,
    /// How many ranks are on this host, if the launcher tells.
    pub local_world_size: Option<usize>,
    /// Who told.
    pub launcher: Launcher,
    /// How the ranks find each other.
    pub meeting: Meeting,
    /// The job, alike on all its ranks.
    pub job: JobId,
    /// What proves to other ranks that a process belongs to the job, from `ZERO_JOB_TOKEN`.
    pub token: Option<Token>,
    /// Whether the ranks of a host may share memory, which `ZERO_SHARED_MEMORY` says: `on` or `off`; by default they
    /// may.
    pub shared_memory: bool,
    /// How often the job was started again, as far as this process knows. `torchrun` counts per host, and only
    /// what failed there: ranks of one world may have different counts.
    pub restart: u32,
}

/// Who started this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// The launcher of this project.
    Zero,
    /// PyTorch's `torchrun`.
    Torchrun,
    /// Somebody who set `RANK`, `WORLD_SIZE` and their like.
    Env,
    /// `srun`.
    Slurm,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `mpiexec` of MPICH, Intel MPI and others that speak PMI.
    Mpich,
    /// `mpirun_rsh` of MVAPICH.
    Mvapich,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Zero => "the launcher of ZeRO",
            Self::Torchrun => "torchrun",
            Self::Env => "whoever set RANK and WORLD_SIZE",
            Self::Slurm => "srun",
            Self::OpenMpi => "mpirun of Open MPI",
            Self::Mpich => "mpiexec of MPICH or its like",
            Self::Mvapich => "mpirun_rsh of MVAPICH",
        })
    }
}

/// What tells a job from others that run on the same hosts. Equal on all ranks.
///
/// It is made of what the launcher says: the ids of a Slurm job, its step and its restart, the namespace of an
/// `mpirun`, the run id of a `torchrun`. Launchers without ids are told apart by the port they meet at, or on
/// one host by the process that started the ranks. Jobs one after the other may have the same.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct JobId(String);

impl JobId {
    /// The id as text, any text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What no variable tells about a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Surroundings {
    /// The user it runs as.
    pub user: u32,
    /// The id of the process that started it.
    pub parent: u32,
    /// Where temporary files go.
    pub temporary: PathBuf,
}

impl Surroundings {
    /// Those of this process.
    pub fn current() -> Self {
        Self {
            user: rustix::process::geteuid().as_raw(),
            parent: std::os::unix::process::parent_id(),
            temporary: env::temp_dir(),
        }
    }
}

impl Launch {
    /// What a launcher told this process; `None` if none started it.
    ///
    /// # Errors
    ///
    /// [`EnvironmentError`], as the type says.
    pub fn from_env() -> Result<Option<Self>, EnvironmentError> {
        Self::detect(|name| env::var_os(name), &Surroundings::current())
    }

    /// [`from_env`](Self::from_env) for any set of variables, which `lookup` finds by name.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn detect(
        lookup: impl Fn(&str) -> Option<OsString>,
        surroundings: &Surroundings,
    ) -> Result<Option<Self>, EnvironmentError> {
        let variables = Variables::read(lookup)?;
        let (token, shared_memory) = (token(&variables)?, shared_memory(&variables)?);
        let Some(claim) = claim::decide(&variables)? else { return Ok(None) };
        let local_rank = match claim.local_rank {
            Some(local_rank) => local_rank,
            None if claim.size == WorldSize::ONE => 0,
            None => return Err(variables.partial(vec![claim.names[2]])),
        };
        let master = Master::read(&variables)?;
        let job = job(&variables, &claim, master.as_ref(), surroundings)?;
        Ok(Some(Self {
            rank: claim.rank,
            world_size: claim.size,
            local_rank,
            local_world_size: claim.local_size,
            launcher: claim.launcher,
            meeting: Meeting::of(&variables, &claim, master, &job, surroundings)?,
            job,
            token,
            shared_memory,
            restart: restart(&variables, claim.launcher)?,
        }))
    }
}

fn token(variables: &Variables) -> Result<Option<Token>, EnvironmentError> {
    const NAME: &str = "ZERO_JOB_TOKEN";
    let Some(text) = variables.text(NAME)? else { return Ok(None) };
    let malformed = |error: TokenError| {
        variables.malformed(NAME, format!("a secret that all ranks of the job share: {error}"))
    };
    text.parse().map(Some).map_err(malformed)
}

fn shared_memory(variables: &Variables) -> Result<bool, EnvironmentError> {
    match variables.get(SHARED_MEMORY) {
        None | Some("on") => Ok(true),
        Some("off") => Ok(false),
        Some(_) => Err(variables.malformed(SHARED_MEMORY, "on or off")),
    }
}

const SHARED_MEMORY: &str = "ZERO_SHARED_MEMORY";

/// What [`Launch::shared_memory`] is, whoever started this process.
#[cfg(feature = "mpi")]
pub(crate) fn shared_memory_from_env() -> Result<bool, EnvironmentError> {
    let lookup = |name: &str| env::var_os(name).filter(|_| name == SHARED_MEMORY);
    shared_memory(&Variables::read(lookup)?)
}

fn restart(variables: &Variables, launcher: Launcher) -> Result<u32, EnvironmentError> {
    let name = match launcher {
        Launcher::Zero => "ZERO_RESTART_COUNT",
        Launcher::Torchrun => "TORCHELASTIC_RESTART_COUNT",
        Launcher::Slurm => return slurm::restart(variables),
        Launcher::Env | Launcher::OpenMpi | Launcher::Mpich | Launcher::Mvapich => return Ok(0),
    };
    Ok(variables.number(name, INDEX)?.unwrap_or_default())
}

fn job(
    variables: &Variables,
    claim: &Claim,
    master: Option<&Master>,
    surroundings: &Surroundings,
) -> Result<JobId, EnvironmentError> {
    // Only the port: ranks may know the host by different names.
    let port = master.map(|master| master.port);
    let id = match claim.launcher {
        Launcher::Zero => {
            let restart = restart(variables, Launcher::Zero)?;
            Some(format!("zero-{}.{restart}", Coordinator::read(variables)?.port))
        }
        // Static rendezvous gives all runs the id `none`.
        Launcher::Torchrun => {
            variables.text("TORCHELASTIC_RUN_ID")?.map(|id| format!("{id}-{}", port.unwrap_or_default()))
        }
        Launcher::Slurm => Some(slurm::job(variables)?),
        Launcher::OpenMpi => variables.text("PMIX_NAMESPACE")?.map(str::to_owned),
        Launcher::Mpich => {
            let name = variables.first(&["I_MPI_HYDRA_UUID", "PALS_APID"]);
            name.map(|name| variables.text(name)).transpose()?.flatten().map(str::to_owned)
        }
        Launcher::Env | Launcher::Mvapich => None,
    };
    Ok(JobId(id.unwrap_or_else(|| match port {
        Some(port) => format!("port-{port}"),
        None => format!("parent-{}", surroundings.parent),
    })))
}
