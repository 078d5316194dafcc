//! What an engine has whatever the layout of its model is: all that stays when another engine takes its place.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};

use burn::tensor::Device;
use zero_comm::{CommError, Communicator, WorkQueue};
#[cfg(feature = "cube")]
use zero_core::Tier;
use zero_core::{
    Bytes, Layout, LossScale, Offload, Parameter, PlacementPlan, Rank, StateBytes, WorldSize, ZeroConfig,
};
use zero_offload::{HostPool, PoolOptions, Workers};

use crate::ZeroError;
#[cfg(feature = "cube")]
use crate::arena::Port;
use crate::disk::{Disk, Traffic};
use crate::held::Held;
use crate::ladder::Ladder;
#[cfg(feature = "cube")]
use crate::live_memory::LiveMemory;
use crate::machine;
use crate::masters::Masters;
use crate::phase::Phase;
use crate::queues::Queues;
use crate::scratch::Scratch;
use crate::statistics::Recorder;
#[cfg(feature = "cube")]
use crate::transports::Transports;

/// The part of an engine that does not depend on its layout.
#[derive(Debug)]
pub(crate) struct Base {
    pub(crate) config: ZeroConfig,
    pub(crate) comm: Arc<dyn Communicator>,
    /// Where layers compute, without autodiff.
    pub(crate) device: Device,
    /// The way to it, if it is one of CubeCL.
    #[cfg(feature = "cube")]
    pub(crate) port: Option<Port>,
    /// How this rank's device reaches those of others.
    #[cfg(feature = "cube")]
    pub(crate) transports: Transports,
    /// Where shards are: on the device or, if they are updated on the host, there.
    pub(crate) home: Device,
    /// Reduces gradients beside compute.
    pub(crate) reductions: Option<WorkQueue>,
    /// Reads beside compute.
    pub(crate) reads: Option<Arc<WorkQueue>>,
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) ladder: Ladder,
    /// By parameter.
    pub(crate) held: Arc<Mutex<Vec<Held>>>,
    /// Whether a parameter is the weight of a `Linear`, by parameter.
    pub(crate) linear: Mutex<Vec<bool>>,
    /// Paths of state of layers that is no parameter.
    pub(crate) running_state: Mutex<Vec<String>>,
    /// Parameters that are gathered on demand.
    pub(crate) gathered: HostPool,
    #[cfg(feature = "cube")]
    pub(crate) gathered_on_device: Arc<Mutex<LiveMemory>>,
    /// Gradient buckets and what else a step needs for a moment.
    pub(crate) scratch: Scratch,
    /// Sums of gradients.
    pub(crate) sums: HostPool,
    /// Parameters that stay gathered.
    pub(crate) replicas: HostPool,
    /// Copies of updated shards in the type of layers.
    pub(crate) copies: HostPool,
    /// Optimizer state.
    pub(crate) states: HostPool,
    workers: OnceLock<Workers>,
    disk: OnceLock<Disk>,
    masters: OnceLock<Masters>,
    /// The tiers that were chosen, if they were left to the engine.
    placement: OnceLock<Option<PlacementPlan>>,
    /// Of all disks.
    pub(crate) traffic: Arc<Traffic>,
    /// Whole master weights for who asks; nothing is kept.
    pub(crate) exports: HostPool,
    pub(crate) scale: Mutex<LossScale>,
    /// Counts changes of parameters.
    pub(crate) version: AtomicU64,
    pub(crate) phase: Phase,
    /// Whether an update is computed beside compute.
    pub(crate) pending: AtomicBool,
    pub(crate) after_backward: Mutex<StateBytes>,
    pub(crate) optimizer_bytes: AtomicU64,
}

/// Whether optimizers run on host memory even if layers compute on a device with memory of its own.
#[cfg(feature = "cube")]
pub(crate) fn updates_on_host(offload: &Offload) -> bool {
    offload.optimizer.tier != Tier::Device || offload.delayed_update
}

impl Base {
    pub(crate) fn new(
        config: ZeroConfig,
        Queues { reductions, reads }: Queues,
        comm: Arc<dyn Communicator>,
        device: Device,
    ) -> Result<Self, CommError> {
        #[cfg(feature = "cube")]
        let port = Port::of(&device);
        #[cfg(feature = "cube")]
        let is_reached = config.device_transport && !updates_on_host(&config.offload);
        #[cfg(feature = "cube")]
        let transports = Transports::find(&comm, port.as_ref().filter(|_| is_reached))?;
        // What goes to and comes from devices of CUDA is page-locked.
        let pool = || {
            #[cfg(feature = "cuda")]
            if let Some(index) = port.as_ref().and_then(Port::cuda_index) {
                return HostPool::page_locked(PoolOptions::default(), index);
            }
            HostPool::default()
        };
        let home = device.clone();
        #[cfg(all(feature = "cube", feature = "flex"))]
        let home = match &port {
            Some(_) if updates_on_host(&config.offload) => Device::flex(),
            _ => home,
        };
        let unkept = PoolOptions { retain: Bytes::ZERO };
        Ok(Self {
            gathered: pool(),
            #[cfg(feature = "cube")]
            gathered_on_device: Arc::default(),
            scratch: Scratch::new(pool()),
            sums: pool(),
            replicas: pool(),
            copies: pool(),
            states: HostPool::new(unkept),
            exports: HostPool::new(unkept),
            home,
            scale: Mutex::new(LossScale::new(config.loss_scaling())),
            config,
            comm,
            #[cfg(feature = "cube")]
            port,
            #[cfg(feature = "cube")]
            transports,
            device,
            reductions,
            reads,
            recorder: Arc::new(Recorder::new()),
            ladder: Ladder::default(),
            held: Arc::default(),
            linear: Mutex::default(),
            running_state: Mutex::default(),
            workers: OnceLock::new(),
            disk: OnceLock::new(),
            masters: OnceLock::new(),
            placement: OnceLock::new(),
            traffic: Arc::default(),
            version: AtomicU64::new(0),
            phase: Phase::default(),
            pending: AtomicBool::new(false),
            after_backward: Mutex::default(),
            optimizer_bytes: AtomicU64::new(0),
        })
    }

    /// Whether windows are copies of shards.
    pub(crate) fn copies_windows(&self) -> bool {
        #[cfg(feature = "cube")]
        if let Some(on_devices) = &self.transports.shards {
            return on_devices.copies();
        }
        self.comm.copies_windows() || self.has_shards_on_device()
    }

    /// Whether shards are in memory that the host does not read.
    pub(crate) fn has_shards_on_device(&self) -> bool {
        #[cfg(feature = "cube")]
        return self.port.is_some() && self.home == self.device;
        #[cfg(not(feature = "cube"))]
        false
    }

    /// Threads of this rank's share of the host's cores; started when they are first asked for.
    pub(crate) fn workers(&self) -> Result<&Workers, ZeroError> {
        if let Some(workers) = self.workers.get() {
            return Ok(workers);
        }
        let neighbours = self.comm.ranks_of_host();
        let own = neighbours.iter().position(|rank| *rank == self.comm.rank()).unwrap_or(0);
        let size = WorldSize::new(neighbours.len()).unwrap_or(WorldSize::ONE);
        let workers =
            Workers::for_rank(Rank::new(own), size).map_err(|error| ZeroError::Workers(Arc::new(error)))?;
        Ok(self.workers.get_or_init(|| workers))
    }

    /// What is kept where.
    pub(crate) fn offload(&self) -> &Offload {
        self.placement().map_or(&self.config.offload, |plan| &plan.offload)
    }

    /// The tiers that were chosen.
    pub(crate) fn placement(&self) -> Option<&PlacementPlan> {
        self.placement.get()?.as_ref()
    }

    /// Chooses the tiers that are left to the engine, once. Collective.
    pub(crate) fn place(&self, layout: &Layout) -> Result<(), ZeroError> {
        if self.placement.get().is_none() {
            let plan = machine::place(self, layout)?;
            self.placement.get_or_init(|| plan);
        }
        Ok(())
    }

    /// Makes a place for master weights, if it is known by now that some are kept on a disk.
    pub(crate) fn open_masters(&self) -> Result<(), ZeroError> {
        if self.masters.get().is_none()
            && let Some(masters) = Masters::open(self)?
        {
            self.masters.get_or_init(|| masters);
        }
        Ok(())
    }

    /// Master weights on a disk, if there are any.
    pub(crate) fn masters_on_disk(&self) -> Option<&Masters> {
        self.masters.get()
    }

    /// Puts the shard of a new parameter where it is kept.
    pub(crate) fn put(&self, parameter: &Parameter, held: Held) -> Result<Held, ZeroError> {
        match self.masters_on_disk() {
            Some(masters) => masters.put(self, parameter, held),
            None => Ok(held),
        }
    }

    /// The disk for optimizer state; opened when it is first asked for.
    pub(crate) fn disk(&self) -> Result<&Disk, ZeroError> {
        if let Some(disk) = self.disk.get() {
            return Ok(disk);
        }
        let disk = Disk::open(self)?;
        Ok(self.disk.get_or_init(|| disk))
    }
}
