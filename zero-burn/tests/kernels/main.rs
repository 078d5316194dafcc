//! Kernels on the device that the variable `ZERO_DEVICE` names.
#![cfg(feature = "cube")]

mod device;
mod movement;
mod norm;
mod quantize;
mod update;
