//! The flight recorder: what each rank did last, for the report on a failure.

mod begun;
mod record;
mod recorder;
mod report;

pub(crate) use begun::Begun;
pub(crate) use record::Lane;
pub use record::{FlightRecord, FlightState, GroupId};
pub(crate) use recorder::Recorder;
pub use report::FlightReport;
