//! Optimizers that update a shard in one pass over host memory.

use std::panic::resume_unwind;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

use serde_json::{Map, Value};
use zero_core::{DType, ParameterIndex, Tier};
use zero_offload::{HostOptimizer, OptimizerConfig};

use crate::ZeroError;
#[cfg(feature = "cube")]
use crate::device_update;
use crate::fused_state::FusedState;
use crate::fused_update::FusedUpdate;
use crate::rule::{Finished, Host, Job, Rule};

/// An optimizer for shards in host memory: one pass scales the gradient, decays, updates moments and parameter, and writes
/// what layers compute with. Several times as fast as Burn's own on the CPU, in less memory.
///
/// Where nobody else holds a shard's memory it is updated in place. The threads are those of the rank's share of the host's
/// cores.
///
/// ```
/// use burn::{nn::LinearConfig, tensor::{Device, Tensor}};
/// use zero_burn::{Adam, Fused, LocalWorld, WorldSize, Zero, ZeroConfig, ZeroError};
///
/// # LocalWorld::new(WorldSize::ONE).run(|comm| -> Result<(), ZeroError> {
/// let zero = Zero::new(ZeroConfig::default(), &comm, Device::default())?;
/// let mut model = zero.shard(|device| LinearConfig::new(8, 4).init(device))?;
/// let mut optimizer = zero.optimizer(Fused::new(Adam { beta2: 0.95, ..Adam::ADAMW })?)?;
/// zero.backward(model.forward(Tensor::<2>::ones([2, 8], zero.device())).mean())?;
/// optimizer.step(1e-3, &mut model)?;
/// # Ok(())
/// # }).unwrap();
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fused(pub(crate) HostOptimizer);

impl Fused {
    /// The optimizer with the hyper-parameters of [`Adam`](crate::Adam) (and AdamW), [`Adagrad`](crate::Adagrad),
    /// [`Lion`](crate::Lion) or [`Sgd`](crate::Sgd).
    ///
    /// # Errors
    ///
    /// [`ZeroError::HyperParameter`].
    pub fn new(config: impl Into<OptimizerConfig>) -> Result<Self, ZeroError> {
        HostOptimizer::new(config).map(Self).map_err(|error| ZeroError::HyperParameter(Arc::new(error)))
    }

    /// The hyper-parameters.
    pub fn config(&self) -> &OptimizerConfig {
        self.0.config()
    }
}

impl Rule for Fused {
    type State = FusedState;
    type Prepared = Preparation;

    fn check(&self, Host(engine): Host<'_>) -> Result<(), ZeroError> {
        engine.workers().map(drop)
    }

    fn begin(
        &self,
        Host(engine): Host<'_>,
        parameter: ParameterIndex,
    ) -> Result<Option<FusedState>, ZeroError> {
        let is_disk = engine.offload().optimizer.tier == Tier::Nvme;
        let wanted = is_disk && engine.parameter(parameter).trainable();
        wanted.then(|| FusedState::new(&self.0, engine, parameter)).transpose()
    }

    fn hyper_parameters(&self) -> Map<String, Value> {
        match serde_json::to_value(self.config()) {
            Ok(Value::Object(fields)) => fields,
            _ => Map::new(),
        }
    }

    fn tensors(&self, Host(engine): Host<'_>) -> Result<Vec<(String, DType)>, ZeroError> {
        let dtype = engine.config.precision.optimizer_state;
        Ok(self.0.states().iter().map(|state| (state.name.to_owned(), dtype)).collect())
    }

    fn blank(
        &self,
        Host(engine): Host<'_>,
        parameter: ParameterIndex,
        old: Option<FusedState>,
        _: Option<&Map<String, Value>>,
    ) -> Result<FusedState, ZeroError> {
        // What is on a device is not written to by pieces.
        let old = old.filter(FusedState::is_in_memory);
        old.map_or_else(|| FusedState::new(&self.0, engine, parameter), Ok)
    }

    fn takes_rate(&self, lr: f64) -> bool {
        // Updates are in `f32`.
        (lr as f32).is_finite() && lr >= 0.0
    }

    fn prepare(job: Job<Self>, is_beside: bool) -> Self::Prepared {
        #[cfg(feature = "cube")]
        if let Some(port) = job.engine.updating_port().cloned() {
            return Self::Prepared::Done(Box::new(device_update::update(job, port)));
        }
        if !is_beside {
            return Self::Prepared::Here(Box::new(FusedUpdate::prepare(job, false)));
        }
        let name = format!("zero update {}", job.engine.comm.rank().index());
        let (give, take) = mpsc::sync_channel(1);
        let run = move || {
            if let Ok(job) = take.recv() {
                return Some(FusedUpdate::prepare(job, true));
            }
            None
        };
        match thread::Builder::new().name(name).spawn(run) {
            Ok(thread) => {
                // The thread waits for nothing else.
                drop(give.send(job));
                Self::Prepared::Coming(Beside(Some(thread)))
            }
            // Without a thread it takes longer, no more.
            Err(_) => Self::Prepared::Here(Box::new(FusedUpdate::prepare(job, true))),
        }
    }

    fn finish(prepared: Self::Prepared) -> Finished<Self> {
        match prepared {
            #[cfg(feature = "cube")]
            Preparation::Done(finished) => *finished,
            Preparation::Here(update) => update.finish(),
            Preparation::Coming(mut beside) => match beside.0.take().map(JoinHandle::join) {
                Some(Ok(Some(update))) => update.finish(),
                Some(Err(panic)) => resume_unwind(panic),
                Some(Ok(None)) | None => unreachable!("it was given a job, and waited for once"),
            },
        }
    }

    fn bytes(state: &FusedState) -> u64 {
        state.bytes()
    }
}

/// An update that is computed here, or by a thread.
#[derive(Debug)]
pub enum Preparation {
    #[cfg(feature = "cube")]
    Done(Box<Finished<Fused>>),
    Here(Box<FusedUpdate>),
    Coming(Beside),
}

/// A thread that computes an update. It is waited for in any case: it has state and files.
#[derive(Debug)]
pub struct Beside(Option<JoinHandle<Option<FusedUpdate>>>);

impl Drop for Beside {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            drop(thread.join());
        }
    }
}
