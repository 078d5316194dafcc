//! Where in an arena each window is: a table in shared memory, found by hashing keys.
//!
//! Only the owner of the arena writes to it. An entry is looked for from the place that its key hashes to on, up to
//! the first that is free. So a window that goes must not leave a free entry that others are looked for across:
//! its own stays, withdrawn, as long as there are such others, and becomes free when the last of them goes. What
//! was never needed by anybody else is free at once, so lookups are short however many windows have come and gone.
//!
//! # Readers
//!
//! They look while the owner writes, without a lock. Between the place of a live key and its entry there is no free
//! entry, from before the window is shown until after it is withdrawn, because the owner frees only what no live
//! key is looked for across. A reader for which the window was shown before it looks finds it therefore, whatever
//! comes and goes meanwhile; and what it finds is checked under the lock of the entry, which may have become another
//! window's.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use super::segment::{Segment, SharedFile};
use crate::{CommError, WindowKey};

/// How many windows there can be: half of the entries, so that some free one is always near.
pub(super) const WINDOWS: usize = 1 << 16;

const ENTRIES: usize = 2 * WINDOWS;
const ENTRY: usize = 64;
/// The words of an entry.
const KEY: usize = 0;
const STATE: usize = 8;
const LOCK: usize = 12;
const OFFSET: usize = 16;
const LENGTH: usize = 24;

/// Nobody's, and nobody is looked for beyond it.
const FREE: u32 = 0;
const LIVE: u32 = 1;
/// Nobody's now; others may be looked for beyond it.
const WITHDRAWN: u32 = 2;

/// In a lock: the owner writes, or wants to. The rest counts readers.
const WRITING: u32 = 1 << 31;

/// How often a rank looks at a lock before it sleeps for a moment.
const LOOKS: u32 = 200;

/// The entries of one arena, for its owner to write and for others to read.
#[derive(Debug)]
pub(super) struct Table(Segment);

/// The place of a window in the table. It may have become another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry(usize);

/// The part of the contents that a window has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) offset: u64,
    pub(super) length: u64,
}

impl Table {
    /// How much memory it takes where it is used.
    pub(super) const BYTES: usize = ENTRIES * ENTRY;

    /// The table at `start` of `file`.
    pub(super) fn map(file: &SharedFile, start: u64) -> io::Result<Self> {
        Ok(Self(Segment::map(file, start, Self::BYTES)?))
    }

    /// The entry of `key`, live or not.
    pub(super) fn find(&self, key: WindowKey) -> Option<Entry> {
        probe(key)
            .find_map(|entry| match self.state(entry).load(Ordering::Acquire) {
                FREE => Some(None),
                _ if self.key(entry).load(Ordering::Relaxed) == key.get() => Some(Some(Entry(entry))),
                _ => None,
            })
            .flatten()
    }

    /// For the owner: an entry that is nobody's, made `key`'s, which must have none. It is not live yet. There must
    /// be fewer than [`WINDOWS`] live ones.
    pub(super) fn claim(&self, key: WindowKey) -> Option<Entry> {
        let entry = probe(key).find(|entry| self.state(*entry).load(Ordering::Relaxed) != LIVE)?;
        self.key(entry).store(key.get(), Ordering::Relaxed);
        self.state(entry).store(WITHDRAWN, Ordering::Release);
        Some(Entry(entry))
    }

    /// For the owner, who holds the lock: what the window has; nothing if it is not live.
    pub(super) fn extent(&self, Entry(entry): Entry) -> Option<Extent> {
        (self.state(entry).load(Ordering::Relaxed) == LIVE).then(|| self.live_extent(entry))
    }

    /// For who holds the lock for reading: what the window `key` has, if it is live and the entry still its.
    pub(super) fn extent_of(&self, key: WindowKey, Entry(entry): Entry) -> Option<Extent> {
        let is_there = self.state(entry).load(Ordering::Acquire) == LIVE
            && self.key(entry).load(Ordering::Relaxed) == key.get();
        is_there.then(|| self.live_extent(entry))
    }

    fn live_extent(&self, entry: usize) -> Extent {
        Extent {
            offset: self.long(entry, OFFSET).load(Ordering::Relaxed),
            length: self.long(entry, LENGTH).load(Ordering::Relaxed),
        }
    }

    /// For the owner, who holds the lock: makes the window live.
    pub(super) fn show(&self, Entry(entry): Entry, Extent { offset, length }: Extent) {
        self.long(entry, OFFSET).store(offset, Ordering::Relaxed);
        self.long(entry, LENGTH).store(length, Ordering::Relaxed);
        self.state(entry).store(LIVE, Ordering::Release);
    }

    /// For the owner, who holds the lock: the window is not there until it is shown.
    pub(super) fn hide(&self, Entry(entry): Entry) {
        self.state(entry).store(WITHDRAWN, Ordering::Relaxed);
    }

    /// For the owner, when the window of an entry has gone for good: frees it and the withdrawn ones before it as
    /// far as no live key is looked for across them.
    pub(super) fn tidy(&self, Entry(entry): Entry) {
        let state = |entry: usize| self.state(entry).load(Ordering::Relaxed);
        // Whoever is looked for across this entry is before the next free one.
        let ahead = (1..ENTRIES).take_while(|step| state((entry + step) % ENTRIES) != FREE).count();
        // Nobody is looked for across what is before the place of the key that has gone because of that key. If none
        // is free, what is ahead is known only after a turn through the whole table.
        let turn = if ahead == ENTRIES - 1 { ENTRIES } else { 0 };
        let back = displacement(self.key(entry).load(Ordering::Relaxed), entry);
        // How many of the entries to come are needed by the live ones that were passed.
        let mut needed = 0_usize;
        for step in 0..=turn + ahead + back {
            let at = (entry + ahead + 2 * ENTRIES - step) % ENTRIES;
            match state(at) {
                LIVE => {
                    let own = displacement(self.key(at).load(Ordering::Relaxed), at);
                    needed = needed.saturating_sub(1).max(own);
                }
                _ => {
                    if needed == 0 && step >= turn {
                        self.state(at).store(FREE, Ordering::Release);
                    }
                    needed = needed.saturating_sub(1);
                }
            }
        }
    }

    /// For the owner: waits until nobody reads the window, and lets nobody read it until that is dropped.
    ///
    /// `check` is asked from time to time whether to wait on.
    pub(super) fn lock_writing(
        &self,
        Entry(entry): Entry,
        check: &dyn Fn() -> Result<(), CommError>,
    ) -> Result<Locked<'_>, CommError> {
        let word = self.word(entry, LOCK);
        // Keeps new readers out. The owner is one, so nobody else sets it.
        word.fetch_or(WRITING, Ordering::Acquire);
        let locked = Locked { word, held: WRITING };
        let readers = || word.load(Ordering::Acquire) != WRITING;
        patiently(readers, check)?;
        Ok(locked)
    }

    /// Waits until the owner does not write to the window, and keeps it from doing so until that is dropped.
    ///
    /// `check` is asked from time to time whether to wait on.
    pub(super) fn lock_reading(
        &self,
        Entry(entry): Entry,
        check: &dyn Fn() -> Result<(), CommError>,
    ) -> Result<Locked<'_>, CommError> {
        let word = self.word(entry, LOCK);
        loop {
            if word.fetch_add(1, Ordering::Acquire) & WRITING == 0 {
                return Ok(Locked { word, held: 1 });
            }
            word.fetch_sub(1, Ordering::Release);
            patiently(|| word.load(Ordering::Relaxed) & WRITING != 0, check)?;
        }
    }

    fn key(&self, entry: usize) -> &AtomicU64 {
        self.long(entry, KEY)
    }

    fn state(&self, entry: usize) -> &AtomicU32 {
        self.word(entry, STATE)
    }

    fn word(&self, entry: usize, which: usize) -> &AtomicU32 {
        self.0.u32(entry * ENTRY + which)
    }

    fn long(&self, entry: usize, which: usize) -> &AtomicU64 {
        self.0.u64(entry * ENTRY + which)
    }
}

/// The place of `key`: a multiple of the golden ratio, whose high bits depend on all of the key.
fn place(key: u64) -> usize {
    let mixed = key.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> (u64::BITS - ENTRIES.trailing_zeros())) as usize
}

/// How far `entry` is from the place of `key`.
fn displacement(key: u64, entry: usize) -> usize {
    (entry + ENTRIES - place(key)) % ENTRIES
}

/// Where `key` may be, in the order in which to look.
fn probe(key: WindowKey) -> impl Iterator<Item = usize> {
    let first = place(key.get());
    (0..ENTRIES).map(move |step| (first + step) % ENTRIES)
}

/// A held lock.
pub(super) struct Locked<'a> {
    word: &'a AtomicU32,
    held: u32,
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.word.fetch_sub(self.held, Ordering::Release);
    }
}

/// Waits while `busy`, which lasts as long as a copy, unless a process has died or stopped in it.
fn patiently(busy: impl Fn() -> bool, check: &dyn Fn() -> Result<(), CommError>) -> Result<(), CommError> {
    let mut looks = 0;
    while busy() {
        looks += 1;
        if looks < LOOKS {
            thread::yield_now();
        } else {
            check()?;
            thread::sleep(Duration::from_micros(100));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::AtomicBool;

    use proptest::prelude::*;

    use super::*;

    fn table() -> (Table, Table) {
        let file = SharedFile::create().unwrap();
        file.set_length(Table::BYTES as u64).unwrap();
        (Table::map(&file, 0).unwrap(), Table::map(&file, 0).unwrap())
    }

    fn extent(key: u64) -> Extent {
        Extent { offset: key, length: !key }
    }

    fn show(table: &Table, key: u64) {
        let window = WindowKey::new(key);
        let entry = table.find(window).or_else(|| table.claim(window)).unwrap();
        table.show(entry, extent(key));
    }

    fn withdraw(table: &Table, key: u64) {
        if let Some(entry) = table.find(WindowKey::new(key)) {
            table.hide(entry);
            table.tidy(entry);
        }
    }

    fn read(table: &Table, key: u64) -> Option<Extent> {
        let window = WindowKey::new(key);
        table.extent_of(window, table.find(window)?)
    }

    /// How many entries the lookup of a key that is not there looks at.
    fn looks(table: &Table, key: u64) -> usize {
        let state = |entry: &usize| table.state(*entry).load(Ordering::Relaxed);
        probe(WindowKey::new(key)).take_while(|entry| state(entry) != FREE).count() + 1
    }

    fn used(table: &Table) -> usize {
        (0..ENTRIES).filter(|entry| table.state(*entry).load(Ordering::Relaxed) != FREE).count()
    }

    /// Keys of one place.
    fn rivals(place_: usize) -> impl Iterator<Item = u64> {
        (0..).filter(move |key| place(*key) == place_)
    }

    #[test]
    fn lookups_stay_short_however_many_windows_have_come_and_gone() {
        let (owner, reader) = table();
        // Some stay throughout, some for a while.
        const STAY: u64 = 1000;
        (0..STAY).for_each(|key| show(&owner, key << 40));
        for key in 1..=3 * ENTRIES as u64 {
            show(&owner, key);
            if key > 100 {
                withdraw(&owner, key - 100);
            }
        }
        let longest = (1 << 20..).step_by(31).take(20_000).map(|key| looks(&reader, key)).max();
        assert!(longest < Some(32), "{longest:?}");
        for key in 0..STAY {
            assert_eq!(read(&reader, key << 40), Some(extent(key << 40)));
            withdraw(&owner, key << 40);
        }
        (1..=3 * ENTRIES as u64).rev().take(100).for_each(|key| withdraw(&owner, key));
        assert_eq!(used(&reader), 0);
    }

    #[test]
    fn keys_of_one_place_are_found_whichever_of_them_go() {
        for last in [5, ENTRIES - 2] {
            let (owner, reader) = table();
            let keys: Vec<_> = rivals(last).take(4).chain(rivals(last + 1).take(3)).collect();
            for gone in 0..1 << keys.len() {
                keys.iter().for_each(|key| show(&owner, *key));
                let is_gone = |index: usize| gone >> index & 1 == 1;
                for (index, key) in keys.iter().enumerate().filter(|(index, _)| is_gone(*index)) {
                    assert_eq!(read(&reader, *key), Some(extent(*key)), "{index}");
                    withdraw(&owner, *key);
                }
                for (index, key) in keys.iter().enumerate() {
                    assert_eq!(read(&reader, *key), (!is_gone(index)).then_some(extent(*key)), "{gone:b}");
                    withdraw(&owner, *key);
                }
                assert_eq!(used(&reader), 0);
            }
        }
    }

    #[test]
    fn a_table_without_a_free_entry_gets_free_again() {
        let (owner, reader) = table();
        for key in 0..ENTRIES as u64 {
            show(&owner, key);
        }
        assert_eq!((used(&reader), owner.claim(WindowKey::new(1 << 40))), (ENTRIES, None));
        for key in 0..20 {
            withdraw(&owner, key);
            assert_eq!(read(&reader, key), None);
        }
        for key in 20..ENTRIES as u64 {
            assert_eq!(read(&reader, key), Some(extent(key)));
        }
    }

    #[test]
    fn a_window_that_stays_is_found_while_others_come_and_go() {
        let (owner, reader) = table();
        let (keys, done): (Vec<_>, _) = (rivals(7).take(8).collect(), AtomicBool::new(false));
        keys.iter().for_each(|key| show(&owner, *key));
        let (stays, others) = keys.split_last().unwrap();
        thread::scope(|scope| {
            let reading = scope.spawn(|| {
                let mut reads = 0;
                while !done.load(Ordering::Relaxed) || reads == 0 {
                    assert_eq!(read(&reader, *stays), Some(extent(*stays)));
                    reads += 1;
                }
            });
            for turn in 0..20_000 {
                let key = others[turn % others.len()];
                withdraw(&owner, key);
                show(&owner, key);
            }
            done.store(true, Ordering::Relaxed);
            reading.join().unwrap();
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

        #[test]
        fn a_table_is_a_map(acts in prop::collection::vec((any::<bool>(), 0..48_usize), 0..400)) {
            let (owner, reader) = table();
            // Few places, so that they get into each other's way, at the end of the table too.
            let keys: Vec<_> =
                [3, 4, 7, ENTRIES - 2, ENTRIES - 1, 0].iter().flat_map(|place| rivals(*place).take(8)).collect();
            let mut model = BTreeMap::new();
            for (shows, index) in acts {
                let key = keys[index];
                if shows {
                    show(&owner, key);
                    model.insert(key, extent(key));
                } else {
                    withdraw(&owner, key);
                    model.remove(&key);
                }
                for key in &keys {
                    prop_assert_eq!(read(&reader, *key), model.get(key).copied());
                }
            }
            model.keys().for_each(|key| withdraw(&owner, *key));
            prop_assert_eq!(used(&reader), 0);
        }
    }
}
