//! What a launcher told this process, and how the address of rank 0 reaches the others.
//!
//! [`Launch::from_env`] reads the variables of one launcher out of the many that may be set at once, and says
//! where the ranks meet ([`Meeting`]). [`TorchStore`] and [`AddressFile`] carry rank 0's address where no
//! launcher does. Nothing here opens a connection between ranks.

mod address_file;
mod claim;
mod error;
mod launch;
mod meeting;
mod node_list;
mod search;
mod slurm;
mod torch_store;
mod variables;

pub use address_file::{AddressFile, AddressFileError};
pub use error::{EnvironmentError, FoundVariables};
#[cfg(feature = "mpi")]
pub(crate) use launch::shared_memory_from_env;
pub use launch::{JobId, Launch, Launcher, Surroundings};
pub use meeting::Meeting;
pub use node_list::{NodeListError, expand_node_list};
pub use torch_store::{TorchStore, TorchStoreError};
