//! A bucket's gradients, and the sums that this rank gets of them.

#[cfg(feature = "cube")]
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use zero_comm::{CommError, Communicator, CommunicatorExt, OpKind, Work, panic_message};
use zero_core::{Bucket, Layout, ParameterIndex};
use zero_offload::HostBuffer;

#[cfg(feature = "cube")]
use crate::device_bucket::DeviceBucket;
#[cfg(feature = "cube")]
use crate::device_reduction::{DeviceReduction, Travel};
use crate::engine::Engine;
use crate::floats::Write;
#[cfg(feature = "cube")]
use crate::kernels::Buffer;
use crate::owned::Part;
use crate::reduction::Reduction;
use crate::scratch::ScratchBuffer;
use crate::spill::Place;
use crate::statistics::Activity;
#[cfg(feature = "cube")]
use crate::transports::DeviceCollectives;

/// A full bucket.
#[derive(Debug)]
pub(crate) enum Content {
    OnHost(ScratchBuffer),
    /// With where gradients lie in it.
    #[cfg(feature = "cube")]
    OnDevice(DeviceBucket, Vec<(ParameterIndex, Vec<Range<usize>>)>),
}

/// The sums of a bucket.
#[derive(Debug, Default)]
pub(crate) enum Sums {
    #[default]
    None,
    /// The bucket, and the sums that it becomes.
    Coming(Work<(ScratchBuffer, HostBuffer)>),
    Here(HostBuffer),
    OnDisk,
    #[cfg(feature = "cube")]
    ComingOnDevice(Work<Travel>),
    #[cfg(feature = "cube")]
    OnDevice(Buffer),
}

/// What became of sums, and the first parameter whose gradient was found not to be finite on the way.
type Arrived = (Sums, Option<ParameterIndex>);

impl Sums {
    /// Whether the bucket is on its way.
    pub(crate) const fn are_coming(&self) -> bool {
        match self {
            Self::Coming(_) => true,
            #[cfg(feature = "cube")]
            Self::ComingOnDevice(_) => true,
            _ => false,
        }
    }

    /// Whether the bucket is on its way between devices.
    #[cfg(feature = "cube")]
    pub(crate) const fn travel_on_device(&self) -> bool {
        matches!(self, Self::ComingOnDevice(_))
    }

    /// Waits for those of a bucket that is on its way.
    pub(crate) fn arrive(self, engine: &Engine, index: usize) -> Result<Arrived, CommError> {
        let is_done = match &self {
            Self::Coming(work) => work.is_done(),
            #[cfg(feature = "cube")]
            Self::ComingOnDevice(work) => work.is_done(),
            _ => return Ok((self, None)),
        };
        let begin = (!is_done).then(Instant::now);
        let arrived = match self {
            Self::Coming(work) => match work.wait() {
                Ok((_, sums)) => Ok((arrived(engine, index, sums), None)),
                Err(failed) => Err(failed.error),
            },
            #[cfg(feature = "cube")]
            Self::ComingOnDevice(work) => match work.wait() {
                Ok(travel) => Ok(travelled(travel)),
                Err(failed) => Err(failed.error),
            },
            other => Ok((other, None)),
        };
        if let Some(begin) = begin {
            engine.recorder.exposed(Activity::Reduce, begin);
        }
        arrived
    }

    /// Bytes that they take now, or will when they have come.
    pub(crate) fn bytes(&self, engine: &Engine, index: usize) -> usize {
        match self {
            Self::None | Self::OnDisk => 0,
            Self::Coming(_) if on_disk(engine, index).is_some() => 0,
            _ => engine.sums_bytes(index),
        }
    }

    /// For the optimizer. Without any backward there is nothing: the owner's part is zero.
    pub(crate) fn into_part(self, engine: &Engine, index: usize) -> Part {
        match (self, on_disk(engine, index)) {
            (Self::OnDisk, Some(place)) => Part::Disk(Arc::clone(place)),
            (Self::Here(sums), _) => Part::Sums(sums),
            #[cfg(feature = "cube")]
            (Self::OnDevice(sums), _) => Part::Device(sums),
            _ => {
                let mut sums = engine.sums(index);
                sums.fill(0);
                Part::Sums(sums)
            }
        }
    }

    /// Reduces a bucket, beside compute or at once, and adds what comes of it to these sums.
    pub(crate) fn reduce(
        self,
        engine: &Engine,
        index: usize,
        content: Content,
    ) -> Result<Arrived, CommError> {
        match content {
            Content::OnHost(bucket) => {
                let (sums, how) = match self {
                    Self::Here(sums) => (sums, Write::Add),
                    Self::OnDisk => (engine.sums(index), Write::Add),
                    _ => (engine.sums(index), Write::Put),
                };
                on_host(engine, index, how, bucket, sums).map(|sums| (sums, None))
            }
            #[cfg(feature = "cube")]
            Content::OnDevice(bucket, filled) => {
                let (sums, how) = match self {
                    Self::OnDevice(sums) => (Some(sums), Write::Add),
                    _ => (None, Write::Put),
                };
                let travel = Travel { written: Some(bucket.written()), bucket, sums, not_finite: None };
                on_device(engine, index, how, travel, filled)
            }
        }
    }
}

/// How gradients go from device to device, if they do.
#[cfg(feature = "cube")]
pub(crate) fn collectives(engine: &Engine) -> Option<&Arc<dyn DeviceCollectives>> {
    engine.transports.buckets.as_ref().filter(|_| engine.spill.is_none())
}

#[cfg(feature = "cube")]
fn on_device(
    engine: &Engine,
    bucket: usize,
    how: Write,
    travel: Travel,
    filled: Vec<(ParameterIndex, Vec<Range<usize>>)>,
) -> Result<Arrived, CommError> {
    let plan = reduction(engine, bucket, how);
    let bytes = plan.bytes(engine.comm.rank().index());
    let collectives = collectives(engine).expect("buckets stay on devices only where ranks have one");
    let reduction = DeviceReduction { collectives: Arc::clone(collectives), bucket, plan, filled };
    let recorder = Arc::clone(&engine.recorder);
    let run = move |comm: &dyn Communicator, travel: &mut Travel, label: &str| {
        recorder.during(Activity::Reduce, label, bytes, || reduction.run(comm, travel, label))
    };
    Ok(match start(engine, bucket, bytes, travel, run)? {
        Started::BesideCompute(work) => (Sums::ComingOnDevice(work), None),
        Started::Done(travel) => travelled(travel),
    })
}

#[cfg(feature = "cube")]
fn travelled(travel: Travel) -> Arrived {
    (travel.sums.map_or(Sums::None, Sums::OnDevice), travel.not_finite)
}

fn reduction(engine: &Engine, index: usize, how: Write) -> Reduction {
    let precision = &engine.config.precision;
    Reduction {
        counts: engine.layout.buckets()[index].counts().to_vec(),
        wire: precision.reduce(),
        accumulate: precision.accumulate,
        to_all: !engine.config.stage.shards_optimizer(),
        how,
    }
}

/// What the reduction of a bucket is called in errors and traces.
pub(crate) fn label(layout: &Layout, bucket: &Bucket) -> String {
    let name = |index: &ParameterIndex| layout.parameters()[index.index()].name();
    match bucket.parameters() {
        [only] => format!("gradient of `{}`", name(only)),
        [first, .., last] => format!("gradients of `{}` to `{}`", name(first), name(last)),
        [] => String::from("gradients of nothing"),
    }
}

/// Where the sums of a bucket wait, if not in memory.
fn on_disk(engine: &Engine, bucket: usize) -> Option<&Arc<Place>> {
    engine.spill.as_ref()?.place(bucket)
}

/// What has become of the sums of a bucket that was reduced.
fn arrived(engine: &Engine, bucket: usize, sums: HostBuffer) -> Sums {
    if on_disk(engine, bucket).is_some() { Sums::OnDisk } else { Sums::Here(sums) }
}

fn on_host(
    engine: &Engine,
    index: usize,
    how: Write,
    bucket: ScratchBuffer,
    sums: HostBuffer,
) -> Result<Sums, CommError> {
    let reduction = reduction(engine, index, how);
    let bytes = reduction.bytes(engine.comm.rank().index());
    let scratch = engine.scratch.clone();
    let recorder = Arc::clone(&engine.recorder);
    let (place, nothing) = (on_disk(engine, index).cloned(), engine.sums.clone());
    let run = move |comm: &dyn Communicator,
                    (bucket, sums): &mut (ScratchBuffer, HostBuffer),
                    label: &str| {
        if let (Some(place), Write::Add) = (&place, how) {
            place.fetch(sums);
        }
        recorder
            .during(Activity::Reduce, label, bytes, || reduction.run(comm, bucket, sums, &scratch, label))?;
        if let Some(place) = &place {
            place.put(sums);
            *sums = nothing.take(0);
        }
        Ok(())
    };
    Ok(match start(engine, index, bytes, (bucket, sums), run)? {
        Started::BesideCompute(work) => Sums::Coming(work),
        Started::Done((_, sums)) => arrived(engine, index, sums),
    })
}

enum Started<B> {
    BesideCompute(Work<B>),
    Done(B),
}

/// Reduces a bucket, beside compute or at once.
fn start<B: Send + 'static>(
    engine: &Engine,
    index: usize,
    bytes: usize,
    mut buffers: B,
    run: impl FnOnce(&dyn Communicator, &mut B, &str) -> Result<(), CommError> + Send + 'static,
) -> Result<Started<B>, CommError> {
    let label = &engine.bucket_labels[index];
    if let Some(queue) = &engine.reductions {
        let work = queue.submit(OpKind::ReduceScatter, label, bytes, buffers, run);
        return Ok(Started::BesideCompute(work));
    }
    let begin = Instant::now();
    let ran = catch_unwind(AssertUnwindSafe(|| run(&*engine.comm, &mut buffers, label)));
    // The others are in the middle of it: they are to hear why, as from a queue.
    ran.unwrap_or_else(|panic| {
        Err(engine.comm.give_up(OpKind::ReduceScatter, label, &panic_message(&*panic)))
    })?;
    engine.recorder.exposed(Activity::Reduce, begin);
    Ok(Started::Done(buffers))
}
