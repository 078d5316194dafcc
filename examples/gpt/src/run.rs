//! One training run, from its settings to its last line of output.

use std::env;
use std::iter;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail, ensure};
use burn::tensor::Device;
use zero_burn::launcher::{self, LaunchOptions};
use zero_burn::{LocalWorld, Rank, World, ZeroError};

use crate::corpus::Corpus;
use crate::learner::{Learner, Progress};
use crate::metrics::Metrics;
use crate::observer::Observer;
use crate::plain::Plain;
use crate::saving::Resume;
use crate::settings::Settings;
use crate::sharded::Sharded;
use crate::trace::{Timeline, TraceFile};
use crate::{chart, report, sample, update};

const CHART: &str = "gpt-loss.svg";
const PROMPT: &[u8] = b"/// The ";

/// Trains as `settings` say, and prints what came of it.
///
/// # Errors
///
/// Names the cause: settings that cannot work, a corpus without text, a rank that failed.
pub fn run(settings: &Settings) -> Result<ExitCode> {
    let launched = if settings.plain { None } else { World::from_env()? };
    let size = launched.as_ref().map_or(settings.world_size(), World::size);
    let followed = settings.deepspeed.as_ref().map(|file| file.follow(settings, size)).transpose()?;
    let settings = followed.as_ref().map_or(settings, |(settings, _)| settings);
    let world = match launched {
        None if settings.processes => return processes(settings),
        None => World::Local(LocalWorld::new(size)),
        Some(world) => world,
    };
    let ranks = size.get();
    let asked = settings.ranks.unwrap_or(ranks);
    ensure!(asked == ranks || settings.plain, "--ranks says {asked}, but the launcher started {ranks}");
    // Of several processes, one speaks.
    let speaks = world.rank().is_none_or(|rank| rank == Rank::ROOT);
    let corpus = Corpus::read(&settings.corpus, settings.model.context)?;
    for (what, path) in [("metrics", &settings.metrics), ("trace", &settings.trace)] {
        let overwrites = path.as_ref().filter(|path| corpus.contains(path));
        if let Some(path) = overwrites {
            bail!("the {what} would overwrite {}, which is in the corpus", path.display());
        }
    }
    let checkpoints = settings.checkpoints.as_ref();
    if let Some(checkpoints) = checkpoints.filter(|_| speaks) {
        checkpoints.prepare()?;
    }
    let resumes = checkpoints.is_some_and(|checkpoints| checkpoints.resume != Resume::Never);
    let metrics = Metrics::open(settings.metrics.as_deref().filter(|_| speaks), resumes)?;
    let trace = settings.trace.as_deref().filter(|_| speaks).map(TraceFile::create).transpose()?;
    if speaks {
        if let Some((_, report)) = &followed {
            say!("{report}");
        }
        say!(
            "corpus: {} files, {} bytes to train on, {} held out",
            corpus.files(),
            corpus.train_bytes(),
            corpus.held_out_bytes()
        );
    }
    let kind = settings.device;
    let device = kind.devices()?.into_iter().next().ok_or(ZeroError::NoDevice { kind })?;
    if settings.plain {
        say!("training with Burn alone, {} rows per step", settings.train.batch);
        let mut learner = Plain::new(settings, device.clone())?;
        let observer = Observer::new(settings, metrics);
        let curve = train_steps(&mut learner, settings, &corpus, Some(observer), 0)?;
        finish(&learner, settings, &curve, &device)?;
        return Ok(ExitCode::SUCCESS);
    }
    if speaks {
        say!(
            "training at {} on {ranks} ranks in {} on {kind}, {} rows per step in all, backwards per step: {}",
            settings.zero.stage,
            settings.zero.precision.compute,
            settings.train.batch,
            settings.train.accumulation
        );
    }
    // Rank 0 alone reports.
    let reporting = Mutex::new((Some(Observer::new(settings, metrics)), trace));
    world
        .with_deadline(settings.zero.deadline())
        .run(|comm| -> Result<()> {
            let device = kind.device_of_rank(&comm)?;
            let mut learner = Sharded::new(settings, &comm, device.clone())?;
            let root = comm.rank() == Rank::ROOT;
            if let (true, Some(plan)) = (root, learner.zero().placement()?) {
                say!("{plan}");
            }
            let (observer, trace) = match root {
                true => std::mem::take(&mut *reporting.lock().map_err(|_| anyhow!("a rank failed"))?),
                false => (None, None),
            };
            let (taken, told) = learner.resume(&corpus)?;
            for line in told.iter().filter(|_| root) {
                say!("{line}");
            }
            let curve = train_steps(&mut learner, settings, &corpus, observer, taken)?;
            if settings.trace.is_some() {
                let timeline = Timeline::collect(learner.zero())?;
                if let Some(file) = trace {
                    file.finish(&timeline)?;
                }
            }
            if root {
                finish(&learner, settings, &curve, &device)?;
                if let Some(engine) = &curve.last.engine {
                    let (layout, cost) = (learner.zero().layout()?, update::cost(settings));
                    let mut zero = settings.zero.clone();
                    // What was chosen, where it was left to choose.
                    if let Some(plan) = learner.zero().placement()? {
                        zero.offload = plan.offload;
                    }
                    say!("{}", report::memory_table(&layout, &zero, cost, &engine.memory)?);
                }
            }
            // The other ranks are done here; what rank 0 generates from is left in their windows.
            Ok(())
        })
        .map_err(|error| anyhow!("{error}"))?;
    Ok(ExitCode::SUCCESS)
}

/// Runs this program once more for each rank.
fn processes(settings: &Settings) -> Result<ExitCode> {
    let program = env::current_exe().context("cannot find this program")?;
    let command = iter::once(program.into_os_string()).chain(env::args_os().skip(1));
    let options =
        LaunchOptions::local(settings.world_size().get(), command).map_err(|error| anyhow!("{error}"))?;
    Ok(ExitCode::from(launcher::run(&options)))
}

/// The losses of a run, in nats per byte.
struct Curve {
    train: Vec<f64>,
    held_out: f64,
    last: Progress,
}

fn train_steps(
    learner: &mut dyn Learner,
    settings: &Settings,
    corpus: &Corpus,
    mut observer: Option<Observer>,
    taken: usize,
) -> Result<Curve> {
    if let Some(observer) = &mut observer {
        observer.resume(taken)?;
    }
    let mut train = Vec::new();
    let mut last = Progress { loss: f64::NAN, grad_norm: f64::NAN, lr: f64::NAN, engine: None };
    for step in taken..settings.train.steps {
        let begin = Instant::now();
        last = learner.step(step, corpus)?;
        train.push(last.loss);
        if let Some(observer) = &mut observer {
            observer.step(step, &last, settings, begin.elapsed())?;
        }
        learner.after_step(step + 1)?;
    }
    learner.finish(taken.max(settings.train.steps))?;
    if let Some(observer) = observer {
        observer.finish();
    }
    let rows = corpus.held_out_rows(settings.train.held_out_rows);
    let held_out = learner.evaluate(&rows)?;
    Ok(Curve { train, held_out, last })
}

fn finish(learner: &dyn Learner, settings: &Settings, curve: &Curve, device: &Device) -> Result<()> {
    let bits = |nats: f64| nats / std::f64::consts::LN_2;
    let losses: Vec<f64> = curve.train.iter().map(|&loss| bits(loss)).collect();
    match losses.first() {
        Some(first) => say!(
            "loss: {:.4} bits per byte in training (first step {first:.4}), {:.4} held out",
            bits(curve.last.loss),
            bits(curve.held_out)
        ),
        None => say!("loss: {:.4} bits per byte held out; no step was left to train", bits(curve.held_out)),
    }
    let text = sample::generate(
        &learner.model(),
        &settings.model,
        PROMPT,
        settings.train.sample,
        settings.zero.seed,
        device,
    );
    say!("sample:\n{}", sample::shown(&text));
    if losses.is_empty() {
        return Ok(());
    }
    match chart::draw(Path::new(CHART), &losses, bits(curve.held_out)) {
        Ok(()) => say!("loss curve: {CHART}"),
        // What was trained is told all the same.
        Err(error) => eprintln!("warning: {error}"),
    }
    Ok(())
}
