//! The table of bytes per rank: planned, measured, and what each stage would take.

use std::fmt::Write as _;

use anyhow::Result;
use zero_burn::{Bytes, Layout, MemoryReport, MemorySetup, OptimizerCost, Stage, StateBytes, ZeroConfig};

/// Bytes of the largest rank by category.
pub fn memory_table(
    layout: &Layout,
    config: &ZeroConfig,
    optimizer: OptimizerCost,
    measured: &MemoryReport,
) -> Result<String> {
    let plans = Stage::ALL.map(|stage| {
        let config = ZeroConfig { stage, ..config.clone() };
        (stage, MemorySetup::new(&config, optimizer).plan_largest(layout))
    });
    let mut table = String::new();
    writeln!(table, "bytes of the largest of {} ranks:", layout.world_size())?;
    write!(table, "{:<12}{:>12}", "", "measured")?;
    for (planned, _) in &plans {
        let mark = if *planned == config.stage { "*" } else { "" };
        write!(table, "{:>12}", format!("{planned}{mark}"))?;
    }
    writeln!(table)?;
    type Category = fn(&StateBytes) -> Bytes;
    let categories: [(&str, Category); 4] = [
        ("parameters", |state| state.parameters),
        ("gradients", |state| state.gradients),
        ("optimizer", |state| state.optimizer),
        ("total", StateBytes::total),
    ];
    for (name, bytes) in categories {
        write!(table, "{name:<12}{:>12}", bytes(&measured.state).to_string())?;
        for (_, plan) in &plans {
            write!(table, "{:>12}", bytes(&plan.state).to_string())?;
        }
        writeln!(table)?;
    }
    writeln!(table, "(* planned for this run; gathered at the peak: {})", measured.gathered_peak)?;
    Ok(table)
}
