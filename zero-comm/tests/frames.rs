//! Whatever comes from the network, reading it ends, and takes a bounded amount of memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use proptest::collection::vec;
use proptest::prelude::*;
use zero_comm::fuzzing::{MAX_FRAME, coordinate, listen, open_channel, read_posts, read_window, shake_hands};

/// Knows how much memory each thread holds, and held at most.
struct Meter;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    HELD.set(HELD.get() + bytes);
    PEAK.set(PEAK.get().max(HELD.get()));
}

// SAFETY: all is passed on to the system's allocator.
unsafe impl GlobalAlloc for Meter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static METER: Meter = Meter;

/// What `f` returns, and how much more memory it held at most than before.
fn peak<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.get();
    PEAK.set(before);
    let value = f();
    (value, (PEAK.get() - before) as usize)
}

/// What a reader may hold for `bytes` that came: what they are in memory, a table of a failed world, and
/// what a list may reserve before its elements come, 1 MiB for each list in a list.
fn bound(bytes: usize) -> usize {
    (4 << 20) + 64 * bytes
}

fn check(bytes: &[u8]) {
    for read in [listen, coordinate] {
        let (messages, peak) = peak(|| read(bytes));
        assert!(peak <= bound(bytes.len()), "{peak} bytes for {messages} messages");
    }
    let ((), held) = peak(|| {
        open_channel(bytes);
        read_posts(bytes);
        assert!(read_window(bytes) <= bytes.len());
    });
    assert!(held <= bound(bytes.len()), "{held} bytes");
    let (shaken, peak) = peak(|| shake_hands(bytes));
    assert!(!shaken);
    assert!(peak <= bound(0), "{peak} bytes");
}

fn frame(bytes: &[u8]) -> Vec<u8> {
    let mut frame = (bytes.len() as u32).to_le_bytes().to_vec();
    frame.extend(bytes);
    frame
}

#[test]
fn an_announced_length_takes_no_memory() {
    for length in [1 << 16, MAX_FRAME as u32, MAX_FRAME as u32 + 1, u32::MAX] {
        let (messages, peak) = peak(|| listen(&length.to_le_bytes()));
        assert_eq!(messages, 0);
        assert!(peak < 1024, "{peak} bytes for a length of {length}");
    }
}

#[test]
fn a_frame_of_the_greatest_length_is_read_and_no_longer_one() {
    // A rank is refused for its build, of as many bytes as fit: the tags, the ranks, the lengths.
    let text = |length: usize| {
        let mut message = vec![0, 3, 0];
        let varint = [(length & 127) as u8 | 128, (length >> 7 & 127) as u8 | 128, (length >> 14) as u8];
        message.extend(varint);
        message.extend(vec![b'x'; length]);
        message.extend([0, 0]);
        message
    };
    let rest = text(1 << 16).len() - (1 << 16);
    let longest = text(MAX_FRAME - rest);
    assert_eq!(longest.len(), MAX_FRAME);
    assert_eq!(listen(&frame(&longest)), 1);
    assert_eq!(listen(&frame(&text(MAX_FRAME - rest + 1))), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_bytes_are_read(bytes in vec(any::<u8>(), 0..3000)) {
        check(&bytes);
    }

    #[test]
    fn any_bytes_in_frames_are_read(frames in vec(vec(any::<u8>(), 0..200), 0..20)) {
        check(&frames.iter().flat_map(|bytes| frame(bytes)).collect::<Vec<_>>());
    }

    // Small numbers are valid tags and ranks, and short lists.
    #[test]
    fn messages_of_small_numbers_are_read(frames in vec(vec(0_u8..8, 0..60), 0..40)) {
        check(&frames.iter().flat_map(|bytes| frame(bytes)).collect::<Vec<_>>());
    }

    #[test]
    fn lists_that_announce_much_are_read(tag in 0_u8..10, head in vec(0_u8..4, 0..20), lists in 1_usize..5) {
        let mut bytes = vec![tag];
        bytes.extend(head);
        for _ in 0..lists {
            bytes.extend([255, 255, 255, 255, 15]);
        }
        check(&frame(&bytes));
    }

    // The posts of several members, each with its length before it.
    #[test]
    fn posts_of_small_numbers_are_read(posts in vec(vec(0_u8..8, 0..40), 0..5)) {
        let mut bundle = Vec::new();
        for post in &posts {
            let length = post.len().next_multiple_of(8) as u64;
            bundle.extend((length + 8).to_le_bytes());
            bundle.extend((post.len() as u64).to_le_bytes());
            bundle.extend(post);
            bundle.resize(bundle.len().next_multiple_of(8), 0);
        }
        check(&bundle);
    }
}
