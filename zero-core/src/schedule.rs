//! Which parameters are gathered before they are needed, and which stay when they are not.

mod prediction;

use std::collections::BTreeSet;

use crate::{Bytes, ParameterIndex};
use prediction::{Moved, Prediction};

/// The budgets of a [`LookAhead`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LookAheadOptions {
    /// The most bytes that are resident for a use to come; 0 turns look-ahead off.
    pub lookahead_bytes: Bytes,
    /// The most bytes that are resident, be they in use, fetched ahead or kept; `None` for no limit. What is in
    /// use at one time can exceed it.
    pub live_bytes: Option<Bytes>,
    /// A parameter is kept after its use if fewer bytes than this are expected to be used before its next one;
    /// 0 keeps none.
    pub reuse_bytes: Bytes,
}

/// What to do about an access.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Accessed {
    /// Whether the parameter is resident: in use, kept or fetched ahead, even if that is still under way. If
    /// not, it has to be fetched now.
    pub hit: bool,
    /// Resident parameters that nobody uses, to be dropped before anything is fetched.
    pub evict: Vec<ParameterIndex>,
    /// Parameters whose fetch to begin now, in this order, after that of the parameter itself.
    pub fetch: Vec<ParameterIndex>,
}

/// How well a [`LookAhead`] has predicted since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LookAheadStatistics {
    /// Accesses to resident parameters.
    pub hits: u64,
    /// Accesses that had to wait for a whole fetch.
    pub misses: u64,
    /// Fetches ahead whose parameter was dropped before any use.
    pub wasted: u64,
}

/// Decides which parameters are fetched before they are needed, from the order in which they were needed
/// before.
///
/// A *round* is the time between two changes of the parameters. Its accesses are recorded, and predict those
/// of the next round: after each access the parameters expected next are fetched as far as the budgets
/// [allow](LookAheadOptions). An access that was not expected is served all the same; a prediction that is
/// wrong costs time, never correctness. Equal calls get equal answers.
///
/// The caller holds the data and does as told: on [`access`](Self::access) it drops, fetches and begins to
/// fetch; on [`release`](Self::release) it drops or keeps.
///
/// Source: the idea of a recorded trace with budgets is that of DeepSpeed's
/// `deepspeed/runtime/zero/partitioned_param_coordinator.py`; there an access out of order is an error or voids
/// the trace, and budgets count elements.
///
/// ```
/// use zero_core::{Bytes, LookAhead, LookAheadOptions, ParameterIndex};
///
/// let [a, b, c] = [0, 1, 2].map(ParameterIndex::new);
/// let options = LookAheadOptions {
///     lookahead_bytes: Bytes::new(100),
///     live_bytes: None,
///     reuse_bytes: Bytes::ZERO,
/// };
/// let mut schedule = LookAhead::new(vec![Bytes::new(60); 3], options);
/// for parameter in [a, b, c] {
///     assert!(!schedule.access(parameter).hit);
///     schedule.release(parameter);
/// }
/// schedule.begin_round();
///
/// // 60 bytes are fetched ahead; 120 would be more than 100.
/// assert_eq!(schedule.access(a).fetch, [b]);
/// assert!(!schedule.release(a));
/// let accessed = schedule.access(b);
/// assert!(accessed.hit);
/// assert_eq!(accessed.fetch, [c]);
/// ```
#[derive(Clone, Debug)]
pub struct LookAhead {
    options: LookAheadOptions,
    slots: Vec<Slot>,
    prediction: Prediction,
    /// What this round has accessed so far.
    recording: Vec<usize>,
    /// The end of the window: what is expected from [`Prediction::position`] up to here has been looked at, and
    /// is resident unless it could not be.
    horizon: usize,
    /// The next expected use of each parameter in [`State::Ahead`], with the parameter.
    ahead: BTreeSet<(usize, usize)>,
    /// The same for [`State::Kept`].
    kept: BTreeSet<(usize, usize)>,
    ahead_bytes: u128,
    live_bytes: u128,
    /// Accesses so far.
    time: u64,
    statistics: LookAheadStatistics,
}

#[derive(Clone, Debug)]
struct Slot {
    bytes: u64,
    state: State,
    /// The last time at which it was dropped for others, so that one access does not drop and fetch it.
    evicted: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Absent,
    InUse {
        /// The use after this one, if it is within the window already and counts as ahead.
        next: Option<usize>,
    },
    /// Resident for an expected use.
    Ahead {
        next: usize,
        /// Whether it has not been used since it was fetched.
        fresh: bool,
    },
    /// Resident after a use, because the next one is near.
    Kept {
        next: usize,
    },
}

impl LookAhead {
    /// The most expected accesses looked at in one access, so that it takes a bounded time.
    const STRIDE: usize = 256;
    /// The most accesses of a round that are recorded, so that a round without end, as evaluation is, takes a
    /// bounded memory.
    const RECORDED: usize = 1 << 20;

    /// A schedule for parameters that take `bytes` each when gathered, in the order of their indices. Nothing is
    /// resident and nothing predicted.
    pub fn new(bytes: Vec<Bytes>, options: LookAheadOptions) -> Self {
        let slot = |bytes: Bytes| Slot { bytes: bytes.get(), state: State::Absent, evicted: 0 };
        Self {
            options,
            slots: bytes.into_iter().map(slot).collect(),
            prediction: Prediction::default(),
            recording: Vec::new(),
            horizon: 0,
            ahead: BTreeSet::new(),
            kept: BTreeSet::new(),
            ahead_bytes: 0,
            live_bytes: 0,
            time: 0,
            statistics: LookAheadStatistics::default(),
        }
    }

    /// A parameter is needed. It is in use from now on until its [release](Self::release), however often it is
    /// accessed in between.
    ///
    /// A parameter that does not exist gets an empty answer.
    pub fn access(&mut self, parameter: ParameterIndex) -> Accessed {
        let parameter = parameter.index();
        let Some(slot) = self.slots.get(parameter) else {
            return Accessed::default();
        };
        let mut accessed = Accessed { hit: slot.state != State::Absent, ..Accessed::default() };
        self.time += 1;
        if self.recording.len() < Self::RECORDED {
            self.recording.push(parameter);
        }
        if accessed.hit {
            self.statistics.hits += 1;
            self.leave(parameter);
        } else {
            self.statistics.misses += 1;
        }

        let moved = self.prediction.advance(parameter);
        self.follow(moved, &mut accessed.evict);
        let bytes = self.slots[parameter].bytes;
        while !self.fits(bytes) {
            let Some(farthest) = self.farthest() else { break };
            self.evict(farthest, &mut accessed.evict);
        }
        let next = self.prediction.next_use(parameter);
        let next = next.filter(|&next| next < self.horizon && self.fits_ahead(bytes));
        self.enter(parameter, State::InUse { next });
        self.look_ahead(&mut accessed);
        accessed
    }

    /// The last user of a parameter is done with it. Whether to keep it: if not, it is to be dropped.
    ///
    /// A parameter that is not in use, because it never was or because a round has begun since, is to be
    /// dropped, unless it is resident anew.
    pub fn release(&mut self, parameter: ParameterIndex) -> bool {
        let parameter = parameter.index();
        match self.slots.get(parameter).map(|slot| slot.state) {
            None | Some(State::Absent) => false,
            Some(State::Ahead { .. } | State::Kept { .. }) => true,
            Some(State::InUse { .. }) => {
                self.leave(parameter);
                let state = self.rest(parameter);
                self.enter(parameter, state);
                state != State::Absent
            }
        }
    }

    /// A fetch did not happen: the parameter is not resident.
    pub fn failed(&mut self, parameter: ParameterIndex) {
        if self.slots.get(parameter.index()).is_some() {
            self.leave(parameter.index());
        }
    }

    /// The parameters have changed: everything resident is void, what is in use included. The accesses of the
    /// round that ends predict those of the one that begins; if there were none, the prediction stays.
    pub fn begin_round(&mut self) {
        if !self.recording.is_empty() {
            let slots = &self.slots;
            self.prediction.learn(&self.recording, |parameter| slots[parameter].bytes, slots.len());
            self.recording.clear();
        }
        self.prediction.rewind();
        self.horizon = 0;
        for slot in &mut self.slots {
            if matches!(slot.state, State::Ahead { fresh: true, .. }) {
                self.statistics.wasted += 1;
            }
            slot.state = State::Absent;
        }
        self.ahead.clear();
        self.kept.clear();
        (self.ahead_bytes, self.live_bytes) = (0, 0);
    }

    /// How well it has predicted since it was made.
    pub fn statistics(&self) -> LookAheadStatistics {
        self.statistics
    }

    /// The bytes of all that is resident, be it in use, ahead or kept.
    pub fn live_bytes(&self) -> Bytes {
        Bytes::new(u64::try_from(self.live_bytes).unwrap_or(u64::MAX))
    }

    /// Finds new uses for what was expected at positions that are not expected any more.
    fn follow(&mut self, moved: Moved, evict: &mut Vec<ParameterIndex>) {
        let position = self.prediction.position();
        let passed = match moved {
            Moved::Forward => {
                self.horizon = self.horizon.max(position);
                position
            }
            Moved::Back => {
                self.horizon = position;
                usize::MAX
            }
        };
        let before = |uses: &BTreeSet<(usize, usize)>| -> Vec<usize> {
            uses.range(..(passed, 0)).map(|&(_, parameter)| parameter).collect()
        };
        for parameter in before(&self.ahead).into_iter().chain(before(&self.kept)) {
            let next = self.prediction.next_use(parameter);
            let state = match (next, self.slots[parameter].state) {
                (Some(next), State::Ahead { fresh, .. }) if next < self.horizon => {
                    State::Ahead { next, fresh }
                }
                (Some(next), State::Kept { .. }) if self.near(next) => State::Kept { next },
                _ => {
                    self.evict(parameter, evict);
                    continue;
                }
            };
            self.leave(parameter);
            self.enter(parameter, state);
        }
    }

    /// Fetches what is expected next, as far as there is room.
    fn look_ahead(&mut self, accessed: &mut Accessed) {
        if self.options.lookahead_bytes == Bytes::ZERO {
            return;
        }
        for _ in 0..Self::STRIDE {
            let Some(parameter) = self.prediction.at(self.horizon) else { return };
            let Slot { bytes, state, evicted } = self.slots[parameter];
            let next = self.horizon;
            match state {
                // One that never has room is fetched when it is needed, and does not hold up those behind it.
                _ if self.too_large(bytes) => {}
                State::Absent if evicted != self.time && self.fits(bytes) && self.fits_ahead(bytes) => {
                    self.enter(parameter, State::Ahead { next, fresh: true });
                    accessed.fetch.push(ParameterIndex::new(parameter));
                }
                State::InUse { next: None } if self.fits_ahead(bytes) => {
                    self.leave(parameter);
                    self.enter(parameter, State::InUse { next: Some(next) });
                }
                State::Absent | State::InUse { next: None } => return,
                State::InUse { next: Some(_) } | State::Ahead { .. } | State::Kept { .. } => {}
            }
            self.horizon += 1;
        }
    }

    /// What becomes of a parameter that is not used any more and not counted either.
    fn rest(&mut self, parameter: usize) -> State {
        let bytes = self.slots[parameter].bytes;
        let Some(next) = self.prediction.next_use(parameter) else {
            return State::Absent;
        };
        let within = next < self.horizon;
        if self.fits(bytes) && self.near(next) {
            State::Kept { next }
        } else if self.fits(bytes) && within && self.fits_ahead(bytes) {
            State::Ahead { next, fresh: false }
        } else {
            // Within the window, it is fetched again when there is room.
            self.horizon = self.horizon.min(next);
            State::Absent
        }
    }

    fn near(&self, next: usize) -> bool {
        self.prediction.bytes_until(next) < u128::from(self.options.reuse_bytes.get())
    }

    /// Whether there is room for more resident bytes.
    fn fits(&self, bytes: u64) -> bool {
        let most = self.options.live_bytes.map_or(u128::MAX, |most| most.get().into());
        self.live_bytes + u128::from(bytes) <= most
    }

    /// Whether there is room for more bytes that are resident for a use to come.
    fn fits_ahead(&self, bytes: u64) -> bool {
        self.ahead_bytes + u128::from(bytes) <= u128::from(self.options.lookahead_bytes.get())
    }

    /// Whether a parameter of that many bytes cannot be fetched ahead at any time.
    fn too_large(&self, bytes: u64) -> bool {
        let most = self.options.live_bytes.unwrap_or(Bytes::new(u64::MAX)).min(self.options.lookahead_bytes);
        bytes > most.get()
    }

    /// The resident parameter that nobody uses whose next use is the last.
    fn farthest(&self) -> Option<usize> {
        self.ahead.last().max(self.kept.last()).map(|&(_, parameter)| parameter)
    }

    fn evict(&mut self, parameter: usize, evict: &mut Vec<ParameterIndex>) {
        let state = self.slots[parameter].state;
        self.statistics.wasted += u64::from(matches!(state, State::Ahead { fresh: true, .. }));
        if let State::Ahead { next, .. } | State::Kept { next } = state {
            if next >= self.prediction.position() {
                // It may be fetched again when there is room.
                self.horizon = self.horizon.min(next);
            }
        }
        self.leave(parameter);
        self.slots[parameter].evicted = self.time;
        evict.push(ParameterIndex::new(parameter));
    }

    /// Takes a parameter out of all that counts it.
    fn leave(&mut self, parameter: usize) {
        let Slot { bytes, state, .. } = self.slots[parameter];
        match state {
            State::Absent => return,
            State::InUse { next: None } => {}
            State::InUse { next: Some(_) } => self.ahead_bytes -= u128::from(bytes),
            State::Ahead { next, .. } => {
                self.ahead.remove(&(next, parameter));
                self.ahead_bytes -= u128::from(bytes);
            }
            State::Kept { next } => drop(self.kept.remove(&(next, parameter))),
        }
        self.live_bytes -= u128::from(bytes);
        self.slots[parameter].state = State::Absent;
    }

    /// Counts a parameter that [`leave`](Self::leave) has taken out, or that was absent.
    fn enter(&mut self, parameter: usize, state: State) {
        let bytes = u128::from(self.slots[parameter].bytes);
        match state {
            State::Absent => return,
            State::InUse { next: None } => {}
            State::InUse { next: Some(_) } => self.ahead_bytes += bytes,
            State::Ahead { next, .. } => {
                self.ahead.insert((next, parameter));
                self.ahead_bytes += bytes;
            }
            State::Kept { next } => drop(self.kept.insert((next, parameter))),
        }
        self.live_bytes += bytes;
        self.slots[parameter].state = state;
    }
}
