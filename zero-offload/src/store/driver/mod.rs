//! Who moves bytes between memory and a file, one attempt at a time.

mod threads;
#[cfg(target_os = "linux")]
mod uring;

use std::io;
use std::sync::Arc;

pub(crate) use threads::Threads;
#[cfg(target_os = "linux")]
pub(crate) use uring::Uring;

use crate::store::error::StoreError;
use crate::store::options::Engine;
use crate::store::span::Span;
use crate::store::transfer::Transfer;

/// One try at the rest of a transfer, or at its first `length` bytes.
pub(crate) struct Attempt {
    pub(crate) transfer: Transfer,
    pub(crate) length: usize,
}

/// Moves bytes.
pub(crate) trait Driver: Send + Sync {
    /// Begins attempts, never more at once than it was made for. Each ends exactly once, in any order, on any
    /// thread, this one included.
    fn start(&self, attempts: Vec<Attempt>);

    /// Ends its threads; nothing is in flight, and nothing comes after.
    fn stop(&self);
}

/// Learns what attempts came to: how many bytes, or the system's error.
pub(crate) trait Sink: Send + Sync {
    fn ended(&self, attempts: Vec<(Attempt, io::Result<usize>)>);
}

/// Makes the driver that `engine` asks for, and says which it is. `registered` is memory that most transfers will
/// use; it must outlive the driver, lest what comes to lie there later passes for it.
pub(crate) fn make(
    engine: Engine,
    depth: usize,
    registered: Span,
    sink: Arc<dyn Sink>,
) -> Result<(Box<dyn Driver>, Engine), StoreError> {
    if engine != Engine::Threads {
        match uring(depth, registered, &sink) {
            Ok(uring) => return Ok((uring, Engine::Uring)),
            Err(source) if engine == Engine::Uring => return Err(StoreError::NoUring { source }),
            Err(error) => tracing::info!(%error, "no io_uring here: threads do the I/O"),
        }
    }
    let threads = Threads::new(depth, sink).map_err(|source| StoreError::NoThreads { source })?;
    Ok((Box::new(threads), Engine::Threads))
}

#[cfg(target_os = "linux")]
fn uring(depth: usize, registered: Span, sink: &Arc<dyn Sink>) -> io::Result<Box<dyn Driver>> {
    Ok(Box::new(Uring::new(depth, registered, Arc::clone(sink))?))
}

#[cfg(not(target_os = "linux"))]
fn uring(_depth: usize, _registered: Span, _sink: &Arc<dyn Sink>) -> io::Result<Box<dyn Driver>> {
    Err(io::ErrorKind::Unsupported.into())
}
