//! Between the layouts of PyTorch and Burn.

use crate::error::CheckpointError;

/// Rows and columns of a square that is moved at once; 32 x 32 x 4 bytes, twice, fit any L1 cache.
const TILE: usize = 32;

/// The transpose of a row-major matrix of `rows` x `cols`, itself row-major.
///
/// PyTorch stores the weight of a linear layer as `[out, in]`, Burn as `[in, out]`: a weight read from a
/// PyTorch file becomes Burn's by `transpose(&values, out, in)`.
///
/// # Errors
///
/// [`CheckpointError::NotAMatrix`] if `values` does not hold `rows` x `cols` elements.
///
/// ```
/// # use zero_checkpoint::transpose;
/// assert_eq!(transpose(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2, 3)?, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
/// # Ok::<(), zero_checkpoint::CheckpointError>(())
/// ```
pub fn transpose(values: &[f32], rows: usize, cols: usize) -> Result<Vec<f32>, CheckpointError> {
    if rows.checked_mul(cols) != Some(values.len()) {
        return Err(CheckpointError::NotAMatrix { rows, cols, len: values.len() });
    }
    let mut transposed = vec![0.0; values.len()];
    for top in (0..rows).step_by(TILE) {
        for left in (0..cols).step_by(TILE) {
            for row in top..rows.min(top + TILE) {
                for col in left..cols.min(left + TILE) {
                    transposed[col * rows + row] = values[row * cols + col];
                }
            }
        }
    }
    Ok(transposed)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::transpose;
    use crate::error::CheckpointError;

    #[test]
    fn an_empty_matrix_stays_empty() {
        assert!(transpose(&[], 0, 5).unwrap().is_empty());
        assert!(transpose(&[], 5, 0).unwrap().is_empty());
    }

    #[test]
    fn a_shape_that_does_not_hold_the_values_is_an_error() {
        for (rows, cols) in [(2, 2), (0, 3), (usize::MAX, 3)] {
            let error = transpose(&[1.0, 2.0, 3.0], rows, cols).unwrap_err();
            assert!(matches!(error, CheckpointError::NotAMatrix { len: 3, .. }), "{error}");
        }
    }

    proptest! {
        #[test]
        fn element_row_col_becomes_element_col_row(rows in 0usize..80, cols in 0usize..80) {
            let values: Vec<f32> = (0..rows * cols).map(|index| index as f32).collect();
            let transposed = transpose(&values, rows, cols).unwrap();
            for row in 0..rows {
                for col in 0..cols {
                    prop_assert_eq!(transposed[col * rows + row], values[row * cols + col]);
                }
            }
        }
    }
}
