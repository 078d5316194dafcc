//! The limit: copies of memory on the device.

use std::error::Error;

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::timed;

/// Two buffers, and how they are copied.
pub(crate) struct Copies {
    from: Handle,
    to: Handle,
    words: usize,
}

impl Copies {
    pub(crate) fn new(client: &Client, words: usize) -> Self {
        let from = client.create_from_slice(&vec![0; 4 * words]);
        Self { from, to: client.empty(4 * words), words }
    }

    /// Seconds of a byte read or written, by the width of vectors that is fastest.
    pub(crate) fn seconds_per_byte(&mut self, client: &Client) -> Result<f64, Box<dyn Error>> {
        let mut best = f64::INFINITY;
        for width in client.io_optimized_vector_sizes(size_of::<u32>()) {
            let vectors = self.words / width;
            let seconds = timed(client, || {
                let dim = CubeDim::new(client, vectors);
                let count = cubecl::calculate_cube_count_elemwise(client, vectors, dim);
                // SAFETY: both buffers have that many vectors, and units behind them do nothing.
                unsafe {
                    copy::launch_unchecked(
                        client,
                        count,
                        dim,
                        width,
                        BufferArg::from_raw_parts(self.from.clone(), vectors),
                        BufferArg::from_raw_parts(self.to.clone(), vectors),
                        vectors as u32,
                    );
                }
                Ok(())
            })?;
            best = best.min(seconds / (8 * self.words) as f64);
        }
        Ok(best)
    }
}

#[cube(launch_unchecked)]
fn copy<N: Size>(from: &[Vector<u32, N>], to: &mut [Vector<u32, N>], total: u32) {
    if (ABSOLUTE_POS as u32) < total {
        to[ABSOLUTE_POS] = from[ABSOLUTE_POS];
    }
}
