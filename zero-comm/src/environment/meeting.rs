//! How the ranks of a job find each other.

use std::path::PathBuf;

use zero_core::WorldSize;

use super::claim::Claim;
use super::error::EnvironmentError;
use super::launch::{JobId, Launcher, Surroundings};
use super::slurm;
use super::variables::Variables;

/// How the ranks of a job find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Meeting {
    /// The world is of one rank.
    Alone,

    /// Somebody listens already: all ranks connect.
    Coordinator {
        /// `host:port`.
        address: String,
    },

    /// Rank 0 listens at an address that all know, the others connect.
    Bind {
        /// The host of rank 0.
        host: String,
        /// A port there, not 0.
        port: u16,
    },

    /// Rank 0 listens at a port of its own choice and tells the others the address through the store of PyTorch's
    /// launcher, which occupies `MASTER_PORT` itself. See [`TorchStore`](crate::TorchStore).
    AgentStore {
        /// The host of the store.
        host: String,
        /// Its port, not 0.
        port: u16,
        /// The key of the address.
        ///
        /// It stays the same when the launcher starts the job again: the number of restarts that each host's
        /// launcher gives its ranks is its own and may differ between them. So an address that was found may be
        /// of an earlier run; it counts once somebody answers there.
        key: String,
    },

    /// Rank 0 listens at a port of its own choice and tells the others, who are all on this host, the address
    /// through a file. See [`AddressFile`](crate::AddressFile).
    File {
        /// Its path, within a folder of the user's own.
        path: PathBuf,
    },
}

/// What `MASTER_ADDR` and `MASTER_PORT` say.
pub(super) struct Master {
    host: String,
    pub(super) port: u16,
}

impl Master {
    /// Reads both, or none.
    pub(super) fn read(variables: &Variables) -> Result<Option<Self>, EnvironmentError> {
        const NAMES: [&str; 2] = ["MASTER_ADDR", "MASTER_PORT"];
        let host = variables.get(NAMES[0]);
        let port = variables.number::<u16>(NAMES[1], PORT)?;
        match (host, port) {
            (None, None) => Ok(None),
            (Some(host), _) if !is_host(host) => {
                Err(variables.malformed(NAMES[0], "the name or address of a host"))
            }
            (_, Some(0)) => Err(variables.malformed(NAMES[1], PORT)),
            (Some(host), Some(port)) => Ok(Some(Self { host: host.to_owned(), port })),
            (None, _) => Err(variables.partial(vec![NAMES[0]])),
            (_, None) => Err(variables.partial(vec![NAMES[1]])),
        }
    }
}

/// What `ZERO_RENDEZVOUS` says.
pub(super) struct Coordinator {
    address: String,
    pub(super) port: u16,
}

impl Coordinator {
    /// Reads the variable, which is there.
    pub(super) fn read(variables: &Variables) -> Result<Self, EnvironmentError> {
        const NAME: &str = "ZERO_RENDEZVOUS";
        let address = variables.get(NAME).unwrap_or_default();
        let port = address.rsplit_once(':').and_then(|(host, port)| {
            let is_address = is_host(host) && port.bytes().all(|byte| byte.is_ascii_digit());
            port.parse().ok().filter(|port| is_address && *port != 0)
        });
        match port {
            Some(port) => Ok(Self { address: address.to_owned(), port }),
            None => Err(variables.malformed(NAME, "the address of a coordinator, host:port")),
        }
    }
}

impl Meeting {
    /// Where the ranks of `claim` meet.
    pub(super) fn of(
        variables: &Variables,
        claim: &Claim,
        master: Option<Master>,
        job: &JobId,
        surroundings: &Surroundings,
    ) -> Result<Self, EnvironmentError> {
        if claim.launcher == Launcher::Zero {
            let Coordinator { address, .. } = Coordinator::read(variables)?;
            return Ok(Self::Coordinator { address });
        }
        if claim.size == WorldSize::ONE {
            return Ok(Self::Alone);
        }
        match (claim.launcher, master) {
            (Launcher::Torchrun, Some(Master { host, port })) if agent_serves(variables)? => {
                let id = variables.text("TORCHELASTIC_RUN_ID")?.unwrap_or_default();
                Ok(Self::AgentStore { host, port, key: format!("zero-comm/{id}/address") })
            }
            (_, Some(Master { host, port })) => Ok(Self::Bind { host, port }),
            (Launcher::Slurm, None) => {
                let (host, port) = slurm::meeting_place(variables)?;
                Ok(Self::Bind { host, port })
            }
            (Launcher::OpenMpi | Launcher::Mpich | Launcher::Mvapich, None) => {
                if claim.local_size == Some(claim.size.get()) {
                    let folder = surroundings.temporary.join(format!("zero-comm-{}", surroundings.user));
                    Ok(Self::File { path: folder.join(file_name(job)) })
                } else {
                    Err(EnvironmentError::NoMeeting { launcher: claim.launcher, found: variables.found() })
                }
            }
            (Launcher::Zero | Launcher::Torchrun | Launcher::Env, None) => {
                Err(variables.partial(vec!["MASTER_ADDR", "MASTER_PORT"]))
            }
        }
    }
}

/// Whether the launcher itself listens at `MASTER_ADDR` and `MASTER_PORT`.
fn agent_serves(variables: &Variables) -> Result<bool, EnvironmentError> {
    const NAME: &str = "TORCHELASTIC_USE_AGENT_STORE";
    match variables.get(NAME) {
        Some("True") => Ok(true),
        Some("False") | None => Ok(false),
        Some(_) => Err(variables.malformed(NAME, "True or False")),
    }
}

/// Whether `text` may name a host; what it means, the network decides.
fn is_host(text: &str) -> bool {
    !text.is_empty() && !text.contains(|c: char| c.is_whitespace() || c.is_control() || c == '/')
}

/// A file name that no other job has: what is not a letter, a digit, `-` or `.` stands as its code.
fn file_name(job: &JobId) -> String {
    let mut name = String::new();
    for byte in job.as_str().bytes() {
        if byte.is_ascii_alphanumeric() || b"-.".contains(&byte) {
            name.push(char::from(byte));
        } else {
            name.push_str(&format!("%{byte:02x}"));
        }
    }
    name + ".address"
}

const PORT: &str = "a port, 1 to 65535";
