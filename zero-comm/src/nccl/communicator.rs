//! One rank's place in a group of devices.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use zero_core::{Rank, WorldSize};

use super::agreement::{self, Agreement};
use super::error::NcclError;
use super::group::{NcclGroup, Operation};
use super::handle::{Handle, Refusal};
use super::library::{Library, NcclVersion};
use super::patience::watch;
use super::session::{Launch, Session};
use super::{device, join};
use crate::arguments::Place;
use crate::{CommError, Communicator, CommunicatorExt, OpKind, lock};

/// One rank's place in a group of NVIDIA devices, one per rank, that NCCL connects.
///
/// Operations work on device memory, are put on a stream and complete there; see [`NcclGroup`] for what each
/// does, and for how its results differ from a [`Communicator`]'s. What NCCL lacks comes from `control`, any
/// other communicator with the same ranks: the ranks find each other over it, make sure that they launch the
/// same ([`Agreement`]), and learn from it that one of them has failed. The operations of all threads that
/// use one `control` are in one order, so [`split`](Communicator::split) one off for each thread that needs
/// its own.
///
/// It is no [`Communicator`] itself: for host memory, [`control`](Self::control) is one.
///
/// # Failures
///
/// Every wait ends, at the latest at `control`'s [`deadline`](Communicator::deadline). The first failure
/// aborts NCCL's communicator, which ends what it has launched, and `control`'s world, so that all ranks
/// learn of it; each later call returns it. What buffers of unfinished operations hold then is unspecified.
///
/// Dropping a communicator lets what it has launched complete, within the deadline.
///
/// ```no_run
/// use std::sync::Arc;
///
/// use zero_comm::{LocalWorld, NcclCommunicator, NcclError, ReduceOp};
/// use zero_core::WorldSize;
///
/// let world = LocalWorld::new(WorldSize::new(2).unwrap());
/// world.run(|control| {
///     let device = control.rank().index();
///     let comm = NcclCommunicator::new(control, device)?;
///     let stream = comm.context().new_stream().unwrap();
///     let mut gradient = stream.clone_htod(&[1.0_f32; 1024]).unwrap();
///     comm.all_reduce(&stream, &mut gradient, ReduceOp::Mean, "layer.weight")?;
///     comm.wait()
/// })?;
/// # Ok::<_, zero_comm::WorldError<NcclError>>(())
/// ```
pub struct NcclCommunicator {
    control: Arc<dyn Communicator>,
    /// What the ranks are called in errors.
    members: Vec<Rank>,
    context: Arc<CudaContext>,
    agreement: Agreement,
    session: Mutex<Session>,
    failure: OnceLock<NcclError>,
}

impl NcclCommunicator {
    /// Joins the ranks of `control`, each with the CUDA device that it names, counted from 0.
    ///
    /// # Errors
    ///
    /// All ranks fail if one does: that one with its own reason, the others with [`NcclError::Peer`], and
    /// `control` goes on. [`NcclError::Comm`] if `control` itself fails.
    pub fn new(control: Arc<dyn Communicator>, device: usize) -> Result<Self, NcclError> {
        Self::with_agreement(control, device, Agreement::default())
    }

    /// As [`new`](Self::new), with an [`Agreement`] that is the same on all ranks.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new); [`NcclError::Unlike`] if the agreements differ.
    pub fn with_agreement(
        control: Arc<dyn Communicator>,
        device: usize,
        agreement: Agreement,
    ) -> Result<Self, NcclError> {
        let members = control.world_size().ranks().collect();
        join::join(control, members, device, agreement)
    }

    pub(super) fn from_parts(
        control: Arc<dyn Communicator>,
        members: Vec<Rank>,
        context: Arc<CudaContext>,
        agreement: Agreement,
        handle: Handle,
    ) -> Self {
        let (session, failure) = (Mutex::new(Session::new(handle)), OnceLock::new());
        Self { control, members, context, agreement, session, failure }
    }

    /// How many CUDA devices this process can use.
    ///
    /// # Errors
    ///
    /// [`NcclError::DriverMissing`], or [`NcclError::Driver`] if the driver does not work.
    pub fn device_count() -> Result<usize, NcclError> {
        device::count()
    }

    /// The version of the NCCL that is used.
    ///
    /// # Errors
    ///
    /// [`NcclError::LibraryMissing`] and [`NcclError::LibraryUnfit`].
    pub fn library_version() -> Result<NcclVersion, NcclError> {
        Library::get().map(|library| library.version)
    }

    /// What the ranks do on their hosts.
    pub fn control(&self) -> &Arc<dyn Communicator> {
        &self.control
    }

    /// This rank, counted within the group.
    pub fn rank(&self) -> Rank {
        self.control.rank()
    }

    /// The number of ranks in the group.
    pub fn world_size(&self) -> WorldSize {
        self.control.world_size()
    }

    /// The device's primary context, to make streams and memory with.
    pub const fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The CUDA device, counted from 0.
    pub fn device(&self) -> usize {
        self.context.ordinal()
    }

    /// Whether ranks make sure that they launch the same.
    pub const fn agreement(&self) -> Agreement {
        self.agreement
    }

    /// Begins a group of operations that are launched together.
    pub const fn group(&self) -> NcclGroup<'_> {
        NcclGroup::new(self)
    }

    /// Waits until all that was launched here so far is complete.
    ///
    /// # Errors
    ///
    /// [`NcclError::Timeout`], which names the oldest operation that is not complete; [`NcclError::Nccl`] if
    /// one failed on the way; [`NcclError::Comm`] if another rank failed or called [`abort`](Self::abort).
    pub fn wait(&self) -> Result<(), NcclError> {
        self.wait_until(None)
    }

    /// Waits for `event`, which was recorded on a stream that operations were launched on.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait); [`NcclError::Event`] if it is not an operation of this communicator that
    /// takes so long.
    pub fn wait_for(&self, event: &CudaEvent) -> Result<(), NcclError> {
        self.wait_until(Some(event))
    }

    /// Makes a communicator of each set of ranks that call with one `color`, ordered by (`key`, rank here).
    ///
    /// A rank without color joins none and gets `None`, but takes part in the call. Its `control` is split
    /// off this one's. First waits until all that was launched here is complete on this rank, as NCCL asks.
    ///
    /// # Errors
    ///
    /// Those of [`wait`](Self::wait) and of [`Communicator::split`]; all ranks fail if one does, for good.
    pub fn split(&self, color: Option<u64>, key: u64, label: &str) -> Result<Option<Self>, NcclError> {
        let operation = OpKind::Split;
        let mut session = loop {
            self.wait()?;
            let mut session = self.lock();
            self.check(&mut session, operation, label)?;
            match session.oldest() {
                Ok(None) => break session,
                // Another thread was faster.
                Ok(Some(_)) => {}
                Err(error) => {
                    let error = self.driver(error, operation, label);
                    return Err(self.fail(&mut session, error, operation, label));
                }
            }
        };
        join::split(self, &mut session, color, key, label)
            .map_err(|error| self.fail(&mut session, error, operation, label))
    }

    /// Fails this communicator and `control`'s world: pending and later calls of all ranks return
    /// [`CommError::Aborted`] with this rank and the `reason`.
    pub fn abort(&self, reason: &str) {
        let (operation, label) = (OpKind::Barrier, String::new());
        let aborted = CommError::Aborted { rank: self.name(), reason: reason.to_owned(), operation, label };
        if self.failure.set(aborted.into()).is_ok() {
            self.control.abort(reason);
        }
        // Whoever holds the lock sees the failure and lets go.
        self.lock().handle.abort();
    }

    pub(super) fn launch<'a>(
        &self,
        operations: Vec<Operation<'a>>,
        stream: &'a CudaStream,
    ) -> Result<(), NcclError> {
        let Some(first) = operations.first() else { return Ok(()) };
        let (operation, label) = (first.entry.kind(), first.entry.label.clone());
        if let Some(reason) = self.foreign("the stream", stream.context()) {
            return Err(self.refuse(operation, &label, reason));
        }
        // Held to the end: the order of launches is the order of agreements.
        let mut session = self.lock();
        self.check(&mut session, operation, &label)?;
        self.issue(&mut session, operations, stream, operation, &label)
            .map_err(|error| self.fail(&mut session, error, operation, &label))
    }

    /// Launches `operations`, of which the first is `operation` with `label`.
    fn issue<'a>(
        &self,
        session: &mut Session,
        operations: Vec<Operation<'a>>,
        stream: &'a CudaStream,
        operation: OpKind,
        label: &str,
    ) -> Result<(), NcclError> {
        if self.agreement == Agreement::Checked {
            let entries: Vec<_> = operations.iter().map(|operation| &operation.entry).collect();
            agreement::agree(&*self.control, &self.members, &entries)?;
        }
        let driver = |error| self.driver(error, operation, label);
        self.context.bind_to_thread().map_err(driver)?;
        let end = self.context.new_event(None).map_err(driver)?;

        let mut calls = Vec::new();
        let mut uses = Vec::new();
        for Operation { entry, send, receive } in operations {
            let (from, used) = send.map(|buffer| buffer.claim(stream)).unwrap_or_default();
            uses.push(used);
            let (into, used) = receive.map(|buffer| buffer.claim(stream)).unwrap_or_default();
            uses.push(used);
            calls.extend(entry.primitives(self.position(), from, into));
        }
        // What claiming could not return: that the stream does not wait for earlier uses.
        self.context.check_err().map_err(driver)?;

        // SAFETY: the lengths in the calls are those of the buffers, which are of the communicator's context
        // and borrowed until `uses` are dropped, whereupon cudarc keeps later uses behind the stream; or
        // their maker has promised as much to `from_raw`. `uses` are dropped when everything is on the
        // stream, or else when the communicator is aborted, which ends all use of memory.
        let issued = unsafe { session.handle.issue(&calls, stream.cu_stream().cast()) };
        let issued = issued.map_err(|refusal| refusal.during(self.during(operation, label)));
        if let Err(error) = issued.and_then(|()| self.settle(session, operation, label)) {
            session.handle.abort();
            return Err(error);
        }
        drop(uses);
        end.record(stream).map_err(driver)?;
        session.push(Launch { operation, label: label.to_owned(), end }).map_err(driver)
    }

    /// Waits until NCCL has begun all it was asked for: only then are operations on their streams.
    fn settle(&self, session: &mut Session, operation: OpKind, label: &str) -> Result<(), NcclError> {
        let deadline = self.control.deadline();
        let ready =
            || session.handle.ready().map_err(|refusal| refusal.during(self.during(operation, label)));
        watch(deadline, ready, || self.news())?.ok_or_else(|| self.late(operation, label, deadline))
    }

    fn wait_until(&self, event: Option<&CudaEvent>) -> Result<(), NcclError> {
        let deadline = self.control.deadline();
        let launches = self.lock().launches();
        // What is waited for, for errors.
        let mut awaited = (OpKind::Barrier, "device operations".to_owned());
        let done = watch(deadline, || self.is_done(launches, event, &mut awaited), || self.news());
        let (operation, label) = awaited;
        let mut session = self.lock();
        let error = match done {
            Ok(Some(())) => return Ok(()),
            Ok(None) => match session.oldest() {
                Ok(None) => return Err(NcclError::Event { rank: self.name(), after: deadline }),
                Ok(Some(_)) => self.late(operation, &label, deadline),
                Err(error) => self.driver(error, operation, &label),
            },
            Err(error) => error,
        };
        Err(self.fail(&mut session, error, operation, &label))
    }

    /// `Some` when `event`, or else the first so many `launches`, are complete. Notes the oldest operation
    /// that is not.
    fn is_done(
        &self,
        launches: u64,
        event: Option<&CudaEvent>,
        awaited: &mut (OpKind, String),
    ) -> Result<Option<()>, NcclError> {
        let mut session = self.lock();
        self.check(&mut session, awaited.0, &awaited.1)?;
        let bound = self.context.bind_to_thread();
        bound.map_err(|error| self.driver(error, awaited.0, &awaited.1))?;
        let oldest = session.oldest().map_err(|error| self.driver(error, awaited.0, &awaited.1))?;
        if let Some(launch) = oldest {
            awaited.0 = launch.operation;
            awaited.1.clone_from(&launch.label);
        }
        let complete = match event {
            Some(event) => event.try_is_complete(),
            None => Ok(session.completed() >= launches),
        };
        let complete = complete.map_err(|error| self.driver(error, awaited.0, &awaited.1))?;
        // Operations that failed have ended too.
        let ready = session.handle.ready();
        let ready = ready.map_err(|refusal| refusal.during(self.during(awaited.0, &awaited.1)))?;
        let done = ready.filter(|()| complete);
        // A failed world is nothing to go on with, though what was launched is complete.
        done.map(|()| self.news()).transpose()
    }

    /// The error for an argument that is wrong, unless the communicator has failed anyway.
    pub(super) fn refuse(&self, operation: OpKind, label: &str, reason: String) -> NcclError {
        let mut session = self.lock();
        if let Err(error) = self.check(&mut session, operation, label) {
            return error;
        }
        let (rank, label) = (self.name(), label.to_owned());
        let error = CommError::InvalidArgument { rank, operation, label: label.clone(), reason };
        self.fail(&mut session, error.into(), operation, &label)
    }

    /// An error if another rank, or this one elsewhere, has failed the world. Waits for nobody.
    fn news(&self) -> Result<(), NcclError> {
        Ok(self.control.check(OpKind::Barrier, "")?)
    }

    /// The first failure as an error of `operation`, if there was one.
    fn check(&self, session: &mut Session, operation: OpKind, label: &str) -> Result<(), NcclError> {
        let Some(failure) = self.failure.get() else { return Ok(()) };
        session.handle.abort();
        Err(match failure.clone() {
            NcclError::Comm(error) => error.of(operation, label).into(),
            other => other,
        })
    }

    /// Fails the communicator with `error`, unless it has failed before; returns the first failure.
    fn fail(&self, session: &mut Session, error: NcclError, operation: OpKind, label: &str) -> NcclError {
        if self.failure.set(error.clone()).is_ok() {
            tracing::debug!(%error, "NCCL communicator failed");
            // A rank that has merely finished fails only what needs it.
            if !matches!(error, NcclError::Comm(CommError::PeerLost { .. })) {
                self.control.abort(&error.to_string());
            }
        }
        self.check(session, operation, label).err().unwrap_or(error)
    }

    fn driver(&self, error: DriverError, operation: OpKind, label: &str) -> NcclError {
        NcclError::Driver { during: self.during(operation, label), error }
    }

    fn late(&self, operation: OpKind, label: &str, after: Duration) -> NcclError {
        let (rank, world_size) = (self.name(), self.world_size());
        NcclError::Timeout { operation, label: label.to_owned(), rank, world_size, after }
    }

    /// Lets what was launched complete, and frees NCCL's communicator.
    fn end(&self, session: &mut Session) -> Result<(), NcclError> {
        let (operation, label) = (OpKind::Barrier, "end of the communicator");
        let refused = |refusal: Refusal| refusal.during(self.during(operation, label));
        self.context.bind_to_thread().map_err(|error| self.driver(error, operation, label))?;
        session.handle.finalize().map_err(refused)?;
        self.settle(session, operation, label)?;
        session.handle.destroy().map_err(refused)
    }

    /// What is wrong with `what` if its `context` is another than the communicator's.
    pub(super) fn foreign(&self, what: &str, context: &CudaContext) -> Option<String> {
        (*context != *self.context).then(|| {
            format!(
                "{what} is of another CUDA context (device {}) than the communicator (device {}); make it \
                 with the communicator's context()",
                context.ordinal(),
                self.device()
            )
        })
    }

    fn during(&self, operation: OpKind, label: &str) -> String {
        format!("{operation} {label:?} on {}", self.name())
    }

    fn lock(&self) -> MutexGuard<'_, Session> {
        lock(&self.session)
    }

    pub(super) fn place(&self) -> Place {
        Place { position: self.position(), size: self.world_size() }
    }

    pub(super) fn members(&self) -> &[Rank] {
        &self.members
    }

    fn position(&self) -> usize {
        self.rank().index()
    }

    /// This rank's name in errors.
    pub(super) fn name(&self) -> Rank {
        self.members[self.position()]
    }
}

impl Drop for NcclCommunicator {
    /// Lets what was launched complete, within the deadline; a failed communicator is aborted.
    fn drop(&mut self) {
        if self.failure.get().is_some() || thread::panicking() {
            return;
        }
        let mut session = self.lock();
        if let Err(error) = self.end(&mut session) {
            tracing::warn!(%error, "a communicator of NCCL did not end in order");
        }
        // Dropping the handle aborts what is not destroyed.
    }
}

impl fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NcclCommunicator")
            .field("rank", &self.position())
            .field("members", &self.members.iter().map(|rank| rank.index()).collect::<Vec<_>>())
            .field("device", &self.device())
            .finish_non_exhaustive()
    }
}
