//! What the samples amount to.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Value, json};

use crate::team::Kind;
use crate::{Operation, ROUNDS, SIZES, Task};

const BACKENDS: [Kind; 3] = [Kind::InProcess, Kind::SharedMemory, Kind::Tcp];

/// The seconds that each team took for each task, by round.
#[derive(Default)]
pub(crate) struct Samples(BTreeMap<(Kind, Task), Vec<f64>>);

impl Samples {
    pub(crate) fn add(&mut self, kind: Kind, task: Task, seconds: f64) {
        self.0.entry((kind, task)).or_default().push(seconds);
    }

    fn seconds(&self, kind: Kind, task: Task) -> Option<f64> {
        self.0.get(&(kind, task)).map(|seconds| median(seconds.clone()))
    }

    /// How much longer `other` took than `kind`.
    fn ratio(&self, other: Kind, kind: Kind, task: Task) -> Option<f64> {
        let (other, own) = (self.0.get(&(other, task))?, self.0.get(&(kind, task))?);
        Some(median(other.iter().zip(own).map(|(other, own)| other / own).collect()))
    }

    /// Which share of the limit that memory sets `kind` reaches, of two operations.
    fn share(&self, kind: Kind, task: Task, ranks: usize) -> Option<f64> {
        let copiers = if kind == Kind::InProcess { Kind::CopyingThreads } else { Kind::CopyingProcesses };
        let least = match task.operation {
            Operation::AllGather => 1.0,
            Operation::ReduceScatter => 0.5 + 0.5 / ranks as f64,
            Operation::AllReduce => return None,
        };
        Some(self.ratio(copiers, kind, task)? * least)
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A row held to a bar, which a lower value passes if `lower`.
fn judged(name: String, value: Option<f64>, unit: &str, bar: f64, lower: bool) -> Value {
    let pass = value.map(|value| if lower { value <= bar } else { value >= bar });
    json!({"name": name, "value": value, "unit": unit, "bar": bar, "pass": pass})
}

pub(crate) fn rows(ranks: usize, samples: &Samples) -> Vec<Value> {
    let mut rows = Vec::new();
    for task in Task::all() {
        let name = |kind: Kind| format!("{}, {ranks} ranks, {task}", kind.name());
        for kind in Kind::ALL {
            let value = samples.seconds(kind, task).map(|seconds| seconds * 1e6);
            rows.push(json!({"name": name(kind), "value": value, "unit": "us", "bar": null, "pass": null}));
        }
        let share = |kind: Kind, bar: f64| {
            judged(
                format!("{}, share of the limit", name(kind)),
                samples.share(kind, task, ranks),
                "",
                bar,
                false,
            )
        };
        let speed = |kind: Kind, bar: f64| {
            let value = samples.ratio(Kind::Gloo, kind, task);
            judged(format!("{}, speed against Gloo", name(kind)), value, "x", bar, false)
        };
        if task.bytes == SIZES[0] {
            let value = samples.ratio(Kind::SharedMemory, Kind::Gloo, task);
            let name = format!("{}, time against Gloo", name(Kind::SharedMemory));
            rows.push(judged(name, value, "x", 0.2, true));
        }
        if task.bytes < 16 << 20 {
            continue;
        }
        rows.push(speed(Kind::Tcp, 1.5));
        if task.operation != Operation::AllReduce {
            rows.push(speed(Kind::SharedMemory, 5.0));
            rows.push(share(Kind::SharedMemory, 0.6));
            rows.push(share(Kind::InProcess, 0.7));
        }
    }
    rows
}

/// The samples for people: times, and in brackets the speed against Gloo and the share of the limit.
pub(crate) fn table(ranks: usize, samples: &Samples) -> String {
    let mut table = format!(
        "\n{ranks} ranks, medians of {ROUNDS} rounds: ms (speed against Gloo, share of the limit of memory)\n"
    );
    let mut line = |cells: Vec<String>| {
        for (column, cell) in cells.iter().enumerate() {
            // Writing to a string does not fail.
            let _ = if column == 0 { write!(table, "{cell:<24}") } else { write!(table, "{cell:>26}") };
        }
        table.push('\n');
    };
    line([""].into_iter().chain(Kind::ALL.map(Kind::name)).map(str::to_owned).collect());
    for task in Task::all() {
        let cell = |kind: Kind| {
            let Some(seconds) = samples.seconds(kind, task) else { return "-".to_owned() };
            let mut cell = format!("{:.3}", seconds * 1e3);
            if BACKENDS.contains(&kind) {
                let speed = samples.ratio(Kind::Gloo, kind, task).map(|speed| format!("{speed:.2} x"));
                let share = samples.share(kind, task, ranks).map(|share| format!("{share:.2}"));
                let notes: Vec<_> = speed.into_iter().chain(share).collect();
                cell += &format!(" ({})", notes.join(", "));
            }
            cell
        };
        line([task.to_string()].into_iter().chain(Kind::ALL.map(cell)).collect());
    }
    table
}
