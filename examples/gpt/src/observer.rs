//! Progress, shown and recorded.

use std::time::Duration;

use anyhow::Result;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use zero_burn::Bytes;

use crate::learner::{EngineProgress, Progress};
use crate::metrics::{Metrics, Record};
use crate::settings::Settings;

/// Without a terminal, so many lines tell of the whole run, and one more of each step that was skipped.
const PLAIN_LINES: usize = 20;

/// Shows and records progress.
#[derive(Debug)]
pub struct Observer {
    bar: ProgressBar,
    metrics: Metrics,
    lines: bool,
}

impl Observer {
    /// A progress bar where there is a terminal, lines where there is none.
    pub fn new(settings: &Settings, metrics: Metrics) -> Self {
        let target = ProgressDrawTarget::stderr();
        let lines = target.is_hidden();
        let bar = ProgressBar::with_draw_target(Some(settings.train.steps as u64), target);
        if let Ok(style) = ProgressStyle::with_template("{bar:32} {pos}/{len} {elapsed}/{duration} {msg}") {
            bar.set_style(style);
        }
        Self { bar, metrics, lines }
    }

    /// Goes on after so many steps.
    ///
    /// # Errors
    ///
    /// When the metrics cannot be read or written.
    pub fn resume(&mut self, taken: usize) -> Result<()> {
        self.bar.set_position(taken as u64);
        self.metrics.keep(taken)
    }

    /// Takes in what a step gave that took so long; `step` counts from 0.
    ///
    /// # Errors
    ///
    /// When the metrics or the standard output cannot be written.
    pub fn step(
        &mut self,
        step: usize,
        progress: &Progress,
        settings: &Settings,
        took: Duration,
    ) -> Result<()> {
        let tokens = (settings.train.batch * settings.model.context) as f64 / took.as_secs_f64();
        let precision = settings.zero.precision.compute;
        self.metrics.write(&Record::new(step + 1, progress, precision, tokens))?;
        let skipped = progress.engine.as_ref().filter(|engine| !engine.applied).map(skipped);
        let steps = settings.train.steps;
        let told = skipped.clone().unwrap_or_else(|| {
            let resident = memory_stats::memory_stats().map_or(0, |memory| memory.physical_mem as u64);
            format!(
                "loss {:.4} bits/byte  {tokens:.0} tokens/s  {} resident",
                progress.loss / std::f64::consts::LN_2,
                Bytes::new(resident)
            )
        });
        let is_turn =
            (step + 1).is_multiple_of(steps.div_ceil(PLAIN_LINES)) || step == 0 || step + 1 == steps;
        if self.lines && (is_turn || skipped.is_some()) {
            say!("step {}/{steps}  {told}", step + 1);
        } else if skipped.is_some() {
            self.bar.println(format!("step {}/{steps}  {told}", step + 1));
        }
        self.bar.set_message(told);
        self.bar.inc(1);
        Ok(())
    }

    /// Clears the bar away.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

fn skipped(engine: &EngineProgress) -> String {
    let why = engine
        .not_finite
        .as_ref()
        .map_or_else(|| String::from("a gradient is not finite"), |not_finite| not_finite.to_string());
    format!("skipped: {why}, with a loss scale of {}", engine.loss_scale)
}
