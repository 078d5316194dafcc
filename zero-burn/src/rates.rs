//! Learning rates, told in a few words for ranks to compare.

use std::hash::{DefaultHasher, Hash, Hasher};

/// The learning rates of a step, by parameter.
pub(crate) fn describe(rates: &[f64]) -> String {
    let (low, high) = rates
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), rate| (low.min(*rate), high.max(*rate)));
    if low >= high {
        return format!("learning rate {high}");
    }
    format!("learning rates from {low} to {high}, {:016x} in all", digest(rates))
}

/// A number that other rates do not have.
pub(crate) fn digest(rates: &[f64]) -> u64 {
    let mut digest = DefaultHasher::new();
    rates.iter().for_each(|rate| rate.to_bits().hash(&mut digest));
    digest.finish()
}
