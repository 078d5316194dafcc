//! From a block to those who want a part of it.

use crate::bytes::Target;
use crate::error::CheckpointError;
use crate::load::blocks::Segment;
use crate::load::convert::Converter;

/// A target and what it is called in errors.
pub(crate) struct Named<'t, 'a> {
    pub(crate) parameter: &'t str,
    pub(crate) what: &'t str,
    pub(crate) target: &'t mut Target<'a>,
}

/// Everything that is wanted, by place in files.
pub(crate) struct Delivery<'t, 'a> {
    pub(crate) targets: Vec<Named<'t, 'a>>,
    /// Sorted by file and place. They may overlap and lie within each other: tied parameters that are loaded apart want the
    /// same bytes.
    segments: Vec<Segment>,
    /// For each of them, the last end so far in its file.
    reached: Vec<u64>,
    converter: Converter,
}

impl<'t, 'a> Delivery<'t, 'a> {
    pub(crate) fn new(targets: Vec<Named<'t, 'a>>, mut segments: Vec<Segment>) -> Self {
        segments.sort_by_key(|segment| (segment.file, segment.bytes.start, segment.bytes.end));
        let mut reached = Vec::with_capacity(segments.len());
        let mut last = (0, 0);
        for segment in &segments {
            let before = if last.0 == segment.file { last.1 } else { 0 };
            last = (segment.file, segment.bytes.end.max(before));
            reached.push(last.1);
        }
        Self { targets, segments, reached, converter: Converter::default() }
    }

    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Gives `content`, the bytes of `file` from `offset` on, to whoever wants a part of it.
    pub(crate) fn give(&mut self, file: usize, offset: u64, content: &[u8]) -> Result<(), CheckpointError> {
        let end = offset + content.len() as u64;
        let after = |segment: &Segment| (segment.file, segment.bytes.start) >= (file, end);
        let until = self.segments.partition_point(|segment| !after(segment));
        let first = self.segments[..until].partition_point(|segment| segment.file < file);
        let from = first + self.reached[first..until].partition_point(|&reached| reached <= offset);
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
        let first = segment.first + (start - segment.bytes.start) as usize / size;
        let wanted = target.dtype();
        self.converter.convert(part, segment.dtype, wanted, |element, bytes| {
            target.write(((first + element) * wanted.size()) as u64, bytes).map_err(failed)
        })
    }
}

#[cfg(test)]
mod tests {
    use zero_core::DType;

    use super::{Delivery, Named};
    use crate::bytes::Target;
    use crate::load::blocks::Segment;

    #[test]
    fn ranges_within_each_other_all_get_their_bytes() {
        let ranges = [(0, 0..1000), (0, 10..20), (0, 10..600), (1, 0..5), (1, 2..3), (1, 2..900)];
        let content: Vec<u8> = (0..1000).map(|at| (at % 251) as u8).collect();
        for block in [7, 100, 500, 1000] {
            let mut given: Vec<Vec<u8>> =
                ranges.iter().map(|(_, range)| vec![0; range.end - range.start]).collect();
            let mut targets: Vec<_> = given.iter_mut().map(|bytes| Target::bytes(DType::U8, bytes)).collect();
            let named = targets.iter_mut().map(|target| Named { parameter: "w", what: "values", target });
            let segment = |(target, (file, range)): (usize, &(usize, std::ops::Range<usize>))| Segment {
                file: *file,
                bytes: range.start as u64..range.end as u64,
                dtype: DType::U8,
                target,
                first: 0,
            };
            let segments = ranges.iter().enumerate().map(segment).collect();
            let mut delivery = Delivery::new(named.collect(), segments);
            for file in 0..2 {
                for (index, part) in content.chunks(block).enumerate() {
                    delivery.give(file, (index * block) as u64, part).unwrap();
                }
            }
            for ((_, range), given) in ranges.iter().zip(&given) {
                assert!(*given == content[range.clone()], "{range:?} by blocks of {block}");
            }
        }
    }
}
