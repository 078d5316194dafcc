//! Who this process is, according to one set of variables, and which set is right where several are there.

use zero_core::{Rank, WorldSize};

use super::error::EnvironmentError;
use super::launch::Launcher;
use super::slurm;
use super::variables::Variables;
use crate::ProcessWorld;

/// How one launcher names its variables. Where there are several names, the first that is set counts.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static [&'static str],
    local_size: &'static [&'static str],
}

/// PyTorch's names, which its own launcher sets, ours too, and users by hand.
const NAMED: Names = Names {
    launcher: Launcher::Env,
    rank: "RANK",
    size: "WORLD_SIZE",
    local_rank: &["LOCAL_RANK"],
    local_size: &["LOCAL_WORLD_SIZE"],
};

/// Set by `mpiexec` of MPICH and what is made of it, for each process anew.
const HYDRA_LOCAL_RANK: &str = "MPI_LOCALRANKID";

/// The launchers of MPI, in the order in which they are asked.
const MPI: [Names; 3] = [
    Names {
        launcher: Launcher::Mpich,
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: &[HYDRA_LOCAL_RANK, "PMI_LOCAL_RANK"],
        local_size: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
    },
    Names {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
    },
    Names {
        launcher: Launcher::Mvapich,
        rank: "MV2_COMM_WORLD_RANK",
        size: "MV2_COMM_WORLD_SIZE",
        local_rank: &["MV2_COMM_WORLD_LOCAL_RANK"],
        local_size: &["MV2_COMM_WORLD_LOCAL_SIZE"],
    },
];

/// Variables that mean nothing without those of a rank.
const COMPANIONS: [&str; 5] =
    ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "PMIX_RANK"];

/// Who this process is, according to one set of variables.
#[derive(Clone, Copy)]
pub(super) struct Claim {
    pub(super) launcher: Launcher,
    pub(super) rank: Rank,
    pub(super) size: WorldSize,
    pub(super) local_rank: Option<usize>,
    pub(super) local_size: Option<usize>,
    /// The variables that tell rank, size and local rank.
    pub(super) names: [&'static str; 3],
}

/// Finds the set of variables that tells who this process is; `None` if there is none.
///
/// The inner launcher wins over the one it was started by: what [`Launch`](super::Launch) says about nested
/// launchers is decided here.
pub(super) fn decide(variables: &Variables) -> Result<Option<Claim>, EnvironmentError> {
    let named = Claim::read(variables, &NAMED)?;
    let inner = [("ZERO_RENDEZVOUS", Launcher::Zero), ("TORCHELASTIC_RUN_ID", Launcher::Torchrun)];
    if let Some((_, launcher)) = inner.into_iter().find(|(mark, _)| variables.has(mark)) {
        // Whatever else is there describes the launcher, of which there may be one per host, and not the rank.
        let named = named.ok_or_else(|| variables.partial(vec!["RANK", "WORLD_SIZE", "LOCAL_RANK"]))?;
        return Ok(Some(Claim { launcher, ..named }));
    }
    match (named, specific(variables)?) {
        (Some(named), Some(specific)) => {
            let told_where = variables.has("MASTER_ADDR") && variables.has("MASTER_PORT");
            if specific.launcher == Launcher::Slurm && told_where {
                // A launcher that srun started, one per host.
                return Ok(Some(named));
            }
            named.must_agree(&specific, variables)?;
            Ok(Some(Claim { launcher: specific.launcher, ..named.completed_by(&specific) }))
        }
        (None, None) => nobody(variables),
        (named, specific) => Ok(named.or(specific)),
    }
}

/// What MPI and Slurm say.
fn specific(variables: &Variables) -> Result<Option<Claim>, EnvironmentError> {
    let mut mpi: Option<Claim> = None;
    for names in &MPI {
        let Some(claim) = Claim::read(variables, names)? else { continue };
        mpi = match mpi {
            Some(first) => {
                first.must_agree(&claim, variables)?;
                Some(first.completed_by(&claim))
            }
            None => Some(claim),
        };
    }
    // With the mark of an mpiexec, Slurm at most started mpiexec or its helpers, and describes those. Without it,
    // the variables of PMI come from Slurm itself (`srun --mpi=...`).
    match mpi {
        Some(mpi) if mpi.launcher != Launcher::Mpich || variables.has(HYDRA_LOCAL_RANK) => Ok(Some(mpi)),
        mpi => match (mpi, slurm::step(variables)?) {
            (Some(mpi), Some(step)) => {
                mpi.must_agree(&step, variables)?;
                Ok(Some(step))
            }
            (mpi, step) => Ok(mpi.or(step)),
        },
    }
}

/// Nothing tells a rank. That is an error if something hints at one.
fn nobody(variables: &Variables) -> Result<Option<Claim>, EnvironmentError> {
    if let Some(tasks) = slurm::tasks_of_allocation(variables)? {
        if tasks > 1 {
            return Err(EnvironmentError::NotATask { tasks, found: variables.found() });
        }
    }
    if let Some(missing) = slurm::missing_of_task(variables) {
        return Err(variables.partial(missing));
    }
    match variables.first(&COMPANIONS) {
        Some(_) => Err(variables.partial(vec!["RANK", "WORLD_SIZE", "LOCAL_RANK"])),
        None => Ok(None),
    }
}

impl Claim {
    /// Reads one launcher's set of variables; `None` if it is not there.
    fn read(variables: &Variables, names: &Names) -> Result<Option<Self>, EnvironmentError> {
        let local_rank = variables.first(names.local_rank);
        let local_size = variables.first(names.local_size);
        // The local variables of MPI also come alone, from Slurm's own support of it.
        let local = names.launcher == Launcher::Env && (local_rank.is_some() || local_size.is_some());
        if !(local || variables.has(names.rank) || variables.has(names.size)) {
            return Ok(None);
        }
        Self::checked(
            variables,
            names.launcher,
            [names.rank, names.size, local_rank.unwrap_or(names.local_rank[0])],
            match local_size {
                Some(name) => variables.number(name, COUNT)?.map(|size| (name, size)),
                None => None,
            },
        )
        .map(Some)
    }

    /// What the variables `rank`, `size` and `local_rank` tell, if it makes sense with itself and with the local
    /// size, which comes with the name of its variable.
    pub(super) fn checked(
        variables: &Variables,
        launcher: Launcher,
        names: [&'static str; 3],
        local_size: Option<(&'static str, usize)>,
    ) -> Result<Self, EnvironmentError> {
        let (Some(rank), Some(size)) =
            (variables.number(names[0], INDEX)?, variables.number::<usize>(names[1], COUNT)?)
        else {
            let missing = names[..2].iter().copied().filter(|name| !variables.has(name)).collect();
            return Err(variables.partial(missing));
        };
        let world = WorldSize::new(size).ok_or_else(|| variables.malformed(names[1], COUNT))?;
        if size > ProcessWorld::MAX_RANKS {
            let expected = format!("a number of ranks, 1 to {}", ProcessWorld::MAX_RANKS);
            return Err(variables.malformed(names[1], expected));
        }
        let local_rank = variables.number(names[2], INDEX)?;
        let within = |part: (&str, usize), whole: (&str, usize)| {
            if part.1 < whole.1 {
                return Ok(());
            }
            let conflict = format!(
                "{}={} must be less than {}={}, ranks count from 0",
                part.0, part.1, whole.0, whole.1
            );
            Err(variables.contradiction(conflict))
        };
        within((names[0], rank), (names[1], size))?;
        if let Some(local_rank) = local_rank {
            within((names[2], local_rank), local_size.unwrap_or((names[1], size)))?;
        }
        if let Some((name, count)) = local_size {
            if count == 0 || count > size {
                let conflict = format!("of {}={size} ranks, {name} counts {count} on this host", names[1]);
                return Err(variables.contradiction(conflict));
            }
        }
        Ok(Self {
            launcher,
            rank: Rank::new(rank),
            size: world,
            local_rank,
            local_size: local_size.map(|(_, size)| size),
            names,
        })
    }

    /// An error if the other set tells another rank or size.
    fn must_agree(&self, other: &Self, variables: &Variables) -> Result<(), EnvironmentError> {
        if (self.rank, self.size) == (other.rank, other.size) {
            return Ok(());
        }
        let told = |claim: &Self| {
            let [rank, size, _] = claim.names;
            format!("{rank}={} and {size}={}", claim.rank.index(), claim.size)
        };
        Err(variables.contradiction(format!("{}, but {}", told(self), told(other))))
    }

    /// This claim, and what only the other tells about the host.
    fn completed_by(self, other: &Self) -> Self {
        Self {
            local_rank: self.local_rank.or(other.local_rank),
            local_size: self.local_size.or(other.local_size),
            ..self
        }
    }
}

/// What a rank has to look like.
pub(super) const INDEX: &str = "a number counted from 0";

/// What a number of ranks has to look like.
pub(super) const COUNT: &str = "a number of ranks, at least 1";
