//! Gradients reduced together.

use std::ops::Range;

use crate::{Bytes, DType, Parameter, ParameterIndex, Rank, WorldSize};

/// A run of a parameter's elements that one rank owns, and where it lies in the bucket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Segment {
    /// The owner.
    pub rank: Rank,
    /// The elements, counted within the flattened parameter; never empty.
    pub source: Range<usize>,
    /// The bucket's element where the run begins.
    pub offset: usize,
}

/// Parameters whose gradients are reduced together, and the map of the one buffer they share.
///
/// The buffer is *rank-major*: all of rank 0's runs, then rank 1's, and so on. A reduce-scatter with uneven
/// parts then works on it as it is, and a rank's reduced part is contiguous.
///
/// ```text
/// parameters  [2] = a a a   [1] = b b b b b        over two ranks
/// buffer      a a b b b | a b b
///             rank 0      rank 1
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// In backward order, that is with falling index.
    parameters: Vec<ParameterIndex>,
    /// One list per parameter, in the same order.
    segments: Vec<Vec<Segment>>,
    /// Elements per rank.
    counts: Vec<usize>,
    /// Where each rank's part begins.
    starts: Vec<usize>,
    numel: usize,
}

impl Bucket {
    /// The buckets of the trainable ones of `parameters`, filled in backward order up to `limit` bytes of f32
    /// gradients each.
    ///
    /// A parameter larger than the limit gets a bucket of its own. Empty parameters ride along with their
    /// neighbours, so that no bucket is empty unless every trainable parameter is.
    pub(crate) fn of_gradients(parameters: &[Parameter], world: WorldSize, limit: Bytes) -> Vec<Self> {
        let limit = usize::try_from(limit.get() / DType::F32.size() as u64).unwrap_or(usize::MAX);
        let mut groups: Vec<(Vec<&Parameter>, usize)> = Vec::new();
        for parameter in parameters.iter().rev().filter(|parameter| parameter.trainable()) {
            let numel = parameter.numel();
            match groups.last_mut() {
                Some((group, held)) if *held == 0 || numel == 0 || *held + numel <= limit => {
                    group.push(parameter);
                    *held += numel;
                }
                _ => groups.push((vec![parameter], numel)),
            }
        }
        groups.into_iter().map(|(group, numel)| Self::new(&group, world, numel)).collect()
    }

    fn new(parameters: &[&Parameter], world: WorldSize, numel: usize) -> Self {
        let count = |rank| parameters.iter().map(|parameter| parameter.partition().len(rank)).sum::<usize>();
        let counts: Vec<usize> = world.ranks().map(count).collect();
        let mut end = 0;
        let mut starts = Vec::with_capacity(counts.len());
        for count in &counts {
            starts.push(end);
            end += count;
        }

        let mut free = starts.clone();
        let mut segments = Vec::with_capacity(parameters.len());
        for parameter in parameters {
            let place = |(rank, source): (Rank, Range<usize>)| {
                let offset = free[rank.index()];
                free[rank.index()] += source.len();
                Segment { rank, source, offset }
            };
            segments.push(parameter.partition().intersect(0..parameter.numel()).map(place).collect());
        }
        let parameters = parameters.iter().map(|parameter| parameter.index()).collect();
        Self { parameters, segments, counts, starts, numel }
    }

    /// Its parameters in backward order, the last of the model first.
    pub fn parameters(&self) -> &[ParameterIndex] {
        &self.parameters
    }

    /// The number of elements of the buffer.
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// The number of elements of each rank's part, as a reduce-scatter with uneven parts wants them.
    pub fn counts(&self) -> &[usize] {
        &self.counts
    }

    /// Where the elements of `parameter` lie, in element order; nothing for a parameter of another bucket.
    pub fn segments(&self, parameter: ParameterIndex) -> &[Segment] {
        match self.parameters.binary_search_by(|held| parameter.cmp(held)) {
            Ok(position) => &self.segments[position],
            Err(_) => &[],
        }
    }

    /// The part of the buffer that `rank` owns; empty at the end for a rank outside of the world.
    pub fn part(&self, rank: Rank) -> Range<usize> {
        match (self.starts.get(rank.index()), self.counts.get(rank.index())) {
            (Some(&start), Some(&count)) => start..start + count,
            _ => self.numel..self.numel,
        }
    }
}
