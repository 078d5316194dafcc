//! How fast the backends are, against Gloo and against copying memory.
//!
//! The teams, each of as many ranks as the world has, take turns within each round, so that whatever else the
//! machine does hits all of them. A time is the median of the rounds, a ratio the median of the rounds' ratios.
//! Sizes are those of the whole buffer, of `f32`; that of 8 bytes is one `f64`.
//!
//! # The limit that memory sets
//!
//! A team of copiers copies, all ranks at the same time, between two buffers of the operation's size. This
//! gives the time for `N` bytes read and written once. An all-gather has to read and write `N` bytes per rank
//! at least, so that time is its limit. A reduce-scatter has to read `N` and write `N / W`, as much traffic as
//! a copy of `(N + N / W) / 2`. The share of the limit is the limit over the time taken.
//!
//! `--teams Gloo,TCP` and `--tasks "16 MiB"` measure less. Gloo needs PyTorch's `torchrun`, on the search path or
//! named by the variable `TORCHRUN`.

mod rows;
mod team;
mod worker;

use std::error::Error;
use std::fmt;
use std::path::PathBuf;

use rows::Samples;
use team::{Kind, Team};
use worker::Worker;
use zero_core::WorldSize;

const ROUNDS: usize = 7;
const SIZES: [usize; 6] = [8, 1 << 10, 1 << 16, 1 << 20, 16 << 20, LARGEST];
const LARGEST: usize = 64 << 20;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Operation {
    AllReduce,
    AllGather,
    ReduceScatter,
}

impl Operation {
    const ALL: [Self; 3] = [Self::AllReduce, Self::AllGather, Self::ReduceScatter];

    const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
        }
    }
}

/// An operation on a buffer of some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Task {
    operation: Operation,
    bytes: usize,
}

impl Task {
    fn all() -> impl Iterator<Item = Self> {
        let tasks = SIZES
            .into_iter()
            .flat_map(|bytes| Operation::ALL.into_iter().map(move |operation| Self { operation, bytes }));
        tasks.filter(|task| task.bytes > 8 || task.operation == Operation::AllReduce)
    }

    /// How often it is done in one turn.
    const fn times(self) -> usize {
        match self.bytes {
            0..=0xFFFF => 200,
            0x1_0000..=0xF_FFFF => 50,
            0x10_0000..=0xFF_FFFF => 20,
            _ => (LARGEST / self.bytes) * 2,
        }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, unit) = match self.bytes {
            bytes if bytes >= 1 << 20 => (bytes >> 20, "MiB"),
            bytes if bytes >= 1 << 10 => (bytes >> 10, "KiB"),
            bytes => (bytes, "B"),
        };
        write!(f, "{} {count} {unit}", self.operation.name())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(worker) = Worker::from_arguments(&arguments)? {
        return worker.work();
    }
    let option = |name: &str| arguments.iter().skip_while(|argument| *argument != name).nth(1);
    let (mut all, mut table) = (Vec::new(), String::new());
    let choice = Choice { teams: option("--teams"), tasks: option("--tasks") };
    for size in [2, 4].into_iter().filter_map(WorldSize::new) {
        let samples = measure(size, choice)?;
        table += &rows::table(size.get(), &samples);
        all.extend(rows::rows(size.get(), &samples));
    }
    print!("{table}");
    let rows = serde_json::to_string_pretty(&all)?;
    match option("--rows").map(PathBuf::from) {
        Some(path) => std::fs::write(&path, rows)
            .map_err(|error| format!("cannot write the rows to {}: {error}", path.display()).into()),
        None => {
            println!("{rows}");
            Ok(())
        }
    }
}

/// What to measure: everything whose name contains the words, of which there are several with commas between.
#[derive(Clone, Copy)]
struct Choice<'a> {
    teams: Option<&'a String>,
    tasks: Option<&'a String>,
}

impl Choice<'_> {
    fn has(words: Option<&String>, name: &str) -> bool {
        words.is_none_or(|words| words.split(',').any(|word| name.contains(word)))
    }
}

fn measure(size: WorldSize, choice: Choice<'_>) -> Result<Samples, Box<dyn Error>> {
    let mut samples = Samples::default();
    let mut teams = Vec::new();
    for kind in Kind::ALL.into_iter().filter(|kind| Choice::has(choice.teams, kind.name())) {
        match Team::start(kind, size) {
            Ok(team) => teams.push(team),
            Err(error) if kind == Kind::Gloo => eprintln!("without Gloo: {error}"),
            Err(error) => return Err(error),
        }
    }
    for task in Task::all().filter(|task| Choice::has(choice.tasks, &task.to_string())) {
        for round in 0..ROUNDS {
            // Another one begins each time.
            for turn in 0..teams.len() {
                let at = (round + turn) % teams.len();
                let team = &mut teams[at];
                samples.add(team.kind(), task, team.seconds(task)?);
            }
        }
        eprintln!("{size} ranks, {task}: done");
    }
    Ok(samples)
}
