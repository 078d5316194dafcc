//! How fast checkpoints are written and read, against fio and torch.distributed.checkpoint, and how long an asynchronous save
//! holds training up, against one memcpy of the state.
//!
//! A state of 1 GiB, as parameters with two moments each, on one rank. Contenders take turns within each round, on the
//! same file system: in the folder that the variable `STORE_DIRECTORY` names, else Cargo's for temporary files. Every
//! write ends with what makes it durable; every read finds nothing in the page cache; ours include the hashes. fio writes
//! by many small and by large blocks, and reads past the page cache and through it; the faster of two is the measure. Peers that are not installed have rows
//! without a value; `PYTHON` names the Python that has PyTorch.

mod peers;
mod samples;

use std::env;
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use peers::{Fio, Torch, forget};
use samples::{Contender, Samples, judged, told};
use serde_json::Value;
use zero_checkpoint::{
    Checkpoint, Contents, Data, Facts, Held, LoadOptions, LocalStorage, SavedParameter, SavedState, Saver,
    SaverOptions, Solo, Storage, Target, Wanted, WantedParameter, WantedState, WeightLayout,
};
use zero_core::{DType, ParameterSpec, Stage};

/// Parameters.
const COUNT: usize = 24;
/// Elements of each; three numbers for each element.
const NUMEL: usize = (1 << 30) / 4 / 3 / COUNT;
const BYTES: u64 = (COUNT * NUMEL * 3 * 4) as u64;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().collect();
    let rows_to = arguments.iter().skip_while(|argument| *argument != "--rows").nth(1).map(PathBuf::from);
    let base =
        env::var_os("STORE_DIRECTORY").map_or_else(|| env!("CARGO_TARGET_TMPDIR").into(), PathBuf::from);
    let folder = tempfile::tempdir_in(base)?;
    let rows = Value::Array(rows(folder.path())?);
    match rows_to {
        Some(path) => std::fs::write(&path, rows.to_string())
            .map_err(|error| format!("cannot write the rows to {}: {error}", path.display()).into()),
        None => {
            println!("{rows:#}");
            Ok(())
        }
    }
}

fn rows(folder: &std::path::Path) -> Result<Vec<Value>, Box<dyn Error>> {
    let mut own = Own::new(folder)?;
    let fio = Fio::find(folder, BYTES)?;
    let mut torch = Torch::find(folder, BYTES)?;

    let mut contenders: Vec<Contender<'_>> = vec![("own", Box::new(|| own.write()))];
    if let Some(fio) = &fio {
        contenders.push(("fio many", Box::new(|| fio.write_many())));
        contenders.push(("fio large", Box::new(|| fio.write_large())));
    }
    if let Some(torch) = &mut torch {
        contenders.push(("torch", Box::new(|| torch.write())));
    }
    let writes = Samples::take("write", contenders)?;

    let mut contenders: Vec<Contender<'_>> = vec![("own", Box::new(|| own.read()))];
    if let Some(fio) = &fio {
        contenders.push(("fio direct", Box::new(|| fio.read_direct())));
        contenders.push(("fio cached", Box::new(|| fio.read_cached())));
    }
    if let Some(torch) = &mut torch {
        contenders.push(("torch", Box::new(|| torch.read())));
    }
    let reads = Samples::take("read", contenders)?;
    drop(torch);

    let stalls = own.stalls()?;
    let rate = |samples: &Samples, name| samples.seconds(name).map(|seconds| BYTES as f64 / seconds / 1e9);
    let faster = |samples: &Samples, first: &'static str, second| {
        let second_is = samples.seconds(second) < samples.seconds(first);
        if second_is { second } else { first }
    };
    let (writer, reader) =
        (faster(&writes, "fio many", "fio large"), faster(&reads, "fio direct", "fio cached"));
    let name = |what: &str| what.to_owned();
    Ok(vec![
        told(name("write 1 GiB, fio, 16 blocks of 1 MiB at once"), rate(&writes, "fio many"), "GB/s"),
        told(name("write 1 GiB, fio, blocks of 8 MiB"), rate(&writes, "fio large"), "GB/s"),
        told(name("write 1 GiB, torch.distributed.checkpoint"), rate(&writes, "torch"), "GB/s"),
        told(name("write 1 GiB, zero-checkpoint"), rate(&writes, "own"), "GB/s"),
        judged(name("write against the faster of fio"), writes.ratio(writer, "own"), "x", 0.9),
        judged(name("write against torch.distributed.checkpoint"), writes.ratio("torch", "own"), "x", 1.5),
        told(name("read 1 GiB, fio past the page cache"), rate(&reads, "fio direct"), "GB/s"),
        told(name("read 1 GiB, fio through the page cache"), rate(&reads, "fio cached"), "GB/s"),
        told(name("read 1 GiB, torch.distributed.checkpoint"), rate(&reads, "torch"), "GB/s"),
        told(name("read 1 GiB, zero-checkpoint"), rate(&reads, "own"), "GB/s"),
        judged(name("read against the faster of fio"), reads.ratio(reader, "own"), "x", 0.9),
        told(name("read against torch.distributed.checkpoint"), reads.ratio("torch", "own"), "x"),
        told(name("one memcpy of the state"), stalls.seconds("memcpy").map(|seconds| seconds * 1e3), "ms"),
        told(
            name("stall of an asynchronous save"),
            stalls.seconds("stall").map(|seconds| seconds * 1e3),
            "ms",
        ),
        judged(name("memcpy against stall"), stalls.ratio("memcpy", "stall"), "x", 1.0 / 1.05),
    ])
}

/// A state, and where its checkpoints are.
struct Own {
    storage: Arc<dyn Storage>,
    folder: PathBuf,
    saver: Saver,
    state: Vec<[Vec<f32>; 3]>,
    step: u64,
}

impl Own {
    fn new(folder: &std::path::Path) -> Result<Self, Box<dyn Error>> {
        let folder = folder.join("own");
        let storage: Arc<dyn Storage> = Arc::new(LocalStorage::new(&folder));
        let saver = Saver::new(Arc::clone(&storage), Arc::new(Solo), SaverOptions::default())?;
        let numbers = |seed: usize| -> Vec<f32> {
            (0..NUMEL).map(|index| (index * 2_654_435_761 + seed) as u32 as f32).collect()
        };
        let state =
            (0..COUNT).map(|at| [numbers(3 * at), numbers(3 * at + 1), numbers(3 * at + 2)]).collect();
        Ok(Self { storage, folder, saver, state, step: 0 })
    }

    fn write(&mut self) -> Result<f64, Box<dyn Error>> {
        self.step += 1;
        self.remove_old()?;
        let contents = contents(&self.state, self.step);
        let begun = Instant::now();
        self.saver.save(&contents)?;
        Ok(begun.elapsed().as_secs_f64())
    }

    fn read(&mut self) -> Result<f64, Box<dyn Error>> {
        forget(&self.folder.join(format!("step-{:010}", self.step)))?;
        let begun = Instant::now();
        let checkpoint = Checkpoint::open_latest(Arc::clone(&self.storage))?;
        checkpoint.load(wanted(&mut self.state), &LoadOptions::default(), &Solo)?;
        Ok(begun.elapsed().as_secs_f64())
    }

    /// A copy of all of the state, and the call of an asynchronous save, whose writing ends before the next turn.
    fn stalls(&mut self) -> Result<Samples, Box<dyn Error>> {
        let mut copy = vec![0u8; BYTES as usize];
        let Self { state, saver, .. } = self;
        let mut step = self.step;
        saver.reserve(&contents(state, step))?;
        let memcpy = || {
            let begun = Instant::now();
            let mut rest = copy.as_mut_slice();
            for tensor in state.iter().flatten() {
                let (part, later) = rest.split_at_mut(NUMEL * 4);
                part.copy_from_slice(bytemuck::cast_slice(tensor));
                rest = later;
            }
            Ok(begun.elapsed().as_secs_f64())
        };
        let stall = || {
            step += 1;
            let contents = contents(state, step);
            let begun = Instant::now();
            let pending = saver.save_async(&contents)?;
            let seconds = begun.elapsed().as_secs_f64();
            let saved = pending.wait()?;
            std::fs::remove_dir_all(self.folder.join(saved.folder))?;
            Ok(seconds)
        };
        Samples::take("stall", vec![("memcpy", Box::new(memcpy)), ("stall", Box::new(stall))])
    }

    /// Makes room; the time that takes is nobody's.
    fn remove_old(&self) -> Result<(), Box<dyn Error>> {
        for name in self.storage.list("")? {
            self.storage.remove_folder(&name)?;
        }
        Ok(())
    }
}

fn spec(at: usize) -> ParameterSpec {
    ParameterSpec {
        name: format!("blocks.{at}.weight"),
        shape: vec![NUMEL],
        dtype: DType::F32,
        trainable: true,
        aliases: vec![],
    }
}

const STATES: [&str; 2] = ["first_moment", "second_moment"];

fn contents(state: &[[Vec<f32>; 3]], step: u64) -> Contents<'_> {
    let mut parameters = Vec::new();
    for (at, [values, first, second]) in state.iter().enumerate() {
        let states = STATES
            .iter()
            .zip([first, second])
            .map(|(name, state)| SavedState { name: (*name).to_owned(), data: Data::f32(state) });
        parameters.push(SavedParameter {
            spec: spec(at),
            layout: WeightLayout::Plain,
            group: None,
            updates: step,
            held: Held::Part(0..NUMEL),
            values: Data::f32(values),
            states: states.collect(),
        });
    }
    Contents { facts: Facts::new(step, Stage::Three), rank_state: Value::Null, parameters }
}

fn wanted(state: &mut [[Vec<f32>; 3]]) -> Wanted<'_> {
    let mut parameters = Vec::new();
    for (at, [values, first, second]) in state.iter_mut().enumerate() {
        let states = STATES
            .iter()
            .zip([first, second])
            .map(|(name, state)| WantedState { name: (*name).to_owned(), target: Target::f32(state) });
        parameters.push(WantedParameter {
            spec: spec(at),
            layout: WeightLayout::Plain,
            range: 0..NUMEL,
            states: states.collect(),
            values: Target::f32(values),
        });
    }
    Wanted { parameters }
}
