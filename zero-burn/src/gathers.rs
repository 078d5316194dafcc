//! Parameters that are gathered on demand: what is in use, what is kept for its next use, what is on its way ahead of it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
#[cfg(feature = "cube")]
use std::thread::{self, ThreadId};
use std::time::Instant;

use burn::tensor::{Device, Tensor};
#[cfg(feature = "cube")]
use burn_cubecl::tensor::CubeTensor;
use zero_comm::{CommError, OpKind, Work, WorkQueue};
use zero_core::{Bytes, LookAhead, LookAheadOptions, LookAheadStatistics, ParameterIndex};
use zero_offload::{HostBuffer, HostPool};

use crate::base::Base;
#[cfg(feature = "cube")]
use crate::cube;
use crate::engine::lock;
use crate::host::lent_tensor;
#[cfg(feature = "cube")]
use crate::live_memory::{self, LiveMemory};
use crate::shared::Shared;
use crate::statistics::Activity;
use crate::windows::Windows;

/// The gathered parameters of one engine on one rank.
#[derive(Debug)]
pub(crate) struct Gathers {
    windows: Windows,
    device: Device,
    pool: HostPool,
    /// Reads ahead, where reads may run beside compute.
    queue: Option<Arc<WorkQueue>>,
    /// What was counted under earlier layouts.
    counted: LookAheadStatistics,
    /// What is on the device.
    #[cfg(feature = "cube")]
    on_device: Arc<Mutex<LiveMemory>>,
    /// The thread that made the last step.
    #[cfg(feature = "cube")]
    stepping: Mutex<Option<ThreadId>>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    ahead: LookAhead,
    slots: Vec<Slot>,
    /// Counts rounds: a fetch that was planned in an earlier one is of no use.
    round: u64,
    /// Counts copies, so that one that is given back is known.
    copies: u64,
}

/// One parameter.
#[derive(Debug, Default)]
struct Slot {
    /// The copy that is in use, if one is.
    shared: Shared,
    /// Its number.
    copy: u64,
    /// A copy that nobody uses.
    resident: Option<Resident>,
}

#[derive(Debug)]
enum Resident {
    Coming(Work<Option<Gathered>>),
    Here(Gathered),
}

/// A whole parameter.
#[derive(Debug)]
enum Gathered {
    OnHost(HostBuffer),
    /// Where layers compute, and in nobody's memory but its own.
    #[cfg(feature = "cube")]
    OnDevice(Box<CubeTensor>),
}

impl Gathers {
    pub(crate) fn new(
        windows: Windows,
        base: &Base,
        options: LookAheadOptions,
        counted: LookAheadStatistics,
    ) -> Arc<Self> {
        let layout = &windows.layout;
        let bytes = |numel: usize| Bytes::of(numel, windows.dtype);
        let sizes: Vec<_> = layout.parameters().iter().map(|parameter| bytes(parameter.numel())).collect();
        let slots = sizes.iter().map(|_| Slot::default()).collect();
        // What a layer takes at once, two of every size that there is, and what is fetched ahead and kept, need not be
        // allocated again; unless sizes are so many that it would be most of the model.
        let kinds: BTreeSet<_> = sizes.iter().map(|bytes| bytes.get()).collect();
        let largest = bytes(layout.largest_unit()).get();
        let in_use = (2 * kinds.into_iter().sum::<u64>()).clamp(largest, largest.saturating_mul(4));
        let beside = options.lookahead_bytes.get().saturating_add(options.reuse_bytes.get());
        let beside = beside.min(bytes(layout.numel()).get());
        base.gathered.set_retain(Bytes::new(in_use.saturating_add(beside)));
        Arc::new(Self {
            pool: base.gathered.clone(),
            counted,
            #[cfg(feature = "cube")]
            on_device: Arc::clone(&base.gathered_on_device),
            #[cfg(feature = "cube")]
            stepping: Mutex::default(),
            state: Mutex::new(State { ahead: LookAhead::new(sizes, options), slots, round: 0, copies: 0 }),
            windows,
            device: base.device.clone(),
            queue: base.reads.clone(),
        })
    }

    pub(crate) const fn pool(&self) -> &HostPool {
        &self.pool
    }

    /// The whole parameter, flat.
    pub(crate) fn whole(self: &Arc<Self>, parameter: ParameterIndex) -> Result<Tensor<1>, CommError> {
        let (step, round, in_use, resident, evicted) = {
            let mut state = lock(&self.state);
            let State { ahead, slots, round, .. } = &mut *state;
            let step = ahead.access(parameter);
            let evicted: Vec<_> =
                step.evict.iter().map(|other| slots[other.index()].resident.take()).collect();
            let slot = &mut slots[parameter.index()];
            let in_use = slot.shared.get();
            let resident = if in_use.is_some() { None } else { slot.resident.take() };
            (step, *round, in_use, resident, evicted)
        };
        drop(evicted);
        let begin = Instant::now();
        let (recorder, ahead) = (&self.windows.recorder, || self.fetch(round, &step.fetch));
        if let Some(whole) = in_use {
            ahead();
            return Ok(whole);
        }
        let here = match resident {
            Some(Resident::Here(here)) => {
                ahead();
                Some(here)
            }
            Some(Resident::Coming(work)) => {
                ahead();
                let here = work.wait().inspect_err(|_| lock(&self.state).ahead.failed(parameter))?;
                recorder.exposed(Activity::Gather, begin);
                here
            }
            None => None,
        };
        let gathered = match here {
            Some(gathered) => gathered,
            None => {
                // Before what is not needed yet.
                let gathered = self.gather(parameter)?;
                recorder.exposed(Activity::Gather, begin);
                ahead();
                gathered
            }
        };
        Ok(match gathered {
            Gathered::OnHost(buffer) => self.lend(parameter, buffer),
            #[cfg(feature = "cube")]
            Gathered::OnDevice(whole) => self.share(parameter, *whole),
        })
    }

    /// Gathers at once.
    fn gather(&self, parameter: ParameterIndex) -> Result<Gathered, CommError> {
        #[cfg(feature = "cube")]
        if self.windows.are_on_devices() {
            // Who steps waits for what it has read, but knows nothing of other threads.
            let steps = *lock(&self.stepping) == Some(thread::current().id());
            let whole = self.windows.whole_on_device(parameter, !steps)?;
            live_memory::reach(&whole);
            lock(&self.on_device).track(&whole);
            return Ok(Gathered::OnDevice(Box::new(whole)));
        }
        let mut buffer = self.pool.take(self.windows.bytes(parameter));
        self.windows.read(parameter, &mut buffer)?;
        Ok(Gathered::OnHost(buffer))
    }

    /// Parameters have changed: every copy is stale.
    pub(crate) fn begin_round(&self) {
        let mut state = lock(&self.state);
        state.ahead.begin_round();
        state.round += 1;
        let stale: Vec<_> = state.slots.iter_mut().map(std::mem::take).collect();
        drop(state);
        drop(stale);
    }

    /// Waits for what is on its way ahead of its use: its owner is about to change it, in a step of this thread's.
    #[cfg(feature = "cube")]
    pub(crate) fn settle(&self) {
        *lock(&self.stepping) = Some(thread::current().id());
        let coming: Vec<_> = {
            let slots = &mut lock(&self.state).slots;
            let coming = slots.iter_mut().enumerate().filter_map(|(at, slot)| match slot.resident.take() {
                Some(Resident::Coming(work)) => Some((at, work)),
                other => {
                    slot.resident = other;
                    None
                }
            });
            coming.collect()
        };
        for (at, work) in coming {
            // A failure is the world's; who wants the parameter sees it.
            let Ok(Some(here)) = work.wait() else { continue };
            lock(&self.state).slots[at].resident.get_or_insert(Resident::Here(here));
        }
    }

    /// Bytes of what is gathered.
    pub(crate) fn live(&self) -> Bytes {
        #[cfg(feature = "cube")]
        return self.pool.live() + lock(&self.on_device).live();
        #[cfg(not(feature = "cube"))]
        self.pool.live()
    }

    /// The most that there was of it at once.
    pub(crate) fn peak(&self) -> Bytes {
        // It is in one place or the other.
        #[cfg(feature = "cube")]
        return self.pool.peak() + lock(&self.on_device).peak();
        #[cfg(not(feature = "cube"))]
        self.pool.peak()
    }

    pub(crate) fn reset_peak(&self) {
        self.pool.reset_peak();
        #[cfg(feature = "cube")]
        lock(&self.on_device).reset_peak();
    }

    /// How often a parameter was found gathered, and how often not, since the engine began.
    pub(crate) fn statistics(&self) -> LookAheadStatistics {
        let LookAheadStatistics { hits, misses, wasted } = lock(&self.state).ahead.statistics();
        let before = self.counted;
        LookAheadStatistics {
            hits: before.hits + hits,
            misses: before.misses + misses,
            wasted: before.wasted + wasted,
        }
    }

    /// Starts to gather `parameters`, in order.
    fn fetch(&self, round: u64, parameters: &[ParameterIndex]) {
        let Some(queue) = &self.queue else { return };
        for &parameter in parameters {
            // The windows alone: the queue must not be what keeps the queue.
            let windows = self.windows.clone();
            let bytes = windows.bytes(parameter);
            let on_host = (!windows.are_on_devices()).then(|| Gathered::OnHost(self.pool.take(bytes)));
            #[cfg(feature = "cube")]
            let on_device = Arc::clone(&self.on_device);
            let work = queue.submit(OpKind::Read, "look-ahead", bytes, on_host, move |_, gathered, _| {
                match gathered {
                    Some(Gathered::OnHost(buffer)) => windows.read(parameter, buffer)?,
                    #[cfg(feature = "cube")]
                    other => {
                        let whole = windows.whole_on_device(parameter, true)?;
                        live_memory::reach(&whole);
                        lock(&on_device).track(&whole);
                        *other = Some(Gathered::OnDevice(Box::new(whole)));
                    }
                    #[cfg(not(feature = "cube"))]
                    None => {}
                }
                Ok(())
            });
            let mut state = lock(&self.state);
            let is_wanted = state.round == round;
            let resident = &mut state.slots[parameter.index()].resident;
            if is_wanted && resident.is_none() {
                *resident = Some(Resident::Coming(work));
            }
        }
    }

    /// Gives a parameter on the device to whoever computes, and keeps it, too, if it is needed again soon.
    #[cfg(feature = "cube")]
    fn share(&self, parameter: ParameterIndex, whole: CubeTensor) -> Tensor<1> {
        let mut state = lock(&self.state);
        let State { ahead, slots, .. } = &mut *state;
        let resident = &mut slots[parameter.index()].resident;
        if ahead.release(parameter) && resident.is_none() {
            *resident = Some(Resident::Here(Gathered::OnDevice(Box::new(whole.clone()))));
        }
        drop(state);
        cube::tensor(whole)
    }

    /// Lends `buffer` to whoever computes; it comes back when the last of them is done with it.
    fn lend(self: &Arc<Self>, parameter: ParameterIndex, buffer: HostBuffer) -> Tensor<1> {
        let copy = {
            let mut state = lock(&self.state);
            state.copies += 1;
            let copy = state.copies;
            // A device that has memory of its own gives the buffer back as soon as it has read it.
            state.slots[parameter.index()].copy = copy;
            copy
        };
        let owner = Arc::downgrade(self);
        let whole = lent_tensor(buffer, self.windows.dtype, &self.device, move |buffer| {
            if let Some(owner) = owner.upgrade() {
                owner.take_back(parameter, copy, buffer);
            }
        });
        let mut state = lock(&self.state);
        let slot = &mut state.slots[parameter.index()];
        if slot.copy == copy {
            slot.shared = Shared::new(&whole);
        }
        drop(state);
        whole
    }

    /// The copy of that number is not in use any more; `buffer` has the parameter, if it is unchanged. Called where Burn
    /// drops tensors, so it must not wait.
    fn take_back(&self, parameter: ParameterIndex, copy: u64, buffer: Option<HostBuffer>) {
        let mut state = lock(&self.state);
        let State { ahead, slots, .. } = &mut *state;
        let slot = &mut slots[parameter.index()];
        // Else another copy has been made, or this one is stale.
        if slot.copy == copy {
            (slot.shared, slot.copy) = (Shared::default(), 0);
            if ahead.release(parameter) && slot.resident.is_none() {
                match buffer {
                    Some(buffer) => slot.resident = Some(Resident::Here(Gathered::OnHost(buffer))),
                    None => ahead.failed(parameter),
                }
                return;
            }
        }
        drop(state);
        drop(buffer);
    }
}
