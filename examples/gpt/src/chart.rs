//! The loss curve as a picture.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::{BLUE, ChartBuilder, IntoDrawingArea as _, LineSeries, RED, SVGBackend, WHITE};

/// Draws the training loss of each step, and the held-out loss as a level line, in bits per byte.
///
/// # Errors
///
/// When the file cannot be written.
pub fn draw(path: &Path, losses: &[f64], held_out: f64) -> Result<()> {
    let failed = |error: &dyn std::fmt::Display| anyhow!("cannot draw {}: {error}", path.display());
    let finite = losses.iter().chain([&held_out]).copied().filter(|loss| loss.is_finite());
    let highest = finite.fold(1.0, f64::max) * 1.05;
    let area = SVGBackend::new(path, (800, 480)).into_drawing_area();
    area.fill(&WHITE).map_err(|error| failed(&error))?;
    let mut chart = ChartBuilder::on(&area)
        .caption("loss, bits per byte (blue: training, red: held out)", ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(48)
        .build_cartesian_2d(1..losses.len().max(2), 0.0..highest)
        .map_err(|error| failed(&error))?;
    chart.configure_mesh().x_desc("step").draw().map_err(|error| failed(&error))?;
    let curve = losses.iter().enumerate().map(|(step, &loss)| (step + 1, loss));
    chart.draw_series(LineSeries::new(curve, &BLUE)).map_err(|error| failed(&error))?;
    let level = [(1, held_out), (losses.len().max(2), held_out)];
    chart.draw_series(LineSeries::new(level, &RED)).map_err(|error| failed(&error))?;
    area.present().map_err(|error| failed(&error))
}
