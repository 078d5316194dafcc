//! A rank's way to its device, and how it waits for it.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use burn_cubecl::tensor::CubeTensor;
use cubecl::future::block_on;
use zero_comm::{CommError, Communicator, OpKind, WindowKey};
#[cfg(feature = "cuda")]
use zero_core::DType;
use zero_core::Rank;

use crate::agreement::give_up;
use crate::arena::Port;
use crate::device_bucket::Written;

/// The longest that one who waits does not look whether the world has failed.
pub(crate) const SLICE: Duration = Duration::from_millis(20);

/// A window that nobody shows: to read it shows whether the world has failed.
const SIGN_OF_LIFE: WindowKey = WindowKey::new(u64::MAX);

/// A rank's device, and the ranks that wait if it does not do its part.
#[derive(Debug)]
pub(crate) struct RankDevice {
    pub(crate) comm: Arc<dyn Communicator>,
    pub(crate) port: Port,
    /// Whether the device waits for nobody else's: then every wait for it ends by itself.
    pub(crate) is_alone: bool,
}

impl RankDevice {
    /// Waits until the device has done what this thread gave it to do, `written` included.
    pub(crate) fn settle(&self, written: &[&CubeTensor], label: &str) -> Result<(), CommError> {
        let written = written.iter().map(|tensor| &tensor.handle);
        self.wait(self.port.client.sync_buffers(written), label)
    }

    /// Waits for the device, no longer than the deadline or until the world fails: its failure is the world's.
    pub(crate) fn wait(&self, written: Written, label: &str) -> Result<(), CommError> {
        let waited = match self.is_alone {
            true => block_on(written).map_err(|error| Waited::Failed(error.to_string())),
            false => wait(&*self.comm, written, label),
        };
        waited.map_err(|waited| match waited {
            Waited::World(error) => error,
            Waited::Failed(reason) => self.fail(label, reason),
        })
    }

    /// Looks again and again whether `rank` has done something, until the deadline or the world fails. Whoever looks in vain
    /// pauses before it returns.
    pub(crate) fn until<T>(
        &self,
        rank: Rank,
        label: &str,
        mut look: impl FnMut() -> Result<Option<T>, CommError>,
    ) -> Result<T, CommError> {
        let begin = Instant::now();
        loop {
            check(&*self.comm, label)?;
            if let Some(seen) = look()? {
                return Ok(seen);
            }
            if begin.elapsed() >= self.comm.deadline() {
                let (operation, label) = (OpKind::Read, label.to_owned());
                let after = self.comm.deadline();
                return Err(CommError::Timeout { operation, label, after, missing: vec![rank] });
            }
        }
    }

    /// A tensor whose content is unspecified.
    #[cfg(feature = "cuda")]
    pub(crate) fn empty(&self, numel: usize, dtype: DType, label: &str) -> Result<CubeTensor, CommError> {
        let room = self.port.room(numel, dtype).map_err(|error| self.fail(label, error))?;
        Ok(self.port.tensor_of(&room))
    }

    /// Ends the world with what is wrong with this rank's device.
    pub(crate) fn fail(&self, label: &str, reason: impl Display) -> CommError {
        give_up(&*self.comm, OpKind::Read, label, format!("{:?}: {reason}", self.port.device))
    }
}

/// Why a wait ended that was in vain.
#[derive(Debug)]
enum Waited {
    World(CommError),
    Failed(String),
}

/// Waits in a thread of its own. Where another device never sends, there is no end; then the thread stays behind.
fn wait(comm: &dyn Communicator, written: Written, label: &str) -> Result<(), Waited> {
    let (begin, (sender, receiver)) = (Instant::now(), mpsc::channel());
    let waiting = thread::Builder::new().name(String::from("device")).spawn(move || {
        drop(sender.send(block_on(written)));
    });
    waiting.map_err(|error| Waited::Failed(error.to_string()))?;
    loop {
        match receiver.recv_timeout(SLICE) {
            Ok(written) => return written.map_err(|error| Waited::Failed(error.to_string())),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Waited::Failed(String::from("waiting for it panicked")));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        check(comm, label).map_err(Waited::World)?;
        if begin.elapsed() >= comm.deadline() {
            return Err(Waited::Failed(format!("not done within {:?}", comm.deadline())));
        }
    }
}

/// The failure of the world, if it failed.
fn check(comm: &dyn Communicator, label: &str) -> Result<(), CommError> {
    match comm.read(comm.rank(), SIGN_OF_LIFE, 0, &mut [], label) {
        Err(CommError::WindowMissing { .. }) => Ok(()),
        checked => checked,
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use zero_comm::LocalWorld;
    use zero_core::WorldSize;

    use super::*;

    /// What each of two ranks waits for, and what comes of it.
    fn waits(written: impl Fn(usize) -> Written + Sync, aborts: bool) -> Vec<String> {
        let world = LocalWorld::new(WorldSize::new(2).unwrap()).with_deadline(Duration::from_millis(300));
        let waited = world.run(|comm| {
            let rank = comm.rank().index();
            if aborts && rank == 1 {
                comm.abort("no more");
                return Ok(String::new());
            }
            Ok::<_, CommError>(format!("{:?}", wait(&*comm, written(rank), "a wait")))
        });
        waited.unwrap_or_else(|error| vec![error.to_string()])
    }

    #[test]
    fn a_wait_ends_with_what_is_waited_for_at_the_deadline_or_with_the_world() {
        assert_eq!(waits(|_| Box::pin(ready(Ok(()))), false), ["Ok(())", "Ok(())"]);
        for waited in waits(|_| Box::pin(pending()), false) {
            assert!(waited.contains("not done within 300ms"), "{waited}");
        }
        for waited in waits(|_| Box::pin(async { panic!("a device is lost") }), false) {
            assert!(waited.contains("panicked"), "{waited}");
        }
        let waited = waits(|_| Box::pin(pending()), true).concat();
        assert!(waited.contains("no more"), "{waited}");
    }
}
