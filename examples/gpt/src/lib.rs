//! The main job: a byte-level GPT that trains with its state sharded over ranks, threads or processes.
//!
//! ```
//! use burn::tensor::{Device, Int, Tensor};
//! use gpt::GptConfig;
//!
//! let device = Device::default();
//! let config = GptConfig { context: 8, dim: 16, heads: 2, layers: 1, ..GptConfig::default() };
//! let tokens = Tensor::<2, Int>::zeros([3, 8], &device);
//! let loss = config.init(&device).loss(tokens.clone(), tokens);
//! assert!((loss.into_scalar::<f32>() - 256.0_f32.ln()).abs() < 0.2);
//! ```
//!
//! - [`model`]: the GPT, plain Burn.
//! - [`corpus`], [`rows`]: text as rows of bytes.
//! - [`settings`]: defaults, a file ([`train_config`] is its `[train]`) over them, [`flags`] over both; [`deepspeed`]: or
//!   what a `ds_config.json` says.
//! - [`learner`]: what the two ways to train have in common: [`sharded`] and [`plain`]; [`update`], [`rates`]: optimizers
//!   and learning rates.
//! - [`saving`]: its checkpoints; [`run`]: the whole run; [`observer`], [`metrics`], [`trace`], [`report`], [`sample`], [`chart`]: what comes out of
//!   it.

#[macro_use]
mod say;

pub mod chart;
pub mod corpus;
pub mod deepspeed;
pub mod flags;
pub mod learner;
pub mod metrics;
pub mod model;
pub mod observer;
pub mod plain;
pub mod rates;
pub mod report;
pub mod rows;
pub mod run;
pub mod sample;
pub mod saving;
pub mod settings;
pub mod sharded;
pub mod trace;
pub mod train_config;
pub mod update;

pub use model::{Gpt, GptConfig};
