//! A world of processes, of which this one is one rank.

use std::fmt::{Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process;
use std::sync::Arc;
use std::time::Duration;

use zero_core::{Rank, WorldSize};

use super::communicator::ProcessCommunicator;
use super::connect_error::ConnectError;
use super::fabric::Fabric;
use super::group::{Group, Surroundings};
use super::host_id::host_id;
use super::meet::{Met, Seeker};
use super::presence::Presence;
use super::shm::SharedFile;
use super::standing::Standing;
use super::wait::{Operation, Wait};
use crate::control::{Agent, Coordinator, Hello, Roster, Token};
#[cfg(feature = "mpi")]
use crate::environment::shared_memory_from_env;
use crate::environment::{Launch, Meeting};
use crate::failure::Failure;
use crate::flight::GroupId;
use crate::last_words::{Kind, LastWords};
#[cfg(feature = "mpi")]
use crate::mpi::MpiFabric;
use crate::tcp::{TcpFabric, Unstarted};
use crate::{Communicator, LocalWorld, LossCause, OpKind, RankFailure, WorldError, panic_message};

/// A world of processes, of which this one is one rank.
///
/// Ranks of one host exchange data through memory that they share, ranks of different hosts through TCP. Both
/// may be so in one world: what all ranks of a host need then crosses the network once.
///
/// The value describes the world. [`run`](Self::run) and [`connect`](Self::connect) join it and return the
/// errors of that; a world can be joined once.
#[derive(Clone, Debug)]
pub struct ProcessWorld {
    rank: Rank,
    size: WorldSize,
    meeting: Meeting,
    job: String,
    token: Option<Token>,
    deadline: Duration,
    host: Option<String>,
    build: String,
    #[cfg(feature = "mpi")]
    mpi: Option<Arc<MpiFabric>>,
}

const LISTEN: &str = "listen for the other ranks";
const SHARE_MEMORY: &str = "share memory with the ranks of this host";

/// What to do where memory cannot be shared.
pub(super) const WITHOUT_SHARED_MEMORY: &str =
    "; set ZERO_SHARED_MEMORY=off, or call `without_shared_memory`, to have them talk over TCP";

/// What a rank keeps as long as others may need it.
#[derive(Debug)]
pub(crate) struct Backstage {
    pub(super) fabric: Arc<dyn Fabric>,
    #[expect(dead_code, reason = "serves until it is dropped")]
    agent: Agent,
    #[expect(dead_code, reason = "serves until it is dropped")]
    coordinator: Option<Coordinator>,
}

impl ProcessWorld {
    /// The most ranks that there can be: more are taken for a typing error.
    pub const MAX_RANKS: usize = 65_536;

    /// Rank `rank` of `size`, which meets the others as `meeting` says.
    pub fn new(rank: Rank, size: WorldSize, meeting: Meeting) -> Self {
        Self {
            rank,
            size,
            meeting,
            job: String::new(),
            token: None,
            deadline: LocalWorld::DEFAULT_DEADLINE,
            host: host_id(),
            build: format!("zero-comm {} {}", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH),
            #[cfg(feature = "mpi")]
            mpi: None,
        }
    }

    /// The rank that a launcher made of this process.
    pub fn from_launch(launch: &Launch) -> Self {
        let world = Self::new(launch.rank, launch.world_size, launch.meeting.clone());
        let world = if launch.shared_memory { world } else { world.without_shared_memory() };
        Self { job: launch.job.as_str().to_owned(), token: launch.token.clone(), ..world }
    }

    /// The rank that this process is of an MPI job, whose hosts reach each other over MPI (feature `mpi`). Starts
    /// MPI, unless the program has, and waits up to `deadline` for all ranks.
    ///
    /// Where the ranks meet, rank 0 tells over MPI: at an address of its host's name, or of the loopback interface
    /// if the launcher says that all ranks are on one host. MPI is ended by [`run`](Self::run), if all ranks are
    /// well and it was started here.
    ///
    /// # Errors
    ///
    /// [`ConnectError::Mpi`]; [`ConnectError::Environment`] if `ZERO_SHARED_MEMORY` is neither `on` nor `off`.
    #[cfg(feature = "mpi")]
    pub fn over_mpi(deadline: Duration) -> Result<Self, ConnectError> {
        let shares = shared_memory_from_env()?;
        let mpi = Arc::new(MpiFabric::start(deadline)?);
        if let Ok(Some(launch)) = Launch::from_env() {
            mpi.check_place(launch.rank, launch.world_size)?;
        }
        let world = Self::new(mpi.rank(), mpi.size(), Meeting::Alone);
        let world = if shares { world } else { world.without_shared_memory() };
        Ok(Self { mpi: Some(mpi), deadline, ..world })
    }

    /// The same world, whose ranks prove to each other that they know `token`.
    ///
    /// Without it, rank 0 makes one and passes it on where the launcher offers a way; else the job's name has
    /// to do, which keeps out what comes by accident.
    #[must_use]
    pub fn with_token(self, token: Token) -> Self {
        Self { token: Some(token), ..self }
    }

    /// The same world, in which joining it and its operations wait for other ranks no longer than `deadline`.
    #[must_use]
    pub fn with_deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// The same world, in which this rank shares memory with those of the same `host`, and only with those.
    ///
    /// By default the ranks that can share memory do. Telling apart ranks that could makes them talk over TCP.
    #[must_use]
    pub fn with_host(self, host: impl Into<String>) -> Self {
        Self { host: Some(host.into()), ..self }
    }

    /// The same world, in which this rank shares memory with nobody. Launchers have `ZERO_SHARED_MEMORY=off` do it.
    #[must_use]
    pub fn without_shared_memory(self) -> Self {
        Self { host: None, ..self }
    }

    /// The same world; ranks whose `build` differs are refused. The version of this crate is part of it anyway.
    #[must_use]
    pub fn with_build(self, build: &str) -> Self {
        Self { build: format!("{} {build}", self.build), ..self }
    }

    /// This process's rank.
    pub const fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks there are.
    pub const fn size(&self) -> WorldSize {
        self.size
    }

    /// Joins the world, and returns when all its ranks have.
    ///
    /// The rank has finished when the communicator, and all it made by [`split`](Communicator::split), are
    /// dropped. Windows can be read after that for as long as the process lives, so a process should not end
    /// before the others are done with them: [`run`](Self::run) sees to that.
    ///
    /// # Errors
    ///
    /// [`ConnectError`].
    pub fn connect(&self) -> Result<Arc<dyn Communicator>, ConnectError> {
        Ok(self.join()?.0)
    }

    /// Joins the world, runs `f`, and returns what it returns, when all ranks have come to their end.
    ///
    /// # Errors
    ///
    /// [`WorldError::Connect`] if the world did not come about. If `f` returns an error or panics, that is
    /// returned as this rank's, and all other ranks' operations fail at once and name it.
    pub fn run<T, E, F>(&self, f: F) -> Result<T, WorldError<E>>
    where
        E: Display + Debug,
        F: FnOnce(Arc<dyn Communicator>) -> Result<T, E>,
    {
        let (communicator, presence) = self.join().map_err(|source| {
            let because_of = source.blamed().filter(|rank| *rank != self.rank);
            self.leave_words(Kind::Error, &source.to_string(), because_of);
            WorldError::Connect { rank: self.rank, source: Box::new(source) }
        })?;
        let standing = Arc::clone(presence.standing());
        let failure = match catch_unwind(AssertUnwindSafe(|| f(communicator))) {
            Ok(Ok(value)) => {
                standing.finish();
                standing.linger();
                self.end(&presence, standing.failure().is_none());
                return Ok(value);
            }
            Ok(Err(error)) => RankFailure::Error(error),
            Err(payload) => RankFailure::Panic(panic_message(payload.as_ref())),
        };
        let (kind, message, cause) = match &failure {
            RankFailure::Error(error) => {
                let message = format!("{error:#}");
                (Kind::Error, message.clone(), LossCause::Failed(message))
            }
            RankFailure::Panic(message) => {
                (Kind::Panic, message.clone(), LossCause::Panicked(message.clone()))
            }
        };
        let first = standing.fail(Failure::Lost { rank: self.rank, cause });
        let because_of = first.blamed().filter(|rank| *rank != self.rank);
        self.end(&presence, false);
        self.leave_words(kind, &message, because_of);
        Err(WorldError::from_one(self.rank, failure))
    }

    fn end(&self, presence: &Presence, healthy: bool) {
        if let Some(fabric) = presence.fabric() {
            fabric.end(healthy, self.deadline);
        }
    }

    fn leave_words(&self, kind: Kind, message: &str, because_of: Option<Rank>) {
        LastWords::new(self.rank, kind, message, because_of).leave();
    }

    fn join(&self) -> Result<(Arc<dyn Communicator>, Arc<Presence>), ConnectError> {
        if self.size.get() > Self::MAX_RANKS {
            return Err(ConnectError::TooManyRanks { size: self.size });
        }
        let seeker = Seeker {
            rank: self.rank,
            size: self.size,
            token: self.token.clone(),
            job: self.job.clone(),
            patience: self.deadline,
        };
        let Met { connection, coordinator, told } = self.meet(&seeker)?;
        let door = TcpFabric::bind(connection.local_ip()?).map_err(ConnectError::system(LISTEN, ""))?;
        let file = match &self.host {
            None => None,
            Some(_) => {
                let file = SharedFile::create();
                Some(file.map_err(ConnectError::system(SHARE_MEMORY, WITHOUT_SHARED_MEMORY))?)
            }
        };
        let hello = Hello {
            rank: self.rank,
            size: self.size,
            build: self.build.clone(),
            // Nobody has the name of a host for itself.
            host: self.host.clone().unwrap_or_else(|| format!("rank {}", self.rank.index())),
            data: Some(door.address()),
            segment: file.as_ref().map(SharedFile::path),
            pid: process::id(),
            deadline: self.deadline,
        };
        let token = connection.token().clone();
        let (agent, roster) = connection.join(hello, self.deadline)?;
        // All have found the coordinator.
        drop(told);
        let standing = Arc::clone(agent.standing());
        let entered = self.enter(&standing, &roster, door, file, token);
        let (fabric, group) = entered.map_err(|error| {
            let cause = LossCause::Failed(error.to_string());
            let first = standing.fail(Failure::Lost { rank: self.rank, cause });
            // What this rank sees may be the consequence of what another has met with.
            match first.blamed() {
                Some(rank) if rank != self.rank => first.error(OpKind::Join, "").into(),
                _ => error,
            }
        })?;
        let presence = Arc::new(Presence::new(standing, Backstage { fabric, agent, coordinator }));
        let communicator = ProcessCommunicator::new(Arc::clone(&presence), group, self.deadline);
        Ok((Arc::new(communicator), presence))
    }

    /// Connects with the other ranks, all of which have joined.
    fn enter(
        &self,
        standing: &Arc<Standing>,
        roster: &Roster,
        door: Unstarted,
        file: Option<SharedFile>,
        token: Token,
    ) -> Result<(Arc<dyn Fabric>, Arc<Group>), ConnectError> {
        let addresses = roster.hellos.iter().map(|hello| hello.data).collect();
        let fabric: Arc<dyn Fabric> = door
            .start(Arc::clone(standing), addresses, token)
            .map(Arc::new)
            .map_err(ConnectError::system(LISTEN, ""))?;
        #[cfg(feature = "mpi")]
        let fabric = match &self.mpi {
            Some(mpi) => Arc::clone(mpi) as Arc<dyn Fabric>,
            None => fabric,
        };
        standing.attach(&fabric);
        let around = Arc::new(Surroundings {
            standing: Arc::clone(standing),
            fabric: Arc::clone(&fabric),
            hosts: hosts(roster),
        });
        let operation = Operation { kind: OpKind::Join, label: "", sequence: 0, expected: &[] };
        let mut wait = Wait::new(standing, operation, self.deadline);
        let file = self.shared_file(&around, roster, file)?;
        let members = self.size.ranks().collect();
        let group = Group::form(&around, GroupId::WORLD, members, self.rank.index(), file, &mut wait)?;
        if !standing.start(self.deadline) {
            wait.check(Vec::new)?;
        }
        Ok((fabric, group))
    }

    fn meet(&self, seeker: &Seeker) -> Result<Met, ConnectError> {
        #[cfg(feature = "mpi")]
        if let Some(mpi) = &self.mpi {
            return seeker.meet_over(mpi);
        }
        seeker.meet(&self.meeting)
    }

    /// The memory of this host: that of its first rank.
    fn shared_file(
        &self,
        around: &Surroundings,
        roster: &Roster,
        own: Option<SharedFile>,
    ) -> Result<Option<SharedFile>, ConnectError> {
        let host = around.hosts[self.rank.index()];
        let first = around.hosts.iter().position(|other| *other == host).unwrap_or(self.rank.index());
        if first == self.rank.index() {
            return Ok(own);
        }
        let Some(path) = &roster.hellos[first].segment else { return Ok(own) };
        let opened = SharedFile::open(path);
        Ok(Some(opened.map_err(ConnectError::system(SHARE_MEMORY, WITHOUT_SHARED_MEMORY))?))
    }
}

/// By rank: the number of its host.
fn hosts(roster: &Roster) -> Vec<usize> {
    let mut names: Vec<&str> = Vec::new();
    let mut number = |name| {
        names.iter().position(|known| *known == name).unwrap_or_else(|| {
            names.push(name);
            names.len() - 1
        })
    };
    roster.hellos.iter().map(|hello| number(hello.host.as_str())).collect()
}
