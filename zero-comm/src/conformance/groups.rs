//! Groups within a group.

use std::sync::Arc;

use zero_core::{Rank, WorldSize};

use super::{Harness, PATIENT};
use crate::{CommError, Communicator, CommunicatorExt, ReduceOp, WindowKey};

/// Keys order the ranks of a group; ranks with one key keep their order.
pub fn a_group_is_ordered_by_key_then_rank(harness: &dyn Harness, size: WorldSize) {
    harness.run(size, PATIENT, &|comm| {
        let rank = comm.rank().index();
        let reversed = comm.split(Some(7), (size.get() - rank) as u64, "reversed").unwrap().unwrap();
        assert_eq!(reversed.world_size(), size);
        assert_eq!(reversed.rank().index(), size.get() - 1 - rank);
        let same = comm.split(Some(0), 3, "same").unwrap().unwrap();
        assert_eq!(same.rank(), comm.rank());
        let gathered = reversed.all_gather_value(rank as i64, "old ranks").unwrap();
        assert_eq!(gathered, (0..size.get() as i64).rev().collect::<Vec<_>>());
    });
}

/// Groups do not wait for each other, and a rank without color joins none.
pub fn groups_work_apart(harness: &dyn Harness, size: WorldSize) {
    harness.run(size, PATIENT, &|comm| {
        let rank = comm.rank().index();
        // Ranks 2, 5, ... stay outside.
        let color = Some(rank as u64 % 3).filter(|color| *color < 2);
        let group = comm.split(color, 0, "by three").unwrap();
        assert_eq!(group.is_some(), color.is_some());
        let Some(group) = group else { return };
        let members: Vec<_> = (rank % 3..size.get()).step_by(3).collect();
        assert_eq!(group.world_size().get(), members.len());
        // The groups do different numbers of operations.
        for _ in 0..=rank % 3 {
            let sum = group.all_reduce_value(rank as i64, ReduceOp::Sum, "members").unwrap();
            assert_eq!(sum, members.iter().sum::<usize>() as i64);
        }
    });
}

/// A group of a group counts its own ranks.
pub fn a_group_can_be_split_again(harness: &dyn Harness, size: WorldSize) {
    harness.run(size, PATIENT, &|comm| {
        let mut group: Arc<dyn Communicator> = comm;
        while group.world_size().get() > 1 {
            let half = group.world_size().get().div_ceil(2);
            let rank = group.rank().index();
            let part = group.split(Some((rank / half) as u64), 0, "halves").unwrap().unwrap();
            assert_eq!(part.rank().index(), rank % half);
            assert!(part.world_size().get() <= half);
            part.barrier("halved").unwrap();
            group = part;
        }
    });
}

/// What is exposed to a group is not seen in another.
pub fn windows_of_groups_are_apart(harness: &dyn Harness, size: WorldSize) {
    const KEY: WindowKey = WindowKey::new(1);
    harness.run(size, PATIENT, &|comm| {
        let group = comm.split(Some(0), 0, "same ranks").unwrap().unwrap();
        group.expose(KEY, Arc::new(vec![comm.rank().index() as u8])).unwrap();
        group.fence("exposed").unwrap();
        let mut byte = [9];
        for peer in size.ranks() {
            group.read(peer, KEY, 0, &mut byte, "inside").unwrap();
            assert_eq!(byte, [peer.index() as u8]);
        }
        let outside = comm.read(Rank::ROOT, KEY, 0, &mut byte, "outside");
        assert!(matches!(outside, Err(CommError::WindowMissing { .. })), "got {outside:?}");
        comm.barrier("read").unwrap();
    });
}
