//! A tensor's place in a store.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::memory::PAGE;
use crate::store::Inner;
use crate::store::error::{Direction, StoreError};
use crate::store::file::DataFile;

use crate::store::span::Span;
use crate::store::transfer::{Request, checksum};

/// A tensor's place in an [`NvmeStore`](crate::NvmeStore): reserved space of a fixed size that reads as zeros until it
/// is written. Dropping it gives the space back.
///
/// Every block has two places in the file, and a write goes to those that do not hold the current content. Only
/// when all of it has been written are the places exchanged, in memory: a write that fails, or that a panic cuts
/// off, leaves what was there before. That costs twice the tensor's size on the disk.
///
/// A block that is written or read in part is read whole first, to check or keep the rest of it.
pub struct Slot {
    pub(crate) store: Arc<Inner>,
    extent: Arc<Extent>,
    blocks: Vec<Block>,
}

/// Which of a block's two places holds it, and the checksum of what is there; none before the first write.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Block {
    second: bool,
    sum: Option<u64>,
}

/// Blocks that have been written to their other places, to be made current together.
#[derive(Debug, Default)]
pub(crate) struct Staged(Vec<(usize, Block)>);

/// Reserved space; released with its last user.
#[derive(Debug)]
pub(crate) struct Extent {
    tensor: Arc<str>,
    bytes: u64,
    /// Both places of all blocks, one half each.
    range: Range<u64>,
    file: Arc<DataFile>,
}

impl Drop for Extent {
    fn drop(&mut self) {
        self.file.release(self.range.clone());
    }
}

impl Slot {
    pub(crate) fn reserve(store: Arc<Inner>, tensor: &str, bytes: u64) -> Result<Self, StoreError> {
        // More than any disk has, and than the sums below could hold.
        let wanted = bytes.checked_next_multiple_of(PAGE as u64).and_then(|place| place.checked_mul(2));
        let wanted =
            wanted.filter(|&wanted| i64::try_from(wanted).is_ok()).unwrap_or(i64::MAX as u64 & !8191);
        let range = store.file.reserve(tensor, wanted)?;
        let blocks = vec![Block::default(); bytes.div_ceil(store.block as u64) as usize];
        let file = Arc::clone(&store.file);
        let extent = Extent { tensor: tensor.into(), bytes, range, file };
        Ok(Self { store, extent: Arc::new(extent), blocks })
    }

    /// The name it was reserved under.
    pub fn name(&self) -> &str {
        &self.extent.tensor
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.extent.bytes
    }

    pub(crate) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Bytes of a block.
    pub(crate) fn block(&self) -> usize {
        self.store.block
    }

    /// Where a block begins in the tensor, in bytes.
    fn block_start(&self, block: usize) -> u64 {
        block as u64 * self.store.block as u64
    }

    /// How many bytes of the tensor a block holds.
    pub(crate) fn block_len(&self, block: usize) -> usize {
        // At most a block, which fits.
        (self.bytes() - self.block_start(block)).min(self.store.block as u64) as usize
    }

    /// What is transferred of a block: whole pages, of which the last may be longer than the tensor.
    pub(crate) fn stored_len(&self, block: usize) -> usize {
        self.block_len(block).next_multiple_of(PAGE)
    }

    /// Whether a block has been written; else it is all zeros.
    pub(crate) fn is_written(&self, block: usize) -> bool {
        self.blocks[block].sum.is_some()
    }

    /// A hold on the space, for reads that outlive a borrow of the slot. While there is one nothing is written.
    pub(crate) fn hold(&self) -> Arc<Extent> {
        Arc::clone(&self.extent)
    }

    pub(crate) fn check_not_read(&self) -> Result<(), StoreError> {
        if Arc::strong_count(&self.extent) > 1 {
            return Err(StoreError::Busy { tensor: self.name().to_owned() });
        }
        Ok(())
    }

    pub(crate) fn check_range(&self, offset: u64, length: usize) -> Result<(), StoreError> {
        let bytes = self.bytes();
        if offset.checked_add(length as u64).is_none_or(|end| end > bytes) {
            return Err(StoreError::Range { tensor: self.name().to_owned(), bytes, offset, length });
        }
        Ok(())
    }

    /// Fills with zeros what of `memory`, which is for `blocks` side by side, was never written.
    pub(crate) fn zero_unwritten(&self, blocks: Range<usize>, memory: &mut [u8]) {
        let first = blocks.start;
        for block in blocks.filter(|&block| !self.is_written(block)) {
            memory[(block - first) * self.store.block..][..self.stored_len(block)].fill(0);
        }
    }

    /// The requests that read `blocks`, side by side, into `memory`, all but those never written: for their memory
    /// there is [`zero_unwritten`](Self::zero_unwritten).
    pub(crate) fn reads(&self, blocks: Range<usize>, memory: Span) -> Vec<Request> {
        let first = blocks.start;
        let written = blocks.filter_map(|block| Some((block, self.blocks[block].sum?)));
        let requests = written.map(|(block, sum)| {
            let memory = self.part(memory, first, block);
            self.request(Direction::Read, block, self.blocks[block].second, memory, sum)
        });
        requests.collect()
    }

    /// The requests that write `blocks`, side by side in `memory`, to their other places, and what to
    /// [`commit`](Self::commit) when they are done.
    ///
    /// # Safety
    ///
    /// The memory must be there and initialised, and nobody may write to it meanwhile.
    pub(crate) unsafe fn writes(
        &self,
        blocks: Range<usize>,
        memory: Span,
        staged: &mut Staged,
    ) -> Vec<Request> {
        let first = blocks.start;
        let requests = blocks.map(|block| {
            let memory = self.part(memory, first, block);
            // SAFETY: promised by the caller.
            let sum = checksum(unsafe { memory.bytes() });
            let second = !self.blocks[block].second;
            staged.0.push((block, Block { second, sum: Some(sum) }));
            self.request(Direction::Write, block, second, memory, sum)
        });
        requests.collect()
    }

    /// Makes current what has been written.
    pub(crate) fn commit(&mut self, staged: Staged) {
        for (block, state) in staged.0 {
            self.blocks[block] = state;
        }
    }

    /// A block's part of memory that holds blocks from `first` on.
    fn part(&self, memory: Span, first: usize, block: usize) -> Span {
        memory.part((block - first) * self.store.block, self.stored_len(block))
    }

    fn request(&self, direction: Direction, block: usize, second: bool, memory: Span, sum: u64) -> Request {
        let Extent { tensor, range, file, .. } = &*self.extent;
        let place = if second { (range.end - range.start) / 2 } else { 0 };
        let offset = range.start + place + self.block_start(block);
        Request { direction, file: Arc::clone(file), tensor: Arc::clone(tensor), offset, memory, sum }
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot")
            .field("name", &self.name())
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}
