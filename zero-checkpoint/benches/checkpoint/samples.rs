//! Times of contenders that take turns, and the rows that they amount to.

use std::error::Error;

use serde_json::{Value, json};

/// How often each contender has its turn.
pub(crate) const ROUNDS: usize = 7;

/// Who does a task; gives the seconds that it took once.
pub(crate) type Contender<'a> = (&'static str, Box<dyn FnMut() -> Result<f64, Box<dyn Error>> + 'a>);

/// The seconds of each contender, by round.
pub(crate) struct Samples(Vec<(&'static str, Vec<f64>)>);

impl Samples {
    /// Lets the contenders take turns.
    pub(crate) fn take(task: &str, mut contenders: Vec<Contender<'_>>) -> Result<Self, Box<dyn Error>> {
        let mut samples: Vec<_> = contenders.iter().map(|(name, _)| (*name, Vec::new())).collect();
        for round in 0..ROUNDS {
            // Another one begins each time.
            for turn in 0..contenders.len() {
                let at = (round + turn) % contenders.len();
                samples[at].1.push(contenders[at].1()?);
            }
        }
        eprintln!("{task}: done");
        Ok(Self(samples))
    }

    fn of(&self, name: &str) -> Option<&[f64]> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, seconds)| &seconds[..])
    }

    pub(crate) fn seconds(&self, name: &str) -> Option<f64> {
        self.of(name).map(|seconds| median(seconds.to_vec()))
    }

    /// How much longer `other` took than `own`; `None` if one of them was not there.
    pub(crate) fn ratio(&self, other: &str, own: &str) -> Option<f64> {
        let (other, own) = (self.of(other)?, self.of(own)?);
        Some(median(other.iter().zip(own).map(|(other, own)| other / own).collect()))
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A row that is only told.
pub(crate) fn told(name: String, value: Option<f64>, unit: &str) -> Value {
    json!({"name": name, "value": value, "unit": unit, "bar": null, "pass": null})
}

/// A row that must reach a bar.
pub(crate) fn judged(name: String, value: Option<f64>, unit: &str, bar: f64) -> Value {
    let pass = value.map(|value| value >= bar);
    json!({"name": name, "value": value, "unit": unit, "bar": bar, "pass": pass})
}
