//! Loading.

mod blocks;
mod checkpoint;
mod convert;
mod deliver;
mod difference;
mod loading;
mod shared;
mod wanted;

pub use checkpoint::Checkpoint;
pub(crate) use checkpoint::{complete_steps, is_good};
pub use difference::{Allow, Difference};
pub use wanted::{LoadOptions, LoadReport, LoadedParameter, Wanted, WantedParameter, WantedState};
