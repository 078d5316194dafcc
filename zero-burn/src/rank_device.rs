//! A rank's way to its device, and how it waits for it.

use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn_cubecl::tensor::CubeTensor;
use cubecl::future::block_on;
use zero_comm::{CommError, Communicator, CommunicatorExt, OpKind};
use zero_core::{DType, Rank};

use crate::arena::Port;
use crate::cube;
use crate::device_bucket::Written;
use crate::host::tensor_dtype;

/// The longest that one who waits does not look whether the world has failed.
pub(crate) const SLICE: Duration = Duration::from_millis(20);

/// A rank's device, and the ranks that wait if it does not do its part.
#[derive(Debug)]
pub(crate) struct RankDevice {
    pub(crate) comm: Arc<dyn Communicator>,
    pub(crate) port: Port,
}

impl RankDevice {
    /// Waits until the device has done what this thread gave it to do, `written` included.
    pub(crate) fn settle(&self, written: &[&CubeTensor], label: &str) -> Result<(), CommError> {
        let written = written.iter().map(|tensor| &tensor.handle);
        self.wait(self.port.client.sync_buffers(written), label)
    }

    /// Waits for the device, whose failure is the world's. It waits for no other device, so this ends.
    pub(crate) fn wait(&self, written: Written, label: &str) -> Result<(), CommError> {
        block_on(written).map_err(|error| self.fail(label, error))
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
            self.comm.check(OpKind::Read, label)?;
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

    /// Eight bytes, by which others find out whether they read what this rank has.
    pub(crate) fn sign(&self, sign: u64) -> CubeTensor {
        let (client, device) = (self.port.client.clone(), self.port.device.clone());
        let handle = client.create_from_slice(&sign.to_le_bytes());
        CubeTensor::new_contiguous(client, device, [2].into(), handle, tensor_dtype(DType::F32))
    }

    /// Makes sure that the sign of `rank` was read as what it is.
    pub(crate) fn compare(
        &self,
        rank: Rank,
        sign: u64,
        read: &CubeTensor,
        label: &str,
    ) -> Result<(), CommError> {
        let mut bytes = [0; _];
        cube::read(read, 0, "reading from another device", &mut bytes)
            .map_err(|error| self.fail(label, error))?;
        let read = u64::from_le_bytes(bytes);
        if read == sign {
            return Ok(());
        }
        let reason = format!(
            "memory of the device of {rank} reads as {read:#x}, not {sign:#x}: devices do not reach each other as the driver \
             says; set device_transport to false"
        );
        Err(self.fail(label, reason))
    }

    /// A tensor whose content is unspecified.
    pub(crate) fn empty(&self, numel: usize, dtype: DType, label: &str) -> Result<CubeTensor, CommError> {
        let room = self.port.room(numel, dtype).map_err(|error| self.fail(label, error))?;
        Ok(self.port.tensor_of(&room))
    }

    /// Ends the world with what is wrong with this rank's device.
    pub(crate) fn fail(&self, label: &str, reason: impl Display) -> CommError {
        self.comm.give_up(OpKind::Read, label, &format!("{:?}: {reason}", self.port.device))
    }
}
