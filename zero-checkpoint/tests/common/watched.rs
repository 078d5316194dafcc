//! A storage around another one that counts what is read and can be told to fail.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use zero_checkpoint::{ReadFile, Storage, Usage, WriteFile};

/// Decides about an operation on a path: an error fails it.
pub(crate) type Rule = Box<dyn Fn(&str, &str) -> io::Result<()> + Send + Sync>;

pub(crate) struct Watched {
    inner: Arc<dyn Storage>,
    reads: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    rule: Arc<Rule>,
}

impl Watched {
    pub(crate) fn new(inner: Arc<dyn Storage>) -> Self {
        Self::with_rule(inner, Box::new(|_, _| Ok(())))
    }

    pub(crate) fn with_rule(inner: Arc<dyn Storage>, rule: Rule) -> Self {
        Self { inner, reads: Arc::default(), rule: Arc::new(rule) }
    }

    /// How often each byte of each file has been read.
    pub(crate) fn reads(&self) -> BTreeMap<String, Vec<u8>> {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Watched").field(&self.inner).finish()
    }
}

impl fmt::Display for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Storage for Watched {
    fn list(&self, folder: &str) -> io::Result<Vec<String>> {
        (self.rule)("list", folder)?;
        self.inner.list(folder)
    }

    fn create_folder(&self, folder: &str) -> io::Result<()> {
        (self.rule)("create_folder", folder)?;
        self.inner.create_folder(folder)
    }

    fn create(&self, path: &str, bytes: u64) -> io::Result<Box<dyn WriteFile>> {
        (self.rule)("create", path)?;
        let inner = self.inner.create(path, bytes)?;
        Ok(Box::new(Writing { inner, path: path.to_owned(), rule: Arc::clone(&self.rule) }))
    }

    fn open(&self, path: &str) -> io::Result<Box<dyn ReadFile>> {
        (self.rule)("open", path)?;
        let inner = self.inner.open(path)?;
        let mut reads = self.reads.lock().unwrap_or_else(PoisonError::into_inner);
        reads.entry(path.to_owned()).or_insert_with(|| vec![0; inner.bytes() as usize]);
        Ok(Box::new(Reading {
            inner,
            path: path.to_owned(),
            reads: Arc::clone(&self.reads),
            rule: Arc::clone(&self.rule),
        }))
    }

    fn sync_folder(&self, folder: &str) -> io::Result<()> {
        (self.rule)("sync_folder", folder)?;
        self.inner.sync_folder(folder)
    }

    fn renames(&self) -> bool {
        self.inner.renames()
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        (self.rule)("rename", from)?;
        self.inner.rename(from, to)
    }

    fn remove_folder(&self, folder: &str) -> io::Result<()> {
        (self.rule)("remove_folder", folder)?;
        self.inner.remove_folder(folder)
    }

    fn mark(&self, folder: &str, usage: Usage) -> io::Result<Option<Box<dyn Send + Sync>>> {
        (self.rule)("mark", folder)?;
        self.inner.mark(folder, usage)
    }
}

struct Writing {
    inner: Box<dyn WriteFile>,
    path: String,
    rule: Arc<Rule>,
}

impl WriteFile for Writing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        (self.rule)("write", &self.path)?;
        self.inner.write(bytes)
    }

    fn finish(&mut self) -> io::Result<()> {
        (self.rule)("finish", &self.path)?;
        self.inner.finish()
    }
}

struct Reading {
    inner: Box<dyn ReadFile>,
    path: String,
    reads: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    rule: Arc<Rule>,
}

impl ReadFile for Reading {
    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        (self.rule)("read", &self.path)?;
        self.inner.read(offset, into)?;
        let mut reads = self.reads.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = reads.get_mut(&self.path).expect("opened before");
        let start = offset as usize;
        counts[start..start + into.len()].iter_mut().for_each(|count| *count += 1);
        Ok(())
    }
}
