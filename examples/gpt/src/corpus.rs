//! Text as bytes: what to train on, what to hold out, and which rows a step sees.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use zero_burn::Digest;

use crate::rows::Rows;

/// Text is dealt to training and held-out in blocks of this many bytes.
const BLOCK: usize = 4096;
/// Every so many blocks, one is held out.
const HELD_OUT_EVERY: usize = 16;
/// What counts as text when a folder is given.
const EXTENSIONS: [&str; 4] = ["md", "rs", "toml", "txt"];

/// The text, split once.
#[derive(Clone, Debug)]
pub struct Corpus {
    train: Vec<u8>,
    held_out: Vec<u8>,
    files: Vec<PathBuf>,
    /// Tokens of a row.
    context: usize,
}

impl Corpus {
    /// Reads files, and the text files below folders, in the order of their names; rows have `context` tokens.
    ///
    /// # Errors
    ///
    /// Names the path that is missing, unreadable, or without text; refuses a text too short for one row.
    pub fn read(paths: &[PathBuf], context: usize) -> Result<Self> {
        let mut files = Vec::new();
        for path in paths {
            let before = files.len();
            collect(path, &mut files)?;
            ensure!(
                files.len() > before,
                "the corpus {} has no text files (looked for {})",
                path.display(),
                EXTENSIONS.map(|extension| format!(".{extension}")).join(", ")
            );
        }
        let mut text = Vec::new();
        for file in &files {
            let bytes =
                fs::read(file).with_context(|| format!("cannot read the corpus file {}", file.display()))?;
            text.extend_from_slice(&bytes);
        }
        let (mut train, mut held_out) = (Vec::new(), Vec::new());
        for (index, block) in text.chunks(BLOCK).enumerate() {
            let side = if index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 { &mut held_out } else { &mut train };
            side.extend_from_slice(block);
        }
        if held_out.len() <= context {
            // A short text: its tail is held out.
            let tail = text.len() / 10;
            train = text[..text.len() - tail].to_vec();
            held_out = text[text.len() - tail..].to_vec();
        }
        for (name, side) in [("training", &train), ("held-out", &held_out)] {
            ensure!(
                side.len() > context,
                "the corpus is too short: {} bytes leave {} for {name}, a row takes {}; give more text or a smaller \
                 `context`",
                text.len(),
                side.len(),
                context + 1
            );
        }
        Ok(Self { train, held_out, files, context })
    }

    /// Bytes to train on.
    pub fn train_bytes(&self) -> usize {
        self.train.len()
    }

    /// The hash of the text to train on.
    pub fn digest(&self) -> String {
        Digest::of(&self.train).to_string()
    }

    /// Bytes held out.
    pub fn held_out_bytes(&self) -> usize {
        self.held_out.len()
    }

    /// Files that were read.
    pub fn files(&self) -> usize {
        self.files.len()
    }

    /// Whether `path` is one of the files.
    pub fn contains(&self, path: &Path) -> bool {
        let Ok(path) = path.canonicalize() else { return false };
        self.files.iter().any(|file| file.canonicalize().is_ok_and(|file| file == path))
    }

    /// The rows of one step that stand in `range` of the global batch: the same rows whoever asks for them.
    pub fn training_rows(&self, seed: u64, step: usize, range: Range<usize>) -> Rows {
        let starts = (self.train.len() - self.context) as u64;
        let row = |row| {
            let start = (scramble(seed, step as u64, row as u64) % starts) as usize;
            &self.train[start..=start + self.context]
        };
        Rows::new(range.flat_map(row).copied().collect(), self.context)
    }

    /// At most `limit` rows spread evenly over the held-out text.
    pub fn held_out_rows(&self, limit: usize) -> Rows {
        let rows = (self.held_out.len() / (self.context + 1)).min(limit);
        let stride = self.held_out.len() / rows.max(1);
        let row = |row| &self.held_out[row * stride..=row * stride + self.context];
        Rows::new((0..rows).flat_map(row).copied().collect(), self.context)
    }
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let metadata =
        fs::metadata(path).with_context(|| format!("the corpus {} cannot be read", path.display()))?;
    if metadata.is_file() {
        files.push(path.to_owned());
        return Ok(());
    }
    if !metadata.is_dir() {
        bail!("the corpus {} is neither a file nor a folder", path.display());
    }
    let entries =
        fs::read_dir(path).with_context(|| format!("cannot list the corpus folder {}", path.display()))?;
    let mut entries = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    entries.sort();
    for entry in entries {
        let name = entry.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let is_text =
            || entry.extension().is_some_and(|extension| EXTENSIONS.iter().any(|known| extension == *known));
        if name.starts_with('.') || name == "target" || entry.is_symlink() {
            continue;
        }
        if entry.is_dir() || is_text() {
            collect(&entry, files)?;
        }
    }
    Ok(())
}

/// A fixed pseudo-random function of its arguments: three rounds of SplitMix64 (Steele, Lea and Flood, 2014).
fn scramble(seed: u64, step: u64, row: u64) -> u64 {
    [seed, step, row].into_iter().fold(0, |state: u64, input| {
        let mut z = (state ^ input).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}
