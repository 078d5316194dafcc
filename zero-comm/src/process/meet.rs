//! How a rank finds the coordinator of its world.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use zero_core::{Rank, WorldSize};

use super::connect_error::ConnectError;
use crate::control::{Connection, Coordinator, CoordinatorOptions, JoinError, Token};
#[cfg(feature = "mpi")]
use crate::environment::Launch;
use crate::environment::{AddressFile, Meeting, TorchStore};
#[cfg(feature = "mpi")]
use crate::mpi::MpiFabric;
use crate::{network, open_files};

/// How long rank 0 waits for an answer of the coordinator that it hosts before it looks whether there will be one.
const OWN_CALL: Duration = Duration::from_millis(500);

/// A rank's line to the coordinator.
#[derive(Debug)]
pub(crate) struct Met {
    pub(crate) connection: Connection,
    pub(crate) coordinator: Option<Coordinator>,
    /// Where this rank has told the address; removed when dropped.
    pub(crate) told: Option<AddressFile>,
}

/// Who looks for the coordinator.
#[derive(Debug)]
pub(crate) struct Seeker {
    pub(crate) rank: Rank,
    pub(crate) size: WorldSize,
    pub(crate) token: Option<Token>,
    /// The job's name, of which a token is made if there is none.
    pub(crate) job: String,
    pub(crate) patience: Duration,
}

impl Seeker {
    /// Finds the coordinator, or becomes its host if this is rank 0 and nobody else is.
    pub(crate) fn meet(&self, meeting: &Meeting) -> Result<Met, ConnectError> {
        let start = Instant::now();
        let left = || self.patience.saturating_sub(start.elapsed());
        match meeting {
            Meeting::Alone => self.host(IpAddr::V4(Ipv4Addr::LOCALHOST), 0, self.own_token()?),
            Meeting::Coordinator { address } => self.call(address, self.token(meeting), left()),
            Meeting::Bind { host, port } if self.rank == Rank::ROOT => {
                self.host(resolve(host, *port, left())?[0].ip(), *port, self.token(meeting))
            }
            Meeting::Bind { host, port } => self.call(&format!("{host}:{port}"), self.token(meeting), left()),
            Meeting::AgentStore { host, port, key } => {
                let mut store = TorchStore::connect(host, *port, self.patience)?;
                if self.rank != Rank::ROOT {
                    return Ok(store.find(key, |told, patience| self.call_told(told, patience))?);
                }
                let own = network::own_address_towards(&resolve(host, *port, left())?)
                    .map_err(|source| ConnectError::Route { host: host.clone(), source })?;
                let met = self.host(own, 0, self.own_token()?)?;
                store.set(key, met.tell()?.as_bytes())?;
                Ok(met)
            }
            Meeting::File { path } if self.rank == Rank::ROOT => {
                let mut met = self.host(IpAddr::V4(Ipv4Addr::LOCALHOST), 0, self.own_token()?)?;
                met.told = Some(AddressFile::publish(path, &met.tell()?)?);
                Ok(met)
            }
            Meeting::File { path } => {
                Ok(AddressFile::find(path, self.patience, |told, patience| self.call_told(told, patience))?)
            }
        }
    }

    /// Has rank 0 host the coordinator and tell the others over MPI.
    #[cfg(feature = "mpi")]
    pub(crate) fn meet_over(&self, mpi: &MpiFabric) -> Result<Met, ConnectError> {
        if self.rank != Rank::ROOT {
            return self.call_told(&mpi.broadcast_text(None, self.patience)?, self.patience);
        }
        let launch = Launch::from_env().ok().flatten();
        let together = launch.and_then(|launch| launch.local_world_size) == Some(self.size.get());
        let interface = if together || self.size == WorldSize::ONE {
            IpAddr::V4(Ipv4Addr::LOCALHOST)
        } else {
            let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
            let addresses = network::resolve(&format!("{host}:0"), self.patience);
            addresses.map_err(|source| ConnectError::OwnName { host, source })?[0].ip()
        };
        let met = self.host(interface, 0, self.own_token()?)?;
        mpi.broadcast_text(Some(&met.tell()?), self.patience)?;
        Ok(met)
    }

    /// Hosts the coordinator at `port` of `interface`.
    fn host(&self, interface: IpAddr, port: u16, token: Token) -> Result<Met, ConnectError> {
        let bind = |source| {
            if open_files::are_exhausted(&source) {
                return ConnectError::system("listen for the other ranks", "")(source);
            }
            ConnectError::Bind { address: SocketAddr::new(interface, port), source }
        };
        let listener = TcpListener::bind((interface, port)).map_err(bind)?;
        let options = CoordinatorOptions {
            size: self.size,
            token: token.clone(),
            deadline: self.patience,
            host: Some(Rank::ROOT),
        };
        let coordinator = Coordinator::new(listener, options).map_err(bind)?;
        let (address, start) = (coordinator.address().to_string(), Instant::now());
        let connection = loop {
            let left = self.patience.saturating_sub(start.elapsed());
            match Connection::connect(&address, &token, left.min(OWN_CALL)) {
                // It may have no file left to answer with.
                Err(JoinError::Unreachable { source, .. }) => match coordinator.refusal() {
                    Some(refusal) => return Err(JoinError::from(refusal).into()),
                    None if left <= OWN_CALL => {
                        return Err(JoinError::Unreachable { address, after: self.patience, source }.into());
                    }
                    None => {}
                },
                outcome => break outcome?,
            }
        };
        Ok(Met { connection, coordinator: Some(coordinator), told: None })
    }

    fn call(&self, address: &str, token: Token, patience: Duration) -> Result<Met, ConnectError> {
        let connection = Connection::connect(address, &token, patience)?;
        Ok(Met { connection, coordinator: None, told: None })
    }

    /// Calls at what [`Met::tell`] told.
    fn call_told(&self, told: &str, patience: Duration) -> Result<Met, ConnectError> {
        let (address, token) = told.split_once(' ').ok_or_else(|| ConnectError::Told(told.to_owned()))?;
        let token = match &self.token {
            Some(token) => token.clone(),
            None => token.parse().map_err(|_| ConnectError::Told(told.to_owned()))?,
        };
        self.call(address, token, patience)
    }

    /// The token that all ranks have been given, or can make.
    fn token(&self, meeting: &Meeting) -> Token {
        self.token.clone().unwrap_or_else(|| {
            tracing::warn!(
                ?meeting,
                "no ZERO_JOB_TOKEN is set: whoever knows the job's name can join its ranks"
            );
            Token::of_job(&self.job)
        })
    }

    /// The token of a world whose other ranks are told it.
    fn own_token(&self) -> Result<Token, ConnectError> {
        self.token.clone().map_or_else(|| Token::generate().map_err(ConnectError::Random), Ok)
    }
}

impl Met {
    /// What the other ranks have to know: the address, and the token unless they have it anyway.
    fn tell(&self) -> Result<String, ConnectError> {
        let (address, token) = self
            .coordinator
            .as_ref()
            .map(|host| (host.address(), host.token()))
            .ok_or_else(|| ConnectError::Told("nothing".to_owned()))?;
        Ok(format!("{address} {}", token.to_hex()))
    }
}

/// The addresses of `host`.
fn resolve(host: &str, port: u16, limit: Duration) -> Result<Vec<SocketAddr>, ConnectError> {
    network::resolve(&format!("{host}:{port}"), limit)
        .map_err(|source| ConnectError::Resolve { host: host.to_owned(), source })
}
