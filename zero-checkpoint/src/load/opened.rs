//! A checkpoint's folder that is being read.

use std::io;
use std::sync::Arc;

use crate::error::CheckpointError;
use crate::folder;
use crate::storage::{ReadFile, ReadFolder, Storage, Usage};

/// A folder, marked as being read: the same one, whatever gets its name.
pub(crate) struct OpenedFolder {
    storage: Arc<dyn Storage>,
    name: String,
    /// `None` where the storage knows folders by their names only.
    itself: Option<Box<dyn ReadFolder>>,
    _mark: Box<dyn Send + Sync>,
}

impl OpenedFolder {
    /// `None` if there is no such folder, or if it is being removed.
    pub(crate) fn open(storage: &Arc<dyn Storage>, name: &str) -> Result<Option<Self>, CheckpointError> {
        let opened = storage.open_folder(name).and_then(|itself| {
            let mark = match &itself {
                Some(itself) => itself.mark(),
                None => storage.mark(name, Usage::Shared),
            };
            Ok(mark?.map(|mark| (itself, mark)))
        });
        match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(folder::failed(storage.as_ref(), "mark", name)(error)),
            Ok(opened) => Ok(opened.map(|(itself, mark)| Self {
                storage: Arc::clone(storage),
                name: name.to_owned(),
                itself,
                _mark: mark,
            })),
        }
    }

    /// What it was called when it was opened.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn file(&self, name: &str) -> io::Result<Box<dyn ReadFile>> {
        match &self.itself {
            Some(itself) => itself.open(name),
            None => self.storage.open(&format!("{}/{name}", self.name)),
        }
    }

    /// Itself as errors call it.
    pub(crate) fn place(&self) -> String {
        folder::shown(self.storage.as_ref(), &self.name)
    }

    /// A file as errors call it.
    pub(crate) fn shown(&self, file: &str) -> String {
        format!("{}/{file}", self.place())
    }

    /// The error of an action on a file.
    pub(crate) fn failed(
        &self,
        action: &'static str,
        file: &str,
    ) -> impl Fn(io::Error) -> CheckpointError + use<> {
        let path = self.shown(file);
        move |source| CheckpointError::Storage { action, path: path.clone(), source }
    }
}
