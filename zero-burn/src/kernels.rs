//! Kernels for buffers on a device: updates of many tensors at once, their norms, moves between types, and eight-bit blocks.
//!
//! The engine launches them where its tensors are on a CubeCL device. They depend on nothing of it, nor on Burn, and work for
//! whoever has buffers of his own: a [`Buffer`] is a handle of CubeCL's, a type and a length, and *rows* of it are tensors that
//! lie in it one behind another. One launch works on all rows.
//!
//! ```no_run
//! use cubecl::Device;
//! use zero_burn::DType;
//! use zero_burn::kernels::{Buffer, MoveRow, Norms, Onto, move_rows};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Device::default().client();
//! let gradients = Buffer::new(client.empty(2000), DType::BF16, 1000)?;
//! let sums = Buffer::new(client.empty(4000), DType::F32, 1000)?;
//! // Two tensors, added to sums in another type, then their norms.
//! let rows = [MoveRow { from: 0, to: 0, len: 300 }, MoveRow { from: 300, to: 500, len: 500 }];
//! move_rows(&client, &gradients, &sums, &rows, 0.5, Onto::Add)?;
//! let mut norms = Norms::new(&client);
//! norms.add(&sums, &[0..300, 500..1000])?;
//! assert!(norms.read()?[0].iter().all(|row| row.is_finite));
//! # Ok(())
//! # }
//! ```
//!
//! Every function checks what it is given before it launches anything. Launches are queued in the order of the calls, and
//! nothing but [`Norms::read`] waits for the device; the first that needs to know how the device rounds
//! ([`update`](fn@update), [`move_rows`]) waits once for a launch that tries it out.
//!
//! Numbers of 16 bits are read and written by their bits, so they need no support by the device, and round to the nearest even
//! everywhere.
//!
//! # Modules
//!
//! - `buffer`: [`Buffer`]; `error`: [`KernelError`] and the [`Role`] of a buffer; `table`: rows, as a launch looks them up.
//! - `words`, `arithmetic`: numbers by their bits, and products rounded together with sums; `launch`: how much is launched.
//! - `update`, `rule`: [`update`](fn@update), and what each optimizer does to numbers.
//! - `norm`: [`Norms`]; `movement`: [`move_rows`]; `quantize`: [`Quantized`].

mod arithmetic;
mod buffer;
mod error;
mod launch;
mod movement;
mod norm;
mod quantize;
mod rule;
mod table;
mod update;
mod words;

pub use buffer::Buffer;
pub use error::{KernelError, Role};
pub use movement::{MoveRow, Onto, move_rows};
pub use norm::{Norms, RowNorm};
#[doc(hidden)]
pub use quantize::quantize_by_team;
pub use quantize::{Quantized, dequantize, quantize};
pub use update::{UpdateBuffers, UpdateRow, update};
pub use zero_offload::{HostOptimizer, Update, UpdateError};
