//! A disk that loses what was not made durable.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zero_checkpoint::{ReadFile, Storage, Usage, WriteFile};

/// A file system in memory that promises no more than POSIX does: content is durable after `finish`, a name after
/// `sync_folder` of the folder that has it; whatever was not made durable may be lost, each change by itself.
///
/// After a given number of operations the power fails: that operation and all later ones are errors.
#[derive(Clone)]
pub(crate) struct FailingPower {
    state: Arc<Mutex<State>>,
}

#[derive(Clone, Default)]
struct State {
    /// What a program sees.
    seen: Tree,
    /// What is on the disk for sure.
    durable: Tree,
    /// Changes of names that are not durable, in order, by the folder that has the names: 0 is the root.
    pending: Vec<(u64, Change)>,
    files: BTreeMap<u64, File>,
    next: u64,
    /// Operations until the power fails.
    left: u64,
}

#[derive(Clone, Default)]
struct Tree {
    folders: BTreeMap<String, u64>,
    /// Files by folder and name.
    names: BTreeMap<(u64, String), u64>,
}

#[derive(Clone, Default)]
struct File {
    content: Vec<u8>,
    finished: bool,
}

#[derive(Clone)]
enum Change {
    AddFolder(String, u64),
    Rename(String, String),
    RemoveFolder(String),
    Add(String, u64),
    Remove(String),
}

impl Tree {
    fn apply(&mut self, folder: u64, change: &Change) {
        match change {
            Change::AddFolder(name, id) => drop(self.folders.insert(name.clone(), *id)),
            Change::Rename(from, to) => {
                if let Some(moved) = self.folders.remove(from) {
                    if let Some(replaced) = self.folders.insert(to.clone(), moved) {
                        self.folders.insert(from.clone(), replaced);
                    }
                }
            }
            Change::RemoveFolder(name) => drop(self.folders.remove(name)),
            Change::Add(name, id) => drop(self.names.insert((folder, name.clone()), *id)),
            Change::Remove(name) => drop(self.names.remove(&(folder, name.clone()))),
        }
    }
}

impl State {
    fn change(&mut self, folder: u64, change: Change) {
        self.seen.apply(folder, &change);
        self.pending.push((folder, change));
    }

    fn operation(&mut self) -> io::Result<()> {
        if self.left == 0 {
            return Err(io::Error::other("the power has failed"));
        }
        self.left -= 1;
        Ok(())
    }

    fn folder(&self, name: &str) -> io::Result<u64> {
        if name.is_empty() {
            return Ok(0);
        }
        self.seen.folders.get(name).copied().ok_or(io::ErrorKind::NotFound.into())
    }
}

impl FailingPower {
    /// An empty disk whose power fails after so many operations.
    pub(crate) fn after(operations: u64) -> Self {
        Self { state: Arc::new(Mutex::new(State { left: operations, next: 1, ..State::default() })) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the power has failed.
    pub(crate) fn failed(&self) -> bool {
        self.state().left == 0
    }

    /// What is found when the power is back: of what was not durable, `keeps` decides each by itself.
    pub(crate) fn restored(&self, mut keeps: impl FnMut() -> bool) -> Self {
        let mut state = self.state().clone();
        let mut found = state.durable.clone();
        for (folder, change) in &state.pending {
            if keeps() {
                found.apply(*folder, change);
            }
        }
        for file in state.files.values_mut().filter(|file| !file.finished) {
            let length = file.content.len();
            match (keeps(), keeps()) {
                (false, false) => file.content.clear(),
                (false, true) => file.content.truncate(length / 2),
                // Blocks that were reserved, but never reached the disk.
                (true, false) => file.content.fill(0),
                (true, true) => {}
            }
        }
        state.files.values_mut().for_each(|file| file.finished = true);
        (state.seen, state.durable) = (found.clone(), found);
        state.pending.clear();
        state.left = u64::MAX;
        Self { state: Arc::new(Mutex::new(state)) }
    }
}

impl fmt::Debug for FailingPower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FailingPower").finish_non_exhaustive()
    }
}

impl fmt::Display for FailingPower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a disk with failing power")
    }
}

impl Storage for FailingPower {
    fn list(&self, folder: &str) -> io::Result<Vec<String>> {
        let state = self.state();
        if folder.is_empty() {
            return Ok(state.seen.folders.keys().cloned().collect());
        }
        let Ok(id) = state.folder(folder) else { return Ok(Vec::new()) };
        let names = state.seen.names.keys().filter(|(of, _)| *of == id);
        Ok(names.map(|(_, name)| name.clone()).collect())
    }

    fn create_folder(&self, folder: &str) -> io::Result<()> {
        let mut state = self.state();
        state.operation()?;
        let id = state.next;
        state.next += 1;
        state.change(0, Change::AddFolder(folder.to_owned(), id));
        Ok(())
    }

    fn create(&self, path: &str, _bytes: u64) -> io::Result<Box<dyn WriteFile>> {
        let (folder, name) = path.rsplit_once('/').ok_or(io::ErrorKind::NotFound)?;
        let mut state = self.state();
        state.operation()?;
        let (folder, id) = (state.folder(folder)?, state.next);
        state.next += 1;
        state.files.insert(id, File::default());
        state.change(folder, Change::Add(name.to_owned(), id));
        Ok(Box::new(Writing { disk: self.clone(), id }))
    }

    fn open(&self, path: &str) -> io::Result<Box<dyn ReadFile>> {
        let (folder, name) = path.rsplit_once('/').ok_or(io::ErrorKind::NotFound)?;
        let state = self.state();
        let id = state.seen.names.get(&(state.folder(folder)?, name.to_owned()));
        let file = id.and_then(|id| state.files.get(id)).ok_or(io::ErrorKind::NotFound)?;
        Ok(Box::new(Reading(file.content.clone())))
    }

    fn sync_folder(&self, folder: &str) -> io::Result<()> {
        let mut state = self.state();
        state.operation()?;
        let id = state.folder(folder)?;
        for (of, change) in std::mem::take(&mut state.pending) {
            if of == id {
                state.durable.apply(of, &change);
            } else {
                state.pending.push((of, change));
            }
        }
        Ok(())
    }

    fn renames(&self) -> bool {
        true
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.state();
        state.operation()?;
        state.folder(from)?;
        state.change(0, Change::Rename(from.to_owned(), to.to_owned()));
        Ok(())
    }

    fn remove_folder(&self, folder: &str) -> io::Result<()> {
        let mut state = self.state();
        state.operation()?;
        let Ok(id) = state.folder(folder) else { return Ok(()) };
        let names = state.seen.names.keys().filter(|(of, _)| *of == id);
        for name in names.map(|(_, name)| name.clone()).collect::<Vec<_>>() {
            state.change(id, Change::Remove(name));
        }
        state.change(0, Change::RemoveFolder(folder.to_owned()));
        Ok(())
    }

    fn mark(&self, folder: &str, _usage: Usage) -> io::Result<Option<Box<dyn Send + Sync>>> {
        // One process alone uses the disk, and what it marks it does not remove.
        self.state().folder(folder).map(|_| Some(Box::new(()) as Box<dyn Send + Sync>))
    }
}

struct Writing {
    disk: FailingPower,
    id: u64,
}

impl WriteFile for Writing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.disk.state();
        state.operation()?;
        state.files.entry(self.id).or_default().content.extend(bytes);
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        let mut state = self.disk.state();
        state.operation()?;
        state.files.entry(self.id).or_default().finished = true;
        Ok(())
    }
}

struct Reading(Vec<u8>);

impl ReadFile for Reading {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let start = offset as usize;
        let part = self.0.get(start..start + into.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        into.copy_from_slice(part);
        Ok(())
    }
}
