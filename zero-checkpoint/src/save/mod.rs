//! Saving.

mod contents;
mod image;
mod job;
mod leftovers;
mod outcome;
mod protocol;
mod retention;
mod saver;
mod worker;
mod write;

pub use contents::{Contents, Held, SavedParameter, SavedState};
pub use outcome::Pending;
pub use protocol::Saved;
pub use retention::{Retention, prune, superfluous};
pub use saver::{OnBusy, Saver, SaverOptions};
