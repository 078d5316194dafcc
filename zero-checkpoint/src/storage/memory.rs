//! Checkpoints in memory.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::storage::marks::Marks;
use crate::storage::{ReadFile, ReadFolder, Storage, Usage, WriteFile};

/// A place in this process's memory, for tests and for what need not outlive it. Clones are the same place.
#[derive(Clone, Debug, Default)]
pub struct MemoryStorage {
    state: Arc<Mutex<State>>,
    /// By number: a folder's name may change.
    marks: Marks<u64>,
}

#[derive(Debug, Default)]
struct State {
    /// Folders by name, files by name within.
    folders: BTreeMap<String, Folder>,
    next: u64,
}

#[derive(Debug)]
struct Folder {
    id: u64,
    files: BTreeMap<String, Arc<[u8]>>,
}

impl MemoryStorage {
    /// An empty place.
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Display for MemoryStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("memory")
    }
}

fn not_found(path: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("there is no `{path}`"))
}

impl Storage for MemoryStorage {
    fn list(&self, folder: &str) -> io::Result<Vec<String>> {
        let state = self.state();
        if folder.is_empty() {
            return Ok(state.folders.keys().cloned().collect());
        }
        Ok(state.folders.get(folder).map(|folder| folder.files.keys().cloned().collect()).unwrap_or_default())
    }

    fn create_folder(&self, folder: &str) -> io::Result<()> {
        let mut state = self.state();
        state.next += 1;
        let new = Folder { id: state.next, files: BTreeMap::new() };
        state.folders.entry(folder.to_owned()).or_insert(new);
        Ok(())
    }

    fn create(&self, path: &str, bytes: u64) -> io::Result<Box<dyn WriteFile>> {
        let (folder, name) = path.rsplit_once('/').ok_or_else(|| not_found(path))?;
        if !self.state().folders.contains_key(folder) {
            return Err(not_found(folder));
        }
        let written = Vec::with_capacity(bytes as usize);
        Ok(Box::new(Writing { place: self.clone(), folder: folder.into(), name: name.into(), written }))
    }

    fn open(&self, path: &str) -> io::Result<Box<dyn ReadFile>> {
        let (folder, name) = path.rsplit_once('/').ok_or_else(|| not_found(path))?;
        let state = self.state();
        let file = state.folders.get(folder).and_then(|folder| folder.files.get(name));
        Ok(Box::new(Reading(Arc::clone(file.ok_or_else(|| not_found(path))?))))
    }

    fn open_folder(&self, folder: &str) -> io::Result<Option<Box<dyn ReadFolder>>> {
        let id = self.state().folders.get(folder).ok_or_else(|| not_found(folder))?.id;
        Ok(Some(Box::new(OpenFolder { place: self.clone(), id })))
    }

    fn sync_folder(&self, _folder: &str) -> io::Result<()> {
        Ok(())
    }

    fn renames(&self) -> bool {
        true
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.state();
        let moved = state.folders.remove(from).ok_or_else(|| not_found(from))?;
        if let Some(replaced) = state.folders.insert(to.to_owned(), moved) {
            state.folders.insert(from.to_owned(), replaced);
        }
        Ok(())
    }

    fn remove_folder(&self, folder: &str) -> io::Result<()> {
        self.state().folders.remove(folder);
        Ok(())
    }

    fn mark(&self, folder: &str, usage: Usage) -> io::Result<Option<Box<dyn Send + Sync>>> {
        let id = self.state().folders.get(folder).ok_or_else(|| not_found(folder))?.id;
        let mark = self.marks.mark(id, usage);
        Ok(mark.map(|mark| Box::new(mark) as Box<dyn Send + Sync>))
    }
}

struct OpenFolder {
    place: MemoryStorage,
    id: u64,
}

impl ReadFolder for OpenFolder {
    fn open(&self, name: &str) -> io::Result<Box<dyn ReadFile>> {
        let state = self.place.state();
        let folder = state.folders.values().find(|folder| folder.id == self.id);
        let file = folder.and_then(|folder| folder.files.get(name));
        Ok(Box::new(Reading(Arc::clone(file.ok_or_else(|| not_found(name))?))))
    }

    fn mark(&self) -> io::Result<Option<Box<dyn Send + Sync>>> {
        let mark = self.place.marks.mark(self.id, Usage::Shared);
        Ok(mark.map(|mark| Box::new(mark) as Box<dyn Send + Sync>))
    }
}

struct Writing {
    place: MemoryStorage,
    folder: String,
    name: String,
    written: Vec<u8>,
}

impl WriteFile for Writing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written.extend_from_slice(bytes);
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        let mut state = self.place.state();
        let folder = state.folders.get_mut(&self.folder).ok_or_else(|| not_found(&self.folder))?;
        folder.files.insert(self.name.clone(), std::mem::take(&mut self.written).into());
        Ok(())
    }
}

struct Reading(Arc<[u8]>);

impl ReadFile for Reading {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let part = usize::try_from(offset)
            .ok()
            .and_then(|start| self.0.get(start..)?.get(..into.len()))
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        into.copy_from_slice(part);
        Ok(())
    }
}
