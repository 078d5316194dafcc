//! The windows that one rank shows to the other ranks of its host.
//!
//! An arena is a range of the group's shared file that only its owner writes to: a table of windows, and their
//! contents. Each window has a lock of its own, held while its content is written or read, so a reader waits for
//! nothing but a copy in progress, and a window can be replaced in place: what a rank exposes takes its size once.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use super::segment::{Segment, SharedFile};
use super::table::{Entry, Extent, Table, WINDOWS};
use crate::{CommError, WindowKey, lock};

/// Where contents begin.
const CONTENTS: u64 = Table::BYTES as u64;

/// Contents begin at multiples of this, and take multiples of it.
const PAGE: u64 = 4096;

/// Why a window cannot be exposed or read.
#[derive(Debug)]
pub(crate) enum ArenaError {
    /// There is no such window.
    Missing,
    /// The window has only so many bytes.
    Bounds { available: usize },
    /// There is no room for another window.
    Full(String),
    /// Waiting has come to an end.
    Wait(CommError),
}

/// One rank's arena, for its owner to write and for others to read.
#[derive(Debug)]
pub(crate) struct Arena {
    file: SharedFile,
    /// Where in the file the arena begins.
    start: u64,
    table: Table,
    /// As much as has been needed so far; replaced by a longer one when more is.
    contents: Mutex<Option<Arc<Segment>>>,
    /// Used by the owner only.
    room: Mutex<Room>,
}

impl Arena {
    /// How much of the file belongs to one arena. Only what is written to takes memory.
    pub(crate) const BYTES: u64 = 1 << 40;

    /// The `index`-th arena of `file`, from `offset` on.
    pub(crate) fn new(file: SharedFile, offset: u64, index: usize) -> io::Result<Self> {
        let start = offset + index as u64 * Self::BYTES;
        let table = Table::map(&file, start)?;
        Ok(Self { file, start, table, contents: Mutex::new(None), room: Mutex::default() })
    }

    /// For the owner: shows `bytes` as the window `key`, in place of what was there.
    ///
    /// `check` is asked from time to time whether to wait on for readers of what was there.
    pub(crate) fn expose(
        &self,
        key: WindowKey,
        bytes: &[u8],
        check: &dyn Fn() -> Result<(), CommError>,
    ) -> Result<(), ArenaError> {
        let mut room = lock(&self.room);
        let entry = match self.table.find(key) {
            Some(entry) => Some(entry),
            None if room.windows == WINDOWS => None,
            None => self.table.claim(key),
        };
        let entry = entry.ok_or_else(|| {
            ArenaError::Full(format!("a rank can show {WINDOWS} windows to a group; withdraw some"))
        })?;
        let outcome = self.fill(&mut room, entry, bytes, check);
        if outcome.is_err() {
            self.table.tidy(entry);
        }
        outcome
    }

    /// Makes `bytes` the content of the window of `entry`, and shows it.
    fn fill(
        &self,
        room: &mut Room,
        entry: Entry,
        bytes: &[u8],
        check: &dyn Fn() -> Result<(), CommError>,
    ) -> Result<(), ArenaError> {
        let _writing = self.table.lock_writing(entry, check).map_err(ArenaError::Wait)?;
        let before = self.table.extent(entry);
        // Until it is whole, the window is not there.
        self.table.hide(entry);
        room.windows -= usize::from(before.is_some());
        let (held, needed) = (before.map_or(0, held), (bytes.len() as u64).next_multiple_of(PAGE));
        let offset = match before {
            Some(before) if held == needed => before.offset,
            _ => {
                self.give_back(room, before.map_or(0, |before| before.offset), held);
                self.take(room, needed)?
            }
        };
        if !bytes.is_empty() {
            let contents = self.contents(offset + needed).map_err(|error| {
                self.give_back(room, offset, needed);
                Self::no_memory(needed, &error)
            })?;
            // SAFETY: the range belongs to this window alone, whose lock is held for writing.
            unsafe { contents.bytes_mut(offset as usize, bytes.len()) }.copy_from_slice(bytes);
        }
        self.table.show(entry, Extent { offset, length: bytes.len() as u64 });
        room.windows += 1;
        Ok(())
    }

    /// For the owner: takes the window `key` back, if there is one.
    pub(crate) fn withdraw(
        &self,
        key: WindowKey,
        check: &dyn Fn() -> Result<(), CommError>,
    ) -> Result<(), ArenaError> {
        let mut room = lock(&self.room);
        let Some(entry) = self.table.find(key) else { return Ok(()) };
        let _writing = self.table.lock_writing(entry, check).map_err(ArenaError::Wait)?;
        if let Some(before) = self.table.extent(entry) {
            self.table.hide(entry);
            room.windows -= 1;
            self.give_back(&mut room, before.offset, held(before));
            self.table.tidy(entry);
        }
        Ok(())
    }

    /// Fills `into` from the window `key`, from byte `offset` on.
    ///
    /// `check` is asked from time to time whether to wait on for a copy that the owner is making.
    pub(crate) fn read(
        &self,
        key: WindowKey,
        offset: usize,
        into: &mut [u8],
        check: &dyn Fn() -> Result<(), CommError>,
    ) -> Result<(), ArenaError> {
        let entry = self.table.find(key).ok_or(ArenaError::Missing)?;
        let _reading = self.table.lock_reading(entry, check).map_err(ArenaError::Wait)?;
        // The entry may have become another window's meanwhile.
        let extent = self.table.extent_of(key, entry).ok_or(ArenaError::Missing)?;
        let available = extent.length as usize;
        if offset > available || into.len() > available - offset {
            return Err(ArenaError::Bounds { available });
        }
        if into.is_empty() {
            return Ok(());
        }
        let start = extent.offset + offset as u64;
        let end = start + into.len() as u64;
        let contents = self.contents(end).map_err(|error| Self::no_memory(end, &error))?;
        // SAFETY: the range belongs to this window, whose lock is held for reading.
        into.copy_from_slice(unsafe { contents.bytes(start as usize, into.len()) });
        Ok(())
    }

    /// The mapped contents, at least up to `end`.
    fn contents(&self, end: u64) -> io::Result<Arc<Segment>> {
        let mut contents = lock(&self.contents);
        if let Some(contents) = contents.as_ref().filter(|contents| contents.len() as u64 >= end) {
            return Ok(Arc::clone(contents));
        }
        let most = Self::BYTES - CONTENTS;
        if end > most {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let length = end.next_power_of_two().clamp(1 << 20, most);
        let longer = Arc::new(Segment::map(&self.file, self.start + CONTENTS, length as usize)?);
        *contents = Some(Arc::clone(&longer));
        Ok(longer)
    }

    /// Where there is room for a window that takes `length`; anywhere, if that is nothing.
    fn take(&self, room: &mut Room, length: u64) -> Result<u64, ArenaError> {
        if length == 0 {
            return Ok(0);
        }
        let offset = room.take(length);
        if let Err(error) = self.file.reserve(self.start + CONTENTS + offset, length) {
            room.give_back(offset);
            return Err(Self::no_memory(length, &error));
        }
        Ok(offset)
    }

    /// Gives back what [`take`](Self::take) gave for as much.
    fn give_back(&self, room: &mut Room, offset: u64, length: u64) {
        if length == 0 {
            return;
        }
        room.give_back(offset);
        if let Err(error) = self.file.release(self.start + CONTENTS + offset, length) {
            tracing::warn!(%error, length, "could not give shared memory back");
        }
    }

    fn no_memory(length: u64, error: &io::Error) -> ArenaError {
        ArenaError::Full(format!("there are not {length} bytes of shared memory for a window: {error}"))
    }
}

/// How much a window takes.
const fn held(extent: Extent) -> u64 {
    extent.length.next_multiple_of(PAGE)
}

/// What the owner knows of its windows. All lengths are multiples of a page, and none is zero.
#[derive(Debug, Default)]
struct Room {
    /// Offset to length.
    taken: BTreeMap<u64, u64>,
    /// How many windows are shown.
    windows: usize,
}

impl Room {
    /// The first gap that is large enough.
    fn take(&mut self, length: u64) -> u64 {
        let mut at = 0;
        for (offset, taken) in &self.taken {
            if offset - at >= length {
                break;
            }
            at = offset + taken;
        }
        self.taken.insert(at, length);
        at
    }

    fn give_back(&mut self, offset: u64) {
        self.taken.remove(&offset);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const PATIENT: &dyn Fn() -> Result<(), CommError> = &|| Ok(());

    fn arena() -> (Arena, Arena) {
        let file = SharedFile::create().unwrap();
        file.set_length(Arena::BYTES).unwrap();
        (Arena::new(file.clone(), 0, 0).unwrap(), Arena::new(file, 0, 0).unwrap())
    }

    fn key(value: u64) -> WindowKey {
        WindowKey::new(value)
    }

    #[test]
    fn room_is_used_again() {
        let mut room = Room::default();
        let places: Vec<_> = (0..4).map(|_| room.take(PAGE)).collect();
        assert_eq!(places, [0, PAGE, 2 * PAGE, 3 * PAGE]);
        room.give_back(PAGE);
        room.give_back(2 * PAGE);
        assert_eq!(room.take(3 * PAGE), 4 * PAGE);
        assert_eq!(room.take(2 * PAGE), PAGE);
    }

    #[test]
    fn a_window_is_read_through_another_mapping() {
        let (owner, reader) = arena();
        for length in [0, 1, 4096, 4097, 3 << 20] {
            let content: Vec<u8> = (0..length).map(|index| index as u8).collect();
            owner.expose(key(7), &content, PATIENT).unwrap();
            let mut read = vec![0; length];
            reader.read(key(7), 0, &mut read, PATIENT).unwrap();
            assert_eq!(read, content);
        }
    }

    #[test]
    fn windows_without_content_leave_others_alone() {
        let (owner, reader) = arena();
        let content = |key: u64, length: usize| vec![key as u8 + 1; length];
        let whole = |key_: u64, length: usize| {
            let mut read = vec![0; length];
            reader.read(key(key_), 0, &mut read, PATIENT).unwrap();
            assert_eq!(read, content(key_, length));
        };
        owner.expose(key(0), &[], PATIENT).unwrap();
        owner.expose(key(1), &content(1, 100), PATIENT).unwrap();
        // Again; in place of something; something in its place; gone.
        owner.expose(key(0), &[], PATIENT).unwrap();
        whole(1, 100);
        owner.expose(key(2), &content(2, 9000), PATIENT).unwrap();
        owner.expose(key(2), &[], PATIENT).unwrap();
        whole(1, 100);
        owner.expose(key(0), &content(0, 4096), PATIENT).unwrap();
        whole(1, 100);
        whole(0, 4096);
        owner.withdraw(key(2), PATIENT).unwrap();
        owner.expose(key(2), &content(2, 1), PATIENT).unwrap();
        for (key, length) in [(0, 4096), (1, 100), (2, 1)] {
            whole(key, length);
        }
    }

    #[test]
    fn many_windows_come_and_go() {
        let (owner, reader) = arena();
        for round in 0..3_u64 {
            for index in 0..500 {
                owner.expose(key(index), &(index * round).to_le_bytes(), PATIENT).unwrap();
            }
            for index in (0..500).filter(|index| index % 3 == round) {
                owner.withdraw(key(index), PATIENT).unwrap();
            }
            for index in 0..500 {
                let mut read = [0; 8];
                match reader.read(key(index), 0, &mut read, PATIENT) {
                    Ok(()) => assert_eq!(u64::from_le_bytes(read), index * round),
                    Err(error) => {
                        assert!(matches!(error, ArenaError::Missing) && index % 3 == round, "{error:?}");
                    }
                }
            }
        }
        assert_eq!(lock(&owner.room).taken.len(), 500 - 166);
    }

    #[test]
    fn what_is_not_there_is_told() {
        let (owner, reader) = arena();
        owner.expose(key(1), &[1; 10], PATIENT).unwrap();
        let read = |key, offset, length| reader.read(key, offset, &mut vec![0; length], PATIENT);
        assert!(matches!(read(key(2), 0, 0), Err(ArenaError::Missing)));
        assert!(matches!(read(key(1), 4, 7), Err(ArenaError::Bounds { available: 10 })));
        assert!(matches!(read(key(1), usize::MAX, 2), Err(ArenaError::Bounds { available: 10 })));
        assert!(read(key(1), 10, 0).is_ok());
    }

    #[test]
    fn windows_beyond_the_table_are_refused() {
        let (owner, _) = arena();
        for index in 0..WINDOWS as u64 {
            owner.expose(key(index), &[], PATIENT).unwrap();
        }
        let full = owner.expose(key(1 << 40), &[], PATIENT);
        assert!(matches!(full, Err(ArenaError::Full(_))), "{full:?}");
        owner.withdraw(key(5), PATIENT).unwrap();
        owner.expose(key(1 << 40), &[], PATIENT).unwrap();
    }

    #[test]
    fn a_reader_sees_one_content_whole() {
        let (owner, reader) = arena();
        owner.expose(key(1), &[0; 40_000], PATIENT).unwrap();
        thread::scope(|scope| {
            let reading = scope.spawn(|| {
                let mut last = 0;
                while last < 200 {
                    let mut read = [0; 40_000];
                    reader.read(key(1), 0, &mut read, PATIENT).unwrap();
                    assert!(read.iter().all(|byte| *byte == read[0]));
                    assert!(read[0] >= last);
                    last = read[0];
                }
            });
            for content in 1..=200 {
                owner.expose(key(1), &[content; 40_000], PATIENT).unwrap();
            }
            reading.join().unwrap();
        });
    }

    #[test]
    fn the_patience_of_a_reader_ends() {
        let (owner, reader) = arena();
        owner.expose(key(1), &[0; 10], PATIENT).unwrap();
        let entry = owner.table.find(key(1)).unwrap();
        let _stopped = owner.table.lock_writing(entry, PATIENT).unwrap();
        let aborted = || {
            Err(CommError::WindowMissing { peer: zero_core::Rank::ROOT, key: key(1), label: String::new() })
        };
        let read = reader.read(key(1), 0, &mut [0], &aborted);
        assert!(matches!(read, Err(ArenaError::Wait(_))), "{read:?}");
    }
}
