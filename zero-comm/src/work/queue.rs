//! Where operations wait for their turn.

use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, SendError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use zero_core::Rank;

use super::many::{Carrier, Gather};
use super::result::{Slot, Work, WorkError};
use super::stats::{Counters, WorkStats};
use crate::{CommError, Communicator, CommunicatorExt, Element, OpKind, ReduceOp, panic_message};

/// A thread that does operations of one rank, first in, first out, while the caller goes on.
///
/// Buffers move into an operation and come back from [`Work::wait`], also when it has failed. A buffer is
/// whatever lends a slice of elements: a `Vec`, a boxed slice, a guard of a pool.
///
/// The queue's operations keep the rules of its communicator: all ranks submit the same collective ones in
/// the same order, under the same labels. They overlap with operations on other communicators; so the queue
/// has one of its own, [`split`](Communicator::split) off for it, on which nobody else operates.
///
/// ```
/// use zero_comm::{CommError, Communicator, LocalWorld, ReduceOp, WorkQueue};
/// use zero_core::WorldSize;
///
/// let world = LocalWorld::new(WorldSize::new(2).unwrap());
/// let gradients = world.run(|comm| {
///     let group = comm.split(Some(0), 0, "gradients")?.expect("every rank has the color");
///     let queue = WorkQueue::new(group).expect("the system has a thread to give");
///     let weight = queue.all_reduce(vec![1.0_f32; 1000], ReduceOp::Sum, "weight");
///     let small = queue.all_reduce_many(vec![vec![1.0_f32], vec![2.0; 3]], ReduceOp::Sum, "biases");
///     comm.barrier("meanwhile, the caller goes on")?;
///     Ok::<_, CommError>((weight.wait()?, small.wait()?))
/// })?;
/// assert_eq!(gradients[1], (vec![2.0; 1000], vec![vec![2.0], vec![4.0; 3]]));
/// # Ok::<_, zero_comm::WorldError<CommError>>(())
/// ```
///
/// # Failures
///
/// When the world fails, what is queued fails too, with the same cause. An operation that panics aborts the
/// world.
///
/// # Dropping
///
/// Dropping the queue waits until everything submitted has ended: in a world that works, it is done; in one
/// that has failed, it fails at once. A rank that gives up, and whose operations the others will not join,
/// should [`abort`](Communicator::abort) the world first, or it waits here for the deadline. A thread that
/// unwinds past a queue with unfinished work does so.
pub struct WorkQueue {
    comm: Arc<dyn Communicator>,
    counters: Arc<Counters>,
    transfer_bytes: usize,
    /// Goes before the thread, which ends when there can be no more jobs.
    jobs: Sender<Job>,
    _thread: Joined,
}

type Job = Box<dyn FnOnce(&dyn Communicator) + Send>;

impl WorkQueue {
    /// How many bytes a transfer of several buffers carries unless told otherwise.
    pub const DEFAULT_TRANSFER_BYTES: usize = 4 << 20;

    /// A queue of operations on `comm`, with a thread named `work-` and the rank.
    ///
    /// # Errors
    ///
    /// If the system does not give it a thread.
    pub fn new(comm: Arc<dyn Communicator>) -> io::Result<Self> {
        let (jobs, queued) = mpsc::channel();
        let thread = thread::Builder::new().name(format!("work-{}", comm.rank().index()));
        let spawned = thread.spawn({
            let comm = Arc::clone(&comm);
            move || work(&*comm, &queued)
        });
        let thread = spawned.map_err(|source| {
            io::Error::new(source.kind(), format!("the thread of a work queue did not start: {source}"))
        })?;
        Ok(Self {
            comm,
            counters: Arc::default(),
            transfer_bytes: Self::DEFAULT_TRANSFER_BYTES,
            jobs,
            _thread: Joined(Some(thread)),
        })
    }

    /// The same queue, whose transfers of several buffers carry up to `bytes` each. Equal on all ranks.
    ///
    /// Packing copies, which pays for buffers so small that their latency is longer than that. It takes as
    /// much memory as a transfer carries; for gathers, this rank's part beside it.
    #[must_use]
    pub fn with_transfer_bytes(mut self, bytes: usize) -> Self {
        self.transfer_bytes = bytes;
        self
    }

    /// What the queue has done so far.
    pub fn stats(&self) -> WorkStats {
        self.counters.snapshot()
    }

    /// Lets the thread call `act` with the queue's communicator, `buffers` and `label`.
    ///
    /// What all other methods do, for operations that they do not have, such as reads of several windows into
    /// one buffer. `act` must not wait for works of this queue. `operation` and `label` name the work in the
    /// error if `act` panics; `bytes` is what it adds to [`WorkStats::bytes`].
    pub fn submit<B, F>(&self, operation: OpKind, label: &str, bytes: usize, buffers: B, act: F) -> Work<B>
    where
        B: Send + 'static,
        F: FnOnce(&dyn Communicator, &mut B, &str) -> Result<(), CommError> + Send + 'static,
    {
        let slot = Slot::new();
        let work = Work::new(Arc::clone(&slot), Arc::clone(&self.counters));
        let (label, mut buffers, counters) = (label.to_owned(), buffers, Arc::clone(&self.counters));
        let job: Job = Box::new(move |comm| {
            let begun = Instant::now();
            let result = catch_unwind(AssertUnwindSafe(|| act(comm, &mut buffers, &label)));
            let result = result.unwrap_or_else(|payload| {
                let reason = format!("{operation} {label:?} panicked: {}", panic_message(&*payload));
                Err(comm.give_up(operation, &label, &reason))
            });
            counters.ended(bytes, begun.elapsed(), result.is_err());
            slot.fill(match result {
                Ok(()) => Ok(buffers),
                Err(error) => Err(WorkError { error, buffers }),
            });
        });
        self.counters.submitted();
        if let Err(SendError(job)) = self.jobs.send(job) {
            // The thread is there as long as the sender is. If it were not, nobody else would do this.
            job(&*self.comm);
        }
        work
    }

    /// See [`CommunicatorExt::all_reduce`].
    pub fn all_reduce<T, B>(&self, mut buffer: B, op: ReduceOp, label: &str) -> Work<B>
    where
        T: Element,
        B: AsMut<[T]> + Send + 'static,
    {
        let bytes = size_of_val(buffer.as_mut());
        self.submit(OpKind::AllReduce, label, bytes, buffer, move |comm, buffer, label| {
            comm.all_reduce(buffer.as_mut(), op, label)
        })
    }

    /// Reduces each of `buffers`, whose number and lengths are equal on all ranks.
    ///
    /// Neighbours travel together as far as a transfer holds them. An error is that of the whole set.
    pub fn all_reduce_many<T, B>(&self, mut buffers: Vec<B>, op: ReduceOp, label: &str) -> Work<Vec<B>>
    where
        T: Element,
        B: AsMut<[T]> + Send + 'static,
    {
        let bytes = buffers.iter_mut().map(|buffer| size_of_val(buffer.as_mut())).sum();
        let (counters, transfer_bytes) = (Arc::clone(&self.counters), self.transfer_bytes);
        self.submit(OpKind::AllReduce, label, bytes, buffers, move |comm, buffers, label| {
            let mut slices: Vec<_> = buffers.iter_mut().map(B::as_mut).collect();
            Carrier { comm, transfer_bytes, counters: &counters, label }.all_reduce(&mut slices, op)
        })
    }

    /// See [`CommunicatorExt::all_gather`].
    pub fn all_gather<T, S, R>(&self, send: S, mut receive: R, label: &str) -> Work<(S, R)>
    where
        T: Element,
        S: AsRef<[T]> + Send + 'static,
        R: AsMut<[T]> + Send + 'static,
    {
        let bytes = size_of_val(receive.as_mut());
        self.submit(OpKind::AllGather, label, bytes, (send, receive), |comm, (send, receive), label| {
            comm.all_gather(send.as_ref(), receive.as_mut(), label)
        })
    }

    /// See [`CommunicatorExt::all_gather_uneven`].
    pub fn all_gather_uneven<T, S, R>(
        &self,
        send: S,
        mut receive: R,
        counts: &[usize],
        label: &str,
    ) -> Work<(S, R)>
    where
        T: Element,
        S: AsRef<[T]> + Send + 'static,
        R: AsMut<[T]> + Send + 'static,
    {
        let (bytes, counts) = (size_of_val(receive.as_mut()), counts.to_vec());
        self.submit(OpKind::AllGather, label, bytes, (send, receive), move |comm, (send, receive), label| {
            comm.all_gather_uneven(send.as_ref(), receive.as_mut(), &counts, label)
        })
    }

    /// Does each of `gathers`, whose number and counts are equal on all ranks.
    ///
    /// Neighbours travel together as far as a transfer holds them. An error is that of the whole set.
    pub fn all_gather_many<T, S, R>(
        &self,
        mut gathers: Vec<Gather<S, R>>,
        label: &str,
    ) -> Work<Vec<Gather<S, R>>>
    where
        T: Element,
        S: AsRef<[T]> + Send + 'static,
        R: AsMut<[T]> + Send + 'static,
    {
        let bytes = gathers.iter_mut().map(|gather| size_of_val(gather.receive.as_mut())).sum();
        let (counters, transfer_bytes) = (Arc::clone(&self.counters), self.transfer_bytes);
        self.submit(OpKind::AllGather, label, bytes, gathers, move |comm, gathers, label| {
            let mut parts: Vec<_> = gathers.iter_mut().map(Gather::part).collect();
            Carrier { comm, transfer_bytes, counters: &counters, label }.all_gather(&mut parts)
        })
    }

    /// See [`CommunicatorExt::reduce_scatter`].
    pub fn reduce_scatter<T, S, R>(&self, send: S, receive: R, op: ReduceOp, label: &str) -> Work<(S, R)>
    where
        T: Element,
        S: AsRef<[T]> + Send + 'static,
        R: AsMut<[T]> + Send + 'static,
    {
        let bytes = size_of_val(send.as_ref());
        self.submit(
            OpKind::ReduceScatter,
            label,
            bytes,
            (send, receive),
            move |comm, (send, receive), label| {
                comm.reduce_scatter(send.as_ref(), receive.as_mut(), op, label)
            },
        )
    }

    /// See [`CommunicatorExt::reduce_scatter_uneven`].
    pub fn reduce_scatter_uneven<T, S, R>(
        &self,
        send: S,
        receive: R,
        counts: &[usize],
        op: ReduceOp,
        label: &str,
    ) -> Work<(S, R)>
    where
        T: Element,
        S: AsRef<[T]> + Send + 'static,
        R: AsMut<[T]> + Send + 'static,
    {
        let (bytes, counts) = (size_of_val(send.as_ref()), counts.to_vec());
        self.submit(
            OpKind::ReduceScatter,
            label,
            bytes,
            (send, receive),
            move |comm, (send, receive), label| {
                comm.reduce_scatter_uneven(send.as_ref(), receive.as_mut(), &counts, op, label)
            },
        )
    }

    /// See [`CommunicatorExt::broadcast`].
    pub fn broadcast<T, B>(&self, mut buffer: B, root: Rank, label: &str) -> Work<B>
    where
        T: Element,
        B: AsMut<[T]> + Send + 'static,
    {
        let bytes = size_of_val(buffer.as_mut());
        self.submit(OpKind::Broadcast, label, bytes, buffer, move |comm, buffer, label| {
            comm.broadcast(buffer.as_mut(), root, label)
        })
    }

    /// See [`CommunicatorExt::all_to_all_uneven`].
    pub fn all_to_all_uneven<T, S, R>(
        &self,
        send: S,
        send_counts: &[usize],
        mut receive: R,
        receive_counts: &[usize],
        label: &str,
    ) -> Work<(S, R)>
    where
        T: Element,
        S: AsRef<[T]> + Send + 'static,
        R: AsMut<[T]> + Send + 'static,
    {
        let bytes = size_of_val(send.as_ref()).max(size_of_val(receive.as_mut()));
        let (send_counts, receive_counts) = (send_counts.to_vec(), receive_counts.to_vec());
        self.submit(OpKind::AllToAll, label, bytes, (send, receive), move |comm, (send, receive), label| {
            comm.all_to_all_uneven(send.as_ref(), &send_counts, receive.as_mut(), &receive_counts, label)
        })
    }

    /// See [`CommunicatorExt::send`].
    ///
    /// It ends when rank `to` has received, and keeps what is queued behind it waiting until then: two ranks
    /// that both queue a send to the other before a receive wait for the deadline. A queue for sends and one
    /// for receives never do.
    pub fn send<T, B>(&self, to: Rank, buffer: B, label: &str) -> Work<B>
    where
        T: Element,
        B: AsRef<[T]> + Send + 'static,
    {
        let bytes = size_of_val(buffer.as_ref());
        self.submit(OpKind::Send, label, bytes, buffer, move |comm, buffer, label| {
            comm.send(to, buffer.as_ref(), label)
        })
    }

    /// See [`CommunicatorExt::receive`], and [`send`](Self::send) for the order of messages.
    pub fn receive<T, B>(&self, from: Rank, mut buffer: B, label: &str) -> Work<B>
    where
        T: Element,
        B: AsMut<[T]> + Send + 'static,
    {
        let bytes = size_of_val(buffer.as_mut());
        self.submit(OpKind::Receive, label, bytes, buffer, move |comm, buffer, label| {
            comm.receive(from, buffer.as_mut(), label)
        })
    }

    /// See [`Communicator::barrier`].
    pub fn barrier(&self, label: &str) -> Work<()> {
        self.submit(OpKind::Barrier, label, 0, (), |comm, (), label| comm.barrier(label))
    }
}

/// What the thread does.
fn work(comm: &dyn Communicator, queued: &Receiver<Job>) {
    while let Ok(job) = queued.recv() {
        if catch_unwind(AssertUnwindSafe(|| job(comm))).is_err() {
            // The operation itself has ended, and the panic hook has spoken.
            tracing::warn!("a buffer that nobody waited for panicked when it was dropped");
        }
    }
}

impl Drop for WorkQueue {
    fn drop(&mut self) {
        let WorkStats { submitted, ended, .. } = self.stats();
        if thread::panicking() && ended < submitted {
            // The others will not come to operations that this rank has not submitted any more.
            self.comm.abort("a thread unwound past a work queue with unfinished work");
        }
    }
}

/// A thread that is waited for when this is dropped.
struct Joined(Option<JoinHandle<()>>);

impl Drop for Joined {
    fn drop(&mut self) {
        // A buffer may own the queue, so that this can be the thread itself, which then ends on its own.
        let other = self.0.take().filter(|thread| thread.thread().id() != thread::current().id());
        // It does not panic.
        other.map(JoinHandle::join);
    }
}

impl fmt::Debug for WorkQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkQueue").field("comm", &self.comm).field("stats", &self.stats()).finish()
    }
}
