//! Reads from windows.

use std::sync::Arc;

use zero_core::{Rank, WorldSize};

use super::{Harness, PATIENT};
use crate::{CommError, WindowKey};

const KEY: WindowKey = WindowKey::new(42);

/// Rank 0 reads from everybody while the others wait for it.
pub fn a_read_needs_no_help(harness: &dyn Harness, size: WorldSize) {
    harness.run(size, PATIENT, &|comm| {
        let content: Vec<u8> = (0..100).map(|byte| byte + comm.rank().index() as u8).collect();
        comm.expose(KEY, Arc::new(content)).unwrap();
        comm.fence("exposed").unwrap();
        if comm.rank() == Rank::ROOT {
            for peer in size.ranks() {
                let mut bytes = [0; 10];
                comm.read(peer, KEY, 20, &mut bytes, "middle").unwrap();
                assert!((0..10).all(|byte| bytes[byte] as usize == 20 + byte + peer.index()));
                comm.read(peer, KEY, 100, &mut [], "end").unwrap();
            }
        }
        comm.barrier("read").unwrap();
    });
}

/// A window can be replaced, by one of another size too, and withdrawn.
pub fn reads_after_a_fence_see_what_was_exposed_before(harness: &dyn Harness, size: WorldSize) {
    harness.run(size, PATIENT, &|comm| {
        let mut bytes = [0; 3];
        for version in 0..10_u8 {
            comm.expose(KEY, Arc::new(vec![version; 3 + version as usize])).unwrap();
            comm.fence("exposed").unwrap();
            for peer in size.ranks() {
                comm.read(peer, KEY, version as usize, &mut bytes, "version").unwrap();
                assert_eq!(bytes, [version; 3]);
            }
            comm.fence("read").unwrap();
        }
        comm.withdraw(KEY).unwrap();
        comm.withdraw(WindowKey::new(43)).unwrap();
        comm.fence("withdrawn").unwrap();
        for peer in size.ranks() {
            let gone = CommError::WindowMissing { peer, key: KEY, label: "gone".into() };
            assert_eq!(comm.read(peer, KEY, 0, &mut bytes, "gone"), Err(gone));
        }
        comm.barrier("read").unwrap();
    });
}

/// What has no bytes takes no place that others need, however often it comes and goes.
pub fn an_empty_window_leaves_others_alone(harness: &dyn Harness, size: WorldSize) {
    let (empty, full) = (WindowKey::new(1), WindowKey::new(2));
    harness.run(size, PATIENT, &|comm| {
        comm.expose(empty, Arc::new(Vec::new())).unwrap();
        comm.expose(full, Arc::new(vec![7; 5000])).unwrap();
        comm.expose(empty, Arc::new(Vec::new())).unwrap();
        comm.fence("exposed").unwrap();
        comm.withdraw(empty).unwrap();
        comm.expose(empty, Arc::new(vec![9; 10])).unwrap();
        comm.fence("exposed again").unwrap();
        for peer in size.ranks() {
            let (mut few, mut many) = ([0; 10], [0; 5000]);
            comm.read(peer, empty, 0, &mut few, "few").unwrap();
            comm.read(peer, full, 0, &mut many, "many").unwrap();
            assert_eq!((few, many), ([9; 10], [7; 5000]));
        }
        comm.barrier("read").unwrap();
    });
}

/// A bad read is the reader's own error: it names peer, window and label, and the group goes on.
pub fn a_read_that_cannot_be_names_the_window(harness: &dyn Harness, size: WorldSize) {
    harness.run(size, PATIENT, &|comm| {
        comm.expose(KEY, Arc::new(vec![1; 8])).unwrap();
        comm.fence("exposed").unwrap();
        let peer = Rank::new(size.get() - 1);
        let label = "layer.weight";
        for (offset, requested) in [(0, 9), (8, 1), (9, 0), (usize::MAX, 2)] {
            let expected = CommError::WindowBounds {
                peer,
                key: KEY,
                label: label.into(),
                offset,
                requested,
                available: 8,
            };
            assert_eq!(comm.read(peer, KEY, offset, &mut vec![0; requested], label), Err(expected));
        }
        let key = WindowKey::new(77);
        let missing = CommError::WindowMissing { peer, key, label: label.into() };
        assert_eq!(comm.read(peer, key, 0, &mut [], label), Err(missing));
        let outside = comm.read(Rank::new(size.get()), KEY, 0, &mut [], label);
        assert!(matches!(outside, Err(CommError::InvalidArgument { .. })), "got {outside:?}");
        comm.barrier("goes on").unwrap();
    });
}

/// What a rank exposed to a group can be read as long as any rank has the group.
pub fn a_rank_that_drops_a_group_leaves_its_windows(harness: &dyn Harness, size: WorldSize) {
    harness.run(size, PATIENT, &|comm| {
        let mine = [comm.rank().index() as u8; 3];
        let group = comm.split(Some(0), 0, "group").unwrap().unwrap();
        group.expose(KEY, Arc::new(mine.to_vec())).unwrap();
        group.fence("exposed").unwrap();
        // All but rank 0.
        let group = Some(group).filter(|_| comm.rank() == Rank::ROOT);
        comm.barrier("dropped").unwrap();
        for peer in group.iter().flat_map(|_| size.ranks()) {
            let (mut read, group) = ([9; 3], group.as_ref().unwrap());
            group.read(peer, KEY, 0, &mut read, "window").unwrap();
            assert_eq!(read, [peer.index() as u8; 3]);
        }
        comm.barrier("read").unwrap();
    });
}

/// What a rank exposed can be read after it has finished.
pub fn a_finished_rank_leaves_its_windows(harness: &dyn Harness, size: WorldSize) {
    let last = Rank::new(size.get() - 1);
    if last == Rank::ROOT {
        return;
    }
    harness.run(size, PATIENT, &|comm| {
        let mine = [comm.rank().index() as u8; 3];
        comm.expose(KEY, Arc::new(mine.to_vec())).unwrap();
        comm.fence("exposed").unwrap();
        if comm.rank() == last {
            return;
        }
        // Fails as soon as the rank has finished, and not before.
        let gone = comm.barrier("with the last rank");
        assert!(matches!(gone, Err(CommError::PeerLost { rank, .. }) if rank == last), "{gone:?}");
        let mut read = [0; 3];
        comm.read(last, KEY, 0, &mut read, "window").unwrap();
        assert_eq!(read, [last.index() as u8; 3]);
    });
}
