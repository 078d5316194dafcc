//! From a block to those who want a part of it.

use zero_core::DType;

use crate::bytes::Target;
use crate::error::CheckpointError;
use crate::load::blocks::Segment;
use crate::load::convert::convert;

/// Elements that are converted at once.
const BATCH: usize = 16 << 10;

/// A target and what it is called in errors.
pub(crate) struct Named<'t, 'a> {
    pub(crate) parameter: &'t str,
    pub(crate) what: &'t str,
    pub(crate) target: &'t mut Target<'a>,
}

/// Everything that is wanted, by place in files.
pub(crate) struct Delivery<'t, 'a> {
    pub(crate) targets: Vec<Named<'t, 'a>>,
    /// Sorted by file and place; they may overlap, but each end is at or after the one before.
    segments: Vec<Segment>,
    converted: Vec<u8>,
}

impl<'t, 'a> Delivery<'t, 'a> {
    pub(crate) fn new(targets: Vec<Named<'t, 'a>>, mut segments: Vec<Segment>) -> Self {
        segments.sort_by_key(|segment| (segment.file, segment.bytes.start, segment.bytes.end));
        Self { targets, segments, converted: Vec::new() }
    }

    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Gives `content`, the bytes of `file` from `offset` on, to whoever wants a part of it.
    pub(crate) fn give(&mut self, file: usize, offset: u64, content: &[u8]) -> Result<(), CheckpointError> {
        let end = offset + content.len() as u64;
        let after = |segment: &Segment| (segment.file, segment.bytes.start) >= (file, end);
        let until = self.segments.partition_point(|segment| !after(segment));
        // Tied parameters that are loaded apart want the same bytes, so ends are sorted only nearly.
        let mut from = self.segments[..until]
            .partition_point(|segment| (segment.file, segment.bytes.end) <= (file, offset));
        while from > 0 && self.segments[from - 1].file == file && self.segments[from - 1].bytes.end > offset {
            from -= 1;
        }
        for index in from..until {
            let segment = self.segments[index].clone();
            let (start, stop) = (segment.bytes.start.max(offset), segment.bytes.end.min(end));
            if start < stop {
                let part = &content[(start - offset) as usize..(stop - offset) as usize];
                self.put(&segment, start, part)?;
            }
        }
        Ok(())
    }

    fn put(&mut self, segment: &Segment, start: u64, part: &[u8]) -> Result<(), CheckpointError> {
        let Named { parameter, what, target } = &mut self.targets[segment.target];
        let failed = |source| CheckpointError::Target {
            parameter: (*parameter).to_owned(),
            what: (*what).to_owned(),
            source,
        };
        let size = segment.dtype.size();
        let element = segment.first + (start - segment.bytes.start) as usize / size;
        let wanted: DType = target.dtype();
        if wanted == segment.dtype {
            return target.write((element * size) as u64, part).map_err(failed);
        }
        for (batch, from) in part.chunks(BATCH * size).enumerate() {
            self.converted.clear();
            convert(from, segment.dtype, wanted, &mut self.converted);
            let offset = (element + batch * BATCH) * wanted.size();
            target.write(offset as u64, &self.converted).map_err(failed)?;
        }
        Ok(())
    }
}
