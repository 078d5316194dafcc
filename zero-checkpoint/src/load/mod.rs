//! Loading.

mod blocks;
mod checkpoint;
mod convert;
mod deliver;
mod difference;
mod loading;
mod opened;
mod shared;
mod wanted;

pub(crate) use blocks::Segment;
pub use checkpoint::Checkpoint;
pub(crate) use checkpoint::{complete_steps, is_good};
pub(crate) use convert::{Converter, convert};
pub use difference::{Allow, Difference};
pub use wanted::{LoadOptions, LoadReport, LoadedParameter, Wanted, WantedParameter, WantedState};
