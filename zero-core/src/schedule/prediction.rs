//! Which parameters come next, if they come as before.

/// Accesses that have to follow one out of order as recorded elsewhere, before the position moves there. Fewer
/// are taken for additions to the order.
const EVIDENCE: u32 = 2;

/// The order of the accesses of one round, and the position in it that the accesses of another are at.
#[derive(Clone, Debug, Default)]
pub(super) struct Prediction {
    /// The recorded parameters.
    order: Vec<usize>,
    /// The bytes of everything before each position; one entry more than there are positions.
    bytes_before: Vec<u128>,
    /// All positions, those of one parameter one after another and rising.
    positions: Vec<usize>,
    /// Where the positions of each parameter begin; one entry more than there are parameters.
    starts: Vec<usize>,
    /// The position that is expected next.
    position: usize,
    /// The position that would be expected next if the last accesses, which were not expected, came from
    /// elsewhere in the order.
    elsewhere: usize,
    /// How many accesses have been as expected elsewhere, one after another.
    evidence: u32,
}

/// Where an access has moved the position to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moved {
    /// Forward by any distance, or not at all.
    Forward,
    Back,
}

impl Prediction {
    /// Takes `order` for the order of the next round, with the `bytes` of each parameter.
    pub(super) fn learn(&mut self, order: &[usize], bytes: impl Fn(usize) -> u64, parameters: usize) {
        self.order.clear();
        self.order.extend_from_slice(order);
        self.bytes_before.clear();
        self.bytes_before.push(0);
        let mut sum = 0;
        self.bytes_before.extend(order.iter().map(|&parameter| {
            sum += u128::from(bytes(parameter));
            sum
        }));

        self.starts.clear();
        self.starts.resize(parameters + 1, 0);
        order.iter().for_each(|&parameter| self.starts[parameter + 1] += 1);
        (0..parameters).for_each(|parameter| self.starts[parameter + 1] += self.starts[parameter]);
        let mut free = self.starts.clone();
        self.positions.clear();
        self.positions.resize(order.len(), 0);
        for (position, &parameter) in order.iter().enumerate() {
            self.positions[free[parameter]] = position;
            free[parameter] += 1;
        }
    }

    /// Expects the order from its beginning.
    pub(super) fn rewind(&mut self) {
        (self.position, self.elsewhere, self.evidence) = (0, 0, 0);
    }

    /// The position that is expected next.
    pub(super) fn position(&self) -> usize {
        self.position
    }

    /// The parameter at a position.
    pub(super) fn at(&self, position: usize) -> Option<usize> {
        self.order.get(position).copied()
    }

    /// The next expected access to a parameter.
    pub(super) fn next_use(&self, parameter: usize) -> Option<usize> {
        self.next_use_from(self.position, parameter)
    }

    /// The bytes of the accesses that are expected before `position`, a parameter counted at each.
    pub(super) fn bytes_until(&self, position: usize) -> u128 {
        let before = |position: usize| self.bytes_before.get(position).copied().unwrap_or(0);
        before(position).saturating_sub(before(self.position))
    }

    /// Takes note of an access. The expected one moves the position on; several that follow each other elsewhere
    /// move it there.
    pub(super) fn advance(&mut self, parameter: usize) -> Moved {
        if self.at(self.position) == Some(parameter) {
            self.position += 1;
            (self.elsewhere, self.evidence) = (self.position, 0);
            return Moved::Forward;
        }
        let Some(&first) = self.positions_of(parameter).first() else {
            return Moved::Forward;
        };
        // Whichever is nearer: on from where the last ones came from, or on from the position.
        let from = |start| self.next_use_from(start, parameter).map(|found| (found - start, found));
        let near = [from(self.position), from(self.elsewhere)].into_iter().flatten().min();
        let found = near.map_or(first, |(_, found)| found);
        self.evidence = if found == self.elsewhere { self.evidence + 1 } else { 0 };
        self.elsewhere = found + 1;
        // At the end nothing else is expected.
        if self.evidence < EVIDENCE && self.position < self.order.len() {
            return Moved::Forward;
        }
        let moved = if self.elsewhere > self.position { Moved::Forward } else { Moved::Back };
        (self.position, self.evidence) = (self.elsewhere, 0);
        moved
    }

    fn next_use_from(&self, position: usize, parameter: usize) -> Option<usize> {
        let positions = self.positions_of(parameter);
        positions.get(positions.partition_point(|&other| other < position)).copied()
    }

    fn positions_of(&self, parameter: usize) -> &[usize] {
        match (self.starts.get(parameter), self.starts.get(parameter + 1)) {
            (Some(&start), Some(&end)) => &self.positions[start..end],
            _ => &[],
        }
    }
}
