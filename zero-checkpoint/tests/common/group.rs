//! Ranks that are threads.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use zero_checkpoint::{BoxError, Coordinator};
use zero_core::{Rank, WorldSize};

/// How long a rank waits for others.
const DEADLINE: Duration = Duration::from_secs(20);

#[derive(Clone)]
pub(crate) struct Group {
    rank: Rank,
    world: WorldSize,
    deadline: Duration,
    meeting: Arc<(Mutex<Meeting>, Condvar)>,
}

#[derive(Default)]
struct Meeting {
    round: u64,
    brought: Vec<Option<Vec<u8>>>,
    /// Of the round before, until the next one is complete.
    result: Arc<Vec<Vec<u8>>>,
}

impl Group {
    pub(crate) fn all(world: usize, deadline: Duration) -> Vec<Self> {
        let meeting = Meeting { brought: vec![None; world], ..Meeting::default() };
        let meeting = Arc::new((Mutex::new(meeting), Condvar::new()));
        let world = WorldSize::new(world).expect("a world has ranks");
        world.ranks().map(|rank| Self { rank, world, deadline, meeting: Arc::clone(&meeting) }).collect()
    }

    /// What all ranks bring.
    fn exchange(&self, bytes: &[u8]) -> Result<Arc<Vec<Vec<u8>>>, BoxError> {
        let (meeting, changed) = &*self.meeting;
        let mut state = meeting.lock().unwrap_or_else(PoisonError::into_inner);
        let round = state.round;
        state.brought[self.rank.index()] = Some(bytes.to_vec());
        if state.brought.iter().all(Option::is_some) {
            let brought = state.brought.iter_mut().filter_map(Option::take).collect();
            state.result = Arc::new(brought);
            state.round += 1;
            changed.notify_all();
            return Ok(Arc::clone(&state.result));
        }
        let (state, waited) = changed
            .wait_timeout_while(state, self.deadline, |state| state.round == round)
            .unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            let brought = state.brought.iter().enumerate();
            let absent: Vec<_> =
                brought.filter(|(_, brought)| brought.is_none()).map(|(rank, _)| rank).collect();
            return Err(format!("ranks {absent:?} did not come within {:?}", self.deadline).into());
        }
        Ok(Arc::clone(&state.result))
    }
}

impl Coordinator for Group {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> WorldSize {
        self.world
    }

    fn gather(&self, bytes: &[u8]) -> Result<Option<Vec<Vec<u8>>>, BoxError> {
        let all = self.exchange(bytes)?;
        Ok((self.rank == Rank::ROOT).then(|| all.to_vec()))
    }

    fn broadcast(&self, root: Rank, bytes: &mut [u8]) -> Result<(), BoxError> {
        let own: &[u8] = if root == self.rank { bytes } else { &[] };
        let all = self.exchange(own)?;
        let sent = &all[root.index()];
        if sent.len() != bytes.len() {
            return Err(format!("{} bytes were sent, {} expected", sent.len(), bytes.len()).into());
        }
        bytes.copy_from_slice(sent);
        Ok(())
    }
}

/// Runs a rank in each of `world` threads; gives what they return, in rank order.
pub(crate) fn ranks<T: Send>(world: usize, run: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let groups = Group::all(world, DEADLINE);
    thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| run(group))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}
