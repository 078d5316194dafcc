//! One training run, from its settings to its last line of output.

use std::env;
use std::io::Write as _;
use std::iter;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use burn::tensor::Device;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use zero_burn::launcher::{self, LaunchOptions};
use zero_burn::{Bytes, LocalWorld, Rank, World};

use crate::corpus::Corpus;
use crate::learner::{Learner, Progress};
use crate::metrics::{Metrics, Record};
use crate::plain::Plain;
use crate::settings::Settings;
use crate::sharded::Sharded;
use crate::{chart, report, sample};

const CHART: &str = "gpt-loss.svg";
const PROMPT: &[u8] = b"/// The ";
/// Without a terminal, so many lines tell of the whole run.
const PLAIN_LINES: usize = 20;

/// Prints a line, like `println!`, but what goes wrong is an error of the calling function. Nobody reading any more is not
/// one: a run is worth finishing without an audience.
macro_rules! say {
    ($($arguments:tt)*) => {
        match writeln!(std::io::stdout(), $($arguments)*) {
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
                return Err(anyhow!("cannot write to the standard output: {error}"));
            }
            _ => {}
        }
    };
}

/// Trains as `settings` say, and prints what came of it.
///
/// # Errors
///
/// Names the cause: settings that cannot work, a corpus without text, a rank that failed.
pub fn run(settings: &Settings) -> Result<ExitCode> {
    let launched = if settings.plain { None } else { World::from_env()? };
    let world = match launched {
        None if settings.processes => return processes(settings),
        None => World::Local(LocalWorld::new(settings.world_size())),
        Some(world) => world,
    };
    let ranks = world.size().get();
    let asked = settings.ranks.unwrap_or(ranks);
    ensure!(asked == ranks || settings.plain, "--ranks says {asked}, but the launcher started {ranks}");
    // Of several processes, one speaks.
    let speaks = world.rank().is_none_or(|rank| rank == Rank::ROOT);
    let corpus = Corpus::read(&settings.corpus, settings.model.context)?;
    if let Some(path) = &settings.metrics {
        ensure!(
            !corpus.contains(path),
            "the metrics would overwrite {}, which is in the corpus",
            path.display()
        );
    }
    let metrics = Metrics::create(settings.metrics.as_deref().filter(|_| speaks))?;
    if speaks {
        say!(
            "corpus: {} files, {} bytes to train on, {} held out",
            corpus.files(),
            corpus.train_bytes(),
            corpus.held_out_bytes()
        );
    }
    let device = Device::default();
    if settings.plain {
        say!("training with Burn alone, {} rows per step", settings.train.batch);
        let mut learner = Plain::new(settings, device.clone());
        let observer = Observer::new(settings, metrics);
        let curve = train_steps(&mut learner, settings, &corpus, Some(observer))?;
        finish(&learner, settings, &curve, &device)?;
        return Ok(ExitCode::SUCCESS);
    }
    if speaks {
        say!(
            "training at {} on {ranks} ranks, {} rows per step in all",
            settings.zero.stage,
            settings.train.batch
        );
    }
    let observer = std::sync::Mutex::new(Some(Observer::new(settings, metrics)));
    world
        .with_deadline(settings.zero.deadline())
        .run(|comm| -> Result<()> {
            let mut learner = Sharded::new(settings, &comm, device.clone())?;
            let root = comm.rank() == Rank::ROOT;
            // Rank 0 alone reports.
            let observer =
                if root { observer.lock().map_err(|_| anyhow!("a rank failed"))?.take() } else { None };
            let curve = train_steps(&mut learner, settings, &corpus, observer)?;
            if root {
                finish(&learner, settings, &curve, &device)?;
                if let (Some(measured), Ok(layout)) = (curve.last.memory, learner.zero().layout()) {
                    say!("{}", report::memory_table(&layout, settings.zero.stage, &measured)?);
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
) -> Result<Curve> {
    let mut train = Vec::new();
    let mut last = Progress { loss: f64::NAN, grad_norm: f64::NAN, memory: None };
    for step in 0..settings.train.steps {
        let begin = Instant::now();
        last = learner.step(step, corpus)?;
        train.push(last.loss);
        if let Some(observer) = &mut observer {
            observer.step(step, &last, settings, begin.elapsed())?;
        }
    }
    if let Some(observer) = observer {
        observer.bar.finish_and_clear();
    }
    let rows = corpus.held_out_rows(settings.train.held_out_rows);
    let held_out = learner.evaluate(&rows)?;
    Ok(Curve { train, held_out, last })
}

fn finish(learner: &dyn Learner, settings: &Settings, curve: &Curve, device: &Device) -> Result<()> {
    let bits = |nats: f64| nats / std::f64::consts::LN_2;
    let losses: Vec<f64> = curve.train.iter().map(|&loss| bits(loss)).collect();
    say!(
        "loss: {:.4} bits per byte in training (first step {:.4}), {:.4} held out",
        bits(curve.last.loss),
        losses.first().copied().unwrap_or(f64::NAN),
        bits(curve.held_out)
    );
    let text = sample::generate(
        &learner.model(),
        &settings.model,
        PROMPT,
        settings.train.sample,
        settings.zero.seed,
        device,
    );
    say!("sample:\n{}", text.escape_debug().to_string().replace("\\n", "\n").replace("\\\"", "\""));
    match chart::draw(Path::new(CHART), &losses, bits(curve.held_out)) {
        Ok(()) => say!("loss curve: {CHART}"),
        // What was trained is told all the same.
        Err(error) => eprintln!("warning: {error}"),
    }
    Ok(())
}

/// Shows and records progress.
struct Observer {
    bar: ProgressBar,
    metrics: Metrics,
    lines: bool,
}

impl Observer {
    fn new(settings: &Settings, metrics: Metrics) -> Self {
        let target = ProgressDrawTarget::stderr();
        let lines = target.is_hidden();
        let bar = ProgressBar::with_draw_target(Some(settings.train.steps as u64), target);
        if let Ok(style) = ProgressStyle::with_template("{bar:32} {pos}/{len} {elapsed}/{duration} {msg}") {
            bar.set_style(style);
        }
        Self { bar, metrics, lines }
    }

    fn step(&mut self, step: usize, progress: &Progress, settings: &Settings, took: Duration) -> Result<()> {
        let tokens = (settings.train.batch * settings.model.context) as f64 / took.as_secs_f64();
        let resident = memory_stats::memory_stats().map_or(0, |memory| memory.physical_mem as u64);
        let told = format!(
            "loss {:.4} bits/byte  {tokens:.0} tokens/s  {} resident",
            progress.loss / std::f64::consts::LN_2,
            Bytes::new(resident)
        );
        self.metrics.write(&Record::new(step + 1, progress, settings.lr(step), tokens))?;
        let steps = settings.train.steps;
        if self.lines
            && ((step + 1).is_multiple_of(steps.div_ceil(PLAIN_LINES)) || step == 0 || step + 1 == steps)
        {
            say!("step {}/{steps}  {told}", step + 1);
        }
        self.bar.set_message(told);
        self.bar.inc(1);
        Ok(())
    }
}
