//! The norm of a gradient, and whether it is finite.

use crate::blocks::Blocks;
use crate::floats::Floats;
use crate::simd::{LANES, Lanes, Operation};
use crate::workers::{Split, TILE, Workers};

/// What [`sum_of_squares`] found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SquareSum {
    /// The sum of the squares of all elements; not finite if one of them is not.
    pub sum: f64,
    /// The index of the first element that is infinite or NaN.
    pub first_non_finite: Option<usize>,
}

/// Adds up the squares of `values` in one pass, and looks whether all are finite.
///
/// A square is exact in `f64`, and sums are of `f64` in an order that the length alone gives: 32 sums of every 32nd element
/// of a tile of 2^15, their sum in pairs, and the sum of tiles one after another. Hence neither the number of threads nor the
/// instruction set changes the result, to the bit (but for the payload of NaN).
///
/// ```
/// use zero_offload::{SquareSum, Workers, sum_of_squares};
///
/// let gradient = [3.0f32, -4.0];
/// let found = sum_of_squares(&Workers::alone(), gradient[..].into());
/// assert_eq!(found, SquareSum { sum: 25.0, first_non_finite: None });
/// ```
pub fn sum_of_squares(workers: &Workers, values: Floats<'_>) -> SquareSum {
    let mut sums = vec![0.0; values.len().div_ceil(TILE)];
    workers.run(Squares { values, sums: &mut sums }, |tile| {
        let Squares { values, sums } = tile;
        // Work is cut into tiles, so there is one sum for these.
        if let [sum] = sums {
            *sum = workers.compute(TileSquares(values));
        }
    });
    let first = sums.iter().position(|sum| !sum.is_finite());
    let first_non_finite = first.and_then(|tile| {
        let (_, rest) = values.split(tile * TILE);
        Some(tile * TILE + rest.position_non_finite()?)
    });
    SquareSum { sum: sums.iter().sum(), first_non_finite }
}

/// Values, and a sum for each tile of them.
struct Squares<'a> {
    values: Floats<'a>,
    sums: &'a mut [f64],
}

impl Split for Squares<'_> {
    fn len(&self) -> usize {
        self.values.len()
    }

    /// Where a tile begins.
    fn split(self, at: usize) -> (Self, Self) {
        let (values, later_values) = self.values.split(at);
        let (sums, later_sums) = self.sums.split_at_mut(at / TILE);
        (Self { values, sums }, Self { values: later_values, sums: later_sums })
    }
}

/// The sum of the squares of a tile.
struct TileSquares<'a>(Floats<'a>);

impl Operation for TileSquares<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> f64 {
        let count = self.0.len() / LANES;
        let (whole, rest) = self.0.split(count * LANES);
        let blocks = Blocks::new(whole);
        let (mut even, mut odd) = (lanes.zero_sums(), lanes.zero_sums());
        for pair in 0..count / 2 {
            even = lanes.add_squares(even, blocks.load(lanes, 2 * pair));
            odd = lanes.add_squares(odd, blocks.load(lanes, 2 * pair + 1));
        }
        // Squares of zeros change nothing.
        let mut last = [0.0; LANES];
        rest.read(&mut last);
        let last = lanes.load_f32(&last);
        if count.is_multiple_of(2) {
            even = lanes.add_squares(even, last);
        } else {
            even = lanes.add_squares(even, blocks.load(lanes, count - 1));
            odd = lanes.add_squares(odd, last);
        }

        let (mut sums, mut others) = ([0.0; LANES], [0.0; LANES]);
        lanes.store_sums(even, &mut sums);
        lanes.store_sums(odd, &mut others);
        for (sum, other) in sums.iter_mut().zip(others) {
            *sum += other;
        }
        let mut half = LANES / 2;
        while half > 0 {
            for at in 0..half {
                sums[at] += sums[at + half];
            }
            half /= 2;
        }
        sums[0]
    }
}
